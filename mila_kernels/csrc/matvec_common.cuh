// What the matvecs with FP4 and with FP8 weights share: activations as the B operand of mma.m16n8k16, and launches that
// overlap with the kernel in front of them.
#pragma once

#include "common.cuh"
#include "ptx.cuh"

constexpr int GROUP = 128;     // columns that share a scale, and that a warp takes at a time
constexpr int TILE_ROWS = 16;  // rows of a tile of a shuffled weight, those of one mma

// Columns of the B operand that a row of activations takes. FP16 has three bits more than BF16: it is the sum of two.
constexpr __host__ __device__ int terms_of(int dtype) { return dtype == DTYPE_FP16 ? 2 : 1; }

// Activations in shared memory: terms * m columns of k, each this many elements after the one before. The 16 bytes more
// than k put the eight columns that a warp reads at once into different banks.
DEVICE int x_pitch(int k) { return k + 8; }

inline size_t x_smem_bytes(int columns, int k) { return sizeof(bf16) * columns * (k + 8); }

// How much of k fits at a time: a multiple of GROUP, parts as equal as can be.
inline int x_columns_that_fit(int k, int columns, int bytes) {
  const int most = bytes / static_cast<int>(columns * sizeof(bf16)) / GROUP * GROUP;
  const int parts = ceil_div(k, most);
  return ceil_div(ceil_div(k, parts), GROUP) * GROUP;
}

template <int NT, typename F>
const char* call_columns(F f) {
  if constexpr (ONLY_COLUMN_TILES == 0 || ONLY_COLUMN_TILES == NT)
    return f.template operator()<NT>();
  else
    return "this library was built for another number of rows of x";
}

// Calls f<NT>() for the number of mma's that so many columns take.
template <typename F>
const char* with_columns(int columns, F f) {
  if (columns <= 8) return call_columns<1>(f);
  if (columns <= 16) return call_columns<2>(f);
  return call_columns<4>(f);
}

DEVICE uint4 times(uint4 x, float factor) {
  const auto both = [&](uint32_t pair) {
    return pack2<bf16>(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
  };
  return make_uint4(both(x.x), both(x.y), both(x.z), both(x.w));
}

// Decoded weights are far below 1 (FP4: value x 2^-126, FP8: value x 2^-120), BF16 subnormals among them. Activations
// times 2^96 keep the FP32 sums away from the subnormals; where an activation is too large for that, all stay as they
// are, and the sums are still good to 22 bits of the largest.
constexpr float X_FACTOR = 0x1p96f;
constexpr float X_LARGEST = 0x1p31f;

DEVICE bool too_large(const uint4& loaded) {
  const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  bool found = false;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    found |= fmaxf(fabsf(__uint_as_float(pairs[i] << 16)), fabsf(__uint_as_float(pairs[i] & 0xffff0000u))) >= X_LARGEST;
  return found;
}

// Eight FP16 as two times eight BF16 that sum to them.
DEVICE void split_terms(uint4 (&terms)[2], const uint4& loaded, float factor) {
  const fp16* x = reinterpret_cast<const fp16*>(&loaded);
  uint32_t pairs[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float high[2], low[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float value = to_float(x[2 * i + j]);
      high[j] = to_float(from_float<bf16>(value));
      low[j] = isfinite(value) ? value - high[j] : 0.0f;
    }
    pairs[0][i] = pack2<bf16>(high[0] * factor, high[1] * factor);
    pairs[1][i] = pack2<bf16>(low[0] * factor, low[1] * factor);
  }
#pragma unroll
  for (int term = 0; term < 2; ++term)
    terms[term] = make_uint4(pairs[term][0], pairs[term][1], pairs[term][2], pairs[term][3]);
}

// The part of the activations x [m][...] that a block multiplies with: columns `begin` to `begin + k`.
struct Activations {
  const void* x;
  int64_t stride;  // of rows, in elements
  int dtype, m, begin, k;

  // Calls f(row, column, where they lie in global memory, and in shared memory) for the calling thread's 16 bytes each.
  template <typename F>
  DEVICE void for_my_loads(bf16* x_smem, F f) const {
    constexpr int PER_LOAD = 8;
    const int loads = k / PER_LOAD, terms = terms_of(dtype), pitch = x_pitch(k);
    for (int i = threadIdx.x; i < loads * m; i += blockDim.x) {
      const int row = i / loads, column = i % loads * PER_LOAD;
      f(static_cast<const uint16_t*>(x) + row * stride + begin + column, x_smem + row * terms * pitch + column);
    }
  }

  // Starts to bring them into shared memory, as they are.
  DEVICE void fetch(bf16* x_smem) const {
    for_my_loads(x_smem, [](const uint16_t* from, bf16* to) { cp_async_cg(smem_u32(to), from); });
    cp_async_commit_group();
  }

  // Makes of them what the products need; by all threads of the block, with a barrier at the end. Gives the factor that
  // they were multiplied by.
  DEVICE float finish(bf16* x_smem) const {
    cp_async_wait_all();
    if (dtype == DTYPE_FP16) {  // ends at 65504: never too large
      for_my_loads(x_smem, [&](const uint16_t*, bf16* to) {
        uint4 terms[2];
        split_terms(terms, *reinterpret_cast<const uint4*>(to), X_FACTOR);
        *reinterpret_cast<uint4*>(to) = terms[0];
        *reinterpret_cast<uint4*>(to + x_pitch(k)) = terms[1];
      });
      __syncthreads();
      return X_FACTOR;
    }
    bool found = false;
    for_my_loads(x_smem, [&](const uint16_t*, bf16* to) {
      uint4& words = *reinterpret_cast<uint4*>(to);
      found |= too_large(words);
      words = times(words, X_FACTOR);
    });
    if (!__syncthreads_or(found)) return X_FACTOR;
    for_my_loads(x_smem, [](const uint16_t* from, bf16* to) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    });
    __syncthreads();
    return 1.0f;
  }
};

