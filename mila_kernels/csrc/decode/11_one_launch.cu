// Change: the merge in the same launch. The blocks of a cluster share the keys of a head and add up what they have
//   found through one another's shared memory, each a slice of the columns; what clusters have found is merged by the
//   last one to arrive, again a slice a block. A counter a slice says who is last, and is zero again afterwards.
// Prediction: 16 heads on 1 leave 16 partial results of 32 KB in place of 128, and no second launch: 4 to 5 us less at
//   any length; with 2 rows 2 us less.
// Measured: not yet.
// Verdict: not yet.
// Architectures: sm_90a sm_100a
// Alignment: 16
// Head dims: 64 128 256 512
#include "args.cuh"
#include "bulk.cuh"

constexpr int TILE_BYTES = 32 * 1024, RING_BYTES = 192 * 1024;
constexpr float P_BITS = 14.0f;  // FP16 probabilities are scaled by 2^14: keys stay down to 2^-38 of the largest
constexpr int CONSUMERS = 1;     // named barrier of the warps that multiply

template <int HS>
constexpr int WARPS = HS / 16 < 8 ? HS / 16 : 8;
template <typename G>
constexpr int FITTING = RING_BYTES / static_cast<int>(sizeof(Tile<G>));
template <typename G>
constexpr int STAGES = FITTING<G> < 12 ? FITTING<G> : 12;

// A piece and whose rows it is.
struct Work {
  Piece piece;
  int length, kv_head, first_row, last_row;
  KeyRange keys;  // that any of the rows sees
  int2 slots;     // of all pieces of the item: the first, and how many

  // Whether a block has one tile less than the first of its cluster. It leaves out the stages, so that O lies in the
  // same stage of all.
  DEVICE bool missing(int rank, int blocks) const {
    const int odd = (piece.last - piece.first) % blocks;
    return odd > 0 && rank >= odd;
  }
};

template <typename G, int NT>
struct Smem {
  alignas(1024) Tile<G> stages[STAGES<G>];
  QueryRows<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
  alignas(16) Product<typename G::KV> p[8 * NT][G::Bc + 8];
  float rescale[8 * NT];
  Work work[2];  // of this piece and the next
  Partial totals[8 * NT];
  int lost[STAGES<G>];
  int last;
  uint64_t full[STAGES<G>], empty[STAGES<G>], o_ready, o_done;
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

// Where 4 columns of a row of O lie: rows that lanes write at once in different banks.
template <typename G>
DEVICE int o_place(int row, int four) {
  const int t = row >> 1 & 3;
  const bool wide = std::is_same_v<typename G::KV, e4m3> && G::DIMS == 64;
  return row * (G::HS / 4) + (four ^ (wide ? (t & 1) | (t & 2) << 1 : 2 * t));
}

template <typename G, int NT>
DEVICE void store_o(float4* o_smem, const float (&o_regs)[G::M_TILES][NT][4]) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + 2 * t + j;
      if constexpr (std::is_same_v<typename G::KV, e4m3> && G::M_TILES >= 2) {
#pragma unroll
        for (int m = 0; m < G::M_TILES; m += 2)
          o_smem[o_place<G>(row, value_column<G>(m, g, 0) / 4)] = {o_regs[m][n][j], o_regs[m][n][j + 2],
                                                                   o_regs[m + 1][n][j], o_regs[m + 1][n][j + 2]};
      } else {
#pragma unroll
        for (int m = 0; m < G::M_TILES; ++m)
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const int column = value_column<G>(m, g, upper);
            reinterpret_cast<float*>(&o_smem[o_place<G>(row, column / 4)])[column % 4] = o_regs[m][n][j + 2 * upper];
          }
      }
    }
}

// Adds up partial results; what they were relative to may differ.
struct Sum {
  float top = -INFINITY, sum = 0.0f;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

