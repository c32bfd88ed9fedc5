// Tiles that the copy engine brings: one thread asks for a tile of keys or values of one KV head, through a tensor map
// that knows all strides, so that no thread computes an address. A producer warp runs ahead of the warps that multiply.
#pragma once

#include "../hopper.cuh"
#include "schedule.cuh"
#include "tiles.cuh"

// Of Shape<...>: 16-byte piece `chunk` of row `row` of a tile as a tensor copy with swizzle lays it down: columns of
// SPAN pieces, one below the other.
template <typename G>
constexpr int SPAN = G::CHUNKS < 8 ? G::CHUNKS : 8;

template <typename G>
DEVICE int swizzle_of_row(int row) {
  return SPAN<G> == 8 ? row & 7 : row >> 1 & 3;
}

// Tensor maps of K and V: {16 * SPAN bytes, slots, columns, KV heads, batch or pages}.
template <typename G>
const char* make_cache_map(CUtensorMap* map, const DecodeArgs& args, const void* base, const int64_t (&stride)[3]) {
  using KV = typename G::KV;
  using Element = std::conditional_t<std::is_same_v<KV, e4m3>, uint8_t, KV>;
  constexpr uint32_t SIZE = sizeof(KV), WIDTH = 16 * SPAN<G> / SIZE, COLUMNS = G::CHUNKS / SPAN<G>;
  auto some = [](int32_t n) { return static_cast<uint64_t>(n > 0 ? n : 1); };
  const uint64_t slots = args.page_table ? 1ull << args.page_shift : some(args.capacity);
  const uint64_t outer = some(args.page_table ? args.pages : args.batch);
  const uint32_t rows = args.page_table && slots < G::Bc ? static_cast<uint32_t>(slots) : G::Bc;
  auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride) * SIZE; };
  // An empty cache has no address; nothing of it is read.
  return make_tensor_map<Element>(map, base ? base : args.q, {WIDTH, slots, COLUMNS, uint64_t(args.kv_heads), outer},
                                  {bytes(stride[1]), WIDTH * SIZE, bytes(stride[2]), bytes(stride[0])},
                                  {WIDTH, rows, rows == G::Bc ? COLUMNS : 1, 1, 1},
                                  SPAN<G> == 8 ? Swizzle::b128 : Swizzle::b64);
}

// A ring of stages: K and V of a tile take one each.
template <int STAGES>
struct Ring {
  int stage = 0, turn = 0;

  DEVICE void next() {
    if (++stage == STAGES) stage = 0, turn ^= 1;
  }
};

// ---- the producer ----------------------------------------------------------------------------------------------------

// How a tile comes: in `parts` of a page's rows, each in one box or in one for every column, a lane a box.
template <typename G>
struct Boxes {
  static constexpr int COLUMNS = G::CHUNKS / SPAN<G>;
  int shift, rows, log_parts, parts, columns;  // shift: log2 of the page size

  DEVICE explicit Boxes(const DecodeArgs& args)
      : shift(args.page_table ? args.page_shift : 30), rows(min(G::Bc, 1 << shift)),
        log_parts(log2_exact(G::Bc / rows)), parts(1 << log_parts), columns(parts == 1 ? 1 : COLUMNS) {}

  // The first position of a part of one of the next tiles: as many tiles as the lanes can look up pages of at once.
  DEVICE int position(int tile, int step) const {
    const int lane = threadIdx.x % WARP, next = lane >> log_parts;
    return (tile + next * step) * G::Bc + (lane & (parts - 1)) * rows;
  }
};

// The lane's entry of the page table for the first tiles, wherever the sequence may end: who needs it looks at it.
template <typename G>
DEVICE int early_page(const DecodeArgs& args, int batch, int tile, int step) {
  const Boxes<G> boxes(args);
  const int entry = boxes.position(tile, step) >> boxes.shift;
  return entry < args.capacity >> boxes.shift ? args.page_table[batch * args.page_table_stride + entry] : -1;
}

