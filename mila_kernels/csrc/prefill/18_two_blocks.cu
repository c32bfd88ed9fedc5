// Change: two blocks of a cluster own 128 rows, on wgmma and tensor copies. Of 128 keys each block takes the scores
//   of 64 and sends its P to the other through shared memory; each sums the values of all 128 into half of O's columns.
//   Two warpgroups take scores, two sum. A row's P and O are over 2^e with a whole e, which a block raises by itself
//   where a score passes it by 8; O and P are brought to one e only where the two differ.
// Prediction: K and V come half as often to an SM as to one block that owns 64 rows: 32 bytes a clock of the 62 that
//   tensor copies bring. A tile is 4,096 clocks of products, and 616 KB through shared memory, 4,800 clocks at 128
//   bytes. 550 TFLOP/s at N 8192, causal: twice step 15, as far as FFPA's 547.
// Measured: H200, 2026-12-01, prefill/published-instance: 0.116 ms, 2.3 times faster than step 15. 16 heads on 1, N
//   4096 / 8192 / 16384: 567 / 645 / 629 TFLOP/s (step 15: 272 / 287 / 294), 8 on 4, N 8192: 652 (285), 32 on 32, not
//   causal: 612 (261). Error at N 8192 2.33e-3 (step 15 and SDPA: 2.28e-3), as P's largest element is not exactly 1. By
//   hand: a tile takes 5,550 clocks; one call after another at 700 W runs at 1,500 MHz. With pieces of 8 KB in place of
//   16, and addresses worked out in the loop over them, 9,900 clocks. P summed after it is rounded, too: up to 3%
//   slower (558 / 650 / 610, 629 and 602 in the recorded run before), the error the same.
// Verdict: kept. Better than predicted while the GPU is cold; then power is the limit, not the 4,800 clocks of shared
//   memory. Left: without a piece of the next scores issued before P is written, 1 to 3% faster than with one or two. A
//   row's exponent raised to every maximum would bring both blocks' P together in nearly every tile: 475 TFLOP/s in
//   place of 619 by hand, and an error of 2.31e-3 still, as the other block's P is rounded twice.
// Architectures: sm_90a
// Head dims: 512
// Predecessor: 15_split_qk
// Alignment: 16
#include "../hopper.cuh"
#include "args.cuh"

constexpr int WARPGROUP = 128;
constexpr int HS = 512;
constexpr int BLOCKS = 2;                // of a cluster
constexpr int Br = 128;                  // rows a cluster: the query heads of a KV head, token by token
constexpr int HALVES = Br / 64;          // of the rows: a warpgroup's scores, and another's sums
constexpr int Bc = 64;                   // keys a block takes the scores of, in a tile
constexpr int TILE = BLOCKS * Bc;        // keys a tile
constexpr int COLUMNS = HS / BLOCKS;     // of O, a block
constexpr int STAGES = 4;                // the pieces of a block's K, or V, of a tile
constexpr int K_COLUMNS = HS / STAGES;   // of 64 keys, in a piece
constexpr int V_KEYS = TILE / STAGES;    // of 256 columns
constexpr int SCORES = HALVES * WARPGROUP, SUMS = HALVES * WARPGROUP, THREADS = SCORES + SUMS;
constexpr int SCORES_REGISTERS = 96, SUMS_REGISTERS = 160;
constexpr int SLACK = 8;                 // P reaches 2^SLACK before a row's exponent is raised
constexpr int64_t L2_BYTES = 24 << 20;   // of K and V, to be read again from L2
constexpr float LOG2E = 1.4426950408889634f;
enum Barrier { SCORES_BARRIER = 1, SUMS_BARRIER = SCORES_BARRIER + HALVES };

