// Stands in for the CUDA language when a C++ compiler builds a step for the CPU: one stackful fiber a CUDA thread, and
// a rendezvous wherever the lanes of a warp or the threads of a block act together. The runtime is cuda_host.cpp.
//
// Two modes. Fast: all shared memory holds NaN when a block starts, threads run in a random order drawn from a seed.
// Check: the step is compiled with `-fsanitize=thread,bounds-strict,alignment` but linked to the hooks of the runtime,
// so that every plain load and store is seen. A finding ends the launch and is its error text.
//
// Found in both modes: warp and block divergence at barriers, shuffles, votes, mma, ldmatrix; lanes that have exited;
// deadlock, with who waits where; addresses that are not mapped; shared addresses out of bounds, misaligned, or made
// from a generic address, where an instruction takes one; launches beyond the architecture's limits.
// Found in check mode: data races on shared memory between barriers; shared memory read before it was written, or read
// or overwritten while its cp.async is in flight; accesses out of bounds of arrays, of shared memory and of the buffers
// that the launch was told of; stores to what it may only read; misaligned accesses; another thread's local memory.
// Stricter than the hardware on purpose: threads that exit before others reach a __syncthreads, and threads that meet
// in one rendezvous from different source lines, are reported.
//
// Not modelled: the accumulation order and width inside mma (here FP32, k ascending), the error of ex2.approx (here
// correctly rounded or nearly), fused multiply-add contraction, races and ordering in global memory, waiting for a
// block that has not started, waiting in a loop with neither __nanosleep nor an atomic (it never ends), accesses by
// memcpy and memset, registers and spills, bank conflicts, coalescing, caches, and all speed. cp.async lands as late as
// its wait allows. An instruction, shape or type that is not here does not compile.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

// ---------------------------------------------------------------------------------------------------------------------
// The C interface. Texts belong to the runtime and live until the calling thread's next call. In them, a code address
// is written `@[path+0xoffset]`: a loaded library and an offset in it, for addr2line to turn into file and line.

extern "C" {
struct EmuBuffer {
  const char* name;
  const void* data;
  uint64_t bytes;
  int32_t writable;
};
struct EmuConfig {
  uint64_t seed;             // orders threads and blocks
  int32_t check;             // not 0: the step was compiled with the hooks, and they look
  int32_t threads;           // workers; 0: one a core
  int32_t architecture;      // 80, 86, 89, 90, 100, 120: whose launch limits hold; 0: 90
  const EmuBuffer* buffers;  // what the launch may touch in global memory; null: not checked
  uint64_t buffer_count;
};
// How the calling thread's launches run from now on; the buffers must outlive them. Null, or what is wrong.
const char* emu_configure(const EmuConfig* config);
}

// ---------------------------------------------------------------------------------------------------------------------
// Words of the language.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#define EMU_INLINE inline __attribute__((always_inline))
// The place of a call, as the last parameter of what must meet: `EMU_SITE` in a declaration, `site` in its body.
#define EMU_SITE emu::Site site = emu::Site::here()

namespace emu {

struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

}  // namespace emu

#define EMU_VECTOR(type, name, align2, align4)                                       \
  struct name##1 {                                                                   \
    type x;                                                                          \
  };                                                                                 \
  struct alignas(align2) name##2 {                                                   \
    type x, y;                                                                       \
  };                                                                                 \
  struct name##3 {                                                                   \
    type x, y, z;                                                                    \
  };                                                                                 \
  struct alignas(align4) name##4 {                                                   \
    type x, y, z, w;                                                                 \
  };                                                                                 \
  EMU_INLINE name##1 make_##name##1(type x) { return {x}; }                          \
  EMU_INLINE name##2 make_##name##2(type x, type y) { return {x, y}; }               \
  EMU_INLINE name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }    \
  EMU_INLINE name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTOR(int8_t, char, 2, 4)
