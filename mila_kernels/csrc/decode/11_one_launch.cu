// Change: the merge in the same launch. The blocks of a cluster share the keys of a head; at their end each warp
//   sends its columns of O, as they lie in its registers, to the one block of the cluster that adds up those columns.
//   What clusters have found goes through memory, and the last one to arrive merges it; a counter says who that is, and
//   is zero again afterwards.
// Prediction: 16 heads on 1 leave 15 partial results of 32 KB in place of 132, and no second launch: 4 to 5 us less
//   at any length; with 2 rows 2 us less.
// Measured: H200, 2026-11-29, 16 heads on 1, 4K / 32K / 128K keys 12.4 / 27.7 / 73.7 us, E4M3 10.8 / 21.5 / 45.7; 8
//   heads on 4, 28K 73.2 (clusters of 4: 61.5, of 2: 65.0, of 1: 83.7), batch 16 844. One other form measured: O read
//   out of the other blocks' shared memory, 16 clusters of 8: 19.4 / 37.6 / 95.2.
// Verdict: kept for more than 8 rows: 3 to 5 us faster than 10. With 2 rows it is slower. The GPU runs 15 clusters
//   of 8 at once, not 16: in the first form the 16th was a second wave; the launcher asks now. Of the 12.4 us, 1.2
//   find the work, 2.2 bring the first tile, 1.5 are the way through the cluster, 0.9 a fence and a counter, and 2.9
//   the last block's merge. racecheck follows what blocks send each other where each lane arrives itself at the
//   reader's mbarrier and the cluster meets at its end; where one lane arrived for its warp, or nobody met, it
//   reported each store, ordered as it was by the memory model and by the emulation's clocks.
// Architectures: sm_90a sm_100a
// Alignment: 16
// Head dims: 64 128 256 512
// Rows: 9
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "bulk.cuh"

constexpr int TILE_BYTES = 32 * 1024, RING_BYTES = 160 * 1024;
constexpr float P_BITS = 14.0f;  // FP16 probabilities are scaled by 2^14: keys stay down to 2^-38 of the largest
constexpr int CONSUMERS = 1;     // named barrier of the warps that multiply

template <int HS>
constexpr int WARPS = HS / 16 < 8 ? HS / 16 : 8;
template <typename G>
constexpr int FITTING = RING_BYTES / static_cast<int>(sizeof(Tile<G>));
template <typename G>
constexpr int STAGES = FITTING<G> < 12 ? FITTING<G> : 12;

constexpr int NO_WORK = -1;  // in place of a sequence: the block's last piece has been

// A piece and whose rows it is.
struct Work {
  Piece piece;
  int length, kv_head, first_row, last_row;
  KeyRange keys;  // that any of the rows sees
  int2 slots;     // of all pieces of the item: the first, and how many
  bool more;      // pieces follow
};

template <typename G, int NT>
struct Smem {
  alignas(1024) Tile<G> stages[STAGES<G>];
  float4 received[G::WARPS * G::M_TILES * NT][WARP];  // accumulators, one block's after another's
  QueryRows<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
  alignas(16) Product<typename G::KV> p[8 * NT][G::Bc + 8];
  alignas(16) Partial totals[MAX_CLUSTER][8 * NT];
  float rescale[8 * NT];
  Work work[2];  // of this piece and the next: the producer finds them
  int lost[STAGES<G>];
  int last;
  uint64_t full[STAGES<G>], empty[STAGES<G>], work_full[2], work_empty[2], slots_full[2], o_ready, o_done;
};

template <typename G>
DEVICE Work find_work(const DecodeArgs& args, Piece piece) {
  const int row_tiles = ceil_div(row_count(args), ROWS), length = sequence_length(args, piece.batch);
  const int kv_head = row_tiles == 1 ? piece.item : piece.item / row_tiles;
  const int first_row = (piece.item - kv_head * row_tiles) * ROWS;
  const KeyRange seen = seen_keys(args, length);
  return {piece, length, kv_head, first_row, min(first_row + ROWS, row_count(args)) - 1,
          {max(seen.begin, piece.first * G::Bc), min(seen.end, piece.last * G::Bc)}};
}

// Two rows of O, in two columns, as an accumulator has them, and what their sums are relative to: {reference, sum} of
// the first row, then of the second.
struct RowPair {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, o[4] = {};