struct Smem {
  uint16_t q[HS / 64][Br][64];           // rows of 128 bytes, under the 128-byte swizzle, as all that follows
  union {
    uint16_t k[K_COLUMNS / 64][Bc][64];
    uint16_t v[COLUMNS / 64][V_KEYS][64];
  } stages[STAGES];
  uint16_t p[BLOCKS][HALVES][64][Bc];    // of this block's keys, and of the other's
  float exponent[BLOCKS][HALVES][64];    // P is what it stands for / 2^exponent
  float agreed[HALVES][64];              // the exponent of O
  float sum[BLOCKS][HALVES][64];
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64_t p_full[HALVES], p_empty[HALVES], sent[HALVES], cleared;
};

// The rows of a cluster: `heads` of the query heads that share a KV head, and as many tokens as fill them.
struct Rows {
  int batch, head, heads, token;
  DEVICE int token_of(const PrefillArgs& args, int r) const {
    return min(token + (r >> log2_exact(heads)), args.q_len - 1);
  }
  DEVICE int head_of(int r) const { return head + (r & (heads - 1)); }
  DEVICE bool live(const PrefillArgs& args, int r) const { return token + (r >> log2_exact(heads)) < args.q_len; }
};

// Clusters that run at one time share K and V: `at_once` columns, each a group of `heads` and a sequence, are gone
// through together, of each the longest rows of the causal triangle first, so that short ones fill the end.
struct Order {
  int heads, groups, columns, at_once, tiles;  // tiles: of rows, a column

  DEVICE Rows rows(const PrefillArgs& args, int cluster) const {
    const int part = cluster / (at_once * tiles), within = cluster % (at_once * tiles);
    const int width = min(at_once, columns - part * at_once), column = part * at_once + within % width;
    return {column / groups, column % groups * heads, heads, (tiles - 1 - within / width) * (Br / heads)};
  }
};

DEVICE float exp2_of_difference(float low, float high) {  // 1 where both are -inf
  return low == high ? 1.0f : ex2_approx_ftz(low - high);
}

template <typename T>
DEVICE float2 unpack2(uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>)
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  else
    return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// The copies, in the order in which they are read: K of tiles 0 and 1, V of 0, K of 2, V of 1, and so on. Each piece
// takes the place of the same piece of what is read just before it.
struct Loads {
  const CUtensorMap &k_map, &v_map;
  int kv_head, batch, begin, tiles, rank;

  DEVICE void k(Smem& smem, int tile, int stage) const {
    const uint32_t full = smem_u32(&smem.k_full[stage]);
    mbarrier_arrive_expect_tx(full, sizeof(smem.stages[0].k));
    cp_async_bulk_tensor_5d_g2s(smem_u32(smem.stages[stage].k), &k_map, 0, begin + tile * TILE + rank * Bc,
                                stage * (K_COLUMNS / 64), kv_head, batch, full);
  }
  DEVICE void v(Smem& smem, int tile, int stage) const {
    const uint32_t full = smem_u32(&smem.v_full[stage]);
    mbarrier_arrive_expect_tx(full, sizeof(smem.stages[0].v));
    cp_async_bulk_tensor_5d_g2s(smem_u32(smem.stages[stage].v), &v_map, 0, begin + tile * TILE + first_key(stage),
                                rank * (COLUMNS / 64), kv_head, batch, full);
  }
  DEVICE int first_key(int stage) const { return (stage * V_KEYS) ^ rank * Bc; }  // of a piece of V: the own keys first
  DEVICE void after_k(Smem& smem, int tile, int stage) const {
    mbarrier_wait(smem_u32(&smem.k_empty[stage]), tile & 1);
    if (tile > 0)
      v(smem, tile - 1, stage);
    else if (tiles > 1)
      k(smem, 1, stage);
    else
      v(smem, 0, stage);
  }
  DEVICE void after_v(Smem& smem, int tile, int stage) const {
    if (tile + 1 == tiles) return;
    mbarrier_wait(smem_u32(&smem.v_empty[stage]), tile & 1);
    if (tile + 2 < tiles)
      k(smem, tile + 2, stage);
    else
      v(smem, tile + 1, stage);
  }
};

