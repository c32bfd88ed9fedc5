// Change: no clusters. With more than 8 rows a block leaves its own partial result, O in 16 bits under a power of two for
//   each warp's columns, and a second kernel merges them that waits beside the first: 128 blocks for 512 columns, whose
//   threads have all they need on the way at once. 96 KB of tiles on the way in place of 160 leave it room.
// Prediction: of 11.2 us at 4K keys, 16 heads on 1, the way through the cluster takes 2.0, a fence and a counter 1.0, the
//   last block's merge 2.8. In their place 0.5 for 16 KB of stores, 1 until the second kernel may go on, 1.5 for it: 3
//   us less at any length, and 132 multiprocessors read in place of 120.
// Measured: H200, 2026-11-30, one run with 12 (in brackets): 16 heads on 1, 4K / 32K / 128K keys 9.2 / 23.6 / 68.1 us
//   (11.1 / 25.4 / 71.7), E4M3 9.3 / 16.2 / 40.6 (10.8 / 19.0 / 44.7); with 160 KB on the way 9.4 / 24.2 / 69.2, with 192,
//   where the merge has no room beside, 10.8 / 25.5 / 70.1. 8 heads on 4, E4M3, 4K / 16K / 28K 10.7 / 22.6 / 34.0 (10.7 /
//   23.4 / 34.8); BF16 needs its 160 KB there: with 96 14.4 / 38.6 / 61.2 (13.8 / 37.0 / 59.2). Four other designs, BF16,
//   16 heads: what clusters of 8 have added up merged by a second kernel 9.9 / 24.4 / 70.8, the same with clusters of 4
//   11.2 / 25.8 / 72.9, of 2 14.5 / 29.1 / 76.0, and 12 with clusters of 4 16.9 / 31.5 / 78.5.
// Verdict: kept: 2 to 4 us faster with 16 rows. A block at every multiprocessor that leaves 16 KB is cheaper than any
//   exchange between blocks. The rest of the prediction went to the end of the first grid, that the second waits for.
// Architectures: sm_90a sm_100a
// Alignment: 16
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "bulk.cuh"

constexpr int TILE_BYTES = 32 * 1024;
constexpr float P_BITS = 14.0f;  // FP16 probabilities are scaled by 2^14: keys stay down to 2^-38 of the largest
constexpr int CONSUMERS = 1;     // named barrier of the warps that multiply

// Whether a block leaves O in 16 bits: worth it for many rows.
template <int NT>
constexpr bool SHORT = NT == 2;

template <int HS>
constexpr int WARPS = HS / 16 < 8 ? HS / 16 : 8;
// 96 KB on the way do where a tile takes longer than it comes: for many rows, and for E4M3.
template <typename G, int NT>
constexpr int RING_BYTES = (NT == 2 || std::is_same_v<typename G::KV, e4m3> ? 96 : 160) * 1024;
template <typename G, int NT>
constexpr int FITTING = RING_BYTES<G, NT> / static_cast<int>(sizeof(Tile<G>));
template <typename G, int NT>
constexpr int STAGES = FITTING<G, NT> < 12 ? FITTING<G, NT> : 12;

constexpr int NO_WORK = -1;  // in place of a sequence: the block's last piece has been

// A piece and whose rows it is.
struct Work {
  Piece piece;  // its tiles: the first, and every step-th after it
  int step;
  int length, kv_head, first_row, last_row;
  KeyRange keys;  // that any of the rows sees
  bool more;      // pieces follow
};

