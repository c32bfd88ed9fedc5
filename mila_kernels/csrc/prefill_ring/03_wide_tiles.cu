// Change: 128 rows and 64 keys a tile, Q in shared memory, and QK^T of the next tile between the products of PV of this
//   one, so that a warp has eight chains of scores and all of O's under way at once.
// Prediction: K and V are copied half as often, and the four chains of scores that a warp waited for at every fragment
//   are gone; Q is read again for every tile (an eighth more from shared memory). 10 to 15% faster.
// Measured: H200, 2026-11-29, prefill_ring/d256-16x8-w1024-n8192: 574 us, 224 TFLOP/s, 19% slower. By hand, not
//   recorded, with the two products one after the other 566 us, with 32 keys a tile 652 us; without the exponentials
//   515 us. Counters: tensor cores work 39% of the time (step 02: 45%), 27% of the clocks issue an instruction (36%).
// Verdict: Slower. The chains were not the wall. Q's fragments load the pipe that is already the busiest (warps wait
//   for ldmatrix 1.9 of every 6 clocks), and eight warps behind one barrier overlap less than two blocks of four.
// Architectures: sm_90a sm_100a
// Head dims: 64 128 256
// Alignment: 16
#include "../ptx.cuh"
#include "args.cuh"

constexpr int WARPS = 8;        // a block, 16 rows each
constexpr int Br = WARPS * 16;  // rows a block: tokens x query heads of one KV head
constexpr int Bc = 64;          // keys a tile
constexpr int STAGES = 2;       // tiles of K, and of V, in shared memory
constexpr float LOG2_E = 1.44269504f;

template <typename T, int HS>
struct Smem {
  T q[Br][HS];  // after the last tile, O
  T k[STAGES][Bc][HS];
  T v[STAGES][Bc][HS];
};

// Where the 16-byte vector at `column` of a row is kept, so that neighbouring rows of one column lie in different
// banks. Exclusive ors compose: swizzle(a + b, column) is swizzle(a, swizzle(b, column)) where a and b share no bit.
DEVICE int swizzle(int row, int column) { return column ^ (row % 8 * 8); }

// The address that ldmatrix.x4 takes for the 16 x 16 part at `row` and `column` of a tile, from the lane's for (0, 0).
template <int HS>
DEVICE uint32_t part_address(uint32_t lane_address, int row, int column) {
  return (lane_address ^ column % 64 * 2) + (row * HS + column / 64 * 64) * 2;
}

