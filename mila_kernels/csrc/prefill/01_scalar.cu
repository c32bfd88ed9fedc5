// Change: the baseline. One warp owns one query row; K and V are streamed from global memory, one key at a time.
// Prediction: a key costs 5 shuffles, 2 exponentials and head_dim / 16 FMAs and as many loads a lane: the chip issues
//   instructions, not mathematics, so under 1% of the tensor-core peak however fast the memory is.
// Measured: H200, 2026-11-29, prefill/published-instance: 15.8 ms, 4.4 TFLOP/s, 0.55% of the limit (published, RTX
//   4070: 127 ms). N 8192: 183 ms, 6.0 TFLOP/s; N 512 to 16384: 3.6 to 6.1 TFLOP/s. ncu: DRAM throughput 0.02%, L1 hits
//   89%, 2.2 instructions a clock, 34% of the warps that fit the SM's slots.
// Verdict: Kept as the baseline. As predicted: memory is idle, and the chip issues instructions. The load pipe alone
//   would allow 4.5 ms; waiting for each key's data and for the chain of shuffles behind it takes the rest.
// Head dims: 64 96 128 160 192 224 256 288 320 352 384 416 448 480 512
// Alignment: 2
#include "args.cuh"

constexpr int WARPS = 4;  // query rows a block

template <typename T, int HS>
__global__ void __launch_bounds__(WARPS* WARP) prefill_scalar(const PrefillArgs args) {
  constexpr int PER_LANE = HS / WARP;
  const int per_lane = args.head_dim / WARP;
  const int lane = threadIdx.x % WARP, query = blockIdx.x * WARPS + threadIdx.x / WARP;
  const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / (args.q_heads / args.kv_heads);
  if (query >= args.q_len) return;

  const T* q = row<T>(args.q, args.q_stride, batch, query, head);
  float q_regs[PER_LANE], o_regs[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    q_regs[i] = i < per_lane ? to_float(q[i * WARP + lane]) * args.scale : 0.0f;
    o_regs[i] = 0.0f;
  }

  const KeyRange keys = visible_keys(args, query);
  float row_max = -INFINITY, row_sum = 0.0f;
  for (int key = keys.begin; key < keys.end; ++key) {
    const T* k = row<T>(args.k, args.k_stride, batch, key, kv_head);
    const T* v = row<T>(args.v, args.v_stride, batch, key, kv_head);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (i < per_lane) score += q_regs[i] * to_float(k[i * WARP + lane]);
    score = warp_sum(score);

    // While every score is -inf the maximum is too, and exp(-inf - -inf) would be NaN.
    const float new_max = fmaxf(row_max, score);
    const float shift = new_max == -INFINITY ? 0.0f : new_max;
    const float rescale = expf(row_max - shift), p = expf(score - shift);
    row_max = new_max;
    row_sum = row_sum * rescale + p;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (i < per_lane) o_regs[i] = o_regs[i] * rescale + p * to_float(v[i * WARP + lane]);
  }

  T* o = row<T>(args.o, args.o_stride, batch, query, head);
  const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i)
    if (i < per_lane) o[i * WARP + lane] = from_float<T>(o_regs[i] * inverse);
  if (args.lse && lane == 0)
    args.lse[(static_cast<int64_t>(batch) * args.q_heads + head) * args.q_len + query] = row_max + logf(row_sum);
}

extern "C" const char* launch_step(const PrefillArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename T, int HS>() {
    const dim3 grid(ceil_div(args->q_len, WARPS), args->q_heads, args->batch);
    return launch(prefill_scalar<T, HS>, grid, WARPS * WARP, 0, stream, *args);
  });
}
