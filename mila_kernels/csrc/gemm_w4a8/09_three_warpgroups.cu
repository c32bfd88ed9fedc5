// Change: three warpgroups multiply, each 64 rows of the weight x 128 tokens, so that two of them are left to feed the
//   tensor cores while one adds. A tile is 192 x 128: 38 bytes a clock from L2 in place of 40.
// Prediction: 80 to 90% busy.
// Measured: H200, 2026-11-29, prototype, one run: gate_up 1024 / 4096 / 8192 1,114 / 1,073 / 1,059, fc_down 720 / 1,156
//   / 1,047 TFLOP/s: 72 to 75% busy. In this form, in one run of all steps: 1,148 / 1,184 / 1,021 and 776 / 1,206 /
//   1,177.
// Verdict: slower than batches in flight (10) at 8192 tokens, though faster than two warpgroups with one batch each.
//   fc_down has 20 tiles of 192 rows: 160 at 1024 tokens, two waves of 132. A thread has 160 registers: no room for a
//   second batch.
// Architectures: sm_90a
#include "wgmma.cuh"

constexpr int CONSUMERS = 3, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BN = CONSUMERS * 64, BM = 128, BK = GROUP;  // weight rows, tokens and columns of a tile
constexpr int BATCH = 128, BATCHES = BM / BATCH;          // tokens of a batch of products
constexpr int STAGES = 6;
constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;

struct Smem {
  alignas(1024) uint8_t x[STAGES][BM][BK];
  alignas(1024) uint16_t y[CONSUMERS][BM][64];
  alignas(128) uint8_t w[STAGES][CONSUMERS][BLOCK_BYTES];
  uint64_t full[STAGES], empty[STAGES];
};

DEVICE void produce(Smem& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Tiles& tiles) {
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

template <typename T>
DEVICE void consume(Smem& smem, const CUtensorMap& y_map, const GemmW4a8Args& args, const Tiles& tiles, int consumer) {
  const int groups = args.k / GROUP, blocks_n = ceil_div(args.n, 64);
  int i = 0;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    const Place place = tiles.place(tile);
    const int my_block = min(consumer, blocks_n - place.n * CONSUMERS - 1);  // what is past the last row is not stored
    warm_scales<BM>(args, place.m * BM);
    float acc_regs[BATCHES][BATCH / 2] = {};
    for (int group = 0; group < groups; ++group, ++i) {
      const int stage = i % STAGES;
      mbarrier_wait(smem_u32(&smem.full[stage]), i / STAGES & 1);
      uint32_t a[BK / 32][4];
      float scale[2];
      load_a(a, scale, smem.w[stage][my_block]);
      const uint64_t b = wgmma_descriptor(smem_u32(smem.x[stage]), 16, 1024, Swizzle::b128);
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        float sums[BATCH / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 32; ++k)
          wgmma_k32_e4m3<BATCH>(sums, a[k], wgmma_advance(b, batch * BATCH * BK + k * 32), k);
        wgmma_commit_group();
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

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) gemm_three_warpgroups(const __grid_constant__ CUtensorMap x_map,
                                                                    const __grid_constant__ CUtensorMap y_map,
                                                                    const GemmW4a8Args args) {
  Smem& smem = dynamic_smem<Smem>();
  const Tiles tiles = {ceil_div(args.n, BN), ceil_div(args.m, BM)};
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

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_dtype(args->y_dtype, [&]<typename T>() -> const char* {
    CUtensorMap x_map, y_map;
    if (const char* problem = make_maps<T>(x_map, y_map, *args, BM)) return problem;
    const int tiles = ceil_div(args->n, BN) * ceil_div(args->m, BM);
    const int blocks = min(tiles, args->sm_count);
    return launch(gemm_three_warpgroups<T>, blocks, THREADS, sizeof(Smem), stream, x_map, y_map, *args);
  });
}