  template <int N>
  DEVICE void add(const Partial (&parts)[N], const float4 (&o_parts)[N]) {
    float new_top = top;
#pragma unroll
    for (int i = 0; i < N; ++i) new_top = fmaxf(new_top, parts[i].reference);
    const float shift = new_top == -INFINITY ? 0.0f : new_top, own = ex2_approx_ftz(top - shift);
    top = new_top;
    sum *= own;
    o = {o.x * own, o.y * own, o.z * own, o.w * own};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float weight = ex2_approx_ftz(parts[i].reference - shift);
      sum += weight * parts[i].sum;
      o = {o.x + weight * o_parts[i].x, o.y + weight * o_parts[i].y, o.z + weight * o_parts[i].z,
           o.w + weight * o_parts[i].w};
    }
  }
};

template <typename G>
DEVICE void store_row_end(const DecodeArgs& args, const Work& work, int row, int four, const Sum& total) {
  if (work.first_row + row > work.last_row) return;
  const int token = row_token(args, work.first_row + row), head = row_head(args, work.kv_head, work.first_row + row);
  const RowEnd end = end_row(args, work.kv_head, head, {total.top, total.sum});
  const int64_t o = query_offset(args, args.o_stride, work.piece.batch, token, head) + 4 * four;
  store_output(args.o, o, args.dtype, {total.o.x * end.factor, total.o.y * end.factor});
  store_output(args.o, o + 2, args.dtype, {total.o.z * end.factor, total.o.w * end.factor});
  if (four == 0) store_lse(args, work.piece.batch, token, head, end.lse);
}

// What the cluster has found, then what all pieces of the item have: a slice of the columns a block.
template <typename G, int NT>
DEVICE void merge_pieces_here(Smem<G, NT>& smem, const DecodeArgs& args, const Work& work, float4* o_smem,
                              uint32_t o_done) {
  constexpr int FOURS = G::HS / 4, AT_ONCE = 8;
  const int rank = cluster_ctarank(), blocks = cluster_nctarank(), rows = slot_rows(args);
  const int slice = rows * FOURS / blocks;
  float4* partial_o = reinterpret_cast<float4*>(args.partial_o);
  Partial* partials = reinterpret_cast<Partial*>(args.partial_sum);
#pragma unroll 1
  for (int i = threadIdx.x; i < slice; i += G::THREADS) {
    const int row = (rank * slice + i) / FOURS, four = (rank * slice + i) % FOURS;
    const uint32_t o_there = smem_u32(&o_smem[o_place<G>(row, four)]), total_there = smem_u32(&smem.totals[row]);
    Partial parts[MAX_CLUSTER];
    float4 o_parts[MAX_CLUSTER];
#pragma unroll
    for (int block = 0; block < MAX_CLUSTER; ++block) {
      parts[block] = {-INFINITY, 0.0f};
      o_parts[block] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (block >= blocks) continue;
      const uint32_t total = mapa_shared_cluster(total_there, block);
      parts[block] = {__uint_as_float(ld_shared_cluster_u32(total)), __uint_as_float(ld_shared_cluster_u32(total + 4))};
      o_parts[block] = ld_shared_cluster_v4_f32(mapa_shared_cluster(o_there, block));
    }
    Sum total;
    total.add(parts, o_parts);
    if (work.slots.y == 1) {
      store_row_end<G>(args, work, row, four, total);
    } else {
      const int64_t at = static_cast<int64_t>(work.piece.slot) * rows + row;
      partial_o[at * FOURS + four] = total.o;
      if (four == 0 || i == 0) partials[at] = {total.top, total.sum};  // a row may be cut: both write the same
    }
  }
  bar_sync(CONSUMERS, G::THREADS);
  if (threadIdx.x < blocks) mbarrier_arrive_cluster(mapa_shared_cluster(o_done, threadIdx.x));
  if (work.slots.y == 1) return;

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
#pragma unroll 1
  for (int i = threadIdx.x; i < slice; i += G::THREADS) {
    const int row = (rank * slice + i) / FOURS, four = (rank * slice + i) % FOURS;
    Sum total;
#pragma unroll 1
    for (int first = 0; first < work.slots.y; first += AT_ONCE) {
      Partial parts[AT_ONCE];
      float4 o_parts[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        parts[j] = {-INFINITY, 0.0f};
        o_parts[j] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + j >= work.slots.y) continue;
        const int64_t at = static_cast<int64_t>(work.slots.x + first + j) * rows + row;
        parts[j] = partials[at];
        o_parts[j] = partial_o[at * FOURS + four];
      }
      total.add(parts, o_parts);
    }
    store_row_end<G>(args, work, row, four, total);
  }
}

