// Change: the tile's tokens are 256, 192 or 128, whichever is done first by the number of waves that the tiles make.
//   192 are two batches of 96, with one batch the less to wait for than 256 have in 128 columns.
// Prediction: fc_down's 30 tiles of rows make 3.6 waves at 4096 tokens in tiles of 256, so 9% of the SMs' time is idle,
//   and 5.0 in tiles of 192: 9% faster there and at 8192, the same elsewhere.
// Measured: H200, 2026-11-29, prototype in tiles of 192, one run: gate_up 1024 / 4096 / 8192 1,074 / 1,170 / 1,143,
//   fc_down 784 / 1,237 / 1,223 TFLOP/s: 75 to 80% busy. In this form, in one run of all steps: 1,133 / 1,105 / 1,095
//   and 1,211 / 1,261 / 1,240, local_qkv at 4096 1,205; torch._scaled_mm 1,366 / 1,344 / 1,360 and 1,421 / 1,495 /
//   1,445.
// Verdict: kept: 8% faster on fc_down from 4096 tokens on.
// Architectures: sm_90a
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BN = CONSUMERS * 64, BK = GROUP;  // weight rows and columns of a tile
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// A tile of BM tokens: its batches of products, an even number of them, and as many stages as fit.
template <int TOKENS>
struct Tile {
  static constexpr int BM = TOKENS, BATCH = BM == 192 ? 96 : 64, BATCHES = BM / BATCH;
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
    float sums[2][BATCH / 2], last_scale[2] = {};
    for (float& sum : sums[1]) sum = 0.0f;  // what the first batch adds in place of one before it
    int last_stage = 0;
    for (int group = 0; group < groups; ++group, ++i) {
      const int stage = i % STAGES;
      mbarrier_wait(smem_u32(&smem.full[stage]), i / STAGES & 1);
      uint4 words[2];
      float scale[2];
      load_block(words, scale, smem.w[stage][my_block]);
      wgmma_wait_group<0>();  // the last batch of the group before this one, which had the registers of `a`
      if (group > 0) release(smem.empty[last_stage]);
      uint32_t a[BK / 32][4];
      unfold(a, words);
      const uint64_t b = wgmma_descriptor(smem_u32(smem.x[stage]), 16, 1024, Swizzle::b128);
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 32; ++k)
          wgmma_k32_e4m3<BATCH>(sums[batch % 2], a[k], wgmma_advance(b, batch * BATCH * BK + k * 32), k);
        wgmma_commit_group();
        if (batch == 0) {
          add_scaled(acc_regs[BATCHES - 1], last_scale, sums[1]);
        } else {
          wgmma_wait_group<1>();
          add_scaled(acc_regs[batch - 1], scale, sums[(batch - 1) % 2]);
        }
      }
      last_scale[0] = scale[0];
      last_scale[1] = scale[1];
      last_stage = stage;
    }
    wgmma_wait_group<0>();
    release(smem.empty[last_stage]);
    add_scaled(acc_regs[BATCHES - 1], last_scale, sums[1]);
    store_batches<T>(smem.y[consumer], acc_regs, args, y_map, consumer, (place.n * CONSUMERS + consumer) * 64,
                     place.m * BM);
  }
  if (threadIdx.x % WARPGROUP == 0) cp_async_bulk_wait_group<0>();
}

template <typename T, typename TILE>
__global__ void __launch_bounds__(THREADS, 1) gemm_tile_by_waves(const __grid_constant__ CUtensorMap x_map,
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
  return launch(gemm_tile_by_waves<T, TILE>, blocks, THREADS, sizeof(Smem<TILE>), stream, x_map, y_map, args);
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