// The same for one warp that multiplies with its own groups of columns: columns `begin` on, GROUP_PITCH elements from one
// column of the B operand to the next, zeros past the end of x.
constexpr int GROUP_PITCH = GROUP + 8;

struct WarpActivations {
  const void* x;
  int64_t stride;  // of rows, in elements
  int dtype, m, k, begin;

  // Brings them in as [GROUPS][terms * m][GROUP_PITCH], by all lanes of the warp, and gives the factor. BATCH loads of a
  // lane are under way before the first is used: so many fewer latencies, so many more registers.
  template <int GROUPS, int BATCH>
  DEVICE float bring(bf16* x_warp, int lane) const {
    if (!__any_sync(ALL_LANES, copy<GROUPS, BATCH>(x_warp, lane, X_FACTOR))) {
      __syncwarp();
      return X_FACTOR;
    }
    copy<GROUPS, BATCH>(x_warp, lane, 1.0f);
    __syncwarp();
    return 1.0f;
  }

  // Whether any of the lane's was too large.
  template <int GROUPS, int BATCH>
  DEVICE bool copy(bf16* x_warp, int lane, float factor) const {
    constexpr int PER_LOAD = 8, LOADS = GROUP / PER_LOAD;  // a group's of one row
    const int terms = terms_of(dtype), columns = m * terms, total = m * GROUPS * LOADS;
    bool found = false;
    for (int first = lane; first < total; first += WARP * BATCH) {
      uint4 loaded[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b * WARP, row = i / (GROUPS * LOADS), from = begin + i % (GROUPS * LOADS) * PER_LOAD;
        loaded[b] = make_uint4(0, 0, 0, 0);
        if (i < total && from < k)
          loaded[b] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + row * stride + from);
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b * WARP, row = i / (GROUPS * LOADS), group = i / LOADS % GROUPS;
        if (i >= total) break;
        uint4* to = reinterpret_cast<uint4*>(x_warp + (group * columns + row * terms) * GROUP_PITCH + i % LOADS * PER_LOAD);
        if (dtype == DTYPE_FP16) {
          uint4 split[2];
          split_terms(split, loaded[b], factor);
          to[0] = split[0];
          to[GROUP_PITCH / PER_LOAD] = split[1];
        } else {
          found |= too_large(loaded[b]);
          *to = times(loaded[b], factor);
        }
      }
    }
    return found;
  }
};

// Sum of y[warp * stride] over the warps, in their order.
DEVICE float sum_over_warps(const float* y, int warps, int stride) {
  float sum = 0.0f;
#pragma unroll 5
  for (int warp = 0; warp < warps; ++warp) sum += y[warp * stride];
  return sum;
}

template <typename... Params, typename... Args>
inline const char* launch_overlapping(bool overlap, void (*kernel)(Params...), dim3 grid, dim3 block,
                                      size_t smem_bytes, cudaStream_t stream, Args... args) {
  return overlap ? launch_dependent(kernel, grid, block, smem_bytes, stream, args...)
                 : launch(kernel, grid, block, smem_bytes, stream, args...);
}

template <typename T, typename Args>
DEVICE void store_y(const Args& args, int m, int n, float sum) {
  if (args.bias) sum += to_float(static_cast<const T*>(args.bias)[n]);
  static_cast<T*>(args.y)[m * args.y_stride + n] = from_float<T>(sum);
}

template <typename Args>
DEVICE void store_y(const Args& args, int m, int n, float sum) {
  if (args.dtype == DTYPE_FP16) {
    store_y<fp16>(args, m, n, sum);
  } else {
    store_y<bf16>(args, m, n, sum);
  }
}