  template <int N>
  DEVICE void add(const float4 (&totals)[N], const float4 (&parts)[N]) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float new_top = top[r];
#pragma unroll
      for (int i = 0; i < N; ++i) new_top = fmaxf(new_top, r ? totals[i].z : totals[i].x);
      shift[r] = new_top == -INFINITY ? 0.0f : new_top;
      const float own = ex2_approx_ftz(top[r] - shift[r]);
      top[r] = new_top;
      sum[r] *= own;
      o[r] *= own;
      o[r + 2] *= own;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float first = ex2_approx_ftz(totals[i].x - shift[0]), second = ex2_approx_ftz(totals[i].z - shift[1]);
      sum[0] += first * totals[i].y;
      sum[1] += second * totals[i].w;
      o[0] += first * parts[i].x;
      o[1] += second * parts[i].y;
      o[2] += first * parts[i].z;
      o[3] += second * parts[i].w;
    }
  }
};

template <typename G>
DEVICE void store_rows(const DecodeArgs& args, const Work& work, int row, int column, int next, const RowPair& total) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int own = work.first_row + row + r;
    if (own > work.last_row) return;
    const int token = row_token(args, own), head = row_head(args, work.kv_head, own);
    const RowEnd end = end_row(args, work.kv_head, head, {total.top[r], total.sum[r]});
    const int64_t o = query_offset(args, args.o_stride, work.piece.batch, token, head);
    if constexpr (std::is_same_v<typename G::KV, e4m3>) {
      store_output(args.o, o + column, args.dtype, float2{total.o[r] * end.factor, total.o[r + 2] * end.factor});
    } else {
      store_output(args.o, o + column, args.dtype, total.o[r] * end.factor);
      store_output(args.o, o + next, args.dtype, total.o[r + 2] * end.factor);
    }
    if (column == 0) store_lse(args, work.piece.batch, token, head, end.lse);
  }
}

// Adds up what the cluster's blocks have sent here, then what all pieces of the item have left in memory.
template <typename G, int NT>
DEVICE void merge_columns(Smem<G, NT>& smem, const DecodeArgs& args, const Work& work) {
  constexpr int FRAGMENTS = G::M_TILES * NT, AT_ONCE = 8;
  const int rank = cluster_ctarank(), blocks = cluster_nctarank(), rows = slot_rows(args);
  const int warps = G::WARPS >> log2_exact(blocks), count = warps * FRAGMENTS * WARP;  // of each block
  const float4* received = &smem.received[0][0];
  Partial* partials = reinterpret_cast<Partial*>(args.partial_sum);
  float2* partial_o = reinterpret_cast<float2*>(args.partial_o);

  // f(row, warp, m, g, i): rows `row` and the next of tile m of a warp's columns
  auto each = [&](auto f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += G::THREADS) {
      const int lane = i % WARP, fragment = i / WARP % FRAGMENTS, warp = rank * warps + i / (WARP * FRAGMENTS);
      const int row = fragment % NT * 8 + lane % 4 * 2;
      if (row < rows) f(row, warp, fragment / NT, lane / 4, i);
    }
  };
  auto finish = [&](int row, int warp, int m, int g, const RowPair& total) {
    store_rows<G>(args, work, row, value_column<G>(warp, m, g, 0), value_column<G>(warp, m, g, 1), total);
  };

  each([&](int row, int warp, int m, int g, int i) {
    float4 totals[MAX_CLUSTER], parts[MAX_CLUSTER];
#pragma unroll
    for (int block = 0; block < MAX_CLUSTER; ++block) {
      const bool there = block < blocks;
      totals[block] = there ? *reinterpret_cast<const float4*>(&smem.totals[block][row])
                            : float4{-INFINITY, 0.0f, -INFINITY, 0.0f};
      parts[block] = there ? received[block * count + i] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    RowPair total;
    total.add(totals, parts);
    if (work.slots.y == 1) return finish(row, warp, m, g, total);
    const int64_t at = static_cast<int64_t>(work.piece.slot) * rows + row;
    const int64_t pair = at * (G::HS / 2) + warp * (G::DIMS / 2) + m * 8 + g;
    const bool first = i < NT * WARP && g == 0;  // of the block: every block notes the sums for its columns
    partial_o[pair] = {total.o[0], total.o[2]};
    if (first) partials[at] = {total.top[0], total.sum[0]};
    if (row + 1 >= rows) return;
    partial_o[pair + G::HS / 2] = {total.o[1], total.o[3]};
    if (first) partials[at + 1] = {total.top[1], total.sum[1]};
  });
  if (work.slots.y == 1) return;

  bar_sync(CONSUMERS, G::THREADS);
  if (threadIdx.x == 0) {
    const int items = args.kv_heads * ceil_div(row_count(args), ROWS);
    int32_t* arrivals = args.arrivals + (work.piece.batch * items + work.piece.item) * MAX_CLUSTER + rank;
    __threadfence();  // for the whole block: the barrier came before
    smem.last = atomicAdd(arrivals, 1) == work.slots.y - 1;
    if (smem.last) *arrivals = 0;
    __threadfence();
  }
  bar_sync(CONSUMERS, G::THREADS);
  if (!smem.last) return;
  each([&](int row, int warp, int m, int g, int) {
    const bool two = row + 1 < rows;
    RowPair total;
#pragma unroll 1
    for (int first = 0; first < work.slots.y; first += AT_ONCE) {
      float4 totals[AT_ONCE], parts[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        totals[j] = {-INFINITY, 0.0f, -INFINITY, 0.0f};
        parts[j] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + j >= work.slots.y) continue;
        const int64_t at = static_cast<int64_t>(work.slots.x + first + j) * rows + row;
        const int64_t pair = at * (G::HS / 2) + warp * (G::DIMS / 2) + m * 8 + g;
        const Partial a = partials[at], b = two ? partials[at + 1] : Partial{-INFINITY, 0.0f};
        const float2 o = partial_o[pair], next = two ? partial_o[pair + G::HS / 2] : float2{0.0f, 0.0f};
        totals[j] = {a.reference, a.sum, b.reference, b.sum};
        parts[j] = {o.x, next.x, o.y, next.y};
      }
      total.add(totals, parts);
    }
    finish(row, warp, m, g, total);
  });
}

