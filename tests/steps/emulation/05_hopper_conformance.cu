// Change: every wrapper of hopper.cuh on given inputs.
// Prediction: the emulation gives what a GPU gives: bit for bit, but for the sums of general products.
// Measured: data/ptx_vectors/record_hopper.py keeps a GPU's outputs.
// Verdict: kept for the tests.
// Architectures: sm_90a
#include "hopper.cuh"

// A trial is a block of one warpgroup: `in` [trials, in_words], `out` [trials, out_words], zeros before.
struct HopperArgs {
  const uint32_t* in;
  uint32_t* out;
  int32_t wrapper, trials, in_words, out_words;
  // Of copies: the tensor lies at the start of `in` (loads) or `out` (stores), the box at these coordinates.
  int32_t rank, element_bytes, swizzle;
  int32_t at[5];
  uint32_t box[5];
  uint64_t sizes[5], strides[4];
};

constexpr int THREADS = 4 * WARP, IMAGE_WORDS = 10240;  // of operands

struct Smem {
  uint32_t image[IMAGE_WORDS];
  uint64_t barrier[4];
};

DEVICE void copy(uint32_t* to, const uint32_t* from, int words) {
  for (int i = threadIdx.x; i < words; i += THREADS) to[i] = from[i];
}

DEVICE void make_barrier(uint64_t& barrier, int count) {
  if (threadIdx.x == 0) {
    mbarrier_init(smem_u32(&barrier), count);
    fence_mbarrier_init();
  }
  __syncthreads();
}

// in: descriptors relative to the image (2 + 2 words), scale-d, 0 ...; [128][4] registers of A; the image.
// out: [128][N / 2] accumulators.
template <int N, typename Multiply>
DEVICE void run_wgmma(const uint32_t* in, uint32_t* out, Smem& smem, Multiply multiply) {
  copy(smem.image, in + 8 + 4 * THREADS, IMAGE_WORDS);
  fence_proxy_async_shared();
  __syncthreads();
  const uint64_t base = smem_u32(smem.image) >> 4;
  const uint64_t a_descriptor = (static_cast<uint64_t>(in[1]) << 32 | in[0]) + base;
  const uint64_t b_descriptor = (static_cast<uint64_t>(in[3]) << 32 | in[2]) + base;
  const uint32_t* mine = in + 8 + 4 * threadIdx.x;
  const uint32_t a_regs[4] = {mine[0], mine[1], mine[2], mine[3]};
  float d_regs[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d_regs[i] = static_cast<float>((threadIdx.x * 7 + i * 5) % 64);
  wgmma_fence();
  multiply(d_regs, a_regs, a_descriptor, b_descriptor, static_cast<int>(in[4]));
  wgmma_commit_group();
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[threadIdx.x * (N / 2) + i] = __float_as_uint(d_regs[i]);
}

template <typename T, int N, Major A, Major B>
DEVICE void run_ss(const uint32_t* in, uint32_t* out, Smem& smem) {
  run_wgmma<N>(in, out, smem, [](float(&d)[N / 2], const uint32_t(&)[4], uint64_t a, uint64_t b, int scale_d) {
    wgmma_k16<T, N, B, A>(d, a, b, scale_d);
  });
}

template <typename T, int N, Major B>
DEVICE void run_rs(const uint32_t* in, uint32_t* out, Smem& smem) {
  run_wgmma<N>(in, out, smem, [](float(&d)[N / 2], const uint32_t(&a)[4], uint64_t, uint64_t b, int scale_d) {
    wgmma_k16<T, N, B>(d, a, b, scale_d);
  });
}

template <int N>
DEVICE void run_ss_e4m3(const uint32_t* in, uint32_t* out, Smem& smem) {
  run_wgmma<N>(in, out, smem, [](float(&d)[N / 2], const uint32_t(&)[4], uint64_t a, uint64_t b, int scale_d) {
    wgmma_k32_e4m3<N>(d, a, b, scale_d);
  });
}

template <int N>
DEVICE void run_rs_e4m3(const uint32_t* in, uint32_t* out, Smem& smem) {
  run_wgmma<N>(in, out, smem, [](float(&d)[N / 2], const uint32_t(&a)[4], uint64_t, uint64_t b, int scale_d) {
    wgmma_k32_e4m3<N>(d, a, b, scale_d);
  });
}

template <int N>
DEVICE void run_rs_e5m2(const uint32_t* in, uint32_t* out, Smem& smem) {
  run_wgmma<N>(in, out, smem, [](float(&d)[N / 2], const uint32_t(&a)[4], uint64_t, uint64_t b, int scale_d) {
    wgmma_k32_e4m3_e5m2<N>(d, a, b, scale_d);
  });
}

// Two groups in flight on accumulators of their own, then a chain of two products; kept apart in `out`.
DEVICE void run_wgmma_groups(const uint32_t* in, uint32_t* out, Smem& smem) {
  copy(smem.image, in + 8 + 4 * THREADS, IMAGE_WORDS);
  fence_proxy_async_shared();
  __syncthreads();
  const uint64_t base = smem_u32(smem.image) >> 4;
  const uint64_t a = (static_cast<uint64_t>(in[1]) << 32 | in[0]) + base;
  const uint64_t b = (static_cast<uint64_t>(in[3]) << 32 | in[2]) + base;
  float first[4], second[4];
  wgmma_fence();
  wgmma_k16<bf16, 8>(first, a, b, 0);
  wgmma_commit_group();
  wgmma_k16<bf16, 8>(second, wgmma_advance(a, 32), wgmma_advance(b, 32), 0);
  wgmma_k16<bf16, 8>(second, wgmma_advance(a, 64), wgmma_advance(b, 64), 1);
  wgmma_commit_group();
  wgmma_wait_group<1>();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 8 + i] = __float_as_uint(first[i]);
  wgmma_wait_group<0>();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 8 + 4 + i] = __float_as_uint(second[i]);
}

