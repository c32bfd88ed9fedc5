// What every FP8 matvec step is launched with. Mirrored by MatvecFp8Args in mila_kernels/linear.py.
#pragma once

// The instances of a library: those that a build names, else all.
#ifndef ONLY_COLUMN_TILES
#define ONLY_COLUMN_TILES 0
#endif

#include "../matvec_common.cuh"

// How the codes lie in memory. ROWS: [n, k]. FRAGMENTS: tiles of 16 rows; per tile and 64 columns two times 16 bytes a
// lane, in each the A operands of two mma.m16n8k16, K permuted so that lane 4g + t owns the 16 columns from 16t. A word
// holds two registers: the first is the high bytes of its halves, the second the low ones.
enum Layout : int32_t { LAYOUT_ROWS = 0, LAYOUT_FRAGMENTS = 1 };

// y[m][n] = scale[n] * sum over k of x[m][k] * value(code[n][k]) + bias[n].
struct MatvecFp8Args {
  const void* x;
  const uint8_t* codes;
  const float* scales;
  const void* bias;  // or null
  void* y;
  int64_t x_stride, y_stride;  // of rows, in elements
  int32_t m, n, k;
  int32_t dtype;     // Dtype of x, y and bias
  int32_t layout;    // Layout
  int32_t sm_count;  // multiprocessors to share the work over
  int32_t smem_limit;  // bytes of shared memory that a block may have
  int32_t chained;   // may start before the kernel in front of it has ended
};

// Calls f<T>() for the element type of the args; refuses a weight in another layout than the step reads.
template <typename F>
const char* dispatch(const MatvecFp8Args& args, Layout layout, F f) {
  if (args.layout != layout) return "the weight is in another layout than this step reads";
  return args.dtype == DTYPE_FP16 ? f.template operator()<fp16>() : f.template operator()<bf16>();
}
