// What every decode step is launched with and needs: where a position's keys and values lie, what a query sees, and how
// the partial results of splits are merged. DecodeArgs is mirrored in mila_kernels/attention_decode.py.
#pragma once

#include "../common.cuh"
#include "../ptx.cuh"

#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

using e4m3 = __nv_fp8_e4m3;
constexpr int32_t DTYPE_E4M3 = 2;

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int ROWS = 16;  // rows a block: a row is one query head of one new token; the rows of a KV head share its keys

enum Fault : int32_t { FAULT_NONE = 0, FAULT_LENGTH = 1, FAULT_PAGE = 2 };

// q and o [batch, q_len, q_heads, head_dim]; lse [batch, q_heads, q_len] in natural log, or null; lengths [batch] count
// the keys of each sequence, the q_len new ones included: query i sits at position length - q_len + i and sees no later
// one. Flat caches (contiguous, ring): k and v [batch, capacity, kv_heads, head_dim], position p in slot p % capacity.
// Paged: k and v [pages, page size, kv_heads, head_dim], position p in slot p % size of page page_table[batch][p /
// size]. Workspace: partial_o [batch, kv_heads, rows, splits, head_dim] and partial_sum [the same, 2] (reference, sum).
struct DecodeArgs {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;
  const int32_t* lengths;
  const int32_t* page_table;  // null: flat
  const float* sink;          // a logit per query head that takes weight and has no value, or null
  const float* k_scale;       // factor of a KV head's stored keys, or null
  const float* v_scale;
  float* partial_o;
  float* partial_sum;
  int32_t* arrivals;  // zero between launches: what counts blocks resets it
  int32_t* fault;     // {Fault, row, column or length}: the first one found
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch or page, token or slot, head; in elements
  int64_t page_table_stride;
  int32_t batch, q_len, q_heads, kv_heads, head_dim;
  int32_t group;       // q_heads / kv_heads
  int32_t capacity;    // positions that fit a sequence
  int32_t page_shift;  // log2 of the page size
  int32_t pages;       // in the pool
  int32_t ring;        // old positions are overwritten: the length may pass the capacity
  int32_t window;      // keys seen, the current one included; 0: no window
  int32_t splits;      // blocks that share the keys of a head
  int32_t automatic;   // the caller left the number of splits to the step
  int32_t blocks;      // that fill the device
  int32_t dtype;     // of q and o
  int32_t kv_dtype;  // of k and v
  float scale;
  float inverse_group;  // 1 / group: small numbers are divided by it without a division
};

DEVICE float to_float(e4m3 x) { return static_cast<float>(x); }

// Elements 2i and 2i + 1 of a row.
template <typename T>
DEVICE float2 load_pair(const T* row, int i) {
  struct alignas(2 * sizeof(T)) Pair {
    T x, y;
  };
  const Pair pair = reinterpret_cast<const Pair*>(row)[i];
  return {to_float(pair.x), to_float(pair.y)};
}

// q and o pass through registers once: their element type is looked up as they do, after the load. `i` is even.
DEVICE float2 load_query(const void* base, int64_t i, int32_t dtype) {
  const uint32_t pair = ld_global_nc_u32(static_cast<const uint16_t*>(base) + i);
  if (dtype == DTYPE_FP16) return __half22float2(reinterpret_cast<const __half2&>(pair));
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

DEVICE void store_output(void* base, int64_t i, int32_t dtype, float2 x) {
  const uint32_t pair = dtype == DTYPE_FP16 ? pack2<fp16>(x.x, x.y) : pack2<bf16>(x.x, x.y);
  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(base) + i) = pair;
}

DEVICE void store_output(void* base, int64_t i, int32_t dtype, float x) {
  if (dtype == DTYPE_FP16)
    static_cast<fp16*>(base)[i] = from_float<fp16>(x);
  else
    static_cast<bf16*>(base)[i] = from_float<bf16>(x);
}

DEVICE void report(const DecodeArgs& args, Fault fault, int row, int detail) {
  if (atomicCAS(args.fault, FAULT_NONE, fault) != FAULT_NONE) return;
  args.fault[1] = row;
  args.fault[2] = detail;
}

// The length of a sequence, kept within its cache.
DEVICE int sequence_length(const DecodeArgs& args, int batch) {
  const int length = max(args.lengths[batch], 0);
  return args.ring ? length : min(length, args.capacity);
}

// What had to be changed for that is reported; one thread a sequence is enough.
DEVICE void check_length(const DecodeArgs& args, int batch) {
  const int length = args.lengths[batch];
  if (length != sequence_length(args, batch)) report(args, FAULT_LENGTH, batch, length);
}

// Row r of a KV head is query head group * kv_head + r % group of new token r / group.
DEVICE int row_count(const DecodeArgs& args) { return args.q_len * args.group; }
DEVICE int row_token(const DecodeArgs& args, int row) { return static_cast<int>((row + 0.5f) * args.inverse_group); }
DEVICE int row_head(const DecodeArgs& args, int kv_head, int row) {
  return kv_head * args.group + row - row_token(args, row) * args.group;
}

// Positions [begin, end).
struct KeyRange {
  int begin, end;
};

DEVICE KeyRange visible_keys(const DecodeArgs& args, int length, int token) {
  const int position = length - args.q_len + token;
  const int begin = args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
  return {begin, max(position + 1, 0)};
}

// What any of the rows [first, last] sees.
DEVICE KeyRange visible_keys(const DecodeArgs& args, int length, int first, int last) {
  return {visible_keys(args, length, row_token(args, first)).begin,
          visible_keys(args, length, row_token(args, last)).end};
}

