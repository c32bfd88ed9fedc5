// Change: QK^T through mma.sync too, with Q in registers. The sum over the warps' partial scores moves into the
//   softmax, which one warp does: 16 lanes, a row each. One barrier a tile less.
// Prediction: the tensor work is the same. The sum of 8 partials for 512 scores now runs on 16 lanes while the rest of
//   the block waits: 4,096 loads from shared memory in 256 dependent steps, where 256 threads took 16. Slower by half.
// Measured: H200, 2026-11-29, prefill/published-instance: 1.61 ms, 12% slower; published: 57% slower. ncu: barrier 6.0
//   clocks an instruction, the largest of all steps. Without its softmax: 0.84 ms.
// Verdict: Slower, kept as the ablation. The serial softmax is the critical path; it costs less here because two blocks
//   share an SM and one computes while 16 lanes of the other sum. The published card held one block.
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
  T k[Bc][HS + PAD];
  T v[Bc][HS + PAD];  // before the first tile, Q
  float s_part[WARPS<HS>][Br][Bc + PAD];  // what each warp's columns contribute to the scores
  float s[Br][Bc + 1];
  T p[Br][Bc + PAD];
  float row_max[Br], row_sum[Br], rescale[Br];
};

// Starts the copy of rows [first, first + count) into the tile and of zeros after them: 0 times what was there must
// be 0. One group.
template <typename T, int HS>
DEVICE void load_tile_async(T (&tile)[Bc][HS + PAD], const void* base, const int64_t (&stride)[3], int batch, int first,
                            int head, int count) {
  constexpr int VECTORS = HS / 8;  // of 16 bytes, in a row
  for (int i = threadIdx.x; i < Bc * VECTORS; i += blockDim.x) {
    const int j = i / VECTORS, column = i % VECTORS * 8;
    const T* source = row<T>(base, stride, batch, first + min(j, count - 1), head) + column;
    cp_async_cg_zfill(smem_u32(&tile[j][column]), source, j < count ? 16 : 0);
  }
  cp_async_commit_group();
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
__global__ void __launch_bounds__(WARPS<HS>* WARP, 2) prefill_qk_mma(const PrefillArgs args) {
  constexpr int COLUMNS = HS / WARPS<HS>;  // of the head dim, a warp
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first_column = warp * COLUMNS;
  const int g = lane / 4, t = lane % 4;  // an accumulator holds rows g and g + 8, columns 2t and 2t + 1
  const int first_query = blockIdx.x * Br, rows = min(Br, args.q_len - first_query);
  const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / (args.q_heads / args.kv_heads);
  Smem<T, HS>& smem = dynamic_smem<Smem<T, HS>>();

  const KeyRange block_keys = {visible_keys(args, first_query).begin, visible_keys(args, first_query + rows - 1).end};
  load_tile_async<T, HS>(smem.v, args.q, args.q_stride, batch, first_query, head, rows);
  if (block_keys.begin < block_keys.end)
    load_tile_async<T, HS>(smem.k, args.k, args.k_stride, batch, block_keys.begin, kv_head,
                           min(Bc, block_keys.end - block_keys.begin));
  if (threadIdx.x < Br) {
    smem.row_max[threadIdx.x] = -INFINITY;
    smem.row_sum[threadIdx.x] = 0.0f;
  }
  cp_async_wait_all();
  __syncthreads();
  uint32_t q_regs[COLUMNS / 16][4];
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) {
    const int column = first_column + k * 16 + 2 * t;
    q_regs[k][0] = row_pair(smem.v[g][column]);
    q_regs[k][1] = row_pair(smem.v[g + 8][column]);
    q_regs[k][2] = row_pair(smem.v[g][column + 8]);
    q_regs[k][3] = row_pair(smem.v[g + 8][column + 8]);
  }

  float o_regs[COLUMNS / 8][4] = {};

  for (int tile = block_keys.begin; tile < block_keys.end; tile += Bc) {
    cp_async_wait_all();
    __syncthreads();  // K is there, and the last tile of V, or Q, has been read
    load_tile_async<T, HS>(smem.v, args.v, args.v_stride, batch, tile, kv_head, min(Bc, block_keys.end - tile));

#pragma unroll
    for (int n = 0; n < Bc; n += 8) {
      float s_regs[4] = {};
#pragma unroll
      for (int k = 0; k < COLUMNS / 16; ++k) {
        const int column = first_column + k * 16 + 2 * t;
        mma_m16n8k16<T>(s_regs, q_regs[k], row_pair(smem.k[n + g][column]), row_pair(smem.k[n + g][column + 8]));
      }
      *reinterpret_cast<float2*>(&smem.s_part[warp][g][n + 2 * t]) = make_float2(s_regs[0], s_regs[1]);
      *reinterpret_cast<float2*>(&smem.s_part[warp][g + 8][n + 2 * t]) = make_float2(s_regs[2], s_regs[3]);
    }
    __syncthreads();  // all scores are there, and K has been read

    const int next = tile + Bc;
    if (next < block_keys.end)
      load_tile_async<T, HS>(smem.k, args.k, args.k_stride, batch, next, kv_head, min(Bc, block_keys.end - next));
    else
      cp_async_commit_group();  // an empty one, so that V is always the last but one

    if (threadIdx.x < Br) {  // one thread a row
      const int r = threadIdx.x;
      const KeyRange keys = r < rows ? visible_keys(args, first_query + r) : KeyRange{0, 0};
      float new_max = smem.row_max[r];
      for (int j = 0; j < Bc; ++j) {
        float score = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS<HS>; ++w) score += smem.s_part[w][r][j];
        score = tile + j >= keys.begin && tile + j < keys.end ? score * args.scale : -INFINITY;
        smem.s[r][j] = score;
        new_max = fmaxf(new_max, score);
      }

      // While no key was visible the maximum is -inf, and exp(-inf - -inf) would be NaN.
      const float shift = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = expf(smem.row_max[r] - shift);
      float row_sum = smem.row_sum[r] * rescale;
      for (int j = 0; j < Bc; ++j) {
        const float p = expf(smem.s[r][j] - shift);
        row_sum += p;
        smem.p[r][j] = from_float<T>(p);
      }
      smem.row_max[r] = new_max;
      smem.row_sum[r] = row_sum;
      smem.rescale[r] = rescale;
    }
    cp_async_wait_group<1>();
    __syncthreads();  // P and V are there

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
        mma_m16n8k16<T>(o_regs[n], p_regs, column_pair(smem.v[j][column], smem.v[j + 1][column]),
                        column_pair(smem.v[j + 8][column], smem.v[j + 9][column]));
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
    return launch(prefill_qk_mma<T, HS>, grid, WARPS<HS> * WARP, sizeof(Smem<T, HS>), stream, *args);
  });
}
