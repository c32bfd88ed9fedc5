// What every step needs and none teaches: element types, launching with errors as text, dynamic shared memory,
// warp reductions. The same source is compiled by nvcc for a GPU and by g++ for emulation on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define DEVICE __device__ __forceinline__
#else
#include "../emulation/cuda_host.h"
#define DEVICE inline __attribute__((always_inline))
#endif

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr int WARP = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// The codes of `dtype` in every argument struct.
enum Dtype : int32_t { DTYPE_BF16 = 0, DTYPE_FP16 = 1 };

template <typename T>
constexpr __host__ __device__ T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Of a power of two. A function of its own, for an initialiser list stays in what the host compiler sees, and the host
// has no __ffs.
DEVICE int log2_exact(int power) { return __ffs(power) - 1; }

DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(fp16 x) { return __half2float(x); }

template <typename T>
DEVICE T from_float(float x);
template <>
DEVICE bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
DEVICE fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}

// Two floats rounded to T, the first in the low half: the packing of every mma operand.
template <typename T>
DEVICE uint32_t pack2(float low, float high);
template <>
DEVICE uint32_t pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
DEVICE uint32_t pack2<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Sum and maximum over the lanes that differ in the bits below `width` (a power of two); every lane gets the result.
template <int width = WARP>
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int bit = width / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(ALL_LANES, x, bit);
  return x;
}

template <int width = WARP>
DEVICE float warp_max(float x) {
#pragma unroll
  for (int bit = width / 2; bit > 0; bit /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, bit));
  return x;
}

// x is computed before what comes after this call, as far as that is volatile: no instruction.
DEVICE void keep_here([[maybe_unused]] uint32_t& x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
}

// The block's one piece of shared memory, seen as a struct of typed arrays.
template <typename Smem>
DEVICE Smem& dynamic_smem() {
#ifdef __CUDACC__
  // A comment in the PTX, no instruction: the static table reads the size of each kernel's shared memory from it.
  asm volatile("// dynamic shared memory: %0 bytes" ::"n"(sizeof(Smem)));
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  return *reinterpret_cast<Smem*>(smem_bytes);
#else
  return *reinterpret_cast<Smem*>(emu::shared_memory());
#endif
}

// Launches `kernel` on `stream`; null, or a text that says what was refused. Nothing is synchronised or allocated.
template <typename... Params, typename... Args>
inline const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream,
                          Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;  // empty work is no launch
#ifdef __CUDACC__
  cudaError_t error = cudaSuccess;
  if (smem_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // the text carries it; the next launch must not find it again
  return cudaGetErrorString(error);
#else
  return emu::launch(grid, block, smem_bytes, stream, [=] { kernel(static_cast<Params>(args)...); });
#endif
}

// As launch(), but the kernel may start while the one before it on the stream still runs, up to its
// griddepcontrol_wait().
template <typename... Params, typename... Args>
inline const char* launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes,
                                    cudaStream_t stream, Args... args) {
#ifdef __CUDACC__
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
  cudaError_t error = cudaSuccess;
  if (smem_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // the text carries it; the next launch must not find it again
  return cudaGetErrorString(error);
#else
  return launch(kernel, grid, block, smem_bytes, stream, args...);
#endif
}