// The part of `keys` that split i of n reads, in whole tiles: the first splits may get one more than the last.
DEVICE KeyRange split_keys(KeyRange keys, int i, int n, int tile) {
  const int first = keys.begin / tile, tiles = keys.end > keys.begin ? ceil_div(keys.end, tile) - first : 0;
  const int each = tiles / n, more = tiles % n;
  const int begin = first + i * each + min(i, more), end = begin + each + (i < more);
  return {max(keys.begin, begin * tile), min(keys.end, end * tile)};
}

// Where position p lies in a cache: page (or sequence) and slot. A table entry outside the pool is reported and read as
// page 0; `lost` is set then, and whoever gets it makes the row NaN.
struct Slot {
  int page, slot;
};

DEVICE Slot find_slot(const DecodeArgs& args, int batch, int position, bool& lost) {
  if (!args.page_table) return {batch, args.ring ? position % args.capacity : position};
  const int column = position >> args.page_shift, slot = position & ((1 << args.page_shift) - 1);
  const int page = args.page_table[batch * args.page_table_stride + column];
  if (page >= 0 && page < args.pages) return {page, slot};
  report(args, FAULT_PAGE, batch, column);
  lost = true;
  return {0, slot};
}

template <typename T>
DEVICE const T* slot_row(const void* base, const int64_t (&stride)[3], Slot slot, int head) {
  return static_cast<const T*>(base) + slot.page * stride[0] + slot.slot * stride[1] + head * stride[2];
}

// What turns a dot product with stored keys into a score in base 2, so that a probability is one exp2.
DEVICE float score_scale(const DecodeArgs& args, int kv_head) {
  return args.scale * LOG2_E * (args.k_scale ? args.k_scale[kv_head] : 1.0f);
}

// A partial result over some keys: sum = the sum of exp2(score - reference), O = the sum of exp2(score - reference) * v.
struct Partial {
  float reference, sum;
};

DEVICE int64_t partial_index(const DecodeArgs& args, int batch, int kv_head, int row, int split) {
  return ((static_cast<int64_t>(batch) * args.kv_heads + kv_head) * row_count(args) + row) * args.splits + split;
}

// What ends a row: the factor of O, and the log of the sum. The sink joins here, once, whatever the splits.
struct RowEnd {
  float factor, lse;
};

DEVICE RowEnd end_row(const DecodeArgs& args, int kv_head, int head, Partial total) {
  const float sink = args.sink ? args.sink[head] * LOG2_E : -INFINITY;
  const float v_scale = args.v_scale ? args.v_scale[kv_head] : 1.0f;
  if (total.reference == -INFINITY && sink == -INFINITY) return {total.sum == 0.0f ? 0.0f : NAN, -INFINITY};
  const float top = fmaxf(total.reference, sink);
  const float weight = exp2f(total.reference - top);
  const float sum = total.sum * weight + exp2f(sink - top);
  return {weight / sum * v_scale, (top + log2f(sum)) * LN_2};
}

DEVICE void store_lse(const DecodeArgs& args, int batch, int token, int head, float lse) {
  if (args.lse) args.lse[(static_cast<int64_t>(batch) * args.q_heads + head) * args.q_len + token] = lse;
}

DEVICE int64_t query_offset(const DecodeArgs& args, const int64_t (&stride)[3], int batch, int token, int head) {
  return batch * stride[0] + token * stride[1] + head * stride[2];
}

// The instances of a library: one head dim and cache type where a build names them, else all.
#ifndef ONLY_HEAD_DIM
#define ONLY_HEAD_DIM 0
#endif
#ifndef ONLY_KV_DTYPE
#define ONLY_KV_DTYPE -1
#endif

template <int DTYPE, typename KV, int HS, typename F>
const char* call_instance(F f) {
  if constexpr ((ONLY_HEAD_DIM == 0 || ONLY_HEAD_DIM == HS) && (ONLY_KV_DTYPE == -1 || ONLY_KV_DTYPE == DTYPE))
    return f.template operator()<KV, HS>();
  else
    return "this library was built for another head_dim or kv_dtype";
}

// Calls f<KV, HS>() for the cache's element type and the head dim, one of 64, 128, 256, 512.
template <int DTYPE, typename KV, typename F>
const char* with_head_dim(const DecodeArgs& args, F f) {
  switch (args.head_dim) {
    case 64: return call_instance<DTYPE, KV, 64>(f);
    case 128: return call_instance<DTYPE, KV, 128>(f);
    case 256: return call_instance<DTYPE, KV, 256>(f);
    case 512: return call_instance<DTYPE, KV, 512>(f);
    default: return "head_dim must be 64, 128, 256 or 512";
  }
}

template <typename F>
const char* dispatch(const DecodeArgs& args, F f) {
  switch (args.kv_dtype) {
    case DTYPE_BF16: return with_head_dim<DTYPE_BF16, bf16>(args, f);
    case DTYPE_FP16: return with_head_dim<DTYPE_FP16, fp16>(args, f);
    default: return with_head_dim<DTYPE_E4M3, e4m3>(args, f);
  }
}

// The grid's z: batches. y: KV heads times tiles of ROWS rows.
inline dim3 row_grid(const DecodeArgs& args, int x) {
  const int rows = args.q_len * args.group;
  return dim3(x, args.kv_heads * ceil_div(rows, ROWS), args.batch);
}

inline int row_warps(const DecodeArgs& args) { return min(args.q_len * args.group, ROWS); }
