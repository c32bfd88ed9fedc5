// PTX, one thin wrapper an instruction, named after it. Under nvcc each is its `asm`; elsewhere its twin of the
// emulation, which tests/test_ptx.py holds against outputs recorded on a GPU (data/ptx_vectors).
// Where a wrapper names no architecture it runs on sm_80 and later. Using one on an older architecture than it names is
// an error of ptxas. Packed values hold their first element in the lowest bits.
#pragma once

#include "common.cuh"

#ifdef __CUDACC__
#define MK_SITE
#else
// The place of a call, for the reports of the emulation.
#define MK_SITE , emu::Site site = emu::Site::here()
#endif

// ---- shared memory ---------------------------------------------------------------------------------------------------

// The 32-bit address that ldmatrix, cp.async and their kind take. A generic pointer cut to 32 bits is not one.
DEVICE uint32_t smem_u32(const void* shared MK_SITE) {
#ifdef __CUDACC__
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
#else
  return emu::shared_address(shared, site);
#endif
}

// ldmatrix: 8 x 8 matrices of 16-bit elements. Lanes 0-7 give the addresses of the rows of the first matrix (16 bytes
// each, 16-byte aligned), lanes 8-15 those of the second, and so on; addresses of further lanes are ignored. Of matrix i,
// d[i] of lane l holds elements 2 * (l % 4) and the next of row l / 4. With .trans it holds, of column l / 4, the
// elements in rows 2 * (l % 4) and the next.
DEVICE void ldmatrix_x1(uint32_t (&d)[1], uint32_t row MK_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(row) : "memory");
#else
  emu::ldmatrix(1, false, d, row, site);
#endif
}

DEVICE void ldmatrix_x2(uint32_t (&d)[2], uint32_t row MK_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(row)
               : "memory");
#else
  emu::ldmatrix(2, false, d, row, site);
#endif
}

DEVICE void ldmatrix_x4(uint32_t (&d)[4], uint32_t row MK_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
#else
  emu::ldmatrix(4, false, d, row, site);
#endif
}

DEVICE void ldmatrix_x1_trans(uint32_t (&d)[1], uint32_t row MK_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(row) : "memory");
#else
  emu::ldmatrix(1, true, d, row, site);
#endif
}

DEVICE void ldmatrix_x2_trans(uint32_t (&d)[2], uint32_t row MK_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(row)
               : "memory");
#else
  emu::ldmatrix(2, true, d, row, site);
#endif
}

DEVICE void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row MK_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
#else
  emu::ldmatrix(4, true, d, row, site);
#endif
}

// cp.async: BYTES from global to shared memory without a register between, both addresses aligned to BYTES. Of them the
// first `source_bytes` are read and the rest are zeros; with 0 the source may be any pointer. Nothing may touch the
// destination until cp_async_wait_group or cp_async_wait_all, and other threads until a barrier after it.
// .ca keeps the line in L1, .cg (16 bytes only) does not.
template <int BYTES>
DEVICE void cp_async_ca(uint32_t shared, const void* global MK_SITE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async.ca copies 4, 8 or 16 bytes");
#ifdef __CUDACC__
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES) : "memory");
#else
  emu::cp_async(shared, global, BYTES, BYTES, site);
#endif
}

template <int BYTES>
DEVICE void cp_async_ca_zfill(uint32_t shared, const void* global, uint32_t source_bytes MK_SITE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async.ca copies 4, 8 or 16 bytes");
#ifdef __CUDACC__
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES),
               "r"(source_bytes)
               : "memory");
#else
  emu::cp_async(shared, global, BYTES, source_bytes, site);
#endif
}

DEVICE void cp_async_cg(uint32_t shared, const void* global MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#else
  emu::cp_async(shared, global, 16, 16, site);
#endif
}

DEVICE void cp_async_cg_zfill(uint32_t shared, const void* global, uint32_t source_bytes MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
#else
  emu::cp_async(shared, global, 16, source_bytes, site);
#endif
}

