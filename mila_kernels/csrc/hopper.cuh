// What sm_90 adds to ptx.cuh, in the same form: mbarriers, bulk and tensor copies, wgmma, named barriers, setmaxnreg,
// stmatrix, clusters. One thin wrapper an instruction, named after it; its twin is in emulation/hopper.cpp. sm_90 and
// later, unless a wrapper names an architecture. How the parts fit together: 04_warp_specialised.cu and 06_cluster.cu in
// tests/steps/emulation.
#pragma once

#include <type_traits>

#include "ptx.cuh"
#include "tensor_map.cuh"

#ifdef __CUDACC__
#define MK_ONLY_SITE
#else
#define MK_ONLY_SITE emu::Site site = emu::Site::here()
#endif

// ---- mbarriers ------------------------------------------------------------------------------------------------------

// An mbarrier is 8 aligned bytes of shared memory that only these functions touch. A phase of it ends when `count`
// arrivals were made and the bytes that were announced have landed; the next begins at once. `barrier`: smem_u32 of it.
DEVICE void mbarrier_init(uint32_t barrier, uint32_t count MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#else
  emu::mbarrier_init(barrier, count, site);
#endif
}

// Makes the bytes ordinary memory again.
DEVICE void mbarrier_inval(uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#else
  emu::mbarrier_inval(barrier, site);
#endif
}

// Shows inits by this thread to the cluster and to copies. A barrier of the block must follow.
DEVICE void fence_mbarrier_init(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  emu::fence_mbarrier_init(site);
#endif
}

// Orders this thread's plain accesses to shared memory before what copies and wgmma do to it after a later barrier.
// Each thread that wrote needs it, between its writes and the barrier.
DEVICE void fence_proxy_async_shared(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  emu::fence_proxy_async(site);
#endif
}

DEVICE void mbarrier_arrive(uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  emu::mbarrier_arrive(barrier, 1, site);
#endif
}

// An arrival that comes by itself once the calling thread's cp.async copies so far have landed; one of those that init
// counts (.noinc). It shows the copies alone to who waits.
DEVICE void cp_async_mbarrier_arrive_noinc(uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#else
  emu::mbarrier_arrive_after_copies(barrier, site);
#endif
}

// Announces bytes for the current phase, which does not end before they have landed.
DEVICE void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#else
  emu::mbarrier_expect_tx(barrier, bytes, false, site);
#endif
}

// The same, then an arrival.
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#else
  emu::mbarrier_expect_tx(barrier, bytes, true, site);
#endif
}

// Whether the current phase's predecessor has the given parity: whether the phase with that parity has ended. Phases
// count from 0, so that parity 1 is true of a new barrier. test_wait answers at once.
DEVICE bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity MK_SITE) {
#ifdef __CUDACC__
  uint32_t ended;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
#else
  return emu::mbarrier_test_wait(barrier, parity, site);
#endif
}

// try_wait, which may sleep for a while, until the phase of that parity has ended. What its arrivals came after and its
// copies brought can be seen then.
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "{\n\t.reg .pred p;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@p bra done;\n\tbra again;\n"
      "done:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  emu::mbarrier_wait(barrier, parity, site);
#endif
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------

// Contiguous bytes; addresses and size are multiples of 16. Global to shared: the bytes count at the mbarrier as they
// land. Shared to global: in groups of the calling thread.
DEVICE void cp_async_bulk_g2s(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#else
  emu::bulk_load(shared, global, bytes, barrier, site);
#endif
}

DEVICE void cp_async_bulk_s2g(void* global, uint32_t shared, uint32_t bytes MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
#else
  emu::bulk_store(global, shared, bytes, site);
#endif
}

// Closes the calling thread's group of stores.
DEVICE void cp_async_bulk_commit_group(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  emu::bulk_commit(site);
#endif
}

// Waits until at most the N newest groups of the calling thread are not done; .read: until their sources have been read
// and may be written again.
template <int N>
DEVICE void cp_async_bulk_wait_group(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
#else
  emu::bulk_wait(N, site);
#endif
}

template <int N>
DEVICE void cp_async_bulk_wait_group_read(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#else
  emu::bulk_wait(N, site);
#endif
}

// ---- tensor copies --------------------------------------------------------------------------------------------------

