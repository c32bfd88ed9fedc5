// Change: one kernel of ours on mma.sync.m16n8k32: codes of both matrices come by cp.async, weights become E4M3 between
//   shared memory and the tensor cores. A row's group has a table of eight products scale x value, and PRMT looks four
//   codes up in it at once. No scratch: the weight is read as FP4, 4.25 bits each.
// Prediction: on Ada and consumer Blackwell mma.sync has the FP8 rate, and the scratch's traffic is gone. On Hopper
//   ptxas makes two conversions and two 16-bit products of it: below the BF16 rate, 200 to 300 TFLOP/s.
// Measured: H200, 2026-11-29, all steps in one run, TFLOP/s: gate_up 1024 / 4096 148 / 148, fc_down 174 / 156. Error
//   2.7e-2.
// Verdict: kept, for sm_89 and sm_120, where it was not measured. On Hopper it is slower still than predicted.
// Architectures: sm_89 sm_90a sm_120
// Bound: 4e-2, scale x value is rounded to E4M3
#include "quantize.cuh"

constexpr int BN = 128, BM = 128, BK = GROUP;  // weight rows, tokens and columns of a tile
constexpr int WARPS_N = 4, WARPS_M = 2, THREADS = WARPS_N * WARPS_M * WARP;
constexpr int TN = BN / WARPS_N / 16, TM = BM / WARPS_M / 8;  // mma tiles of a warp
constexpr int STAGES = 3;
// Pitches that put the rows which a warp reads at once into different banks.
constexpr int X_PITCH = BK + 32, W_PITCH = BK / 2 + 16, Y_PITCH = BN + 8;

struct Stage {
  uint8_t x[BM][X_PITCH];
  uint8_t w[BN][W_PITCH];
};
struct Smem {
  union {
    Stage stages[STAGES];
    uint16_t y[BM][Y_PITCH];
  };
};

// Eight magnitudes times `factor` in E4M3: what a code's lower three bits select.
DEVICE uint2 product_table(float factor) {
  const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return to_e4m3(magnitudes, factor);
}

// Eight codes to E4M3, the first four in `low`.
DEVICE void decode(uint32_t& low, uint32_t& high, uint32_t q, const uint2& table) {
  // The sign of an even code is bit 3 of a byte, of an odd one bit 7: in sign mode PRMT spreads bit 7 over a byte.
  const uint32_t even = q << 4;
  low = prmt(table.x, table.y, q & 0x7777u) | (prmt(q, even, 0x9d8cu) & 0x80808080u);
  high = prmt(table.x, table.y, q >> 16 & 0x7777u) | (prmt(q, even, 0xbfaeu) & 0x80808080u);
}

DEVICE void fetch(Stage& stage, const GemmW4a8Args& args, int first_n, int first_m, int k) {
  for (int i = threadIdx.x; i < BM * BK / 16; i += THREADS) {
    const int row = i / (BK / 16), column = i % (BK / 16) * 16, m = min(first_m + row, args.m - 1);
    cp_async_cg(smem_u32(&stage.x[row][column]), args.x_codes + m * args.x_codes_stride + k + column);
  }
  for (int i = threadIdx.x; i < BN * BK / 32; i += THREADS) {
    const int row = i / (BK / 32), column = i % (BK / 32) * 16, n = min(first_n + row, args.n - 1);
    cp_async_cg(smem_u32(&stage.w[row][column]), args.w_codes + (static_cast<int64_t>(n) * args.k + k) / 2 + column);
  }
}

template <typename T, typename Scale>
__global__ void __launch_bounds__(THREADS) gemm_mma(const GemmW4a8Args args) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int warp_n = warp % WARPS_N * TN * 16, warp_m = warp / WARPS_N * TM * 8;
  const int first_n = blockIdx.x * BN, first_m = blockIdx.y * BM, groups = args.k / GROUP;
  const Scale* w_scales = static_cast<const Scale*>(args.w_scales);
  const float w_range = *args.w_range;
  Smem& smem = dynamic_smem<Smem>();

  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < groups) fetch(smem.stages[i], args, first_n, first_m, i * GROUP);
    cp_async_commit_group();
  }

  float acc_regs[TN][TM][4] = {};
  for (int group = 0; group < groups; ++group) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    const int next = group + STAGES - 1;
    if (next < groups) fetch(smem.stages[next % STAGES], args, first_n, first_m, next * GROUP);
    cp_async_commit_group();

    const Stage& stage = smem.stages[group % STAGES];
    uint2 tables[TN][2];
#pragma unroll
    for (int i = 0; i < TN; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t n = min(first_n + warp_n + i * 16 + half * 8 + g, args.n - 1);
        tables[i][half] = product_table(to_float(w_scales[n * groups + group]) / w_range);
      }
    // The order of columns within 32 is free, as long as both operands have the same: a lane takes eight in a row.
#pragma unroll
    for (int k = 0; k < BK; k += 32) {
      uint32_t a[TN][4];
#pragma unroll
      for (int i = 0; i < TN; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint8_t* codes = &stage.w[warp_n + i * 16 + half * 8 + g][k / 2 + t * 4];
          decode(a[i][half], a[i][half + 2], *reinterpret_cast<const uint32_t*>(codes), tables[i][half]);
        }
#pragma unroll
      for (int j = 0; j < TM; ++j) {
        const uint2 b = *reinterpret_cast<const uint2*>(&stage.x[warp_m + j * 8 + g][k + t * 8]);
#pragma unroll
        for (int i = 0; i < TN; ++i) mma_m16n8k32_e4m3(acc_regs[i][j], a[i], b.x, b.y);
      }
    }
  }

  cp_async_wait_all();
  __syncthreads();  // the last stage has been read: y takes its place
#pragma unroll
  for (int j = 0; j < TM; ++j)
#pragma unroll
    for (int i = 0; i < TN; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = warp_m + j * 8 + 2 * t + c % 2, column = warp_n + i * 16 + c / 2 * 8 + g;
        const int m = first_m + row, n = first_n + column;
        if (m >= args.m || n >= args.n) continue;
        const float bias = args.bias ? to_float(static_cast<const T*>(args.bias)[n]) : 0.0f;
        const T y = from_float<T>(fmaf(args.x_scales[m] * w_range, acc_regs[i][j][c], bias));
        smem.y[row][column] = reinterpret_cast<const uint16_t&>(y);
      }
  __syncthreads();
  const int rows = min(BM, args.m - first_m), columns = min(BN, args.n - first_n);
  for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
    const int row = i / columns, column = i % columns;
    static_cast<uint16_t*>(args.y)[(first_m + row) * args.y_stride + first_n + column] = smem.y[row][column];
  }
}

extern "C" const char* launch_step(const GemmW4a8Args* args, cudaStream_t stream) {
  if (args->phase == PHASE_QUANTIZE) return launch_quantize(*args, stream);
  const dim3 grid(ceil_div(args->n, BN), ceil_div(args->m, BM));
  return with_dtype(args->y_dtype, [&]<typename T>() {
    return with_scale(*args, [&]<typename Scale>() {
      return launch(gemm_mma<T, Scale>, grid, THREADS, sizeof(Smem), stream, *args);
    });
  });
}