// Which questions about phases are answered with yes, through a life of a barrier.
DEVICE void run_mbarrier(const uint32_t* in, uint32_t* out, Smem& smem) {
  if (threadIdx.x == 0) {
    const uint32_t barrier = smem_u32(&smem.barrier[0]);
    int n = 0;
    const auto ask = [&] {
      for (int parity = 0; parity < 2; ++parity) out[n++] = mbarrier_test_wait_parity(barrier, parity);
    };
    mbarrier_init(barrier, 2);
    fence_mbarrier_init();
    fence_proxy_async_shared();
    ask();
    mbarrier_arrive(barrier);
    ask();
    mbarrier_arrive(barrier);
    ask();
    mbarrier_wait(barrier, 0);
    mbarrier_arrive(barrier);
    mbarrier_arrive_expect_tx(barrier, 64);
    ask();
    cp_async_bulk_g2s(smem_u32(smem.image), in, 64, barrier);
    mbarrier_wait(barrier, 1);
    ask();
    for (int i = 0; i < 16; ++i) out[16 + i] = smem.image[i];
    mbarrier_expect_tx(barrier, 32);  // announced before the arrivals
    mbarrier_arrive(barrier);
    mbarrier_arrive(barrier);
    ask();
    cp_async_bulk_g2s(smem_u32(smem.image + 16), in + 16, 16, barrier);
    cp_async_bulk_g2s(smem_u32(smem.image + 20), in + 24, 16, barrier);
    mbarrier_wait(barrier, 0);
    ask();
    for (int i = 16; i < 24; ++i) out[16 + i] = smem.image[i];
    mbarrier_inval(barrier);
    mbarrier_init(barrier, 1);
    ask();
  }
}

// Each thread's 16 bytes, for another to read; in `out` [128][4], two turns.
DEVICE void run_cp_async_arrive(const uint32_t* in, uint32_t* out, Smem& smem) {
  make_barrier(smem.barrier[0], THREADS);
  const uint32_t barrier = smem_u32(&smem.barrier[0]);
  const int thread = threadIdx.x;
  for (int turn = 0; turn < 2; ++turn) {
    uint32_t* tile = smem.image + turn * 4 * THREADS;
    cp_async_cg(smem_u32(tile + 4 * thread), in + 4 * (turn * THREADS + thread));
    cp_async_mbarrier_arrive_noinc(barrier);
    mbarrier_wait(barrier, turn);
    for (int i = 0; i < 4; ++i) out[4 * (turn * THREADS + thread) + i] = tile[4 * (THREADS - 1 - thread) + i];
  }
}