template <typename G, int NT>
DEVICE void multiply_piece(Smem<G, NT>& smem, Ring<STAGES<G>>& ring, const DecodeArgs& args, const Work& work,
                           int turn) {
  using KV = typename G::KV;
  using P = Product<KV>;
  constexpr int Bc = G::Bc;
  constexpr float TOP = std::is_same_v<P, fp16> ? P_BITS : 0.0f;
  // Of the softmax, a warp has whole rows, and a lane neighbouring keys of one.
  constexpr int OWN_ROWS = 8 * NT / G::WARPS, LANES = WARP / OWN_ROWS, OWN_KEYS = Bc / LANES;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int first_key = warp % (Bc / 16) * 16, part = warp / (Bc / 16);
  const int own_row = warp * OWN_ROWS + lane / LANES, own_key = lane % LANES * OWN_KEYS;
  const int rank = cluster_ctarank(), blocks = cluster_nctarank();
  auto release = [&] {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_u32(&smem.empty[ring.stage]));
    ring.next();
  };

  load_query_rows<G, NT>(smem.queries, args, work.piece.batch, work.kv_head, work.first_row);
  bar_sync(CONSUMERS, G::THREADS);
  uint2 q_regs[G::STEPS][NT];
  load_fragments<G, NT>(q_regs, smem.queries, part);
  const float scale = smem.queries.scale[own_row];
  // What every row sees: tiles within need no mask.
  const KeyRange common = {visible_keys(args, work.length, row_token(args, work.last_row)).begin,
                           visible_keys(args, work.length, row_token(args, work.first_row)).end};

  float row_max = -INFINITY, row_sum = 0.0f, o_regs[G::M_TILES][NT][4] = {};
  int lost = 0;
#pragma unroll 1
  for (int tile = work.piece.first + rank, last = work.piece.last; tile < last; tile += blocks) {
    mbarrier_wait(smem_u32(&smem.full[ring.stage]), ring.turn);
    lost |= smem.lost[ring.stage];
    float s_regs[NT][4];
    multiply_key_tile<G, NT>(s_regs, smem.stages[ring.stage], first_key, part, q_regs);
    const int key = first_key + key_of_lane<KV>(g);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) smem.s[part][n * 8 + 2 * t + j % 2][key + j / 2 * 8] = s_regs[n][j];
    bar_sync(CONSUMERS, G::THREADS);
    release();

    struct alignas(OWN_KEYS >= 4 ? 16 : 4 * OWN_KEYS) Scores {
      float x[OWN_KEYS];
    };
    struct alignas(2 * OWN_KEYS) Probabilities {
      P x[OWN_KEYS];
    };
    Scores scores = *reinterpret_cast<const Scores*>(&smem.s[0][own_row][own_key]);
