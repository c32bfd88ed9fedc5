// Change: one set of sums again, in batches of 192 or 128 tokens, and the next group's codes and scales are loaded
//   while this one is multiplied: between two groups' products there is adding and unfolding, no wait for a load.
// Prediction: a few per cent: an mbarrier's and two loads' latencies in some 1,000 clocks a group. Turns at the tensor
//   cores, tried beside it, were to bring 93 to 97% busy: both warpgroups' products end together, and both add then.
// Measured: H200, 2026-11-29, recorded, cold, single launches, between which the chip rests and clocks higher (first in
//   the run, at 140 to 390 W; torch._scaled_mm last, at 550 W): gate_up 1024 / 4096 / 8192 1,202 / 1,319 / 1,331,
//   fc_down 1,224 / 1,339 / 1,327, local_qkv at 4096 1,265 TFLOP/s (11: gate_up at 4096 1,234; torch._scaled_mm, with
//   weights already E4M3: 1,354 / 1,475 / 1,435, 1,375 / 1,544 / 1,549, 1,423). Prototypes in one run of graphs, at 700
//   W and 1,290 to 1,630 MHz: gate_up 1,028 / 1,130 / 1,123 where 11 in tiles of 192 has 1,000 / 1,086 / 1,086, fc_down
//   1,246 / 1,171 / 1,145 (11: - / 1,114 / 1,105), 79 to 84% busy; without the additions 92 to 98%, 1,255 / 1,318 /
//   1,335 and 1,438 / 1,266 / 1,238.
// Verdict: kept, 3 to 5% faster than 11 under load, 7% in single launches. Those meet two of the targets, gate_up 8192
//   1,320 and fc_down 4096 1,300; 1,220 / 1,340, 1,330 at fc_down 8192 and local_qkv's 1,290 are missed by 0.2 to 2%,
//   1,320 at fc_down 1024 by 7%. Under load all are missed. Five other designs were not faster: turns by barriers,
//   given after four, three or two of four products, 69 to 73% busy, with these early loads 78 to 83; three warpgroups
//   in turns 70 to 73; a batch in flight always, over the groups too, 72 to 79; sums in FP16 (error 1.70e-3) 69 to 72;
//   tensor copies by one of the multiplying warps, which leaves 255 registers, 39 to 55. What limits all: FFMA takes
//   the tensor cores' clocks. One warpgroup's products are 99.8% busy alone, 99% beside another's LOP3, 46 to 51%
//   beside its FFMA, two in three clocks. This code with the compiler's yield flags cleared is 63 to 65% busy, without
//   operand reuse too 55. Yet loops of products and additions only, two sets of 64 or 96 tokens, are 98 to 99.8% busy:
//   what differs is open, and next.
// Architectures: sm_90a
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
};

template <typename TILE>
DEVICE void produce(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Tiles& tiles) {
  constexpr int BM = TILE::BM, STAGES = TILE::STAGES;
  const int groups = args.k / GROUP, blocks_n = ceil_div(args.n, 64);
  int i = 0;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    const Place place = tiles.place(tile);
    const int first_block = place.n * CONSUMERS, blocks = min(CONSUMERS, blocks_n - first_block);
    for (int group = 0; group < groups; ++group, ++i) {
      const int stage = i % STAGES;
      const uint32_t full = smem_u32(&smem.full[stage]);
      mbarrier_wait(smem_u32(&smem.empty[stage]), (i / STAGES & 1) ^ 1);
      mbarrier_arrive_expect_tx(full, BM * BK + blocks * BLOCK_BYTES);
      cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage]), &x_map, group * BK, place.m * BM, full);
      const int64_t block = static_cast<int64_t>(group) * blocks_n + first_block;
      cp_async_bulk_g2s(smem_u32(smem.w[stage]), args.w_codes + block * BLOCK_BYTES, blocks * BLOCK_BYTES, full);
    }
  }
}

template <typename T, typename TILE>
DEVICE void consume(Smem<TILE>& smem, const CUtensorMap& y_map, const GemmW4a8Args& args, const Tiles& tiles,
                    int consumer) {
  constexpr int BM = TILE::BM, STAGES = TILE::STAGES, BATCH = TILE::BATCH, BATCHES = TILE::BATCHES;
  const int groups = args.k / GROUP, blocks_n = ceil_div(args.n, 64);
  int i = 0;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    const Place place = tiles.place(tile);
    const int my_block = min(consumer, blocks_n - place.n * CONSUMERS - 1);  // what is past the last row is not stored
    warm_scales<BM>(args, place.m * BM);
    float acc_regs[BATCHES][BATCH / 2] = {};
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
        add_scaled(acc_regs[batch], scale, sums);
      }
    }
    store_batches<T>(smem.y[consumer], acc_regs, args, y_map, consumer, (place.n * CONSUMERS + consumer) * 64,
                     place.m * BM);
  }
  if (threadIdx.x % WARPGROUP == 0) cp_async_bulk_wait_group<0>();
}

template <typename T, typename TILE>
__global__ void __launch_bounds__(THREADS, 1) gemm_codes_early(const __grid_constant__ CUtensorMap x_map,
                                                                 const __grid_constant__ CUtensorMap y_map,
                                                                 const GemmW4a8Args args) {
  constexpr int STAGES = TILE::STAGES;
  Smem<TILE>& smem = dynamic_smem<Smem<TILE>>();
  const Tiles tiles = {ceil_div(args.n, BN), ceil_div(args.m, TILE::BM)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), CONSUMERS * WARPGROUP / WARP);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(smem, x_map, args, tiles);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume<T>(smem, y_map, args, tiles, warpgroup - 1);
  }
}

template <typename T, int TOKENS>
const char* launch_tiles(const GemmW4a8Args& args, cudaStream_t stream) {
  using TILE = Tile<TOKENS>;
  CUtensorMap x_map, y_map;
  if (const char* problem = make_maps<T>(x_map, y_map, args, TOKENS)) return problem;
  const int tiles = ceil_div(args.n, BN) * ceil_div(args.m, TOKENS);
  const int blocks = min(tiles, args.sm_count);
  return launch(gemm_codes_early<T, TILE>, blocks, THREADS, sizeof(Smem<TILE>), stream, x_map, y_map, args);
}

// What the waves of a tile size take, in tokens; the start and end of a tile are worth 32 of them.
inline int64_t cost(const GemmW4a8Args& args, int tokens) {
  const int64_t tiles = static_cast<int64_t>(ceil_div(args.n, BN)) * ceil_div(args.m, tokens);
  return ceil_div<int64_t>(tiles, args.sm_count) * (tokens + 32);
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_dtype(args->y_dtype, [&]<typename T>() -> const char* {
    const int64_t large = cost(*args, 256), middle = cost(*args, 192), small = cost(*args, 128);
    if (large <= min(middle, small)) return launch_tiles<T, 256>(*args, stream);
    return middle <= small ? launch_tiles<T, 192>(*args, stream) : launch_tiles<T, 128>(*args, stream);
  });
}
