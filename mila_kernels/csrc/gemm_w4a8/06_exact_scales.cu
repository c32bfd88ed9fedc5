// Change: no weight is rounded. The tensor cores multiply the codes' own values, which E4M3 holds, and every 128
//   columns the sums are added into FP32 registers, times the group's scale.
// Prediction: the error falls from 2.6e-2 to the output's rounding, 1.65e-3, and sums of any length stay right, where
//   the tensor cores' own stop at 13 bits. Decoding needs no table any more; the additions cost 64 FFMA a thread beside
//   512 clocks of products: about as fast as before.
// Measured: H200, 2026-11-29, all steps in one run, TFLOP/s: gate_up 1024 / 4096 / 8192 663 / 704 / 655, fc_down 704 /
//   675 / 682. Error 1.65e-3; sums of ones exact to 131072 columns.
// Verdict: kept: exact, and 20% faster than 05, whose tables, it is supposed, cost more than additions.
// Architectures: sm_90a
#include "wgmma.cuh"

constexpr int BN = 128, BM = 128, BK = GROUP;  // weight rows, tokens and columns of a tile
constexpr int WARPGROUPS = BN / 64, THREADS = WARPGROUPS * WARPGROUP;
constexpr int STAGES = 3;
constexpr int W_PITCH = BK / 2 + 16;  // puts the rows which a warp reads at once into different banks

struct Smem {
  alignas(1024) uint8_t x[STAGES][BM][BK];
  alignas(1024) uint16_t y[WARPGROUPS][BM][64];
  alignas(16) uint8_t w[STAGES][BN][W_PITCH];
  uint64_t full[STAGES];
};

constexpr int HALF = BM / 2;  // tokens of a batch of products: the sums of two blocks an SM fit into its registers

// The four codes in the lower half of q, in E4M3 as value x 2^-6: exponent and mantissa fit in as they are.
DEVICE uint32_t decode(uint32_t q) {
  const uint32_t signs = prmt(q, q << 4, 0x9d8cu);  // the sign of a byte, spread over it: of an odd code, an even one
  return prmt(0x0c080400u, 0x1c181410u, q & 0x7777u) | (signs & 0x80808080u);
}

DEVICE void fetch_w(uint8_t (&w)[BN][W_PITCH], const GemmW4a8Args& args, int first_n, int k) {
#pragma unroll 1  // registers are short
  for (int i = threadIdx.x; i < BN * BK / 32; i += THREADS) {
    const int row = i / (BK / 32), column = i % (BK / 32) * 16, n = min(first_n + row, args.n - 1);
    cp_async_cg(smem_u32(&w[row][column]), args.w_codes + (static_cast<int64_t>(n) * args.k + k) / 2 + column);
  }
}

template <typename T, typename Scale>
__global__ void __launch_bounds__(THREADS, 2) gemm_exact_scales(const __grid_constant__ CUtensorMap x_map,
                                                                const __grid_constant__ CUtensorMap y_map,
                                                                const GemmW4a8Args args) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, group = threadIdx.x / WARPGROUP;
  const int g = lane / 4, t = lane % 4, row = group * 64 + warp * 16 + g;
  const int first_n = blockIdx.x * BN, first_m = blockIdx.y * BM, groups = args.k / GROUP;
  const int n = min(first_n + row, args.n - 1), rows_to_second = min(8, args.n - 1 - n);
  const Scale* scales = static_cast<const Scale*>(args.w_scales) + static_cast<int64_t>(n) * groups;
  Smem& smem = dynamic_smem<Smem>();

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(smem_u32(&smem.full[i]), 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const auto fetch = [&](int stage, int k) {
    if (threadIdx.x == 0) {
      const uint32_t full = smem_u32(&smem.full[stage]);
      mbarrier_arrive_expect_tx(full, BM * BK);
      cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage]), &x_map, k, first_m, full);
    }
    fetch_w(smem.w[stage], args, first_n, k);
  };
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < groups) fetch(i, i * BK);
    cp_async_commit_group();
  }

  float acc_regs[BM / 2] = {};
  for (int i = 0; i < groups; ++i) {
    const int stage = i % STAGES, next = i + STAGES - 1;
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // all codes are here, and the stage before this one has been read
    if (next < groups) fetch(next % STAGES, next * BK);
    cp_async_commit_group();

    const float scale[2] = {to_float(scales[i]), to_float(scales[rows_to_second * groups + i])};
    uint32_t a[BK / 32][4];
#pragma unroll
    for (int k = 0; k < BK / 32; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int from_16 = 0; from_16 < 2; ++from_16) {
          const uint8_t* codes = &smem.w[stage][row + half * 8][k * 16 + from_16 * 8 + t * 2];
          a[k][from_16 * 2 + half] = decode(*reinterpret_cast<const uint16_t*>(codes));
        }
    mbarrier_wait(smem_u32(&smem.full[stage]), i / STAGES & 1);
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
  return with_dtype(args->y_dtype, [&]<typename T>() {
    return with_scale(*args, [&]<typename Scale>() -> const char* {
      CUtensorMap x_map, y_map;
      if (const char* problem = make_maps<T>(x_map, y_map, *args, BM)) return problem;
      const dim3 grid(ceil_div(args->n, BN), ceil_div(args->m, BM));
      return launch(gemm_exact_scales<T, Scale>, grid, THREADS, sizeof(Smem), stream, x_map, y_map, *args);
    });
  });
}
