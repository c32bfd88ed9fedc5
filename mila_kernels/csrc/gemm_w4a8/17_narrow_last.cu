// Change: what is left after the whole waves of tiles of 256 tokens is cut into narrower tiles of 32, 64, 96, 128 or
//   192, at most one a block, in place of along K: no sums pass through L2, and no counters. The narrow tile has a
//   loop of its own, so that the wide ones' knows its number of batches.
// Prediction: gate_up at 1024 tokens pays 7 waves and a tile of 96, half as long as one of 256: 4% faster than cut
//   along K; at 4096 29 waves and one of 32, at 8192 58 and one of 64: 1%. fc_down at 4096 3 waves and one of 192, in
//   place of 5 of 192, at 8192 7 and one of 128, in place of 10 of 192: 5%.
// Measured: H200, 2026-11-30, cold, TFLOP/s, by the benchmark, variants in turns. fc_down 4096 / 8192 1,399 / 1,378
//   (all in tiles of 192 1,326 / 1,318, cut along K 1,291 / 1,352, in whole tiles of 256 1,341 / 1,331), 2048 in two
//   waves of 256 1,365 (cut along K 1,214); gate_up 512 / 1024 / 2048 / 4096 / 8192 1,320 / 1,362 / 1,371 / 1,393 /
//   1,392 (cut along K 1,195 / - / 1,328 / - / -); 10,240 x 3,840 with 1024 tokens 1,290 (1,133). fc_down 1024 1,341
//   and local_qkv 1,350 are one tile a block and eight waves as before. Where tiles of 192 remain, fc_down with 640
//   tokens, the products as in 14 give 1,132 (as in 15 1,082; with the stage given back early only 1,095). In an
//   earlier run, one step after the other, with 14 to 16 in front of it (in brackets): fc_down 1024 1,350 (1,315,
//   1,335, 1,344), gate_up 1024 / 4096 / 8192 1,356 / 1,384 / 1,358 (1,266 / 1,335 / 1,336, 1,289 / 1,366 / 1,360,
//   1,288 / 1,363 / 1,353), local_qkv 1,333 (1,307, 1,331, 1,338). Recorded in the order of the notebook: gate_up
//   1,351 / 1,376 / 1,369, fc_down 1,333 / 1,374 / 1,358, local_qkv 1,329.
// Verdict: kept, 1 to 14% faster. Three other designs for fc_down at 1024 tokens, where 12 multiprocessors have no
//   tile: 120 tiles of 240 tokens, and 30 of 64 for those 12 to take in turn, 992 (14: 1,291); the same with the
//   narrow tiles' next products in flight while one's are added, 995; the wide tiles in batches of 80 tokens, 1,011.
//   A wide tile is done after 90 us. A group takes 0.35 us in a tile of 64, 0.75 in one of 256: two such tiles are
//   done after 85 us, and half of the 12 have three.
// Architectures: sm_90a
// Instances: y_dtype
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BN = CONSUMERS * 64, BK = GROUP;  // weight rows and columns of a tile
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// A tile of BM tokens: its batches of products, and as many stages as fit.
template <int TOKENS>
struct Tile {
  static constexpr int BM = TOKENS, BATCH = BM == 256 ? 128 : BM, BATCHES = BM / BATCH;
  static constexpr int STAGES = BM == 256 ? 4 : BM == 192 ? 5 : 7;
};

template <typename TILE>
struct Smem {
  static constexpr int BM = TILE::BM, STAGES = TILE::STAGES;
  alignas(1024) uint8_t x[STAGES][BM][BK];
  alignas(1024) uint16_t y[CONSUMERS][BM][64];
  alignas(128) uint8_t w[STAGES][CONSUMERS][BLOCK_BYTES];
  uint64_t full[STAGES], empty[STAGES];
  int32_t last[CONSUMERS], owed[CONSUMERS];  // whether a part of this block's was the last of its tile to be done
};

// A tile, or its groups from `first` to before `end`.
struct Part {
  int tile, first, end;
};

