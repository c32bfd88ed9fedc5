// Change: the table is two byte permutes. A PRMT looks four nibbles up in eight bytes held in registers; one gives the
//   high bytes of the magnitudes in BF16, one the low bytes.
// Prediction: no port is shared any more, but a weight still costs about six instructions with unpacking, sign and two
//   multiplications, where an H200 affords three at its memory's speed: twice as fast as the table, about 25% of the limit.
// Measured: 53.7 us on gate_up, 7.7 times as fast; 112 to 18.4 us on local_qkv (H200, 2026-11-29).
// Verdict: Kept. More than the table's conflicts alone: a constant load has a latency that the permutes do not. 25% of the limit.
#include "args.cuh"

constexpr int WARPS = 8;     // rows a block
constexpr int PER_LANE = 8;  // weights a lane takes at a time: one word of codes

// The eight weights of a word as pairs of BF16, the first of a pair in the low half. Bit 3 of a selector's nibble asks
// PRMT for copies of a sign, and bit 3 of a code is its sign: the selectors are masked, and the sign is put in after.
DEVICE void decode(uint32_t (&pairs)[4], uint32_t q) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t selector = q >> 16 * half & 0x7777u;
    const uint32_t high = prmt(0x3f3f3f00u, 0x40404040u, selector);  // 0, 0.5, 1, 1.5, 2, 3, 4, 6
    const uint32_t low = prmt(0xc0800000u, 0xc0804000u, selector);
    pairs[2 * half] = prmt(low, high, 0x5140u);
    pairs[2 * half + 1] = prmt(low, high, 0x7362u);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t signs = q >> 8 * i;
    pairs[i] |= (signs << 12 & 0x8000u) | (signs << 24 & 0x80000000u);
  }
}

DEVICE float low_float(uint32_t bf16_pair) { return __uint_as_float(bf16_pair << 16); }
DEVICE float high_float(uint32_t bf16_pair) { return __uint_as_float(bf16_pair & 0xffff0000u); }

template <typename T, typename Scale>
__global__ void __launch_bounds__(WARPS* WARP) matvec_prmt_decode(const MatvecFp4Args args) {
  const int lane = threadIdx.x % WARP, n = blockIdx.x * WARPS + threadIdx.x / WARP, m = blockIdx.y;
  if (n >= args.n) return;
  const uint8_t* codes = args.codes + static_cast<int64_t>(n) * (args.k / 2);
  const Scale* scales = static_cast<const Scale*>(args.scales) + static_cast<int64_t>(n) * (args.k / GROUP);
  const T* x = static_cast<const T*>(args.x) + m * args.x_stride;

  float sum = 0.0f;
  for (int column = lane * PER_LANE; column < args.k; column += WARP * PER_LANE) {
    const uint32_t q = ld_global_nc_u32(codes + column / 2);
    const uint4 x_words = *reinterpret_cast<const uint4*>(x + column);
    const T* x_regs = reinterpret_cast<const T*>(&x_words);
    const float scale = to_float(scales[column / GROUP]);
    uint32_t pairs[PER_LANE / 2];
    decode(pairs, q);
#pragma unroll
    for (int i = 0; i < PER_LANE / 2; ++i) {
      sum += low_float(pairs[i]) * scale * to_float(x_regs[2 * i]);
      sum += high_float(pairs[i]) * scale * to_float(x_regs[2 * i + 1]);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) store_y<T>(args, m, n, sum);
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  return dispatch(*args, LAYOUT_ROWS, [&]<typename T, typename Scale>() {
    const dim3 grid(ceil_div(args->n, WARPS), args->m);
    return launch(matvec_prmt_decode<T, Scale>, grid, WARPS * WARP, 0, stream, *args);
  });
}