EMU_VECTOR(uint8_t, uchar, 2, 4)
EMU_VECTOR(int16_t, short, 4, 8)
EMU_VECTOR(uint16_t, ushort, 4, 8)
EMU_VECTOR(int32_t, int, 8, 16)
EMU_VECTOR(uint32_t, uint, 8, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(int64_t, longlong, 16, 16)
EMU_VECTOR(uint64_t, ulonglong, 16, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

typedef struct CUstream_st* cudaStream_t;

// ---------------------------------------------------------------------------------------------------------------------
// The runtime.

namespace emu {

enum class Shuffle : int { index, up, down, exclusive_or };
enum class Vote : int { any, all, ballot, match_any, add, min_unsigned, max_unsigned, bit_and, bit_or, bit_xor };
enum class BlockVote : int { none, count, all, any };
enum class Mma : int { bf16_16816, f16_16816, e4m3_16832 };
enum class Atomic : int {
  add_u32, add_u64, add_f32, add_f16x2, add_bf16x2, min_s32, max_s32, min_u32, max_u32, max_u64, bit_and, bit_or,
  bit_xor, exchange, exchange_u64, compare_exchange, compare_exchange_u64, inc_u32, dec_u32
};

// A fiber stays on its worker for life: what these return never changes within one thread of the kernel.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();
__attribute__((const)) void* shared_memory();

int sync_block(BlockVote vote, int predicate, Site site);
void sync_warp(unsigned mask, Site site);
uint64_t shuffle_bits(Shuffle kind, unsigned mask, uint64_t bits, int lane, int width, Site site);
unsigned vote(Vote kind, unsigned mask, unsigned value, Site site);
void mma(Mma shape, float* d, const uint32_t* a, const uint32_t* b, Site site);
void ldmatrix(int count, bool transposed, uint32_t* d, uint32_t row, Site site);
void cp_async(uint32_t destination, const void* source, unsigned bytes, unsigned source_bytes, Site site);
void cp_async_commit();
void cp_async_wait(unsigned groups_in_flight);
void cp_async_wait_all();
uint64_t atomic(Atomic op, void* address, uint64_t value, uint64_t compare = 0);
uint32_t shared_address(const void* pointer, Site site);                  // the 32-bit address of a generic pointer
void* shared_pointer(uint32_t address, unsigned bytes, Site site);        // and back, checked
void global_access(const void* pointer, unsigned bytes, bool write, Site site);  // what an instruction on global does
void yield();
[[noreturn]] void trap(const char* what, Site site);
int64_t clock();

const char* launch_grid(dim3 grid, dim3 cluster, dim3 block, size_t shared_bytes, void (*invoke)(const void*),
                        const void* body, size_t body_bytes, const void* code);

// Runs body() once a thread of the grid; null, or an error text.
template <typename Body>
const char* launch_cluster(dim3 grid, dim3 cluster, dim3 block, size_t shared_bytes, cudaStream_t, const Body& body) {
  void (*invoke)(const void*) = [](const void* f) { (*static_cast<const Body*>(f))(); };
  const void* code = reinterpret_cast<const void*>(invoke);
  return launch_grid(grid, cluster, block, shared_bytes, invoke, &body, sizeof(Body), code);
}

template <typename Body>
const char* launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Body& body) {
  return launch_cluster(grid, dim3(1), block, shared_bytes, stream, body);
}

template <typename To, typename From>
EMU_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

}  // namespace emu

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())
constexpr int warpSize = 32;

EMU_INLINE void __syncthreads(EMU_SITE) { emu::sync_block(emu::BlockVote::none, 0, site); }
EMU_INLINE int __syncthreads_count(int predicate, EMU_SITE) {
  return emu::sync_block(emu::BlockVote::count, predicate, site);
}
EMU_INLINE int __syncthreads_and(int predicate, EMU_SITE) {
  return emu::sync_block(emu::BlockVote::all, predicate, site);
}
EMU_INLINE int __syncthreads_or(int predicate, EMU_SITE) {
  return emu::sync_block(emu::BlockVote::any, predicate, site);
}
EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) { emu::sync_warp(mask, site); }

namespace emu {

template <typename T>
EMU_INLINE T shuffle(Shuffle kind, unsigned mask, T value, int lane, int width, Site site) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 2)
    return bit_cast<T>(static_cast<uint16_t>(shuffle_bits(kind, mask, bit_cast<uint16_t>(value), lane, width, site)));
  else if constexpr (sizeof(T) == 4)
    return bit_cast<T>(static_cast<uint32_t>(shuffle_bits(kind, mask, bit_cast<uint32_t>(value), lane, width, site)));
  else
    return bit_cast<T>(shuffle_bits(kind, mask, bit_cast<uint64_t>(value), lane, width, site));
}

}  // namespace emu

