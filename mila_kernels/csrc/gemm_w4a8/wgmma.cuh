// What the W4A8 steps on wgmma share: tensor maps of x and y, and how a warpgroup's tile leaves.
#pragma once

#include "../hopper.cuh"
#include "quantize.cuh"

constexpr int WARPGROUP = 128;
constexpr float RESTORE = 64.0f;  // codes put into E4M3 bit by bit are 2^-6 times as large

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

// ---- LAYOUT_BLOCKS: [k / 128][n / 64] blocks, made by _blocks in mila_kernels/gemm.py ----------------------------

// Codes of 64 rows x 128 columns, then 64 scales in FP32. Thread t of a warpgroup owns the 16 bytes at 16 t and at
// 2048 + 16 t: words for each step of 32 columns, for the 4 columns from 4 (t % 4) and for those 16 further.
constexpr int BLOCK_CODES = 64 * GROUP / 2, BLOCK_BYTES = BLOCK_CODES + 64 * 4;

// A byte of a word is s1 e1' s2 e1 e0 m e0' m', a code of row g being s1 e1 e0 m, one of row g + 8 s2 e1' e0' m'. E4M3
// wants s . . e1 e0 m . .: for the first row one AND makes it, for the second two shifts come first. What that is worth
// is the code's value x 2^-6.
DEVICE void unfold(uint32_t& first, uint32_t& second, uint32_t word) {
  constexpr uint32_t E4M3_BITS = 0x9c9c9c9cu, FROM_RIGHT = 0x8c8c8c8cu;
  first = word & E4M3_BITS;
  second = ((word << 2 & FROM_RIGHT) | (word >> 2 & ~FROM_RIGHT)) & E4M3_BITS;
}
// The A operands of a block's four products of 32 columns, from a thread's words.
DEVICE void unfold(uint32_t (&a)[4][4], const uint4 (&words)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unfold(a[2 * half][0], a[2 * half][1], words[half].x);
    unfold(a[2 * half][2], a[2 * half][3], words[half].y);
    unfold(a[2 * half + 1][0], a[2 * half + 1][1], words[half].z);
    unfold(a[2 * half + 1][2], a[2 * half + 1][3], words[half].w);
  }
}

// A thread's words of a block, and the scales of its rows g and g + 8.
DEVICE void load_block(uint4 (&words)[2], float (&scale)[2], const uint8_t* block) {
  const int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP, warp = thread / WARP;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    words[half] = *reinterpret_cast<const uint4*>(block + half * (BLOCK_CODES / 2) + thread * 16);
  const float* scales = reinterpret_cast<const float*>(block + BLOCK_CODES) + warp * 16 + lane / 4;
  scale[0] = scales[0];
  scale[1] = scales[8];
}

DEVICE void load_a(uint32_t (&a)[4][4], float (&scale)[2], const uint8_t* block) {
  uint4 words[2];
  load_block(words, scale, block);
  unfold(a, words);
}

// The operands are ready here: the compiler unfolds none of them between products, each of which it would then fence.
DEVICE void settle(uint32_t (&a)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) keep_here(a[k][i]);
}

// ---- the output -----------------------------------------------------------------------------------------------------

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
// WHOLE: all these tokens exist, and no address is computed for one.
template <bool WHOLE, typename T, int SIZE>
DEVICE void to_rows(uint16_t (*y)[64], const float (&sums)[SIZE], const GemmW4a8Args& args, int first_m, float factor,
                    const Bias<T>& bias) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, t = lane % 4;
  const float* scales = args.x_scales + first_m + 2 * t;
  const int last = args.m - 1 - first_m - 2 * t;
#pragma unroll
  for (int j = 0; j < SIZE / 4; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = (j + i) * 8;
      const float low = scales[WHOLE ? m : min(m, last)] * factor;
      const float high = scales[WHOLE ? m + 1 : min(m + 1, last)] * factor;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        pairs[2 * i + half] = pack2<T>(fmaf(low, sums[(j + i) * 4 + 2 * half], bias.row[half]),
                                       fmaf(high, sums[(j + i) * 4 + 2 * half + 1], bias.row[half]));
    }
    const int row = j * 8 + lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
    stmatrix_x4_trans(smem_u32(&y[row][(piece ^ row % 8) * 8]), pairs);
  }
}
template <typename T, int SIZE>
DEVICE void to_rows_of_tokens(uint16_t (*y)[64], const float (&sums)[SIZE], const GemmW4a8Args& args, int first_m,
                              float factor, const Bias<T>& bias) {
  if (first_m + 2 * SIZE <= args.m)
    to_rows<true>(y, sums, args, first_m, factor, bias);
  else
    to_rows<false>(y, sums, args, first_m, factor, bias);
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

// ---- persistent blocks ----------------------------------------------------------------------------------------------

struct Place {
  int n, m;  // in tiles
};

// The order of tiles: blocks that run at the same time share weight rows and tokens. Groups of GROUP_M tiles along the
// tokens walk the weight together.
struct Tiles {
  static constexpr int GROUP_M = 8;
  int n, m;
  DEVICE int count() const { return n * m; }
  DEVICE Place place(int tile) const {
    const int first = tile / (GROUP_M * n) * GROUP_M, within = tile % (GROUP_M * n), size = min(GROUP_M, m - first);
    return {within / size, first + within % size};
  }
};

// Gives a stage back: a warp arrives once, after the reads of all its lanes.
DEVICE void release(uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) mbarrier_arrive(smem_u32(&empty));
}

// Reads the scales of the tile's tokens, so that they lie in L1 at its end.
template <int TOKENS>
DEVICE void warm_scales(const GemmW4a8Args& args, int first_m) {
  for (int i = threadIdx.x % WARPGROUP; i < TOKENS; i += WARPGROUP)
    if (first_m + i < args.m) ld_global_nc_u32(args.x_scales + first_m + i);
}

// The sums of a group of columns, exactly scaled, into FP32.
template <int SIZE>
DEVICE void add_scaled(float (&acc)[SIZE], const float (&scale)[2], const float (&sums)[SIZE]) {
#pragma unroll
  for (int i = 0; i < SIZE; ++i) acc[i] = fmaf(scale[i % 4 / 2], sums[i], acc[i]);
}

// As store_tile, from batches of tokens, and without waiting for the copy: the one before it must have been read.
template <typename T, int BATCHES, int SIZE>
DEVICE void store_batches(uint16_t (*y)[64], const float (&sums)[BATCHES][SIZE], const GemmW4a8Args& args,
                          const CUtensorMap& y_map, int group, int first_n, int first_m) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
  const Bias<T> bias(args, first_n + warp * 16 + lane / 4);
  if (threadIdx.x % WARPGROUP == 0) cp_async_bulk_wait_group_read<0>();
  bar_sync(1 + group, WARPGROUP);
#pragma unroll
  for (int batch = 0; batch < BATCHES; ++batch)
    to_rows_of_tokens<T>(y + batch * SIZE * 2, sums[batch], args, first_m + batch * SIZE * 2, RESTORE, bias);
  fence_proxy_async_shared();
  bar_sync(1 + group, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
    cp_async_bulk_tensor_2d_s2g(&y_map, smem_u32(y), first_n, first_m);
    cp_async_bulk_commit_group();
  }
}
