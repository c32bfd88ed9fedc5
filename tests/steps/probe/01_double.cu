// Change: the smallest step there can be, for the tests of building and launching.
// Prediction: every element doubles,
//   the last one too.
// Measured: never.
// Verdict: kept.
#include "common.cuh"

struct ProbeArgs {
  float* x;
  int32_t n, threads;
  int64_t smem_bytes;
};

__global__ void probe_double(const ProbeArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < args.n) args.x[i] *= 2.0f;
}

extern "C" const char* launch_step(const ProbeArgs* args, cudaStream_t stream) {
  return launch(probe_double, dim3(ceil_div(args->n, args->threads)), dim3(args->threads), args->smem_bytes, stream,
                *args);
}
