// What every FP4 matvec step is launched with. Mirrored by MatvecFp4Args in mila_kernels/linear.py.
#pragma once

// The instances of a library: those that a build names, else all.
#ifndef ONLY_COLUMN_TILES
#define ONLY_COLUMN_TILES 0
#endif
#ifndef ONLY_SCALE_DTYPE
#define ONLY_SCALE_DTYPE -1
#endif

#include "../matvec_common.cuh"

// How the codes lie in memory. ROWS: [n, k / 2], the even column in the low nibble; scales [n, k / 128].
// The others: tiles of 16 rows; per tile and 64 columns, 16 bytes a lane; scales [tile, group, 8, 2], rows g and g + 8
// side by side. A word holds the A operand of one mma.m16n8k16, K permuted so that lane 4g + t owns the 16 columns from
// 16t. FRAGMENTS: register r's two codes are the r-th nibbles from the top of the two halves. FOLDED: see
// 06_folded_layout.cu.
enum Layout : int32_t { LAYOUT_ROWS = 0, LAYOUT_FRAGMENTS = 1, LAYOUT_FOLDED = 2 };
enum ScaleDtype : int32_t { SCALE_BF16 = 0, SCALE_FP32 = 1 };

// y[m][n] = sum over k of x[m][k] * value(code[n][k]) * scale[n][k / 128] + bias[n].
struct MatvecFp4Args {
  const void* x;
  const uint8_t* codes;
  const void* scales;
  const void* bias;  // or null
  void* y;
  int64_t x_stride, y_stride;  // of rows, in elements
  int32_t m, n, k;
  int32_t dtype;        // Dtype of x, y and bias
  int32_t scale_dtype;  // ScaleDtype
  int32_t layout;       // Layout
  int32_t sm_count;     // multiprocessors to share the work over
  int32_t smem_limit;   // bytes of shared memory that a block may have
  int32_t chained;      // may start before the kernel in front of it has ended
};

DEVICE float to_float(float x) { return x; }

// The scales of rows g and g + 8 of a tile, side by side in a shuffled weight.
DEVICE void load_pair(float (&pair)[2], const float* scales) {
  const uint2 loaded = ld_global_nc_v2_u32(scales);
  pair[0] = __uint_as_float(loaded.x);
  pair[1] = __uint_as_float(loaded.y);
}

DEVICE void load_pair(bf16 (&pair)[2], const bf16* scales) {
  *reinterpret_cast<uint32_t*>(pair) = ld_global_nc_u32(scales);
}

template <ScaleDtype DTYPE, typename Scale, typename F>
const char* call_scale(F f) {
  if constexpr (ONLY_SCALE_DTYPE == -1 || ONLY_SCALE_DTYPE == DTYPE)
    return f.template operator()<Scale>();
  else
    return "this library was built for another scale_dtype";
}

// Calls f<Scale>() for the scales' type; refuses a weight in another layout than the step reads.
template <typename F>
const char* with_scale(const MatvecFp4Args& args, Layout layout, F f) {
  if (args.layout != layout) return "the weight is in another layout than this step reads";
  return args.scale_dtype == SCALE_FP32 ? call_scale<SCALE_FP32, float>(f) : call_scale<SCALE_BF16, bf16>(f);
}

// The same with f<T, Scale>(), T being the type of x and y.
template <typename F>
const char* dispatch(const MatvecFp4Args& args, Layout layout, F f) {
  return with_scale(args, layout, [&]<typename Scale>() {
    return args.dtype == DTYPE_FP16 ? f.template operator()<fp16, Scale>() : f.template operator()<bf16, Scale>();
  });
}
