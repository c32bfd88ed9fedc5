// Change: what is left after the last whole wave, if it is at most half a wave of tiles of 256 tokens, is cut into
//   tiles of 128.
// Prediction: gate_up has 7.3 waves at 1024 tokens, which cost 8 and now 7.5: 6% faster there, 1.7% at 4096 (29.1
//   waves), 0.8% at 8192 (58.2); fc_down stays in tiles of 192, or with 0.9 waves.
// Measured: H200, 2026-11-29, recorded, single launches with pauses: gate_up 4096 beside 12 1,275 TFLOP/s, where 12 has
//   1,317. Later in that run than 12's, at 420 to 520 W: gate_up 1024 / 4096 / 8192 1,199 / 1,277 / 1,264, fc_down
//   1,114 / 1,332 / 1,272, local_qkv 1,206.
// Verdict: slower, 3% at 4096, where the halves were to bring 1.7%: what is saved in the last wave is lost in all
//   others, it is supposed to the loop over a number of batches that is known only when it runs.
// Architectures: sm_90a
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BN = CONSUMERS * 64, BK = GROUP;  // weight rows and columns of a tile
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// A tile of BM tokens: its batches of products, and as many stages as fit.
template <int TOKENS>
struct Tile {
  static constexpr int BM = TOKENS, BATCH = BM == 192 ? 192 : 128, BATCHES = BM / BATCH;
  static constexpr int STAGES = BM == 256 ? 4 : BM == 192 ? 5 : 7;
};

// Tiles in whole waves, and after them, if `halves`, parts of one batch.
struct Parts {
  Tiles tiles;
  int whole;    // tiles that are not cut
  bool halves;  // the others are
  DEVICE int count() const { return whole + (tiles.count() - whole) * (halves ? 2 : 1); }
};
struct Part {
  Place place;
  int first_batch, batches;
};
template <typename TILE>
DEVICE Part part(const Parts& parts, int i) {
  if (i < parts.whole || !parts.halves) return {parts.tiles.place(i), 0, TILE::BATCHES};
  return {parts.tiles.place(parts.whole + (i - parts.whole) / 2), (i - parts.whole) % 2, 1};
}

template <typename TILE>
struct Smem {
  static constexpr int BM = TILE::BM, STAGES = TILE::STAGES;
  alignas(1024) uint8_t x[STAGES][BM][BK];
  alignas(1024) uint16_t y[CONSUMERS][BM][64];
  alignas(128) uint8_t w[STAGES][CONSUMERS][BLOCK_BYTES];
  uint64_t full[STAGES], empty[STAGES];
};

template <typename TILE>
DEVICE void produce(Smem<TILE>& smem, const CUtensorMap& x_map, const GemmW4a8Args& args, const Parts& parts) {
  constexpr int BM = TILE::BM, BATCH = TILE::BATCH, STAGES = TILE::STAGES;
  const int groups = args.k / GROUP, blocks_n = ceil_div(args.n, 64);
  int i = 0;
  for (int tile = blockIdx.x; tile < parts.count(); tile += gridDim.x) {
    const auto [place, first_batch, batches] = part<TILE>(parts, tile);
    const int first_m = place.m * BM + first_batch * BATCH;
    const int first_block = place.n * CONSUMERS, blocks = min(CONSUMERS, blocks_n - first_block);
    for (int group = 0; group < groups; ++group, ++i) {
      const int stage = i % STAGES;
      const uint32_t full = smem_u32(&smem.full[stage]);
      mbarrier_wait(smem_u32(&smem.empty[stage]), (i / STAGES & 1) ^ 1);
      mbarrier_arrive_expect_tx(full, batches * BATCH * BK + blocks * BLOCK_BYTES);
      for (int batch = 0; batch < batches; ++batch)
        cp_async_bulk_tensor_2d_g2s(smem_u32(smem.x[stage][batch * BATCH]), &x_map, group * BK,
                                    first_m + batch * BATCH, full);
      const int64_t block = static_cast<int64_t>(group) * blocks_n + first_block;
      cp_async_bulk_g2s(smem_u32(smem.w[stage]), args.w_codes + block * BLOCK_BYTES, blocks * BLOCK_BYTES, full);
    }
  }
}

// As store_batches, with a copy a batch.
template <typename T, int BATCHES, int SIZE>
DEVICE void store_parts(uint16_t (*y)[64], const float (&sums)[BATCHES][SIZE], const GemmW4a8Args& args,
                        const CUtensorMap& y_map, int group, int first_n, int first_m, int batches) {
  constexpr int BATCH = 2 * SIZE;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
  const Bias<T> bias(args, first_n + warp * 16 + lane / 4);
  if (threadIdx.x % WARPGROUP == 0) cp_async_bulk_wait_group_read<0>();
  bar_sync(1 + group, WARPGROUP);
#pragma unroll
  for (int batch = 0; batch < BATCHES; ++batch)
    if (batch < batches)
      to_rows_of_tokens<T>(y + batch * BATCH, sums[batch], args, first_m + batch * BATCH, RESTORE, bias);
  fence_proxy_async_shared();
  bar_sync(1 + group, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
    for (int batch = 0; batch < batches; ++batch)
      cp_async_bulk_tensor_2d_s2g(&y_map, smem_u32(y + batch * BATCH), first_n, first_m + batch * BATCH);
    cp_async_bulk_commit_group();
  }
}