struct AtOnce {
  DEVICE void operator()() const {}
};

// The tiles first, first + step, ... below `last` of one piece, by one warp. `keys` are those that are read; parts of a
// tile without any arrive as zeros, and their table entries are not looked at. `page`: of early_page, if there is one.
// `when` comes back when the next tile may be asked for.
template <typename G, typename Smem, typename Stages, typename When = AtOnce>
DEVICE void copy_tiles(Smem& smem, Stages& ring, const CUtensorMap& k_map, const CUtensorMap& v_map,
                       const DecodeArgs& args, int batch, int kv_head, int first, int last, int step, KeyRange keys,
                       bool early = false, int page = 0, When&& when = {}) {
  using KV = typename G::KV;
  constexpr int Bc = G::Bc, NO_PAGE = -1, LOST_PAGE = -2;
  const Boxes<G> cut(args);
  const int lane = threadIdx.x % WARP, shift = cut.shift, rows = cut.rows, parts = cut.parts;
  const int ahead = WARP >> cut.log_parts, boxes = parts * cut.columns;
  const int part = parts == 1 ? lane : lane / cut.COLUMNS, column = parts == 1 ? 0 : lane % cut.COLUMNS;
  const uint32_t offset = (column * Bc + part * rows) * SPAN<G> * 16;

  if (!args.page_table) page = batch;
  for (int tile = first, n = 0; tile < last; tile += step, n = n + 1 < ahead ? n + 1 : 0) {
    if (args.page_table && n == 0) {
      const int begin = cut.position(tile, step), entry = begin >> shift;
      const bool live = begin < keys.end && begin + rows > keys.begin;
      if (!early && live) page = args.page_table[batch * args.page_table_stride + entry];
      early = false;
      if (!live) {
        page = NO_PAGE;
      } else if (page < 0 || page >= args.pages) {
        report(args, FAULT_PAGE, batch, entry);
        page = LOST_PAGE;
      }
    }
    const int own_page = __shfl_sync(ALL_LANES, page, (n * parts + part) % WARP);
    const int slot = args.page_table ? (tile * Bc + part * rows) & ((1 << shift) - 1)
                     : args.ring     ? tile * Bc % args.capacity
                                     : tile * Bc;
    const bool wraps = args.ring && slot + Bc > args.capacity;
    const bool lost = __any_sync(ALL_LANES, own_page == LOST_PAGE && lane < boxes);
    when();
#pragma unroll 1
    for (int item = 0; item < 2; ++item) {
      const uint32_t full = smem_u32(&smem.full[ring.stage]);
      mbarrier_wait(smem_u32(&smem.empty[ring.stage]), ring.turn ^ 1);
      if (lane == 0) smem.lost[ring.stage] = lost;
      if (!wraps) {
        if (lane == 0) mbarrier_arrive_expect_tx(full, sizeof(Tile<G>));
        __syncwarp();
        if (lane < boxes)
          cp_async_bulk_tensor_5d_g2s(smem_u32(smem.stages[ring.stage]) + offset, item == 0 ? &k_map : &v_map, 0, slot,
                                      column, kv_head, own_page, full);
      } else {  // a ring whose capacity is no multiple of the tile: row by row
        const auto& stride = item == 0 ? args.k_stride : args.v_stride;
        const KV* head = static_cast<const KV*>(item == 0 ? args.k : args.v) + kv_head * stride[2] + batch * stride[0];
#pragma unroll 1
        for (int i = lane; i < Bc * G::CHUNKS; i += WARP) {
          const int row = i / G::CHUNKS, chunk = i % G::CHUNKS;
          const int at = slot + row < args.capacity ? slot + row : (slot + row) % args.capacity;
          const bool live = tile * Bc + row >= keys.begin && tile * Bc + row < keys.end;
          smem.stages[ring.stage][(chunk / SPAN<G> * Bc + row) * SPAN<G> +
                                  (chunk % SPAN<G> ^ swizzle_of_row<G>(row))] =
              live ? ld_global_nc_v4_u32(head + at * stride[1] + chunk * (16 / static_cast<int>(sizeof(KV))))
                   : uint4{0, 0, 0, 0};
        }
        fence_proxy_async_shared();  // the copy engine will write here again
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full);
      }
      ring.next();
    }
  }
}