// A box of the tensor that `map` describes (tensor_map.cuh), from the element at the coordinates, the innermost first and
// a multiple of 16 bytes, in stores none of them negative: sm_90 calls anything else an illegal instruction.
// The map is a `const __grid_constant__ CUtensorMap` parameter of the kernel. Elements outside the tensor are zeros,
// which count as bytes too; stores leave them out, but for those in a row's last 16 bytes, which are written whole. The
// shared address is a multiple of 128, with a swizzle a multiple of its repeat: 256, 512 or 1024 bytes for 32, 64, 128.
DEVICE void cp_async_bulk_tensor_2d_g2s(uint32_t shared, const CUtensorMap* map, int x, int y,
                                        uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
#else
  const int at[] = {x, y};
  emu::tensor_load(2, shared, map, at, barrier, site);
#endif
}

DEVICE void cp_async_bulk_tensor_3d_g2s(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                                        uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
#else
  const int at[] = {x, y, z};
  emu::tensor_load(3, shared, map, at, barrier, site);
#endif
}

DEVICE void cp_async_bulk_tensor_4d_g2s(uint32_t shared, const CUtensorMap* map, int x, int y, int z, int w,
                                        uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
#else
  const int at[] = {x, y, z, w};
  emu::tensor_load(4, shared, map, at, barrier, site);
#endif
}

DEVICE void cp_async_bulk_tensor_5d_g2s(uint32_t shared, const CUtensorMap* map, int x, int y, int z, int w, int v,
                                        uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(barrier)
      : "memory");
#else
  const int at[] = {x, y, z, w, v};
  emu::tensor_load(5, shared, map, at, barrier, site);
#endif
}

DEVICE void cp_async_bulk_tensor_2d_s2g(const CUtensorMap* map, uint32_t shared, int x, int y MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y)
               : "memory");
#else
  const int at[] = {x, y};
  emu::tensor_store(2, map, shared, at, site);
#endif
}

DEVICE void cp_async_bulk_tensor_3d_s2g(const CUtensorMap* map, uint32_t shared, int x, int y, int z MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y), "r"(z)
               : "memory");
#else
  const int at[] = {x, y, z};
  emu::tensor_store(3, map, shared, at, site);
#endif
}

DEVICE void cp_async_bulk_tensor_4d_s2g(const CUtensorMap* map, uint32_t shared, int x, int y, int z, int w MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
#else
  const int at[] = {x, y, z, w};
  emu::tensor_store(4, map, shared, at, site);
#endif
}

// Starts to bring a box into L2, and nobody hears when it is there.
DEVICE void cp_async_bulk_prefetch_tensor_5d_L2(const CUtensorMap* map, int x, int y, int z, int w, int v) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(x), "r"(y),
               "r"(z), "r"(w), "r"(v)
               : "memory");
#else
  static_cast<void>(map), static_cast<void>(x + y + z + w + v);
#endif
}

// Fetches the map itself ahead of its first use.
DEVICE void prefetch_tensormap(const CUtensorMap* map) {
#ifdef __CUDACC__
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#else
  static_cast<void>(map);
#endif
}

// ---- what other grids may still write ------------------------------------------------------------------------------

// A load past L1, which keeps nothing of it there.
DEVICE int32_t ld_relaxed_gpu_s32(const int32_t* global MK_SITE) {
#ifdef __CUDACC__
  int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
#else
  emu::global_access(global, 4, false, site);
  return *global;
#endif
}

// The same, and what L1 had is forgotten: later loads see what was written before that which this one has seen.
DEVICE int32_t ld_acquire_gpu_s32(const int32_t* global MK_SITE) {
#ifdef __CUDACC__
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
#else
  emu::global_access(global, 4, false, site);
  return *global;
#endif
}

// ---- parts of a block -----------------------------------------------------------------------------------------------

// bar.sync: waits for `threads` of the block, whole warps, at the barrier `id`, 1 to 15 (0 is __syncthreads).
// bar.arrive counts and goes on. (sm_80 and later.)
DEVICE void bar_sync(int id, int threads MK_SITE) {
#ifdef __CUDACC__
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emu::named_barrier(id, threads, true, site);
#endif
}

DEVICE void bar_arrive(int id, int threads MK_SITE) {
#ifdef __CUDACC__
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emu::named_barrier(id, threads, false, site);
#endif
}

// Takes registers from the block's pool for each thread of the warpgroup, or gives them back; a multiple of 8, 24 to
// 256. The kernel needs __launch_bounds__ with a number of blocks. (sm_90a)
template <int REGISTERS>
DEVICE void setmaxnreg_inc(MK_ONLY_SITE) {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "setmaxnreg: a multiple of 8, 24 to 256");
#ifdef __CUDACC__
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#else
  emu::setmaxnreg(REGISTERS, true, site);