template <typename G, int NT>
DEVICE void multiply_piece(Smem<G, NT>& smem, Ring<STAGES<G>>& ring, const DecodeArgs& args, const Work& given,
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

  load_query_rows<G, NT>(smem.queries, args, given.piece.batch, given.kv_head, given.first_row);
  if (threadIdx.x == 0) smem.work[turn & 1] = given;  // registers are short, and it is looked at seldom
  bar_sync(CONSUMERS, G::THREADS);
  const Work& work = smem.work[turn & 1];
  uint2 q_regs[G::STEPS][NT];
  load_fragments<G, NT>(q_regs, smem.queries, part);
  if (turn == 0) barrier_cluster_wait();  // the cluster's mbarriers are there
  const float scale = smem.queries.scale[own_row];
  // What every row sees: tiles within need no mask.
  const KeyRange common = {visible_keys(args, work.length, row_token(args, work.last_row)).begin,
                           visible_keys(args, work.length, row_token(args, work.first_row)).end};

  float row_max = -INFINITY, row_sum = 0.0f, o_regs[G::M_TILES][NT][4] = {};
  int lost = 0;
#pragma unroll 1
  for (int tile = given.piece.first + rank; tile < given.piece.last; tile += blocks) {
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
    if (masked) own_keys = visible_keys(args, work.length, row_token(args, min(work.first_row + own_row, work.last_row)));
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

  for (int left = work.missing(rank, blocks) * 2; left > 0; --left) {
    mbarrier_wait(smem_u32(&smem.full[ring.stage]), ring.turn);
    release();
  }
  // One stage of the ring holds O for the cluster.
  mbarrier_wait(smem_u32(&smem.full[ring.stage]), ring.turn);
  float4* o_smem = reinterpret_cast<float4*>(smem.stages[ring.stage]);
  static_assert(sizeof(float) * 8 * NT * G::HS <= sizeof(Tile<G>));
  store_o<G, NT>(o_smem, o_regs);
  row_sum = warp_sum<LANES>(row_sum);
  if (lane % LANES == 0) smem.totals[own_row] = {row_max - TOP, lost ? NAN : row_sum};
  fence_proxy_async_shared();  // the copy engine will write here again
  bar_sync(CONSUMERS, G::THREADS);
  const uint32_t o_ready = smem_u32(&smem.o_ready), o_done = smem_u32(&smem.o_done);
  if (threadIdx.x < blocks) mbarrier_arrive_cluster(mapa_shared_cluster(o_ready, threadIdx.x));
  mbarrier_wait_cluster(o_ready, turn & 1);
  merge_pieces_here<G, NT>(smem, args, work, o_smem, o_done);
  mbarrier_wait_cluster(o_done, turn & 1);  // nobody reads here any more
  release();
}

// Sequences without a key, of which no piece is made.
template <typename G>
DEVICE void store_empty_sequences(const Schedule<G::Bc>& schedule, const DecodeArgs& args, int unit, int units) {
  const int lane = threadIdx.x % WARP;
  for (int first = 0; first < args.batch; first += WARP) {
    const int batch = first + lane;
    const bool empty = batch < args.batch && batch % units == unit && schedule.tile_count(batch) == 0;
    for (unsigned left = __ballot_sync(ALL_LANES, empty); left; left &= left - 1) {
      const int b = first + __ffs(static_cast<int>(left)) - 1;
      for (int i = threadIdx.x; i < args.q_len * args.q_heads * (G::HS / 2); i += G::THREADS) {
        const int row = i / (G::HS / 2), pair = i % (G::HS / 2), token = row / args.q_heads, head = row % args.q_heads;
        store_output(args.o, query_offset(args, args.o_stride, b, token, head) + 2 * pair, args.dtype, {0.0f, 0.0f});
        if (pair == 0)
          store_lse(args, b, token, head, end_row(args, head / args.group, head, {-INFINITY, 0.0f}).lse);
      }
    }
  }
}

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__((WARPS<HS> + 1) * WARP, 1)
    decode_one_launch(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                      const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  const int warp = threadIdx.x / WARP, rank = cluster_ctarank(), blocks = cluster_nctarank();
  const int unit = blockIdx.x / blocks, units = gridDim.x / blocks;
  if (threadIdx.x == G::THREADS) {
    prefetch_tensormap(&k_map);
    prefetch_tensormap(&v_map);
    for (int i = 0; i < STAGES<G>; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), G::WARPS);
    }
    mbarrier_init(smem_u32(&smem.o_ready), blocks);
    mbarrier_init(smem_u32(&smem.o_done), blocks);
    fence_mbarrier_init();
  }
  __syncthreads();
  barrier_cluster_arrive();
  griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
  griddepcontrol_launch_dependents();
  const Schedule<G::Bc> schedule(args, blocks);

  Ring<STAGES<G>> ring;
  int x = args.automatic ? schedule.begin(unit) : 0;
  const int end = args.automatic ? schedule.end(unit) : 1;
  int turn = 0;
  for (; x < end; ++turn) {
    Work work =
        find_work<G>(args, args.automatic ? schedule.piece(unit, x) : split_piece<G::Bc>(args, unit, x));
    const Piece& piece = work.piece;
    if (warp == G::WARPS) {
      copy_tiles<G>(smem, ring, k_map, v_map, args, piece.batch, work.kv_head, piece.first + rank, piece.last, blocks,
                    work.keys);
      if (turn == 0) barrier_cluster_wait();
      for (int left = work.missing(rank, blocks) * 2 + 1; left > 0; --left) {  // and a stage for O
        mbarrier_wait(smem_u32(&smem.empty[ring.stage]), ring.turn ^ 1);
        __syncwarp();  // all have seen it: what follows may end the next turn too
        if (threadIdx.x == G::THREADS) mbarrier_arrive(smem_u32(&smem.full[ring.stage]));
        ring.next();
      }
    } else {
      work.slots = args.automatic ? schedule.slots(piece.batch, piece.item)
                                  : int2{(piece.batch * schedule.items + piece.item) * args.splits, args.splits};
      multiply_piece<G, NT>(smem, ring, args, work, turn);
    }
  }
  if (turn == 0) barrier_cluster_wait();
  if (warp < G::WARPS) {
    if (args.automatic && rank == 0) store_empty_sequences<G>(schedule, args, unit, units);
  } else if (blockIdx.x == 0) {
    for (int batch = threadIdx.x % WARP; batch < args.batch; batch += WARP) check_length(args, batch);
  }
}

