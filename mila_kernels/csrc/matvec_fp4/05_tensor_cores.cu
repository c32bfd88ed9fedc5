// Change: the weight is shuffled once, so that 16 bytes of a lane are the A operands of four mma.m16n8k16. A block owns 16
//   rows, its warps share the columns, x lies in shared memory as the B operand; up to 8 rows of x cost the same as one.
//   A code's sign and its three other bits go where BF16 has its sign and the bits around the exponent's lowest: the
//   value x 2^-126, as a BF16 subnormal or nearly so; one factor per group repairs the scale.
// Prediction: decoding costs 2 operations a weight and the products none, about 2.5 instructions in place of 6: three
//   times as fast, until the blocks' starts and ends, during which nothing is in flight, are what is left.
// Measured: 28.9 us on gate_up, 1.65 times as fast as step 03 (H200, 2026-11-29).
// Verdict: Kept. The starts and ends weigh more than predicted: a block lives for one tile.
// Instances: scale_dtype column_tiles
#include "args.cuh"

constexpr int WARPS = 15;  // 30 groups of k = 3840 are two each

template <int NT>
struct Smem {
  float y[WARPS][NT * 8][TILE_ROWS];
  bf16 x[8];  // the first of terms * m columns of x_pitch
};

// The word's four registers: the r-th nibbles from the top of its two halves.
DEVICE void decode(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const uint32_t codes = word << 4 * r;
    a[r] = (codes & 0x80008000u) | (codes & 0x70007000u) >> 6;
  }
}

template <typename Scale, int NT>
__global__ void __launch_bounds__(WARPS* WARP) matvec_tensor_cores(const MatvecFp4Args args, const int x_columns) {
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
  return with_scale(*args, LAYOUT_FRAGMENTS, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      const int x_columns = x_columns_that_fit(args->k, columns, 80 * 1024 - static_cast<int>(sizeof(Smem<NT>)));
      const size_t smem = sizeof(Smem<NT>) + x_smem_bytes(columns, x_columns);
      return launch(matvec_tensor_cores<Scale, NT>, ceil_div(args->n, TILE_ROWS), WARPS * WARP, smem, stream, *args,
                    x_columns);
    });
  });
}