#pragma unroll
    for (int i = 1; i < G::PARTS; ++i) {
      const Scores more = *reinterpret_cast<const Scores*>(&smem.s[i][own_row][own_key]);
#pragma unroll
      for (int j = 0; j < OWN_KEYS; ++j) scores.x[j] += more.x[j];
    }
    const bool masked = tile * Bc < common.begin || tile * Bc + Bc > common.end;
    KeyRange own_keys = common;
    if (masked)
      own_keys = visible_keys(args, work.length, row_token(args, min(work.first_row + own_row, work.last_row)));
    float new_max = row_max;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) {
      const int position = tile * Bc + own_key + j;
      const bool seen = !masked || (position >= own_keys.begin && position < own_keys.end);
      scores.x[j] = seen ? scores.x[j] * scale : -INFINITY;
      new_max = fmaxf(new_max, scores.x[j]);
    }
    new_max = warp_max<LANES>(new_max);
    // While every score is -inf the maximum is too, and exp2(-inf - -inf) would be NaN.
    const float shift = new_max == -INFINITY ? 0.0f : new_max;
    const float rescale = ex2_approx_ftz(row_max - shift);
    row_max = new_max;
    row_sum *= rescale;
    Probabilities p;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) {
      p.x[j] = from_float<P>(ex2_approx_ftz(scores.x[j] - shift + TOP));
      row_sum += to_float(p.x[j]);  // as V's product sees it, rounded
    }
    *reinterpret_cast<Probabilities*>(&smem.p[own_row][own_key]) = p;
    if (lane % LANES == 0) smem.rescale[own_row] = rescale;
    bar_sync(CONSUMERS, G::THREADS);

#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float even = smem.rescale[n * 8 + 2 * t], odd = smem.rescale[n * 8 + 2 * t + 1];
      if (__any_sync(ALL_LANES, even != 1.0f || odd != 1.0f)) {
#pragma unroll
        for (int m = 0; m < G::M_TILES; ++m)
#pragma unroll
          for (int j = 0; j < 4; ++j) o_regs[m][n][j] *= j % 2 ? odd : even;
      }
    }
    mbarrier_wait(smem_u32(&smem.full[ring.stage]), ring.turn);
    Tile<G>& v_smem = smem.stages[ring.stage];
    if (tile * Bc < work.keys.begin || tile * Bc + Bc > work.keys.end) {
      clear_dead_rows<G>(v_smem, tile, work.keys);
      bar_sync(CONSUMERS, G::THREADS);
    }
#pragma unroll
    for (int i = 0; i < Bc / 16; ++i) {
      uint2 p_regs[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        uint32_t b[2];
        ldmatrix_x2(b, smem_u32(&smem.p[n * 8 + lane % 8][i * 16 + lane / 8 % 2 * 8]));
        p_regs[n] = {b[0], b[1]};
      }
      multiply_value_tile<G, NT>(o_regs, v_smem, p_regs, i * 16);
    }
    release();
  }

  // Each warp's columns go to one block of the cluster; the sums of its rows to all.
  row_sum = warp_sum<LANES>(row_sum);
  if (lane % LANES < blocks) {
    const uint32_t there = mapa_shared_cluster(smem_u32(&smem.totals[rank][own_row]), lane % LANES);
    st_shared_cluster_u32(there, __float_as_uint(row_max - TOP));
    st_shared_cluster_u32(there + 4, __float_as_uint(lost ? NAN : row_sum));
  }
  const int warps = G::WARPS >> log2_exact(blocks), to = warp >> log2_exact(warps);
  float4* o_smem = smem.received[(rank * warps + warp % warps) * G::M_TILES * NT];
  const uint32_t there = mapa_shared_cluster(smem_u32(&o_smem[lane]), to);
