// Change: fragments are loaded one step ahead of the products that use them, into registers of their own, and the loop
//   over the head dim is unrolled so that addresses become immediates.
// Prediction: a step of 4 products waits about 30 cycles for its ldmatrix before; with two warps a scheduler little
//   else hides that. A quarter faster.
// Measured: H200, 2026-11-29, prefill/published-instance: 0.327 ms, no faster; N 8192: 4.87 ms, 226 TFLOP/s.
//   ncu: 18% fewer instructions, and the wait for shared memory (short scoreboard) 1.95 clocks an instruction in place
//   of 1.07; its path is 54% busy in both.
// Verdict: Kept for what it allows, though the prediction missed: a warp waits for shared memory's throughput (384
//   bytes an mma in the scores), not for the latency of one load: what it no longer waits before the products it waits
//   at them. With fewer bytes (step 15) the order does count.
// Architectures: sm_90a sm_100a
// Head dims: 64 128 256 512
// Alignment: 16
#include "../ptx.cuh"
#include "args.cuh"

constexpr int Br = 64;  // query rows a block
constexpr int Bc = 64;  // keys a tile
constexpr int WARPS = 8;

template <typename T, int HS>
struct Smem {
  T q[Br][HS];
  T k[Bc][HS];
  T v[Bc][HS];
  T p[Br][Bc];
  float row_max[2][Br];  // of each half of the keys
  float row_sum[2][Br];
  float rescale[Br];
};

// The address of 16 bytes of a tile: `chunk` of row `r`. In every eight rows the chunks change places so that those
// that ldmatrix reads together, one of each row, lie in different banks.
template <typename T, int COLUMNS>
DEVICE uint32_t swizzled(uint32_t tile_smem, int r, int chunk) {
  return tile_smem + (r * COLUMNS / 8 + (chunk ^ (r % 8))) * 16;
}

// Starts the copy of the tokens [first, first + ROWS); those from `live` on are not read, and zero. One group.
template <typename T, int HS, int ROWS>
DEVICE void load_tile_async(uint32_t tile_smem, const T* first, int64_t stride, int live) {
  constexpr int CHUNKS = HS / 8, ROWS_AT_ONCE = WARPS * WARP / CHUNKS;
  const int r = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const T* source = first + r * stride + chunk * 8;
  if (live >= ROWS) {
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE)
      cp_async_cg(swizzled<T, HS>(tile_smem, r + i, chunk), source + i * stride);
  } else {
#pragma unroll 1
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE)
      cp_async_cg_zfill(swizzled<T, HS>(tile_smem, r + i, chunk), r + i < live ? source + i * stride : first,
                        r + i < live ? 16 : 0);
  }
  cp_async_commit_group();
}

