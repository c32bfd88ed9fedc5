// Change: what is left after the whole waves of tiles is cut along K, so that all SMs have work to the end (stream-K).
//   A block each multiplies the head of a tile, in step with the others, which shares what is read in L2; the blocks
//   that have no tile take the rest, piece by piece. Sums pass through L2, and whoever is there last adds them, in the
//   order of K: no block waits for another, and the same bits come out whoever it is.
// Prediction: gate_up has 7.3 waves of tiles of 256 at 1024 tokens, 29.1 at 4096, 58.2 at 8192, and pays 8, 30, 59;
//   fc_down has 0.9 and 7.3 at 1024 and 8192. A part's way through L2 costs some 3 us, of 22 for a tile of gate_up, of
//   90 for one of fc_down: gate_up 7%, 2% and 1% faster, fc_down 5% at 1024, 3% at 8192.
// Measured: not yet in this form.
// Verdict: rejected until it is measured.
// Architectures: sm_90a
// Predecessor: 12_codes_early
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

// Tiles in whole waves, then those that are left, which are cut: a block each multiplies their first `head` groups, the
// blocks that have no tile, the helpers, take the `pieces` equal pieces of the rest in turn.
struct Cut {
  Tiles tiles;
  int groups, waves, whole, count;  // count: of tiles that are cut, after the whole ones
  int head, pieces, helpers;
  int size, more;  // groups of a piece, and how many of a tile's pieces, the first ones, have one more
};

// A part of the `tile`-th of the tiles that are cut: groups from `first` to before `end`. Part 0 is the head.
struct Part {
  int tile, part, first, end;
};
// This block's i-th part, false if there is none. No division, and nothing that the uniform datapath has not: with
// counters in the lanes' registers, from which each product's descriptor is then moved, there are more waits.
DEVICE bool find(Part& found, const Cut& cut, int i) {
  const int block = blockIdx.x, tiles = cut.count;
  if (block < tiles) {
    found = {block, 0, 0, cut.head};
    return i == 0;
  }
  int tile = block - tiles + i * cut.helpers, piece = 0;
  if (block - tiles >= cut.helpers) return false;
  for (; tile >= tiles && piece < cut.pieces; ++piece) tile -= tiles;
  const int first = cut.head + piece * cut.size + min(piece, cut.more);
  found = {tile, 1 + piece, first, first + cut.size + (piece < cut.more)};
  return piece < cut.pieces;
}

template <typename TILE>
DEVICE void copy(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Place& place, int first,
                 int end, int& i) {
  constexpr int BM = TILE::BM, STAGES = TILE::STAGES;
  const int blocks_n = ceil_div(args.n, 64);
  const int first_block = place.n * CONSUMERS, blocks = min(CONSUMERS, blocks_n - first_block);
  const uint8_t* w = args.w_codes + (static_cast<int64_t>(first) * blocks_n + first_block) * BLOCK_BYTES;
#pragma unroll 1
  for (int group = first; group < end; ++group, ++i, w += int64_t{blocks_n} * BLOCK_BYTES) {
    const int stage = i % STAGES;
    const uint32_t full = smem_u32(&smem.full[stage]);
    mbarrier_wait(smem_u32(&smem.empty[stage]), (i / STAGES & 1) ^ 1);
    mbarrier_arrive_expect_tx(full, BM * BK + blocks * BLOCK_BYTES);
    cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage]), &x_map, group * BK, place.m * BM, full);
    cp_async_bulk_g2s(smem_u32(smem.w[stage]), w, blocks * BLOCK_BYTES, full);
  }
}

template <typename TILE>
DEVICE void produce(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Cut& cut) {
  int i = 0;
  for (int tile = blockIdx.x; tile < cut.whole; tile += gridDim.x)
    copy(smem, x_map, args, cut.tiles.place(tile), 0, cut.groups, i);
  Part part;
  for (int n = 0; find(part, cut, n); ++n)
    copy(smem, x_map, args, cut.tiles.place(cut.whole + part.tile), part.first, part.end, i);
}

// ---- a tile's parts -------------------------------------------------------------------------------------------------