#endif
}

template <int REGISTERS>
DEVICE void setmaxnreg_dec(MK_ONLY_SITE) {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "setmaxnreg: a multiple of 8, 24 to 256");
#ifdef __CUDACC__
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#else
  emu::setmaxnreg(REGISTERS, false, site);
#endif
}

// True in one lane of those in the mask, always the same.
DEVICE bool elect_sync(uint32_t mask MK_SITE) {
#ifdef __CUDACC__
  uint32_t elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, %1;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected) : "r"(mask));
  return elected != 0;
#else
  return emu::elect(mask, site);
#endif
}

// stmatrix: 8 x 8 matrices of 16-bit elements to shared memory, ldmatrix the other way round.
DEVICE void stmatrix_x1(uint32_t row, const uint32_t (&d)[1] MK_SITE) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(d[0]) : "memory");
#else
  emu::stmatrix(1, false, d, row, site);
#endif
}

DEVICE void stmatrix_x2(uint32_t row, const uint32_t (&d)[2] MK_SITE) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(d[0]), "r"(d[1]) : "memory");
#else
  emu::stmatrix(2, false, d, row, site);
#endif
}

DEVICE void stmatrix_x4(uint32_t row, const uint32_t (&d)[4] MK_SITE) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
#else
  emu::stmatrix(4, false, d, row, site);
#endif
}

DEVICE void stmatrix_x1_trans(uint32_t row, const uint32_t (&d)[1] MK_SITE) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(d[0]) : "memory");
#else
  emu::stmatrix(1, true, d, row, site);
#endif
}

DEVICE void stmatrix_x2_trans(uint32_t row, const uint32_t (&d)[2] MK_SITE) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(d[0]), "r"(d[1])
               : "memory");
#else
  emu::stmatrix(2, true, d, row, site);
#endif
}

DEVICE void stmatrix_x4_trans(uint32_t row, const uint32_t (&d)[4] MK_SITE) {
#ifdef __CUDACC__
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(d[0]),
               "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
#else
  emu::stmatrix(4, true, d, row, site);
#endif
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// Which block of its cluster this is, and of how many.
DEVICE uint32_t cluster_ctarank() {
#ifdef __CUDACC__
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return emu::cluster_rank();
#endif
}

DEVICE uint32_t cluster_nctarank() {
#ifdef __CUDACC__
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#else
  return emu::cluster_blocks();
#endif
}

// The barrier of all threads of the cluster, in two halves: what came before the arrivals can be seen after the wait.
// A block must not exit while another may still touch its shared memory or its mbarriers.
DEVICE void barrier_cluster_arrive(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  emu::cluster_arrive(true, site);
#endif
}

DEVICE void barrier_cluster_arrive_relaxed(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  emu::cluster_arrive(false, site);
#endif
}

DEVICE void barrier_cluster_wait(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  emu::cluster_wait(site);
#endif
}

// The same place in the shared memory of another block of the cluster.
DEVICE uint32_t mapa_shared_cluster(uint32_t shared, uint32_t rank MK_SITE) {
#ifdef __CUDACC__
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
#else
  return emu::mapa(shared, rank, site);
#endif
}

DEVICE uint32_t ld_shared_cluster_u32(uint32_t shared MK_SITE) {
#ifdef __CUDACC__
  uint32_t d;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(d) : "r"(shared) : "memory");
  return d;
#else
  return *static_cast<const uint32_t*>(emu::cluster_pointer(shared, 4, false, site));
#endif
}

DEVICE float4 ld_shared_cluster_v4_f32(uint32_t shared MK_SITE) {
#ifdef __CUDACC__
  float4 d;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
               : "r"(shared)
               : "memory");
  return d;
#else
  return *static_cast<const float4*>(emu::cluster_pointer(shared, 16, false, site));
#endif
}

DEVICE void st_shared_cluster_u32(uint32_t shared, uint32_t x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
#else
  *static_cast<uint32_t*>(emu::cluster_pointer(shared, 4, true, site)) = x;
#endif
}

DEVICE void st_shared_cluster_v4_f32(uint32_t shared, float4 x MK_SITE) {
#ifdef __CUDACC__
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
#else
  *static_cast<float4*>(emu::cluster_pointer(shared, 16, true, site)) = x;
#endif
}

// An arrival at an mbarrier of any block. It orders what the thread did before, cluster-wide, which costs a fence.
DEVICE void mbarrier_arrive_cluster(uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  emu::mbarrier_arrive_cluster(barrier, site);
#endif
}