// The first `split` tiles, one after another, are a line of groups that is cut into a share a block; the others are
// whole. Of a block's share only the first part starts within a tile, and only the last one ends in one.
struct Shares {
  Tiles tiles;
  int groups, split, count;  // count: of all tiles
  int share, longer;  // groups of a share, and how many of the shares, the first ones, have one more
  DEVICE int start(int block) const { return block * share + min(block, longer); }
  DEVICE int share_of(int block) const { return start(block + 1) - start(block); }
  DEVICE int owner(int group) const {
    const int in_longer = longer * (share + 1);
    return group < in_longer ? group / (share + 1) : longer + (group - in_longer) / share;
  }
};

// The parts of a block's share, one after another.
struct Walk {
  const Shares& shares;
  int tile, first, left;  // left: groups of the share
  DEVICE bool next(Part& part) {
    if (left == 0) return false;
    part = {tile, first, min(shares.groups, first + left)};
    left -= part.end - part.first;
    first = 0;
    ++tile;
    return true;
  }
};
DEVICE Walk walk(const Shares& shares) {
  const int start = shares.start(blockIdx.x), tile = start / shares.groups;
  return {shares, tile, start - tile * shares.groups, shares.start(blockIdx.x + 1) - start};
}

// Groups from `first` to before `end` of a tile: the tokens of one box of the map from `first_m` on.
template <typename TILE>
DEVICE void copy(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, int tile_n, int first_m,
                 int tokens, int first, int end, int& i) {
  constexpr int STAGES = TILE::STAGES;
  const int blocks_n = ceil_div(args.n, 64);
  const int first_block = tile_n * CONSUMERS, blocks = min(CONSUMERS, blocks_n - first_block);
  for (int group = first; group < end; ++group, ++i) {
    const int stage = i % STAGES;
    const uint32_t full = smem_u32(&smem.full[stage]);
    mbarrier_wait(smem_u32(&smem.empty[stage]), (i / STAGES & 1) ^ 1);
    mbarrier_arrive_expect_tx(full, tokens * BK + blocks * BLOCK_BYTES);
    cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage]), &x_map, group * BK, first_m, full);
    const int64_t block = static_cast<int64_t>(group) * blocks_n + first_block;
    cp_async_bulk_g2s(smem_u32(smem.w[stage]), args.w_codes + block * BLOCK_BYTES, blocks * BLOCK_BYTES, full);
  }
}

template <typename TILE>
DEVICE void produce(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Shares& shares) {
  int i = 0;
  Walk share = walk(shares);
  const auto copy_part = [&](const Part& part) {
    const Place place = shares.tiles.place(part.tile);
    copy(smem, x_map, args, place.n, place.m * TILE::BM, TILE::BM, part.first, part.end, i);
  };
  for (Part part; share.next(part);) copy_part(part);
  for (int tile = shares.split + blockIdx.x; tile < shares.count; tile += gridDim.x)
    copy_part({tile, 0, shares.groups});
}

// A block's first codes, of groups from `first` on, on their way to L2.
DEVICE void prefetch_codes(const GemmW4a8Args& args, int tile_n, int first) {
  constexpr int AHEAD = 8;  // groups
  const int end = min(first + AHEAD, args.k / GROUP), blocks_n = ceil_div(args.n, 64), first_block = tile_n * CONSUMERS;
  const int bytes = min(CONSUMERS, blocks_n - first_block) * BLOCK_BYTES;
  for (int group = first; group < end; ++group)
    cp_async_bulk_prefetch_L2(args.w_codes + (int64_t{group} * blocks_n + first_block) * BLOCK_BYTES, bytes);
}

// ---- a tile's parts -------------------------------------------------------------------------------------------------

// Where a warpgroup's sums of a part lie in the scratch: four of a thread are 16 bytes, those of 128 threads a row. A
// block has room for two parts: that which starts a tile, and that which does not.
template <typename TILE>
DEVICE float4* sums_of(const GemmW4a8Args& args, int block, bool starts, int consumer) {
  constexpr int64_t SUMS = TILE::BM * 64;
  return reinterpret_cast<float4*>(args.partials + ((block * 2 + starts) * CONSUMERS + consumer) * SUMS) +
         threadIdx.x % WARPGROUP;
}