// A warpgroup: scores of 64 rows and this block's keys, their exponentials, and where they go.
template <typename T, int half>
DEVICE void score(Smem& smem, const PrefillArgs& args, const Rows& rows, const Loads& loads) {
  const int begin = loads.begin, tiles = loads.tiles, rank = loads.rank;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, g = lane / 4, t = lane % 4;
  const int r = half * 64 + warp * 16 + g;  // this and 8 further
  const float scale = fmaxf(fabsf(args.scale), 1e-30f) * LOG2E;  // 0 times -inf would be NaN
  // Keys that all rows see need no mask.
  const int all_from = visible_keys(args, rows.token_of(args, Br - 1)).begin;
  const int all_to = visible_keys(args, rows.token_of(args, 0)).end;
  const uint64_t q = wgmma_descriptor(smem_u32(&smem.q[0][half * 64]), 16, 1024, Swizzle::b128);
  const uint64_t k = wgmma_descriptor(smem_u32(smem.stages), 16, 1024, Swizzle::b128);
  // Row and piece of 16 bytes that the lane's address is of, in a store of 16 x 16 elements.
  const uint32_t p_row = smem_u32(smem.p[0][half][warp * 16 + lane % 16]);
  const uint32_t other = rank ^ 1;

  float exponent[2] = {-INFINITY, -INFINITY}, agreed[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of P, before it is rounded
  const bool loader = threadIdx.x == 0;
  if (tiles > 0) mbarrier_wait(smem_u32(&smem.q_full), 0);
  for (int tile = 0; tile < tiles; ++tile) {
    float s[Bc / 2];
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_wait(smem_u32(&smem.k_full[stage]), tile & 1);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < K_COLUMNS / 16; ++j)
        wgmma_k16<T, Bc>(s, wgmma_advance(q, (stage * (K_COLUMNS / 64) + j / 4) * sizeof(smem.q[0]) + j % 4 * 32),
                         wgmma_advance(k, stage * sizeof(smem.stages[0]) + j / 4 * sizeof(smem.stages[0].k[0]) +
                                              j % 4 * 32),
                         stage + j > 0);
      wgmma_commit_group();
      if (stage > 0) {
        wgmma_wait_group<1>();
        if (lane == 0) mbarrier_arrive(smem_u32(&smem.k_empty[stage - 1]));
      }
      if (stage > 1) {
        if (loader) loads.after_k(smem, tile, stage - 2);
        __syncwarp();
      }
    }
    wgmma_wait_group<0>();
    if (lane == 0) mbarrier_arrive(smem_u32(&smem.k_empty[STAGES - 1]));
    if (loader) {
      loads.after_k(smem, tile, STAGES - 2);
      loads.after_k(smem, tile, STAGES - 1);
    }
    __syncwarp();

    if (args.scale < 0.0f)
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) s[i] = -s[i];
    const int key = begin + tile * TILE + rank * Bc;
    if (key < all_from || key + Bc > all_to) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const KeyRange keys = visible_keys(args, rows.token_of(args, r + 8 * h));