template <typename T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_SITE) {
  return emu::shuffle<T>(emu::Shuffle::index, mask, value, lane, width, site);
}
template <typename T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
  return emu::shuffle<T>(emu::Shuffle::up, mask, value, static_cast<int>(delta), width, site);
}
template <typename T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
  return emu::shuffle<T>(emu::Shuffle::down, mask, value, static_cast<int>(delta), width, site);
}
template <typename T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_SITE) {
  return emu::shuffle<T>(emu::Shuffle::exclusive_or, mask, value, bits, width, site);
}
EMU_INLINE int __any_sync(unsigned mask, int predicate, EMU_SITE) {
  return static_cast<int>(emu::vote(emu::Vote::any, mask, predicate != 0, site));
}
EMU_INLINE int __all_sync(unsigned mask, int predicate, EMU_SITE) {
  return static_cast<int>(emu::vote(emu::Vote::all, mask, predicate != 0, site));
}
EMU_INLINE unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
  return emu::vote(emu::Vote::ballot, mask, predicate != 0, site);
}
EMU_INLINE unsigned __match_any_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::match_any, mask, value, site);
}
EMU_INLINE unsigned __reduce_add_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::add, mask, value, site);
}
EMU_INLINE unsigned __reduce_min_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::min_unsigned, mask, value, site);
}
EMU_INLINE unsigned __reduce_max_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::max_unsigned, mask, value, site);
}
EMU_INLINE unsigned __reduce_and_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::bit_and, mask, value, site);
}
EMU_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::bit_or, mask, value, site);
}
EMU_INLINE unsigned __reduce_xor_sync(unsigned mask, unsigned value, EMU_SITE) {
  return emu::vote(emu::Vote::bit_xor, mask, value, site);
}

EMU_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMU_INLINE void __threadfence_block() {}
EMU_INLINE void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMU_INLINE void __nanosleep(unsigned) { emu::yield(); }
EMU_INLINE void __trap(EMU_SITE) { emu::trap("__trap", site); }
EMU_INLINE long long clock64() { return emu::clock(); }

template <typename T>
EMU_INLINE T __ldg(const T* p, EMU_SITE) {
  emu::global_access(p, sizeof(T), false, site);
  return *p;
}
template <typename T>
EMU_INLINE T __ldcs(const T* p, EMU_SITE) {
  emu::global_access(p, sizeof(T), false, site);
  return *p;
}
template <typename T>
EMU_INLINE T __ldcg(const T* p, EMU_SITE) {
  emu::global_access(p, sizeof(T), false, site);
  return *p;
}
template <typename T>
EMU_INLINE void __stcs(T* p, T value, EMU_SITE) {
  emu::global_access(p, sizeof(T), true, site);
  *p = value;
}
template <typename T>
EMU_INLINE void __stcg(T* p, T value, EMU_SITE) {
  emu::global_access(p, sizeof(T), true, site);
  *p = value;
}

EMU_INLINE size_t __cvta_generic_to_shared(const void* p, EMU_SITE) { return emu::shared_address(p, site); }

// ---------------------------------------------------------------------------------------------------------------------
// Numbers.

EMU_INLINE uint32_t __float_as_uint(float x) { return emu::bit_cast<uint32_t>(x); }
EMU_INLINE int32_t __float_as_int(float x) { return emu::bit_cast<int32_t>(x); }
EMU_INLINE float __uint_as_float(uint32_t x) { return emu::bit_cast<float>(x); }
EMU_INLINE float __int_as_float(int32_t x) { return emu::bit_cast<float>(x); }

#define EMU_MIN_MAX(type)                                        \
  EMU_INLINE type min(type a, type b) { return b < a ? b : a; } \
  EMU_INLINE type max(type a, type b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }

EMU_INLINE float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
EMU_INLINE float __expf(float x) { return expf(x); }
EMU_INLINE float __logf(float x) { return logf(x); }
EMU_INLINE float __log2f(float x) { return log2f(x); }
EMU_INLINE float __fdividef(float a, float b) { return a / b; }
EMU_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
EMU_INLINE int __float2int_rn(float x) {  // saturates; NaN gives 0
  return x != x ? 0 : x >= 2147483648.0f ? INT32_MAX : x < -2147483648.0f ? INT32_MIN : static_cast<int>(rintf(x));
}
EMU_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
EMU_INLINE unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
EMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

namespace emu {

// One rounding, to nearest even, from FP32 to a format of `exponent` and `mantissa` bits that has infinities.
EMU_INLINE uint16_t round_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // subnormal or zero: adding 0.5 puts the last kept bit at the end of the mantissa
    const uint32_t rounded = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) - 0x38000000u) >> 13);
}
EMU_INLINE float half_value(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<uint32_t>(value));
  }
  return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}