// The first half of the block hands on through barrier 1, the second counts at barrier 2 and goes on.
DEVICE void run_named_barriers(const uint32_t* in, uint32_t* out, Smem& smem) {
  const int i = threadIdx.x;
  if (i < 64) {
    smem.image[i] = in[i];
    bar_sync(1, 64);
    out[i] = smem.image[63 - i];
    bar_sync(2, THREADS);
    out[64 + i] = smem.image[64 + i];
  } else {
    smem.image[i] = in[i];
    bar_arrive(2, THREADS);
  }
}

template <int COUNT, typename Store>
DEVICE void run_stmatrix(const uint32_t* in, uint32_t* out, Smem& smem, Store store) {
  const int lane = threadIdx.x;
  if (lane < WARP) {
    for (int i = 0; i < 4 * COUNT; ++i) smem.image[i * WARP + lane] = 0;
    __syncwarp();
    uint32_t d[COUNT];
    for (int i = 0; i < COUNT; ++i) d[i] = in[lane * 5 + i];
    store(smem_u32(&smem.image[in[lane * 5 + 4] % 32 * 4]), d);
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[lane * 4 + i] = smem.image[lane * 4 + i];
  }
}

DEVICE void run_bulk(const uint32_t* in, uint32_t* out, Smem& smem) {
  make_barrier(smem.barrier[0], 1);
  const uint32_t barrier = smem_u32(&smem.barrier[0]);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, 512 + 1024);
    cp_async_bulk_g2s(smem_u32(smem.image + 4), in + 8, 512, barrier);
    cp_async_bulk_g2s(smem_u32(smem.image + 1024), in + 256, 1024, barrier);
  }
  mbarrier_wait(barrier, 0);
  if (threadIdx.x == 0) {
    cp_async_bulk_s2g(out, smem_u32(smem.image + 1024), 1024);
    cp_async_bulk_commit_group();
    cp_async_bulk_s2g(out + 256, smem_u32(smem.image + 4), 512);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<1>();
    cp_async_bulk_wait_group<0>();
  }
}

DEVICE void load_box(const CUtensorMap& map, const HopperArgs& args, uint32_t to, uint32_t barrier) {
  const int(&at)[5] = args.at;
  if (args.rank == 2) cp_async_bulk_tensor_2d_g2s(to, &map, at[0], at[1], barrier);
  if (args.rank == 3) cp_async_bulk_tensor_3d_g2s(to, &map, at[0], at[1], at[2], barrier);
  if (args.rank == 4) cp_async_bulk_tensor_4d_g2s(to, &map, at[0], at[1], at[2], at[3], barrier);
  if (args.rank == 5) cp_async_bulk_tensor_5d_g2s(to, &map, at[0], at[1], at[2], at[3], at[4], barrier);
}

DEVICE void store_box(const CUtensorMap& map, const HopperArgs& args, uint32_t from) {
  const int(&at)[5] = args.at;
  if (args.rank == 2) cp_async_bulk_tensor_2d_s2g(&map, from, at[0], at[1]);
  if (args.rank == 3) cp_async_bulk_tensor_3d_s2g(&map, from, at[0], at[1], at[2]);
  if (args.rank == 4) cp_async_bulk_tensor_4d_s2g(&map, from, at[0], at[1], at[2], at[3]);
}

DEVICE uint32_t box_bytes(const HopperArgs& args) {
  uint32_t bytes = args.element_bytes;
  for (int i = 0; i < args.rank; ++i) bytes *= args.box[i];
  return bytes;
}

DEVICE void run_tensor_load(const CUtensorMap& map, const HopperArgs& args, uint32_t* out, Smem& smem) {
  make_barrier(smem.barrier[0], 1);
  const uint32_t barrier = smem_u32(&smem.barrier[0]), bytes = box_bytes(args);
  if (threadIdx.x == 0) {
    prefetch_tensormap(&map);
    mbarrier_arrive_expect_tx(barrier, bytes);
    load_box(map, args, smem_u32(smem.image), barrier);
  }
  mbarrier_wait(barrier, 0);
  copy(out, smem.image, static_cast<int>(bytes / 4));
}

DEVICE void run_tensor_store(const CUtensorMap& map, const HopperArgs& args, const uint32_t* in, Smem& smem) {
  copy(smem.image, in, static_cast<int>(box_bytes(args) / 4));
  fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(map, args, smem_u32(smem.image));
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
  }
}

