// Change: small kernels that each ask one thing of the emulation.
// Prediction: none.
// Measured: never.
// Verdict: kept for the tests.
#include "ptx.cuh"

struct ProbeArgs {
  uint32_t* out;
  int64_t words;
  int32_t what, grid[3], block[3], smem_bytes;
};

__constant__ uint32_t TABLE[4] = {2, 3, 5, 7};
__device__ uint32_t calls;

// Every thread says who it is.
__global__ void indices(const ProbeArgs args) {
  const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
  args.out[block * threads + thread] = 1 + block * threads + thread;
}

__global__ void block_votes(const ProbeArgs args) {
  const int odd = threadIdx.x & 1;
  uint32_t* out = args.out + threadIdx.x * 6;
  out[0] = __syncthreads_count(odd);
  out[1] = __syncthreads_and(odd);
  out[2] = __syncthreads_or(odd);
  out[3] = __syncthreads_and(threadIdx.x < 64);
  out[4] = __syncthreads_or(threadIdx.x > 64);
  out[5] = __syncthreads_count(1);
}

__global__ void atomics(const ProbeArgs args) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t* shared = &dynamic_smem<uint32_t>();
  if (threadIdx.x < 2) shared[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(shared, 1u);
  atomicMax(shared + 1, i);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(args.out, shared[0]);
    atomicMax(args.out + 1, shared[1]);
  }
  atomicOr(args.out + 2, 1u << i % 32);
  atomicAdd(reinterpret_cast<float*>(args.out + 3), 1.0f);
  atomicAdd(reinterpret_cast<unsigned long long*>(args.out + 4), 1ull << 32);
  uint32_t seen = args.out[6], before;
  do before = seen, seen = atomicCAS(args.out + 6, before, before + 2);
  while (seen != before);
  atomicInc(args.out + 7, 9);
  // The last block to arrive sees what the others wrote.
  __threadfence();
  if (threadIdx.x == 0 && atomicAdd(args.out + 8, 1u) == gridDim.x - 1) {
    __threadfence();
    args.out[9] = args.out[0];
  }
}

// Both halves of a warp are at their own rendezvous at the same time.
__global__ void half_warps(const ProbeArgs args) {
  uint32_t* shared = &dynamic_smem<uint32_t>();
  const uint32_t lane = threadIdx.x % 32, mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  uint32_t x = threadIdx.x;
  for (uint32_t i = 0; i < (lane < 16 ? 3 : 7); ++i) {
    shared[threadIdx.x] = x;
    __syncwarp(mask);
    x = shared[threadIdx.x ^ 1] + __shfl_xor_sync(mask, x, 8);
    __syncwarp(mask);
  }
  args.out[threadIdx.x] = x;
}

__global__ void partial_warp(const ProbeArgs args) {
  args.out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, threadIdx.x, 1) + 100 * __popc(__ballot_sync(ALL_LANES, 1));
}

__global__ void fresh_memory(const ProbeArgs args) {
  args.out[threadIdx.x] = (&dynamic_smem<uint32_t>())[threadIdx.x];
}

__global__ void constants(const ProbeArgs args) {
  args.out[threadIdx.x] = TABLE[threadIdx.x % 4];
  if (threadIdx.x == 0) args.out[0] += atomicAdd(&calls, 0u);
  if (threadIdx.x == 1) calls = 0;
}

// Neighbouring bytes and halves belong to different threads: no race.
__global__ void neighbours(const ProbeArgs args) {
  uint8_t* bytes = &dynamic_smem<uint8_t>();
  uint16_t* halves = reinterpret_cast<uint16_t*>(bytes + 256);
  bytes[threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
  halves[threadIdx.x] = static_cast<uint16_t>(threadIdx.x);
  args.out[threadIdx.x] = bytes[threadIdx.x] + halves[threadIdx.x];
  bytes[threadIdx.x] = 1;
  halves[threadIdx.x] = 1;
  args.out[threadIdx.x] += bytes[threadIdx.x] + halves[threadIdx.x];
}

// What a shuffle does not do: order memory.
__global__ void shuffle_for_barrier(const ProbeArgs args) {
  uint32_t* shared = &dynamic_smem<uint32_t>();
  shared[threadIdx.x] = threadIdx.x;
  __shfl_sync(ALL_LANES, 0, 0);
  args.out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

// Written by a warp, read by another after the warp's own barrier only.
__global__ void warp_barrier_for_block(const ProbeArgs args) {
  uint32_t* shared = &dynamic_smem<uint32_t>();
  shared[threadIdx.x] = threadIdx.x;
  __syncwarp();
  args.out[threadIdx.x] = shared[threadIdx.x ^ 32];
}

__global__ void plain_and_atomic(const ProbeArgs args) {
  uint32_t* shared = &dynamic_smem<uint32_t>();
  if (threadIdx.x == 0) *shared = 0;
  __syncthreads();
  atomicAdd(shared, 1u);
  args.out[threadIdx.x] = *shared;
}

// A warp that waits for another by asking again and again, and one that never answers.
__global__ void endless_wait(const ProbeArgs args) {
  volatile uint32_t* flag = args.out;
  if (threadIdx.x >= 32)
    while (*flag == 0) __nanosleep(100);
  else if (args.words > 1)
    *flag = 1;
}

DEVICE void fill(uint32_t* local, int count) {
  for (int i = 0; i < count; ++i) local[i] = threadIdx.x + i;
}

// A thread's own arrays may be passed about.
__global__ void local_arrays(const ProbeArgs args) {
  uint32_t local[8];
  fill(local, 8);
  __syncthreads();
  uint32_t* chosen = &local[args.words % 8];
  args.out[threadIdx.x] = *chosen;
}

__global__ void wait_twice(const ProbeArgs args) {
  if (threadIdx.x % 32 == 31) __syncwarp(0xc0000000u);
  args.out[threadIdx.x] = 1;
}

__global__ void wild_store(const ProbeArgs args) {
  if (threadIdx.x == 5) reinterpret_cast<uint32_t*>(args.words)[0] = 1;
}

__global__ void wild_copy(const ProbeArgs args) {
  cp_async_cg(smem_u32(&dynamic_smem<uint4>() + threadIdx.x), reinterpret_cast<const void*>(args.words));
  cp_async_wait_all();
}

__attribute__((noinline)) uint32_t deep(volatile uint32_t* out, uint32_t level) {
  volatile uint32_t local[64];
  for (uint32_t i = 0; i < 64; ++i) local[i] = level + i;
  return level == 0 ? local[3] : deep(local, level - 1) + local[level % 64] + out[0];
}

__global__ void deep_stack(const ProbeArgs args) { args.out[threadIdx.x] = deep(args.out, args.words); }

extern "C" const char* launch_step(const ProbeArgs* args, cudaStream_t stream) {
  void (*const kernels[])(ProbeArgs) = {
      indices,    block_votes,         atomics,                half_warps,       partial_warp, fresh_memory, constants,
      neighbours, shuffle_for_barrier, warp_barrier_for_block, plain_and_atomic, endless_wait, local_arrays, wait_twice,
      wild_store, wild_copy,           deep_stack};
  return launch(kernels[args->what], dim3(args->grid[0], args->grid[1], args->grid[2]),
                dim3(args->block[0], args->block[1], args->block[2]), args->smem_bytes, stream, *args);
}