template <typename T, typename TILE>
DEVICE void consume(Smem<TILE>& smem, const CUtensorMap& y_map, const GemmW4a8Args& args, const Parts& parts,
                    int consumer) {
  constexpr int BM = TILE::BM, STAGES = TILE::STAGES, BATCH = TILE::BATCH, BATCHES = TILE::BATCHES;
  const int groups = args.k / GROUP, blocks_n = ceil_div(args.n, 64);
  int i = 0;
  for (int tile = blockIdx.x; tile < parts.count(); tile += gridDim.x) {
    const auto [place, first_batch, batches] = part<TILE>(parts, tile);
    const int first_m = place.m * BM + first_batch * BATCH;
    const int my_block = min(consumer, blocks_n - place.n * CONSUMERS - 1);  // what is past the last row is not stored
    warm_scales<BM>(args, first_m);
    float acc_regs[BATCHES][BATCH / 2] = {};
    uint4 words[2];
    float next_scale[2];
    const auto load = [&](int i) {
      mbarrier_wait(smem_u32(&smem.full[i % STAGES]), i / STAGES & 1);
      load_block(words, next_scale, smem.w[i % STAGES][my_block]);
    };
    load(i);
    for (int group = 0; group < groups; ++group, ++i) {
      const int stage = i % STAGES;
      const float scale[2] = {next_scale[0], next_scale[1]};
      uint32_t a[BK / 32][4];
      unfold(a, words);
      settle(a);
      const uint64_t b = wgmma_descriptor(smem_u32(smem.x[stage]), 16, 1024, Swizzle::b128);
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        if (batch == batches) break;
        float sums[BATCH / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 32; ++k)
          wgmma_k32_e4m3<BATCH>(sums, a[k], wgmma_advance(b, batch * BATCH * BK + k * 32), k);
        wgmma_commit_group();
        if (batch == 0) load(group + 1 < groups ? i + 1 : i);  // the last once more: no branch among products
        wgmma_wait_group<0>();
        if (batch == batches - 1) release(smem.empty[stage]);
        add_scaled(acc_regs[batch], scale, sums);
      }
    }
    store_parts<T>(smem.y[consumer], acc_regs, args, y_map, consumer, (place.n * CONSUMERS + consumer) * 64, first_m,
                   batches);
  }
  if (threadIdx.x % WARPGROUP == 0) cp_async_bulk_wait_group<0>();
}

template <typename T, typename TILE>
__global__ void __launch_bounds__(THREADS, 1) gemm_half_tiles(const __grid_constant__ CUtensorMap x_map,
                                                              const __grid_constant__ CUtensorMap y_map,
                                                              const GemmW4a8Args args, const bool halves) {
  constexpr int STAGES = TILE::STAGES;
  Smem<TILE>& smem = dynamic_smem<Smem<TILE>>();
  const Tiles tiles = {ceil_div(args.n, BN), ceil_div(args.m, TILE::BM)};
  const int count = tiles.count(), blocks = gridDim.x;
  const Parts parts = {tiles, count / blocks * blocks, halves};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), CONSUMERS * WARPGROUP / WARP);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(smem, x_map, args, parts);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume<T>(smem, y_map, args, parts, warpgroup - 1);
  }
}

// Tiles of a launch in whole waves, and whether the rest is cut: its halves must fit into one wave.
template <int TOKENS>
bool in_halves(const GemmW4a8Args& args) {
  const int64_t tiles = static_cast<int64_t>(ceil_div(args.n, BN)) * ceil_div(args.m, TOKENS);
  return Tile<TOKENS>::BATCHES == 2 && tiles > args.sm_count && tiles % args.sm_count * 2 <= args.sm_count;
}

template <typename T, int TOKENS>
const char* launch_tiles(const GemmW4a8Args& args, cudaStream_t stream) {
  using TILE = Tile<TOKENS>;
  CUtensorMap x_map, y_map;
  if (const char* problem = make_maps<T>(x_map, y_map, args, TILE::BATCH)) return problem;
  const int tiles = ceil_div(args.n, BN) * ceil_div(args.m, TOKENS);
  return launch(gemm_half_tiles<T, TILE>, min(tiles, args.sm_count), THREADS, sizeof(Smem<TILE>), stream, x_map, y_map,
                args, in_halves<TOKENS>(args));
}

// What the waves of a tile size take, in tokens; the start and end of a tile are worth 32 of them.
template <int TOKENS>
int64_t cost(const GemmW4a8Args& args) {
  const int64_t tiles = static_cast<int64_t>(ceil_div(args.n, BN)) * ceil_div(args.m, TOKENS);
  const int64_t waves = ceil_div<int64_t>(tiles, args.sm_count);
  return waves * (TOKENS + 32) - (in_halves<TOKENS>(args) && tiles % args.sm_count ? TOKENS / 2 : 0);
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  if (args->layout != LAYOUT_BLOCKS) return "the weight is in another layout than this step reads";
  return with_dtype(args->y_dtype, [&]<typename T>() -> const char* {
    const int64_t large = cost<256>(*args), middle = cost<192>(*args), small = cost<128>(*args);
    if (large <= min(middle, small)) return launch_tiles<T, 256>(*args, stream);
    return middle <= small ? launch_tiles<T, 192>(*args, stream) : launch_tiles<T, 128>(*args, stream);
  });
}
