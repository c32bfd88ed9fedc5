// Change: a kernel that only reads. It is no step of a ladder: the read bandwidth that it reaches is what the memory-bound
//   steps are measured against.
// Prediction: with 16-byte loads, all of them independent, and enough of them in flight (Little's law), device memory
//   alone decides.
// Measured: in every run, as read_gbps of its row in the runs table.
// Verdict: a ceiling.
#include "../../common.cuh"
#include "../../ptx.cuh"

// Mirrored by ReadArgs in mila_kernels/bench.py. Reads `bytes` (a multiple of 16) at `data`; the XOR of all 32-bit words
// of each warp goes to `out` [blocks * WARPS], so that no load can be left out and each is checked.
struct ReadArgs {
  const void* data;
  uint32_t* out;
  int64_t bytes;
  int32_t blocks;
  int32_t unroll;  // 16-byte loads in flight a thread: 4, 8 or 16
};

constexpr int WARPS = 16, THREADS = WARPS * WARP;

DEVICE uint32_t fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

template <int UNROLL>
__global__ void __launch_bounds__(THREADS) read_all(const ReadArgs args) {
  const auto* data = static_cast<const uint4*>(args.data);
  const int64_t count = args.bytes / 16, tile = THREADS * UNROLL;
  uint32_t sum = 0;
  for (int64_t start = blockIdx.x * tile; start < count; start += gridDim.x * tile) {
    const int64_t first = start + threadIdx.x;
    if (start + tile <= count) {
      uint4 words[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) words[i] = ld_global_nc_no_allocate_v4_u32(data + first + i * THREADS);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) sum ^= fold(words[i]);
    } else {
      for (int64_t i = first; i < count; i += THREADS) sum ^= fold(ld_global_nc_no_allocate_v4_u32(data + i));
    }
  }
#pragma unroll
  for (int bit = WARP / 2; bit > 0; bit /= 2) sum ^= __shfl_xor_sync(ALL_LANES, sum, bit);
  if (threadIdx.x % WARP == 0) args.out[blockIdx.x * WARPS + threadIdx.x / WARP] = sum;
}

extern "C" const char* launch_step(const ReadArgs* args, cudaStream_t stream) {
  if (args->unroll == 4) return launch(read_all<4>, args->blocks, THREADS, 0, stream, *args);
  if (args->unroll == 8) return launch(read_all<8>, args->blocks, THREADS, 0, stream, *args);
  if (args->unroll == 16) return launch(read_all<16>, args->blocks, THREADS, 0, stream, *args);
  return "unroll must be 4, 8 or 16";
}
