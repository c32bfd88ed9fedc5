// Change: one warp only copies, two warpgroups only multiply, and blocks stay on their SM and take tile after tile.
//   Stages are handed over by mbarriers in place of barriers of the block; registers move from the copying warps to the
//   others, which take 256 tokens each. Tiles are walked in groups of 8 in tokens, so that what one wave reads stays in
//   L2.
// Prediction: the copies run ahead of the products, also over the end of a tile: the tensor cores wait for the
//   additions only, which the other warpgroup's products hide; 1,100 to 1,300 TFLOP/s.
// Measured: H200, 2026-11-29, prototype in one run with the later steps, graph of 20 launches: gate_up 1024 / 4096 /
//   8192 983 / 1,001 / 995, fc_down 1,079 / 997 / 965 TFLOP/s. Tensor cores busy 70 to 72% of the clocks, at 1,350 to
//   1,620 MHz. In this form, in one run of all steps: 983 / 1,015 / 913 and 1,138 / 1,056 / 980.
// Verdict: kept. The prediction was too high: without the additions the same kernel has 93 to 98% busy (1,307 to
//   1,412). Both warpgroups finish their batches together, and then both add.
// Architectures: sm_90a
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BN = CONSUMERS * 64, BM = 256, BK = GROUP;  // weight rows, tokens and columns of a tile
constexpr int BATCH = 128, BATCHES = BM / BATCH;          // tokens of a batch of products
constexpr int STAGES = 4;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

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
__global__ void __launch_bounds__(THREADS, 1) gemm_warp_specialised(const __grid_constant__ CUtensorMap x_map,
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
    return launch(gemm_warp_specialised<T>, blocks, THREADS, sizeof(Smem), stream, x_map, y_map, *args);
  });
}