// The same without the fence: it tells that the block has read what it was given, so that more may be sent.
DEVICE void mbarrier_arrive_shared_cluster(uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  emu::mbarrier_arrive_cluster(barrier, site);
#endif
}

// mbarrier_wait for arrivals of other blocks: what they came after can be seen then, in their shared memory too.
DEVICE void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "{\n\t.reg .pred p;\n"
      "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t@p bra done;\n\tbra again;\n"
      "done:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  emu::mbarrier_wait(barrier, parity, site);
#endif
}

// From this block's shared memory to another's, counting at an mbarrier there.
DEVICE void cp_async_bulk_s2s(uint32_t destination, uint32_t shared, uint32_t bytes, uint32_t barrier MK_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "r"(shared), "r"(bytes), "r"(barrier)
               : "memory");
#else
  emu::bulk_shared(destination, shared, bytes, barrier, site);
#endif
}

// A box to the same place of all blocks whose bit is set in `blocks`; in each, the mbarrier at the given one's place
// counts its bytes.
DEVICE void cp_async_bulk_tensor_2d_multicast(uint32_t shared, const CUtensorMap* map, int x, int y, uint32_t barrier,
                                              uint16_t blocks MK_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
#else
  const int at[] = {x, y};
  emu::tensor_load_multicast(2, shared, map, at, barrier, blocks, site);
#endif
}

// launch() of common.cuh with blocks in clusters of `cluster`, which the grid is made of.
template <typename... Params, typename... Args>
inline const char* launch_cluster(void (*kernel)(Params...), dim3 grid, dim3 cluster, dim3 block, size_t smem_bytes,
                                  cudaStream_t stream, Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
#ifdef __CUDACC__
  cudaError_t error = cudaSuccess;
  if (smem_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster.x;
    attribute.val.clusterDim.y = cluster.y;
    attribute.val.clusterDim.z = cluster.z;
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
  const auto body = [=] { kernel(static_cast<Params>(args)...); };
  return emu::launch_cluster(grid, cluster, block, smem_bytes, stream, body);
#endif
}

// ---- wgmma (sm_90a) -------------------------------------------------------------------------------------------------

// Products of a warpgroup: four warps, the first one's index a multiple of 4. They run beside it: fence, wgmma ...,
// commit, wait. Until the wait neither the accumulators nor a register operand may be touched, nor shared operands
// overwritten. fence: after the registers were touched, before the next wgmma.
DEVICE void wgmma_fence(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  emu::wgmma_fence(site);
#endif
}

DEVICE void wgmma_commit_group(MK_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  emu::wgmma_commit(site);
#endif
}

// Waits until at most the N newest groups are in flight.
template <int N>
DEVICE void wgmma_wait_group(MK_ONLY_SITE) {
  static_assert(N >= 0 && N <= 7);
#ifdef __CUDACC__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
  emu::wgmma_wait(N, site);
#endif
}

// Where an operand lies in shared memory. With a swizzle, as a tensor copy of a box as wide as it lays it down.
//   K-major (a row of M or N is contiguous in K), rows as wide as the swizzle: `stride_bytes` from 8 rows to the next 8
//     (1024 with 128B); `leading_bytes` is not used. A step of 32 bytes in K adds 32 to the address.
//   K-major without swizzle: 8 rows x 16 bytes in 128 bytes; `leading_bytes` to the next 16 bytes of K, `stride_bytes`
//     to the next 8 rows.
//   MN-major (16-bit elements, 128B): rows of K hold 64 elements of M or N; `stride_bytes` from 8 rows of K to the next
//     8, `leading_bytes` to the next 64 of M or N.
// The address may lie in a cluster's window: only the block's own part of it counts.
DEVICE uint64_t wgmma_descriptor(uint32_t shared, uint32_t leading_bytes, uint32_t stride_bytes, Swizzle swizzle) {
  const uint64_t layout = swizzle == Swizzle::none ? 0 : 4 - static_cast<uint64_t>(swizzle);
  return (shared & 0x3ffffu) >> 4 | static_cast<uint64_t>(leading_bytes >> 4 & 0x3fffu) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4 & 0x3fffu) << 32 | layout << 62;
}

// An operand's other parts: `bytes` further on.
DEVICE uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

enum class Major : int { k, mn };

#ifdef __CUDACC__
// The operands d[0] ... as the text and as the list that asm wants, and a statement for every N.
#define MK_D4 \
  "%0, %1, %2, %3"
#define MK_D8 MK_D4 ", " \
  "%4, %5, %6, %7"
