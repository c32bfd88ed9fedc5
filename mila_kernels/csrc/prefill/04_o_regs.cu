// Change: O in registers. PV goes through mma.sync.m16n8k16, whose fragment layout is documented: a thread knows which
//   two rows its accumulators hold and rescales them itself. Scores still come from WMMA.
// Prediction: reading, rescaling and writing O at every tile (130 KB of shared memory traffic at head dim 512, twice
//   what K and V take) is gone and shared memory falls from 91 to 57 KB: 1.5 to 2 times faster.
// Measured: H200, 2026-11-29, prefill/published-instance: 2.49 ms, 1.15 times faster; published: 1.77 times. ncu:
//   shared memory wavefronts fall by 37%, the wait for K and V (long scoreboard) stays.
// Verdict: Kept, though it brought less than predicted: two blocks an SM already hid part of O's traffic here, and what
//   is left is the wait for K and V, which the next step removes.
// Head dims: 64 128 256 512
// Alignment: 16
#include "../ptx.cuh"
#include "args.cuh"

constexpr int Br = 16;  // query rows a block
constexpr int Bc = 32;  // keys a tile
constexpr int PAD = 8;  // elements after each row: 16-bit rows then start 4 banks apart

template <int HS>
constexpr int WARPS = HS / 16 < 8 ? HS / 16 : 8;  // a warp owns at least the 16 columns of a fragment

template <typename T, int HS>
struct Smem {
  T kv[Bc][HS + PAD];  // a tile of K, then the tile of V; before the first tile, Q
  float s_part[WARPS<HS>][Br][Bc + PAD];  // what each warp's columns contribute to the scores
  float s[Br][Bc + 1];
  T p[Br][Bc + PAD];
  float row_max[Br], row_sum[Br], rescale[Br];
};

// Copies rows [first, first + count) into the tile and zeros after them: 0 times what was there must be 0.
template <typename T, int HS>
DEVICE void load_tile(T (&tile)[Bc][HS + PAD], const void* base, const int64_t (&stride)[3], int batch, int first,
                      int head, int count) {
  constexpr int VECTORS = HS / 8;  // of 16 bytes, in a row
  for (int i = threadIdx.x; i < Bc * VECTORS; i += blockDim.x) {
    const int j = i / VECTORS, column = i % VECTORS * 8;
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (j < count) vector = *reinterpret_cast<const uint4*>(row<T>(base, stride, batch, first + j, head) + column);
    *reinterpret_cast<uint4*>(&tile[j][column]) = vector;
  }
}

// Two neighbours of a column as one register of a B fragment.
template <typename T>
DEVICE uint32_t column_pair(const T& upper, const T& lower) {
  return reinterpret_cast<const uint16_t&>(upper) | reinterpret_cast<const uint16_t&>(lower) << 16;
}

template <typename T>
DEVICE uint32_t row_pair(const T& first) {
  return reinterpret_cast<const uint32_t&>(first);
}

