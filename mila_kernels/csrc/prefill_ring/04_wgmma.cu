// Change: wgmma and tensor copies, as in FlashAttention-3. Two warpgroups own 64 rows each; a third one copies, two
//   tiles of K and of V ahead, across the end of a block's rows too: a block takes one tile of rows after another. The
//   scores of the next tile are under way with the values of this one; P stays in registers. The copies run through the
//   ring in order of positions; the tile that crosses its end, and values of which some are nobody's, are copied by the
//   warpgroup's threads, zeros in their place.
// Prediction: a tile of 64 keys is 2,048 clocks of products, and as many of shared memory at 128 bytes a clock. 17
//   tiles for 16 of useful work, and 128 turns of 124 that fill the SMs: 600 TFLOP/s at 2,600 clocks a tile.
// Measured: H200, 2026-12-01, prefill_ring/d256-16x8-w1024-n8192: 232 us, 557 TFLOP/s; n32768: 912 us, 594 TFLOP/s.
//   Error on the last 256 queries 2.217e-3 (step 02 2.214e-3, SDPA 2.223e-3). Counters: tensor cores work 69% of the
//   time, 74 million instructions (step 02: 156). By hand, not recorded: a tile takes 2,880 clocks at 1.7 GHz, and the
//   products never pause: 512 clocks of scores take 900, as Q and K ask for 128 bytes a clock and copies come too.
// Verdict: Kept. 2.1 times faster than step 02. Less than predicted at N 8192, for shared memory and power, which is
//   the limit when calls follow one another: there, by hand, 530 TFLOP/s. Against it: P summed only before rounding,
//   5% (64 instructions a thread and tile); 2 of 16 pieces of Q in registers, 1.5%; O's rescale for 8 rows at a time,
//   1%. No faster: 80 keys a tile (3% more are masked, and Q no longer fits), maxima and sums in four chains; slower by
//   5%: the two products interleaved. Maxima raised only where a score passes them by 2^8 give 566 TFLOP/s at an error
//   of 2.34e-3, more than SDPA's.
// Architectures: sm_90a
// Head dims: 64 128 256
// Instances: head_dim dtype
// Alignment: 16
// Predecessor: 02_row_split
#include "../hopper.cuh"
#include "args.cuh"

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int Br = CONSUMERS * 64;      // rows: the query heads of a KV head, token by token
constexpr int STAGES = 2;               // tiles of K, and of V
constexpr int64_t L2_BYTES = 24 << 20;  // of K and V, to be read again from L2
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
enum Barrier { PRODUCER_BARRIER = 1, TURN_BARRIER };

template <int HS>
constexpr int KEYS = HS == 256 ? 64 : 128;  // a tile
template <int HS>
constexpr int Q_KEPT = HS == 256 ? 2 : 0;  // products of 16 columns whose Q stays in registers

template <int HS>
struct Smem {
  static constexpr int Bc = KEYS<HS>;
  uint16_t q[HS / 64][Br][64];  // rows of 128 bytes, under the 128-byte swizzle, as K and V, which follow
  uint16_t kv[2][STAGES][HS / 64][Bc][64];
  uint16_t o[CONSUMERS * 4][8][HS];  // a warp's, on their way out
  uint64_t q_full[CONSUMERS], q_empty[CONSUMERS];
  uint64_t full[2][STAGES], empty[2][STAGES];
};

// Tiles of rows, one after another: `at_once` columns, each a group of heads that share a KV head and a sequence, are
// gone through together, of each the last rows first, so that the short bands of a prompt's first tokens fill the end.
struct Order {
  int log_heads, groups, of_kv_head, columns, at_once, tiles;  // of_kv_head: groups of one; tiles: of rows, a column
  DEVICE int count() const { return columns * tiles; }
};

// Tiles of rows that a block takes, forwards and backwards through the blocks in turn.
struct Turns {
  int round = 0;
  DEVICE bool next(const Order& order, int& item) {
    const int blocks = gridDim.x, block = blockIdx.x;
    item = round * blocks + (round % 2 ? blocks - 1 - block : block);
    ++round;
    return item < order.count();  // only the last round is not whole
  }
};

// A tile of rows, and the keys that one or another of them sees.
struct Rows {
  int batch, group, log_heads, token, position, begin, end, tiles;