#define MK_D16 MK_D8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define MK_D32 MK_D16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MK_D48 MK_D32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MK_D64 MK_D48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MK_D96 MK_D64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83" \
  ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MK_D128 MK_D96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112" \
  ", %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MK_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MK_F8(i) MK_F4(i), MK_F4(i + 4)
#define MK_F16(i) MK_F8(i), MK_F8(i + 8)
#define MK_F32(i) MK_F16(i), MK_F16(i + 16)
#define MK_F48(i) MK_F32(i), MK_F16(i + 32)
#define MK_F64(i) MK_F32(i), MK_F32(i + 32)
#define MK_F96(i) MK_F64(i), MK_F32(i + 64)
#define MK_F128(i) MK_F64(i), MK_F64(i + 64)
#define MK_WGMMA_SS(N_, R, p0, p1, p2, p3, p4, p5, p6, K, TYPE, TAIL, ...)                                             \
  if constexpr (N == N_)                                                                                              \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p2 ", 0;\n\t"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N_ K ".f32." TYPE "." TYPE " {" MK_D##R "}, %" #p0 ", %" #p1    \
                 ", p, 1, 1" TAIL ";\n\t}"                                                                           \
                 : MK_F##R(0)                                                                                         \
                 : "l"(a), "l"(b), "r"(scale_d) __VA_ARGS__);
#define MK_WGMMA_RS(N_, R, p0, p1, p2, p3, p4, p5, p6, K, TYPE, TAIL, ...)                                             \
  if constexpr (N == N_)                                                                                              \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p5 ", 0;\n\t"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N_ K ".f32." TYPE "." TYPE " {" MK_D##R "}, {%" #p0 ", %" #p1   \
                 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1" TAIL ";\n\t}"                                            \
                 : MK_F##R(0)                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d) __VA_ARGS__);
