// Change: the copy engine brings tiles. One warp does nothing but ask for them, up to 160 KB ahead and on into the
//   next piece; eight warps share each tile, a warp has whole rows of the softmax, and Q stays in registers.
// Prediction: 05 spends a third of its instructions on addresses, every warp makes the whole softmax, and 60 KB of
//   code are fetched by 4 warps: with 16 rows of E4M3 it is that, not memory, that takes 83 us at 128K keys. 50 us
//   there; 2 us less at batch 1, where the first tiles are on their way before Q is.
// Measured: H200, 2026-11-29, one run with 05 (in brackets): 16 heads on 1, 4K / 32K / 128K keys 16.8 / 30.6 / 76.7
//   us (16.8 / 34.1 / 80.5), E4M3 13.7 / 25.6 / 50.5 (33.9 / 46.3 / 72.2); 8 heads on 4, 4K / 16K / 28K 15.0 / 38.6 /
//   61.1 (17.1 / 40.6 / 63.1), E4M3 14.1 / 25.4 / 37.0 (13.5 / 26.1 / 38.3); batch 16, 28K 833 and 427.
// Verdict: kept: up to 2.5 times faster with E4M3 and 16 rows, 2 to 4 us with BF16. From 32K to 128K keys both read
//   at 95% of the limit: what is left at batch 1 are 7 us with 2 rows and 15 with 16, whose partial results are 4 MB.
// Predecessor: 08_dependent_launch
// Architectures: sm_90a sm_100a
// Alignment: 16
// Head dims: 64 128 256 512
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

// A piece and whose rows it is.
struct Work {
  Piece piece;
  int length, kv_head, first_row, last_row;
  KeyRange keys;  // that any of the rows sees
};

template <typename G, int NT>
struct Smem {
  alignas(1024) Tile<G> stages[STAGES<G>];
  QueryRows<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
  alignas(16) Product<typename G::KV> p[8 * NT][G::Bc + 8];
  float rescale[8 * NT];
  Work work[2];  // of this piece and the next
  int lost[STAGES<G>];
  uint64_t full[STAGES<G>], empty[STAGES<G>];
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
  const float scale = smem.queries.scale[own_row];
  // What every row sees: tiles within need no mask.
  const KeyRange common = {visible_keys(args, work.length, row_token(args, work.last_row)).begin,
                           visible_keys(args, work.length, row_token(args, work.first_row)).end};

  float row_max = -INFINITY, row_sum = 0.0f, o_regs[G::M_TILES][NT][4] = {};
  int lost = 0;
#pragma unroll 1
  for (int tile = given.piece.first; tile < given.piece.last; ++tile) {
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
  const int64_t partial = static_cast<int64_t>(work.piece.slot) * slot_rows(args);
  Partial* partials = reinterpret_cast<Partial*>(args.partial_sum) + partial;
  if (lane % LANES == 0 && work.first_row + own_row <= work.last_row)
    partials[own_row] = {row_max - TOP, lost ? NAN : row_sum};
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // rows 2t and 2t + 1
      const int row = n * 8 + 2 * t + j;
      if (work.first_row + row > work.last_row) continue;
      float* o = args.partial_o + (partial + row) * G::HS;
      if constexpr (std::is_same_v<KV, e4m3> && G::M_TILES >= 2) {  // a lane has neighbouring columns
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

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__((WARPS<HS> + 1) * WARP, 1)
    decode_bulk_copies(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                       const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  const int warp = threadIdx.x / WARP, block = blockIdx.x;
  if (threadIdx.x == G::THREADS) {
    prefetch_tensormap(&k_map);
    prefetch_tensormap(&v_map);
    for (int i = 0; i < STAGES<G>; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), G::WARPS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
  griddepcontrol_launch_dependents();
  const Schedule<G::Bc> schedule(args);

  Ring<STAGES<G>> ring;
  int x = args.automatic ? schedule.begin(block) : 0;
  for (int turn = 0; x < (args.automatic ? schedule.end(block) : 1); ++turn) {
    const Work work =
        find_work<G>(args, args.automatic ? schedule.piece(block, x) : split_piece<G::Bc>(args, block, x));
    const Piece& piece = work.piece;
    if (warp == G::WARPS)
      copy_tiles<G>(smem, ring, k_map, v_map, args, piece.batch, work.kv_head, piece.first, piece.last, 1, work.keys);
    else
      multiply_piece<G, NT>(smem, ring, args, work, turn);
  }
}

template <typename KV, int HS, int NT>
const char* launch_rows(DecodeArgs args, cudaStream_t stream) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS<HS>>;
  CUtensorMap k_map, v_map;
  const char* error = make_cache_map<G>(&k_map, args, args.k, args.k_stride);
  if (!error) error = make_cache_map<G>(&v_map, args, args.v, args.v_stride);
  args.blocks = args.blocks > 1 ? args.blocks / 2 : 1;  // one block an SM
  if (!error)
    error = launch_dependent(decode_bulk_copies<KV, HS, NT>, schedule_grid(args), G::THREADS + WARP,
                             sizeof(Smem<G, NT>), stream, k_map, v_map, args);
  if (error) return error;
  return launch_dependent(merge_pieces<HS, G::Bc>, merge_grid(args), MERGE_WARPS * WARP, sizeof(MergeSmem), stream,
                          args);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