template <typename G, int NT>
struct Smem {
  alignas(1024) Tile<G> stages[STAGES<G, NT>];
  QueryRows<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
  alignas(16) Product<typename G::KV> p[8 * NT][G::Bc + 8];
  float rescale[8 * NT];
  Work work[2];  // of this piece and the next: the producer finds them
  int lost[STAGES<G, NT>];
  uint64_t full[STAGES<G, NT>], empty[STAGES<G, NT>], work_full[2], work_empty[2];
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

// With a fixed number of splits, a block has every so many tiles of one item: where the first ones lie does not depend
// on the length.
DEVICE Piece fixed_piece(const DecodeArgs& args, int block) {
  const int items = args.kv_heads * ceil_div(row_count(args), ROWS), index = block / args.splits;
  const int batch = args.batch == 1 ? 0 : index / items;
  return {batch, index - batch * items, block - index * args.splits, 0, block};
}

// What a block has found, of up to 16 rows. O as it lies in registers: of a lane and M tile {row 2t, 2t + 1} in two
// columns, then {8 + 2t, 9 + 2t}, FP16, times a power of two for each warp. It takes the place of more than 8 rows of
// FP32.
template <typename G>
struct ShortPartial {
  uint4 o[G::WARPS][G::M_TILES][WARP];
  Partial totals[ROWS];
  float scale[G::WARPS];  // of O
};

static_assert(sizeof(ShortPartial<Shape<bf16, 64, TILE_BYTES, WARPS<64>>>) <= 10 * 64 * sizeof(float));

template <typename G>
DEVICE ShortPartial<G>* short_partials(const DecodeArgs& args, int slot) {
  return reinterpret_cast<ShortPartial<G>*>(args.partial_o) + slot;
}

template <typename G>
DEVICE void store_short_partial(ShortPartial<G>& partial, const float (&o_regs)[G::M_TILES][2][4]) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32_t top = 0;  // the largest exponent that is a number's
#pragma unroll
  for (int m = 0; m < G::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t exponent = __float_as_uint(o_regs[m][n][j]) & 0x7f800000u;
        top = max(top, exponent == 0x7f800000u ? 0 : exponent);
      }
  const int exponent = static_cast<int>(__reduce_max_sync(ALL_LANES, top) >> 23);
  const int kept = max(exponent, 15) - 14;  // the largest number comes to 2^14
  const float down = __uint_as_float(static_cast<uint32_t>(254 - kept) << 23);
  if (lane == 0) partial.scale[warp] = __uint_as_float(static_cast<uint32_t>(kept) << 23);
#pragma unroll
  for (int m = 0; m < G::M_TILES; ++m) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = pack2<fp16>(o_regs[m][i / 2][i % 2 * 2] * down, o_regs[m][i / 2][i % 2 * 2 + 1] * down);
    partial.o[warp][m][lane] = {words[0], words[1], words[2], words[3]};
  }
}

// A block of the merge has MERGE_LANES lanes of a warp's M tile: a thread has one of them, of every GROUPS-th piece. For
// the weights a thread has a row.
constexpr int MERGE_LANES = 8, MERGE_THREADS = 128, GROUPS = MERGE_THREADS / MERGE_LANES, AT_ONCE = 9;
constexpr int MERGE_ROUND = GROUPS * AT_ONCE, ROW_GROUPS = MERGE_THREADS / ROWS, ROW_PIECES = MERGE_ROUND / ROW_GROUPS;

struct ShortMergeSmem {
  float weights[MERGE_ROUND][ROWS];
  float scales[MERGE_ROUND];
  float tops[ROW_GROUPS][ROWS], sums[ROW_GROUPS][ROWS], factors[ROWS];
  float o[GROUPS][8][MERGE_LANES];
};