__global__ void __launch_bounds__(THREADS, 1)
    conformance(const __grid_constant__ CUtensorMap map, const HopperArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  const uint32_t* in = args.in + static_cast<int64_t>(blockIdx.x) * args.in_words;
  uint32_t* out = args.out + static_cast<int64_t>(blockIdx.x) * args.out_words;
  constexpr Major K = Major::k, MN = Major::mn;
  // The comments are read by the tests. wgmma: type, n, A from shared memory or registers, majors of A and B.
  switch (args.wrapper) {
    case 0:  // wgmma_bf16_8_s_k_k
      return run_ss<bf16, 8, K, K>(in, out, smem);
    case 1:  // wgmma_bf16_16_s_k_k
      return run_ss<bf16, 16, K, K>(in, out, smem);
    case 2:  // wgmma_fp16_32_s_k_k
      return run_ss<fp16, 32, K, K>(in, out, smem);
    case 3:  // wgmma_bf16_64_s_k_k
      return run_ss<bf16, 64, K, K>(in, out, smem);
    case 4:  // wgmma_fp16_96_s_k_k
      return run_ss<fp16, 96, K, K>(in, out, smem);
    case 5:  // wgmma_fp16_128_s_k_k
      return run_ss<fp16, 128, K, K>(in, out, smem);
    case 6:  // wgmma_bf16_192_s_k_k
      return run_ss<bf16, 192, K, K>(in, out, smem);
    case 7:  // wgmma_bf16_256_s_k_k
      return run_ss<bf16, 256, K, K>(in, out, smem);
    case 8:  // wgmma_bf16_64_s_k_mn
      return run_ss<bf16, 64, K, MN>(in, out, smem);
    case 9:  // wgmma_fp16_128_s_k_mn
      return run_ss<fp16, 128, K, MN>(in, out, smem);
    case 10:  // wgmma_bf16_256_s_k_mn
      return run_ss<bf16, 256, K, MN>(in, out, smem);
    case 11:  // wgmma_bf16_64_s_mn_k
      return run_ss<bf16, 64, MN, K>(in, out, smem);
    case 12:  // wgmma_fp16_128_s_mn_mn
      return run_ss<fp16, 128, MN, MN>(in, out, smem);
    case 13:  // wgmma_bf16_64_r_k_k
      return run_rs<bf16, 64, K>(in, out, smem);
    case 14:  // wgmma_fp16_128_r_k_k
      return run_rs<fp16, 128, K>(in, out, smem);
    case 15:  // wgmma_bf16_256_r_k_mn
      return run_rs<bf16, 256, MN>(in, out, smem);
    case 16:  // wgmma_e4m3_64_s_k_k
      return run_ss_e4m3<64>(in, out, smem);
    case 17:  // wgmma_e4m3_128_s_k_k
      return run_ss_e4m3<128>(in, out, smem);
    case 18:  // wgmma_e4m3_256_s_k_k
      return run_ss_e4m3<256>(in, out, smem);
    case 19:  // wgmma_e4m3_64_r_k_k
      return run_rs_e4m3<64>(in, out, smem);
    case 20:  // wgmma_e4m3_128_r_k_k
      return run_rs_e4m3<128>(in, out, smem);
    case 21:  // wgmma_e4m3_256_r_k_k
      return run_rs_e4m3<256>(in, out, smem);
    case 22:  // wgmma_groups
      return run_wgmma_groups(in, out, smem);
    case 23:  // mbarrier
      return run_mbarrier(in, out, smem);
    case 24:  // named_barriers
      return run_named_barriers(in, out, smem);
    case 25:  // stmatrix_x1
      return run_stmatrix<1>(in, out, smem, [](uint32_t row, const uint32_t(&d)[1]) { stmatrix_x1(row, d); });
    case 26:  // stmatrix_x2
      return run_stmatrix<2>(in, out, smem, [](uint32_t row, const uint32_t(&d)[2]) { stmatrix_x2(row, d); });
    case 27:  // stmatrix_x4
      return run_stmatrix<4>(in, out, smem, [](uint32_t row, const uint32_t(&d)[4]) { stmatrix_x4(row, d); });
    case 28:  // stmatrix_x1_trans
      return run_stmatrix<1>(in, out, smem, [](uint32_t row, const uint32_t(&d)[1]) { stmatrix_x1_trans(row, d); });
    case 29:  // stmatrix_x2_trans
      return run_stmatrix<2>(in, out, smem, [](uint32_t row, const uint32_t(&d)[2]) { stmatrix_x2_trans(row, d); });
    case 30:  // stmatrix_x4_trans
      return run_stmatrix<4>(in, out, smem, [](uint32_t row, const uint32_t(&d)[4]) { stmatrix_x4_trans(row, d); });
    case 31:  // bulk
      return run_bulk(in, out, smem);
    case 32:  // tensor_load
      return run_tensor_load(map, args, out, smem);
    case 33:  // tensor_store
      return run_tensor_store(map, args, in, smem);
    case 36:  // cp_async_arrive
      return run_cp_async_arrive(in, out, smem);
    case 37:  // wgmma_e5m2_8_r_k_k
      return run_rs_e5m2<8>(in, out, smem);
    case 38:  // wgmma_e5m2_16_r_k_k
      return run_rs_e5m2<16>(in, out, smem);
    case 39:  // wgmma_e5m2_24_r_k_k
      return run_rs_e5m2<24>(in, out, smem);
    case 40:  // wgmma_e5m2_32_r_k_k
      return run_rs_e5m2<32>(in, out, smem);
    case 41:  // wgmma_e5m2_48_r_k_k
      return run_rs_e5m2<48>(in, out, smem);
    case 42:  // wgmma_e5m2_64_r_k_k
      return run_rs_e5m2<64>(in, out, smem);
    case 34:  // elect: how many are elected, and whether twice the same
    {
      const bool first = elect_sync(ALL_LANES), again = elect_sync(ALL_LANES);
      out[threadIdx.x] = __popc(__ballot_sync(ALL_LANES, first)) + (first == again ? 16 : 0);
      return;
    }
    default:
      __trap();
  }
}