// The same with a hint to bring the 128 bytes around the source into L2.
DEVICE void cp_async_cg_L2_128B(uint32_t shared, const void* global MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#else
  emu::cp_async(shared, global, 16, 16, site);
#endif
}

DEVICE void cp_async_cg_zfill_L2_128B(uint32_t shared, const void* global, uint32_t source_bytes MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
#else
  emu::cp_async(shared, global, 16, source_bytes, site);
#endif
}

// Closes the calling thread's group of copies; an empty group counts as one.
DEVICE void cp_async_commit_group() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emu::cp_async_commit();
#endif
}

// Waits until at most the N newest groups of the calling thread are in flight.
template <int N>
DEVICE void cp_async_wait_group() {
  static_assert(N >= 0);
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
  emu::cp_async_wait(N);
#endif
}

// Waits for every copy of the calling thread, committed or not.
DEVICE void cp_async_wait_all() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  emu::cp_async_wait_all();
#endif
}

// ---- shared memory by 32-bit addresses -------------------------------------------------------------------------------

// Addresses that stay in a register over a loop: from pointers the compiler makes them anew in every turn where
// registers are short.
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

// ---- tensor cores ----------------------------------------------------------------------------------------------------

// mma: c[16][8] += a[16][K] b[K][8], FP32 sums. With g = lane / 4 and t = lane % 4, a lane holds
//   c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]: row g + 8.
//   K = 16, 16-bit elements: a[0] row g, columns 2t and 2t + 1; a[1] row g + 8; a[2] row g, columns 2t + 8 and 2t + 9;
//     a[3] row g + 8 of those; b0 rows 2t and 2t + 1 of column g; b1 rows 2t + 8 and 2t + 9.
//   K = 32, 8-bit elements: the same with four elements a register: columns 4t ... 4t + 3, and 16 further.
template <typename T>
DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 MK_SITE);

template <>
DEVICE void mma_m16n8k16<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
#ifndef __CUDACC__
                               ,
                               emu::Site site
#endif
) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
  emu::mma(emu::Mma::bf16_16816, c, a, b, site);
#endif
}

template <>
DEVICE void mma_m16n8k16<fp16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1
#ifndef __CUDACC__
                               ,
                               emu::Site site
#endif
) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
  emu::mma(emu::Mma::f16_16816, c, a, b, site);
#endif
}

// sm_89 and later. On sm_90 it becomes two conversions and two 16-bit products: right, but at no FP8 rate.
DEVICE void mma_m16n8k32_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
  emu::mma(emu::Mma::e4m3_16832, c, a, b, site);
#endif
}

// ---- bits and numbers ------------------------------------------------------------------------------------------------

// prmt: byte i of the result is byte (selector >> 4 i & 7) of {b, a}, a's bytes being 0-3; bit 3 of a selector's nibble
// gives that byte's sign eight times instead.
DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#else
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15u;
    const uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (nibble & 7u)) & 255u;
    d |= (nibble & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
  }
  return d;
#endif
}

// lop3: any function of three bits, bit by bit. TABLE is the function applied to 0xf0 (a), 0xcc (b) and 0xaa (c).
template <int TABLE>
DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(TABLE >= 0 && TABLE < 256);
#ifdef __CUDACC__
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
#else
  uint32_t d = 0;
  for (int row = 0; row < 8; ++row)
    if (TABLE >> row & 1) d |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return d;
#endif
}

// ex2.approx.ftz: 2^x, relative error up to 2^-22; subnormal inputs and results count as zero.
DEVICE float ex2_approx_ftz(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
#endif
}

// Two at once, relative error up to 2^-9.9 (FP16; sm_75 and later) and 2^-7 (BF16; sm_90 and later).
DEVICE uint32_t ex2_approx_f16x2(uint32_t x) {
#ifdef __CUDACC__
  uint32_t y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  const uint32_t low = emu::round_half(exp2f(emu::half_value(static_cast<uint16_t>(x))));
  return low | static_cast<uint32_t>(emu::round_half(exp2f(emu::half_value(static_cast<uint16_t>(x >> 16))))) << 16;
#endif
}