// ---- queries ---------------------------------------------------------------------------------------------------------

// 8 * NT rows of Q, 16-bit, pieces of 16 bytes swizzled.
template <typename G, int NT>
struct QueryRows {
  uint4 rows[8 * NT][G::HS / 8];
  float scale[8 * NT];  // of a row's scores, in base 2
};

// A warp a row, all its loads at once. A BF16 row that becomes FP16 is scaled by a power of two to below 2, so that no
// query overflows.
template <typename G, int NT>
DEVICE void load_query_rows(QueryRows<G, NT>& queries, const DecodeArgs& args, int batch, int kv_head, int first_row) {
  using KV = typename G::KV;
  constexpr int CHUNKS = G::HS / 8, LOADS = ceil_div(CHUNKS, WARP), ROUNDS = 8 * NT / G::WARPS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint4 chunks[ROUNDS][LOADS];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int row = first_row + round * G::WARPS + warp;  // rows that fill up the tile are zeros
    const int64_t q = query_offset(args, args.q_stride, batch, row_token(args, row), row_head(args, kv_head, row));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int chunk = i * WARP + lane;
      chunks[round][i] = row < row_count(args) && chunk < CHUNKS
                             ? ld_global_nc_v4_u32(static_cast<const uint16_t*>(args.q) + q + chunk * 8)
                             : uint4{0, 0, 0, 0};
    }
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int n = round * G::WARPS + warp;
    float down = 1.0f, up = 1.0f;
    const bool convert = std::is_same_v<KV, e4m3> && args.dtype == DTYPE_BF16;
    if (convert) {
      uint32_t top = 0;  // the largest exponent, as BF16 has it
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const uint32_t words[4] = {chunks[round][i].x, chunks[round][i].y, chunks[round][i].z, chunks[round][i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) top = max(top, max(words[j] & 0x7fff0000u, words[j] << 16 & 0x7fff0000u));
      }
      const int exponent = static_cast<int>(__reduce_max_sync(ALL_LANES, top) >> 23);
      const int kept = min(max(exponent, 127 - 96), 127 + 96);
      down = __uint_as_float(static_cast<uint32_t>(254 - kept) << 23);
      up = __uint_as_float(static_cast<uint32_t>(kept) << 23);
    }
    if (lane == 0) queries.scale[n] = score_scale(args, kv_head) * up;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int chunk = i * WARP + lane;
      if (chunk >= CHUNKS) break;
      uint32_t words[4] = {chunks[round][i].x, chunks[round][i].y, chunks[round][i].z, chunks[round][i].w};
      if (convert)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] =
              pack2<fp16>(__uint_as_float(words[j] << 16) * down, __uint_as_float(words[j] & 0xffff0000u) * down);
      queries.rows[n][chunk ^ (n & 7)] = {words[0], words[1], words[2], words[3]};
    }
  }
}

