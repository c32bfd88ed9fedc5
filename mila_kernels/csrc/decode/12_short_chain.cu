// Change: a shorter chain of waits. At batch 1 a cluster's tiles do not depend on the length, so that pages are
//   looked up and Q is asked for before it is known; a thread of the merge has 16 partial results on the way, not 8.
//   With up to 8 rows partial results are small: they are merged by a second kernel again, which waits beside the
//   first, as the next call's blocks wait beside it.
// Prediction: of 12 us at 4K keys, 16 heads on 1, the way to the first tile takes 3.4 us and the end 6.4: 1 us and
//   1.5 us less, at every length. With 2 rows as 10, less 2 us at batch 1.
// Measured: H200, 2026-11-30, one run with 11 for 16 heads on 1 and 10 for 8 on 4 (in brackets): 16 heads on 1, 4K /
//   32K / 128K keys 11.2 / 25.5 / 71.9 us (12.2 / 27.4 / 73.5), E4M3 10.8 / 19.2 / 44.4 (10.6 / 21.7 / 45.6); 8 heads
//   on 4, 4K / 16K / 28K 13.8 / 37.1 / 59.5 (14.6 / 37.8 / 60.4), E4M3 10.7 / 23.5 / 35.1 (13.9 / 25.4 / 37.1); batch
//   16, 28K 831 and 425 (831 and 426).
// Verdict: kept: 1 to 2 us faster than 11 with 16 rows, 1 to 3 us faster than 10 with 2, so that one step is the
//   default for both. What is left at 4K keys are 9 and 6 us that no byte is read in.
// Architectures: sm_90a sm_100a
// Alignment: 16
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "bulk.cuh"

constexpr int TILE_BYTES = 32 * 1024, RING_BYTES = 160 * 1024;
constexpr float P_BITS = 14.0f;  // FP16 probabilities are scaled by 2^14: keys stay down to 2^-38 of the largest
constexpr int CONSUMERS = 1;     // named barrier of the warps that multiply
constexpr int AT_ONCE = 16;      // partial results that a thread of the merge has on the way

// Whether the blocks of a cluster add up what they have found, for one launch: worth it for many rows.
template <int NT>
constexpr bool TOGETHER = NT == 2;

template <int HS>
constexpr int WARPS = HS / 16 < 8 ? HS / 16 : 8;
template <typename G>
constexpr int FITTING = RING_BYTES / static_cast<int>(sizeof(Tile<G>));
template <typename G>
constexpr int STAGES = FITTING<G> < 12 ? FITTING<G> : 12;

constexpr int NO_WORK = -1;  // in place of a sequence: the block's last piece has been

// A piece and whose rows it is.
struct Work {
  Piece piece;  // the tiles of the cluster: first + rank, and every step-th after it
  int step;
  int length, kv_head, first_row, last_row;
  KeyRange keys;  // that any of the rows sees
  int2 slots;     // of all pieces of the item: the first, and how many
  bool more;      // pieces follow
};

template <typename G, int NT>
struct Smem {
  alignas(1024) Tile<G> stages[STAGES<G>];
  float4 received[TOGETHER<NT> ? G::WARPS * G::M_TILES * NT * WARP : 1];  // accumulators of one block after another
  QueryRows<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
  alignas(16) Product<typename G::KV> p[8 * NT][G::Bc + 8];
  float4 totals[MAX_CLUSTER][4 * NT];  // of two rows each
  float rescale[8 * NT];
  Work work[2];  // of this piece and the next: the producer finds them
  int lost[STAGES<G>];
  int last;
  uint64_t full[STAGES<G>], empty[STAGES<G>], work_full[2], work_empty[2], slots_full[2], o_ready, o_done;
};

// The KV head of an item, and the first of its rows.
DEVICE int2 item_rows(const DecodeArgs& args, int item) {
  const int row_tiles = ceil_div(row_count(args), ROWS), kv_head = row_tiles == 1 ? item : item / row_tiles;
  return {kv_head, (item - kv_head * row_tiles) * ROWS};
}

template <typename G>
DEVICE Work find_work(const DecodeArgs& args, Piece piece, int step) {
  const int length = sequence_length(args, piece.batch);
  const int2 rows = item_rows(args, piece.item);
  return {piece, step, length, rows.x, rows.y, min(rows.y + ROWS, row_count(args)) - 1, seen_keys(args, length)};
}

