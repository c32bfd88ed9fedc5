// The second kernel of a split decode: merges what the splits of a row have written. The same for every step that has one.
#pragma once

#include "args.cuh"

// One block merges MERGE_DIMS dims of a row: its warps take the parts in turn, then add up through shared memory in a
// fixed order, so that results repeat bit by bit.
constexpr int MERGE_WARPS = 8, MERGE_DIMS = 2 * WARP;

struct MergeSmem {
  float2 o[MERGE_WARPS][WARP];
};

// The partial results of a row: `count` of them, `stride` rows of HS apart.
struct PartialRows {
  int64_t first, stride;
  int count;
};

// The reference and the sum over all parts; every lane gets the same.
DEVICE Partial merge_sums(const Partial* partials, PartialRows rows, int lane) {
  float top = -INFINITY;
  for (int i = lane; i < rows.count; i += WARP) top = fmaxf(top, partials[i * rows.stride].reference);
  top = warp_max(top);
  const float shift = top == -INFINITY ? 0.0f : top;
  float sum = 0.0f;
  for (int i = lane; i < rows.count; i += WARP)
    sum += partials[i * rows.stride].sum * exp2f(partials[i * rows.stride].reference - shift);
  return {top, warp_sum(sum)};
}

template <int HS>
DEVICE void merge_row(const DecodeArgs& args, int batch, int token, int head, PartialRows rows) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pair = blockIdx.x * WARP + lane;
  const Partial* partials = reinterpret_cast<const Partial*>(args.partial_sum) + rows.first;
  const float2* o_parts = reinterpret_cast<const float2*>(args.partial_o + rows.first * HS) + pair;
  MergeSmem& smem = dynamic_smem<MergeSmem>();

  const Partial total = merge_sums(partials, rows, lane);
  const float shift = total.reference == -INFINITY ? 0.0f : total.reference;
  float2 o = {0.0f, 0.0f};
  for (int i = warp; i < rows.count; i += MERGE_WARPS) {
    const float weight = exp2f(partials[i * rows.stride].reference - shift);
    if (weight == 0.0f) continue;  // no key: its O may never have been written
    const float2 part = o_parts[i * rows.stride * (HS / 2)];
    o = {o.x + weight * part.x, o.y + weight * part.y};
  }
  smem.o[warp][lane] = o;
  __syncthreads();
  if (warp != 0) return;
  for (int i = 1; i < MERGE_WARPS; ++i) o = {o.x + smem.o[i][lane].x, o.y + smem.o[i][lane].y};

  const int kv_head = head / group_size(args);
  const RowEnd end = end_row(args, kv_head, head, total);
  const int64_t element = query_offset(args, args.o_stride, batch, token, head) + 2 * pair;
  store_element(args.o, element, args.dtype, o.x * end.factor);
  store_element(args.o, element + 1, args.dtype, o.y * end.factor);
  if (blockIdx.x == 0 && lane == 0) store_lse(args, batch, token, head, end.lse);
}

template <int HS>
__global__ void __launch_bounds__(MERGE_WARPS* WARP) merge_splits(const DecodeArgs args) {
  const int token = blockIdx.y / args.q_heads, head = blockIdx.y % args.q_heads, batch = blockIdx.z;
  const int kv_head = head / group_size(args), row = token * group_size(args) + head % group_size(args);
  merge_row<HS>(args, batch, token, head, {partial_index(args, batch, kv_head, row, 0), 1, args.splits});
}

inline dim3 merge_grid(const DecodeArgs& args) {
  return dim3(args.head_dim / MERGE_DIMS, args.q_len * args.q_heads, args.batch);
}

template <int HS>
const char* launch_merge(const DecodeArgs& args, cudaStream_t stream) {
  return launch(merge_splits<HS>, merge_grid(args), MERGE_WARPS * WARP, sizeof(MergeSmem), stream, args);
}