template <int BATCHES, int SIZE>
DEVICE void clear(float (&acc)[BATCHES][SIZE]) {
#pragma unroll
  for (int batch = 0; batch < BATCHES; ++batch)
#pragma unroll
    for (float& sum : acc[batch]) sum = 0.0f;
}
// Sums 4 i to 4 i + 3 of a thread's.
template <int BATCHES, int SIZE>
DEVICE float* four_of(float (&acc)[BATCHES][SIZE], int i) {
  return &acc[4 * i / SIZE][4 * i % SIZE];
}
template <int BATCHES, int SIZE>
DEVICE void leave(float4* mine, float (&acc)[BATCHES][SIZE]) {
#pragma unroll
  for (int i = 0; i < BATCHES * SIZE / 4; ++i) {
    const float* four = four_of(acc, i);
    mine[i * WARPGROUP] = make_float4(four[1], four[0], four[3], four[2]);
  }
}
template <int BATCHES, int SIZE>
DEVICE void add(float (&acc)[BATCHES][SIZE], const float4* theirs) {
#pragma unroll
  for (int i = 0; i < BATCHES * SIZE / 4; ++i) {
    const float4 sums = theirs[i * WARPGROUP];
    float* four = four_of(acc, i);
    four[0] += sums.y;
    four[1] += sums.x;
    four[2] += sums.w;
    four[3] += sums.z;
  }
}

// The parts of a tile, a block each; a counter a warpgroup says how many of them lie in the scratch.
struct Parts {
  int first, count;
  uint32_t* arrivals;
};
DEVICE Parts parts_of(const GemmW4a8Args& args, const Shares& shares, int tile, int consumer) {
  const int first = shares.owner(tile * shares.groups), last = shares.owner((tile + 1) * shares.groups - 1);
  return {first, last - first + 1, args.arrivals + tile * CONSUMERS + consumer};
}

// Whether all other parts are there; with `count` 1, this one is, for the warpgroup whose barrier came before.
DEVICE bool arrive(const Parts& parts, uint32_t count) {
  if (count) __threadfence();
  const bool last = atom_global_add_u32(parts.arrivals, count) == parts.count - 1u;
  if (last) __threadfence();
  return last;
}

// All parts' sums, in the order of K; the counter is zero again.
template <typename TILE, int BATCHES, int SIZE>
DEVICE void gather(float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, const Parts& parts, int consumer) {
  clear(acc);
  for (int block = parts.first; block < parts.first + parts.count; ++block)
    add(acc, sums_of<TILE>(args, block, block == parts.first, consumer));
  if (threadIdx.x % WARPGROUP == 0) *parts.arrivals = 0;
}

// The sums of all parts of a tile, for the warpgroup that finds that all others are done; else this one's are left, and
// false. No block waits for another.
template <typename TILE, int BATCHES, int SIZE>
DEVICE bool join(Smem<TILE>& smem, float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, const Parts& parts,
                 bool starts, int consumer) {
  const bool leader = threadIdx.x % WARPGROUP == 0;
  int32_t& last = smem.last[consumer];
  if (leader) last = arrive(parts, 0);
  bar_sync(1 + consumer, WARPGROUP);
  if (__any_sync(ALL_LANES, last) && parts.count == 2) {  // a + b is b + a
    const int other = blockIdx.x == parts.first ? parts.first + 1 : parts.first;
    add(acc, sums_of<TILE>(args, other, other == parts.first, consumer));
    if (leader) *parts.arrivals = 0;
    return true;
  }
  leave(sums_of<TILE>(args, blockIdx.x, starts, consumer), acc);
  bar_sync(1 + consumer, WARPGROUP);
  if (leader) last = arrive(parts, 1);
  bar_sync(1 + consumer, WARPGROUP);
  if (!__any_sync(ALL_LANES, last)) return false;
  gather<TILE>(acc, args, parts, consumer);
  return true;
}