DEVICE uint32_t ex2_approx_ftz_bf16x2(uint32_t x) {
#ifdef __CUDACC__
  uint32_t y;
  asm("ex2.approx.ftz.bf16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  const uint32_t low = emu::round_bfloat(ex2_approx_ftz(emu::bfloat_value(static_cast<uint16_t>(x))));
  return low |
         static_cast<uint32_t>(emu::round_bfloat(ex2_approx_ftz(emu::bfloat_value(static_cast<uint16_t>(x >> 16)))))
             << 16;
#endif
}

// cvt: rounds to nearest even. As in PTX, the first argument becomes the high half. NaN becomes 0x7fff, 0x7f in E4M3 and
// the largest value in E2M1; .satfinite turns what is too large, infinity included, into the largest value.
DEVICE uint32_t cvt_rn_bf16x2_f32(float high, float low) {
#ifdef __CUDACC__
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  return static_cast<uint32_t>(emu::round_bfloat(high)) << 16 | emu::round_bfloat(low);
#endif
}

DEVICE uint32_t cvt_rn_f16x2_f32(float high, float low) {
#ifdef __CUDACC__
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  return static_cast<uint32_t>(emu::round_half(high)) << 16 | emu::round_half(low);
#endif
}

// sm_89 and later.
DEVICE uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
#ifdef __CUDACC__
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
#else
  return static_cast<uint16_t>(emu::round_e4m3(high) << 8 | emu::round_e4m3(low));
#endif
}

DEVICE uint16_t cvt_rn_satfinite_e4m3x2_f16x2(uint32_t x) {
#ifdef __CUDACC__
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(x));
  return d;
#else
  return cvt_rn_satfinite_e4m3x2_f32(emu::half_value(static_cast<uint16_t>(x >> 16)),
                                     emu::half_value(static_cast<uint16_t>(x)));
#endif
}

// Exact: every E4M3 value is an FP16 value.
DEVICE uint32_t cvt_rn_f16x2_e4m3x2(uint16_t x) {
#ifdef __CUDACC__
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(x));
  return d;
#else
  return cvt_rn_f16x2_f32(emu::e4m3_value(static_cast<uint8_t>(x >> 8)), emu::e4m3_value(static_cast<uint8_t>(x)));
#endif
}

// sm_100a, sm_120a and their kind: two E2M1 in a byte.
DEVICE uint8_t cvt_rn_satfinite_e2m1x2_f32(float high, float low) {
#ifdef __CUDACC__
  uint32_t d;
  asm("{\n\t.reg .b8 byte;\n\tcvt.rn.satfinite.e2m1x2.f32 byte, %1, %2;\n\tcvt.u32.u8 %0, byte;\n\t}"
      : "=r"(d)
      : "f"(high), "f"(low));
  return static_cast<uint8_t>(d);
#else
  return static_cast<uint8_t>(emu::round_e2m1(high) << 4 | emu::round_e2m1(low));
#endif
}

DEVICE uint32_t cvt_rn_f16x2_e2m1x2(uint8_t x) {
#ifdef __CUDACC__
  uint32_t d;
  asm("{\n\t.reg .b8 byte;\n\tcvt.u8.u32 byte, %1;\n\tcvt.rn.f16x2.e2m1x2 %0, byte;\n\t}"
      : "=r"(d)
      : "r"(static_cast<uint32_t>(x)));
  return d;
#else
  return cvt_rn_f16x2_f32(emu::e2m1_value(x >> 4), emu::e2m1_value(x & 15));
#endif
}

// ---- global memory ---------------------------------------------------------------------------------------------------

// ld.global.nc: memory that nobody writes while the kernel runs. The address is aligned to what is read.
// no_allocate: not kept in L1; evict_first: the first to leave it; L2_128B, L2_256B: the line's surroundings into L2.
DEVICE uint32_t ld_global_nc_u32(const void* global MK_SITE) {
#ifdef __CUDACC__
  uint32_t d;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(d) : "l"(global));
  return d;
#else
  emu::global_access(global, 4, false, site);
  return *static_cast<const uint32_t*>(global);
#endif
}