// Where a warpgroup's sums of a part lie in the scratch: four of a thread are 16 bytes, those of 128 threads a row.
template <typename TILE>
DEVICE float4* sums_of(const GemmW4a8Args& args, const Cut& cut, int tile, int part, int consumer) {
  constexpr int64_t SUMS = TILE::BM * 64;
  const int place = (tile * (1 + cut.pieces) + part) * CONSUMERS + consumer;
  return reinterpret_cast<float4*>(args.partials + place * SUMS) + threadIdx.x % WARPGROUP;
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

// Whether all other parts of a tile lie in the scratch; with `count` 1, this one does, for the warpgroup whose barrier
// came before.
DEVICE bool arrive(const GemmW4a8Args& args, const Cut& cut, int tile, int consumer, uint32_t count) {
  __threadfence();
  const bool last = atom_global_add_u32(args.arrivals + tile * CONSUMERS + consumer, count) == cut.pieces;
  __threadfence();
  return last;
}

// All parts' sums, in the order of K; the counter is zero again.
template <typename TILE, int BATCHES, int SIZE>
DEVICE void gather(float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, const Cut& cut, int tile, int consumer) {
  clear(acc);
  for (int part = 0; part <= cut.pieces; ++part) add(acc, sums_of<TILE>(args, cut, tile, part, consumer));
  if (threadIdx.x % WARPGROUP == 0) args.arrivals[tile * CONSUMERS + consumer] = 0;
}

// The sums of all parts of a tile, for the warpgroup that finds that all others are done; else this one's are left, and
// false. No block waits for another.
template <typename TILE, int BATCHES, int SIZE>
DEVICE bool join(Smem<TILE>& smem, float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, const Cut& cut,
                 const Part& part, int consumer) {
  const bool leader = threadIdx.x % WARPGROUP == 0;
  int32_t& last = smem.last[consumer];
  if (leader) last = arrive(args, cut, part.tile, consumer, 0);
  bar_sync(1 + consumer, WARPGROUP);
  if (part.part == 0 && __any_sync(ALL_LANES, last)) {
    for (int other = 1; other <= cut.pieces; ++other) add(acc, sums_of<TILE>(args, cut, part.tile, other, consumer));
    if (leader) args.arrivals[part.tile * CONSUMERS + consumer] = 0;
    return true;
  }
  leave(sums_of<TILE>(args, cut, part.tile, part.part, consumer), acc);
  bar_sync(1 + consumer, WARPGROUP);
  if (leader) last = arrive(args, cut, part.tile, consumer, 1);
  bar_sync(1 + consumer, WARPGROUP);
  if (!__any_sync(ALL_LANES, last)) return false;
  gather<TILE>(acc, args, cut, part.tile, consumer);
  return true;
}

// The products of so many groups, whose first is the i-th of this block, added to what `acc` is.
template <typename TILE, int BATCHES, int SIZE>
DEVICE void multiply(Smem<TILE>& smem, float (&acc)[BATCHES][SIZE], const GemmW4a8Args& args, const Place& place, int i,
                     int groups, int consumer) {
  constexpr int STAGES = TILE::STAGES, BATCH = TILE::BATCH;
  const int my_block = min(consumer, ceil_div(args.n, 64) - place.n * CONSUMERS - 1);  // of what is stored, the last
  uint4 words[2];
  float next_scale[2];
  const auto load = [&](int i) {
    mbarrier_wait(smem_u32(&smem.full[i % STAGES]), i / STAGES & 1);
    load_block(words, next_scale, smem.w[i % STAGES][my_block]);
  };
  load(i);
  for (int group = 0; group < groups; ++group, ++i) {
    const int stage = i % STAGES;
    const float scale[2] = {next_scale[0], next_scale[1]};
    uint32_t a[BK / 32][4];
    unfold(a, words);
    settle(a);
    const uint64_t b = wgmma_descriptor(smem_u32(smem.x[stage]), 16, 1024, Swizzle::b128);
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      float sums[BATCH / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 32; ++k)
        wgmma_k32_e4m3<BATCH>(sums, a[k], wgmma_advance(b, batch * BATCH * BK + k * 32), k);
      wgmma_commit_group();
      if (batch == BATCHES - 1) load(group + 1 < groups ? i + 1 : i);  // the last once more: no branch among products
      wgmma_wait_group<0>();
      if (batch == BATCHES - 1) release(smem.empty[stage]);
      add_scaled(acc[batch], scale, sums);
    }
  }
}