// With a fixed number of splits, a cluster has every so many tiles of one item: where the first ones lie does not
// depend on the length.
template <typename G>
DEVICE Piece fixed_piece(const DecodeArgs& args, int unit, int blocks) {
  const int items = args.kv_heads * ceil_div(row_count(args), ROWS), index = unit / args.splits;
  const int batch = args.batch == 1 ? 0 : index / items;
  return {batch, index - batch * items, (unit - index * args.splits) * blocks, 0, unit};
}

// How a cluster's blocks share the merge: each has the columns of some of the warps. An item of it is an accumulator's
// two rows by two columns; rows that are no query's have none.
template <typename G>
struct Slices {
  int rank, blocks, warps, pairs, count;  // warps: of a block; pairs: of rows; count: items of a block

  DEVICE explicit Slices(const DecodeArgs& args)
      : rank(cluster_ctarank()), blocks(cluster_nctarank()), warps(G::WARPS >> log2_exact(blocks)),
        pairs((slot_rows(args) + 1) / 2), count(warps * G::M_TILES * 8 * pairs) {}

  DEVICE int item(int warp, int m, int g, int pair) const {
    return (((warp & (warps - 1)) * G::M_TILES + m) * 8 + g) * pairs + pair;
  }
};

// Of two rows: sums with what they are relative to, {reference, sum} of the first, then of the second; O in two columns
// as an accumulator has it.
struct RowPair {
  float4 totals, o;
};

// What n blocks or pieces have found of an item, added up in their order.
template <int AT_ONCE>
DEVICE RowPair add_up(const float4* totals, int totals_stride, const float4* parts, int parts_stride, int n) {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, o[4] = {};
#pragma unroll 1
  for (int first = 0; first < n; first += AT_ONCE) {
    float4 t[AT_ONCE], part[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      t[i] = {-INFINITY, 0.0f, -INFINITY, 0.0f};
      part[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (first + i < n) {
        t[i] = totals[(first + i) * totals_stride];
        part[i] = parts[static_cast<int64_t>(first + i) * parts_stride];
      }
    }
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float new_top = top[r];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) new_top = fmaxf(new_top, r ? t[i].z : t[i].x);
      shift[r] = new_top == -INFINITY ? 0.0f : new_top;
      const float own = ex2_approx_ftz(top[r] - shift[r]);
      top[r] = new_top;
      sum[r] *= own, o[r] *= own, o[r + 2] *= own;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float weight[2] = {ex2_approx_ftz(t[i].x - shift[0]), ex2_approx_ftz(t[i].z - shift[1])};
      sum[0] += weight[0] * t[i].y, sum[1] += weight[1] * t[i].w;
      o[0] += weight[0] * part[i].x, o[1] += weight[1] * part[i].y;
      o[2] += weight[0] * part[i].z, o[3] += weight[1] * part[i].w;
    }
  }
  return {{top[0], sum[0], top[1], sum[1]}, {o[0], o[1], o[2], o[3]}};
}

template <typename G>
DEVICE void store_pair(const DecodeArgs& args, const Work& work, int pair, int column, int next, const RowPair& total) {
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int row = work.first_row + 2 * pair + r;
    if (row > work.last_row) return;
    const int token = row_token(args, row), head = row_head(args, work.kv_head, row);
    const Partial own = r ? Partial{total.totals.z, total.totals.w} : Partial{total.totals.x, total.totals.y};
    const RowEnd end = end_row(args, work.kv_head, head, own);
    const float x = (r ? total.o.y : total.o.x) * end.factor, y = (r ? total.o.w : total.o.z) * end.factor;
    const int64_t o = query_offset(args, args.o_stride, work.piece.batch, token, head);
    if constexpr (std::is_same_v<typename G::KV, e4m3>) {
      store_output(args.o, o + column, args.dtype, float2{x, y});
    } else {
      store_output(args.o, o + column, args.dtype, x);
      store_output(args.o, o + next, args.dtype, y);
    }
    if (column == 0) store_lse(args, work.piece.batch, token, head, end.lse);
  }
}

