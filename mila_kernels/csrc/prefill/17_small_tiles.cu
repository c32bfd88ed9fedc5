// Change: half the tile: 32 rows and 32 keys a block of four warps, each with a quarter of the head dim for the scores
//   and a quarter of the columns of O. Partial scores meet in K's buffer once K has been read, and a warp then holds
//   whole rows.
// Prediction: two blocks fit an SM and neither waits for the other, so one's softmax runs under the other's products.
//   K and V leave L2 twice as often: 256 KB for what takes 3,300 cycles of products, near the 62 bytes a cycle that L2
//   gives an SM. A tenth faster than the best before; and it fits the 99 KB of an Ada or a consumer Blackwell.
// Measured: H200, 2026-12-01, prefill/published-instance: 0.299 ms; N 4096, 8192, 16384: 232, 239, 239 TFLOP/s (step
//   15: 273, 287, 294).
//   ncu: L2 59% busy (step 15: 22%), 42% more instructions.
// Verdict: Slower on the H200, and a longer prompt does not mend it: the overlap of two blocks is paid for with twice
//   the traffic from L2. It is the form for cards with 99 KB of shared memory, on which steps 10 to 16 do not fit.
// Predecessor: 15_split_qk
// Head dims: 64 128 256 512
// Alignment: 16
#include "../ptx.cuh"
#include "args.cuh"

constexpr int Br = 32;  // query rows a block
constexpr int Bc = 32;  // keys a tile
constexpr int WARPS = 4;
constexpr float LOG2E = 1.4426950408889634f;

template <typename T, int HS>
struct Smem {
  T q[Br][HS];
  union {
    T k[Bc][HS];
    float2 s_part[WARPS][Br / 8][Bc / 8][WARP];  // each warp's sums: rows 8 apart, keys 8 apart
  };
  T v[Bc][HS];
  T p[Br][Bc];
  float row_sum[Br], rescale[Br];
};

