// Change: rows split over the warps, as in FlashAttention-2: at head dim 256 a warp holds O of 16 rows in its
//   registers, and most of Q, so scores, softmax and P never leave them. The query heads of a KV head are packed into
//   the rows of a block; K and V come one tile ahead into swizzled buffers; one exponential a score, with the scale
//   folded into its argument; O is rescaled only where a maximum moved; only the band's edge tiles are masked.
// Prediction: one barrier a tile in place of three, no partial scores. A warp reads all of K and V from shared memory:
//   64 KB a tile of 32 keys and 64 rows at 128 bytes a clock is as long as its products on mma.sync, so about two
//   thirds of that rate: 300 TFLOP/s on the H200, over four times the step before.
// Measured: H200, 2026-11-29, prefill_ring/d256-16x8-w1024-n8192: 484 us, 266 TFLOP/s; n32768: 1,888 us, 287 TFLOP/s.
//   Error 2.1e-3, as step 01. By hand, not recorded: with all of Q in registers 479 us, without the exponentials and
//   rescales 441 us; three things were worth 45 us together: K's fragments in neighbouring registers (two to four moves
//   each before), row addresses as one wide multiplication, the last rows first. Counters: tensor cores work 45% of the
//   time; of every 5.5 clocks a warp waits 1.1 for shared memory and 2 for the instruction before.
// Verdict: Kept. 3.7 times faster than step 01. It joins several ideas: the row split is the one that they are for, and
//   the others are those that the prefill steps 09 to 14 tried one by one. O must be rescaled whenever a maximum moves:
//   letting scores pass it by up to 2^8 saves 17 us by hand and costs a tenth in error (2.3e-3), because P's largest
//   element is no longer exactly 1. 3 stages or 8 warps a block: the same within 3%, or slower.
// Head dims: 64 128 256
// Alignment: 16
#include "../ptx.cuh"
#include "args.cuh"

constexpr int WARPS = 4;        // a block, 16 rows each
constexpr int BLOCKS = 2;       // an SM, where its shared memory allows
constexpr int Br = WARPS * 16;  // rows a block: tokens x query heads of one KV head
constexpr int Bc = 32;          // keys a tile
constexpr int STAGES = 2;       // tiles of K and V in shared memory
constexpr float LOG2_E = 1.44269504f;

template <typename T, int HS>
struct Tiles {
  T k[STAGES][Bc][HS];
  T v[STAGES][Bc][HS];
};

// Fragments of Q, 16 columns each, that a thread keeps in registers. With all 16 of head dim 256 some architectures
// spill, so a thread keeps two of them in shared memory.
template <int HS>
constexpr int Q_KEPT = HS / 16 < 14 ? HS / 16 : 14;
template <int HS>
constexpr int Q_REST = HS / 16 > 14 ? HS / 16 - 14 : 1;

