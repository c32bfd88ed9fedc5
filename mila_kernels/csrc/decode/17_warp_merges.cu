// Change: where a row has few pieces, as in a batch, a warp merges 64 columns of one on its own, not a block.
// Prediction: batch 64, 8 heads on 4, 4K keys: 494 us, where batch 16 takes 475 for the same bytes. The merge has 4,096
//   blocks of 8 warps, of which 2 or 3 have a piece to add; 800 fit beside the blocks that read, so 5 waves of 2 to 3 us
//   come after the last tile. 512 blocks fit at once: 10 us less, 32 heads on 8 (4,096 blocks too) the same; batch 16 of
//   1,024 blocks 2 us less, one sequence nothing. More than 8 rows, whose merge has 128 blocks an item, likewise.
// Measured: H200, 2026-11-30, one run with 16 (in brackets): 8 heads on 4, 4K keys, batch 64 470 us (490), E4M3 249 (269),
//   batch 16 124 (128), E4M3 68 (71); batch 16 at 16K 468 (471). 32 heads on 8, head dim 128, batch 64, 8K keys 479 (499), 1K
//   72 (92). Batch 4 the same. Without any merge the first is 467. A ring of 128 or 192 KB in place of 160, and of 96 for
//   E4M3, changes nothing. More than 8 rows, in another run: 16 heads on 1, 4K keys, batch 64 134 (184), E4M3 76 (126),
//   batch 32 71 (94); 8 heads on 4, 4 tokens at once, batch 64 509 (586). A ring of 1,024 keys, 16 on 8, 134 (153).
// Verdict: kept: 20 to 77 us, twice what was predicted and more, as each block of the merge also worked out where 64
//   sequences lie. What is left over memory's time is the first tile's way, and a tile more or less a block.
// Architectures: sm_90a sm_100a
// Alignment: 16
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "bulk.cuh"

constexpr int TILE_BYTES = 32 * 1024;
constexpr int AHEAD_BYTES = 64 * 1024;  // of keys and values, asked for before they may be used
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

// merge_row() of at most FEW partial results: every warp works out all their weights, while those of O that it adds up
// are on their way.
constexpr int FEW = 2 * WARP;

template <int HS>
DEVICE void merge_few(const DecodeArgs& args, int batch, int token, int head, PartialRows rows) {
  constexpr int MINE = FEW / MERGE_WARPS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pair = blockIdx.x * WARP + lane;
  const Partial* partials = reinterpret_cast<const Partial*>(args.partial_sum) + rows.first;
  const float2* o_parts = reinterpret_cast<const float2*>(args.partial_o + rows.first * HS) + pair;
  MergeSmem& smem = dynamic_smem<MergeSmem>();
  Partial totals[2];
  float2 parts[MINE];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int part = i * WARP + lane;
    totals[i] = part < rows.count ? partials[part * rows.stride] : Partial{-INFINITY, 0.0f};
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int part = i * MERGE_WARPS + warp;
    parts[i] = part < rows.count ? o_parts[part * rows.stride * (HS / 2)] : float2{0.0f, 0.0f};
  }
  const float top = warp_max(fmaxf(totals[0].reference, totals[1].reference));
  const float shift = top == -INFINITY ? 0.0f : top;
  const float weights[2] = {exp2f(totals[0].reference - shift), exp2f(totals[1].reference - shift)};
  const float sum = warp_sum(weights[0] * totals[0].sum + weights[1] * totals[1].sum);
  float2 o = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const float weight = __shfl_sync(ALL_LANES, weights[i / (MINE / 2)], (i * MERGE_WARPS + warp) % WARP);
    // A part without a key weighs 0: its O may never have been written.
    if (weight != 0.0f) o = {o.x + weight * parts[i].x, o.y + weight * parts[i].y};
  }
  smem.o[warp][lane] = o;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int i = 1; i < MERGE_WARPS; ++i) o = {o.x + smem.o[i][lane].x, o.y + smem.o[i][lane].y};
  const RowEnd end = end_row(args, head / args.group, head, {top, sum});
  store_output(args.o, query_offset(args, args.o_stride, batch, token, head) + 2 * pair, args.dtype,
               {o.x * end.factor, o.y * end.factor});
  if (blockIdx.x != 0 || lane != 0) return;
  store_lse(args, batch, token, head, end.lse);
  if (blockIdx.y == 0) check_length(args, batch);
}