// Before what follows it in the source, which plain loads are not.
DEVICE uint4 ld_global_v4_u32(const void* global MK_SITE) {
#ifdef __CUDACC__
  uint4 d;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(global)
               : "memory");
  return d;
#else
  emu::global_access(global, 16, false, site);
  return *static_cast<const uint4*>(global);
#endif
}

// The same, not kept in L1.
DEVICE uint4 ld_global_no_allocate_v4_u32(const void* global MK_SITE) {
#ifdef __CUDACC__
  uint4 d;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(global)
               : "memory");
  return d;
#else
  return ld_global_v4_u32(global, site);
#endif
}

// A load and a store that meet those of other blocks.
DEVICE uint4 ld_relaxed_gpu_v4_u32(const void* global MK_SITE) {
#ifdef __CUDACC__
  uint4 d;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(global)
               : "memory");
  return d;
#else
  emu::global_access(global, 16, false, site);
  const volatile uint32_t* words = static_cast<const volatile uint32_t*>(global);
  return make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

DEVICE void st_relaxed_gpu_u16(void* global, uint16_t x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(global), "h"(x) : "memory");
#else
  emu::global_access(global, 2, true, site);
  *static_cast<volatile uint16_t*>(global) = x;
#endif
}

DEVICE uint2 ld_global_nc_v2_u32(const void* global MK_SITE) {
#ifdef __CUDACC__
  uint2 d;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "l"(global));
  return d;
#else
  emu::global_access(global, 8, false, site);
  return *static_cast<const uint2*>(global);
#endif
}