#define MK_SS_BF16(N_, R, p0, p1, p2, p3, p4, p5, p6) \
  MK_WGMMA_SS(N_, R, p0, p1, p2, p3, p4, p5, p6, "k16", "bf16", ", %" #p3 ", %" #p4, , "n"(int(A)), "n"(int(B)))
#define MK_SS_F16(N_, R, p0, p1, p2, p3, p4, p5, p6) \
  MK_WGMMA_SS(N_, R, p0, p1, p2, p3, p4, p5, p6, "k16", "f16", ", %" #p3 ", %" #p4, , "n"(int(A)), "n"(int(B)))
#define MK_RS_BF16(N_, R, p0, p1, p2, p3, p4, p5, p6) \
  MK_WGMMA_RS(N_, R, p0, p1, p2, p3, p4, p5, p6, "k16", "bf16", ", %" #p6, , "n"(int(B)))
#define MK_RS_F16(N_, R, p0, p1, p2, p3, p4, p5, p6) \
  MK_WGMMA_RS(N_, R, p0, p1, p2, p3, p4, p5, p6, "k16", "f16", ", %" #p6, , "n"(int(B)))
#define MK_SS_E4M3(N_, R, p0, p1, p2, p3, p4, p5, p6) MK_WGMMA_SS(N_, R, p0, p1, p2, p3, p4, p5, p6, "k32", "e4m3", "")
#define MK_RS_E4M3(N_, R, p0, p1, p2, p3, p4, p5, p6) MK_WGMMA_RS(N_, R, p0, p1, p2, p3, p4, p5, p6, "k32", "e4m3", "")
#define MK_WGMMA_SIZES(CASE) \
  CASE(8, 4, 4, 5, 6, 7, 8, 9, 10) \
  CASE(16, 8, 8, 9, 10, 11, 12, 13, 14) \
  CASE(32, 16, 16, 17, 18, 19, 20, 21, 22) \
  CASE(64, 32, 32, 33, 34, 35, 36, 37, 38) \
  CASE(96, 48, 48, 49, 50, 51, 52, 53, 54) \
  CASE(128, 64, 64, 65, 66, 67, 68, 69, 70) \
  CASE(192, 96, 96, 97, 98, 99, 100, 101, 102) \
  CASE(256, 128, 128, 129, 130, 131, 132, 133, 134)
#endif

constexpr __host__ __device__ bool wgmma_has(int n) {
  return n == 8 || n == 16 || n == 32 || n == 64 || n == 96 || n == 128 || n == 192 || n == 256;
}

// d[64][N] += a[64][16] b[16][N], FP32 sums of BF16 or FP16; with scale_d 0 without what d was. a and b: descriptors.
// With w = warp % 4, g = lane / 4 and t = lane % 4, d[4 j + i] is row 16 w + g + 8 (i / 2), column 8 j + 2 t + i % 2.
template <typename T, int N, Major B = Major::k, Major A = Major::k>
DEVICE void wgmma_k16(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d MK_SITE) {
  static_assert(wgmma_has(N) && (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>));
#ifdef __CUDACC__
  if constexpr (std::is_same_v<T, bf16>) {
    MK_WGMMA_SIZES(MK_SS_BF16)
  } else {
    MK_WGMMA_SIZES(MK_SS_F16)
  }
#else
  constexpr emu::Wgmma type = std::is_same_v<T, bf16> ? emu::Wgmma::bf16_k16 : emu::Wgmma::f16_k16;
  emu::wgmma(type, N, d, nullptr, a, b, A == Major::mn, B == Major::mn, scale_d, site);
#endif
}

// The same with the warp's 16 rows of a in registers, laid out as for mma_m16n8k16.
template <typename T, int N, Major B = Major::k>
DEVICE void wgmma_k16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int scale_d MK_SITE) {
  static_assert(wgmma_has(N) && (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>));
#ifdef __CUDACC__
  if constexpr (std::is_same_v<T, bf16>) {
    MK_WGMMA_SIZES(MK_RS_BF16)
  } else {
    MK_WGMMA_SIZES(MK_RS_F16)
  }
#else
  constexpr emu::Wgmma type = std::is_same_v<T, bf16> ? emu::Wgmma::bf16_k16 : emu::Wgmma::f16_k16;
  emu::wgmma(type, N, d, a, 0, b, false, B == Major::mn, scale_d, site);
#endif
}

// d[64][N] += a[64][32] b[32][N] of E4M3, K-major; in registers as for mma_m16n8k32_e4m3. The hardware keeps about 13
// bits of the sums inside: add into FP32 registers now and then.
template <int N>
DEVICE void wgmma_k32_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d MK_SITE) {
  static_assert(wgmma_has(N));
#ifdef __CUDACC__
  MK_WGMMA_SIZES(MK_SS_E4M3)
#else
  emu::wgmma(emu::Wgmma::e4m3_k32, N, d, nullptr, a, b, false, false, scale_d, site);
#endif
}

template <int N>
DEVICE void wgmma_k32_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int scale_d MK_SITE) {
  static_assert(wgmma_has(N));
#ifdef __CUDACC__
  MK_WGMMA_SIZES(MK_RS_E4M3)
#else
  emu::wgmma(emu::Wgmma::e4m3_k32, N, d, a, 0, b, false, false, scale_d, site);
#endif
}

#ifdef __CUDACC__
#define MK_D12 MK_D8 ", " \
  "%8, %9, %10, %11"
#define MK_D24 MK_D16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define MK_F12(i) MK_F8(i), MK_F4(i + 8)
#define MK_F24(i) MK_F16(i), MK_F8(i + 16)
#define MK_WGMMA_RS_E5M2(N_, R, p0, p1, p2, p3, p4, p5)                                                               \
  if constexpr (N == N_)                                                                                              \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p5 ", 0;\n\t"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N_ "k32.f32.e4m3.e5m2 {" MK_D##R "}, {%" #p0 ", %" #p1         \
                 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1;\n\t}"                                                   \
                 : MK_F##R(0)                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));
#endif

// The same with b of E5M2, whose numbers are the upper bytes of FP16's.
template <int N>
DEVICE void wgmma_k32_e4m3_e5m2(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int scale_d MK_SITE) {
  static_assert(N == 8 || N == 16 || N == 24 || N == 32 || N == 48 || N == 64);
#ifdef __CUDACC__
  MK_WGMMA_RS_E5M2(8, 4, 4, 5, 6, 7, 8, 9)
  MK_WGMMA_RS_E5M2(16, 8, 8, 9, 10, 11, 12, 13)
  MK_WGMMA_RS_E5M2(24, 12, 12, 13, 14, 15, 16, 17)
  MK_WGMMA_RS_E5M2(32, 16, 16, 17, 18, 19, 20, 21)
  MK_WGMMA_RS_E5M2(48, 24, 24, 25, 26, 27, 28, 29)
  MK_WGMMA_RS_E5M2(64, 32, 32, 33, 34, 35, 36, 37)
#else
  emu::wgmma(emu::Wgmma::e4m3_e5m2_k32, N, d, a, 0, b, false, false, scale_d, site);
#endif
}
