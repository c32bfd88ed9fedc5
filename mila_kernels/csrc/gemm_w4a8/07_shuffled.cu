// Change: the weight is shuffled once, into blocks of 64 rows x 128 columns with their FP32 scales behind. A thread
//   finds its codes in two 16-byte loads, a word folded so that five operations unfold eight of them; one bulk copy
//   brings a tile's blocks, and no thread computes an address.
// Prediction: decoding was 10 operations for 8 codes, eight narrow loads and two from global memory for the scales: a
//   third of it remains; 600 to 700 TFLOP/s, the waits between the stages being what is left.
// Measured: H200, 2026-11-29, all steps in one run, TFLOP/s: gate_up 1024 / 4096 / 8192 971 / 1,005 / 991, fc_down
//   1,023 / 1,032 / 1,045.
// Verdict: kept: half as fast again as 06, far more than predicted.
// Architectures: sm_90a
#include "wgmma.cuh"

constexpr int BN = 128, BM = 128, BK = GROUP;  // weight rows, tokens and columns of a tile
constexpr int WARPGROUPS = BN / 64, THREADS = WARPGROUPS * WARPGROUP;
constexpr int STAGES = 3;

struct Smem {
  alignas(1024) uint8_t x[STAGES][BM][BK];
  alignas(1024) uint16_t y[WARPGROUPS][BM][64];
  alignas(128) uint8_t w[STAGES][WARPGROUPS][BLOCK_BYTES];
  uint64_t full[STAGES];
};

constexpr int HALF = BM / 2;  // tokens of a batch of products: the sums of two blocks an SM fit into its registers

template <typename T>
__global__ void __launch_bounds__(THREADS, 2) gemm_shuffled(const __grid_constant__ CUtensorMap x_map,
                                                            const __grid_constant__ CUtensorMap y_map,
                                                            const GemmW4a8Args args) {
  const int group = threadIdx.x / WARPGROUP;
  const int first_n = blockIdx.x * BN, first_m = blockIdx.y * BM, groups = args.k / GROUP;
  const int blocks_n = ceil_div(args.n, 64), blocks = min(WARPGROUPS, blocks_n - first_n / 64);
  const int my_block = min(group, blocks - 1);  // past the last row: what it computes is not stored
  Smem& smem = dynamic_smem<Smem>();

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(smem_u32(&smem.full[i]), 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const auto fetch = [&](int i) {
    if (threadIdx.x != 0 || i >= groups) return;
    const int stage = i % STAGES;
    const uint32_t full = smem_u32(&smem.full[stage]);
    mbarrier_arrive_expect_tx(full, BM * BK + blocks * BLOCK_BYTES);
    cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage]), &x_map, i * BK, first_m, full);
    const int64_t block = static_cast<int64_t>(i) * blocks_n + first_n / 64;
    cp_async_bulk_g2s(smem_u32(smem.w[stage]), args.w_codes + block * BLOCK_BYTES, blocks * BLOCK_BYTES, full);
  };
  for (int i = 0; i < STAGES - 1; ++i) fetch(i);

  float acc_regs[BM / 2] = {};
  for (int i = 0; i < groups; ++i) {
    const int stage = i % STAGES;
    __syncthreads();  // the stage before this one has been read
    fetch(i + STAGES - 1);
    mbarrier_wait(smem_u32(&smem.full[stage]), i / STAGES & 1);
    uint32_t a[BK / 32][4];
    float scale[2];
    load_a(a, scale, smem.w[stage][my_block]);
    const uint64_t b = wgmma_descriptor(smem_u32(smem.x[stage]), 16, 1024, Swizzle::b128);
#pragma unroll
    for (int batch = 0; batch < 2; ++batch) {
      float sums[HALF / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 32; ++k)
        wgmma_k32_e4m3<HALF>(sums, a[k], wgmma_advance(b, batch * HALF * BK + k * 32), k);
      wgmma_commit_group();
      wgmma_wait_group<0>();
#pragma unroll
      for (int j = 0; j < HALF / 2; ++j) acc_regs[batch * HALF / 2 + j] += scale[j % 4 / 2] * sums[j];
    }
  }

  store_tile<T>(smem.y[group], acc_regs, args, y_map, group, first_n + group * 64, first_m, RESTORE);
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_dtype(args->y_dtype, [&]<typename T>() -> const char* {
    CUtensorMap x_map, y_map;
    if (const char* problem = make_maps<T>(x_map, y_map, *args, BM)) return problem;
    const dim3 grid(ceil_div(args->n, BN), ceil_div(args->m, BM));
    return launch(gemm_shuffled<T>, grid, THREADS, sizeof(Smem), stream, x_map, y_map, *args);
  });
}
