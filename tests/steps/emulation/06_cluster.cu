// Change: two blocks of a cluster share what each loads, by a multicast and through one another's shared memory.
// Prediction: none, it is never timed.
// Measured: never.
// Verdict: kept for the tests.
// Architectures: sm_90a
#include "hopper.cuh"

// Of each block, `out`: the sum over the turns of the 32 rows that the two blocks of its cluster load, 16 each; 32
// words that the other stored here, in their upper half what this block stored there; 256 words that the other sent.
struct ClusterArgs {
  const uint32_t* in;  // [clusters, 32, 32]
  uint32_t* out;       // [clusters, 2, 32 * 32 + 32 + 256]
  int32_t clusters;
};

constexpr int THREADS = 64, BLOCKS = 2, ROWS = 16, COLUMNS = 32, TURNS = 3;

struct Smem {
  uint32_t tile[BLOCKS * ROWS][COLUMNS];  // 4 KB, 128-byte swizzle
  uint32_t sent[256], received[256];
  uint32_t words[COLUMNS];
  uint64_t full, empty, arrived;
};

__global__ void __launch_bounds__(THREADS) exchange(const __grid_constant__ CUtensorMap map,
                                                      const __grid_constant__ CUtensorMap blocks_map,
                                                      const ClusterArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  const uint32_t rank = cluster_ctarank(), other = rank ^ 1, full = smem_u32(&smem.full), empty = smem_u32(&smem.empty);
  const int thread = threadIdx.x;
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, BLOCKS * THREADS);
    mbarrier_init(smem_u32(&smem.arrived), BLOCKS);
    fence_mbarrier_init();
    cp_async_bulk_prefetch_tensor_5d_L2(&blocks_map, 0, 0, 0, 0, blockIdx.x);  // of use to nobody here, and no harm
  }
  barrier_cluster_arrive();
  barrier_cluster_wait();  // the barriers are there, in both

  const int32_t* in = reinterpret_cast<const int32_t*>(args.in) + thread;
  uint32_t sum[COLUMNS / 2] = {static_cast<uint32_t>(ld_acquire_gpu_s32(in) - ld_relaxed_gpu_s32(in))};  // 0
  for (int turn = 0; turn < TURNS; ++turn) {
    if (thread == 0) {
      mbarrier_wait(empty, turn % 2 ^ 1);  // both have read the tile
      mbarrier_arrive_expect_tx(full, sizeof(smem.tile));
      cp_async_bulk_tensor_2d_multicast(smem_u32(smem.tile[rank * ROWS]), &map, 0, (blockIdx.x / 2 * 2 + rank) * ROWS,
                                        full, 3);
    }
    mbarrier_wait(full, turn % 2);  // both halves have landed
    for (int i = 0; i < COLUMNS / 2; ++i) {
      const int row = thread / 2, column = thread % 2 * 16 + i;
      sum[i] += smem.tile[row][((column / 4) ^ row % 8) * 4 + column % 4];
    }
    for (uint32_t block = 0; block < cluster_nctarank(); ++block)
      mbarrier_arrive_cluster(mapa_shared_cluster(empty, block));
  }
  uint32_t* out = args.out + blockIdx.x * (BLOCKS * ROWS * COLUMNS + COLUMNS + 256);
  for (int i = 0; i < COLUMNS / 2; ++i) out[thread * 16 + i] = sum[i];
  out += BLOCKS * ROWS * COLUMNS;

  if (thread == 0) mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_u32(&smem.arrived), other));
  // Words to the other block, by stores and by a copy.
  const uint32_t word = smem_u32(&smem.words[thread % COLUMNS]);
  if (thread < COLUMNS / 2) st_shared_cluster_u32(mapa_shared_cluster(word, other), rank * 100 + thread);
  if (thread >= COLUMNS / 2 && thread < COLUMNS && thread % 4 == 0)
    st_shared_cluster_v4_f32(mapa_shared_cluster(word, other), {__uint_as_float(rank * 100 + thread),
                                                                __uint_as_float(rank * 100 + thread + 1),
                                                                __uint_as_float(rank * 100 + thread + 2),
                                                                __uint_as_float(rank * 100 + thread + 3)});
  for (int i = thread; i < 256; i += THREADS) smem.sent[i] = rank * 1000 + i;
  fence_proxy_async_shared();  // the copy may read them
  __syncthreads();
  if (thread == 0) {
    const uint32_t arrived = smem_u32(&smem.arrived);
    mbarrier_arrive_expect_tx(arrived, sizeof(smem.received));
    cp_async_bulk_s2s(mapa_shared_cluster(smem_u32(smem.received), other), smem_u32(smem.sent), sizeof(smem.sent),
                      mapa_shared_cluster(arrived, other));
  }
  barrier_cluster_arrive();
  mbarrier_wait_cluster(smem_u32(&smem.arrived), 0);
  barrier_cluster_wait();  // the words are there
  // What came, where the other's own copy says the same.
  const float4 own = ld_shared_cluster_v4_f32(mapa_shared_cluster(smem_u32(&smem.sent[4 * thread]), other));
  const float own_words[4] = {own.x, own.y, own.z, own.w};
  for (int i = 0; i < 4; ++i)
    out[COLUMNS + 4 * thread + i] = smem.received[4 * thread + i] & __float_as_uint(own_words[i]);
  if (thread < COLUMNS)
    out[thread] = smem.words[thread] + 65536 * ld_shared_cluster_u32(mapa_shared_cluster(word, other));
  barrier_cluster_arrive_relaxed();
  barrier_cluster_wait();  // nobody reads here any more
}

extern "C" const char* launch_step(const ClusterArgs* args, cudaStream_t stream) {
  CUtensorMap map;
  const uint64_t rows = static_cast<uint64_t>(args->clusters) * BLOCKS * ROWS;
  const char* error =
      make_tensor_map<float>(&map, args->in, {COLUMNS, rows}, {COLUMNS * 4}, {COLUMNS, ROWS}, Swizzle::b128);
  CUtensorMap blocks_map;
  constexpr uint64_t ROW = COLUMNS * 4, BLOCK = ROW * ROWS;
  if (!error)
    error = make_tensor_map<float>(&blocks_map, args->in, {COLUMNS, ROWS, 1, 1, rows / ROWS}, {ROW, BLOCK, BLOCK, BLOCK},
                                   {COLUMNS, ROWS, 1, 1, 1}, Swizzle::b128);
  if (error) return error;
  const dim3 grid(args->clusters * BLOCKS), cluster(BLOCKS);
  return launch_cluster(exchange, grid, cluster, THREADS, sizeof(Smem), stream, map, blocks_map, *args);
}