// A kernel of its own: what ptxas gives a kernel with it depends on every branch. 3 x 168 registers at first.
__global__ void __launch_bounds__(3 * THREADS, 1) registers(const HopperArgs args) {
  if (threadIdx.x < THREADS) {
    setmaxnreg_dec<40>();
    args.out[threadIdx.x] = args.in[threadIdx.x] + 1;
  } else {
    setmaxnreg_inc<232>();
    args.out[threadIdx.x] = args.in[threadIdx.x] + 2;
  }
}

template <typename T>
const char* make_map(CUtensorMap* map, const HopperArgs& x, const void* base) {
  const auto swizzle = static_cast<Swizzle>(x.swizzle);
  const uint64_t(&s)[5] = x.sizes;
  const uint32_t(&b)[5] = x.box;
  const uint64_t(&pitch)[4] = x.strides;
  if (x.rank == 2) return make_tensor_map<T>(map, base, {s[0], s[1]}, {pitch[0]}, {b[0], b[1]}, swizzle);
  if (x.rank == 3)
    return make_tensor_map<T>(map, base, {s[0], s[1], s[2]}, {pitch[0], pitch[1]}, {b[0], b[1], b[2]}, swizzle);
  if (x.rank == 4)
    return make_tensor_map<T>(map, base, {s[0], s[1], s[2], s[3]}, {pitch[0], pitch[1], pitch[2]},
                              {b[0], b[1], b[2], b[3]}, swizzle);
  return make_tensor_map<T>(map, base, s, pitch, b, swizzle);
}

extern "C" const char* launch_step(const HopperArgs* args, cudaStream_t stream) {
  CUtensorMap map = {};
  const char* error = nullptr;
  const void* base = args->wrapper == 33 ? static_cast<const void*>(args->out) : args->in;
  if (args->rank && args->element_bytes == 1) error = make_map<uint8_t>(&map, *args, base);
  if (args->rank && args->element_bytes == 2) error = make_map<bf16>(&map, *args, base);
  if (args->rank && args->element_bytes == 4) error = make_map<float>(&map, *args, base);
  if (error) return error;
  if (args->wrapper == 35)  // case 35:  // setmaxnreg
    return launch(registers, dim3(args->trials), 3 * THREADS, 0, stream, *args);
  return launch(conformance, dim3(args->trials), THREADS, sizeof(Smem), stream, map, *args);
}
