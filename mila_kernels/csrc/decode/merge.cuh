// The second kernel of a split decode: merges what the splits of a row have written. The same for every step that has one.
#pragma once

#include "args.cuh"

// The reference and the sum over all splits; every lane gets the same.
DEVICE Partial merge_sums(const Partial* partials, int splits, int lane) {
  float top = -INFINITY;
  for (int i = lane; i < splits; i += WARP) top = fmaxf(top, partials[i].reference);
  top = warp_max(top);
  const float shift = top == -INFINITY ? 0.0f : top;
  float sum = 0.0f;
  for (int i = lane; i < splits; i += WARP) sum += partials[i].sum * exp2f(partials[i].reference - shift);
  return {top, warp_sum(sum)};
}

// One block merges the splits of MERGE_DIMS dims of a row: its warps take the splits in turn, then add up through shared
// memory in a fixed order.
constexpr int MERGE_WARPS = 8, MERGE_DIMS = 2 * WARP;

struct MergeSmem {
  float2 o[MERGE_WARPS][WARP];
};

template <int HS>
__global__ void __launch_bounds__(MERGE_WARPS* WARP) merge_splits(const DecodeArgs args) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pair = blockIdx.x * WARP + lane;
  const int token = blockIdx.y / args.q_heads, head = blockIdx.y % args.q_heads, batch = blockIdx.z;
  const int kv_head = head / group_size(args), row = token * group_size(args) + head % group_size(args);
  const int64_t first = partial_index(args, batch, kv_head, row, 0);
  const Partial* partials = reinterpret_cast<const Partial*>(args.partial_sum) + first;
  const float2* o_splits = reinterpret_cast<const float2*>(args.partial_o + first * HS) + pair;
  MergeSmem& smem = dynamic_smem<MergeSmem>();

  const Partial total = merge_sums(partials, args.splits, lane);
  const float shift = total.reference == -INFINITY ? 0.0f : total.reference;
  float2 o = {0.0f, 0.0f};
  for (int split = warp; split < args.splits; split += MERGE_WARPS) {
    const float weight = exp2f(partials[split].reference - shift);
    if (weight == 0.0f) continue;  // no key: its O may never have been written
    const float2 part = o_splits[static_cast<int64_t>(split) * (HS / 2)];
    o = {o.x + weight * part.x, o.y + weight * part.y};
  }
  smem.o[warp][lane] = o;
  __syncthreads();
  if (warp != 0) return;
  for (int i = 1; i < MERGE_WARPS; ++i) o = {o.x + smem.o[i][lane].x, o.y + smem.o[i][lane].y};

  const RowEnd end = end_row(args, kv_head, head, total);
  const int64_t element = query_offset(args, args.o_stride, batch, token, head) + 2 * pair;
  store_element(args.o, element, args.dtype, o.x * end.factor);
  store_element(args.o, element + 1, args.dtype, o.y * end.factor);
  if (blockIdx.x == 0 && lane == 0) store_lse(args, batch, token, head, end.lse);
}

template <int HS>
const char* launch_merge(const DecodeArgs& args, cudaStream_t stream) {
  const dim3 grid(HS / MERGE_DIMS, args.q_len * args.q_heads, args.batch);
  return launch(merge_splits<HS>, grid, MERGE_WARPS * WARP, sizeof(MergeSmem), stream, args);
}
