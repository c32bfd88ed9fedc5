// The second kernel of a split decode: merges what the splits of a row have written. The same for every step that has one.
#pragma once

#include "args.cuh"

// One block merges MERGE_DIMS dims of a row: its warps take the parts in turn, then add up through shared memory in a
// fixed order, so that results repeat bit by bit.
constexpr int MERGE_WARPS = 8, MERGE_DIMS = 2 * WARP;

// A split decode has at most as many parts a row.
constexpr int MAX_PARTS = 1024;

struct MergeSmem {
  float weights[MAX_PARTS];
  float tops[MERGE_WARPS], sums[MERGE_WARPS];
  float2 o[MERGE_WARPS][WARP];
};

// The partial results of a row: `count` of them, `stride` rows of HS apart.
struct PartialRows {
  int64_t first, stride;
  int count;
};

template <int HS>
DEVICE void merge_row(const DecodeArgs& args, int batch, int token, int head, PartialRows rows) {
  constexpr int MINE = MAX_PARTS / (MERGE_WARPS * WARP);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pair = blockIdx.x * WARP + lane;
  const Partial* partials = reinterpret_cast<const Partial*>(args.partial_sum) + rows.first;
  const float2* o_parts = reinterpret_cast<const float2*>(args.partial_o + rows.first * HS) + pair;
  MergeSmem& smem = dynamic_smem<MergeSmem>();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) check_length(args, batch);

  Partial mine[MINE];
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int part = i * MERGE_WARPS * WARP + threadIdx.x;
    mine[i] = part < rows.count ? partials[part * rows.stride] : Partial{-INFINITY, 0.0f};
    top = fmaxf(top, mine[i].reference);
  }
  top = warp_max(top);
  if (lane == 0) smem.tops[warp] = top;
  __syncthreads();
  for (int i = 0; i < MERGE_WARPS; ++i) top = fmaxf(top, smem.tops[i]);

  // A part without a key weighs 0: its O may never have been written.
  const float shift = top == -INFINITY ? 0.0f : top;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int part = i * MERGE_WARPS * WARP + threadIdx.x;
    const float weight = exp2f(mine[i].reference - shift);
    sum += mine[i].sum * weight;
    if (part < rows.count) smem.weights[part] = weight;
  }
  sum = warp_sum(sum);
  if (lane == 0) smem.sums[warp] = sum;
  __syncthreads();

  float2 o = {0.0f, 0.0f};
#pragma unroll 8
  for (int i = warp; i < rows.count; i += MERGE_WARPS) {
    const float weight = smem.weights[i];
    const float2 part = weight == 0.0f ? float2{0.0f, 0.0f} : o_parts[i * rows.stride * (HS / 2)];
    o = {o.x + weight * part.x, o.y + weight * part.y};
  }
  smem.o[warp][lane] = o;
  __syncthreads();
  if (warp != 0) return;
  sum = smem.sums[0];
#pragma unroll
  for (int i = 1; i < MERGE_WARPS; ++i) {
    o = {o.x + smem.o[i][lane].x, o.y + smem.o[i][lane].y};
    sum += smem.sums[i];
  }

  const int kv_head = head / args.group;
  const RowEnd end = end_row(args, kv_head, head, {top, sum});
  store_output(args.o, query_offset(args, args.o_stride, batch, token, head) + 2 * pair, args.dtype,
               {o.x * end.factor, o.y * end.factor});
  if (blockIdx.x == 0 && lane == 0) store_lse(args, batch, token, head, end.lse);
}

template <int HS>
__global__ void __launch_bounds__(MERGE_WARPS* WARP) merge_splits(const DecodeArgs args) {
  const int token = blockIdx.y / args.q_heads, head = blockIdx.y % args.q_heads, batch = blockIdx.z;
  const int kv_head = head / args.group, row = token * args.group + head % args.group;
  merge_row<HS>(args, batch, token, head, {partial_index(args, batch, kv_head, row, 0), 1, args.splits});
}

inline dim3 merge_grid(const DecodeArgs& args) {
  return dim3(args.head_dim / MERGE_DIMS, args.q_len * args.q_heads, args.batch);
}

template <int HS>
const char* launch_merge(const DecodeArgs& args, cudaStream_t stream) {
  return launch(merge_splits<HS>, merge_grid(args), MERGE_WARPS * WARP, sizeof(MergeSmem), stream, args);
}