// The address of 16 bytes of a tile: `chunk` of row `r`. In every eight rows, for P in every four pairs of rows, the
// chunks change places so that those that ldmatrix reads together, one of each row, lie in different banks.
template <typename T, int COLUMNS>
DEVICE uint32_t swizzled(uint32_t tile_smem, int r, int chunk) {
  return tile_smem + (r * COLUMNS / 8 + (chunk ^ (COLUMNS >= 64 ? r % 8 : r / 2 % 4))) * 16;
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
__global__ void __launch_bounds__(WARPS* WARP, 2) prefill_small_tiles(const PrefillArgs args) {
  constexpr int COLUMNS = HS / WARPS;      // of the head dim, a warp
  constexpr int S_PAIRS = Bc / 16;         // of 8 keys
  constexpr int ROW_GROUPS = Br / 16;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int g = lane / 4, t = lane % 4;  // an accumulator holds rows g and g + 8, columns 2t and 2t + 1

  // The longest rows of the causal triangle go first, so that short ones fill the end.
  const int heads = args.q_heads * args.batch, order = blockIdx.x / heads;
  const int first_query = (ceil_div(args.q_len, Br) - 1 - order) * Br, rows = min(Br, args.q_len - first_query);
  const int head = blockIdx.x % heads % args.q_heads, batch = blockIdx.x % heads / args.q_heads;
  const int kv_head = head / (args.q_heads / args.kv_heads);

  Smem<T, HS>& smem = dynamic_smem<Smem<T, HS>>();
  const uint32_t q_smem = smem_u32(smem.q), k_smem = smem_u32(smem.k), v_smem = smem_u32(smem.v);
  const uint32_t p_smem = smem_u32(smem.p);

  const KeyRange first_row = visible_keys(args, first_query), last_row = visible_keys(args, first_query + rows - 1);
  const int begin = first_row.begin, end = last_row.end;  // tiles outside [last_row.begin, first_row.end) need masks
  const T* k = row<T>(args.k, args.k_stride, batch, 0, kv_head);
  const T* v = row<T>(args.v, args.v_stride, batch, 0, kv_head);

  const int first_column = warp * COLUMNS, r = warp * 8 + g;  // the row whose softmax the lane shares
  // The lane's fragment addresses in the first 64 columns; 64 further, only an immediate is added.
  uint32_t q_chunk[4], k_chunk[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q_chunk[i] = swizzled<T, HS>(q_smem, lane % 16, first_column / 8 + 2 * i + lane / 16);
    k_chunk[i] = swizzled<T, HS>(k_smem, lane / 16 * 8 + lane % 8, first_column / 8 + 2 * i + lane / 8 % 2);
  }

  float o_regs[ROW_GROUPS][COLUMNS / 8][4] = {};
  float row_max = -INFINITY, row_sum = 0.0f;  // of row r, in powers of two

  if (begin < end) {
    load_tile_async<T, HS, Br>(q_smem, row<T>(args.q, args.q_stride, batch, first_query, head), args.q_stride[1], rows);
    load_tile_async<T, HS, Bc>(k_smem, k + begin * args.k_stride[1], args.k_stride[1], end - begin);
  }
  for (int tile = begin; tile < end; tile += Bc) {
    cp_async_wait_all();
    __syncthreads();  // K is there, and the last tile of V and P has been read
    load_tile_async<T, HS, Bc>(v_smem, v + tile * args.v_stride[1], args.v_stride[1], end - tile);

    float s_regs[ROW_GROUPS][S_PAIRS * 2][4] = {};
    uint32_t q_regs[2][ROW_GROUPS][4], k_regs[2][S_PAIRS][4];  // this step's fragments and the next one's
    const auto load_fragments = [&](int step) {
#pragma unroll
      for (int i = 0; i < ROW_GROUPS; ++i)
        ldmatrix_x4(q_regs[step % 2][i], q_chunk[step % 4] + step / 4 * 128 + i * 16 * HS * 2);
#pragma unroll
      for (int j = 0; j < S_PAIRS; ++j)
        ldmatrix_x4(k_regs[step % 2][j], k_chunk[step % 4] + step / 4 * 128 + j * 16 * HS * 2);
    };
    load_fragments(0);
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; ++step) {
      if (step + 1 < COLUMNS / 16) load_fragments(step + 1);
#pragma unroll
      for (int i = 0; i < ROW_GROUPS; ++i)
#pragma unroll
        for (int j = 0; j < S_PAIRS; ++j) {
          const uint32_t(&b)[4] = k_regs[step % 2][j];
          mma_m16n8k16<T>(s_regs[i][2 * j], q_regs[step % 2][i], b[0], b[1]);
          mma_m16n8k16<T>(s_regs[i][2 * j + 1], q_regs[step % 2][i], b[2], b[3]);
        }
    }
    __syncthreads();  // K has been read
#pragma unroll
    for (int i = 0; i < ROW_GROUPS * 2; ++i)
#pragma unroll
      for (int j = 0; j < S_PAIRS * 2; ++j)
        smem.s_part[warp][i][j][lane] = make_float2(s_regs[i / 2][j][i % 2 * 2], s_regs[i / 2][j][i % 2 * 2 + 1]);
    __syncthreads();

    const bool masked = tile < last_row.begin || tile + Bc > first_row.end;
    float scores[S_PAIRS * 2][2] = {}, new_max = -INFINITY;
#pragma unroll
    for (int j = 0; j < S_PAIRS * 2; ++j) {
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 part = smem.s_part[w][warp][j][lane];
        scores[j][0] += part.x;
        scores[j][1] += part.y;
      }
      scores[j][0] *= args.scale * LOG2E;
      scores[j][1] *= args.scale * LOG2E;
    }
    if (masked) {
      const KeyRange keys = visible_keys(args, first_query + r);
#pragma unroll
      for (int j = 0; j < S_PAIRS * 4; ++j) {
        const int key = tile + j / 2 * 8 + 2 * t + j % 2;
        if (key < keys.begin || key >= keys.end) scores[j / 2][j % 2] = -INFINITY;
      }
    }
#pragma unroll
    for (int j = 0; j < S_PAIRS * 2; ++j) new_max = fmaxf(new_max, fmaxf(scores[j][0], scores[j][1]));
    new_max = warp_max<4>(new_max);
    float rescale = 1.0f;
    if (new_max > row_max) {
      rescale = ex2_approx_ftz(row_max - new_max);
      row_max = new_max;
      row_sum *= rescale;
    }
    if (t == 0) smem.rescale[r] = rescale;
    // While no key was visible the maximum is -inf, and exp(-inf - -inf) would be NaN.
    const float shift = row_max == -INFINITY ? 0.0f : row_max;
#pragma unroll
    for (int j = 0; j < S_PAIRS * 2; ++j) {
      const float p[2] = {ex2_approx_ftz(scores[j][0] - shift), ex2_approx_ftz(scores[j][1] - shift)};
      row_sum += p[0] + p[1];
      const int chunk = j ^ (r / 2 % 4);
      *reinterpret_cast<uint32_t*>(&smem.p[r][chunk * 8 + 2 * t]) = pack2<T>(p[0], p[1]);
    }
    cp_async_wait_all();
    __syncthreads();  // P and V are there, and the sums have been read

    if (tile + Bc < end)
      load_tile_async<T, HS, Bc>(k_smem, k + (tile + Bc) * args.k_stride[1], args.k_stride[1], end - tile - Bc);
#pragma unroll
    for (int i = 0; i < ROW_GROUPS; ++i) {
      const float upper = smem.rescale[i * 16 + g], lower = smem.rescale[i * 16 + g + 8];
      if (!__any_sync(ALL_LANES, upper != 1.0f || lower != 1.0f)) continue;
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
                                                          first_column / 8 + step % V_PAIRS * 2 + lane / 16));
    };
    load_v_fragment(0);