EMU_INLINE uint16_t round_bfloat(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
EMU_INLINE float bfloat_value(uint16_t b) { return bit_cast<float>(static_cast<uint32_t>(b) << 16); }

// FP64 to FP32 so that a second rounding to a narrower format gives what one rounding would: an inexact result is odd.
EMU_INLINE float round_odd(double x) {
  const float f = static_cast<float>(x);
  const double back = f;
  if (back == x || x != x || isinf(back)) return f;
  const uint32_t bits = bit_cast<uint32_t>(f);
  if (bits & 1u) return f;
  const bool away = fabs(back) > fabs(x);
  return bit_cast<float>(away ? bits - 1u : bits + 1u);
}

// The sum likewise: what FP64 cannot hold of it makes the result odd.
EMU_INLINE double add_odd(double a, double b) {
  const double sum = a + b, b_kept = sum - a, lost = (a - (sum - b_kept)) + (b - b_kept);
  if (lost == 0.0 || lost != lost || bit_cast<uint64_t>(sum) & 1u) return sum;
  return bit_cast<double>(bit_cast<uint64_t>(sum) + ((lost > 0.0) == (sum > 0.0) ? 1 : -1));
}

// E4M3 (fn): 448 is the largest, 0x7f NaN; saturating. E2M1: 6 is the largest; NaN gives +6.
uint8_t round_e4m3(float x);
float e4m3_value(uint8_t code);
uint8_t round_e2m1(float x);
float e2m1_value(uint8_t code);

}  // namespace emu

struct __nv_bfloat16_raw {
  unsigned short x;
};
struct __half_raw {
  unsigned short x;
};
struct __nv_bfloat16 {
  uint16_t __x;
  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : __x(raw.x) {}
  __nv_bfloat16(float x) : __x(emu::round_bfloat(x)) {}
  explicit operator float() const { return emu::bfloat_value(__x); }
};
struct __half {
  uint16_t __x;
  __half() = default;
  __half(__half_raw raw) : __x(raw.x) {}
  __half(float x) : __x(emu::round_half(x)) {}
  explicit operator float() const { return emu::half_value(__x); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
  __half x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using half = __half;
using half2 = __half2;

typedef uint8_t __nv_fp8_storage_t;
typedef uint16_t __nv_fp8x2_storage_t;
struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float x) : __x(emu::round_e4m3(x)) {}
  explicit operator float() const { return emu::e4m3_value(__x); }
};

EMU_INLINE __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
EMU_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
EMU_INLINE float __bfloat162float(__nv_bfloat16 x) { return emu::bfloat_value(x.__x); }
EMU_INLINE __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {low, high}; }
EMU_INLINE __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
EMU_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }
EMU_INLINE float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
EMU_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
EMU_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
EMU_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16_raw{x}; }
EMU_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
EMU_INLINE __half __float2half(float x) { return __half(x); }
EMU_INLINE __half __float2half_rn(float x) { return __half(x); }
EMU_INLINE float __half2float(__half x) { return emu::half_value(x.__x); }
EMU_INLINE __half2 __floats2half2_rn(float low, float high) { return {low, high}; }
EMU_INLINE __half2 __float2half2_rn(float x) { return {x, x}; }
EMU_INLINE __half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
EMU_INLINE float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
EMU_INLINE __half2 __halves2half2(__half low, __half high) { return {low, high}; }
EMU_INLINE __half2 __half2half2(__half x) { return {x, x}; }
EMU_INLINE __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
EMU_INLINE unsigned short __half_as_ushort(__half x) { return x.__x; }

// Packed arithmetic: each element rounded once. Products of two are exact in FP64.
#define EMU_PACKED(scalar, pair, value)                                                                                \
  EMU_INLINE float __low2float(pair a) { return value(a.x); }                                                          \
  EMU_INLINE float __high2float(pair a) { return value(a.y); }                                                         \
  EMU_INLINE scalar __hadd(scalar a, scalar b) { return emu::round_odd(double(value(a)) + double(value(b))); }         \
  EMU_INLINE scalar __hsub(scalar a, scalar b) { return emu::round_odd(double(value(a)) - double(value(b))); }         \
  EMU_INLINE scalar __hmul(scalar a, scalar b) { return emu::round_odd(double(value(a)) * double(value(b))); }         \
  EMU_INLINE scalar __hfma(scalar a, scalar b, scalar c) {                                                             \
    return emu::round_odd(emu::add_odd(double(value(a)) * double(value(b)), double(value(c))));                         \
  }                                                                                                                    \
  EMU_INLINE pair __hadd2(pair a, pair b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }                             \
  EMU_INLINE pair __hsub2(pair a, pair b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }                             \
  EMU_INLINE pair __hmul2(pair a, pair b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }                             \
  EMU_INLINE pair __hfma2(pair a, pair b, pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }           \
  EMU_INLINE scalar __low2##scalar(pair a) { return a.x; }
