// Change: the bits of a word's eight codes lie where shifts and masks need them. A register wants bits 15, 8, 7 and 6 of
//   each half: the sign, and the three others around the lowest bit of a BF16 exponent. Four shifts of one word cannot
//   tile its 32 bits with that pattern; with the XOR of two shifts as the fourth register, the bits of the codes and the
//   bits of the word are one invertible system over GF(2), solved when the weight is shuffled.
// Prediction: 8 operations for 8 weights in place of 15, and two of the shifts are multiplications for the FMA pipe, where
//   LOP3 and SHF share one of half the rate: a third less on the busiest pipe.
// Measured: 24.5 us on gate_up, 15% faster; 13.3 on fc_down, 9.4 on local_qkv, 5.9 on local_o (H200, 2026-11-29).
// Verdict: Kept. The decode is no longer what a multiprocessor waits for most.
// Instances: scale_dtype column_tiles
#include "args.cuh"

constexpr int WARPS = 15;  // 30 groups of k = 3840 are two each

template <int NT>
struct Smem {
  float y[WARPS][NT * 8][TILE_ROWS];
  bf16 x[8];  // the first of terms * m columns of x_pitch
};

constexpr uint32_t BF16_BITS = 0x81c081c0u;

// The same as _unfold in mila_kernels/layouts.py, which solves for the word.
DEVICE void decode(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & BF16_BITS;
  a[1] = (word << 6) & BF16_BITS;
  a[2] = __funnelshift_l(word, word, 12) & BF16_BITS;
  a[3] = (word >> 6 ^ word << 2) & BF16_BITS;
}

template <typename Scale, int NT>
__global__ void __launch_bounds__(WARPS* WARP) matvec_folded_layout(const MatvecFp4Args args, const int x_columns) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int groups = args.k / GROUP, terms = terms_of(args.dtype), used = args.m * terms;
  const int64_t tile = blockIdx.x;
  const Scale* scales = static_cast<const Scale*>(args.scales);
  Smem<NT>& smem = dynamic_smem<Smem<NT>>();

  float y_regs[NT][4] = {};
  for (int begin = 0; begin < args.k; begin += x_columns) {
    const int columns = min(x_columns, args.k - begin), pitch = x_pitch(columns);
    if (begin > 0) __syncthreads();  // the last part of x has been read
    const Activations activations = {args.x, args.x_stride, args.dtype, args.m, begin, columns};
    activations.fetch(smem.x);
    const float restore = 0x1p126f / activations.finish(smem.x);

    for (int group = begin / GROUP + warp; group < (begin + columns) / GROUP; group += WARPS) {
      const int64_t unit = tile * groups + group;
      const uint8_t* codes = args.codes + unit * (TILE_ROWS * GROUP / 2) + lane * 16;
      const uint4 loaded[2] = {ld_global_nc_no_allocate_v4_u32(codes), ld_global_nc_no_allocate_v4_u32(codes + 512)};
      const float scale[2] = {to_float(scales[unit * TILE_ROWS + 2 * g]), to_float(scales[unit * TILE_ROWS + 2 * g + 1])};
      float sums[NT][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t words[4] = {loaded[half].x, loaded[half].y, loaded[half].z, loaded[half].w};
        const bf16* x = smem.x + (group * GROUP - begin) + half * 64 + t * 16;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint32_t a[4];
          decode(a, words[step]);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            // Columns past the last are copies of it, and dropped at the end.
            const uint2 b = *reinterpret_cast<const uint2*>(x + min(j * 8 + g, used - 1) * pitch + step * 4);
            mma_m16n8k16<bf16>(sums[j], a, b.x, b.y);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) y_regs[j][i] += sums[j][i] * restore * scale[i / 2];
    }
  }

#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) smem.y[warp][j * 8 + 2 * t + i % 2][g + i / 2 * 8] = y_regs[j][i];
  __syncthreads();
  for (int i = threadIdx.x; i < args.m * TILE_ROWS; i += blockDim.x) {
    const int row = i % TILE_ROWS, m = i / TILE_ROWS, n = static_cast<int>(tile) * TILE_ROWS + row;
    float sum = 0.0f;
    for (int from = 0; from < WARPS; ++from)
      for (int term = 0; term < terms; ++term) sum += smem.y[from][m * terms + term][row];
    if (n < args.n) store_y(args, m, n, sum);
  }
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      const int x_columns = x_columns_that_fit(args->k, columns, 80 * 1024 - static_cast<int>(sizeof(Smem<NT>)));
      const size_t smem = sizeof(Smem<NT>) + x_smem_bytes(columns, x_columns);
      return launch(matvec_folded_layout<Scale, NT>, ceil_div(args->n, TILE_ROWS), WARPS * WARP, smem, stream, *args,
                    x_columns);
    });
  });
}
