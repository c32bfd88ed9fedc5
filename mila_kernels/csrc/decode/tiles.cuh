// Tiles of keys or values in shared memory as the tensor-core steps use them: rows of 16-byte chunks, swizzled so that
// eight rows of one column lie in different banks, and the fragments that mma.m16n8k16 takes from them.
#pragma once

#include <type_traits>

#include "args.cuh"

// Products are made in the cache's own type, those of E4M3 in FP16, which holds every E4M3 value.
template <typename KV>
using Product = std::conditional_t<std::is_same_v<KV, e4m3>, fp16, KV>;

// A tile of up to 64 keys in at most TILE_BYTES, and how the WARPS of a block share it.
template <typename KV_, int HS_, int TILE_BYTES, int WARPS_>
struct Shape {
  using KV = KV_;
  static constexpr int HS = HS_, WARPS = WARPS_, THREADS = WARPS * WARP;
  static constexpr int CHUNKS = HS * static_cast<int>(sizeof(KV)) / 16;  // of a row
  static constexpr int Bc = TILE_BYTES / (16 * CHUNKS) < 64 ? TILE_BYTES / (16 * CHUNKS) : 64;  // keys
  static constexpr int PARTS = WARPS * 16 / Bc;  // of the head dim: a warp multiplies 16 keys by one of them
  static constexpr int STEPS = HS / 16 / PARTS;  // mma along a part
  static constexpr int DIMS = HS / WARPS;        // columns of V a warp owns
  static constexpr int M_TILES = DIMS / 16;
};

template <typename G>
using Tile = uint4[G::Bc * G::CHUNKS];

template <int CHUNKS>
DEVICE int swizzled(int row, int chunk) {
  return row * CHUNKS + (chunk ^ (CHUNKS >= 8 ? row & 7 : row >> 1 & (CHUNKS - 1)));
}

// Two E4M3 in the low half of x as two FP16, exactly; NaN stays NaN.
DEVICE uint32_t f16x2_from_e4m3x2(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(x), __NV_E4M3);
  return static_cast<uint32_t>(pair.y) << 16 | pair.x;
#else
  return cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(x));
#endif
}

// ---- copies ----------------------------------------------------------------------------------------------------------

// Where the rows of a tile lie: lane l of each warp holds the page of the tile's l-th part of page size; flat caches
// have one part, the sequence, and their first live row lies in slot `slot`.
struct TilePlace {
  int page, slot;
};

// `keys` are those read of the tile of positions [tile, tile + Bc); table entries of others are not looked at.
template <int Bc>
DEVICE TilePlace find_tile(const DecodeArgs& args, int batch, int tile, KeyRange keys, bool& lost) {
  if (!args.page_table) {
    const int first = max(tile, keys.begin);
    return {batch, args.ring ? first % args.capacity : first};
  }
  const int lane = threadIdx.x % WARP, size = 1 << args.page_shift;
  const int begin = (tile & -size) + lane * size;  // a page may be larger than a tile
  int page = 0;
  if (begin < min(tile + Bc, keys.end) && begin + size > keys.begin) {
    const int column = begin >> args.page_shift;
    page = args.page_table[batch * args.page_table_stride + column];
    if (page < 0 || page >= args.pages) {
      report(args, FAULT_PAGE, batch, column);
      lost = true;
      page = 0;
    }
  }
  return {page, 0};
}

// Starts the copy of one tile; rows outside `keys` become zeros, so that 0 times them is 0. Does not commit.
template <typename G>
DEVICE void copy_tile(Tile<G>& tile_smem, const DecodeArgs& args, const void* base, const int64_t (&stride)[3],
                      int kv_head, int tile, KeyRange keys, TilePlace place) {
  using KV = typename G::KV;
  constexpr int CHUNKS = G::CHUNKS, Bc = G::Bc;
  constexpr int PASS = G::THREADS / CHUNKS;                   // rows that the block copies at once
  constexpr int PASSES = Bc / PASS, RUN = PASS < 16 ? 16 / PASS : 1;  // passes within 16 rows: they lie in one page
  const int chunk = threadIdx.x % CHUNKS, first_row = threadIdx.x / CHUNKS;
  const KV* column = static_cast<const KV*>(base) + kv_head * stride[2] + chunk * (16 / static_cast<int>(sizeof(KV)));
  const bool whole = tile >= keys.begin && tile + Bc <= keys.end;

  if (whole && (args.page_table || !args.ring || place.slot + Bc <= args.capacity)) {
#pragma unroll
    for (int run = 0; run < PASSES; run += RUN) {
      const int row = first_row + run * PASS;
      int page = place.page, slot = place.slot + row;
      if (args.page_table) {
        page = __shfl_sync(ALL_LANES, place.page, row >> args.page_shift);
        slot = (tile + row) & ((1 << args.page_shift) - 1);
      }
      const KV* source = column + page * stride[0] + slot * stride[1];
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        cp_async_cg(smem_u32(&tile_smem[swizzled<CHUNKS>(row + i * PASS, chunk)]), source);
        source += PASS * stride[1];
      }
    }
    return;
  }

  const int first = max(tile, keys.begin);