#define __low2__nv_bfloat16 __low2bfloat16
#define __low2__half __low2half
EMU_PACKED(__nv_bfloat16, __nv_bfloat162, __bfloat162float)
EMU_PACKED(__half, __half2, __half2float)
#undef __low2__nv_bfloat16
#undef __low2__half
#undef EMU_PACKED

// ---------------------------------------------------------------------------------------------------------------------
// Atomics, on global and shared memory; relaxed, as CUDA's.

EMU_INLINE unsigned atomicAdd(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::add_u32, p, x));
}
EMU_INLINE int atomicAdd(int* p, int x) {
  return static_cast<int>(emu::atomic(emu::Atomic::add_u32, p, static_cast<unsigned>(x)));
}
EMU_INLINE unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) {
  return emu::atomic(emu::Atomic::add_u64, p, x);
}
EMU_INLINE float atomicAdd(float* p, float x) {
  return __uint_as_float(static_cast<uint32_t>(emu::atomic(emu::Atomic::add_f32, p, __float_as_uint(x))));
}
EMU_INLINE __half2 atomicAdd(__half2* p, __half2 x) {
  return emu::bit_cast<__half2>(
      static_cast<uint32_t>(emu::atomic(emu::Atomic::add_f16x2, p, emu::bit_cast<uint32_t>(x))));
}
EMU_INLINE __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 x) {
  return emu::bit_cast<__nv_bfloat162>(
      static_cast<uint32_t>(emu::atomic(emu::Atomic::add_bf16x2, p, emu::bit_cast<uint32_t>(x))));
}
EMU_INLINE int atomicMin(int* p, int x) {
  return static_cast<int>(emu::atomic(emu::Atomic::min_s32, p, static_cast<unsigned>(x)));
}
EMU_INLINE int atomicMax(int* p, int x) {
  return static_cast<int>(emu::atomic(emu::Atomic::max_s32, p, static_cast<unsigned>(x)));
}
EMU_INLINE unsigned atomicMin(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::min_u32, p, x));
}
EMU_INLINE unsigned atomicMax(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::max_u32, p, x));
}
EMU_INLINE unsigned long long atomicMax(unsigned long long* p, unsigned long long x) {
  return emu::atomic(emu::Atomic::max_u64, p, x);
}
EMU_INLINE unsigned atomicAnd(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::bit_and, p, x));
}
EMU_INLINE unsigned atomicOr(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::bit_or, p, x));
}
EMU_INLINE unsigned atomicXor(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::bit_xor, p, x));
}
EMU_INLINE unsigned atomicInc(unsigned* p, unsigned limit) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::inc_u32, p, limit));
}
EMU_INLINE unsigned atomicDec(unsigned* p, unsigned limit) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::dec_u32, p, limit));
}
EMU_INLINE unsigned atomicExch(unsigned* p, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::exchange, p, x));
}
EMU_INLINE int atomicExch(int* p, int x) {
  return static_cast<int>(emu::atomic(emu::Atomic::exchange, p, static_cast<unsigned>(x)));
}
EMU_INLINE float atomicExch(float* p, float x) {
  return __uint_as_float(static_cast<uint32_t>(emu::atomic(emu::Atomic::exchange, p, __float_as_uint(x))));
}
EMU_INLINE unsigned atomicCAS(unsigned* p, unsigned compare, unsigned x) {
  return static_cast<unsigned>(emu::atomic(emu::Atomic::compare_exchange, p, x, compare));
}
EMU_INLINE int atomicCAS(int* p, int compare, int x) {
  return static_cast<int>(
      emu::atomic(emu::Atomic::compare_exchange, p, static_cast<unsigned>(x), static_cast<unsigned>(compare)));
}
EMU_INLINE unsigned long long atomicCAS(unsigned long long* p, unsigned long long compare, unsigned long long x) {
  return emu::atomic(emu::Atomic::compare_exchange_u64, p, x, compare);
}
