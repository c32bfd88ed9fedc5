// Change: small code. Q is read from shared memory again, by 4 warps, so that the loops over keys and columns can
//   stay rolled; copies, scores and probabilities each stand in the code once.
// Prediction: a block of a short sequence runs its code once, and the weights of a model that stream between two
//   calls have thrown it out of the caches: 20 KB of straight code are 160 misses in a row. Half the code saves several
//   microseconds at 4K keys; at long lengths nothing changes.
// Measured: H200, 2026-11-29, 16 heads on 1: 19.2 us at 4K keys, 37.7 at 32K, 84.3 at 128K; E4M3 23.1, 52.3, 80.6.
// Verdict: dropped: 1 to 4 us slower than the step before at every length. Code that has left the caches was not the
//   fixed cost; rolled loops cost more than they saved.
// Architectures: sm_90a sm_100a sm_120
// Alignment: 16
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "schedule.cuh"
#include "tiles.cuh"

constexpr int TILE_BYTES = 32 * 1024, STAGES = 2, WARPS = 4;
constexpr float P_BITS = 14.0f;  // FP16 probabilities are scaled by 2^14: keys stay down to 2^-38 of the largest

template <typename G, int NT>
struct Smem {
  Tile<G> stages[STAGES];  // K and V of a tile in turn
  Queries<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
};

template <typename G, int NT>
DEVICE void decode_piece(Smem<G, NT>& smem, const DecodeArgs& args, Piece piece) {
  using KV = typename G::KV;
  constexpr int Bc = G::Bc, HS = G::HS;
  constexpr float TOP = std::is_same_v<Product<KV>, fp16> ? P_BITS : 0.0f;
  constexpr uint32_t ONES = std::is_same_v<Product<KV>, fp16> ? 0x3c003c00u : 0x3f803f80u;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int row_tiles = ceil_div(row_count(args), ROWS), kv_head = piece.item / row_tiles, batch = piece.batch;
  const int first_row = piece.item % row_tiles * ROWS, last_row = min(first_row + ROWS, row_count(args)) - 1;

  const int length = sequence_length(args, batch);
  const KeyRange seen = visible_keys(args, length, 0, row_count(args) - 1);
  const KeyRange keys = {max(seen.begin, piece.first * Bc), min(seen.end, piece.last * Bc)};
  // What every row sees: tiles within need no mask.
  const KeyRange common = {visible_keys(args, length, row_token(args, last_row)).begin,
                           visible_keys(args, length, row_token(args, first_row)).end};
  const int first_tile = piece.first, items = 2 * (piece.last - piece.first);

  // Item 2i is the i-th tile of K, 2i + 1 that of V. Each call makes one group, if need be an empty one.
  bool lost = false;
  TilePlace place = {};
  if (items > 0) place = find_tile<Bc>(args, batch, first_tile * Bc, keys, lost);
  auto load = [&](int item) {
    const int tile = (first_tile + item / 2) * Bc;
    if (item < items) {
      const bool is_v = item % 2;
      copy_tile<G>(smem.stages[item % STAGES], args, is_v ? args.v : args.k, is_v ? args.v_stride : args.k_stride,
                   kv_head, tile, keys, place);
      if (is_v && item + 1 < items) place = find_tile<Bc>(args, batch, tile + Bc, keys, lost);
    }
    cp_async_commit_group();
  };

  // A lane of the softmax holds keys of row g of each n; a lane of the products holds rows 2t and 2t + 1.
  float row_max[NT], row_sum[NT][4] = {}, o_regs[G::M_TILES][NT][4] = {};
#pragma unroll
  for (int n = 0; n < NT; ++n) row_max[n] = -INFINITY;

#pragma unroll 1
  for (int item = 1 - STAGES; item < items; ++item) {
    if (item >= 0) {
      cp_async_wait_group<STAGES - 2>();
      __syncthreads();  // this item is there for all, and the last one has been read
    }
    load(item + STAGES - 1);
    if (item < 0) {
      if (item == -1) load_queries<G, NT>(smem.queries, args, batch, kv_head, first_row);
      continue;
    }
    const Tile<G>& tile_smem = smem.stages[item % STAGES];
    const int tile = (first_tile + item / 2) * Bc;

    if (item % 2 == 0) {
      const int first_key = warp % (Bc / 16) * 16, part = warp / (Bc / 16);
      float s_regs[NT][4];
      multiply_keys<G, NT, 4>(s_regs, tile_smem, first_key, part * G::STEPS, [&](int step, int n) {
        return smem.queries.fragments[part * G::STEPS + step][n][lane];
      });
      const int key = first_key + key_of_lane<KV>(g);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        smem.s[part][n * 8 + 2 * t][key] = s_regs[n][0];
        smem.s[part][n * 8 + 2 * t + 1][key] = s_regs[n][1];
        smem.s[part][n * 8 + 2 * t][key + 8] = s_regs[n][2];
        smem.s[part][n * 8 + 2 * t + 1][key + 8] = s_regs[n][3];
      }
      continue;
    }

    // Every warp makes the whole softmax of the tile for itself, in the layout in which it multiplies by V.
    const bool masked = tile < common.begin || tile + Bc > common.end;
    float scale[NT], shift[NT];
    KeyRange row_keys[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      scale[n] = smem.queries.scale[n * 8 + g];
      row_keys[n] = {tile, tile + Bc};
      if (masked) row_keys[n] = visible_keys(args, length, row_token(args, min(first_row + n * 8 + g, last_row)));
    }
    auto score = [&](int n, int key) {
      float sum = smem.s[0][n * 8 + g][key];
#pragma unroll
      for (int part = 1; part < G::PARTS; ++part) sum += smem.s[part][n * 8 + g][key];
      return tile + key >= row_keys[n].begin && tile + key < row_keys[n].end ? sum * scale[n] : -INFINITY;
    };

#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float new_max = row_max[n];
#pragma unroll 2
      for (int i = 0; i < Bc / 4; ++i) new_max = fmaxf(new_max, score(n, i * 4 + t));
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 2));

      // While every score is -inf the maximum is too, and exp2(-inf - -inf) would be NaN.
      shift[n] = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = ex2_approx_ftz(row_max[n] - shift[n]);
      row_max[n] = new_max;
      if (__any_sync(ALL_LANES, rescale != 1.0f)) {
        const float even = __shfl_sync(ALL_LANES, rescale, 8 * t), odd = __shfl_sync(ALL_LANES, rescale, 8 * t + 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) row_sum[n][j] *= j % 2 ? odd : even;
#pragma unroll
        for (int m = 0; m < G::M_TILES; ++m)
#pragma unroll
          for (int j = 0; j < 4; ++j) o_regs[m][n][j] *= j % 2 ? odd : even;
      }
      shift[n] -= TOP;
    }

