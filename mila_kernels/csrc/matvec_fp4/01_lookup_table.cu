// Change: the baseline. A warp owns a row of the weight; a nibble is an index into a table in constant memory, and each
//   weight is multiplied by its group's scale before it is multiplied by x.
// Prediction: constant memory serves one address a clock, so a warp whose lanes hold different nibbles reads the table up
//   to 16 times in a row: about 16 clocks of one port for 32 weights, where memory delivers 41 weights a clock to each
//   multiprocessor of an H200. Under 10% of the read limit.
// Measured: 412 us on gate_up, M = 1 (H200, 2026-11-29; first runs of one script, as all of this ladder): 3% of the read limit.
// Verdict: Kept as the baseline. The table's port is the limit, as predicted; it is worse than 10%.
#include "args.cuh"

constexpr int WARPS = 8;     // rows a block
constexpr int PER_LANE = 8;  // weights a lane takes at a time: one word of codes

__constant__ float FP4_VALUES[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

template <typename T, typename Scale>
__global__ void __launch_bounds__(WARPS* WARP) matvec_lookup_table(const MatvecFp4Args args) {
  const int lane = threadIdx.x % WARP, n = blockIdx.x * WARPS + threadIdx.x / WARP, m = blockIdx.y;
  if (n >= args.n) return;
  const uint8_t* codes = args.codes + static_cast<int64_t>(n) * (args.k / 2);
  const Scale* scales = static_cast<const Scale*>(args.scales) + static_cast<int64_t>(n) * (args.k / GROUP);
  const T* x = static_cast<const T*>(args.x) + m * args.x_stride;

  float sum = 0.0f;
  for (int column = lane * PER_LANE; column < args.k; column += WARP * PER_LANE) {
    const uint32_t q = ld_global_nc_u32(codes + column / 2);
    const uint4 x_words = *reinterpret_cast<const uint4*>(x + column);
    const T* x_regs = reinterpret_cast<const T*>(&x_words);
    const float scale = to_float(scales[column / GROUP]);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum += FP4_VALUES[q >> 4 * i & 15u] * scale * to_float(x_regs[i]);
  }
  sum = warp_sum(sum);
  if (lane == 0) store_y<T>(args, m, n, sum);
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  return dispatch(*args, LAYOUT_ROWS, [&]<typename T, typename Scale>() {
    const dim3 grid(ceil_div(args->n, WARPS), args->m);
    return launch(matvec_lookup_table<T, Scale>, grid, WARPS * WARP, 0, stream, *args);
  });
}