#pragma unroll
    for (int key = 0; key < Bc; key += 16) {
      uint32_t p_regs[ROW_GROUPS][4];
#pragma unroll
      for (int i = 0; i < ROW_GROUPS; ++i)
        ldmatrix_x4(p_regs[i], swizzled<T, Bc>(p_smem, i * 16 + lane % 16, key / 8 + lane / 16));
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

  row_sum = warp_sum<4>(row_sum);
  if (t == 0) smem.row_sum[r] = row_sum;
  if (args.lse && t == 0 && r < rows)
    args.lse[(static_cast<int64_t>(batch) * args.q_heads + head) * args.q_len + first_query + r] =
        row_max / LOG2E + logf(row_sum);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROW_GROUPS * 2; ++i) {
    const int o_row = i * 8 + g;
    if (o_row >= rows) continue;
    const float inverse = smem.row_sum[o_row] == 0.0f ? 0.0f : 1.0f / smem.row_sum[o_row];
    T* o = row<T>(args.o, args.o_stride, batch, first_query + o_row, head) + first_column + 2 * t;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
      *reinterpret_cast<uint32_t*>(o + n * 8) =
          pack2<T>(o_regs[i / 2][n][i % 2 * 2] * inverse, o_regs[i / 2][n][i % 2 * 2 + 1] * inverse);
  }
}

extern "C" const char* launch_step(const PrefillArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename T, int HS>() {
    const int64_t blocks = static_cast<int64_t>(ceil_div(args->q_len, Br)) * args->q_heads * args->batch;
    if (blocks > INT32_MAX) return "more blocks than a grid holds: q_len / 32 x q_heads x batch must be below 2^31";
    return launch(prefill_small_tiles<T, HS>, dim3(blocks), WARPS * WARP, sizeof(Smem<T, HS>), stream, *args);
  });
}