#pragma unroll
        for (int j = 0; j < Bc / 4; ++j) {
          const int at = key + j / 2 * 8 + 2 * t + j % 2;
          if (at < keys.begin || at >= keys.end) s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
        }
      }
    }
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = s[2 * h];
#pragma unroll
      for (int j = 1; j < Bc / 4; ++j) largest = fmaxf(largest, s[j / 2 * 4 + 2 * h + j % 2]);
      largest = warp_max<4>(largest) * scale;
      const float least = fmaxf(exponent[h], agreed[h]), raised = largest > least + SLACK ? ceilf(largest) : least;
      const float factor = exp2_of_difference(exponent[h], raised);
      sum[h] *= factor;
      exponent[h] = raised;
      shift[h] = exponent[h] == -INFINITY ? 0.0f : exponent[h];
    }
    uint32_t p[Bc / 8][2];
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = ex2_approx_ftz(fmaf(s[4 * j + 2 * h], scale, -shift[h]));
        const float high = ex2_approx_ftz(fmaf(s[4 * j + 2 * h + 1], scale, -shift[h]));
        sum[h] += low + high;
        p[j][h] = pack2<T>(low, high);
      }

    mbarrier_wait(smem_u32(&smem.p_empty[half]), (tile & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < Bc / 8; j += 2) {
      const uint32_t pairs[4] = {p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]};
      stmatrix_x4(p_row + ((j + lane / 16) ^ lane % 8) * 16, pairs);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (t == 0) smem.exponent[0][half][warp * 16 + g + 8 * h] = exponent[h];
    // What the tile before was agreed on: from the next on both blocks' P, and O, should have one exponent again.
#pragma unroll
    for (int h = 0; h < 2; ++h) agreed[h] = smem.agreed[half][warp * 16 + g + 8 * h];
    fence_proxy_async_shared();
    __syncwarp();
    bar_sync(SCORES_BARRIER + half, WARPGROUP);
    const uint32_t full = smem_u32(&smem.p_full[half]);
    if (threadIdx.x % WARPGROUP == 0) {
      const uint32_t there = mapa_shared_cluster(full, other);
      cp_async_bulk_s2s(mapa_shared_cluster(smem_u32(smem.p[1][half]), other), smem_u32(smem.p[0][half]),
                        sizeof(smem.p[0][0]), there);
      cp_async_bulk_s2s(mapa_shared_cluster(smem_u32(smem.exponent[1][half]), other), smem_u32(smem.exponent[0][half]),
                        sizeof(smem.exponent[0][0]), there);
      mbarrier_arrive_expect_tx(full, sizeof(smem.p[0][0]) + sizeof(smem.exponent[0][0]));
    } else {
      mbarrier_arrive(full);  // each lane says that it has read what was agreed on
    }
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = warp_sum<4>(sum[h]);
    const int at = warp * 16 + g + 8 * h;
    if (t == 0) {
      smem.sum[0][half][at] = sum[h];
      st_shared_cluster_u32(mapa_shared_cluster(smem_u32(&smem.sum[1][half][at]), other), __float_as_uint(sum[h]));
    }
  }
  __syncwarp();
  barrier_cluster_arrive();
  barrier_cluster_wait();
}

// P x factor, in rows of 64 under the swizzle: of a warp's 16 rows a lane takes half a row.
template <typename T>
DEVICE void scale_p(uint16_t* row, float factor, int first_piece) {
  if (factor == 1.0f) return;
  for (int piece = first_piece; piece < first_piece + 4; ++piece) {  // wherever the swizzle put them
    uint32_t* pairs = reinterpret_cast<uint32_t*>(row) + piece * 4;
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack2<T>(pairs[i]);
      pairs[i] = pack2<T>(x.x * factor, x.y * factor);
    }
  }
}

