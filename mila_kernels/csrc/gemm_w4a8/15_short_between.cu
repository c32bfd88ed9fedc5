// Change: less stands between two groups' products. A stage is given back beside the next group's products; what the
//   next group needs, its descriptor and a thread's places in a stage, is known before the wait for this one's. Only
//   the additions and the unfolding are left there.
// Prediction: some 60 clocks of 1,300 a group: 3 to 5% where the tensor cores are not yet busy. To unfold beside the
//   products too was to bring 10%.
// Measured: H200, 2026-11-30, cold, TFLOP/s. Variants in turns, at 540 to 690 W: gate_up 1024 / 4096 1,255 / 1,248 (14:
//   1,205 / 1,211), 4096 under load 1,158 (1,131), local_qkv 1,194 (1,155), fc_down 1024 1,308 (1,298). By the
//   benchmark: fc_down 1024 1,332 (1,314). In tiles of 192 tokens, prototypes that differ in this only: fc_down 4096 /
//   8192 1,232 / 1,179 (without: 1,241 / 1,201).
// Verdict: kept, 1 to 4% faster. In tiles of 192 tokens it is 1 to 2% slower. Unfolding beside the products was slower
//   in four forms: held before their wait by a store that never runs 1,082 at gate_up 4096, with all of this step 1,141
//   (14 in turns with them: 1,253), the second warpgroup 256 clocks behind 1,027; half of it beside each of a group's
//   two batches 1,152 (this step in turns with it: 1,249). Stamps of a block's clock say why. The two warpgroups'
//   batches alternate at the tensor cores, whoever waits longer first. A batch takes its 256 clocks if it was issued
//   before the other's end, else 330. From a batch's end to the next one's start it was 200 clocks in 14, for 64
//   additions, which beside the other's products take three clocks each; between groups 390. What is unfolded beside a
//   warpgroup's own products goes beside the other's additions: it takes 400 clocks, and then its own batch, long done,
//   waits for it. Three other designs were not faster: additions row by row, so that a scale is read once, 1,223 at
//   gate_up 4096 (1,249); a delay of 128 to 512 clocks between the warpgroups, -2 to 2%; pairs of blocks that share a
//   tile of tokens by multicast, 1,068 at gate_up 4096 (1,253), 793 at fc_down 8192 (1,113). Fewer clocks for the
//   additions are next.
// Architectures: sm_90a
// Instances: y_dtype
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BN = CONSUMERS * 64, BK = GROUP;  // weight rows and columns of a tile
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// A tile of BM tokens: its batches of products, and as many stages as fit.
template <int TOKENS>
struct Tile {
  static constexpr int BM = TOKENS, BATCH = BM == 192 ? 192 : 128, BATCHES = BM / BATCH;
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

template <typename TILE>
DEVICE void copy(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Shares& shares,
                 const Part& part, int& i) {
  constexpr int BM = TILE::BM, STAGES = TILE::STAGES;
  const int blocks_n = ceil_div(args.n, 64);
  const Place place = shares.tiles.place(part.tile);
  const int first_block = place.n * CONSUMERS, blocks = min(CONSUMERS, blocks_n - first_block);
  for (int group = part.first; group < part.end; ++group, ++i) {
    const int stage = i % STAGES;
    const uint32_t full = smem_u32(&smem.full[stage]);
    mbarrier_wait(smem_u32(&smem.empty[stage]), (i / STAGES & 1) ^ 1);
    mbarrier_arrive_expect_tx(full, BM * BK + blocks * BLOCK_BYTES);
    cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage]), &x_map, group * BK, place.m * BM, full);
    const int64_t block = static_cast<int64_t>(group) * blocks_n + first_block;
    cp_async_bulk_g2s(smem_u32(smem.w[stage]), args.w_codes + block * BLOCK_BYTES, blocks * BLOCK_BYTES, full);
  }
}