// merge_pieces(), which few pieces pass by.
template <int HS, int Bc>
__global__ void __launch_bounds__(MERGE_WARPS* WARP) merge_at_once(const DecodeArgs args) {
  griddepcontrol_launch_dependents();
  const int token = blockIdx.y / args.q_heads, head = blockIdx.y % args.q_heads, batch = blockIdx.z;
  const int kv_head = head / args.group, row = token * args.group + head % args.group;
  const int item = kv_head * ceil_div(row_count(args), ROWS) + row / ROWS;
  const Schedule<Bc> schedule(args, MIN_TILES, args.automatic);
  const int2 slots = args.automatic ? schedule.slots(batch, item)
                                    : int2{(batch * schedule.items + item) * args.splits, args.splits};
  griddepcontrol_wait();
  const int rows = slot_rows(args);
  const PartialRows parts = {static_cast<int64_t>(slots.x) * rows + row % ROWS, rows, slots.y};
  if (parts.count <= FEW)
    merge_few<HS>(args, batch, token, head, parts);
  else
    merge_row<HS>(args, batch, token, head, parts);
}

// Pieces of a row that a warp reads at once, with their sums.
constexpr int PIECES_AT_ONCE = 8;

// merge_row() by a warp for each MERGE_DIMS columns of a row. Any number of pieces will do, a few are fast.
template <int HS, int Bc>
__global__ void __launch_bounds__(MERGE_WARPS* WARP) merge_by_warps(const DecodeArgs args) {
  griddepcontrol_launch_dependents();
  constexpr int SHARES = HS / MERGE_DIMS;
  const int lane = threadIdx.x % WARP, share = blockIdx.x * MERGE_WARPS + threadIdx.x / WARP;
  const int all_rows = args.q_len * args.q_heads, batch = share / SHARES / all_rows;
  if (batch >= args.batch) return;
  const int index = share / SHARES - batch * all_rows, pair = share % SHARES * WARP + lane;
  const int token = index / args.q_heads, head = index - token * args.q_heads;
  const int kv_head = head / args.group, row = token * args.group + head - kv_head * args.group;
  const Schedule<Bc> schedule(args, MIN_TILES, args.automatic);
  const int item = kv_head * ceil_div(row_count(args), ROWS) + row / ROWS;
  const int2 slots = args.automatic ? schedule.slots(batch, item)
                                    : int2{(batch * schedule.items + item) * args.splits, args.splits};
  griddepcontrol_wait();
  const int64_t stride = slot_rows(args), first_row = slots.x * stride + row % ROWS;
  float top = -INFINITY, sum = 0.0f;
  float2 o = {0.0f, 0.0f};
#pragma unroll 1
  for (int first = 0; first < slots.y; first += PIECES_AT_ONCE) {
    const int64_t own_row = first_row + first * stride;
    const Partial* partials = reinterpret_cast<const Partial*>(args.partial_sum) + own_row;
    const float2* o_parts = reinterpret_cast<const float2*>(args.partial_o + own_row * HS) + pair;
    const int count = slots.y - first;
    Partial total = {-INFINITY, 0.0f};
    float2 parts[PIECES_AT_ONCE];
    if (lane < min(count, PIECES_AT_ONCE)) total = partials[lane * stride];
#pragma unroll
    for (int i = 0; i < PIECES_AT_ONCE; ++i)
      parts[i] = i < count ? o_parts[i * stride * (HS / 2)] : float2{0.0f, 0.0f};
    const float new_top = fmaxf(top, warp_max(total.reference)), shift = new_top == -INFINITY ? 0.0f : new_top;
    const float own_weight = exp2f(total.reference - shift), factor = exp2f(top - shift);
    top = new_top;
    sum = sum * factor + warp_sum(own_weight * total.sum);
    o = {o.x * factor, o.y * factor};
#pragma unroll
    for (int i = 0; i < PIECES_AT_ONCE; ++i) {
      const float weight = __shfl_sync(ALL_LANES, own_weight, i);
      // A part without a key weighs 0: its O may never have been written.
      if (weight != 0.0f) o = {o.x + weight * parts[i].x, o.y + weight * parts[i].y};
    }
  }
  const RowEnd end = end_row(args, kv_head, head, {top, sum});
  store_output(args.o, query_offset(args, args.o_stride, batch, token, head) + 2 * pair, args.dtype,
               {o.x * end.factor, o.y * end.factor});
  if (share % SHARES != 0 || lane != 0) return;
  store_lse(args, batch, token, head, end.lse);
  if (index == 0) check_length(args, batch);
}