template <typename G>
__global__ void __launch_bounds__(MERGE_THREADS) merge_short_partials(const DecodeArgs args) {
  griddepcontrol_launch_dependents();
  ShortMergeSmem& smem = dynamic_smem<ShortMergeSmem>();
  constexpr int PARTS = WARP / MERGE_LANES;
  const int items = args.kv_heads * ceil_div(row_count(args), ROWS);
  const int batch = blockIdx.y / items, item = blockIdx.y - batch * items;
  const int warp = blockIdx.x / (PARTS * G::M_TILES), m = blockIdx.x / PARTS % G::M_TILES;
  const int own = threadIdx.x % MERGE_LANES, group = threadIdx.x / MERGE_LANES;
  const int lane = blockIdx.x % PARTS * MERGE_LANES + own, t = lane % 4;
  const int own_row = threadIdx.x % ROWS, row_group = threadIdx.x / ROWS;
  griddepcontrol_wait();
  if (blockIdx.x == 0 && item == 0 && threadIdx.x == 0) check_length(args, batch);
  const Schedule<G::Bc> schedule(args, MIN_TILES, args.automatic);
  const int2 slots =
      args.automatic ? schedule.slots(batch, item) : int2{static_cast<int>(blockIdx.y) * args.splits, args.splits};

  float top = -INFINITY, sum = 0.0f, o[8] = {};
#pragma unroll 1
  for (int first = 0; first < slots.y; first += MERGE_ROUND) {
    const ShortPartial<G>* pieces = short_partials<G>(args, slots.x + first);
    const int count = slots.y - first;
    Partial totals[ROW_PIECES];
    uint4 parts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROW_PIECES; ++i) {
      const int piece = i * ROW_GROUPS + row_group;
      totals[i] = {-INFINITY, 0.0f};
      if (piece < count) totals[i] = pieces[piece].totals[own_row];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int piece = i * GROUPS + group;
      parts[i] = {0, 0, 0, 0};
      if (piece < count) parts[i] = pieces[piece].o[warp][m][lane];
    }
    for (int i = threadIdx.x; i < MERGE_ROUND; i += MERGE_THREADS)
      smem.scales[i] = i < count ? pieces[i].scale[warp] : 0.0f;
    float new_top = top;
#pragma unroll
    for (int i = 0; i < ROW_PIECES; ++i) new_top = fmaxf(new_top, totals[i].reference);
    smem.tops[row_group][own_row] = new_top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROW_GROUPS; ++i) new_top = fmaxf(new_top, smem.tops[i][own_row]);
    const float shift = new_top == -INFINITY ? 0.0f : new_top, factor = ex2_approx_ftz(top - shift);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < ROW_PIECES; ++i) {
      const float weight = ex2_approx_ftz(totals[i].reference - shift);
      sum += weight * totals[i].sum;
      smem.weights[i * ROW_GROUPS + row_group][own_row] = weight;
    }
    if (row_group == 0) smem.factors[own_row] = factor;
    top = new_top;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] *= smem.factors[j / 4 * 8 + 2 * t + j % 2];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float* weights = smem.weights[i * GROUPS + group];
      const float scale = smem.scales[i * GROUPS + group];
      const uint32_t words[4] = {parts[i].x, parts[i].y, parts[i].z, parts[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[j]));
        o[2 * j] += weights[j / 2 * 8 + 2 * t] * (pair.x * scale);
        o[2 * j + 1] += weights[j / 2 * 8 + 2 * t + 1] * (pair.y * scale);
      }
    }
    __syncthreads();
  }
  smem.sums[row_group][own_row] = sum;
  if (row_group == 0) smem.tops[0][own_row] = top;
#pragma unroll
  for (int j = 0; j < 8; ++j) smem.o[group][j][own] = o[j];
  __syncthreads();
  if (group >= 8) return;

  // A thread has an element of O: of the lane `own`, the group-th.
  const int2 rows = item_rows(args, item);
  const int row = group / 4 * 8 + 2 * t + group % 2;
  if (rows.y + row >= row_count(args)) return;
  Partial total = {smem.tops[0][row], 0.0f};
  float x = 0.0f;