template <typename T, int HS>
__global__ void __launch_bounds__(WARPS* WARP, 1) prefill_ring_wide_tiles(const PrefillRingArgs args) {
  constexpr int VECTORS = HS / 8;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int g = lane / 4, t = lane % 4;  // an accumulator holds rows g and g + 8, columns 2t and 2t + 1
  // The lane's row and column of a 16 x 16 part for ldmatrix.x4, so that the registers of a fragment follow one
  // another: A, or B from rows that are its own, and B from rows that are its columns.
  const int part_row = lane % 16, part_column = lane / 16 * 8;
  const int key_row = lane / 16 * 8 + lane % 8, key_column = lane / 8 % 2 * 8;
  const int kv_head = blockIdx.x % args.kv_heads, batch = blockIdx.z, group = args.q_heads / args.kv_heads;
  // Last rows first: the short bands of a prompt's first tokens fill the SMs that the last wave leaves empty.
  const int first_row = (gridDim.x / args.kv_heads - 1 - blockIdx.x / args.kv_heads) * Br;
  const int rows = min(Br, args.q_len * group - first_row);
  Smem<T, HS>& smem = dynamic_smem<Smem<T, HS>>();

  // Row r of the block is one query head of one token.
  const auto token = [&](int r) { return (first_row + min(r, rows - 1)) / group; };
  const auto head = [&](int r) { return kv_head * group + (first_row + min(r, rows - 1)) % group; };

  // The maximum is taken of unscaled scores, so that the scale must be positive: Q takes its sign.
  const uint32_t sign = args.scale < 0.0f ? 0x80008000u : 0u;
  for (int i = threadIdx.x; i < Br * VECTORS; i += WARPS * WARP) {
    const int r = i / VECTORS, column = i % VECTORS * 8;
    uint4 q = *reinterpret_cast<const uint4*>(row<T>(args.q, args.q_stride, batch, token(r), head(r)) + column);
    q.x ^= sign, q.y ^= sign, q.z ^= sign, q.w ^= sign;
    *reinterpret_cast<uint4*>(&smem.q[r][swizzle(r, column)]) = q;
  }
  const float scale = fmaxf(fabsf(args.scale), 1e-30f);  // 0 times -inf would be NaN
  const float scale_log2 = scale * LOG2_E;

  const int position = first_position(args, batch);
  const KeyRange oldest_keys = visible_positions(args, position + token(0));
  const KeyRange newest_keys = visible_positions(args, position + token(Br - 1));
  const KeyRange block_keys = {oldest_keys.begin, newest_keys.end};

  // A thread copies one column of 16-byte vectors of each tile: its row of the first, and every COPY_ROWS-th after it.
  constexpr int COPY_ROWS = WARPS * WARP / VECTORS, TILE_BYTES = Bc * HS * 2;
  const int copy_row = threadIdx.x / VECTORS, copy_column = threadIdx.x % VECTORS * 8;
  const char* k_column = reinterpret_cast<const char*>(row<T>(args.k, args.k_stride, batch, 0, kv_head) + copy_column);
  const char* v_column = reinterpret_cast<const char*>(row<T>(args.v, args.v_stride, batch, 0, kv_head) + copy_column);
  const uint32_t copy_address = smem_u32(&smem.k[0][copy_row][swizzle(copy_row, copy_column)]);
  const uint32_t k_bytes = static_cast<uint32_t>(args.k_stride[1]) * 2;  // a slot
  const uint32_t v_bytes = static_cast<uint32_t>(args.v_stride[1]) * 2;
  const auto copy_tile = [&](int tile, uint32_t slot_of_tile, uint32_t to, const char* column, uint32_t slot_bytes) {
    if (tile >= block_keys.end) return;
    const int live = block_keys.end - tile - copy_row;  // of the rows from the thread's first on
    const uint32_t first = slot_of_tile + copy_row;
#pragma unroll
    for (int i = 0; i < Bc; i += COPY_ROWS) {
      // The smaller, as unsigned numbers: a slot before the ring's end, minus its size, is very large.
      const uint32_t slot = min(first + i, first + i - args.capacity);
      const uint32_t read = i < live ? 16 : 0;  // else zeros: P is 0 there, and 0 times NaN is not
      cp_async_cg_zfill((to ^ i % 8 * 16) + i * HS * 2, column + static_cast<uint64_t>(slot) * slot_bytes, read);
    }
  };
  // Values, and the keys of the tile after them.
  uint32_t slot = block_keys.begin % args.capacity;
  const auto copy_pair = [&](int tile, int stage) {
    const uint32_t next_slot = min(slot + Bc, slot + Bc - args.capacity);  // if there is one, capacity > Bc
    copy_tile(tile + Bc, next_slot, copy_address + (stage ^ 1) * TILE_BYTES, k_column, k_bytes);
    copy_tile(tile, slot, copy_address + (STAGES + stage) * TILE_BYTES, v_column, v_bytes);
    cp_async_commit_group();
    slot = next_slot;
  };
  copy_tile(block_keys.begin, slot, copy_address, k_column, k_bytes);
  cp_async_commit_group();
  copy_pair(block_keys.begin, 0);

  float o_regs[HS / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};  // of the unscaled scores; the sum of this lane's keys
  const uint32_t k_lane = smem_u32(&smem.k[0][key_row][swizzle(key_row, key_column)]);
  const uint32_t v_lane = smem_u32(&smem.v[0][part_row][swizzle(part_row, part_column)]);
  const uint32_t q_address = smem_u32(&smem.q[warp * 16 + part_row][swizzle(part_row, part_column)]);
  const auto score_step = [&](float (&s_regs)[Bc / 8][4], uint32_t k_address, int k) {
    uint32_t q_regs[4];
    ldmatrix_x4(q_regs, part_address<HS>(q_address, 0, k * 16));
#pragma unroll
    for (int n = 0; n < Bc; n += 16) {
      uint32_t k_regs[4];
      ldmatrix_x4(k_regs, part_address<HS>(k_address, n, k * 16));
      mma_m16n8k16<T>(s_regs[n / 8], q_regs, k_regs[0], k_regs[1]);
      mma_m16n8k16<T>(s_regs[n / 8 + 1], q_regs, k_regs[2], k_regs[3]);
    }
  };
  uint32_t p_regs[Bc / 16][4];
  const auto value_step = [&](uint32_t v_address, int k, int n) {
    uint32_t v_regs[4];
    ldmatrix_x4_trans(v_regs, part_address<HS>(v_address, k * 16, n * 16));
    mma_m16n8k16<T>(o_regs[2 * n], p_regs[k], v_regs[0], v_regs[1]);
    mma_m16n8k16<T>(o_regs[2 * n + 1], p_regs[k], v_regs[2], v_regs[3]);
  };

  float s_regs[Bc / 8][4] = {};
  cp_async_wait_group<1>();
  __syncthreads();  // Q and the first keys are there
  if (block_keys.begin < block_keys.end)
#pragma unroll
    for (int k = 0; k < HS / 16; ++k) score_step(s_regs, k_lane, k);
  int stage = 0;
  for (int tile = block_keys.begin; tile < block_keys.end; tile += Bc) {
    if (tile < newest_keys.end - args.window || tile + Bc > oldest_keys.end) {  // not all rows see all of the tile
      const KeyRange keys[2] = {visible_positions(args, position + token(warp * 16 + g)),
                                visible_positions(args, position + token(warp * 16 + g + 8))};
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = tile + n * 8 + 2 * t + i % 2;
          if (key < keys[i / 2].begin || key >= keys[i / 2].end) s_regs[n][i] = -INFINITY;
        }
    }
    float new_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n) {
      new_max[0] = fmaxf(new_max[0], fmaxf(s_regs[n][0], s_regs[n][1]));
      new_max[1] = fmaxf(new_max[1], fmaxf(s_regs[n][2], s_regs[n][3]));
    }
    new_max[0] = warp_max<4>(new_max[0]);  // the 4 lanes that share the row
    new_max[1] = warp_max<4>(new_max[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      new_max[half] = fmaxf(new_max[half], row_max[half]);
      if (__all_sync(ALL_LANES, new_max[half] == row_max[half])) continue;
      const float rescale = new_max[half] == -INFINITY ? 1.0f : exp2f((row_max[half] - new_max[half]) * scale_log2);
      row_max[half] = new_max[half];
      row_sum[half] *= rescale;
#pragma unroll
      for (int n = 0; n < HS / 8; ++n) {
        o_regs[n][2 * half] *= rescale;
        o_regs[n][2 * half + 1] *= rescale;
      }
    }

    // While no key was visible the maximum is -inf, and exp2(-inf - -inf) would be NaN.
    const float shift[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0] * scale_log2,
                            row_max[1] == -INFINITY ? 0.0f : row_max[1] * scale_log2};
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s_regs[n][i] = ex2_approx_ftz(s_regs[n][i] * scale_log2 - shift[i / 2]);
        row_sum[i / 2] += s_regs[n][i];
      }