template <typename T, int HS>
__global__ void __launch_bounds__(WARPS* WARP, 1) prefill_fragments_ahead(const PrefillArgs args) {
  constexpr int COLUMNS = HS / WARPS > 16 ? HS / WARPS : 16;    // of O, a warp
  constexpr int ROW_GROUPS = Br / 16 * HS / (COLUMNS * WARPS);  // of O, a warp, 16 rows each
  constexpr int S_PAIRS = Bc / 32;                              // of S, a warp, 16 rows and 16 keys each
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int g = lane / 4, t = lane % 4;  // an accumulator holds rows g and g + 8, columns 2t and 2t + 1

  const int first_query = blockIdx.x * Br, rows = min(Br, args.q_len - first_query);
  const int head = blockIdx.y, batch = blockIdx.z;
  const int kv_head = head / (args.q_heads / args.kv_heads);

  Smem<T, HS>& smem = dynamic_smem<Smem<T, HS>>();
  const uint32_t q_smem = smem_u32(smem.q), k_smem = smem_u32(smem.k), v_smem = smem_u32(smem.v);
  const uint32_t p_smem = smem_u32(smem.p);

  const KeyRange first_row = visible_keys(args, first_query), last_row = visible_keys(args, first_query + rows - 1);
  const int begin = first_row.begin, end = last_row.end;
  const T* k = row<T>(args.k, args.k_stride, batch, 0, kv_head);
  const T* v = row<T>(args.v, args.v_stride, batch, 0, kv_head);

  // Of S, the warp takes 16 rows and half the keys; of O, rows and columns.
  const int s_row = warp % 4 * 16, s_half = warp / 4, s_key = s_half * (Bc / 2);
  const int o_row = warp * COLUMNS / HS * (ROW_GROUPS * 16), o_column = warp * COLUMNS % HS;
  // The lane's fragment addresses in the first 64 columns; 64 further, only an immediate is added.
  uint32_t q_chunk[4], k_chunk[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q_chunk[i] = swizzled<T, HS>(q_smem, s_row + lane % 16, 2 * i + lane / 16);
    k_chunk[i] = swizzled<T, HS>(k_smem, s_key + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2);
  }

  float o_regs[ROW_GROUPS][COLUMNS / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};  // of rows s_row + g and s_row + g + 8

  if (begin < end) {
    load_tile_async<T, HS, Br>(q_smem, row<T>(args.q, args.q_stride, batch, first_query, head), args.q_stride[1], rows);
    load_tile_async<T, HS, Bc>(k_smem, k + begin * args.k_stride[1], args.k_stride[1], end - begin);
  }
  for (int tile = begin; tile < end; tile += Bc) {
    cp_async_wait_all();
    __syncthreads();  // K is there, and the last tile of V and P has been read
    load_tile_async<T, HS, Bc>(v_smem, v + tile * args.v_stride[1], args.v_stride[1], end - tile);

    float s_regs[S_PAIRS * 2][4] = {};
    uint32_t q_regs[2][4], k_regs[2][S_PAIRS][4];  // this step's fragments and the next one's
    const auto load_fragments = [&](int step) {
      ldmatrix_x4(q_regs[step % 2], q_chunk[step % 4] + step / 4 * 128);
#pragma unroll
      for (int j = 0; j < S_PAIRS; ++j)
        ldmatrix_x4(k_regs[step % 2][j], k_chunk[step % 4] + step / 4 * 128 + j * 16 * HS * 2);
    };
    load_fragments(0);
#pragma unroll
    for (int step = 0; step < HS / 16; ++step) {
      if (step + 1 < HS / 16) load_fragments(step + 1);
#pragma unroll
      for (int j = 0; j < S_PAIRS; ++j) {
        const uint32_t(&b)[4] = k_regs[step % 2][j];
        mma_m16n8k16<T>(s_regs[2 * j], q_regs[step % 2], b[0], b[1]);
        mma_m16n8k16<T>(s_regs[2 * j + 1], q_regs[step % 2], b[2], b[3]);
      }
    }

    float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = s_row + i * 8 + g;
      const KeyRange keys = visible_keys(args, first_query + r);
#pragma unroll
      for (int j = 0; j < S_PAIRS * 4; ++j) {
        const int key = tile + s_key + j / 2 * 8 + 2 * t + j % 2;
        float& score = s_regs[j / 2][2 * i + j % 2];
        score = key >= keys.begin && key < keys.end ? score * args.scale : -INFINITY;
      }
#pragma unroll
      for (int j = 0; j < S_PAIRS * 4; ++j) tile_max[i] = fmaxf(tile_max[i], s_regs[j / 2][2 * i + j % 2]);
      tile_max[i] = warp_max<4>(tile_max[i]);
      if (t == 0) smem.row_max[s_half][r] = tile_max[i];
    }
    __syncthreads();  // the maxima of both halves of the keys are there, and K has been read

    if (tile + Bc < end)
      load_tile_async<T, HS, Bc>(k_smem, k + (tile + Bc) * args.k_stride[1], args.k_stride[1], end - tile - Bc);
    else
      cp_async_commit_group();  // an empty one, so that V is always the last but one

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = s_row + i * 8 + g;
      const float new_max = fmaxf(row_max[i], fmaxf(tile_max[i], smem.row_max[1 - s_half][r]));
      // While no key was visible the maximum is -inf, and exp(-inf - -inf) would be NaN.
      const float shift = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = expf(row_max[i] - shift);
      row_max[i] = new_max;
      row_sum[i] *= rescale;
      if (s_half == 0 && t == 0) smem.rescale[r] = rescale;
#pragma unroll
      for (int j = 0; j < S_PAIRS * 2; ++j) {
        const float p[2] = {expf(s_regs[j][2 * i] - shift), expf(s_regs[j][2 * i + 1] - shift)};
        row_sum[i] += p[0] + p[1];
        const int chunk = (s_key / 8 + j) ^ (r % 8);
        *reinterpret_cast<uint32_t*>(&smem.p[r][chunk * 8 + 2 * t]) = pack2<T>(p[0], p[1]);
      }
    }
    cp_async_wait_group<1>();
    __syncthreads();  // P and V are there

