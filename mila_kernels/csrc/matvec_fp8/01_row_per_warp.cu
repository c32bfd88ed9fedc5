// Change: the baseline. A warp owns a row of the weight; a lane converts 16 bytes of E4M3 at a time to FP16, and FP16 to
//   FP32, and multiplies by x.
// Prediction: a weight costs a conversion, an unpacking of x and an FMA, about 2.5 instructions, where an H200 at its
//   memory's speed affords six: near the limit, but with 16 KB in flight a multiprocessor at most 75% of it.
// Measured: 279.9 us on the lm_head, M = 1, 79% of the read limit (H200, 2026-11-29).
// Verdict: Kept as the baseline. As predicted.
// Architectures: sm_89 sm_90a sm_100a sm_120
#include "args.cuh"

constexpr int WARPS = 8;      // rows a block
constexpr int PER_LANE = 16;  // weights a lane takes at a time

template <typename T>
__global__ void __launch_bounds__(WARPS* WARP) matvec_row_per_warp(const MatvecFp8Args args) {
  const int lane = threadIdx.x % WARP, n = blockIdx.x * WARPS + threadIdx.x / WARP, m = blockIdx.y;
  if (n >= args.n) return;
  const uint8_t* codes = args.codes + static_cast<int64_t>(n) * args.k;
  const T* x = static_cast<const T*>(args.x) + m * args.x_stride;

  float sum = 0.0f;
  for (int column = lane * PER_LANE; column < args.k; column += WARP * PER_LANE) {
    const uint4 code_words = ld_global_nc_no_allocate_v4_u32(codes + column);
    const uint4 x_words[2] = {*reinterpret_cast<const uint4*>(x + column),
                              *reinterpret_cast<const uint4*>(x + column + PER_LANE / 2)};
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(&code_words);
    const T* x_regs = reinterpret_cast<const T*>(x_words);
#pragma unroll
    for (int i = 0; i < PER_LANE / 2; ++i) {
      const uint32_t weights = cvt_rn_f16x2_e4m3x2(pairs[i]);
      const fp16* weight = reinterpret_cast<const fp16*>(&weights);
      sum += to_float(weight[0]) * to_float(x_regs[2 * i]);
      sum += to_float(weight[1]) * to_float(x_regs[2 * i + 1]);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) store_y<T>(args, m, n, sum * args.scales[n]);
}

extern "C" const char* launch_step(const MatvecFp8Args* args, cudaStream_t stream) {
  return dispatch(*args, LAYOUT_ROWS, [&]<typename T>() {
    const dim3 grid(ceil_div(args->n, WARPS), args->m);
    return launch(matvec_row_per_warp<T>, grid, WARPS * WARP, 0, stream, *args);
  });
}