// Adds up what the cluster's blocks have sent here; then, in the last block to come, what all pieces of the item have
// left in memory.
template <typename G, int NT>
DEVICE void merge_slice(Smem<G, NT>& smem, const DecodeArgs& args, const Work& work) {
  const Slices<G> own(args);
  const int64_t piece_items = own.blocks * own.count, first = own.rank * own.count;
  float4* totals = reinterpret_cast<float4*>(args.partial_sum);
  float4* parts = reinterpret_cast<float4*>(args.partial_o);
#pragma unroll 1
  for (bool last = false;; last = true) {
#pragma unroll 1
    for (int i = threadIdx.x; i < own.count; i += G::THREADS) {
      const int place = static_cast<uint32_t>(i) / static_cast<uint32_t>(own.pairs), pair = i - place * own.pairs;
      const RowPair total =
          last ? add_up<AT_ONCE>(totals + work.slots.x * own.pairs + pair, own.pairs,
                               parts + work.slots.x * piece_items + first + i, piece_items, work.slots.y)
               : add_up<MAX_CLUSTER>(&smem.totals[0][pair], 4 * NT, &smem.received[i], own.count, own.blocks);
      if (last) {
        const int g = place % 8, m = place / 8 % G::M_TILES, warp = own.rank * own.warps + place / 8 / G::M_TILES;
        store_pair<G>(args, work, pair, value_column<G>(warp, m, g, 0), value_column<G>(warp, m, g, 1), total);
      } else {
        parts[work.piece.slot * piece_items + first + i] = total.o;
        if (place == 0) totals[work.piece.slot * own.pairs + pair] = total.totals;  // every block notes the same
      }
    }
    if (last) return;
    bar_sync(CONSUMERS, G::THREADS);
    if (threadIdx.x == 0) {
      const int items = args.kv_heads * ceil_div(row_count(args), ROWS);
      int32_t* arrivals = args.arrivals + (work.piece.batch * items + work.piece.item) * MAX_CLUSTER + own.rank;
      __threadfence();  // for the whole block: the barrier came before
      smem.last = atomicAdd(arrivals, 1) == work.slots.y - 1;
      if (smem.last) *arrivals = 0;
      __threadfence();
    }
    bar_sync(CONSUMERS, G::THREADS);
    if (!smem.last) return;
  }
}

// Partial results as merge_pieces takes them.
template <typename G, int NT>
DEVICE void store_partial_rows(const DecodeArgs& args, const float (&o_regs)[G::M_TILES][NT][4], int64_t partial,
                               int last_row) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // rows 2t and 2t + 1
      const int row = n * 8 + 2 * t + j;
      if (row > last_row) continue;
      float* o = args.partial_o + (partial + row) * G::HS;
      if constexpr (std::is_same_v<typename G::KV, e4m3> && G::M_TILES >= 2) {  // a lane has neighbouring columns
#pragma unroll
        for (int m = 0; m < G::M_TILES; m += 2)
          *reinterpret_cast<float4*>(o + value_column<G>(m, g, 0)) = {o_regs[m][n][j], o_regs[m][n][j + 2],
                                                                      o_regs[m + 1][n][j], o_regs[m + 1][n][j + 2]};
      } else {
#pragma unroll
        for (int m = 0; m < G::M_TILES; ++m) {
          o[value_column<G>(m, g, 0)] = o_regs[m][n][j];
          o[value_column<G>(m, g, 1)] = o_regs[m][n][j + 2];
        }
      }
    }
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

  bar_sync(CONSUMERS, G::THREADS);  // Q is there
  uint2 q_regs[G::STEPS][NT];
  load_fragments<G, NT>(q_regs, smem.queries, part);
  const float scale = smem.queries.scale[own_row];
  // What every row sees: tiles within need no mask.
  const KeyRange common = {visible_keys(args, work.length, row_token(args, work.last_row)).begin,
                           visible_keys(args, work.length, row_token(args, work.first_row)).end};

  float row_max = -INFINITY, row_sum = 0.0f, o_regs[G::M_TILES][NT][4] = {};
  int lost = 0;