#pragma unroll 1
    for (int i = 0; i < Bc / 16; ++i) {
      uint2 p_regs[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = ex2_approx_ftz(score(n, i * 16 + 2 * t + j % 2 + j / 2 * 8) - shift[n]);
        p_regs[n] = {pack2<Product<KV>>(p[0], p[1]), pack2<Product<KV>>(p[2], p[3])};
      }
      // A matrix of ones sums the probabilities as V's product sees them, rounded.
      const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<Product<KV>>(row_sum[n], ones, p_regs[n].x, p_regs[n].y);
      multiply_values<G, NT>(o_regs, tile_smem, p_regs, i * 16);
    }
  }
  lost = __syncthreads_or(lost);

  const int64_t partial = static_cast<int64_t>(piece.slot) * slot_rows(args);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // rows 2t and 2t + 1
      const int row = n * 8 + 2 * t + j;
      if (first_row + row > last_row) continue;
      float* o = args.partial_o + (partial + row) * HS;
#pragma unroll
      for (int m = 0; m < G::M_TILES; ++m) {
        o[value_column<G>(m, g, 0)] = o_regs[m][n][j];
        o[value_column<G>(m, g, 1)] = o_regs[m][n][j + 2];
      }
      if (warp == 0 && g == 0)
        args.partial_sum[2 * (partial + row) + 1] = lost ? NAN : row_sum[n][j];
    }
    const int row = n * 8 + g;
    if (warp == 0 && t == 0 && first_row + row <= last_row) args.partial_sum[2 * (partial + row)] = row_max[n] - TOP;
  }
}

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__(WARPS* WARP, 1) decode_small_code(const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS>;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();
  const int block = blockIdx.x;
  griddepcontrol_wait();  // keys, values, queries and the workspace may be the work of the kernel before
  griddepcontrol_launch_dependents();
  const Schedule<G::Bc> schedule(args);
  int x = args.automatic ? schedule.begin(block) : 0;
  const int end = args.automatic ? schedule.end(block) : 1;
  while (x < end)
    decode_piece<G, NT>(smem, args, args.automatic ? schedule.piece(block, x) : split_piece<G::Bc>(args, block, x));
}

template <typename KV, int HS, int NT>
const char* launch_rows(const DecodeArgs& args, cudaStream_t stream) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS>;
  const char* error =
      launch_dependent(decode_small_code<KV, HS, NT>, schedule_grid(args), WARPS * WARP, sizeof(Smem<G, NT>), stream,
                       args);
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
