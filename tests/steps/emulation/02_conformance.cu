// Change: every wrapper of ptx.cuh and the CUDA functions that the emulation stands in for, on given inputs.
// Prediction: the emulation gives what a GPU gives: bit for bit, but for mma and approximations.
// Measured: data/ptx_vectors holds a GPU's outputs.
// Verdict: kept for the tests.
// Architectures: sm_90a sm_100a
#include "ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define HAS_E2M1 1
#else
#define HAS_E2M1 0
#endif

// A trial is one warp: `in` [trials, 32, in_words], `out` [trials, 32, out_words], zeros before.
struct ConformanceArgs {
  const uint32_t* in;
  uint32_t* out;
  int32_t wrapper, trials, in_words, out_words;
};

struct Smem {
  uint32_t x[WARP * 64];
};

DEVICE float as_float(uint32_t x) { return __uint_as_float(x); }
DEVICE uint32_t as_uint(float x) { return __float_as_uint(x); }

template <typename To, typename From>
DEVICE To pun(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

template <typename Fragment>
DEVICE void run_mma(const uint32_t* in, uint32_t* out, Fragment multiply) {
  uint32_t a[4] = {in[0], in[1], in[2], in[3]};
  float c[4] = {as_float(in[6]), as_float(in[7]), as_float(in[8]), as_float(in[9])};
  multiply(c, a, in[4], in[5]);
  for (int i = 0; i < 4; ++i) out[i] = as_uint(c[i]);
}

template <int COUNT, typename Load>
DEVICE void run_ldmatrix(const uint32_t* in, uint32_t* out, Smem& smem, int lane, Load load) {
  for (int i = 0; i < 16; ++i) smem.x[lane * 16 + i] = in[i];
  __syncwarp();
  uint32_t d[COUNT];
  load(d, smem_u32(&smem.x[in[16] % 128 * 4]));
  for (int i = 0; i < COUNT; ++i) out[i] = d[i];
}

template <typename T, bool B_ROWS>
DEVICE void run_wmma(const uint32_t* in, uint32_t* out, Smem& smem, int lane) {
  uint32_t *a = smem.x, *b = smem.x + 128, *c = smem.x + 256;
  for (int i = 0; i < 4; ++i) a[lane * 4 + i] = in[i], b[lane * 4 + i] = in[4 + i];
  for (int i = 0; i < 8; ++i) c[lane * 8 + i] = in[8 + i];
  __syncwarp();
  WmmaA<T> a_frag;
  WmmaB<T> b_frag;
  WmmaC c_frag;
  wmma_load_a_row(a_frag, reinterpret_cast<const T*>(a), 16);
  wmma_load_c_row(c_frag, reinterpret_cast<const float*>(c), 16);
  if constexpr (B_ROWS) {
    wmma_load_b_row(b_frag, reinterpret_cast<const T*>(b), 16);
    wmma_mma_row_row(c_frag, a_frag, b_frag);
  } else {
    wmma_load_b_col(b_frag, reinterpret_cast<const T*>(b), 16);
    wmma_mma_row_col(c_frag, a_frag, b_frag);
  }
  __syncwarp();
  wmma_store_d_row(reinterpret_cast<float*>(c), c_frag, 16);
  __syncwarp();
  for (int i = 0; i < 8; ++i) out[i] = c[lane * 8 + i];
}

template <typename Pair>
DEVICE void run_packed(const uint32_t* in, uint32_t* out) {
  const Pair a = pun<Pair>(in[0]), b = pun<Pair>(in[1]), c = pun<Pair>(in[2]);
  out[0] = pun<uint32_t>(__hadd2(a, b));
  out[1] = pun<uint32_t>(__hsub2(a, b));
  out[2] = pun<uint32_t>(__hmul2(a, b));
  out[3] = pun<uint32_t>(__hfma2(a, b, c));
}

DEVICE void run_cp_async(const uint32_t* in, uint32_t* out, Smem& smem, int lane) {
  uint32_t* mine = smem.x + lane * 32;
  const uint32_t bytes = in[4] % 17;
  for (int i = 0; i < 32; ++i) mine[i] = 0xdeadbeefu;
  __syncthreads();
  const auto at = [&](int word) { return smem_u32(mine + word); };
  cp_async_ca_zfill<4>(at(0), in, min(bytes, 4u));
  cp_async_ca_zfill<8>(at(2), in, min(bytes, 8u));
  cp_async_ca_zfill<16>(at(4), in, bytes);
  cp_async_commit_group();
  cp_async_cg_zfill(at(8), in, bytes);
  cp_async_cg_zfill_L2_128B(at(12), in, bytes);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  for (int i = 0; i < 8; ++i) out[i] = mine[i];
  cp_async_wait_group<0>();
  for (int i = 8; i < 16; ++i) out[i] = mine[i];
  cp_async_ca<4>(at(16), in + 1);
  cp_async_ca<8>(at(18), in + 2);
  cp_async_ca<16>(at(20), in);
  cp_async_cg(at(24), in);
  cp_async_cg_L2_128B(at(28), in);
  cp_async_wait_all();
  for (int i = 16; i < 32; ++i) out[i] = mine[i];
}

DEVICE void put(uint32_t* out, uint4 x) { out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w; }

DEVICE void run_shuffle(const uint32_t* in, uint32_t* out, int lane) {
  const uint32_t x = in[0];
  const int by = in[1] % 32;
  out[0] = __shfl_sync(ALL_LANES, x, by);
  out[1] = __shfl_up_sync(ALL_LANES, x, by);
  out[2] = __shfl_down_sync(ALL_LANES, x, by);
  out[3] = __shfl_xor_sync(ALL_LANES, x, by);
  out[4] = __shfl_sync(ALL_LANES, x, by, 8);
  out[5] = __shfl_up_sync(ALL_LANES, x, by, 8);
  out[6] = __shfl_down_sync(ALL_LANES, x, by, 8);
  out[7] = __shfl_xor_sync(ALL_LANES, x, by, 8);
  if (lane < 12) out[8] = __shfl_xor_sync(0xfffu, x, 3);
  const unsigned long long wide = __shfl_sync(ALL_LANES, static_cast<unsigned long long>(x) << 32 | in[1], 31 - lane);
  out[9] = static_cast<uint32_t>(wide);
  out[10] = static_cast<uint32_t>(wide >> 32);
}

DEVICE void run_vote(uint32_t x, uint32_t* out) {
  out[0] = __any_sync(ALL_LANES, x & 1);
  out[1] = __all_sync(ALL_LANES, x & 1);
  out[2] = __ballot_sync(ALL_LANES, x & 2);
  out[3] = __match_any_sync(ALL_LANES, x & 3);
  out[4] = __reduce_add_sync(ALL_LANES, x);
  out[5] = __reduce_min_sync(ALL_LANES, x);
  out[6] = __reduce_max_sync(ALL_LANES, x);
  out[7] = __reduce_and_sync(ALL_LANES, x | 0xff00u);
  out[8] = __reduce_or_sync(ALL_LANES, x & 0xff00u);
  out[9] = __reduce_xor_sync(ALL_LANES, x);
}

__global__ void __launch_bounds__(WARP) conformance(const ConformanceArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  const int lane = threadIdx.x;
  const uint32_t* in = args.in + (static_cast<int64_t>(blockIdx.x) * WARP + lane) * args.in_words;
  uint32_t* warp_out = args.out + static_cast<int64_t>(blockIdx.x) * WARP * args.out_words;
  uint32_t* out = warp_out + lane * args.out_words;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  cp_async_bulk_prefetch_L2(args.in, 16);
  prefetch_global_L2(args.in);
  // The comments are read by the tests: name, words in, words out, of a lane.
  switch (args.wrapper) {
    case 0:  // prmt 3 -> 1
      out[0] = prmt(in[0], in[1], in[2]);
      break;
    case 1:  // lop3 3 -> 6
      out[0] = lop3<0x6a>(in[0], in[1], in[2]);
      out[1] = lop3<0xea>(in[0], in[1], in[2]);
      out[2] = lop3<0xca>(in[0], in[1], in[2]);
      out[3] = lop3<0x1b>(in[0], in[1], in[2]);
      out[4] = lop3<0x01>(in[0], in[1], in[2]);
      out[5] = lop3<0xfe>(in[0], in[1], in[2]);
      break;
    case 2:  // ex2_approx_ftz 1 -> 1
      out[0] = as_uint(ex2_approx_ftz(as_float(in[0])));
      break;
    case 3:  // ex2_approx_f16x2 1 -> 1
      out[0] = ex2_approx_f16x2(in[0]);
      break;
    case 4:  // ex2_approx_ftz_bf16x2 1 -> 1
      out[0] = ex2_approx_ftz_bf16x2(in[0]);
      break;
    case 5:  // cvt_rn_bf16x2_f32 2 -> 1
      out[0] = cvt_rn_bf16x2_f32(as_float(in[0]), as_float(in[1]));
      break;
    case 6:  // cvt_rn_f16x2_f32 2 -> 1
      out[0] = cvt_rn_f16x2_f32(as_float(in[0]), as_float(in[1]));
      break;
    case 7:  // cvt_rn_satfinite_e4m3x2_f32 2 -> 1
      out[0] = cvt_rn_satfinite_e4m3x2_f32(as_float(in[0]), as_float(in[1]));
      break;
    case 8:  // cvt_rn_satfinite_e4m3x2_f16x2 1 -> 1
      out[0] = cvt_rn_satfinite_e4m3x2_f16x2(in[0]);
      break;
    case 9:  // cvt_rn_f16x2_e4m3x2 1 -> 1
      out[0] = cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(in[0]));
      break;
    case 10:  // mma_m16n8k16_bf16 10 -> 4
      run_mma(in, out, [](float(&c)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k16<bf16>(c, a, b0, b1);
      });
      break;
    case 11:  // mma_m16n8k16_fp16 10 -> 4
      run_mma(in, out, [](float(&c)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k16<fp16>(c, a, b0, b1);
      });
      break;
    case 12:  // mma_m16n8k32_e4m3 10 -> 4
      run_mma(in, out, [](float(&c)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k32_e4m3(c, a, b0, b1);
      });
      break;
    case 13:  // ldmatrix_x1 17 -> 1
      run_ldmatrix<1>(in, out, smem, lane, [](uint32_t(&d)[1], uint32_t row) { ldmatrix_x1(d, row); });
      break;
    case 14:  // ldmatrix_x2 17 -> 2
      run_ldmatrix<2>(in, out, smem, lane, [](uint32_t(&d)[2], uint32_t row) { ldmatrix_x2(d, row); });
      break;
    case 15:  // ldmatrix_x4 17 -> 4
      run_ldmatrix<4>(in, out, smem, lane, [](uint32_t(&d)[4], uint32_t row) { ldmatrix_x4(d, row); });
      break;
    case 16:  // ldmatrix_x1_trans 17 -> 1
      run_ldmatrix<1>(in, out, smem, lane, [](uint32_t(&d)[1], uint32_t row) { ldmatrix_x1_trans(d, row); });
      break;
    case 17:  // ldmatrix_x2_trans 17 -> 2
      run_ldmatrix<2>(in, out, smem, lane, [](uint32_t(&d)[2], uint32_t row) { ldmatrix_x2_trans(d, row); });
      break;
    case 18:  // ldmatrix_x4_trans 17 -> 4
      run_ldmatrix<4>(in, out, smem, lane, [](uint32_t(&d)[4], uint32_t row) { ldmatrix_x4_trans(d, row); });
      break;
    case 19:  // cp_async 8 -> 32
      run_cp_async(in, out, smem, lane);
      break;
    case 20:  // wmma_bf16_row_col 16 -> 8
      run_wmma<bf16, false>(in, out, smem, lane);
      break;
    case 21:  // wmma_bf16_row_row 16 -> 8
      run_wmma<bf16, true>(in, out, smem, lane);
      break;
    case 22:  // wmma_fp16_row_col 16 -> 8
      run_wmma<fp16, false>(in, out, smem, lane);
      break;
    case 23:  // wmma_fp16_row_row 16 -> 8
      run_wmma<fp16, true>(in, out, smem, lane);
      break;
    case 24:  // shuffle 2 -> 11
      run_shuffle(in, out, lane);
      break;
    case 25:  // vote 1 -> 10
      run_vote(in[0], out);
      break;
    case 26:  // ld_global_nc 4 -> 31
      out[0] = ld_global_nc_u32(in + 3);
      out[1] = ld_global_nc_v2_u32(in + 2).x;
      out[2] = ld_global_nc_v2_u32(in + 2).y;
      put(out + 3, ld_global_nc_v4_u32(in));
      put(out + 7, ld_global_nc_L2_128B_v4_u32(in));
      put(out + 11, ld_global_nc_L2_256B_v4_u32(in));
      put(out + 15, ld_global_nc_no_allocate_v4_u32(in));
      put(out + 19, ld_global_nc_no_allocate_L2_128B_v4_u32(in));
      put(out + 23, ld_global_nc_no_allocate_L2_256B_v4_u32(in));
      put(out + 27, ld_global_nc_evict_first_v4_u32(in));
      break;
    case 27:  // st_global_cs 8 -> 8
      st_global_cs_v4_u32(out, make_uint4(in[0], in[1], in[2], in[3]));
      for (int i = 4; i < 8; ++i) st_global_cs_u32(out + i, in[i]);
      break;
    case 28:  // red_atom 4 -> 8
      out[0] = out[1] = in[0];
      out[3] = out[4] = in[2];
      red_global_add_f32(reinterpret_cast<float*>(out), as_float(in[1]));
      out[2] = as_uint(atom_global_add_f32(reinterpret_cast<float*>(out + 1), as_float(in[1])));
      red_global_add_u32(out + 3, in[3]);
      out[5] = atom_global_add_u32(out + 4, in[3]);
      red_global_add_f32(reinterpret_cast<float*>(warp_out + 6), static_cast<float>(lane));
      red_global_add_u32(warp_out + 7, in[3]);
      break;
    case 29:  // packed_bf16 3 -> 4
      run_packed<__nv_bfloat162>(in, out);
      break;
    case 30:  // packed_fp16 3 -> 4
      run_packed<__half2>(in, out);
      break;
    case 31:  // conversions 1 -> 6
      out[0] = __bfloat16_as_ushort(__float2bfloat16_rn(as_float(in[0])));
      out[1] = __half_as_ushort(__float2half_rn(as_float(in[0])));
      out[2] = as_uint(__bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(in[0]))));
      out[3] = as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(in[0]))));
      out[4] = pun<uint32_t>(__floats2bfloat162_rn(as_float(in[0]), 1.0f));
      out[5] = pun<uint32_t>(__floats2half2_rn(as_float(in[0]), 1.0f));
      break;
    case 32:  // integers 3 -> 7
      out[0] = __popc(in[0]);
      out[1] = __ffs(static_cast<int>(in[0]));
      out[2] = __clz(static_cast<int>(in[0]));
      out[3] = __brev(in[0]);
      out[4] = __funnelshift_l(in[0], in[1], in[2]);
      out[5] = __funnelshift_r(in[0], in[1], in[2]);
      out[6] = static_cast<uint32_t>(__float2int_rn(as_float(in[0])));
      break;
    case 33:  // functions 1 -> 4
      out[0] = as_uint(expf(as_float(in[0])));
      out[1] = as_uint(exp2f(as_float(in[0])));
      out[2] = as_uint(logf(as_float(in[0])));
      out[3] = as_uint(rsqrtf(as_float(in[0])));
      break;
    case 34:  // smem_u32 1 -> 1
      out[0] = smem_u32(&smem.x[in[0] % 1024]) - smem_u32(&smem.x[0]);
      break;
    case 37:  // shared_words 6 -> 6
      st_shared_v4_u32(smem_u32(&smem.x[lane * 8]), make_uint4(in[0], in[1], in[2], in[3]));
      st_shared_f32(smem_u32(&smem.x[lane * 8 + 4]), as_float(in[4]));
      __syncwarp();
      out[0] = ld_shared_u32(smem_u32(&smem.x[(lane ^ 1) * 8 + 1]));
      out[1] = smem.x[(lane ^ 2) * 8 + 4];
      {
        const uint4 four = ld_shared_v4_u32(smem_u32(&smem.x[in[5] % WARP * 8]));
        out[2] = four.x, out[3] = four.y, out[4] = four.z, out[5] = four.w;
      }
      break;
    case 38:  // global_words 8 -> 13
      {
        const uint4 plain = ld_global_v4_u32(in), relaxed = ld_relaxed_gpu_v4_u32(in + 4);
        out[0] = plain.x, out[1] = plain.y, out[2] = plain.z, out[3] = plain.w;
        out[4] = relaxed.x, out[5] = relaxed.y, out[6] = relaxed.z, out[7] = relaxed.w;
        st_relaxed_gpu_u16(out + 8, static_cast<uint16_t>(in[0]));
        put(out + 9, ld_global_no_allocate_v4_u32(in + 4));
      }
      break;
#if HAS_E2M1
    case 35:  // cvt_rn_satfinite_e2m1x2_f32 2 -> 1 (sm_100)
      out[0] = cvt_rn_satfinite_e2m1x2_f32(as_float(in[0]), as_float(in[1]));
      break;
    case 36:  // cvt_rn_f16x2_e2m1x2 1 -> 1 (sm_100)
      out[0] = cvt_rn_f16x2_e2m1x2(static_cast<uint8_t>(in[0]));
      break;
#endif
    default:
      __trap();
  }
}

extern "C" const char* launch_step(const ConformanceArgs* args, cudaStream_t stream) {
  return launch(conformance, dim3(args->trials), dim3(WARP), sizeof(Smem), stream, *args);
}
