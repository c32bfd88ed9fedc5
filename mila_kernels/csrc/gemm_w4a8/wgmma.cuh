// What the W4A8 steps on wgmma share: tensor maps of x and y, and how a warpgroup's tile leaves.
#pragma once

#include "../hopper.cuh"
#include "args.cuh"

constexpr int WARPGROUP = 128;

// x: boxes of 128 columns and `rows` tokens, rows of 128 bytes under the 128-byte swizzle. y: 64 columns of as many.
template <typename T>
const char* make_maps(CUtensorMap& x_map, CUtensorMap& y_map, const GemmW4a8Args& args, uint32_t rows) {
  const uint64_t m = args.m, k = args.k, n = args.n;
  const char* problem = make_tensor_map<uint8_t, 2>(&x_map, args.x_codes, {k, m},
                                                    {static_cast<uint64_t>(args.x_codes_stride)}, {GROUP, rows},
                                                    Swizzle::b128, Promotion::l2_256B);
  if (problem) return problem;
  return make_tensor_map<T, 2>(&y_map, args.y, {n, m}, {args.y_stride * sizeof(T)}, {64, rows}, Swizzle::b128,
                               Promotion::none);
}

// The bias of rows g and g + 8 of a warp's 16.
template <typename T>
struct Bias {
  float row[2];
  DEVICE Bias(const GemmW4a8Args& args, int first_row) {
    for (int half = 0; half < 2; ++half) {
      const int n = first_row + half * 8;
      row[half] = args.bias && n < args.n ? to_float(static_cast<const T*>(args.bias)[n]) : 0.0f;
    }
  }
};

// Columns of a warpgroup's 64 x (2 * SIZE) sums times the tokens' scales and `factor`, plus bias, turned into rows of
// tokens in shared memory: rows of 128 bytes, their 16-byte pieces moved as the tensor copy's swizzle wants them.
template <typename T, int SIZE>
DEVICE void to_rows_of_tokens(uint16_t (*y)[64], const float (&sums)[SIZE], const GemmW4a8Args& args, int first_m,
                              float factor, const Bias<T>& bias) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < SIZE / 4; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = first_m + (j + i) * 8 + 2 * t;
      const float low = args.x_scales[min(m, args.m - 1)] * factor, high = args.x_scales[min(m + 1, args.m - 1)] * factor;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        pairs[2 * i + half] = pack2<T>(fmaf(low, sums[(j + i) * 4 + 2 * half], bias.row[half]),
                                       fmaf(high, sums[(j + i) * 4 + 2 * half + 1], bias.row[half]));
    }
    const int row = j * 8 + lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
    stmatrix_x4_trans(smem_u32(&y[row][(piece ^ row % 8) * 8]), pairs);
  }
}

// A whole tile of a warpgroup, 64 rows of the weight from `first_n` and its tokens from `first_m`, to global memory.
template <typename T, int SIZE>
DEVICE void store_tile(uint16_t (*y)[64], const float (&sums)[SIZE], const GemmW4a8Args& args, const CUtensorMap& y_map,
                       int group, int first_n, int first_m, float factor) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
  to_rows_of_tokens<T>(y, sums, args, first_m, factor, Bias<T>(args, first_n + warp * 16 + lane / 4));
  fence_proxy_async_shared();
  bar_sync(1 + group, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
    cp_async_bulk_tensor_2d_s2g(&y_map, smem_u32(y), first_n, first_m);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
  }
}