// The products of so many groups, whose first is the i-th of this block, added to what `acc` is. What is known early
// and given back late with two batches a group is, all three together, 4% slower with one: that is as in 14.
template <typename TILE, int BATCHES, int SIZE>
DEVICE void multiply(Smem<TILE>& smem, float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, int tile_n, uint32_t i,
                     int groups, int consumer) {
  constexpr uint32_t STAGES = TILE::STAGES;
  constexpr int BATCH = 2 * SIZE;
  constexpr bool ONE = BATCHES == 1;
  const int my_block = min(consumer, ceil_div(args.n, 64) - tile_n * CONSUMERS - 1);  // of what is stored, the last
  const int thread = threadIdx.x % WARPGROUP;
  // A thread's places in any stage, in registers: they are not computed from its number at every load.
  uint32_t codes_at = my_block * BLOCK_BYTES + thread * 16;
  uint32_t scales_at = my_block * BLOCK_BYTES + BLOCK_CODES + (thread / WARP * 16 + thread % WARP / 4) * 4;
  if constexpr (!ONE) {
    keep_here(codes_at);
    keep_here(scales_at);
  }
  uint4 words[2];
  float next_scale[2];
  const auto descriptor = [&](uint32_t i) {
    return wgmma_descriptor(smem_u32(smem.x[i % STAGES]), 16, 1024, Swizzle::b128);
  };
  uint64_t next_b = 0;
  const auto load = [&](uint32_t i) {
    const uint32_t stage = i % STAGES;
    const uint8_t* w = smem.w[stage][0];
    mbarrier_wait(smem_u32(&smem.full[stage]), i / STAGES & 1);
    for (int half = 0; half < 2; ++half) {
      words[half] = *reinterpret_cast<const uint4*>(w + codes_at + half * (BLOCK_CODES / 2));
      next_scale[half] = *reinterpret_cast<const float*>(w + scales_at + half * 8 * 4);
    }
    next_b = descriptor(i);
  };
  load(i);
  for (int group = 0; group < groups; ++group, ++i) {
    const float scale[2] = {next_scale[0], next_scale[1]};
    uint64_t b = next_b;
    uint32_t a[BK / 32][4];
    unfold(a, words);
    settle(a);
    if constexpr (ONE) b = descriptor(i);
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      float sums[BATCH / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 32; ++k)
        wgmma_k32_e4m3<BATCH>(sums, a[k], wgmma_advance(b, batch * BATCH * BK + k * 32), k);
      wgmma_commit_group();
      if (!ONE && batch == 0 && group > 0) release(smem.empty[(i - 1) % STAGES]);
      if (batch == BATCHES - 1) load(group + 1 < groups ? i + 1 : i);  // the last once more: no branch among products
      wgmma_wait_group<0>();
      if (ONE) release(smem.empty[i % STAGES]);
      add_scaled(acc[batch], scale, sums);
    }
  }
  if (!ONE) release(smem.empty[(i - 1) % STAGES]);
}