#pragma unroll
    for (int i = 0; i < ROW_GROUPS; ++i) {
      const float upper = smem.rescale[o_row + i * 16 + g], lower = smem.rescale[o_row + i * 16 + g + 8];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        o_regs[i][n][0] *= upper;
        o_regs[i][n][1] *= upper;
        o_regs[i][n][2] *= lower;
        o_regs[i][n][3] *= lower;
      }
    }
    constexpr int V_PAIRS = COLUMNS / 16;
    uint32_t v_regs[2][4];  // this step's fragment and the next one's
    const auto load_v_fragment = [&](int step) {
      ldmatrix_x4_trans(v_regs[step % 2], swizzled<T, HS>(v_smem, step / V_PAIRS * 16 + lane % 16,
                                                          o_column / 8 + step % V_PAIRS * 2 + lane / 16));
    };
    load_v_fragment(0);
#pragma unroll
    for (int key = 0; key < Bc; key += 16) {
      uint32_t p_regs[ROW_GROUPS][4];
#pragma unroll
      for (int i = 0; i < ROW_GROUPS; ++i)
        ldmatrix_x4(p_regs[i], swizzled<T, Bc>(p_smem, o_row + i * 16 + lane % 16, key / 8 + lane / 16));
#pragma unroll
      for (int n = 0; n < V_PAIRS; ++n) {
        const int step = key / 16 * V_PAIRS + n;
        if (step + 1 < Bc / 16 * V_PAIRS) load_v_fragment(step + 1);
        const uint32_t(&b)[4] = v_regs[step % 2];
#pragma unroll
        for (int i = 0; i < ROW_GROUPS; ++i) {
          mma_m16n8k16<T>(o_regs[i][2 * n], p_regs[i], b[0], b[1]);
          mma_m16n8k16<T>(o_regs[i][2 * n + 1], p_regs[i], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = s_row + i * 8 + g;
    row_sum[i] = warp_sum<4>(row_sum[i]);
    if (t == 0) smem.row_sum[s_half][r] = row_sum[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = s_row + i * 8 + g;
    if (args.lse && s_half == 0 && t == 0 && r < rows)
      args.lse[(static_cast<int64_t>(batch) * args.q_heads + head) * args.q_len + first_query + r] =
          row_max[i] + logf(smem.row_sum[0][r] + smem.row_sum[1][r]);
  }
#pragma unroll
  for (int i = 0; i < ROW_GROUPS * 2; ++i) {
    const int r = o_row + i * 8 + g;
    if (r >= rows) continue;
    const float sum = smem.row_sum[0][r] + smem.row_sum[1][r], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    T* o = row<T>(args.o, args.o_stride, batch, first_query + r, head) + o_column + 2 * t;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
      *reinterpret_cast<uint32_t*>(o + n * 8) =
          pack2<T>(o_regs[i / 2][n][i % 2 * 2] * inverse, o_regs[i / 2][n][i % 2 * 2 + 1] * inverse);
  }
}

extern "C" const char* launch_step(const PrefillArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename T, int HS>() {
    const dim3 grid(ceil_div(args->q_len, Br), args->q_heads, args->batch);
    return launch(prefill_fragments_ahead<T, HS>, grid, WARPS * WARP, sizeof(Smem<T, HS>), stream, *args);
  });
}