#pragma unroll
  for (int i = 0; i < ROW_GROUPS; ++i) total.sum += smem.sums[i][row];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) x += smem.o[i][group][own];
  const int token = row_token(args, rows.y + row), head = row_head(args, rows.x, rows.y + row);
  const RowEnd end = end_row(args, rows.x, head, total);
  const int column = value_column<G>(warp, m, lane / 4, group / 2 % 2);
  store_output(args.o, query_offset(args, args.o_stride, batch, token, head) + column, args.dtype, x * end.factor);
  if (column == 0) store_lse(args, batch, token, head, end.lse);
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
DEVICE void multiply_piece(Smem<G, NT>& smem, Ring<STAGES<G, NT>>& ring, const DecodeArgs& args, const Work& work,
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
  for (int tile = work.piece.first, last = work.piece.last, step = work.step; tile < last; tile += step) {
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
  if constexpr (SHORT<NT>) {
    ShortPartial<G>& partial = *short_partials<G>(args, work.piece.slot);
    if (lane % LANES == 0) partial.totals[own_row] = own_total;
    store_short_partial<G>(partial, o_regs);
  } else {
    const int64_t partial = static_cast<int64_t>(work.piece.slot) * slot_rows(args);
    if (lane % LANES == 0 && work.first_row + own_row <= work.last_row)
      reinterpret_cast<Partial*>(args.partial_sum)[partial + own_row] = own_total;
    store_partial_rows<G, NT>(args, o_regs, partial, work.last_row - work.first_row);
  }
}

// The producer's lanes make the mbarriers.
template <typename G, int NT>
DEVICE void prepare(Smem<G, NT>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map) {
  const int lane = threadIdx.x % WARP;
  if (lane == 0) {
    prefetch_tensormap(&k_map);
    prefetch_tensormap(&v_map);
  }
  if (lane < STAGES<G, NT>) {
    mbarrier_init(smem_u32(&smem.full[lane]), 1);
    mbarrier_init(smem_u32(&smem.empty[lane]), G::WARPS);
  }
  if (lane < 2) {
    mbarrier_init(smem_u32(&smem.work_full[lane]), 1);
    mbarrier_init(smem_u32(&smem.work_empty[lane]), G::WARPS);
  }
  fence_mbarrier_init();
  __syncwarp();
}

// One warp finds the block's pieces and has their tiles copied.
template <typename G, int NT>
DEVICE void produce(Smem<G, NT>& smem, const CUtensorMap& k_map, const CUtensorMap& v_map, const DecodeArgs& args,
                    int block) {
  const int lane = threadIdx.x % WARP;
  const bool fixed = !args.automatic;
  Ring<STAGES<G, NT>> ring;
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
  int page = 0, step = 1, x = 0, end = 1, turn = 0;
  if (fixed) {
    step = args.splits;
    piece = fixed_piece(args, block);
    early = args.page_table && args.window == 0;  // tiles count from the sequence's first
    if (early) page = early_page<G>(args, piece.batch, piece.first, step);
  }
  const Schedule<G::Bc> schedule(args, MIN_TILES, !fixed);
  if (!fixed) x = schedule.begin(block), end = schedule.end(block);
#pragma unroll 1
  for (; x < end; ++turn) {
    if (!fixed) piece = schedule.piece(block, x);
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
    copy_tiles<G>(smem, ring, k_map, v_map, args, piece.batch, work.kv_head, work.piece.first, work.piece.last,
                  step, work.keys, early, page);
  }
  if (turn == 0) {
    Work none = {};
    none.piece.batch = NO_WORK;
    publish(0, none);
  }
}

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__((WARPS<HS> + 1) * WARP, 1)
    decode_short_partials(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                      const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  constexpr int MADE = 2, ALL = G::THREADS + WARP;  // named barrier: the mbarriers are there
  const int warp = threadIdx.x / WARP, block = blockIdx.x;
  if (warp == G::WARPS) {
    prepare<G, NT>(smem, k_map, v_map);
    bar_arrive(MADE, ALL);
    griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
    griddepcontrol_launch_dependents();
    produce<G, NT>(smem, k_map, v_map, args, block);
    return;
  }
  bar_sync(MADE, ALL);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Ring<STAGES<G, NT>> ring;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const Work& work = smem.work[turn & 1];
    int batch, item;
    if (args.automatic) {
      mbarrier_wait(smem_u32(&smem.work_full[turn & 1]), turn >> 1 & 1);
      batch = work.piece.batch, item = work.piece.item;
    } else {  // known without: Q is asked for at once
      const Piece piece = fixed_piece(args, block);
      batch = piece.batch, item = piece.item;
    }
    if (batch != NO_WORK) {
      const int2 rows = item_rows(args, item);
      load_query_rows<G, NT>(smem.queries, args, batch, rows.x, rows.y);
    }
    if (batch == NO_WORK) break;
    mbarrier_wait(smem_u32(&smem.work_full[turn & 1]), turn >> 1 & 1);
    multiply_piece<G, NT>(smem, ring, args, work, turn);
    if (!work.more) break;
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(smem_u32(&smem.work_empty[turn & 1]));
  }
}

template <typename KV, int HS, int NT>
const char* launch_rows(DecodeArgs args, cudaStream_t stream) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  constexpr int THREADS = G::THREADS + WARP, SMEM = sizeof(Smem<G, NT>);
  CUtensorMap k_map, v_map;
  const char* error = make_cache_map<G>(&k_map, args, args.k, args.k_stride);
  if (!error) error = make_cache_map<G>(&v_map, args, args.v, args.v_stride);
  if (error) return error;
  const int items = item_count(args);
  args.blocks = max(args.blocks / 2, 1);  // one block an SM
  if (args.automatic && args.batch == 1 && args.blocks >= items) {  // nothing to balance
    args.automatic = 0;
    args.splits = min(args.blocks / items, MAX_PARTS);
  }
  error = launch_dependent(decode_short_partials<KV, HS, NT>, schedule_grid(args), THREADS, SMEM, stream, k_map, v_map,
                           args);
  if (error) return error;
  if constexpr (SHORT<NT>)
    return launch_dependent(merge_short_partials<G>, dim3(WARP / MERGE_LANES * G::WARPS * G::M_TILES, items), MERGE_THREADS,
                            sizeof(ShortMergeSmem), stream, args);
  return launch_dependent(merge_pieces<HS, G::Bc, true>, merge_grid(args), MERGE_WARPS * WARP, sizeof(MergeSmem), stream,
                          args);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