// A warpgroup: sums of 64 rows over all keys, in this block's columns.
template <typename T, int half>
DEVICE void sum_values(Smem& smem, const Loads& loads, float (&o)[2][64], int end) {
  const int begin = loads.begin, tiles = loads.tiles, rank = loads.rank;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, g = lane / 4;
  const uint64_t p = wgmma_descriptor(smem_u32(smem.p[0][half]), 16, 1024, Swizzle::b128);
  const uint64_t v = wgmma_descriptor(smem_u32(smem.stages), sizeof(smem.stages[0].v[0]), 1024, Swizzle::b128);
  const uint32_t p_empty = smem_u32(&smem.p_empty[half]), p_empty_there = mapa_shared_cluster(p_empty, rank ^ 1);
  const bool loader = threadIdx.x == SCORES;
  int unequal = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    mbarrier_wait(smem_u32(&smem.p_full[half]), tile & 1);

    bool same = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float agreed = smem.agreed[half][lane + i * WARP];
      same &= agreed == smem.exponent[0][half][lane + i * WARP] && agreed == smem.exponent[1][half][lane + i * WARP];
    }
    if (!__all_sync(ALL_LANES, same)) {
      // Both blocks come here: P, received or about to be, is brought to one exponent, and O as well.
      const auto raised = [&](int at) {
        return fmaxf(smem.agreed[half][at], fmaxf(smem.exponent[0][half][at], smem.exponent[1][half][at]));
      };
      float o_factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = warp * 16 + g + 8 * h;
        o_factor[h] = exp2_of_difference(smem.agreed[half][at], raised(at));
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        o[0][i] *= o_factor[i % 4 / 2];
        o[1][i] *= o_factor[i % 4 / 2];
      }
      const int at = warp * 16 + lane / 2;
      const float agreed = raised(at);
      if (lane == 0) mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_u32(&smem.sent[half]), rank ^ 1));
      mbarrier_wait(smem_u32(&smem.sent[half]), unequal++ & 1);  // the other has what this block's P is copied from
      __syncwarp();
      bar_sync(SUMS_BARRIER + half, WARPGROUP);                  // all have read the exponents
      for (int source = 0; source < BLOCKS; ++source)
        scale_p<T>(smem.p[source][half][at], exp2_of_difference(smem.exponent[source][half][at], agreed),
                   lane % 2 * 4);
      if (lane % 2 == 0) smem.agreed[half][at] = agreed;
      fence_proxy_async_shared();
      __syncwarp();
      bar_sync(SUMS_BARRIER + half, WARPGROUP);
    }

    const int live = end - begin - tile * TILE;  // the keys from here on are none of these rows'
    if (live < TILE) {                           // and 0 times a NaN is not 0
#pragma unroll 1
      for (int stage = 0; stage < STAGES; ++stage) {
        mbarrier_wait(smem_u32(&smem.v_full[stage]), tile & 1);
        const int thread = threadIdx.x - SCORES, row = thread / (SUMS / V_KEYS);
        if (loads.first_key(stage) + row >= live)
          for (int piece = thread % (SUMS / V_KEYS); piece < COLUMNS / 8; piece += SUMS / V_KEYS)
            reinterpret_cast<uint4*>(smem.stages[stage].v[piece / 8][row])[piece % 8] = {};
      }
      fence_proxy_async_shared();
      mbarrier_arrive(smem_u32(&smem.cleared));
      mbarrier_wait(smem_u32(&smem.cleared), 0);  // only the last tile can come here
      __syncwarp();
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_wait(smem_u32(&smem.v_full[stage]), tile & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < V_KEYS / 16; ++k)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          wgmma_k16<T, COLUMNS / 2, Major::mn>(
              o[n], wgmma_advance(p, stage / (STAGES / 2) * sizeof(smem.p[0]) +
                                         (stage % (STAGES / 2) * (V_KEYS / 16) + k) * 32),
              wgmma_advance(v, stage * sizeof(smem.stages[0]) + n * sizeof(smem.stages[0]) / 2 + k * 2048), 1);
      wgmma_commit_group();
      if (stage > 0) {
        wgmma_wait_group<1>();
        if (lane == 0) mbarrier_arrive(smem_u32(&smem.v_empty[stage - 1]));
      }
      if (stage > 1) {
        if (loader) loads.after_v(smem, tile, stage - 2);
        __syncwarp();
      }
    }
    wgmma_wait_group<0>();
    mbarrier_arrive(p_empty);  // each lane says that it has read the exponents
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(smem_u32(&smem.v_empty[STAGES - 1]));
      mbarrier_arrive_shared_cluster(p_empty_there);
    }
    if (loader) {
      loads.after_v(smem, tile, STAGES - 2);
      loads.after_v(smem, tile, STAGES - 1);
    }
    __syncwarp();
  }
}