#ifdef __CUDACC__
#define LD_GLOBAL_NC_V4(name, qualifiers)                                  \
  DEVICE uint4 name(const void* global) {                                  \
    uint4 d;                                                               \
    asm volatile("ld.global.nc" qualifiers ".v4.u32 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)              \
                 : "l"(global));                                           \
    return d;                                                              \
  }
#else
#define LD_GLOBAL_NC_V4(name, qualifiers)        \
  DEVICE uint4 name(const void* global MK_SITE) { \
    emu::global_access(global, 16, false, site); \
    return *static_cast<const uint4*>(global);   \
  }
#endif
LD_GLOBAL_NC_V4(ld_global_nc_v4_u32, "")
LD_GLOBAL_NC_V4(ld_global_nc_L2_128B_v4_u32, ".L2::128B")
LD_GLOBAL_NC_V4(ld_global_nc_L2_256B_v4_u32, ".L2::256B")
LD_GLOBAL_NC_V4(ld_global_nc_no_allocate_v4_u32, ".L1::no_allocate")
LD_GLOBAL_NC_V4(ld_global_nc_no_allocate_L2_128B_v4_u32, ".L1::no_allocate.L2::128B")
LD_GLOBAL_NC_V4(ld_global_nc_no_allocate_L2_256B_v4_u32, ".L1::no_allocate.L2::256B")
LD_GLOBAL_NC_V4(ld_global_nc_evict_first_v4_u32, ".L1::evict_first")
#undef LD_GLOBAL_NC_V4

// st.global.cs: written once and not read again soon.
DEVICE void st_global_cs_u32(void* global, uint32_t x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
#else
  emu::global_access(global, 4, true, site);
  *static_cast<uint32_t*>(global) = x;
#endif
}

DEVICE void st_global_cs_v4_u32(void* global, uint4 x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
#else
  emu::global_access(global, 16, true, site);
  *static_cast<uint4*>(global) = x;
#endif
}

// red and atom: relaxed additions that all threads of the device see; atom gives the value before. FP32: subnormal
// inputs and sums count as zero.
DEVICE void red_global_add_f32(float* global, float x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
#else
  emu::global_access(global, 4, true, site);
  atomicAdd(global, x);
#endif
}

DEVICE void red_global_add_u32(uint32_t* global, uint32_t x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("red.global.add.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
#else
  emu::global_access(global, 4, true, site);
  atomicAdd(global, x);
#endif
}

DEVICE float atom_global_add_f32(float* global, float x MK_SITE) {
#ifdef __CUDACC__
  float before;
  asm volatile("atom.global.add.f32 %0, [%1], %2;" : "=f"(before) : "l"(global), "f"(x) : "memory");
  return before;
#else
  emu::global_access(global, 4, true, site);
  return atomicAdd(global, x);
#endif
}

DEVICE uint32_t atom_global_add_u32(uint32_t* global, uint32_t x MK_SITE) {
#ifdef __CUDACC__
  uint32_t before;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(global), "r"(x) : "memory");
  return before;
#else
  emu::global_access(global, 4, true, site);
  return atomicAdd(global, x);
#endif
}

// ---- the grid --------------------------------------------------------------------------------------------------------

// Programmatic dependent launch (sm_90 and later; nothing on older ones, where kernels follow one another anyway).
// wait: until the grids that this one depends on are done and what they wrote can be seen. launch_dependents: grids that
// depend on this one may start.
DEVICE void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- ahead of use ----------------------------------------------------------------------------------------------------

// cp.async.bulk.prefetch.L2: starts to bring so many contiguous bytes into L2, and nobody hears when they are there. Address
// and size are multiples of 16. sm_90 and later, nothing on older ones: it changes times only.
DEVICE void cp_async_bulk_prefetch_L2(const void* global, uint32_t bytes MK_SITE) {
#ifdef __CUDACC__
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
#else
  if (bytes == 0 || bytes % 16) emu::trap("cp.async.bulk.prefetch.L2 of no multiple of 16 bytes", site);
  emu::global_access(global, 16, false, site);
  emu::global_access(static_cast<const char*>(global) + bytes - 16, 16, false, site);
#endif
}

// prefetch.global.L2: starts to bring the line of 128 bytes that holds the address into L2; it changes times only.
DEVICE void prefetch_global_L2(const void* global MK_SITE) {
#ifdef __CUDACC__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#else
  emu::global_access(global, 1, false, site);
#endif
}

// ---- wmma ------------------------------------------------------------------------------------------------------------

// wmma: 16 x 16 x 16 products of fragments that the warp's lanes share in a layout the instruction set keeps to itself
// (the twins' is that of mma; who relies on it is wrong on a GPU). Fragments come from and go to shared memory, rows
// `stride` elements apart, every row aligned to 16 bytes (FP32: 32). An FP16 fragment holds each element twice.
template <typename T>
struct WmmaFragment;
template <>
struct WmmaFragment<bf16> {
  uint32_t x[4];
};
template <>
struct WmmaFragment<fp16> {
  uint32_t x[8];
};
template <typename T>
struct WmmaA : WmmaFragment<T> {};
template <typename T>
struct WmmaB : WmmaFragment<T> {};
struct WmmaC {
  float x[8];
};

#ifndef __CUDACC__
namespace emu {

template <typename T>
EMU_INLINE void wmma_load(WmmaFragment<T>& d, const T* first, int stride, bool transposed, Site site) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t x[4];
  ldmatrix(4, transposed, x, shared_address(first + lane % 16 * stride + lane / 16 * 8, site), site);
  for (int i = 0; i < 4; ++i) d.x[i] = x[i];
}

template <typename T>
EMU_INLINE void wmma_mma(Mma shape, WmmaC& d, const WmmaA<T>& a, uint32_t (&b)[2][2], Site site) {
  for (int half = 0; half < 2; ++half) mma(shape, d.x + 4 * half, a.x, b[half], site);
}

// Where element i of the lane's FP32 fragment lies.
EMU_INLINE int wmma_offset(int i, int stride) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return (lane / 4 + i % 4 / 2 * 8) * stride + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

}  // namespace emu
#endif

DEVICE void wmma_load_a_row(WmmaA<bf16>& d, const bf16* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::wmma_load<bf16>(d, first, stride, false, site);
#endif
}

DEVICE void wmma_load_a_row(WmmaA<fp16>& d, const fp16* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3]), "=r"(d.x[4]), "=r"(d.x[5]), "=r"(d.x[6]),
                 "=r"(d.x[7])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::wmma_load<fp16>(d, first, stride, false, site);
#endif
}

