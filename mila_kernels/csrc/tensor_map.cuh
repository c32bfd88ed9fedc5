// Tensor maps, made on the host: what cp.async.bulk.tensor copies boxes of.
#pragma once

#include "common.cuh"

#ifdef __CUDACC__
#include <cuda.h>
#include <cudaTypedefs.h>
#else
#include "../emulation/hopper.h"
#endif

// How 16-byte pieces move within shared memory, so that wgmma and ldmatrix read without bank conflicts: bits 4 and up
// of the address are exclusive-or'ed with bits 7 and up, as many as exchange pieces within 32, 64, 128 bytes.
enum class Swizzle : int { none = 0, b32 = 1, b64 = 2, b128 = 3 };

// What a copy brings along into L2.
enum class Promotion : int { none = 0, l2_64B = 1, l2_128B = 2, l2_256B = 3 };

#ifdef __CUDACC__
template <typename T>
constexpr CUtensorMapDataType tensor_map_type();
template <>
constexpr CUtensorMapDataType tensor_map_type<uint8_t>() { return CU_TENSOR_MAP_DATA_TYPE_UINT8; }
template <>
constexpr CUtensorMapDataType tensor_map_type<bf16>() { return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; }
template <>
constexpr CUtensorMapDataType tensor_map_type<fp16>() { return CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }
template <>
constexpr CUtensorMapDataType tensor_map_type<float>() { return CU_TENSOR_MAP_DATA_TYPE_FLOAT32; }
#endif

// What the driver would refuse without a reason; null where it is fine.
inline const char* tensor_map_problem(const void* base, int rank, uint64_t element, const uint64_t* sizes,
                                      const uint64_t* strides, const uint32_t* box, Swizzle swizzle) {
  if (reinterpret_cast<uintptr_t>(base) % 16) return "tensor map: the tensor's address must be a multiple of 16";
  for (int i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > 1ull << 32) return "tensor map: a size must be from 1 to 2^32";
    if (box[i] < 1 || box[i] > 256) return "tensor map: a box must be from 1 to 256 elements along each dimension";
  }
  for (int i = 0; i + 1 < rank; ++i)
    if (strides[i] % 16 || strides[i] >= 1ull << 40)
      return "tensor map: a stride must be a multiple of 16 bytes below 2^40";
  const uint64_t row = box[0] * element, span = swizzle == Swizzle::none ? row : 16ull << static_cast<int>(swizzle);
  if (row % 16) return "tensor map: a row of the box must be a multiple of 16 bytes";
  if (row > span) return "tensor map: a row of the box must not be longer than the swizzle";
  return nullptr;
}

// Describes a tensor of uint8_t (E4M3 too), bf16, fp16 or float: `sizes` in elements, the innermost first, `strides` in
// bytes of the dimensions from the second on, `box` what one copy takes. Null, or what is wrong.
template <typename T, int RANK>
inline const char* make_tensor_map(CUtensorMap* map, const void* base, const uint64_t (&sizes)[RANK],
                                   const uint64_t (&strides)[RANK - 1], const uint32_t (&box)[RANK], Swizzle swizzle,
                                   Promotion promotion = Promotion::l2_128B) {
  static_assert(RANK >= 2 && RANK <= 5);
  const char* problem = tensor_map_problem(base, RANK, sizeof(T), sizes, strides, box, swizzle);
  if (problem) return problem;
#ifdef __CUDACC__
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(error == cudaSuccess ? found : nullptr);
  }();
  if (!encode) return "tensor map: the driver has no cuTensorMapEncodeTiled (CUDA 12 and later have)";
  uint32_t steps[RANK];
  for (uint32_t& step : steps) step = 1;
  const CUresult error =
      encode(map, tensor_map_type<T>(), RANK, const_cast<void*>(base), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(swizzle),
             static_cast<CUtensorMapL2promotion>(promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? nullptr : "tensor map: cuTensorMapEncodeTiled refused it";
#else
  static_cast<void>(promotion);
  *map = {};
  map->magic = emu::TENSOR_MAP;
  map->base = static_cast<const char*>(base);
  map->rank = RANK;
  map->element_bytes = sizeof(T);
  map->swizzle = static_cast<uint8_t>(swizzle);
  for (int i = 0; i < RANK; ++i) map->sizes[i] = sizes[i], map->box[i] = box[i];
  for (int i = 0; i + 1 < RANK; ++i) map->strides[i] = strides[i];
  return nullptr;
#endif
}
