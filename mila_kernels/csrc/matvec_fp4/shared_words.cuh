// Loads and stores of shared memory by 32-bit addresses that stay in a register over a loop. From pointers the compiler
// makes the addresses anew in every turn where registers are short.
#pragma once

#include "../ptx.cuh"

DEVICE uint4 ld_shared_v4_u32(uint32_t shared MK_SITE) {
#ifdef __CUDACC__
  uint4 d;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(shared)
               : "memory");
  return d;
#else
  return *static_cast<const uint4*>(emu::shared_pointer(shared, 16, site));
#endif
}

DEVICE uint32_t ld_shared_u32(uint32_t shared MK_SITE) {
#ifdef __CUDACC__
  uint32_t d;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(shared) : "memory");
  return d;
#else
  return *static_cast<const uint32_t*>(emu::shared_pointer(shared, 4, site));
#endif
}

DEVICE void st_shared_v4_u32(uint32_t shared, const uint4& x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
#else
  *static_cast<uint4*>(emu::shared_pointer(shared, 16, site)) = x;
#endif
}

DEVICE void st_shared_f32(uint32_t shared, float x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
#else
  *static_cast<float*>(emu::shared_pointer(shared, 4, site)) = x;
#endif
}

// The compiler no longer knows how the value was made, and so cannot make it again.
DEVICE void keep_in_register(uint32_t& x) { asm volatile("" : "+r"(x)); }