// O of a warp's 16 rows through the first half of where Q was, 512 bytes a row, and their LSE.
template <typename T>
DEVICE void store(Smem& smem, const PrefillArgs& args, const Rows& rows, const float (&o)[2][64], int rank, int half) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, g = lane / 4, t = lane % 4;
  uint16_t(*staged)[COLUMNS] = reinterpret_cast<uint16_t(*)[COLUMNS]>(smem.q) + half * 64 + warp * 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = warp * 16 + g + 8 * h;
    const float agreed = smem.agreed[half][at];
    const float sum = smem.sum[0][half][at] * exp2_of_difference(smem.exponent[0][half][at], agreed) +
                      smem.sum[1][half][at] * exp2_of_difference(smem.exponent[1][half][at], agreed);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int r = half * 64 + at;
    if (args.lse && rank == 0 && t == 0 && rows.live(args, r))
      args.lse[(static_cast<int64_t>(rows.batch) * args.q_heads + rows.head_of(r)) * args.q_len +
               rows.token_of(args, r)] = agreed / LOG2E + logf(sum);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int piece = (n * 16 + j) ^ g;
        *reinterpret_cast<uint32_t*>(&staged[g + 8 * h][piece * 8 + 2 * t]) =
            pack2<T>(o[n][4 * j + 2 * h] * inverse, o[n][4 * j + 2 * h + 1] * inverse);
      }
  }
  __syncwarp();
  for (int i = 0; i < 16; ++i) {
    const int r = half * 64 + warp * 16 + i;
    if (rows.live(args, r))
      *reinterpret_cast<uint4*>(row<T>(args.o, args.o_stride, rows.batch, rows.token_of(args, r), rows.head_of(r)) +
                                rank * COLUMNS + lane * 8) =
          *reinterpret_cast<const uint4*>(&staged[i][(lane ^ i % 8) * 8]);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_two_blocks(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, const PrefillArgs args, const Order order) {
  const int rank = cluster_ctarank();
  const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);  // uniform, as the compiler sees now
  Smem& smem = dynamic_smem<Smem>();

  const Rows rows = order.rows(args, blockIdx.x / BLOCKS);
  const int kv_head = rows.head / (args.q_heads / args.kv_heads);
  const int begin = visible_keys(args, rows.token).begin, end = visible_keys(args, rows.token_of(args, Br - 1)).end;
  const int tiles = max(0, ceil_div(end - begin, TILE));

  if (threadIdx.x == 0) {
    mbarrier_init(smem_u32(&smem.q_full), 1);
    mbarrier_init(smem_u32(&smem.cleared), SUMS);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.k_full[i]), 1);
      mbarrier_init(smem_u32(&smem.v_full[i]), 1);
      mbarrier_init(smem_u32(&smem.k_empty[i]), SCORES / WARP);
      mbarrier_init(smem_u32(&smem.v_empty[i]), SUMS / WARP);
    }
    for (int half = 0; half < HALVES; ++half) {
      mbarrier_init(smem_u32(&smem.p_full[half]), WARPGROUP);
      mbarrier_init(smem_u32(&smem.p_empty[half]), WARPGROUP + WARPGROUP / WARP);
      mbarrier_init(smem_u32(&smem.sent[half]), WARPGROUP / WARP);
    }
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < Br; i += THREADS) {
    smem.agreed[i / 64][i % 64] = -INFINITY;
    smem.exponent[0][i / 64][i % 64] = smem.exponent[1][i / 64][i % 64] = -INFINITY;
  }
  fence_proxy_async_shared();  // the other block's copies come over the exponents
  __syncwarp();
  barrier_cluster_arrive();
  barrier_cluster_wait();

  const Loads loads = {k_map, v_map, kv_head, rows.batch, begin, tiles, rank};
  if (tiles > 0 && threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(smem_u32(&smem.q_full), sizeof(smem.q));
    for (int i = 0; i < HS / 64; ++i)
      cp_async_bulk_tensor_4d_g2s(smem_u32(smem.q[i]), &q_map, i * 64, rows.head, rows.token, rows.batch,
                                  smem_u32(&smem.q_full));
    for (int i = 0; i < STAGES; ++i) loads.k(smem, 0, i);
  }
  if (warpgroup < HALVES) {
    setmaxnreg_dec<SCORES_REGISTERS>();
    if (warpgroup == 0)
      score<T, 0>(smem, args, rows, loads);
    else
      score<T, 1>(smem, args, rows, loads);
  } else {
    setmaxnreg_inc<SUMS_REGISTERS>();
    float o[2][64] = {};
    if (warpgroup == HALVES)
      sum_values<T, 0>(smem, loads, o, end);
    else
      sum_values<T, 1>(smem, loads, o, end);
    barrier_cluster_arrive();
    barrier_cluster_wait();  // nobody needs Q, or anything of the other block, any more
    store<T>(smem, args, rows, o, rank, warpgroup - HALVES);
  }
}