#pragma unroll 1
  for (int row = first_row; row < Bc; row += PASS) {
    const int position = tile + row;
    const bool live = position >= keys.begin && position < keys.end;
    int page = place.page, slot;
    if (args.page_table) {
      page = __shfl_sync(ALL_LANES, place.page, row >> args.page_shift);
      slot = position & ((1 << args.page_shift) - 1);
    } else {
      slot = place.slot + position - first;
      if (args.ring && slot >= args.capacity) slot -= args.capacity;
    }
    const KV* source = live ? column + page * stride[0] + slot * stride[1] : static_cast<const KV*>(base);
    cp_async_cg_zfill(smem_u32(&tile_smem[swizzled<CHUNKS>(row, chunk)]), source, live ? 16 : 0);
  }
}

// ---- queries: the B operand of S^T = K Q^T ---------------------------------------------------------------------------

// 8 * NT rows of Q in the order in which lanes take them. Which dims a lane takes follows from how it reads K.
template <typename G, int NT>
struct Queries {
  uint2 fragments[G::HS / 16][NT][WARP];
  float scale[8 * NT];  // of a row's scores, in base 2
};

// A warp a row, all its loads at once. A BF16 row that becomes FP16 is scaled by a power of two to below 2, so that no
// query overflows.
template <typename G, int NT>
DEVICE void load_queries(Queries<G, NT>& queries, const DecodeArgs& args, int batch, int kv_head, int first_row) {
  using KV = typename G::KV;
  constexpr int CHUNKS = G::HS / 8, LOADS = ceil_div(CHUNKS, WARP), ROUNDS = 8 * NT / G::WARPS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint4 chunks[ROUNDS][LOADS];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int row = first_row + round * G::WARPS + warp;  // rows that fill up the tile are zeros
    const int64_t q = query_offset(args, args.q_stride, batch, row_token(args, row), row_head(args, kv_head, row));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int chunk = i * WARP + lane;
      chunks[round][i] = row < row_count(args) && chunk < CHUNKS
                             ? ld_global_nc_v4_u32(static_cast<const uint16_t*>(args.q) + q + chunk * 8)
                             : uint4{0, 0, 0, 0};
    }
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int n = round * G::WARPS + warp;
    float down = 1.0f, up = 1.0f;
    if constexpr (std::is_same_v<KV, e4m3>) {
      if (args.dtype == DTYPE_BF16) {
        uint32_t top = 0;  // the largest exponent, as BF16 has it
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          const uint32_t words[4] = {chunks[round][i].x, chunks[round][i].y, chunks[round][i].z, chunks[round][i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j)
            top = max(top, max(words[j] & 0x7fff0000u, words[j] << 16 & 0x7fff0000u));
        }
        const int exponent = static_cast<int>(__reduce_max_sync(ALL_LANES, top) >> 23);
        const int kept = min(max(exponent, 127 - 96), 127 + 96);
        down = __uint_as_float(static_cast<uint32_t>(254 - kept) << 23);
        up = __uint_as_float(static_cast<uint32_t>(kept) << 23);
      }
    }
    if (lane == 0) queries.scale[n] = score_scale(args, kv_head) * up;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int chunk = i * WARP + lane;
      if (chunk >= CHUNKS) break;
      const uint32_t words[4] = {chunks[round][i].x, chunks[round][i].y, chunks[round][i].z, chunks[round][i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t word = words[j];
        int step = chunk / 2, t = j, upper = chunk % 2;
        if constexpr (std::is_same_v<KV, e4m3>) {
          step = chunk / 8 * 4 + chunk % 2 * 2 + j / 2, t = chunk % 8 / 2, upper = j % 2;
          if (args.dtype == DTYPE_BF16)
            word = pack2<fp16>(__uint_as_float(word << 16) * down, __uint_as_float(word & 0xffff0000u) * down);
        }
        uint2& fragment = queries.fragments[step][n / 8][n % 8 * 4 + t];
        (upper ? fragment.y : fragment.x) = word;
      }
    }
  }
}

// ---- keys and values: the A operands ---------------------------------------------------------------------------------

// E4M3 keys are permuted within eight, so that neighbouring lanes read different banks.
template <typename KV>
DEVICE int key_of_lane(int g) {
  return std::is_same_v<KV, e4m3> ? g >> 1 | (g & 1) << 2 : g;
}

