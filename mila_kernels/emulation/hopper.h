// The emulation's side of csrc/hopper.cuh: what sm_90 adds. The runtime of it is hopper.cpp, a part of cuda_host.cpp.
//
// mbarriers, bulk and tensor copies, wgmma and named barriers do here what they may do latest: a copy lands when nobody
// can go on without it (or at once: a coin decides), a product is added when a wait for its group asks for it. Until
// then the destination of a copy and the accumulators hold NaN.
// The blocks of a cluster run together, as if they were one with several windows of shared memory.
//
// Found in both modes: more arrivals than a phase expects, an expect_tx that is short, a barrier that was not made or
// is made twice, waits that nobody can end (with the barrier's phase, pending arrivals and bytes), misaligned or
// unknown copies, maps, descriptors and shapes, wgmma without fence, commit or wait, warpgroups that do not act
// together, stores whose source nobody waited for, addresses of other blocks where only the own may be, shared memory
// of blocks that have exited. In check mode too: races by vector clocks between threads, copies
// and products; generic writes that the async proxy reads or overwrites without fence.proxy.async by their writer;
// registers touched while a wgmma has them.
// Stricter than the hardware on purpose: the fence.proxy.async must be the writer's, before it tells others; a
// wgmma.fence must follow every wait before the next wgmma; the array of a register operand must stay as it is until
// the wait, where the compiler could have kept a copy; swizzled copies want a destination aligned to the swizzle's
// repeat and boxes as wide as it.
// Not modelled: the width and order of the sums inside wgmma (here FP32, k ascending; the hardware keeps about 13 bits
// of E4M3 sums), cp.async as a write that needs fence.proxy.async, races of copies in global memory, the registers that
// setmaxnreg moves, clusters of more than 1024 threads (refused).
#pragma once

#include "cuda_host.h"


// Stands in for the driver's 128 opaque bytes of the same name.
struct alignas(64) CUtensorMap {
  uint64_t magic;
  const char* base;
  uint64_t sizes[5];    // in elements, the innermost first
  uint64_t strides[4];  // in bytes, of dimensions 1 and up
  uint32_t box[5];
  uint8_t rank, element_bytes, swizzle, unused;
};
static_assert(sizeof(CUtensorMap) == 128);

namespace emu {

constexpr uint64_t TENSOR_MAP = 0x70616d726f736e74u;

enum class Wgmma : int { bf16_k16, f16_k16, e4m3_k32, e4m3_e5m2_k32 };  // the last: b of E5M2

void mbarrier_init(uint32_t barrier, uint32_t count, Site site);
void mbarrier_inval(uint32_t barrier, Site site);
void mbarrier_arrive(uint32_t barrier, uint32_t count, Site site);
void mbarrier_arrive_cluster(uint32_t barrier, Site site);
void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes, bool arrive, Site site);
void mbarrier_arrive_after_copies(uint32_t barrier, Site site);
void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site);
bool mbarrier_test_wait(uint32_t barrier, uint32_t parity, Site site);
void fence_mbarrier_init(Site site);
void fence_proxy_async(Site site);
void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, Site site);
void bulk_shared(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier, Site site);
void bulk_store(void* destination, uint32_t source, uint32_t bytes, Site site);
void tensor_load(int rank, uint32_t destination, const CUtensorMap* map, const int* at, uint32_t barrier, Site site);
void tensor_load_multicast(int rank, uint32_t destination, const CUtensorMap* map, const int* at, uint32_t barrier,
                           uint32_t blocks, Site site);
void tensor_store(int rank, const CUtensorMap* map, uint32_t source, const int* at, Site site);
void bulk_commit(Site site);
void bulk_wait(unsigned groups_in_flight, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(unsigned groups_in_flight, Site site);
// A from the registers `a` where that is not null, else from shared memory as `a_descriptor` says.
void wgmma(Wgmma type, int n, float* d, const uint32_t* a, uint64_t a_descriptor, uint64_t b_descriptor, bool a_mn,
           bool b_mn, int scale_d, Site site);
void named_barrier(int id, int threads, bool waits, Site site);
uint32_t cluster_rank();
uint32_t cluster_blocks();
void cluster_arrive(bool release, Site site);
void cluster_wait(Site site);
uint32_t mapa(uint32_t address, uint32_t block, Site site);
void* cluster_pointer(uint32_t address, unsigned bytes, bool write, Site site);
void setmaxnreg(int registers, bool more, Site site);
bool elect(unsigned mask, Site site);
void stmatrix(int count, bool transposed, const uint32_t* d, uint32_t row, Site site);

}  // namespace emu
