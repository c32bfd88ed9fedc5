// Change: the textbook. One block owns one KV head of one sequence; a warp owns one query row and walks all its keys.
// Prediction: with one sequence and one KV head one of the chip's SMs works, and it waits for one key at a time: about
//   1/132 of the bandwidth at best, in practice far less, and the time grows with the length from the first key on.
// Measured: H200, 2026-11-29, BF16, batch 1, 16 heads on 1: 6,001 us at 4K keys.
// Verdict: kept as the baseline: 1.4 GB/s of 4,535.
// Alignment: 4
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"

template <typename KV, int HS>
__global__ void __launch_bounds__(ROWS* WARP, 1) decode_one_block(const DecodeArgs args) {
  constexpr int PAIRS = HS / (2 * WARP);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int row_tiles = gridDim.y / args.kv_heads, kv_head = blockIdx.y / row_tiles, batch = blockIdx.z;
  const int row = blockIdx.y % row_tiles * ROWS + warp;
  if (row >= row_count(args)) return;
  if (blockIdx.y == 0 && threadIdx.x == 0) check_length(args, batch);
  const int token = row_token(args, row), head = row_head(args, kv_head, row);

  const float scale = score_scale(args, kv_head);
  const int64_t q = query_offset(args, args.q_stride, batch, token, head);
  float2 q_regs[PAIRS], o_regs[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const float2 pair = load_query(args.q, q + 2 * (i * WARP + lane), args.dtype);
    q_regs[i] = {pair.x * scale, pair.y * scale};
    o_regs[i] = {0.0f, 0.0f};
  }

  const KeyRange keys = visible_keys(args, sequence_length(args, batch), token);
  float row_max = -INFINITY, row_sum = 0.0f;
  bool lost = false;
  for (int key = keys.begin; key < keys.end; ++key) {
    const Slot slot = find_slot(args, batch, key, lost);
    const KV* k = slot_row<KV>(args.k, args.k_stride, slot, kv_head);
    const KV* v = slot_row<KV>(args.v, args.v_stride, slot, kv_head);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float2 pair = load_pair(k, i * WARP + lane);
      score += q_regs[i].x * pair.x + q_regs[i].y * pair.y;
    }
    score = warp_sum(score);

    // While every score is -inf the maximum is too, and exp2(-inf - -inf) would be NaN.
    const float new_max = fmaxf(row_max, score);
    const float shift = new_max == -INFINITY ? 0.0f : new_max;
    const float rescale = exp2f(row_max - shift), p = exp2f(score - shift);
    row_max = new_max;
    row_sum = row_sum * rescale + p;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float2 pair = load_pair(v, i * WARP + lane);
      o_regs[i] = {o_regs[i].x * rescale + p * pair.x, o_regs[i].y * rescale + p * pair.y};
    }
  }
  if (lost) row_sum = NAN;

  const RowEnd end = end_row(args, kv_head, head, {row_max, row_sum});
  const int64_t o = query_offset(args, args.o_stride, batch, token, head);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i)
    store_output(args.o, o + 2 * (i * WARP + lane), args.dtype, {o_regs[i].x * end.factor, o_regs[i].y * end.factor});
  if (lane == 0) store_lse(args, batch, token, head, end.lse);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    return launch(decode_one_block<KV, HS>, row_grid(*args, 1), row_warps(*args) * WARP, 0, stream, *args);
  });
}