template <typename T, typename TILE>
DEVICE void consume(Smem<TILE>& smem, const CUtensorMap& y_map, const GemmW4a8Args& args, const Shares& shares,
                    int consumer) {
  constexpr int BM = TILE::BM, BATCH = TILE::BATCH, BATCHES = TILE::BATCHES;
  const auto store = [&](const float (&acc)[BATCHES][BATCH / 2], const Place& place) {
    store_batches<T>(smem.y[consumer], acc, args, y_map, consumer, (place.n * CONSUMERS + consumer) * 64, place.m * BM);
  };
  const bool leader = threadIdx.x % WARPGROUP == 0;
  float acc_regs[BATCHES][BATCH / 2];
  Walk share = walk(shares);
  int i = 0;
  bool left = false;  // a part of the tile before this part's, of which the others have not been told
  for (Part part; share.next(part);) {
    const Place place = shares.tiles.place(part.tile);
    clear(acc_regs);
    warm_scales<BM>(args, place.m * BM);
    for (int stop = i + part.end - part.first; i < stop;) {
      const int some = left ? 1 : stop - i;
      multiply(smem, acc_regs, args, place.n, i, some, consumer);
      i += some;
      if (!left) continue;
      // By now what was left is on its way, and the other warpgroup multiplies.
      bar_sync(1 + consumer, WARPGROUP);
      if (leader) smem.owed[consumer] = arrive(parts_of(args, shares, part.tile - 1, consumer), 1);
      left = false;
    }
    const bool whole = part.end - part.first == shares.groups;
    if (!whole && share.left) {
      leave(sums_of<TILE>(args, blockIdx.x, false, consumer), acc_regs);
      left = true;
    } else if (whole || join(smem, acc_regs, args, parts_of(args, shares, part.tile, consumer), part.first == 0,
                             consumer)) {
      store(acc_regs, place);
    }
  }
  // Not the counter of above: of this one the compiler sees that all lanes have the same, and computes what the
  // products need of it in uniform registers.
  int j = shares.share_of(blockIdx.x);
  for (int tile = shares.split + blockIdx.x; tile < shares.count; tile += gridDim.x, j += shares.groups) {
    const Place place = shares.tiles.place(tile);
    clear(acc_regs);
    warm_scales<BM>(args, place.m * BM);
    multiply(smem, acc_regs, args, place.n, j, shares.groups, consumer);
    if (shares.groups == 0) leave(sums_of<TILE>(args, blockIdx.x, true, consumer), acc_regs);
    store(acc_regs, place);
  }
  bar_sync(1 + consumer, WARPGROUP);
  if (smem.owed[consumer]) {  // the others were there first, which is rare
    uint32_t block = blockIdx.x;
    keep_here(block);  // no register held it until here
    const int tile = shares.start(block) / shares.groups;
    gather<TILE>(acc_regs, args, parts_of(args, shares, tile, consumer), consumer);
    store(acc_regs, shares.tiles.place(tile));
  }
  if (leader) cp_async_bulk_wait_group<0>();
}

// The barriers, and no part owed.
template <typename TILE>
DEVICE void init(Smem<TILE>& smem) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < TILE::STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), CONSUMERS * WARPGROUP / WARP);
    }
    for (int32_t& owed : smem.owed) owed = false;
    fence_mbarrier_init();
  }
  __syncthreads();
}

template <typename T, typename TILE>
__global__ void __launch_bounds__(THREADS, 1) gemm_parts(const __grid_constant__ CUtensorMap x_map,
                                                            const __grid_constant__ CUtensorMap y_map,
                                                            const GemmW4a8Args args, const Shares shares) {
  Smem<TILE>& smem = dynamic_smem<Smem<TILE>>();
  init(smem);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      const int start = shares.split ? shares.start(blockIdx.x) : blockIdx.x * shares.groups;
      prefetch_codes(args, shares.tiles.place(start / shares.groups).n, start % shares.groups);
      griddepcontrol_wait();
      produce(smem, x_map, args, shares);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();  // not before: so what is before the kernel in front has ended, too
    consume<T>(smem, y_map, args, shares, warpgroup - 1);
  }
}

// ---- narrow tiles after the wide ones -------------------------------------------------------------------------------

// Wide tiles, which are the first rows of the weight in whole waves; the rows from tile `first_n` on in tiles of
// `width` tokens, `across` of them to a tile's rows, `count` in all, of which the block with its number takes one.
struct Work {
  Tiles wide;
  int groups, width, first_n, across, count;
};

// The block's narrow tile.
struct Narrow {
  bool any;
  int n, first_m;
};
DEVICE Narrow narrow_of(const Work& work) {
  const int tile = blockIdx.x;
  return {tile < work.count, work.first_n + tile / work.across, tile % work.across * work.width};
}

