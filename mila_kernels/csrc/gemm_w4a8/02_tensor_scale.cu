// Change: both matrices become E4M3. The weight goes to a scratch as scale x value over one static scale for all of it,
//   the activations over one scale for all tokens, found anew at every call; the library multiplies FP8 and puts both
//   scales in.
// Prediction: the library's FP8 rate is twice that of BF16 and the scratch half as large: 700 to 850 TFLOP/s. Rounding
//   scale x value to three bits costs 2.6e-2; a token far smaller than the largest loses its lower bits or vanishes.
// Measured: H200, 2026-11-29, all steps in one run, TFLOP/s, tokens quantised anew in the call: gate_up 1024 / 4096 /
//   8192 682 / 954 / 1,031, fc_down 401 / 502 / 499. Error 3.8e-2.
// Verdict: kept, as the way that breaks. On gate_up faster than predicted; fc_down has four times the columns to
//   quantise.
// Architectures: sm_89 sm_90a sm_100a sm_120
// Bound: 6e-2, weights and activations are rounded to E4M3 under one scale each
#include "quantize.cuh"

constexpr int THREADS = 256, PER_THREAD = 8;  // one word of codes

template <typename Scale>
__global__ void __launch_bounds__(THREADS) weight_to_e4m3(const GemmW4a8Args args) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * PER_THREAD;
  if (first >= static_cast<int64_t>(args.n) * args.k) return;
  const uint32_t q = *reinterpret_cast<const uint32_t*>(args.w_codes + first / 2);
  const float scale = to_float(static_cast<const Scale*>(args.w_scales)[first / GROUP]);
  float values[PER_LOAD];
#pragma unroll
  for (int i = 0; i < PER_LOAD; ++i) values[i] = fp4_value(q >> 4 * i & 15u);
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.w_scratch) + first) = to_e4m3(values, scale / *args.w_range);
}

// One scale for all tokens takes three kernels: the rows' largest, the largest of those, and the codes.
template <typename T>
__global__ void __launch_bounds__(QUANTIZE_THREADS) largest_of_rows(const GemmW4a8Args args) {
  const T* x = static_cast<const T*>(args.x) + blockIdx.x * args.x_stride;
  float largest = 0.0f;
  for (int column = threadIdx.x * PER_LOAD; column < args.k; column += QUANTIZE_THREADS * PER_LOAD)
    largest = fmaxf(largest, largest_of<T>(*reinterpret_cast<const uint4*>(x + column)));
  largest = block_max(dynamic_smem<QuantizeSmem>(), largest);
  if (threadIdx.x == 0) args.x_scales[1 + blockIdx.x] = largest;
}

__global__ void __launch_bounds__(QUANTIZE_THREADS) scale_of_all(const GemmW4a8Args args) {
  float largest = 0.0f;
  for (int row = threadIdx.x; row < args.m; row += QUANTIZE_THREADS) largest = fmaxf(largest, args.x_scales[1 + row]);
  largest = block_max(dynamic_smem<QuantizeSmem>(), largest);
  if (threadIdx.x == 0) args.x_scales[0] = scale_of(largest);
}

template <typename T>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_all(const GemmW4a8Args args) {
  const T* x = static_cast<const T*>(args.x) + blockIdx.x * args.x_stride;
  uint8_t* codes = args.x_codes + blockIdx.x * args.x_codes_stride;
  const float factor = 1.0f / args.x_scales[0];
  for (int column = threadIdx.x * PER_LOAD; column < args.k; column += QUANTIZE_THREADS * PER_LOAD) {
    float values[PER_LOAD];
    unpack<T>(values, *reinterpret_cast<const uint4*>(x + column));
    *reinterpret_cast<uint2*>(codes + column) = to_e4m3(values, factor);
  }
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE)
    return with_dtype(args->x_dtype, [&]<typename T>() -> const char* {
      const size_t smem = sizeof(QuantizeSmem);
      if (const char* error = launch(largest_of_rows<T>, args->m, QUANTIZE_THREADS, smem, stream, *args)) return error;
      if (const char* error = launch(scale_of_all, 1, QUANTIZE_THREADS, smem, stream, *args)) return error;
      return launch(quantize_all<T>, args->m, QUANTIZE_THREADS, 0, stream, *args);
    });
  if (args->phase != PHASE_WEIGHT) return "the library multiplies, not this step";
  const int64_t words = static_cast<int64_t>(args->n) * args->k / PER_THREAD;
  const unsigned blocks = static_cast<unsigned>(ceil_div<int64_t>(words, THREADS));
  return with_scale(*args, [&]<typename Scale>() {
    return launch(weight_to_e4m3<Scale>, blocks, THREADS, 0, stream, *args);
  });
}
