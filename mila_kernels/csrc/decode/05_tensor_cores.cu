// Change: tensor cores. S^T = K Q^T and O^T = V^T P^T by mma.m16n8k16: keys, then columns of V, are the 16 rows, and
//   the query rows of a KV head are the 8 columns, twice for more than 8 rows: with 2 or with 16 heads nothing is wasted
//   that the copies could use. A tile is 32 KB; K and V have a buffer each, filled one product ahead.
// Prediction: shared memory is read once a tile by ldmatrix in place of once a row, and no FMA is left: what remains
//   is the wait for the copies. 4 times as fast with 16 rows; with 2 rows the gain is the larger tile.
// Measured: H200, 2026-11-29, 16 heads on 1: 24 us at 4K keys, 88 us at 128K; 8 heads on 4, 28K: 66 us, batch 16 841
//   us, E4M3 439 us.
// Verdict: kept: 4.5 and 2.9 times faster, 98% of the read limit at batch 16. The first form took a 64-bit address
//   apart for every 16 bytes copied and reached 75% there: with 2 rows it is the copies that cost instructions.
// Alignment: 16
// Head dims: 64 128 256 512
// Instances: head_dim kv_dtype
#include "args.cuh"
#include "merge.cuh"
#include "tiles.cuh"

constexpr int TILE_BYTES = 32 * 1024, STAGES = 2, WARPS = 4;
constexpr float P_BITS = 14.0f;  // FP16 probabilities are scaled by 2^14: keys stay down to 2^-38 of the largest

template <typename G, int NT>
struct Smem {
  Tile<G> stages[STAGES];  // K and V of a tile in turn
  Queries<G, NT> queries;
  float s[G::PARTS][8 * NT][G::Bc + 4];
};

template <typename KV, int HS, int NT>
__global__ void __launch_bounds__(WARPS* WARP, 1) decode_tensor_cores(const DecodeArgs args) {
  using G = Shape<KV, HS, TILE_BYTES, WARPS>;
  constexpr int Bc = G::Bc;
  constexpr float TOP = std::is_same_v<Product<KV>, fp16> ? P_BITS : 0.0f;
  constexpr uint32_t ONES = std::is_same_v<Product<KV>, fp16> ? 0x3c003c00u : 0x3f803f80u;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int row_tiles = gridDim.y / args.kv_heads, kv_head = blockIdx.y / row_tiles, batch = blockIdx.z;
  const int first_row = blockIdx.y % row_tiles * ROWS, last_row = min(first_row + ROWS, row_count(args)) - 1;
  Smem<G, NT>& smem = dynamic_smem<Smem<G, NT>>();

  const int length = sequence_length(args, batch);
  const KeyRange keys = split_keys(visible_keys(args, length, first_row, last_row), blockIdx.x, args.splits, Bc);
  // What every row sees: tiles within need no mask.
  const KeyRange common = {visible_keys(args, length, row_token(args, last_row)).begin,
                           visible_keys(args, length, row_token(args, first_row)).end};
  const int first_tile = keys.begin / Bc, items = keys.begin < keys.end ? 2 * (ceil_div(keys.end, Bc) - first_tile) : 0;

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
  for (int item = 0; item < STAGES - 1; ++item) load(item);
  load_queries<G, NT>(smem.queries, args, batch, kv_head, first_row);

  // A lane of the softmax holds keys of row g of each n; a lane of the products holds rows 2t and 2t + 1.
  float row_max[NT], row_sum[NT][4] = {}, o_regs[G::M_TILES][NT][4] = {};
#pragma unroll
  for (int n = 0; n < NT; ++n) row_max[n] = -INFINITY;

  for (int item = 0; item < items; ++item) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // this item is there for all, and the last one has been read
    load(item + STAGES - 1);
    const Tile<G>& tile_smem = smem.stages[item % STAGES];
    const int tile = (first_tile + item / 2) * Bc;

    if (item % 2 == 0) {
      const int first_key = warp % (Bc / 16) * 16, part = warp / (Bc / 16);
      float s_regs[NT][4];
      multiply_keys<G, NT>(s_regs, tile_smem, first_key, part * G::STEPS, [&](int step, int n) {
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
    uint2 p_regs[Bc / 16][NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float scale = smem.queries.scale[n * 8 + g];
      KeyRange row_keys = {tile, tile + Bc};
      if (masked) row_keys = visible_keys(args, length, row_token(args, min(first_row + n * 8 + g, last_row)));
      float scores[Bc / 16][4];
      float new_max = row_max[n];
#pragma unroll
      for (int i = 0; i < Bc / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = i * 16 + 2 * t + j % 2 + j / 2 * 8;
          float score = smem.s[0][n * 8 + g][key];
#pragma unroll
          for (int part = 1; part < G::PARTS; ++part) score += smem.s[part][n * 8 + g][key];
          score *= scale;
          if (masked && (tile + key < row_keys.begin || tile + key >= row_keys.end)) score = -INFINITY;
          scores[i][j] = score;
          new_max = fmaxf(new_max, score);
        }
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 2));

      // While every score is -inf the maximum is too, and exp2(-inf - -inf) would be NaN.
      const float shift = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = ex2_approx_ftz(row_max[n] - shift);
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
#pragma unroll
      for (int i = 0; i < Bc / 16; ++i) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = ex2_approx_ftz(scores[i][j] - shift + TOP);
        p_regs[i][n] = {pack2<Product<KV>>(p[0], p[1]), pack2<Product<KV>>(p[2], p[3])};
      }
    }

#pragma unroll
    for (int i = 0; i < Bc / 16; ++i) {
      // A matrix of ones sums the probabilities as V's product sees them, rounded.
      const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<Product<KV>>(row_sum[n], ones, p_regs[i][n].x, p_regs[i][n].y);
      multiply_values<G, NT>(o_regs, tile_smem, p_regs[i], i * 16);
    }
  }
  lost = __syncthreads_or(lost);

#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // rows 2t and 2t + 1
      const int row = first_row + n * 8 + 2 * t + j;
      if (row > last_row) continue;
      float* o = args.partial_o + partial_index(args, batch, kv_head, row, blockIdx.x) * HS;
#pragma unroll
      for (int m = 0; m < G::M_TILES; ++m) {
        o[value_column<G>(m, g, 0)] = o_regs[m][n][j];
        o[value_column<G>(m, g, 1)] = o_regs[m][n][j + 2];
      }
      if (warp == 0 && g == 0)
        args.partial_sum[2 * partial_index(args, batch, kv_head, row, blockIdx.x) + 1] = lost ? NAN : row_sum[n][j];
    }
    const int row = first_row + n * 8 + g;
    if (warp == 0 && t == 0 && row <= last_row)
      args.partial_sum[2 * partial_index(args, batch, kv_head, row, blockIdx.x)] = row_max[n] - TOP;
  }
}

template <typename KV, int HS, int NT>
const char* launch_rows(const DecodeArgs& args, cudaStream_t stream) {
  const char* error = launch(decode_tensor_cores<KV, HS, NT>, row_grid(args, args.splits), WARPS * WARP,
                             sizeof(Smem<Shape<KV, HS, TILE_BYTES, WARPS>, NT>), stream, args);
  return error ? error : launch_merge<HS>(args, stream);
}

extern "C" const char* launch_step(const DecodeArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename KV, int HS>() {
    const int rows = args->q_len * args->group;
    return rows <= 8 ? launch_rows<KV, HS, 1>(*args, stream) : launch_rows<KV, HS, 2>(*args, stream);
  });
}