// A tensor copy's strides, in bytes, of token, head and batch; along a dimension of one element any will do.
struct Strides {
  uint64_t token, head, batch;
};
inline Strides strides_of(const int64_t (&stride)[3], int batch, int tokens, int heads) {
  const auto bytes = [](int64_t elements, int size) { return size > 1 ? static_cast<uint64_t>(elements) * 2 : 16; };
  return {bytes(stride[1], tokens), bytes(stride[2], heads), bytes(stride[0], batch)};
}

template <typename T>
const char* launch_with(const PrefillArgs& args, cudaStream_t stream) {
  const int group = args.q_heads / args.kv_heads, heads = Br % group == 0 ? group : 1;
  const int groups = args.q_heads / heads, tiles = ceil_div(args.q_len, Br / heads);
  const int64_t clusters = static_cast<int64_t>(tiles) * groups * args.batch;
  if (clusters > INT32_MAX / BLOCKS) return "more blocks than a grid holds: q_len x q_heads x batch must be below 2^37";
  const int64_t fit = L2_BYTES / (static_cast<int64_t>(args.kv_len) * HS * 4 + 1);  // columns whose K and V stay there
  const int columns = groups * args.batch, at_once = static_cast<int>(fit < 1 ? 1 : fit < columns ? fit : columns);
  const uint64_t batch = args.batch, q_len = args.q_len, q_heads = args.q_heads, kv_heads = args.kv_heads;
  const uint64_t kv_len = args.kv_len > 0 ? args.kv_len : 1;
  const void* k = args.kv_len > 0 ? args.k : args.q;  // without keys none is read
  const void* v = args.kv_len > 0 ? args.v : args.q;
  const Strides q_stride = strides_of(args.q_stride, args.batch, args.q_len, args.q_heads);
  const Strides k_stride = strides_of(args.k_stride, args.batch, args.kv_len, args.kv_heads);
  const Strides v_stride = strides_of(args.v_stride, args.batch, args.kv_len, args.kv_heads);
  CUtensorMap q_map, k_map, v_map;
  const char* problem = make_tensor_map<T, 4>(
      &q_map, args.q, {HS, q_heads, q_len, batch}, {q_stride.head, q_stride.token, q_stride.batch},
      {64, static_cast<uint32_t>(heads), static_cast<uint32_t>(Br / heads), 1}, Swizzle::b128);
  if (!problem)
    problem = make_tensor_map<T, 5>(&k_map, k, {64, kv_len, HS / 64, kv_heads, batch},
                                    {k_stride.token, 128, k_stride.head, k_stride.batch},
                                    {64, Bc, K_COLUMNS / 64, 1, 1}, Swizzle::b128);
  if (!problem)
    problem = make_tensor_map<T, 5>(&v_map, v, {64, kv_len, HS / 64, kv_heads, batch},
                                    {v_stride.token, 128, v_stride.head, v_stride.batch},
                                    {64, V_KEYS, COLUMNS / 64, 1, 1}, Swizzle::b128);
  if (problem) return problem;
  return launch_cluster(prefill_two_blocks<T>, dim3(clusters * BLOCKS), dim3(BLOCKS), THREADS, sizeof(Smem), stream,
                        q_map, k_map, v_map, args, Order{heads, groups, columns, at_once, tiles});
}

extern "C" const char* launch_step(const PrefillArgs* args, cudaStream_t stream) {
  return args->dtype == DTYPE_FP16 ? launch_with<fp16>(*args, stream) : launch_with<bf16>(*args, stream);
}