// B's columns are rows in memory.
DEVICE void wmma_load_b_col(WmmaB<bf16>& d, const bf16* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::wmma_load<bf16>(d, first, stride, false, site);
#endif
}

DEVICE void wmma_load_b_col(WmmaB<fp16>& d, const fp16* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3]), "=r"(d.x[4]), "=r"(d.x[5]), "=r"(d.x[6]),
                 "=r"(d.x[7])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::wmma_load<fp16>(d, first, stride, false, site);
#endif
}

DEVICE void wmma_load_b_row(WmmaB<bf16>& d, const bf16* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::wmma_load<bf16>(d, first, stride, true, site);
#endif
}

DEVICE void wmma_load_b_row(WmmaB<fp16>& d, const fp16* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3]), "=r"(d.x[4]), "=r"(d.x[5]), "=r"(d.x[6]),
                 "=r"(d.x[7])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::wmma_load<fp16>(d, first, stride, true, site);
#endif
}

DEVICE void wmma_load_c_row(WmmaC& d, const float* first, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=f"(d.x[0]), "=f"(d.x[1]), "=f"(d.x[2]), "=f"(d.x[3]), "=f"(d.x[4]), "=f"(d.x[5]), "=f"(d.x[6]),
                 "=f"(d.x[7])
               : "r"(smem_u32(first)), "r"(stride)
               : "memory");
#else
  emu::vote(emu::Vote::any, 0xffffffffu, 0, site);  // all lanes together, as .sync.aligned asks
  for (int i = 0; i < 8; ++i) d.x[i] = first[emu::wmma_offset(i, stride)];
#endif
}

DEVICE void wmma_store_d_row(float* first, const WmmaC& d, int stride MK_SITE) {
#ifdef __CUDACC__
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(
                   smem_u32(first)),
               "f"(d.x[0]), "f"(d.x[1]), "f"(d.x[2]), "f"(d.x[3]), "f"(d.x[4]), "f"(d.x[5]), "f"(d.x[6]), "f"(d.x[7]),
               "r"(stride)
               : "memory");
#else
  emu::vote(emu::Vote::any, 0xffffffffu, 0, site);
  for (int i = 0; i < 8; ++i) first[emu::wmma_offset(i, stride)] = d.x[i];
#endif
}

// d += a b, FP32 sums, B as wmma_load_b_col gave it.
DEVICE void wmma_mma_row_col(WmmaC& d, const WmmaA<bf16>& a, const WmmaB<bf16>& b MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]), "+f"(d.x[7])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]));
#else
  uint32_t halves[2][2] = {{b.x[0], b.x[2]}, {b.x[1], b.x[3]}};
  emu::wmma_mma(emu::Mma::bf16_16816, d, a, halves, site);
#endif
}

DEVICE void wmma_mma_row_col(WmmaC& d, const WmmaA<fp16>& a, const WmmaB<fp16>& b MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "
      "{%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]), "+f"(d.x[7])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]), "r"(a.x[7]),
        "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]));
#else
  uint32_t halves[2][2] = {{b.x[0], b.x[2]}, {b.x[1], b.x[3]}};
  emu::wmma_mma(emu::Mma::f16_16816, d, a, halves, site);
#endif
}

// The same with B as wmma_load_b_row gave it.
DEVICE void wmma_mma_row_row(WmmaC& d, const WmmaA<bf16>& a, const WmmaB<bf16>& b MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]), "+f"(d.x[7])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]));
#else
  uint32_t halves[2][2] = {{b.x[0], b.x[1]}, {b.x[2], b.x[3]}};
  emu::wmma_mma(emu::Mma::bf16_16816, d, a, halves, site);
#endif
}

DEVICE void wmma_mma_row_row(WmmaC& d, const WmmaA<fp16>& a, const WmmaB<fp16>& b MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "
      "{%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]), "+f"(d.x[7])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]), "r"(a.x[7]),
        "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]));
#else
  uint32_t halves[2][2] = {{b.x[0], b.x[1]}, {b.x[2], b.x[3]}};
  emu::wmma_mma(emu::Mma::f16_16816, d, a, halves, site);
#endif
}