template <typename T, int HS>
struct Smem {
  union {
    T q[Br][HS];  // before the first tile
    Tiles<T, HS> tiles;
    T o[Br][HS];  // after the last
  };
  uint4 q_rest[Q_REST<HS>][WARPS * WARP];  // a thread's other fragments; it alone reads them
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
__global__ void __launch_bounds__(WARPS* WARP, BLOCKS) prefill_ring_row_split(const PrefillRingArgs args) {
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
  Tiles<T, HS>& tiles = smem.tiles;

  // Row r of the block is one query head of one token.
  const auto token = [&](int r) { return (first_row + min(r, rows - 1)) / group; };
  const auto head = [&](int r) { return kv_head * group + (first_row + min(r, rows - 1)) % group; };

  for (int i = threadIdx.x; i < Br * VECTORS; i += WARPS * WARP) {
    const int r = i / VECTORS, column = i % VECTORS * 8;
    cp_async_cg(smem_u32(&smem.q[r][swizzle(r, column)]),
                row<T>(args.q, args.q_stride, batch, token(r), head(r)) + column);
  }
  cp_async_wait_all();
  __syncthreads();
  uint32_t q_regs[Q_KEPT<HS>][4];
  // The maximum is taken of unscaled scores, so that the scale must be positive: Q takes its sign.
  const uint32_t sign = args.scale < 0.0f ? 0x80008000u : 0u;
#pragma unroll
  for (int k = 0; k < HS / 16; ++k) {
    const int r = warp * 16 + part_row;
    uint32_t fragment[4];
    ldmatrix_x4(fragment, smem_u32(&smem.q[r][swizzle(r, k * 16 + part_column)]));
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] ^= sign;
    if (k < Q_KEPT<HS>)
#pragma unroll
      for (int i = 0; i < 4; ++i) q_regs[k][i] = fragment[i];
    else
      smem.q_rest[k - Q_KEPT<HS>][threadIdx.x] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
  }
  __syncthreads();
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
  const uint32_t copy_address = smem_u32(&tiles.k[0][copy_row][swizzle(copy_row, copy_column)]);
  const uint32_t k_bytes = static_cast<uint32_t>(args.k_stride[1]) * 2;  // a slot
  const uint32_t v_bytes = static_cast<uint32_t>(args.v_stride[1]) * 2;
  int copy_tile = block_keys.begin;
  uint32_t copy_slot = (copy_tile + copy_row) % args.capacity;
  const auto copy_next_tiles = [&](int stage) {  // one group, empty after the last tile
    if (copy_tile < block_keys.end) {
      const int live = block_keys.end - copy_tile - copy_row;  // of the rows from the thread's first on
#pragma unroll
      for (int i = 0; i < Bc; i += COPY_ROWS) {
        // The smaller, as unsigned numbers: a slot before the ring's end, minus its size, is very large.
        const uint32_t slot = min(copy_slot + i, copy_slot + i - args.capacity);
        const uint32_t to = (copy_address ^ i % 8 * 16) + stage * TILE_BYTES + i * HS * 2;
        const uint32_t read = i < live ? 16 : 0;  // else zeros: P is 0 there, and 0 times NaN is not
        cp_async_cg_zfill(to, k_column + static_cast<uint64_t>(slot) * k_bytes, read);
        cp_async_cg_zfill(to + STAGES * TILE_BYTES, v_column + static_cast<uint64_t>(slot) * v_bytes, read);
      }
    }
    cp_async_commit_group();
    copy_tile += Bc;
    copy_slot = min(copy_slot + Bc, copy_slot + Bc - args.capacity);  // a second tile: the ring is larger than one
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy_next_tiles(stage);

  float o_regs[HS / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};  // of the unscaled scores; the sum of this lane's keys
  const uint32_t k_lane = smem_u32(&tiles.k[0][key_row][swizzle(key_row, key_column)]);
  const uint32_t v_lane = smem_u32(&tiles.v[0][part_row][swizzle(part_row, part_column)]);
  int stage = 0;
  for (int tile = block_keys.begin; tile < block_keys.end; tile += Bc) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // this tile is there, and the last one has been read
    copy_next_tiles(stage == 0 ? STAGES - 1 : stage - 1);
    const uint32_t k_address = k_lane + stage * TILE_BYTES, v_address = v_lane + stage * TILE_BYTES;

    float s_regs[Bc / 8][4] = {};
#pragma unroll
    for (int k = 0; k < HS / 16; ++k) {
      const uint4 rest = k < Q_KEPT<HS> ? make_uint4(q_regs[k][0], q_regs[k][1], q_regs[k][2], q_regs[k][3])
                                        : smem.q_rest[k - Q_KEPT<HS>][threadIdx.x];
      const uint32_t fragment[4] = {rest.x, rest.y, rest.z, rest.w};
#pragma unroll
      for (int n = 0; n < Bc; n += 16) {
        uint32_t k_regs[4];
        ldmatrix_x4(k_regs, part_address<HS>(k_address, n, k * 16));
        mma_m16n8k16<T>(s_regs[n / 8], fragment, k_regs[0], k_regs[1]);
        mma_m16n8k16<T>(s_regs[n / 8 + 1], fragment, k_regs[2], k_regs[3]);
      }
    }

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
    for (int k = 0; k < Bc / 16; ++k) {
      // Two accumulators of 8 keys are the A fragment of 16.
      const uint32_t p_regs[4] = {
          pack2<T>(s_regs[2 * k][0], s_regs[2 * k][1]), pack2<T>(s_regs[2 * k][2], s_regs[2 * k][3]),
          pack2<T>(s_regs[2 * k + 1][0], s_regs[2 * k + 1][1]), pack2<T>(s_regs[2 * k + 1][2], s_regs[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < HS / 8; n += 2) {
        uint32_t v_regs[4];
        ldmatrix_x4_trans(v_regs, part_address<HS>(v_address, k * 16, n * 8));
        mma_m16n8k16<T>(o_regs[n], p_regs, v_regs[0], v_regs[1]);
        mma_m16n8k16<T>(o_regs[n + 1], p_regs, v_regs[2], v_regs[3]);
      }
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  cp_async_wait_all();
  __syncthreads();  // the last tile has been read: O may take its place

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp * 16 + g + 8 * half;
    const float sum = warp_sum<4>(row_sum[half]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int n = 0; n < HS / 8; ++n)
      *reinterpret_cast<uint32_t*>(&smem.o[r][swizzle(r, n * 8) + 2 * t]) =
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
          *reinterpret_cast<const uint4*>(&smem.o[r][swizzle(r, column)]);
  }
}

template <typename T>
const char* launch_with(const PrefillRingArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.q_len * (args.q_heads / args.kv_heads), Br) * args.kv_heads, 1, args.batch);
  const auto run = [&]<int HS>() {
    return launch(prefill_ring_row_split<T, HS>, grid, WARPS * WARP, sizeof(Smem<T, HS>), stream, args);
  };
  if (args.head_dim == 64) return run.template operator()<64>();
  if (args.head_dim == 128) return run.template operator()<128>();
  return run.template operator()<256>();
}

extern "C" const char* launch_step(const PrefillRingArgs* args, cudaStream_t stream) {
  if ((args->k_stride[1] | args->v_stride[1]) >> 31) return "k, v: a slot's stride must be below 2^31 elements";
  return args->dtype == DTYPE_FP16 ? launch_with<fp16>(*args, stream) : launch_with<bf16>(*args, stream);
}
