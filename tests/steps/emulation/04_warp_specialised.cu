// Change: a product whose tiles come by tensor copies through a ring of mbarriers to wgmma, and leave by tensor copies.
// Prediction: none, it is never timed.
// Measured: its time never; right on an H200 (relative error 1.7e-3, the rounding of BF16).
// Verdict: kept for the tests.
// Architectures: sm_90a
#include "hopper.cuh"

struct ProductArgs {
  const bf16* a;  // [m, k]
  const bf16* b;  // [n, k]
  bf16* c;        // [m, n] = a b^T
  int32_t m, n, k;  // n, k multiples of 8
};

constexpr int CONSUMERS = 2, WARPGROUP = 4 * WARP, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int BM = CONSUMERS * 64, BN = 64, BK = 64;
constexpr int STAGES = 2;

struct Smem {
  bf16 a[STAGES][BM][BK];
  bf16 b[STAGES][BN][BK];
  bf16 c[CONSUMERS][64][BN];
  uint64_t full[STAGES], empty[STAGES];
};

__global__ void __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
            const __grid_constant__ CUtensorMap c_map, const ProductArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = threadIdx.x / WARPGROUP;
  const int tiles_m = ceil_div(args.m, BM), tiles_n = ceil_div(args.n, BN), tiles_k = ceil_div(args.k, BK);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), CONSUMERS * 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there

  if (group == CONSUMERS) {  // the producer
    setmaxnreg_dec<40>();
    if (warp == CONSUMERS * 4 && elect_sync(ALL_LANES)) {
      int turn = 0;
      for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x)
        for (int k = 0; k < tiles_k; ++k, ++turn) {
          const int stage = turn % STAGES, phase = turn / STAGES % 2;
          const uint32_t full = smem_u32(&smem.full[stage]);
          mbarrier_wait(smem_u32(&smem.empty[stage]), phase ^ 1);  // the stage is free
          mbarrier_arrive_expect_tx(full, sizeof(smem.a[0]) + sizeof(smem.b[0]));
          cp_async_bulk_tensor_2d_g2s(smem_u32(smem.a[stage]), &a_map, k * BK, tile / tiles_n * BM, full);
          cp_async_bulk_tensor_2d_g2s(smem_u32(smem.b[stage]), &b_map, k * BK, tile % tiles_n * BN, full);
        }
    }
    return;
  }

  setmaxnreg_inc<208>();
  int turn = 0;
  for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
    float c_regs[BN / 2];
    for (int k = 0; k < tiles_k; ++k, ++turn) {
      const int stage = turn % STAGES, phase = turn / STAGES % 2;
      mbarrier_wait(smem_u32(&smem.full[stage]), phase);  // the stage has landed
      const uint64_t a = wgmma_descriptor(smem_u32(smem.a[stage][group * 64]), 0, 1024, Swizzle::b128);
      const uint64_t b = wgmma_descriptor(smem_u32(smem.b[stage]), 0, 1024, Swizzle::b128);
      wgmma_fence();
      for (int i = 0; i < BK / 16; ++i)
        wgmma_k16<bf16, BN>(c_regs, wgmma_advance(a, i * 32), wgmma_advance(b, i * 32), k + i > 0);
      wgmma_commit_group();
      wgmma_wait_group<0>();  // the products are done
      if (lane == 0) mbarrier_arrive(smem_u32(&smem.empty[stage]));
    }

    if (warp % 4 == 0 && lane == 0) cp_async_bulk_wait_group_read<0>();  // the last tile has left
    bar_sync(1 + group, WARPGROUP);
    for (int j = 0; j < BN / 16; ++j) {
      const uint32_t packed[4] = {
          pack2<bf16>(c_regs[8 * j], c_regs[8 * j + 1]), pack2<bf16>(c_regs[8 * j + 2], c_regs[8 * j + 3]),
          pack2<bf16>(c_regs[8 * j + 4], c_regs[8 * j + 5]), pack2<bf16>(c_regs[8 * j + 6], c_regs[8 * j + 7])};
      const int row = warp % 4 * 16 + lane % 16, piece = (j * 2 + lane / 16) ^ row % 8;
      stmatrix_x4(smem_u32(&smem.c[group][row][piece * 8]), packed);
    }
    fence_proxy_async_shared();  // the copy may read it
    bar_sync(1 + group, WARPGROUP);
    if (warp % 4 == 0 && lane == 0) {
      cp_async_bulk_tensor_2d_s2g(&c_map, smem_u32(smem.c[group]), tile % tiles_n * BN,
                                  tile / tiles_n * BM + group * 64);
      cp_async_bulk_commit_group();
    }
  }
  if (warp % 4 == 0 && lane == 0) cp_async_bulk_wait_group<0>();
}

extern "C" const char* launch_step(const ProductArgs* args, cudaStream_t stream) {
  const uint64_t m = args->m, n = args->n, k = args->k;
  CUtensorMap a, b, c;
  const char* error = make_tensor_map<bf16>(&a, args->a, {k, m}, {k * sizeof(bf16)}, {BK, BM}, Swizzle::b128);
  if (!error) error = make_tensor_map<bf16>(&b, args->b, {k, n}, {k * sizeof(bf16)}, {BK, BN}, Swizzle::b128);
  if (!error) error = make_tensor_map<bf16>(&c, args->c, {n, m}, {n * sizeof(bf16)}, {BN, 64}, Swizzle::b128);
  if (error) return error;
  return launch(product, dim3(2), THREADS, sizeof(Smem), stream, a, b, c, *args);
}