  DEVICE Rows(const PrefillRingArgs& args, const Order& order, int item, int Bc) {
    const int part = item / (order.at_once * order.tiles), within = item - part * order.at_once * order.tiles;
    const int width = min(order.at_once, order.columns - part * order.at_once), tile = within / width;
    const int column = part * order.at_once + within - tile * width;
    batch = column / order.groups;
    group = column - batch * order.groups;
    log_heads = order.log_heads;
    token = (order.tiles - 1 - tile) * (Br >> log_heads);
    position = first_position(args, batch);
    begin = visible(args, 0).begin;
    end = visible(args, Br - 1).end;
    tiles = max(0, ceil_div(end - begin, Bc));
  }
  DEVICE int token_of(const PrefillRingArgs& args, int r) const {
    return min(token + (r >> log_heads), args.q_len - 1);
  }
  DEVICE int head_of(int r) const { return (group << log_heads) + (r & ((1 << log_heads) - 1)); }
  DEVICE bool live(const PrefillRingArgs& args, int r) const { return token + (r >> log_heads) < args.q_len; }
  DEVICE KeyRange visible(const PrefillRingArgs& args, int r) const {
    return visible_positions(args, position + token_of(args, r));
  }
};

// Which stage a tile lies in, and the parity of the stage's phase; tiles count over all of a block's rows.
DEVICE int stage_of(uint32_t tile) { return tile % STAGES; }
DEVICE uint32_t parity_of(uint32_t tile) { return tile / STAGES & 1; }

DEVICE float exp2_of_difference(float low, float high) {  // 1 where both are -inf
  return low == high ? 1.0f : ex2_approx_ftz(low - high);
}

// Gives back what a warp has read.
DEVICE void release(uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) mbarrier_arrive(smem_u32(&empty));
  __syncwarp();
}

// ---- copies ---------------------------------------------------------------------------------------------------------

// The warpgroup that copies. Its first warp waits for stages and issues tensor copies; the other three wait for tiles
// that all four copy.
template <typename T, int HS>
struct Producer {
  static constexpr int Bc = KEYS<HS>;
  Smem<HS>& smem;
  const CUtensorMap &q_map, &k_map, &v_map;
  const PrefillRingArgs& args;

  DEVICE bool leads() const { return threadIdx.x % WARPGROUP < WARP; }

  DEVICE void load_q(const Rows& rows, int half, uint32_t parity) {
    mbarrier_wait(smem_u32(&smem.q_empty[half]), parity ^ 1);
    if (threadIdx.x % WARP == 0) {
      const uint32_t full = smem_u32(&smem.q_full[half]);
      mbarrier_arrive_expect_tx(full, sizeof(smem.q) / CONSUMERS);
#pragma unroll 1
      for (int i = 0; i < HS / 64; ++i)
        cp_async_bulk_tensor_4d_g2s(smem_u32(smem.q[i][half * 64]), &q_map, i * 64, rows.head_of(half * 64),
                                    rows.token + (half * 64 >> rows.log_heads), rows.batch, full);
    }
    __syncwarp();
  }

  // The first `live` keys from `slot` on, in a ring, and zeros after them.
  DEVICE void copy(uint32_t to, const void* base, const int64_t (&stride)[3], int batch, int kv_head,
                   uint32_t slot, int live) {
    constexpr int PIECES = HS / 8, ROWS = WARPGROUP / PIECES;  // of 16 bytes, a row; rows at once
    const int thread = threadIdx.x % WARPGROUP, piece = thread % PIECES;
    const T* column = row<T>(base, stride, batch, 0, kv_head) + piece * 8;
    to += piece / 8 * (Bc * 128);
#pragma unroll 1
    for (int r = thread / PIECES; r < Bc; r += ROWS) {
      const uint32_t from = min(slot + r, slot + r - args.capacity);
      cp_async_cg_zfill(to + r * 128 + (piece ^ r) % 8 * 16, column + (r < live ? from * stride[1] : 0),
                        r < live ? 16 : 0);
    }
    cp_async_wait_all();
    fence_proxy_async_shared();
  }

