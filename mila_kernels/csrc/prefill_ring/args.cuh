// What every prefill_ring step is launched with. Mirrored by PrefillRingArgs in mila_kernels/attention_ring.py.
#pragma once

#include "../prefill/args.cuh"

// q and o [batch, q_len, q_heads, head_dim], k and v [batch, capacity, kv_heads, head_dim]: rings in which position p
// lives in slot p % capacity, each with its strides in elements and a contiguous head dim; lse [batch, q_heads, q_len]
// in natural log, or null. Query i sits at position length - q_len + i and sees the keys of [max(0, position - window +
// 1), position]. The caller sees to it that the ring has them all: q_len + window - 1 slots.
struct PrefillRingArgs {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;
  const int32_t* lengths;  // [batch], the tokens of each sequence, these queries' included
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch, token or slot, head
  int32_t batch, q_len, capacity, q_heads, kv_heads, head_dim;
  int32_t window;  // keys seen, the current one included
  int32_t dtype;   // Dtype of q, k, v, o
  float scale;
};

// Nobody has looked at the lengths on a GPU: whatever they are, positions and the tile after them fit 32 bits.
DEVICE int first_position(const PrefillRingArgs& args, int batch) {
  return min(max(args.lengths[batch], 0), INT32_MAX - (1 << 16)) - args.q_len;
}

// The positions that the query at `position` sees.
DEVICE KeyRange visible_positions(const PrefillRingArgs& args, int position) {
  return {max(0, position - args.window + 1), max(0, position + 1)};
}

// The instances of a library: one head dim and element type where a build names them, else all.
#ifndef ONLY_HEAD_DIM
#define ONLY_HEAD_DIM 0
#endif
#ifndef ONLY_DTYPE
#define ONLY_DTYPE -1
#endif

template <typename T, int HS, typename F>
const char* call_instance(F f) {
  constexpr int DTYPE = std::is_same_v<T, fp16> ? DTYPE_FP16 : DTYPE_BF16;
  if constexpr ((ONLY_HEAD_DIM == 0 || ONLY_HEAD_DIM == HS) && (ONLY_DTYPE == -1 || ONLY_DTYPE == DTYPE))
    return f.template operator()<HS>();
  else
    return "this library was built for another head_dim or dtype";
}