// The i-th groups of this block on, of a tile of TOKENS, in the stages of a wide one.
template <typename T, int TOKENS, typename TILE>
DEVICE void consume_tile(Smem<TILE>& smem, const CUtensorMap& y_map, const GemmW4a8Args& args, int tile_n, int first_m,
                         int groups, int i, int consumer) {
  constexpr int BATCH = Tile<TOKENS>::BATCH, BATCHES = Tile<TOKENS>::BATCHES;
  float acc_regs[BATCHES][BATCH / 2] = {};
  warm_scales<TOKENS>(args, first_m);
  multiply(smem, acc_regs, args, tile_n, i, groups, consumer);
  store_batches<T>(smem.y[consumer], acc_regs, args, y_map, consumer, (tile_n * CONSUMERS + consumer) * 64, first_m);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) gemm_narrow_last(const __grid_constant__ CUtensorMap x_map,
                                                               const __grid_constant__ CUtensorMap y_map,
                                                               const __grid_constant__ CUtensorMap narrow_x_map,
                                                               const __grid_constant__ CUtensorMap narrow_y_map,
                                                               const GemmW4a8Args args, const Work work) {
  using TILE = Tile<256>;
  Smem<TILE>& smem = dynamic_smem<Smem<TILE>>();
  init(smem);
  const int warpgroup = threadIdx.x / WARPGROUP, groups = work.groups;
  const Narrow narrow = narrow_of(work);
  int i = 0;
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      if (blockIdx.x < work.wide.count()) prefetch_codes(args, work.wide.place(blockIdx.x).n, 0);
      griddepcontrol_wait();
      for (int tile = blockIdx.x; tile < work.wide.count(); tile += gridDim.x) {
        const Place place = work.wide.place(tile);
        copy(smem, x_map, args, place.n, place.m * TILE::BM, TILE::BM, 0, groups, i);
      }
      if (narrow.any) copy(smem, narrow_x_map, args, narrow.n, narrow.first_m, work.width, 0, groups, i);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int consumer = warpgroup - 1;
    for (int tile = blockIdx.x; tile < work.wide.count(); tile += gridDim.x, i += groups) {
      const Place place = work.wide.place(tile);
      consume_tile<T, TILE::BM>(smem, y_map, args, place.n, place.m * TILE::BM, groups, i, consumer);
    }
    if (narrow.any) {
      const auto consume = [&]<int TOKENS>() {
        consume_tile<T, TOKENS>(smem, narrow_y_map, args, narrow.n, narrow.first_m, groups, i, consumer);
      };
      if (work.width == 32)
        consume.template operator()<32>();
      else if (work.width == 64)
        consume.template operator()<64>();
      else if (work.width == 96)
        consume.template operator()<96>();
      else if (work.width == 128)
        consume.template operator()<128>();
      else
        consume.template operator()<192>();
    }
    if (threadIdx.x % WARPGROUP == 0) cp_async_bulk_wait_group<0>();
  }
}

// What an H200 takes, in units of 10 ns: for a group of columns, for the start and end of a tile, for cutting tiles,
// for each part of a tile above two, and for each group of a share: blocks at other columns share less of L2.
struct Cost {
  int tokens, group, ends;
};
constexpr Cost LARGE = {256, 75, 190}, MIDDLE = {192, 60, 300}, SMALL = {128, 44, 190};
constexpr int CUT = 1500, PART = 200, SPREAD = 12;

// How a launch is done in tiles of a size, and what it costs.
struct Plan {
  int split, blocks;
  int64_t cost;
};
inline Plan plan(const GemmW4a8Args& args, const Cost& cost) {
  const int64_t tiles = static_cast<int64_t>(ceil_div(args.n, BN)) * ceil_div(args.m, cost.tokens);
  const int64_t groups = args.k / GROUP, tile = groups * cost.group + cost.ends;
  const int64_t sms = args.sm_count, rest = tiles % sms;
  const Plan whole = {0, static_cast<int>(min(tiles, sms)), ceil_div(tiles, sms) * tile};
  if (rest == 0 || tiles * groups < sms || groups > 1 << 20) return whole;
  const int64_t split = rest + (tiles > sms ? sms : 0), parts = ceil_div(sms, split) + 1;
  const int64_t cuts = CUT + (parts - 2) * PART + split * groups / sms * SPREAD;
  const Plan cut = {static_cast<int>(split), args.sm_count, ceil_div(tiles * tile, sms) + cuts};
  return cut.cost + cut.cost / 256 < whole.cost ? cut : whole;
}