template <typename T, typename TILE>
DEVICE void consume(Smem<TILE>& smem, const CUtensorMap& y_map, const GemmW4a8Args& args, const Cut& cut,
                    int consumer) {
  constexpr int BM = TILE::BM, BATCH = TILE::BATCH, BATCHES = TILE::BATCHES;
  const bool leader = threadIdx.x % WARPGROUP == 0;
  const auto store = [&](const float (&acc)[BATCHES][BATCH / 2], const Place& place) {
    store_batches<T>(smem.y[consumer], acc, args, y_map, consumer, (place.n * CONSUMERS + consumer) * 64, place.m * BM);
  };
  float acc_regs[BATCHES][BATCH / 2];
  int i = 0;
  for (int tile = blockIdx.x; tile < cut.whole; tile += gridDim.x, i += cut.groups) {
    const Place place = cut.tiles.place(tile);
    clear(acc_regs);
    warm_scales<BM>(args, place.m * BM);
    multiply(smem, acc_regs, args, place, i, cut.groups, consumer);
    if (cut.groups == 0) leave(sums_of<TILE>(args, cut, 0, 0, consumer), acc_regs);  // never: for the registers
    store(acc_regs, place);
  }
  i = cut.waves * cut.groups;
  Part part, before;
  for (int n = 0; find(part, cut, n); ++n) {
    const Place place = cut.tiles.place(cut.whole + part.tile);
    find(before, cut, n - 1);
    clear(acc_regs);
    warm_scales<BM>(args, place.m * BM);
    for (const int start = i, stop = i + part.end - part.first; i < stop;) {
      const bool tell = n > 0 && i == start;
      const int some = tell ? 1 : stop - i;
      multiply(smem, acc_regs, args, place, i, some, consumer);
      i += some;
      if (!tell) continue;
      // By now what the part before left is on its way, and the other warpgroup multiplies.
      bar_sync(1 + consumer, WARPGROUP);
      if (leader) smem.owed[consumer] = arrive(args, cut, before.tile, consumer, 1);
    }
    bool done = false;
    if (find(before, cut, n + 1))
      leave(sums_of<TILE>(args, cut, part.tile, part.part, consumer), acc_regs);
    else
      done = join(smem, acc_regs, args, cut, part, consumer);
    if (done) store(acc_regs, place);
    if (n == 0) continue;
    bar_sync(1 + consumer, WARPGROUP);
    if (!__any_sync(ALL_LANES, smem.owed[consumer])) continue;
    find(before, cut, n - 1);
    gather<TILE>(acc_regs, args, cut, before.tile, consumer);
    store(acc_regs, cut.tiles.place(cut.whole + before.tile));
  }
  if (leader) cp_async_bulk_wait_group<0>();
}

template <typename T, typename TILE>
__global__ void __launch_bounds__(THREADS, 1) gemm_stream_k(const __grid_constant__ CUtensorMap x_map,
                                                            const __grid_constant__ CUtensorMap y_map,
                                                            const GemmW4a8Args args, const Cut cut) {
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
    if (threadIdx.x == 0) produce(smem, x_map, args, cut);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume<T>(smem, y_map, args, cut, warpgroup - 1);
  }
}

// How a launch is done in tiles of so many tokens, and what it costs, in groups x tokens; the start and end of a tile
// are worth 32 tokens, a part's way through L2 two groups at each end, and the last to arrive another two. The head
// takes as long as a helper's pieces.
struct Plan {
  Cut cut;
  int blocks;
  int64_t cost;
};
inline Plan plan(const GemmW4a8Args& args, int tokens) {
  const Tiles tiles = {ceil_div(args.n, BN), ceil_div(args.m, tokens)};
  const int groups = args.k / GROUP, sms = args.sm_count, count = tiles.n * tiles.m, waves = count / sms;
  const int rest = count - waves * sms, idle = sms - rest, group = tokens + 32;
  const int64_t before = static_cast<int64_t>(waves) * groups * group;
  Plan best = {{tiles, groups, ceil_div(count, sms), count, 0, groups, 0, 0, 0, 0}, min(count, sms), before};
  if (rest == 0) return best;
  best.cost += static_cast<int64_t>(groups) * group;
  for (int pieces = 1; pieces == 1 || pieces * rest <= idle; ++pieces) {
    const int helpers = min(pieces * rest, idle), each = ceil_div(pieces * rest, helpers);
    const int equal = (each * (groups + 2 * pieces) - 2 * pieces * pieces) / (pieces + each);  // rounded down
    for (int head = max(equal, 1); head <= equal + 1 && groups - head >= pieces; ++head) {
      const int tail = ceil_div(groups - head, pieces), longest = max(head + 2 * pieces, each * (tail + 2));
      const int64_t cost = before + static_cast<int64_t>(longest + 2) * group;
      if (cost >= best.cost) continue;
      const int size = (groups - head) / pieces, more = (groups - head) % pieces;
      best = {{tiles, groups, waves, waves * sms, rest, head, pieces, helpers, size, more}, sms, cost};
    }
  }
  return best;
}

template <typename T, int TOKENS>
const char* launch_tiles(const GemmW4a8Args& args, const Plan& plan, cudaStream_t stream) {
  using TILE = Tile<TOKENS>;
  CUtensorMap x_map, y_map;
  if (const char* problem = make_maps<T>(x_map, y_map, args, TOKENS)) return problem;
  return launch(gemm_stream_k<T, TILE>, plan.blocks, THREADS, sizeof(Smem<TILE>), stream, x_map, y_map, args, plan.cut);
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_y_dtype(*args, [&]<typename T>() -> const char* {
    const Plan large = plan(*args, 256), middle = plan(*args, 192), small = plan(*args, 128);
    if (large.cost <= min(middle.cost, small.cost)) return launch_tiles<T, 256>(*args, large, stream);
    return middle.cost <= small.cost ? launch_tiles<T, 192>(*args, middle, stream)
                                     : launch_tiles<T, 128>(*args, small, stream);
  });
}
