// Change: one maximum and one rescale of O per tile of 8 keys in place of one per position: the 8 dot products no
//   longer depend on each other.
// Prediction: the shuffles and exponentials of 8 keys overlap, and O is scaled once in 8: a third fewer instructions,
//   and 1.5 times as fast (published: 22.7 to 14.5 us on the sliding layers).
// Measured: H200, 2026-11-29, 16 heads on 1: 26 us at 4K keys, 392 us at 128K; 8 heads on 4, 28K: 189 us.
// Verdict: kept for its form, not for its 4%: the prediction was wrong here. The published card had few warps to hide
//   the chain; 16 warps hide it already, and what binds is a load from shared memory for every FMA.
// Alignment: 16
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "merge.cuh"

constexpr int Bc = 8;  // keys a tile

template <typename KV, int HS>
struct Smem {
  KV k[2][Bc][HS];
  KV v[2][Bc][HS];
};

// Starts the copy of keys [tile, tile + Bc) that lie before `end`; the rest of the tile is never read.
template <typename KV, int HS>
DEVICE void load_tile(Smem<KV, HS>& smem, int stage, const DecodeArgs& args, int batch, int kv_head, int tile, int end,
                      bool& lost) {
  constexpr int CHUNK = 16 / sizeof(KV), CHUNKS = HS / CHUNK;
  for (int i = threadIdx.x; i < Bc * CHUNKS; i += blockDim.x) {
    const int key = i / CHUNKS, element = i % CHUNKS * CHUNK;
    if (tile + key >= end) break;
    const Slot slot = find_slot(args, batch, tile + key, lost);
    cp_async_cg(smem_u32(&smem.k[stage][key][element]), slot_row<KV>(args.k, args.k_stride, slot, kv_head) + element);
    cp_async_cg(smem_u32(&smem.v[stage][key][element]), slot_row<KV>(args.v, args.v_stride, slot, kv_head) + element);
  }
  cp_async_commit_group();
}

template <typename KV, int HS>
__global__ void __launch_bounds__(ROWS* WARP, 1) decode_tile_rescale(const DecodeArgs args) {
  constexpr int PAIRS = HS / (2 * WARP);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int row_tiles = gridDim.y / args.kv_heads, kv_head = blockIdx.y / row_tiles, batch = blockIdx.z;
  const int first_row = blockIdx.y % row_tiles * ROWS, last_row = min(first_row + ROWS, row_count(args)) - 1;
  const bool owns_row = first_row + warp <= last_row;  // the last tile's spare warps only help to load
  const int row = owns_row ? first_row + warp : last_row;
  const int token = row_token(args, row), head = row_head(args, kv_head, row);
  Smem<KV, HS>& smem = dynamic_smem<Smem<KV, HS>>();

  const float scale = score_scale(args, kv_head);
  const int64_t q = query_offset(args, args.q_stride, batch, token, head);
  float2 q_regs[PAIRS], o_regs[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const float2 pair = load_query(args.q, q + 2 * (i * WARP + lane), args.dtype);
    q_regs[i] = {pair.x * scale, pair.y * scale};
    o_regs[i] = {0.0f, 0.0f};
  }

  const int length = sequence_length(args, batch);
  const KeyRange keys = split_keys(visible_keys(args, length, first_row, last_row), blockIdx.x, args.splits, Bc);
  const KeyRange row_keys = visible_keys(args, length, token);
  float row_max = -INFINITY, row_sum = 0.0f;
  bool lost = false;
  int stage = 0;
  if (keys.begin < keys.end) load_tile(smem, stage, args, batch, kv_head, keys.begin, keys.end, lost);
  for (int tile = keys.begin; tile < keys.end; tile += Bc, stage ^= 1) {
    if (tile + Bc < keys.end) {
      load_tile(smem, stage ^ 1, args, batch, kv_head, tile + Bc, keys.end, lost);
      cp_async_wait_group<1>();
    } else {
      cp_async_wait_group<0>();
    }
    __syncthreads();
    const int begin = max(tile, row_keys.begin), end = min(min(tile + Bc, keys.end), row_keys.end);
    float scores[Bc];
    float new_max = row_max;
#pragma unroll
    for (int j = 0; j < Bc; ++j) {
      const KV* k = smem.k[stage][j];
      float score = 0.0f;
      if (tile + j >= begin && tile + j < end) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          const float2 pair = load_pair(k, i * WARP + lane);
          score += q_regs[i].x * pair.x + q_regs[i].y * pair.y;
        }
      }
      score = warp_sum(score);
      scores[j] = tile + j >= begin && tile + j < end ? score : -INFINITY;
      new_max = fmaxf(new_max, scores[j]);
    }

    // While every score is -inf the maximum is too, and exp2(-inf - -inf) would be NaN.
    const float shift = new_max == -INFINITY ? 0.0f : new_max;
    const float rescale = ex2_approx_ftz(row_max - shift);
    row_max = new_max;
    row_sum *= rescale;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) o_regs[i] = {o_regs[i].x * rescale, o_regs[i].y * rescale};
#pragma unroll
    for (int j = 0; j < Bc; ++j) {
      if (tile + j < begin || tile + j >= end) continue;
      const float p = ex2_approx_ftz(scores[j] - shift);
      const KV* v = smem.v[stage][j];
      row_sum += p;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const float2 pair = load_pair(v, i * WARP + lane);
        o_regs[i] = {o_regs[i].x + p * pair.x, o_regs[i].y + p * pair.y};
      }
    }
    __syncthreads();  // the stage may be overwritten
  }
  if (__syncthreads_or(lost)) row_sum = NAN;

  if (!owns_row) return;
  const int64_t partial = partial_index(args, batch, kv_head, row, blockIdx.x);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i)
    reinterpret_cast<float2*>(args.partial_o + partial * HS)[i * WARP + lane] = o_regs[i];
  if (lane == 0) reinterpret_cast<Partial*>(args.partial_sum)[partial] = {row_max, row_sum};
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const char* error = launch(decode_tile_rescale<KV, HS>, row_grid(*args, args->splits), row_warps(*args) * WARP,
                               sizeof(Smem<KV, HS>), stream, *args);
    return error ? error : launch_merge<HS>(*args, stream);
  });
}