  // K of tile 0, Q, K of 1, V of 0, K of 2, and so on. K's keys that are nobody's do no harm: their scores are masked.
  // V's are zeros: P is 0 there, and 0 times a NaN is not.
  DEVICE void run(const Order& order) {
    uint32_t before = 0, q_parity = 0;
    Turns turns;
    for (int item; turns.next(order, item);) {
      const Rows rows(args, order, item, Bc);
      const int kv_head = rows.group / order.of_kv_head;
      const uint32_t first_slot = static_cast<uint32_t>(rows.begin) % args.capacity;
#pragma unroll 1
      for (int i = 0; i < 2 * rows.tiles; ++i) {
        const bool is_v = i > 0 && (i % 2 == 0 || i == 2 * rows.tiles - 1);
        const int tile = is_v ? (i - 1) / 2 : (i + 1) / 2, live = min(Bc, rows.end - rows.begin - tile * Bc);
        const uint32_t at = before + tile, to = smem_u32(smem.kv[is_v][stage_of(at)]);
        const uint32_t full = smem_u32(&smem.full[is_v][stage_of(at)]);
        // The smaller, as unsigned numbers: a slot before the ring's end, minus its size, is very large.
        const uint32_t slot = min(first_slot + tile * Bc, first_slot + tile * Bc - args.capacity);
        const bool copied = slot + live > static_cast<uint32_t>(args.capacity) || (is_v && live < Bc);
        if (leads()) {
          mbarrier_wait(smem_u32(&smem.empty[is_v][stage_of(at)]), parity_of(at) ^ 1);
          if (!copied && threadIdx.x % WARP == 0) {
            mbarrier_arrive_expect_tx(full, sizeof(smem.kv[0][0]));
            cp_async_bulk_tensor_5d_g2s(to, is_v ? &v_map : &k_map, 0, slot, 0, kv_head, rows.batch, full);
          }
          __syncwarp();
          if (i == 0)
            for (int half = 0; half < CONSUMERS; ++half) load_q(rows, half, q_parity);
        }
        if (copied) {
          bar_sync(PRODUCER_BARRIER, WARPGROUP);
          copy(to, is_v ? args.v : args.k, is_v ? args.v_stride : args.k_stride, rows.batch, kv_head, slot, live);
          bar_sync(PRODUCER_BARRIER, WARPGROUP);
          if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(full);
          __syncwarp();
        }
      }
      before += rows.tiles;
      q_parity ^= rows.tiles > 0;
    }
  }
};

// ---- products -------------------------------------------------------------------------------------------------------

// A warpgroup's 64 rows.
template <typename T, int HS>
struct Consumer {
  static constexpr int Bc = KEYS<HS>;
  Smem<HS>& smem;
  const PrefillRingArgs& args;
  const int half;
  const float scale;  // of the scores, to base 2
  float largest[2], sum[2];
  uint32_t kept[Q_KEPT<HS> + 1][4];  // Q's fragments; an array of none is no array

  DEVICE int lane() const { return threadIdx.x % WARP; }
  DEVICE int warp() const { return threadIdx.x / WARP % 4; }
  DEVICE int row_of(int h) const { return half * 64 + warp() * 16 + lane() / 4 + 8 * h; }

  DEVICE void keep_q() {
    const int r = half * 64 + warp() * 16 + lane() % 16;
#pragma unroll
    for (int i = 0; i < Q_KEPT<HS>; ++i)
      ldmatrix_x4(kept[i], smem_u32(smem.q[i / 4][r]) + ((i % 4 * 2 + lane() / 16) ^ r % 8) * 16);
  }
  DEVICE void multiply_k(float (&s)[Bc / 2], uint32_t at) {
    const uint64_t q = wgmma_descriptor(smem_u32(&smem.q[0][half * 64]), 16, 1024, Swizzle::b128);
    const uint64_t k = wgmma_descriptor(smem_u32(smem.kv[0][stage_of(at)]), 16, 1024, Swizzle::b128);
#pragma unroll
    for (int i = 0; i < HS / 16; ++i) {
      const uint64_t columns = wgmma_advance(k, i / 4 * sizeof(smem.kv[0][0][0]) + i % 4 * 32);
      if (i < Q_KEPT<HS>)
        wgmma_k16<T, Bc>(s, kept[i < Q_KEPT<HS> ? i : 0], columns, i > 0);
      else
        wgmma_k16<T, Bc>(s, wgmma_advance(q, i / 4 * sizeof(smem.q[0]) + i % 4 * 32), columns, i > 0);
    }
    wgmma_commit_group();
  }
  DEVICE void multiply_v(float (&o)[HS / 2], const uint32_t (&p)[Bc / 16][4], uint32_t at) {
    const uint32_t values = smem_u32(smem.kv[1][stage_of(at)]);
    const uint64_t v = wgmma_descriptor(values, sizeof(smem.kv[0][0][0]), 1024, Swizzle::b128);
#pragma unroll
    for (int i = 0; i < Bc / 16; ++i) wgmma_k16<T, HS, Major::mn>(o, p[i], wgmma_advance(v, i * 2048), 1);
    wgmma_commit_group();
  }