// Whole waves of tiles of 256 tokens, and the rest in narrow tiles, if these are a block each at most.
struct NarrowCost {
  int tokens, group;
};
constexpr NarrowCost NARROW[] = {{32, 30}, {64, 34}, {96, 40}, {128, 44}, {192, 60}};

struct NarrowPlan {
  int rows, width;  // rows: of 128 of the weight, in wide tiles
  int64_t cost;
};
inline NarrowPlan narrow_plan(const GemmW4a8Args& args) {
  const int rows = ceil_div(args.n, BN), across = ceil_div(args.m, LARGE.tokens), sms = args.sm_count;
  const int64_t groups = args.k / GROUP, waves = static_cast<int64_t>(rows) * across / sms, wide = waves * sms / across;
  NarrowPlan best = {0, 0, INT64_MAX};
  if (wide == 0 || wide == rows) return best;
  for (const NarrowCost& narrow : NARROW) {
    if ((rows - wide) * ceil_div(args.m, narrow.tokens) > sms) continue;
    const int64_t cost = waves * (groups * LARGE.group + LARGE.ends) + groups * narrow.group + LARGE.ends;
    if (cost < best.cost) best = {static_cast<int>(wide), narrow.tokens, cost};
  }
  return best;
}

template <typename T>
const char* launch_narrow(const GemmW4a8Args& args, const NarrowPlan& plan, cudaStream_t stream) {
  CUtensorMap x_map, y_map, narrow_x_map, narrow_y_map;
  if (const char* problem = make_maps<T>(x_map, y_map, args, LARGE.tokens)) return problem;
  if (const char* problem = make_maps<T>(narrow_x_map, narrow_y_map, args, plan.width)) return problem;
  const int rows = ceil_div(args.n, BN), across = ceil_div(args.m, plan.width);
  const Work work = {{plan.rows, ceil_div(args.m, LARGE.tokens)}, args.k / GROUP, plan.width, plan.rows, across,
                     (rows - plan.rows) * across};
  return launch_dependent(gemm_narrow_last<T>, args.sm_count, THREADS, sizeof(Smem<Tile<LARGE.tokens>>), stream, x_map,
                          y_map, narrow_x_map, narrow_y_map, args, work);
}

template <typename T, int TOKENS>
const char* launch_tiles(const GemmW4a8Args& args, const Plan& plan, cudaStream_t stream) {
  using TILE = Tile<TOKENS>;
  CUtensorMap x_map, y_map;
  if (const char* problem = make_maps<T>(x_map, y_map, args, TOKENS)) return problem;
  const int groups = args.k / GROUP, line = plan.split * groups;
  const Tiles tiles = {ceil_div(args.n, BN), ceil_div(args.m, TOKENS)};
  const Shares shares = {tiles, groups, plan.split, tiles.n * tiles.m, line / plan.blocks, line % plan.blocks};
  return launch_dependent(gemm_parts<T, TILE>, plan.blocks, THREADS, sizeof(Smem<TILE>), stream, x_map, y_map, args,
                          shares);
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_y_dtype(*args, [&]<typename T>() -> const char* {
    const NarrowPlan narrow = narrow_plan(*args);
    const Plan large = plan(*args, LARGE), middle = plan(*args, MIDDLE), small = plan(*args, SMALL);
    if (narrow.cost < min(large.cost, min(middle.cost, small.cost))) return launch_narrow<T>(*args, narrow, stream);
    if (large.cost <= min(middle.cost, small.cost)) return launch_tiles<T, 256>(*args, large, stream);
    return middle.cost <= small.cost ? launch_tiles<T, 192>(*args, middle, stream)
                                     : launch_tiles<T, 128>(*args, small, stream);
  });
}