// merge_short_partials() by a warp for a warp's M tile of a piece.
constexpr int SHORT_MERGE_WARPS = 4;

template <typename G>
__global__ void __launch_bounds__(SHORT_MERGE_WARPS* WARP) merge_short_by_warps(const DecodeArgs args) {
  griddepcontrol_launch_dependents();
  static_assert(G::WARPS * G::M_TILES % SHORT_MERGE_WARPS == 0);
  const int items = args.kv_heads * ceil_div(row_count(args), ROWS);
  const int batch = blockIdx.y / items, item = blockIdx.y - batch * items;
  const int lane = threadIdx.x % WARP, own_row = lane % ROWS, t = lane % 4;
  const int share = blockIdx.x * SHORT_MERGE_WARPS + threadIdx.x / WARP, warp = share / G::M_TILES, m = share % G::M_TILES;
  const Schedule<G::Bc> schedule(args, MIN_TILES, args.automatic);
  const int2 slots =
      args.automatic ? schedule.slots(batch, item) : int2{static_cast<int>(blockIdx.y) * args.splits, args.splits};
  griddepcontrol_wait();
  if (share == 0 && item == 0 && lane == 0) check_length(args, batch);
  Partial own = {-INFINITY, 0.0f};  // of the row that a lane has the weights of
  float o[8] = {};
  const auto of_row = [&](float x, int j) { return __shfl_sync(ALL_LANES, x, j / 4 * 8 + 2 * t + j % 2); };
#pragma unroll 1
  for (int first = 0; first < slots.y; first += PIECES_AT_ONCE) {
    const ShortPartial<G>* pieces = short_partials<G>(args, slots.x + first);
    Partial totals[PIECES_AT_ONCE];
    uint4 parts[PIECES_AT_ONCE];
    float scales[PIECES_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PIECES_AT_ONCE; ++i) {
      totals[i] = {-INFINITY, 0.0f};
      parts[i] = {0, 0, 0, 0};
      scales[i] = 0.0f;
      if (first + i >= slots.y) continue;
      totals[i] = pieces[i].totals[own_row];
      parts[i] = pieces[i].o[warp][m][lane];
      scales[i] = pieces[i].scale[warp];
    }
    float top = own.reference;
#pragma unroll
    for (int i = 0; i < PIECES_AT_ONCE; ++i) top = fmaxf(top, totals[i].reference);
    const float shift = top == -INFINITY ? 0.0f : top, factor = ex2_approx_ftz(own.reference - shift);
    own = {top, own.sum * factor};
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] *= of_row(factor, j);
#pragma unroll
    for (int i = 0; i < PIECES_AT_ONCE; ++i) {
      const float weight = ex2_approx_ftz(totals[i].reference - shift);
      own.sum += weight * totals[i].sum;
      const uint32_t words[4] = {parts[i].x, parts[i].y, parts[i].z, parts[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[j]));
        o[2 * j] += of_row(weight, 2 * j) * (pair.x * scales[i]);
        o[2 * j + 1] += of_row(weight, 2 * j + 1) * (pair.y * scales[i]);
      }
    }
  }
  const int2 rows = item_rows(args, item);
  const int last_row = row_count(args) - 1, row = min(rows.y + own_row, last_row);
  const int token = row_token(args, row), head = row_head(args, rows.x, row);
  const RowEnd end = end_row(args, rows.x, head, own);
  if (share == 0 && lane < ROWS && rows.y + own_row <= last_row) store_lse(args, batch, token, head, end.lse);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float factor = of_row(end.factor, j);
    const int to = rows.y + j / 4 * 8 + 2 * t + j % 2;
    if (to > last_row) continue;
    const int64_t offset = query_offset(args, args.o_stride, batch, row_token(args, to), row_head(args, rows.x, to));
    store_output(args.o, offset + value_column<G>(warp, m, lane / 4, j / 2 % 2), args.dtype, o[j] * factor);
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

