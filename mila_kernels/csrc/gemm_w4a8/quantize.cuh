// Activations to E4M3, a scale per token, in one pass over memory: what all steps but the first two share.
#pragma once

#include "args.cuh"

constexpr int QUANTIZE_THREADS = 256;
constexpr int QUANTIZE_HELD = 8;  // loads of a thread that stay in registers: rows of up to 16384 are read once

struct QuantizeSmem {
  float largest[QUANTIZE_THREADS / WARP];
};

// The largest of all threads' values, given to all; called once a kernel.
DEVICE float block_max(QuantizeSmem& smem, float value) {
  value = warp_max(value);
  if (threadIdx.x % WARP == 0) smem.largest[threadIdx.x / WARP] = value;
  __syncthreads();
  for (int i = 0; i < QUANTIZE_THREADS / WARP; ++i) value = fmaxf(value, smem.largest[i]);
  return value;
}

// A scale is never zero: a row of zeros has codes of zero. A NaN does not count; it becomes a NaN among the codes.
DEVICE float scale_of(float largest) { return fmaxf(largest / E4M3_MAX, SMALLEST_SCALE); }

template <typename T>
DEVICE float largest_of(const uint4& loaded) {
  float values[PER_LOAD], largest = 0.0f;
  unpack<T>(values, loaded);
#pragma unroll
  for (int i = 0; i < PER_LOAD; ++i) largest = fmaxf(largest, fabsf(values[i]));
  return largest;
}

template <typename T>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_tokens(const GemmW4a8Args args) {
  constexpr int STRIDE = QUANTIZE_THREADS * PER_LOAD;
  const int first = threadIdx.x * PER_LOAD;
  const int64_t token = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  uint8_t* codes = args.x_codes + token * args.x_codes_stride;
  QuantizeSmem& smem = dynamic_smem<QuantizeSmem>();

  uint4 held[QUANTIZE_HELD];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < QUANTIZE_HELD; ++i) {
    const int column = first + i * STRIDE;
    held[i] = column < args.k ? *reinterpret_cast<const uint4*>(x + column) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < QUANTIZE_HELD; ++i) largest = fmaxf(largest, largest_of<T>(held[i]));
  for (int column = first + QUANTIZE_HELD * STRIDE; column < args.k; column += STRIDE)
    largest = fmaxf(largest, largest_of<T>(*reinterpret_cast<const uint4*>(x + column)));

  const float scale = scale_of(block_max(smem, largest)), factor = 1.0f / scale;
  if (threadIdx.x == 0) args.x_scales[token] = scale;
  float values[PER_LOAD];
#pragma unroll
  for (int i = 0; i < QUANTIZE_HELD; ++i) {
    const int column = first + i * STRIDE;
    unpack<T>(values, held[i]);
    if (column < args.k) *reinterpret_cast<uint2*>(codes + column) = to_e4m3(values, factor);
  }
  for (int column = first + QUANTIZE_HELD * STRIDE; column < args.k; column += STRIDE) {
    unpack<T>(values, *reinterpret_cast<const uint4*>(x + column));
    *reinterpret_cast<uint2*>(codes + column) = to_e4m3(values, factor);
  }
}

inline const char* launch_quantize(const GemmW4a8Args& args, cudaStream_t stream) {
  return with_dtype(args.x_dtype, [&]<typename T>() {
    return launch(quantize_tokens<T>, args.m, QUANTIZE_THREADS, sizeof(QuantizeSmem), stream, args);
  });
}