// The lane's fragments, of its part of the head dim, for the whole piece.
template <typename G, int NT>
DEVICE void load_fragments(uint2 (&q_regs)[G::STEPS][NT], const QueryRows<G, NT>& queries, int part) {
  const int lane = threadIdx.x % WARP;
  if constexpr (std::is_same_v<typename G::KV, e4m3>) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int group = 0; group < G::STEPS / 4; ++group)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int chunk = (part * G::STEPS + group * 4 + t) * 2;  // a lane takes 16 dims of a row, in four steps
        const uint4 low = queries.rows[n * 8 + g][chunk ^ g], high = queries.rows[n * 8 + g][(chunk + 1) ^ g];
        q_regs[group * 4 + 0][n] = {low.x, low.y};
        q_regs[group * 4 + 1][n] = {low.z, low.w};
        q_regs[group * 4 + 2][n] = {high.x, high.y};
        q_regs[group * 4 + 3][n] = {high.z, high.w};
      }
  } else {
#pragma unroll
    for (int step = 0; step < G::STEPS; ++step)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int row = n * 8 + lane % 8, chunk = (part * G::STEPS + step) * 2 + lane / 8 % 2;
        uint32_t b[2];
        ldmatrix_x2(b, smem_u32(&queries.rows[row][chunk ^ (lane & 7)]));
        q_regs[step][n] = {b[0], b[1]};
      }
  }
}

// ---- products --------------------------------------------------------------------------------------------------------

// s[n] = the products of 16 keys from `first_key` with the rows of Q, along the part of the head dim.
template <typename G, int NT>
DEVICE void multiply_key_tile(float (&s)[NT][4], const Tile<G>& k, int first_key, int part,
                              const uint2 (&q_regs)[G::STEPS][NT]) {
  using KV = typename G::KV;
  constexpr int Bc = G::Bc, STEPS = G::STEPS, S = SPAN<G>;
  const int lane = threadIdx.x % WARP;
  float sums[2][NT][4] = {};  // in turn: half the wait for each other's result
  if constexpr (std::is_same_v<KV, e4m3>) {
    const int key = first_key + key_of_lane<KV>(lane / 4), first = part * STEPS;
    const uint4* rows = &k[first / S * Bc * S + key * S];
    const int piece = first % S ^ lane % 4 ^ swizzle_of_row<G>(key);
#pragma unroll
    for (int group = 0; group < STEPS / 4; ++group) {  // a lane takes 16 contiguous bytes of a row: four steps
      const int at = group * 4 / S * Bc * S + (piece ^ group * 4 % S);
      const uint4 low = rows[at], high = rows[at + 8 * S];
      const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t a[4] = {f16x2_from_e4m3x2(low_words[j]), f16x2_from_e4m3x2(high_words[j]),
                               f16x2_from_e4m3x2(low_words[j] >> 16), f16x2_from_e4m3x2(high_words[j] >> 16)};
#pragma unroll
        for (int n = 0; n < NT; ++n)
          mma_m16n8k16<fp16>(sums[j % 2][n], a, q_regs[group * 4 + j][n].x, q_regs[group * 4 + j][n].y);
      }
    }
  } else {
    const int key = first_key + lane % 16, first = part * STEPS * 2;
    const uint4* rows = &k[first / S * Bc * S + key * S];
    const int piece = first % S ^ lane / 16 ^ lane % 8;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t a[4];
      ldmatrix_x4(a, smem_u32(&rows[step * 2 / S * Bc * S + (piece ^ step * 2 % S)]));
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<KV>(sums[step % 2][n], a, q_regs[step][n].x, q_regs[step][n].y);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[n][j] = sums[0][n][j] + sums[1][n][j];
}