#pragma unroll
  for (int m = 0; m < G::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
      if (n * 8 + 2 * t < slot_rows(args))
        st_shared_cluster_v4_f32(there + (m * NT + n) * WARP * sizeof(float4),
                                 {o_regs[m][n][0], o_regs[m][n][1], o_regs[m][n][2], o_regs[m][n][3]});
  // Every lane says so where it has sent: racecheck does not follow one lane that speaks for its warp.
  const uint32_t o_ready = smem_u32(&smem.o_ready);
  if (lane % LANES < blocks) mbarrier_arrive_cluster(mapa_shared_cluster(o_ready, lane % LANES));
  mbarrier_arrive_cluster(mapa_shared_cluster(o_ready, to));
  mbarrier_wait_cluster(smem_u32(&smem.o_ready), turn & 1);
  mbarrier_wait(smem_u32(&smem.slots_full[turn & 1]), turn >> 1 & 1);
  merge_columns<G, NT>(smem, args, work);
  if (!work.more) return;
  // Nobody may send the next piece's before all have read these.
  const uint32_t o_done = smem_u32(&smem.o_done);
  for (int block = 0; block < blocks; ++block) mbarrier_arrive_cluster(mapa_shared_cluster(o_done, block));
  mbarrier_wait_cluster(o_done, turn & 1);
}

// Sequences without a key, of which no piece is made.
template <typename G>
DEVICE void store_empty_sequences(const Schedule<G::Bc>& schedule, const DecodeArgs& args, int unit, int units) {
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int first = 0; first < args.batch; first += WARP) {
    const int batch = first + lane;
    const bool empty = batch < args.batch && batch % units == unit && schedule.tile_count(batch) == 0;
    for (unsigned left = __ballot_sync(ALL_LANES, empty); left; left &= left - 1) {
      const int b = first + __ffs(static_cast<int>(left)) - 1;
#pragma unroll 1
      for (int row = 0; row < args.q_len * args.q_heads; ++row) {
        const int token = row / args.q_heads, head = row % args.q_heads;
        const int64_t o = query_offset(args, args.o_stride, b, token, head);
#pragma unroll 1
        for (int pair = lane; pair < G::HS / 2; pair += WARP)
          store_output(args.o, o + 2 * pair, args.dtype, {0.0f, 0.0f});
        if (lane == 0) store_lse(args, b, token, head, end_row(args, head / args.group, head, {-INFINITY, 0.0f}).lse);
      }
    }
  }
}

// The producer's lanes make the mbarriers.
template <typename G, int NT>
DEVICE void prepare(Smem<G, NT>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map) {
  const int lane = threadIdx.x % WARP, blocks = cluster_nctarank();
  if (lane == 0) {
    prefetch_tensormap(&k_map);
    prefetch_tensormap(&v_map);
  }
  if (lane < STAGES<G>) {
    mbarrier_init(smem_u32(&smem.full[lane]), 1);
    mbarrier_init(smem_u32(&smem.empty[lane]), G::WARPS);
  }
  if (lane < 2) {
    mbarrier_init(smem_u32(&smem.work_full[lane]), 1);
    mbarrier_init(smem_u32(&smem.work_empty[lane]), G::WARPS);
    mbarrier_init(smem_u32(&smem.slots_full[lane]), 1);
  }
  if (lane == 0) {  // lanes: of the warps that send columns here, and one for the sums of each row and block; all
    mbarrier_init(smem_u32(&smem.o_ready), G::THREADS + blocks * 8 * NT);
    mbarrier_init(smem_u32(&smem.o_done), G::THREADS * blocks);
  }
  fence_mbarrier_init();
  __syncwarp();
}

