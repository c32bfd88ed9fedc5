// What every prefill step is launched with. Mirrored by PrefillArgs in mila_kernels/attention.py.
#pragma once

#include "../common.cuh"

// q and o [batch, q_len, q_heads, head_dim], k and v [batch, kv_len, kv_heads, head_dim], each with its strides in
// elements and a contiguous head dim; lse [batch, q_heads, q_len] in natural log, or null. Query i sits at position
// kv_len - q_len + i and sees the keys of [max(0, position - window + 1), position] (causal) or all (not causal).
struct PrefillArgs {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch, token, head
  int32_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
  int32_t causal;
  int32_t window;  // keys seen, the current one included; 0: no window
  int32_t dtype;   // Dtype of q, k, v, o
  float scale;
};

// The keys that a query sees: [begin, end).
struct KeyRange {
  int begin, end;
};

DEVICE KeyRange visible_keys(const PrefillArgs& args, int query) {
  const int64_t position = static_cast<int64_t>(args.kv_len) - args.q_len + query;
  const int64_t end = args.causal ? position + 1 : args.kv_len;
  const int64_t begin = args.window > 0 ? position - args.window + 1 : 0;
  return {static_cast<int>(begin > 0 ? begin : 0), static_cast<int>(end > 0 ? end : 0)};
}

template <typename T>
DEVICE const T* row(const void* base, const int64_t (&stride)[3], int batch, int token, int head) {
  return static_cast<const T*>(base) + batch * stride[0] + token * stride[1] + head * stride[2];
}

template <typename T>
DEVICE T* row(void* base, const int64_t (&stride)[3], int batch, int token, int head) {
  return static_cast<T*>(base) + batch * stride[0] + token * stride[1] + head * stride[2];
}

// Calls f<T, HS>() for the args' element type and the smallest HS of 64, 128, 256, 512 that holds head_dim.
template <typename T, typename Args, typename F>
const char* with_head_dim(const Args& args, F f) {
  if (args.head_dim <= 64) return f.template operator()<T, 64>();
  if (args.head_dim <= 128) return f.template operator()<T, 128>();
  if (args.head_dim <= 256) return f.template operator()<T, 256>();
  return f.template operator()<T, 512>();
}

template <typename Args, typename F>
const char* dispatch(const Args& args, F f) {
  return args.dtype == DTYPE_FP16 ? with_head_dim<fp16>(args, f) : with_head_dim<bf16>(args, f);
}