  // Scores of keys from `key` on become P before it is rounded; what O is to be multiplied by.
  DEVICE void exponentials(float (&s)[Bc / 2], float (&factor)[2], const Rows& rows, int key) {
    if (args.scale < 0.0f)
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) s[i] = -s[i];
    // Keys that all rows see need no mask.
    if (key < rows.visible(args, Br - 1).begin || key + Bc > rows.visible(args, 0).end) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const KeyRange keys = rows.visible(args, row_of(h));
        const uint32_t first = key + 2 * (lane() % 4) - keys.begin, seen = max(0, keys.end - keys.begin);
#pragma unroll
        for (int j = 0; j < Bc / 4; ++j)
          if (first + j / 2 * 8 + j % 2 >= seen) s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int j = 1; j < Bc / 4; ++j) top = fmaxf(top, s[j / 2 * 4 + 2 * h + j % 2]);
      top = fmaxf(largest[h], warp_max<4>(top) * scale);
      factor[h] = exp2_of_difference(largest[h], top);
      sum[h] *= factor[h];
      largest[h] = top;
      const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
      for (int j = 0; j < Bc / 4; ++j) {
        float& x = s[j / 2 * 4 + 2 * h + j % 2];
        x = ex2_approx_ftz(fmaf(x, scale, -shift));
        sum[h] += x;
      }
    }
  }

  // Two accumulators of 8 keys are the A operand of 16.
  DEVICE void round(uint32_t (&p)[Bc / 16][4], const float (&s)[Bc / 2]) {
#pragma unroll
    for (int i = 0; i < Bc / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) p[i][j] = pack2<T>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
  }

  // Values of the tile before are in; O and P take the maximum of this one. At a loop's start: the compiler would begin
  // to wait before the exponentials, which belong under those values.
  DEVICE void settle(float (&o)[HS / 2], uint32_t (&p)[Bc / 16][4], const float (&s)[Bc / 2], const float (&factor)[2],
                     uint32_t at, bool any) {
    wgmma_wait_group<0>();
    if (any) release(smem.empty[1][stage_of(at)]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!__all_sync(ALL_LANES, factor[h] == 1.0f))
#pragma unroll
        for (int i = 0; i < HS / 4; ++i) o[i / 2 * 4 + 2 * h + i % 2] *= factor[h];
    round(p, s);
  }

  // The warpgroups issue their products in turn: one's exponentials lie under the other's products.
  DEVICE void turn_wait() { bar_sync(TURN_BARRIER + half, CONSUMERS * WARPGROUP); }
  DEVICE void turn_over() { bar_arrive(TURN_BARRIER + (half ^ 1), CONSUMERS * WARPGROUP); }

  DEVICE void run(const Order& order) {
    uint32_t before = 0, q_parity = 0;
    Turns turns;
    if (half == 1) turn_over();  // the other one's turn is the first
    for (int item; turns.next(order, item);) {
      const Rows rows(args, order, item, Bc);
      const int tiles = __shfl_sync(ALL_LANES, rows.tiles, 0);
      float o[HS / 2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        largest[h] = -INFINITY;
        sum[h] = 0.0f;
      }
      if (tiles > 0) {
        float s[Bc / 2], factor[2];
        uint32_t p[Bc / 16][4];
        mbarrier_wait(smem_u32(&smem.q_full[half]), q_parity);
        keep_q();
        mbarrier_wait(smem_u32(&smem.full[0][stage_of(before)]), parity_of(before));
        turn_wait();
        wgmma_fence();
        multiply_k(s, before);
        turn_over();
        wgmma_wait_group<0>();
        release(smem.empty[0][stage_of(before)]);
        exponentials(s, factor, rows, rows.begin);
        for (int tile = 1; tile < tiles; ++tile) {
          const uint32_t at = before + tile;
          settle(o, p, s, factor, at - 2, tile > 1);
          mbarrier_wait(smem_u32(&smem.full[0][stage_of(at)]), parity_of(at));
          mbarrier_wait(smem_u32(&smem.full[1][stage_of(at - 1)]), parity_of(at - 1));
          turn_wait();
          wgmma_fence();
          multiply_k(s, at);
          multiply_v(o, p, at - 1);
          turn_over();
          wgmma_wait_group<1>();
          release(smem.empty[0][stage_of(at)]);
          exponentials(s, factor, rows, rows.begin + tile * Bc);
        }
        settle(o, p, s, factor, before + tiles - 2, tiles > 1);
        const uint32_t at = before + tiles - 1;
        release(smem.q_empty[half]);
        mbarrier_wait(smem_u32(&smem.full[1][stage_of(at)]), parity_of(at));
        turn_wait();
        wgmma_fence();
        multiply_v(o, p, at);
        turn_over();
        wgmma_wait_group<0>();
        release(smem.empty[1][stage_of(at)]);
        q_parity ^= 1;
        before += tiles;
      }
      store(rows, o);
    }
    if (half == 0) turn_wait();  // nobody's any more
  }

  // A warp's rows through shared memory, 8 at a time, and their LSE. A lane knows where one row goes.
  DEVICE void store(const Rows& rows, const float (&o)[HS / 2]) {
    constexpr int PIECES = HS / 8, VECTORS = 8 * PIECES / WARP;
    uint16_t(*staged)[HS] = smem.o[half * 4 + warp()];
    const int g = lane() / 4, t = lane() % 4, mine = half * 64 + warp() * 16 + lane() % 16;
    const uint32_t live = __ballot_sync(ALL_LANES, rows.live(args, mine));
    const uint64_t to = reinterpret_cast<uint64_t>(
        row<T>(args.o, args.o_stride, rows.batch, rows.token_of(args, mine), rows.head_of(mine)));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = warp_sum<4>(sum[h]);
      const float inverse = sum[h] == 0.0f ? 0.0f : 1.0f / sum[h];
      __syncwarp();
#pragma unroll
      for (int j = 0; j < PIECES; ++j)
        *reinterpret_cast<uint32_t*>(&staged[g][(j ^ g) * 8 + 2 * t]) =
            pack2<T>(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * WARP + lane()) / PIECES, piece = (i * WARP + lane()) % PIECES;
        const uint4 vector = *reinterpret_cast<const uint4*>(&staged[at][(piece ^ at) * 8]);
        const uint64_t start = __shfl_sync(ALL_LANES, to, 8 * h + at);
        if (live >> (8 * h + at) & 1) reinterpret_cast<uint4*>(start)[piece] = vector;
      }
    }
    if (args.lse)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row_of(h);
        if (t == 0 && rows.live(args, r))
          args.lse[(static_cast<int64_t>(rows.batch) * args.q_heads + rows.head_of(r)) * args.q_len +
                   rows.token_of(args, r)] = largest[h] * LN2 + logf(sum[h]);
      }
    __syncwarp();
  }
};