template <typename T, int HS>
__global__ void __launch_bounds__(WARPS<HS>* WARP, 2) prefill_o_regs(const PrefillArgs args) {
  constexpr int COLUMNS = HS / WARPS<HS>;  // of the head dim, a warp
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first_column = warp * COLUMNS;
  const int g = lane / 4, t = lane % 4;  // an accumulator holds rows g and g + 8, columns 2t and 2t + 1
  const int first_query = blockIdx.x * Br, rows = min(Br, args.q_len - first_query);
  const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / (args.q_heads / args.kv_heads);
  Smem<T, HS>& smem = dynamic_smem<Smem<T, HS>>();

  load_tile<T, HS>(smem.kv, args.q, args.q_stride, batch, first_query, head, rows);
  if (threadIdx.x < Br) {
    smem.row_max[threadIdx.x] = -INFINITY;
    smem.row_sum[threadIdx.x] = 0.0f;
  }
  __syncthreads();
  WmmaA<T> q_regs[COLUMNS / 16];
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) wmma_load_a_row(q_regs[k], &smem.kv[0][first_column + k * 16], HS + PAD);

  float o_regs[COLUMNS / 8][4] = {};

  const KeyRange block_keys = {visible_keys(args, first_query).begin, visible_keys(args, first_query + rows - 1).end};
  for (int tile = block_keys.begin; tile < block_keys.end; tile += Bc) {
    const int count = min(Bc, block_keys.end - tile);
    __syncthreads();  // the last tile of V, or Q, has been read
    load_tile<T, HS>(smem.kv, args.k, args.k_stride, batch, tile, kv_head, count);
    __syncthreads();

#pragma unroll
    for (int n = 0; n < Bc / 16; ++n) {
      WmmaC s_regs = {};
#pragma unroll
      for (int k = 0; k < COLUMNS / 16; ++k) {
        WmmaB<T> k_regs;
        wmma_load_b_col(k_regs, &smem.kv[n * 16][first_column + k * 16], HS + PAD);
        wmma_mma_row_col(s_regs, q_regs[k], k_regs);
      }
      wmma_store_d_row(&smem.s_part[warp][0][n * 16], s_regs, Bc + PAD);
    }
    __syncthreads();  // all scores are there, and K has been read

    load_tile<T, HS>(smem.kv, args.v, args.v_stride, batch, tile, kv_head, count);
    for (int i = threadIdx.x; i < Br * Bc; i += blockDim.x) {
      float score = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS<HS>; ++w) score += smem.s_part[w][i / Bc][i % Bc];
      smem.s[i / Bc][i % Bc] = score * args.scale;
    }
    __syncthreads();

    if (threadIdx.x < Br) {  // one thread a row
      const int r = threadIdx.x;
      const KeyRange keys = r < rows ? visible_keys(args, first_query + r) : KeyRange{0, 0};
      float new_max = smem.row_max[r];
      for (int j = 0; j < Bc; ++j)
        if (tile + j >= keys.begin && tile + j < keys.end) new_max = fmaxf(new_max, smem.s[r][j]);

      // While no key was visible the maximum is -inf, and exp(-inf - -inf) would be NaN.
      const float shift = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = expf(smem.row_max[r] - shift);
      float row_sum = smem.row_sum[r] * rescale;
      for (int j = 0; j < Bc; ++j) {
        const bool visible = tile + j >= keys.begin && tile + j < keys.end;
        const float p = visible ? expf(smem.s[r][j] - shift) : 0.0f;
        row_sum += p;
        smem.p[r][j] = from_float<T>(p);
      }
      smem.row_max[r] = new_max;
      smem.row_sum[r] = row_sum;
      smem.rescale[r] = rescale;
    }
    __syncthreads();

    const float rescale_upper = smem.rescale[g], rescale_lower = smem.rescale[g + 8];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      o_regs[n][0] *= rescale_upper;
      o_regs[n][1] *= rescale_upper;
      o_regs[n][2] *= rescale_lower;
      o_regs[n][3] *= rescale_lower;
    }
#pragma unroll
    for (int k = 0; k < Bc; k += 16) {
      const uint32_t p_regs[4] = {row_pair(smem.p[g][k + 2 * t]), row_pair(smem.p[g + 8][k + 2 * t]),
                                  row_pair(smem.p[g][k + 8 + 2 * t]), row_pair(smem.p[g + 8][k + 8 + 2 * t])};
      const int j = k + 2 * t;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        const int column = first_column + n * 8 + g;
        mma_m16n8k16<T>(o_regs[n], p_regs, column_pair(smem.kv[j][column], smem.kv[j + 1][column]),
                        column_pair(smem.kv[j + 8][column], smem.kv[j + 9][column]));
      }
    }
  }
  __syncthreads();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = g + 8 * half;
    if (r >= rows) continue;
    const float inverse = smem.row_sum[r] == 0.0f ? 0.0f : 1.0f / smem.row_sum[r];
    T* o = row<T>(args.o, args.o_stride, batch, first_query + r, head) + first_column + 2 * t;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
      *reinterpret_cast<uint32_t*>(o + n * 8) =
          pack2<T>(o_regs[n][2 * half] * inverse, o_regs[n][2 * half + 1] * inverse);
  }
  if (args.lse && threadIdx.x < rows)
    args.lse[(static_cast<int64_t>(batch) * args.q_heads + head) * args.q_len + first_query + threadIdx.x] =
        smem.row_max[threadIdx.x] + logf(smem.row_sum[threadIdx.x]);
}

extern "C" const char* launch_step(const PrefillArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename T, int HS>() {
    const dim3 grid(ceil_div(args->q_len, Br), args->q_heads, args->batch);
    return launch(prefill_o_regs<T, HS>, grid, WARPS<HS> * WARP, sizeof(Smem<T, HS>), stream, *args);
  });
}