#pragma unroll 1
  for (int tile = work.piece.first + rank, last = work.piece.last, step = work.step; tile < last; tile += step) {
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

  row_sum = warp_sum<LANES>(row_sum);
  const Partial own_total = {row_max - TOP, lost ? NAN : row_sum};
  if constexpr (!TOGETHER<NT>) {
    const int64_t partial = static_cast<int64_t>(work.piece.slot) * slot_rows(args);
    if (lane % LANES == 0 && work.first_row + own_row <= work.last_row)
      reinterpret_cast<Partial*>(args.partial_sum)[partial + own_row] = own_total;
    store_partial_rows<G, NT>(args, o_regs, partial, work.last_row - work.first_row);
    return;
  } else {
    // Each warp's columns go to one block of the cluster; the sums of its rows to all.
    const Slices<G> slices(args);
    if (lane % LANES < blocks) {
      const Partial* totals = reinterpret_cast<const Partial*>(smem.totals[rank]) + own_row;
      const uint32_t there = mapa_shared_cluster(smem_u32(totals), lane % LANES);
      st_shared_cluster_u32(there, __float_as_uint(own_total.reference));
      st_shared_cluster_u32(there + 4, __float_as_uint(own_total.sum));
    }
    const int to = warp >> log2_exact(slices.warps);
    const uint32_t there = mapa_shared_cluster(smem_u32(&smem.received[rank * slices.count]), to);
#pragma unroll
    for (int m = 0; m < G::M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
        if (n * 4 + t < slices.pairs)
          st_shared_cluster_v4_f32(there + slices.item(warp, m, g, n * 4 + t) * sizeof(float4),
                                   {o_regs[m][n][0], o_regs[m][n][1], o_regs[m][n][2], o_regs[m][n][3]});
    // Every lane says so where it has sent: racecheck does not follow one lane that speaks for its warp.
    const uint32_t o_ready = smem_u32(&smem.o_ready);
    if (lane % LANES < blocks) mbarrier_arrive_cluster(mapa_shared_cluster(o_ready, lane % LANES));
    mbarrier_arrive_cluster(mapa_shared_cluster(o_ready, to));
    mbarrier_wait_cluster(smem_u32(&smem.o_ready), turn & 1);
    mbarrier_wait(smem_u32(&smem.slots_full[turn & 1]), turn >> 1 & 1);
    merge_slice<G, NT>(smem, args, work);
    if (!work.more) return;
    // Nobody may send the next piece's before all have read these.
    const uint32_t o_done = smem_u32(&smem.o_done);
    for (int block = 0; block < blocks; ++block) mbarrier_arrive_cluster(mapa_shared_cluster(o_done, block));
    mbarrier_wait_cluster(o_done, turn & 1);
  }
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
                    int unit) {
  const int lane = threadIdx.x % WARP, rank = cluster_ctarank(), blocks = cluster_nctarank();
  const bool fixed = !args.automatic;
  Ring<STAGES<G>> ring;
  auto publish = [&](int turn, const Work& work) {
    mbarrier_wait(smem_u32(&smem.work_empty[turn & 1]), turn >> 1 & 1 ^ 1);
    __syncwarp();  // all have seen it: what follows may end the next turn too
    if (lane == 0) {
      smem.work[turn & 1] = work;
      mbarrier_arrive(smem_u32(&smem.work_full[turn & 1]));
    }
  };

  Piece piece = {};
  bool early = false;
  int page = 0, step = blocks, x = 0, end = 1, turn = 0;
  if (fixed) {
    step *= args.splits;
    piece = fixed_piece<G>(args, unit, blocks);
    early = args.page_table && args.window == 0;  // tiles count from the sequence's first
    if (early) page = early_page<G>(args, piece.batch, piece.first + rank, step);
  }
  const Schedule<G::Bc> schedule(args, blocks, !fixed);
  if (!fixed) x = schedule.begin(unit), end = schedule.end(unit);
#pragma unroll 1
  for (; x < end; ++turn) {
    if (!fixed) piece = schedule.piece(unit, x);
    Work work = find_work<G>(args, piece, step);
    if (fixed) {
      ++x;
      work.piece.first += work.keys.begin / G::Bc;
      work.piece.last = work.keys.begin < work.keys.end ? ceil_div(work.keys.end, G::Bc) : 0;
    } else {
      work.keys = {max(work.keys.begin, piece.first * G::Bc), min(work.keys.end, piece.last * G::Bc)};
    }
    work.more = x < end;
    publish(turn, work);
    copy_tiles<G>(smem, ring, k_map, v_map, args, piece.batch, work.kv_head, work.piece.first + rank, work.piece.last,
                  step, work.keys, early, page);
    if constexpr (TOGETHER<NT>) {  // late: the copies were waited for
      const int2 slots = fixed ? int2{unit - unit % args.splits, args.splits} : schedule.slots(piece.batch, piece.item);
      if (lane == 0) {
        smem.work[turn & 1].slots = slots;
        mbarrier_arrive(smem_u32(&smem.slots_full[turn & 1]));
      }
    }
  }
  if (turn == 0) {
    Work none = {};
    none.piece.batch = NO_WORK;
    publish(0, none);
  }
  if constexpr (!TOGETHER<NT>) return;  // the merge does the rest
  if (!fixed && rank == 0) store_empty_sequences<G>(schedule, args, unit, gridDim.x / blocks);
  if (blockIdx.x == 0)
    for (int batch = lane; batch < args.batch; batch += WARP) check_length(args, batch);
}

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__((WARPS<HS> + 1) * WARP, 1)
    decode_short_chain(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                      const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  constexpr int MADE = 2, ALL = G::THREADS + WARP;  // named barrier: the mbarriers are there
  const int warp = threadIdx.x / WARP, blocks = cluster_nctarank(), unit = blockIdx.x >> log2_exact(blocks);
  if (warp == G::WARPS) {
    prepare<G, NT>(smem, k_map, v_map);
    bar_arrive(MADE, ALL);
    if constexpr (TOGETHER<NT>) barrier_cluster_arrive();
    griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
    griddepcontrol_launch_dependents();
    produce<G, NT>(smem, k_map, v_map, args, unit);
    if constexpr (TOGETHER<NT>) {
      barrier_cluster_wait();
      barrier_cluster_arrive();  // at the consumers' last barrier
    }
    return;
  }
  bar_sync(MADE, ALL);
  if constexpr (TOGETHER<NT>) barrier_cluster_arrive();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Ring<STAGES<G>> ring;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Work& work = smem.work[turn & 1];
    int batch, item;
    if (args.automatic) {
      mbarrier_wait(smem_u32(&smem.work_full[turn & 1]), turn >> 1 & 1);
      batch = work.piece.batch, item = work.piece.item;
    } else {  // known without: Q is asked for at once
      const Piece piece = fixed_piece<G>(args, unit, blocks);
      batch = piece.batch, item = piece.item;
    }
    if (batch != NO_WORK) {
      const int2 rows = item_rows(args, item);
      load_query_rows<G, NT>(smem.queries, args, batch, rows.x, rows.y);
    }
    if (TOGETHER<NT> && turn == 0) barrier_cluster_wait();  // the cluster's mbarriers are there
    if (batch == NO_WORK) break;
    mbarrier_wait(smem_u32(&smem.work_full[turn & 1]), turn >> 1 & 1);
    multiply_piece<G, NT>(smem, ring, args, work, turn);
    if (!work.more) break;
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(smem_u32(&smem.work_empty[turn & 1]));
  }
  // All that was sent has been read: for racecheck, which has this from no mbarrier.
  if constexpr (TOGETHER<NT>) {
    barrier_cluster_arrive();
    barrier_cluster_wait();
  }
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
  constexpr auto KERNEL = decode_short_chain<KV, HS, NT>;
  CUtensorMap k_map, v_map;
  const char* error = make_cache_map<G>(&k_map, args, args.k, args.k_stride);
  if (!error) error = make_cache_map<G>(&v_map, args, args.v, args.v_stride);
  if (error) return error;
  const int cluster = TOGETHER<NT> ? cluster_size<G>(args) : 1, items = item_count(args);
  int units = max(args.blocks / 2 / cluster, 1);  // one block an SM
  if (cluster > 1) units = resident_clusters<KERNEL>(cluster, THREADS, SMEM, units);
  if (args.automatic && args.batch == 1 && units >= items) {  // nothing to balance
    args.automatic = 0;
    args.splits = min(units / items, MAX_PARTS);
  } else {
    args.splits = max(args.splits / cluster, 1);
  }
  args.blocks = units;
  if (!args.automatic) units = items * args.splits;
  if constexpr (TOGETHER<NT>)
    return launch_dependent_cluster(KERNEL, units * cluster, cluster, THREADS, SMEM, stream, k_map, v_map, args);
  error = launch_dependent(KERNEL, units, THREADS, SMEM, stream, k_map, v_map, args);
  return error ? error : launch_dependent(merge_pieces<HS, G::Bc, true>, merge_grid(args), MERGE_WARPS * WARP,
                                          sizeof(MergeSmem), stream, args);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