// o[m][n] += V^T P^T over 16 keys from `first_key`: the warp's columns of V by the rows of P.
template <typename G, int NT>
DEVICE void multiply_value_tile(float (&o)[G::M_TILES][NT][4], const Tile<G>& v, const uint2 (&p)[NT], int first_key) {
  using KV = typename G::KV;
  constexpr int Bc = G::Bc, M_TILES = G::M_TILES, DIMS = G::DIMS, S = SPAN<G>;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if constexpr (std::is_same_v<KV, e4m3>) {
    // A lane takes DIMS / 8 neighbouring columns of its four keys; bytes of two keys make a pair: no transpose.
    constexpr int BYTES = DIMS / 8;
    const int byte = warp * DIMS + lane / 4 * BYTES, chunk = byte / 16, key = first_key + lane % 4 * 2;
    Bytes<BYTES> rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = key + i % 2 + i / 2 * 8;
      const uint4* piece = &v[(chunk / S * Bc + row) * S + (chunk % S ^ swizzle_of_row<G>(row))];
      rows[i] = *reinterpret_cast<const Bytes<BYTES>*>(reinterpret_cast<const char*>(piece) + byte % 16);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const int word = m / 2;
      // {key 2t, key 2t + 1} of columns 2m and 2m + 1, a byte each
      const uint32_t selector = m % 2 ? 0x7362 : 0x5140;
      const uint32_t near = prmt(rows[0].words[word], rows[1].words[word], selector);
      const uint32_t far = prmt(rows[2].words[word], rows[3].words[word], selector);
      const uint32_t a[4] = {f16x2_from_e4m3x2(near), f16x2_from_e4m3x2(near >> 16), f16x2_from_e4m3x2(far),
                             f16x2_from_e4m3x2(far >> 16)};
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<fp16>(o[m][n], a, p[n].x, p[n].y);
    }
  } else {
    const int key = first_key + lane % 8 + lane / 16 * 8, first = warp * M_TILES * 2;
    const uint4* row = &v[(first / S * Bc + key) * S];
    const int piece = first % S ^ lane / 8 % 2 ^ lane % 8;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, smem_u32(&row[piece ^ m * 2]));
#pragma unroll
      for (int n = 0; n < NT; ++n) mma_m16n8k16<KV>(o[m][n], a, p[n].x, p[n].y);
    }
  }
}

// What follows the last key of a row may be anything in memory, NaN too, and 0 times it must be 0.
template <typename G>
DEVICE void clear_dead_rows(Tile<G>& v, int tile, KeyRange keys) {
  constexpr int Bc = G::Bc, S = SPAN<G>;
  const int begin = max(keys.begin - tile * Bc, 0), end = min(keys.end - tile * Bc, Bc);
#pragma unroll 1
  for (int i = threadIdx.x; i < Bc * G::CHUNKS; i += G::THREADS) {
    const int row = i / S % Bc;
    if (row < begin || row >= end) v[i] = {0, 0, 0, 0};
  }
  fence_proxy_async_shared();  // the copy engine will write here again
}

// ---- launching -------------------------------------------------------------------------------------------------------

constexpr int MAX_CLUSTER = 8;

// How many clusters of that size run at once, at most `most`: a cluster does not span the groups that multiprocessors
// come in, and not all groups are whole.
template <auto KERNEL>
inline int resident_clusters(int cluster, int threads, size_t smem_bytes, int most) {
#ifdef __CUDACC__
  static int known[32][MAX_CLUSTER + 1] = {};  // of this kernel, by device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 32) return most;
  int& count = known[device][cluster];
  if (count == 0) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = cluster;
    config.blockDim = threads;
    config.dynamicSmemBytes = smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
    if (cudaOccupancyMaxActiveClusters(&count, KERNEL, &config) != cudaSuccess) {
      cudaGetLastError();
      count = 0;
    }
    if (count < 1) count = most;
  }
  return count < most ? count : most;
#else
  static_cast<void>(cluster), static_cast<void>(threads), static_cast<void>(smem_bytes);
  return most;
#endif
}

// launch_dependent() of common.cuh in clusters of `cluster` blocks.
template <typename... Params, typename... Args>
inline const char* launch_dependent_cluster(void (*kernel)(Params...), dim3 grid, int cluster, dim3 block,
                                            size_t smem_bytes, cudaStream_t stream, Args... args) {
#ifdef __CUDACC__
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // the text carries it; the next launch must not find it again
  return cudaGetErrorString(error);
#else
  return launch_cluster(kernel, grid, dim3(cluster), block, smem_bytes, stream, args...);
#endif
}
