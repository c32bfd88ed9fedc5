// Change: a small tensor-core product with everything that can go wrong in a kernel, for the tests of the emulation.
// Prediction: none, it is never timed.
// Measured: never.
// Verdict: kept for the tests.
#include "ptx.cuh"

struct ProductArgs {
  const bf16* a;  // [m, k]
  const bf16* b;  // [n, k]
  float* c;       // [m, n] = a b^T
  int32_t m, n, k;  // k a multiple of 8
};

constexpr int WARPS = 2, THREADS = WARPS * WARP;
constexpr int BM = WARPS * 16, BN = 16, BK = 32;
constexpr int STAGES = 2;

struct Smem {
  bf16 a[STAGES][BM][BK];
  bf16 b[STAGES][BN][BK];
  float c[WARPS][16][BN];
};

template <int ROWS>
DEVICE void load_tile(bf16 (&tile)[ROWS][BK], const bf16* from, int first_row, int rows, int first_k, int k) {
  for (int i = threadIdx.x; i < ROWS * BK / 8; i += THREADS) {
    const int row = i / (BK / 8), column = i % (BK / 8) * 8;
    const bool inside = first_row + row < rows && first_k + column < k;
    const int64_t offset = inside ? static_cast<int64_t>(first_row + row) * k + first_k + column : 0;
    cp_async_cg_zfill(smem_u32(&tile[row][column]), from + offset, inside ? 16 : 0);
  }
}

__global__ void __launch_bounds__(THREADS) product(const ProductArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int first_m = blockIdx.x * BM, first_n = blockIdx.y * BN, tiles = ceil_div(args.k, BK);
  float c_regs[2][4] = {};

  const auto load_stage = [&](int tile) {
    load_tile(smem.a[tile % STAGES], args.a, first_m, args.m, tile * BK, args.k);
    load_tile(smem.b[tile % STAGES], args.b, first_n, args.n, tile * BK, args.k);
  };
  load_stage(0);
  cp_async_commit_group();
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) load_stage(tile + 1);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    __syncthreads();  // the tile has landed

    const int stage = tile % STAGES;
    for (int k = 0; k < BK; k += 16) {
      uint32_t a[4], b[4];
      ldmatrix_x4(a, smem_u32(&smem.a[stage][warp * 16 + lane % 16][k + lane / 16 * 8]));
      ldmatrix_x4(b, smem_u32(&smem.b[stage][lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]));
      mma_m16n8k16<bf16>(c_regs[0], a, b[0], b[1]);
      mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]);
    }
    __syncthreads();  // the tile has been read
  }

  // Through shared memory, so that a warp writes whole rows.
  const int g = lane / 4, t = lane % 4;
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i) smem.c[warp][g + i / 2 * 8][half * 8 + t * 2 + i % 2] = c_regs[half][i];
  __syncwarp();  // the warp's rows are written
  for (int i = lane; i < 16 * BN; i += WARP) {
    const int row = i / BN, column = i % BN, m = first_m + warp * 16 + row, n = first_n + column;
    if (m < args.m && n < args.n) args.c[static_cast<int64_t>(m) * args.n + n] = smem.c[warp][row][column];
  }
}

extern "C" const char* launch_step(const ProductArgs* args, cudaStream_t stream) {
  return launch(product, dim3(ceil_div(args->m, BM), ceil_div(args->n, BN)), THREADS, sizeof(Smem), stream, *args);
}