#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)  // two accumulators of 8 keys are the A fragment of 16
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p_regs[k][i] = pack2<T>(s_regs[2 * k + i / 2][i % 2 * 2], s_regs[2 * k + i / 2][i % 2 * 2 + 1]);

    cp_async_wait_all();
    __syncthreads();  // these values and the next keys are there; these keys and the last values have been read
    copy_pair(tile + Bc, stage ^ 1);
    const uint32_t v_address = v_lane + stage * TILE_BYTES;
    if (tile + Bc < block_keys.end) {
      const uint32_t k_address = k_lane + (stage ^ 1) * TILE_BYTES;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s_regs[n][i] = 0.0f;
#pragma unroll
      for (int k = 0; k < HS / 16; ++k) {
        score_step(s_regs, k_address, k);
#pragma unroll
        for (int i = k * (Bc / 16); i < (k + 1) * (Bc / 16); ++i) value_step(v_address, i / (HS / 16), i % (HS / 16));
      }
    } else {
#pragma unroll
      for (int i = 0; i < Bc / 16 * (HS / 16); ++i) value_step(v_address, i / (HS / 16), i % (HS / 16));
    }
    stage ^= 1;
  }
  cp_async_wait_all();
  __syncthreads();  // Q has been read: O takes its place

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp * 16 + g + 8 * half;
    const float sum = warp_sum<4>(row_sum[half]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int n = 0; n < HS / 8; ++n)
      *reinterpret_cast<uint32_t*>(&smem.q[r][swizzle(r, n * 8) + 2 * t]) =
          pack2<T>(o_regs[n][2 * half] * inverse, o_regs[n][2 * half + 1] * inverse);
    if (args.lse && t == 0 && r < rows)
      args.lse[(static_cast<int64_t>(batch) * args.q_heads + head(r)) * args.q_len + token(r)] =
          row_max[half] * scale + logf(sum);
  }
  __syncwarp();  // a warp stores its own rows, 16 bytes a lane
  for (int i = lane; i < 16 * VECTORS; i += WARP) {
    const int r = warp * 16 + i / VECTORS, column = i % VECTORS * 8;
    if (r < rows)
      *reinterpret_cast<uint4*>(row<T>(args.o, args.o_stride, batch, token(r), head(r)) + column) =
          *reinterpret_cast<const uint4*>(&smem.q[r][swizzle(r, column)]);
  }
}

template <typename T>
const char* launch_with(const PrefillRingArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.q_len * (args.q_heads / args.kv_heads), Br) * args.kv_heads, 1, args.batch);
  const auto run = [&]<int HS>() {
    return launch(prefill_ring_wide_tiles<T, HS>, grid, WARPS * WARP, sizeof(Smem<T, HS>), stream, args);
  };
  if (args.head_dim == 64) return run.template operator()<64>();
  if (args.head_dim == 128) return run.template operator()<128>();
  return run.template operator()<256>();
}

extern "C" const char* launch_step(const PrefillRingArgs* args, cudaStream_t stream) {
  if ((args->k_stride[1] | args->v_stride[1]) >> 31) return "k, v: a slot's stride must be below 2^31 elements";
  return args->dtype == DTYPE_FP16 ? launch_with<fp16>(*args, stream) : launch_with<bf16>(*args, stream);
}