// Has the block's first tiles brought to L2 while the kernels before still run. They may yet write lengths, pages, keys and
// values: nothing that is read here is used but to say where tiles may lie, and what is asked for in vain costs time only.
template <typename G>
DEVICE void prefetch_tiles(const CUtensorMap& k_map, const CUtensorMap& v_map, const DecodeArgs& args, Piece piece,
                           int step, int length) {
  constexpr int AHEAD = AHEAD_BYTES / 2 / static_cast<int>(sizeof(Tile<G>));
  const Boxes<G> cut(args);
  const int position = cut.position(piece.first, step), entry = position >> cut.shift;
  if (static_cast<int>(threadIdx.x % WARP) >= AHEAD << cut.log_parts || position >= args.capacity) return;
  int page = piece.batch;
  if (args.page_table) page = ld_relaxed_gpu_s32(args.page_table + page * args.page_table_stride + entry);
  if (position >= length || page < 0 || (args.page_table && page >= args.pages)) return;
  const int slot = args.page_table ? position & ((1 << cut.shift) - 1) : position;
#pragma unroll 1
  for (int column = 0; column < (cut.parts == 1 ? 1 : cut.COLUMNS); ++column) {
    cp_async_bulk_prefetch_tensor_5d_L2(&k_map, 0, slot, column, item_rows(args, piece.item).x, page);
    cp_async_bulk_prefetch_tensor_5d_L2(&v_map, 0, slot, column, item_rows(args, piece.item).x, page);
  }
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

  const Boxes<G> cut(args);
  int first_position = 0;  // of the lane's part of the first tiles
  Piece piece = {};
  bool early = false;
  int page = 0, step = 1, x = 0, end = 1, turn = 0, known = 0;  // known: keys whose pages are looked up early
  if (fixed) {
    step = args.splits;
    piece = fixed_piece(args, block);
    early = args.page_table && args.window == 0;  // tiles count from the sequence's first
    first_position = cut.position(piece.first, step);
    if (args.window == 0) {
      known = ld_relaxed_gpu_s32(args.lengths + piece.batch);
      prefetch_tiles<G>(k_map, v_map, args, piece, step, known);
    }
  }
  griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
  griddepcontrol_launch_dependents();
  if (fixed) {
    if (early && first_position < known) page = early_page<G>(args, piece.batch, piece.first, step);
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
    // The length has changed since: all are looked up.
    if (__any_sync(ALL_LANES, first_position >= known && first_position < work.keys.end)) early = false;
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
    decode_warp_merges(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                      const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  constexpr int MADE = 2, ALL = G::THREADS + WARP;  // named barrier: the mbarriers are there
  const int warp = threadIdx.x / WARP, block = blockIdx.x;
  if (warp == G::WARPS) {
    prepare<G, NT>(smem, k_map, v_map);
    bar_arrive(MADE, ALL);
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
  error = launch_dependent(decode_warp_merges<KV, HS, NT>, schedule_grid(args), THREADS, SMEM, stream, k_map, v_map,
                           args);
  if (error) return error;
  const int pieces = args.automatic ? ceil_div(args.blocks, items) + 1 : args.splits;  // of an item, in even batches
  if constexpr (SHORT<NT>) {
    if (pieces <= PIECES_AT_ONCE)
      return launch_dependent(merge_short_by_warps<G>, dim3(G::WARPS * G::M_TILES / SHORT_MERGE_WARPS, items),
                              SHORT_MERGE_WARPS * WARP, 0, stream, args);
    return launch_dependent(merge_short_partials<G>, dim3(WARP / MERGE_LANES * G::WARPS * G::M_TILES, items), MERGE_THREADS,
                            sizeof(ShortMergeSmem), stream, args);
  }
  if (pieces <= PIECES_AT_ONCE)
    return launch_dependent(merge_by_warps<HS, G::Bc>,
                            ceil_div(args.batch * args.q_len * args.q_heads * (HS / MERGE_DIMS), MERGE_WARPS),
                            MERGE_WARPS * WARP, 0, stream, args);
  return launch_dependent(merge_at_once<HS, G::Bc>, merge_grid(args), MERGE_WARPS * WARP, sizeof(MergeSmem), stream,
                          args);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