// How many blocks share a head: as many as a cluster may have, unless there are heads enough for fewer.
inline int cluster_size(const DecodeArgs& args, int threads) {
  int size = MAX_CLUSTER;
  while (size > 1 && (args.automatic ? item_count(args) * size > args.blocks / 2 : args.splits % size != 0)) size /= 2;
#ifndef __CUDACC__
  while (size * threads > 1024) size /= 2;  // as many threads as the emulation runs together
#else
  static_cast<void>(threads);
#endif
  return size;
}

template <typename KV, int HS, int NT>
const char* launch_rows(DecodeArgs args, cudaStream_t stream) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  constexpr int THREADS = G::THREADS + WARP;
  CUtensorMap k_map, v_map;
  const char* error = make_cache_map<G>(&k_map, args, args.k, args.k_stride);
  if (!error) error = make_cache_map<G>(&v_map, args, args.v, args.v_stride);
  if (error) return error;
  const int cluster = cluster_size(args, THREADS), most = args.blocks / 2 / cluster;  // one block an SM
  args.blocks = most > 0 ? most : 1;
  args.splits = args.splits >= cluster ? args.splits / cluster : 1;
  const int units = args.automatic ? args.blocks : item_count(args) * args.splits;
  return launch_dependent_cluster(decode_one_launch<KV, HS, NT>, units * cluster, cluster, THREADS,
                                  sizeof(Smem<G, NT>), stream, k_map, v_map, args);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