template <typename TILE>
DEVICE void produce(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Shares& shares) {
  int i = 0;
  Walk share = walk(shares);
  for (Part part; share.next(part);) copy(smem, x_map, args, shares, part, i);
  for (int tile = shares.split + blockIdx.x; tile < shares.count; tile += gridDim.x)
    copy(smem, x_map, args, shares, {tile, 0, shares.groups}, i);
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

// The products of so many groups, whose first is the i-th of this block, added to what `acc` is.
template <typename TILE, int BATCHES, int SIZE>
DEVICE void multiply(Smem<TILE>& smem, float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, const Place& place,
                     uint32_t i, int groups, int consumer) {
  constexpr uint32_t STAGES = TILE::STAGES;
  constexpr int BATCH = TILE::BATCH;
  const int my_block = min(consumer, ceil_div(args.n, 64) - place.n * CONSUMERS - 1);  // of what is stored, the last
  const int thread = threadIdx.x % WARPGROUP;
  // A thread's places in any stage, in registers: they are not computed from its number at every load.
  uint32_t codes_at = my_block * BLOCK_BYTES + thread * 16;
  uint32_t scales_at = my_block * BLOCK_BYTES + BLOCK_CODES + (thread / WARP * 16 + thread % WARP / 4) * 4;
  keep_here(codes_at);
  keep_here(scales_at);
  uint4 words[2];
  float next_scale[2];
  uint64_t next_b = 0;
  const auto load = [&](uint32_t i) {
    const uint32_t stage = i % STAGES;
    const uint8_t* w = smem.w[stage][0];
    mbarrier_wait(smem_u32(&smem.full[stage]), i / STAGES & 1);
    for (int half = 0; half < 2; ++half) {
      words[half] = *reinterpret_cast<const uint4*>(w + codes_at + half * (BLOCK_CODES / 2));
      next_scale[half] = *reinterpret_cast<const float*>(w + scales_at + half * 8 * 4);
    }
    next_b = wgmma_descriptor(smem_u32(smem.x[stage]), 16, 1024, Swizzle::b128);
  };
  load(i);
  for (int group = 0; group < groups; ++group, ++i) {
    const float scale[2] = {next_scale[0], next_scale[1]};
    const uint64_t b = next_b;
    uint32_t a[BK / 32][4];
    unfold(a, words);
    settle(a);
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      float sums[BATCH / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 32; ++k)
        wgmma_k32_e4m3<BATCH>(sums, a[k], wgmma_advance(b, batch * BATCH * BK + k * 32), k);
      wgmma_commit_group();
      if (batch == 0 && group > 0) release(smem.empty[(i - 1) % STAGES]);
      if (batch == BATCHES - 1) load(group + 1 < groups ? i + 1 : i);  // the last once more: no branch among products
      wgmma_wait_group<0>();
      add_scaled(acc[batch], scale, sums);
    }
  }
  release(smem.empty[(i - 1) % STAGES]);
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
      multiply(smem, acc_regs, args, place, i, some, consumer);
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
    multiply(smem, acc_regs, args, place, j, shares.groups, consumer);
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

template <typename T, typename TILE>
__global__ void __launch_bounds__(THREADS, 1) gemm_short_between(const __grid_constant__ CUtensorMap x_map,
                                                            const __grid_constant__ CUtensorMap y_map,
                                                            const GemmW4a8Args args, const Shares shares) {
  constexpr int STAGES = TILE::STAGES;
  Smem<TILE>& smem = dynamic_smem<Smem<TILE>>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), CONSUMERS * WARPGROUP / WARP);
    }
    for (int32_t& owed : smem.owed) owed = false;
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(smem, x_map, args, shares);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume<T>(smem, y_map, args, shares, warpgroup - 1);
  }
}

// What an H200 takes, in units of 10 ns: for a group of columns, for the start and end of a tile, for cutting tiles,
// and for each part of a tile above two.
struct Cost {
  int tokens, group, ends;
};
constexpr Cost LARGE = {256, 87, 190}, MIDDLE = {192, 61, 300}, SMALL = {128, 44, 190};
constexpr int CUT = 1500, PART = 200;

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
  const Plan cut = {static_cast<int>(split), args.sm_count, ceil_div(tiles * tile, sms) + CUT + (parts - 2) * PART};
  return cut.cost + cut.cost / 256 < whole.cost ? cut : whole;
}

template <typename T, int TOKENS>
const char* launch_tiles(const GemmW4a8Args& args, const Plan& plan, cudaStream_t stream) {
  using TILE = Tile<TOKENS>;
  CUtensorMap x_map, y_map;
  if (const char* problem = make_maps<T>(x_map, y_map, args, TOKENS)) return problem;
  const int groups = args.k / GROUP, line = plan.split * groups;
  const Tiles tiles = {ceil_div(args.n, BN), ceil_div(args.m, TOKENS)};
  const Shares shares = {tiles, groups, plan.split, tiles.n * tiles.m, line / plan.blocks, line % plan.blocks};
  return launch(gemm_short_between<T, TILE>, plan.blocks, THREADS, sizeof(Smem<TILE>), stream, x_map, y_map, args,
                shares);
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_y_dtype(*args, [&]<typename T>() -> const char* {
    const Plan large = plan(*args, LARGE), middle = plan(*args, MIDDLE), small = plan(*args, SMALL);
    if (large.cost <= min(middle.cost, small.cost)) return launch_tiles<T, 256>(*args, large, stream);
    return middle.cost <= small.cost ? launch_tiles<T, 192>(*args, middle, stream)
                                     : launch_tiles<T, 128>(*args, small, stream);
  });
}