template <typename T, int HS>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_ring_wgmma(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, const PrefillRingArgs args, const Order order) {
  const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);  // uniform, as the compiler sees now
  Smem<HS>& smem = dynamic_smem<Smem<HS>>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < CONSUMERS; ++i) {
      mbarrier_init(smem_u32(&smem.q_full[i]), 1);
      mbarrier_init(smem_u32(&smem.q_empty[i]), WARPGROUP / WARP);
    }
    for (int i = 0; i < STAGES; ++i) {
      for (int is_v = 0; is_v < 2; ++is_v) {
        mbarrier_init(smem_u32(&smem.full[is_v][i]), 1);
        mbarrier_init(smem_u32(&smem.empty[is_v][i]), CONSUMERS * WARPGROUP / WARP);
      }
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == CONSUMERS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    Producer<T, HS>{smem, q_map, k_map, v_map, args}.run(order);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const float scale = fmaxf(fabsf(args.scale), 1e-30f) * LOG2E;  // 0 times -inf would be NaN
    Consumer<T, HS>{smem, args, warpgroup, scale}.run(order);
  }
}

// A tensor copy's strides, in bytes, of token or slot, head and batch; along a dimension of one element any will do.
struct Strides {
  uint64_t token, head, batch;
};
inline Strides strides_of(const int64_t (&stride)[3], int batch, int tokens, int heads) {
  const auto bytes = [](int64_t elements, int size) { return size > 1 ? static_cast<uint64_t>(elements) * 2 : 16; };
  return {bytes(stride[1], tokens), bytes(stride[2], heads), bytes(stride[0], batch)};
}

