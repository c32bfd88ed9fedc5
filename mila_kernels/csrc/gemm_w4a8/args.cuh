// What every W4A8 step is launched with. Mirrored by GemmW4a8Args in mila_kernels/gemm.py.
#pragma once

#include "../common.cuh"
#include "../ptx.cuh"

constexpr int GROUP = 128;  // columns that share a scale of the weights
constexpr float E4M3_MAX = 448.0f, FP4_MAX = 6.0f;
constexpr float SMALLEST_SCALE = 0x1p-126f;

// The steps that multiply in a library are launched once a phase; the others quantise and multiply at a call each.
enum Phase : int32_t { PHASE_QUANTIZE = 0, PHASE_WEIGHT = 1, PHASE_MULTIPLY = 2 };

// ROWS: codes [n, k / 2], two a byte, the even column in the low nibble; scales [n, k / 128].
// BLOCKS: [k / 128][n / 64] blocks, see 07_shuffled.cu.
enum Layout : int32_t { LAYOUT_ROWS = 0, LAYOUT_BLOCKS = 1 };
enum ScaleDtype : int32_t { SCALE_BF16 = 0, SCALE_FP32 = 1 };

// y[m][n] = x_scales[m] * sum over k of x_codes[m][k] * value(code[n][k]) * scale[n][k / 128] + bias[n].
struct GemmW4a8Args {
  const void* x;        // [m, k], what PHASE_QUANTIZE reads
  uint8_t* x_codes;     // E4M3 [m, k], what it writes, and PHASE_MULTIPLY reads
  float* x_scales;      // [m], or the one of all tokens
  const uint8_t* w_codes;
  const void* w_scales;
  const float* w_range;  // one scale for all weights: the largest group scale * 6 / 448
  void* w_scratch;       // what PHASE_WEIGHT writes, [n, k]
  const float* sums;     // [m, n], the library's products, where PHASE_MULTIPLY is the epilogue
  const void* bias;      // [n] of y's type, or null
  void* y;
  float* partials;     // of steps that split K: sums of parts of tiles, 2 x sm_count x tile
  uint32_t* arrivals;  // a counter a tile and warpgroup, 4 x sm_count, zero before and after a launch
  int64_t x_stride, x_codes_stride, y_stride;  // of rows, in elements
  int32_t m, n, k;
  int32_t phase;          // Phase
  int32_t x_dtype;        // Dtype of x
  int32_t y_dtype;        // Dtype of y and bias
  int32_t w_scale_dtype;  // ScaleDtype
  int32_t layout;         // Layout of the weight
  int32_t sm_count;       // multiprocessors to share the work over
};

DEVICE float to_float(float x) { return x; }

// Calls f<T>() for the type of a Dtype.
template <typename F>
const char* with_dtype(int dtype, F f) {
  return dtype == DTYPE_FP16 ? f.template operator()<fp16>() : f.template operator()<bf16>();
}

// The same for y's; a library may have been built for one of them.
#ifndef ONLY_Y_DTYPE
#define ONLY_Y_DTYPE -1
#endif
template <typename F>
const char* with_y_dtype(const GemmW4a8Args& args, F f) {
  if (args.y_dtype == DTYPE_FP16) {
    if constexpr (ONLY_Y_DTYPE != DTYPE_BF16) return f.template operator()<fp16>();
  } else {
    if constexpr (ONLY_Y_DTYPE != DTYPE_FP16) return f.template operator()<bf16>();
  }
  return "this library was built for another y_dtype";
}

template <typename F>
const char* with_scale(const GemmW4a8Args& args, F f) {
  return args.w_scale_dtype == SCALE_FP32 ? f.template operator()<float>() : f.template operator()<bf16>();
}

constexpr int PER_LOAD = 8;  // 16-bit elements of a 16-byte load

template <typename T>
DEVICE void unpack(float (&values)[PER_LOAD], const uint4& loaded) {
  const T* elements = reinterpret_cast<const T*>(&loaded);
#pragma unroll
  for (int i = 0; i < PER_LOAD; ++i) values[i] = to_float(elements[i]);
}

DEVICE uint2 to_e4m3(const float (&values)[PER_LOAD], float factor) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = cvt_rn_satfinite_e4m3x2_f32(values[2 * i + 1] * factor, values[2 * i] * factor);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// The magnitude that a code's lower three bits stand for.
DEVICE float fp4_magnitude(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3u, mantissa = code & 1u;
  return exponent == 0 ? 0.5f * mantissa : (1.0f + 0.5f * mantissa) * (1u << exponent >> 1);
}
DEVICE float fp4_value(uint32_t code) { return code & 8u ? -fp4_magnitude(code) : fp4_magnitude(code); }