// s[n] = the products of 16 keys from `first_key` with the rows of Q, along STEPS steps of the head dim from `first`.
// query(step, n) is the lane's fragment, UNROLL how much of the loop
// is written out. Two sums take the steps in turn: half the wait for each other's result.
template <typename G, int NT, int UNROLL = G::STEPS, typename Query>
DEVICE void multiply_keys(float (&s)[NT][4], const Tile<G>& k, int first_key, int first, Query query) {
  using KV = typename G::KV;
  constexpr int CHUNKS = G::CHUNKS, STEPS = G::STEPS;
  const int lane = threadIdx.x % WARP;
  float sums[2][NT][4] = {};
  if constexpr (std::is_same_v<KV, e4m3>) {
    const int key = first_key + key_of_lane<KV>(lane / 4);
#pragma unroll(ceil_div(UNROLL, 4))
    for (int group = 0; group < STEPS / 4; ++group) {  // a lane takes 16 contiguous bytes of a row: four steps
      const int chunk = first + group * 4 + lane % 4;
      const uint4 low = k[swizzled<CHUNKS>(key, chunk)], high = k[swizzled<CHUNKS>(key + 8, chunk)];
      const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t a[4] = {f16x2_from_e4m3x2(low_words[j]), f16x2_from_e4m3x2(high_words[j]),
                               f16x2_from_e4m3x2(low_words[j] >> 16), f16x2_from_e4m3x2(high_words[j] >> 16)};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint2 b = query(group * 4 + j, n);
          mma_m16n8k16<fp16>(sums[j % 2][n], a, b.x, b.y);
        }
      }
    }
  } else {
    const int key = first_key + lane % 16;
#pragma unroll(UNROLL)
    for (int step = 0; step < STEPS; ++step) {
      uint32_t a[4];
      ldmatrix_x4(a, smem_u32(&k[swizzled<CHUNKS>(key, (first + step) * 2 + lane / 16)]));
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint2 b = query(step, n);
        mma_m16n8k16<KV>(sums[step % 2][n], a, b.x, b.y);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[n][j] = sums[0][n][j] + sums[1][n][j];
}

template <int BYTES>
struct alignas(BYTES) Bytes {
  std::conditional_t<BYTES == 2, uint16_t, uint32_t> words[BYTES == 2 ? 1 : BYTES / 4];
};

// o[m][n] += V^T P^T over 16 keys from `first_key`: the warp's columns of V by the rows of P.
template <typename G, int NT>
DEVICE void multiply_values(float (&o)[G::M_TILES][NT][4], const Tile<G>& v, const uint2 (&p)[NT], int first_key) {
  using KV = typename G::KV;
  constexpr int CHUNKS = G::CHUNKS, M_TILES = G::M_TILES, DIMS = G::DIMS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if constexpr (std::is_same_v<KV, e4m3>) {
    // A lane takes DIMS / 8 neighbouring columns of its four keys; bytes of two keys make a pair: no transpose is
    // needed.
    constexpr int BYTES = DIMS / 8;
    const int byte = warp * DIMS + lane / 4 * BYTES, key = first_key + lane % 4 * 2;
    Bytes<BYTES> rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4* chunk = &v[swizzled<CHUNKS>(key + i % 2 + i / 2 * 8, byte / 16)];
      rows[i] = *reinterpret_cast<const Bytes<BYTES>*>(reinterpret_cast<const char*>(chunk) + byte % 16);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const int word = m / 2;
      // {key 2t, key 2t + 1} of columns 2m and 2m + 1, a byte each
      const uint32_t selector = m % 2 ? 0x7362 : 0x5140;
      const uint32_t near = prmt(rows[0].words[word], rows[1].words[word], selector);
      const uint32_t far = prmt(rows[2].words[word], rows[3].words[word], selector);
      const uint32_t a[4] = {f16x2_from_e4m3x2(near), f16x2_from_e4m3x2(near >> 16), f16x2_from_e4m3x2(far),
                             f16x2_from_e4m3x2(far >> 16)};
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<fp16>(o[m][n], a, p[n].x, p[n].y);
    }
  } else {
    const int key = first_key + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, smem_u32(&v[swizzled<CHUNKS>(key, (warp * M_TILES + m) * 2 + lane / 8 % 2)]));
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<KV>(o[m][n], a, p[n].x, p[n].y);
    }
  }
}

// The column of V in a warp's accumulator row g (upper = 0) or g + 8 (upper = 1) of tile m.
template <typename G>
DEVICE int value_column(int warp, int m, int g, int upper) {
  using KV = typename G::KV;
  constexpr int DIMS = G::DIMS;
  return warp * DIMS + (std::is_same_v<KV, e4m3> ? g * (DIMS / 8) + 2 * m + upper : m * 16 + g + 8 * upper);
}

// The same of the calling warp.
template <typename G>
DEVICE int value_column(int m, int g, int upper) {
  return value_column<G>(threadIdx.x / WARP, m, g, upper);
}