// One warp finds the block's pieces and has their tiles copied.
template <typename G, int NT>
DEVICE void produce(Smem<G, NT>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map, const DecodeArgs& args,
                    int unit, int units) {
  const int lane = threadIdx.x % WARP, rank = cluster_ctarank(), blocks = cluster_nctarank();
  const Schedule<G::Bc> schedule(args, blocks);
  Ring<STAGES<G>> ring;
  int x = args.automatic ? schedule.begin(unit) : 0;
  const int end = args.automatic ? schedule.end(unit) : 1;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    Work work = {};
    work.piece.batch = NO_WORK;
    if (x < end)
      work = find_work<G>(args, args.automatic ? schedule.piece(unit, x) : split_piece<G::Bc>(args, unit, x));
    const Piece& piece = work.piece;
    work.more = x < end;
    mbarrier_wait(smem_u32(&smem.work_empty[turn & 1]), turn >> 1 & 1 ^ 1);
    __syncwarp();  // all have seen it: what follows may end the next turn too
    if (lane == 0) {
      smem.work[turn & 1] = work;
      mbarrier_arrive(smem_u32(&smem.work_full[turn & 1]));
    }
    if (piece.batch == NO_WORK) break;
    copy_tiles<G>(smem, ring, k_map, v_map, args, piece.batch, work.kv_head, piece.first + rank, piece.last, blocks,
                  work.keys);
    const int2 slots = args.automatic ? schedule.slots(piece.batch, piece.item)
                                      : int2{(piece.batch * schedule.items + piece.item) * args.splits, args.splits};
    if (lane == 0) {  // only now: the copies were waited for
      smem.work[turn & 1].slots = slots;
      mbarrier_arrive(smem_u32(&smem.slots_full[turn & 1]));
    }
  }
  if (args.automatic && rank == 0) store_empty_sequences<G>(schedule, args, unit, units);
  if (blockIdx.x == 0)
    for (int batch = lane; batch < args.batch; batch += WARP) check_length(args, batch);
}

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__((WARPS<HS> + 1) * WARP, 1)
    decode_one_launch(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                      const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  constexpr int MADE = 2, ALL = G::THREADS + WARP;  // named barrier: the mbarriers are there
  const int warp = threadIdx.x / WARP, blocks = cluster_nctarank();
  if (warp == G::WARPS) {
    prepare<G, NT>(smem, k_map, v_map);
    bar_arrive(MADE, ALL);
    barrier_cluster_arrive();
    griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
    griddepcontrol_launch_dependents();
    produce<G, NT>(smem, k_map, v_map, args, blockIdx.x / blocks, gridDim.x / blocks);
    barrier_cluster_wait();
    barrier_cluster_arrive();  // at the consumers' last barrier
    return;
  }
  bar_sync(MADE, ALL);
  barrier_cluster_arrive();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Ring<STAGES<G>> ring;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    mbarrier_wait(smem_u32(&smem.work_full[turn & 1]), turn >> 1 & 1);
    const Work& work = smem.work[turn & 1];
    if (turn == 0) barrier_cluster_wait();  // the cluster's mbarriers are there
    if (work.piece.batch == NO_WORK) break;
    multiply_piece<G, NT>(smem, ring, args, work, turn);
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(smem_u32(&smem.work_empty[turn & 1]));
  }
  // All that was sent has been read: for racecheck, which has this from no mbarrier.
  barrier_cluster_arrive();
  barrier_cluster_wait();
}

// How many blocks share a head: as many as a cluster may have, unless there are heads enough for fewer.
template <typename G>
int cluster_size(const DecodeArgs& args) {
  int size = min(MAX_CLUSTER, G::WARPS);
  while (size > 1 && (args.automatic ? item_count(args) * size > args.blocks / 2 : args.splits % size != 0)) size /= 2;
#ifndef __CUDACC__
  while (size * (G::WARPS + 1) > WARP) size /= 2;  // the emulation runs at most 1024 threads together
#endif
  return size;
}

template <typename KV, int HS, int NT>
const char* launch_rows(DecodeArgs args, cudaStream_t stream) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  constexpr int THREADS = G::THREADS + WARP, SMEM = sizeof(Smem<G, NT>);
  CUtensorMap k_map, v_map;
  const char* error = make_cache_map<G>(&k_map, args, args.k, args.k_stride);
  if (!error) error = make_cache_map<G>(&v_map, args, args.v, args.v_stride);
  if (error) return error;
  const int cluster = cluster_size<G>(args), items = item_count(args);
  int units = max(args.blocks / 2 / cluster, 1);  // one block an SM
  units = resident_clusters<decode_one_launch<KV, HS, NT>>(cluster, THREADS, SMEM, units);
  if (units > items) units -= units % items;  // of equal lengths no unit has parts of two
  args.blocks = units;
  args.splits = max(args.splits / cluster, 1);
  if (!args.automatic) units = items * args.splits;
  return launch_dependent_cluster(decode_one_launch<KV, HS, NT>, units * cluster, cluster, THREADS, SMEM, stream, k_map,
                                  v_map, args);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