// 0 where the driver does not tell.
inline int multiprocessors() {
#ifdef __CUDACC__
  int device = 0, count = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return known ? count : 0;
#else
  return 3;  // so that a block has several tiles of rows
#endif
}

template <typename T, int HS>
const char* launch_with(const PrefillRingArgs& args, cudaStream_t stream) {
  const int group = args.q_heads / args.kv_heads, heads = Br % group == 0 ? group : 1;
  const int groups = args.q_heads / heads, tiles = ceil_div(args.q_len, Br / heads), columns = groups * args.batch;
  int log_heads = 0;
  while (1 << log_heads < heads) ++log_heads;
  const int64_t items = static_cast<int64_t>(tiles) * columns;
  if (items > INT32_MAX - 1024) return "q_len x q_heads x batch must be below 2^37";
  const int64_t band = static_cast<int64_t>(args.window) + Br / heads;
  const int64_t fit = L2_BYTES / ((band < args.capacity ? band : args.capacity) * HS * 4);
  const int at_once = static_cast<int>(fit < 1 ? 1 : fit < columns ? fit : columns);
  const uint64_t batch = args.batch, q_len = args.q_len, q_heads = args.q_heads, kv_heads = args.kv_heads;
  const uint64_t capacity = args.capacity;
  const Strides q_stride = strides_of(args.q_stride, args.batch, args.q_len, args.q_heads);
  const Strides k_stride = strides_of(args.k_stride, args.batch, args.capacity, args.kv_heads);
  const Strides v_stride = strides_of(args.v_stride, args.batch, args.capacity, args.kv_heads);
  const uint32_t keys = KEYS<HS>, q_box = heads < 64 ? heads : 64;
  CUtensorMap q_map, k_map, v_map;
  const char* problem = make_tensor_map<T, 4>(&q_map, args.q, {HS, q_heads, q_len, batch},
                                              {q_stride.head, q_stride.token, q_stride.batch},
                                              {64, q_box, 64 / q_box, 1}, Swizzle::b128);
  if (!problem)
    problem = make_tensor_map<T, 5>(&k_map, args.k, {64, capacity, HS / 64, kv_heads, batch},
                                    {k_stride.token, 128, k_stride.head, k_stride.batch}, {64, keys, HS / 64, 1, 1},
                                    Swizzle::b128);
  if (!problem)
    problem = make_tensor_map<T, 5>(&v_map, args.v, {64, capacity, HS / 64, kv_heads, batch},
                                    {v_stride.token, 128, v_stride.head, v_stride.batch}, {64, keys, HS / 64, 1, 1},
                                    Swizzle::b128);
  if (problem) return problem;
  const int sms = multiprocessors(), blocks = items < sms ? static_cast<int>(items) : sms;
  if (sms == 0) return "the driver does not tell how many multiprocessors the device has";
  return launch(prefill_ring_wgmma<T, HS>, blocks, THREADS, sizeof(Smem<HS>), stream, q_map, k_map, v_map, args,
                Order{log_heads, groups, group / heads, columns, at_once, tiles});
}

template <typename T>
const char* launch_with(const PrefillRingArgs& args, cudaStream_t stream) {
  const auto run = [&]<int HS>() { return launch_with<T, HS>(args, stream); };
  if (args.head_dim == 64) return call_instance<T, 64>(run);
  if (args.head_dim == 128) return call_instance<T, 128>(run);
  return call_instance<T, 256>(run);
}

extern "C" const char* launch_step(const PrefillRingArgs* args, cudaStream_t stream) {
  return args->dtype == DTYPE_FP16 ? launch_with<fp16>(*args, stream) : launch_with<bf16>(*args, stream);
}
