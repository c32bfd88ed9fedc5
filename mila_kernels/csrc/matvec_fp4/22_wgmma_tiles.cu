// Change: 3 to 16 rows of BF16 where a cluster's multiprocessors can share the columns of few tiles: a warp owns a tile,
//   and takes the groups of its block one after the other; x lies in shared memory for wgmma, decoded words are its
//   operand in registers. Nothing is added up before the end, and then over the cluster alone: of two blocks each has
//   half of the rows of x of every tile.
// Prediction: 21 has x in registers, 123 KB in each of 120 multiprocessors on fc_down with 16 rows, and adds up every
//   tile over 15 warps. In clusters of 8 x is 61 KB, of which a read serves four warps; 1 to 1.5 us less.
// Measured: H200, 2026-11-30, by the project's clock, 21 in the same run in brackets: 16 rows, fc_down 10.7 to 11.1 us
//   (12.7 to 13.0), gate_up 18.4 (20.9 to 21.1); recorded 11.1 and 18.4. Prototypes in one run: 16 rows, fc_down 11.2
//   (13.0), gate_up 18.85 (20.6), global_o 7.9 (9.2); 8 rows, fc_down 10.7 (11.2), global_o 7.5 (7.9). A group's next
//   words asked for in front of its products, not between them, is 0.2 of fc_down and 0.3 of gate_up; the figures that
//   follow are from before. How many groups of words are on their way is most of it: fc_down with 16 rows 11.4, 11.9,
//   12.1 with 4, 5, 6 groups and 11.0 with 3; with 8 12.8, with all of these in front of x 14.4, with more of them asked
//   for when x is there 13.6, with the tiles' way into L2 begun first 14.3; one of 3 in front of x 11.8. x brought in two
//   turns 12.4. Then code that is fetched in front of the first product: 0.5 us less without FP16's part of it (which
//   21's kernels do). In a loop, which waits for each product, 13.3. Of 10.9 us x is 0.5, the products are 1.0 and the
//   sums 0.5; 9.3 without all three. Of gate_up's 19.1 us with 16 rows the end was 1.7, when a tile's parts all went
//   through shared memory to the block that added it up: 17.4 without; 18.5 without products, 16.5 for the loads alone.
//   Each block keeping half of its own sums in registers gives 18.55, words asked for in front of a group's first wait
//   18.45. The first round's sums added up in the second round, between its products, 20.8, as the compiler then waits
//   for each, and in front of them 19.75. Lines of the next four groups into the L2 behind x 19.25, in front of it 19.5;
//   x in two batches 20.05; the second round's words into the L2 20.1, its scales asked for later 20.5. Sums through
//   global memory, by the block that comes last, 6 blocks for the columns of 11 tiles, all 132 multiprocessors at work:
//   12.9. Clusters of 6, 17 of which fit at a time, 21.3, of 4 12.2. 21 in clusters of 8, a group a warp, 13.3 to 15.6.
//   Other designs for gate_up with 16 rows (20.4 to 20.8 with 21): six groups of a warp's tile ahead, by cp.async, x in
//   shared memory for mma.sync, 21.7, without x 20.4, without products 19.4; three tiles a warp, each of a third of the
//   columns, 22.2, with half of these groups ahead 20.7; words by bulk copies 22.9, x by them 23.8, multicast to clusters
//   of 2 and 4 23.7 and 42; words by plain loads, the columns in one line, x a part at a time 21.4; this step with words
//   in registers, three to five groups ahead, 23.8 to 24.3 (19.0 to 19.3), with five groups in shared memory 19.3 to
//   19.6. Where it is not used: gate_up with 8 rows 18.0 (17.3), local_qkv 9.1 to 9.3 and 7.7 (8.5, 7.3), local_o, in
//   clusters of 4 or 8, 6.0 to 6.2 and 5.7 (6.15, 5.2), global_qk 10.0 and 8.5 (9.0, 7.8).
// Verdict: Kept: 14% of fc_down with 16 rows, 5 with 8, 12% of gate_up with 16. 11.5 and 19 were the aims.
// Rows: 3
// Predecessor: 21_second_tile_later
// Architectures: sm_90a
// Spills: those of 21, with FP32 scales.
// Instances: scale_dtype column_tiles
#include "../hopper.cuh"
#include "args.cuh"

// What is not for a warp a tile, the step before does.
#define launch_step launch_predecessor
#include "21_second_tile_later.cu"
#undef launch_step

// ---- few tiles a multiprocessor, BF16: a warp owns a tile, a cluster shares the columns ----------------------------------

constexpr int TILE_WARPS = 16;
constexpr int X_BATCH = 4;              // of what a warp brings of x at a time
constexpr int TILE_GROUPS[] = {15, 8};  // of a block; the second for one round
constexpr int MOST_ROUNDS = 2;          // more of them have not been measured
// Blocks of a cluster. With one round smaller clusters leave a block too few warps or too much of x.
constexpr __host__ __device__ int cluster_of(int rounds) { return rounds == 1 ? 8 : 2; }
// Groups of a tile that are on their way or wait in shared memory: so few, as all that is asked for before x has come stands in
// its way.
constexpr int GROUPS_AHEAD = 3;
// x as wgmma takes it without a swizzle: eight columns of B times eight of K lie in so many bytes, and those of 16 columns of K
// one after the other.
constexpr int CORE_BYTES = 128;
constexpr __host__ __device__ int x_group_bytes(int nt) { return GROUP / 8 * nt * CORE_BYTES; }

// A round is a tile of each warp of a cluster's blocks, and each block has block_groups of its groups. Shared memory holds x, the
// scales [rounds][warps][block_groups][TILE_ROWS], words[warps][GROUPS_AHEAD][UNIT_BYTES] and what the blocks send each other:
// of one round y[own tiles][cluster][NT][WARP] of float4, of more y[rounds][TILE_WARPS][WARP].
struct TileCut {
  int clusters, rounds, tiles, groups, block_groups;
  int take, warps;  // tiles that a cluster takes a round; warps are whole warpgroups
  int own_tiles;    // of one round's, that a block adds up
  int scales_offset, words_offset, own_offset, blocks, smem_bytes;
};

// GROUPS, of a block, are one straight line, as the registers of a product in a loop are waited for.
template <typename Scale, int NT, int GROUPS, int ROUNDS>
__global__ void __launch_bounds__(TILE_WARPS* WARP, 1)
    matvec_wgmma_tiles(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ TileCut cut) {
  constexpr int SCALE_BYTES = TILE_ROWS * sizeof(Scale), CLUSTER = cluster_of(ROUNDS);
  constexpr bool ONE = ROUNDS == 1;
  static_assert(ONE || GROUPS % GROUPS_AHEAD == 0, "the next tile's words come to the same places");
  static_assert(ONE || CLUSTER == NT, "each block adds up eight columns of B");
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int rank = static_cast<int>(cluster_ctarank()), cluster = static_cast<int>(blockIdx.x) / CLUSTER;
  const uint32_t x_smem = smem_u32(&dynamic_smem<uint4>()), owned = x_smem + cut.own_offset;
  barrier_cluster_arrive_relaxed();  // its blocks are there: they may be sent to

  // Each lane brings the codes that it will read; the scales are for all lanes. Without a tile no codes are read: of one round,
  // the last tile's again.
  const auto tile_of = [&](int round) { return (round * cut.clusters + cluster) * cut.take + warp; };
  const auto has_tile = [&](int round) { return warp < cut.take && round < ROUNDS && tile_of(round) < cut.tiles; };
  const auto unit_of = [&](int round) {
    return static_cast<uint64_t>(min(tile_of(round), cut.tiles - 1)) * cut.groups + rank * GROUPS;
  };
  const uint32_t words = x_smem + cut.words_offset + warp * (GROUPS_AHEAD * UNIT_BYTES) + lane * 16;
  const auto copy = [&](uint32_t to, const uint8_t* from, uint32_t bytes) {
    if constexpr (ONE) {
      cp_async_cg(to, from);
    } else {
      cp_async_cg_zfill(to, from, bytes);
    }
  };
  const auto ask = [&](const uint8_t* codes, uint32_t bytes, int group) {
    if (!ONE || group < GROUPS) {
      const uint32_t to = words + group % GROUPS_AHEAD * UNIT_BYTES;
      copy(to, codes + group % GROUPS * UNIT_BYTES, bytes);
      copy(to + 512, codes + group % GROUPS * UNIT_BYTES + 512, bytes);
    }
    cp_async_commit_group();
  };
  const auto scales_of = [&](int round) {
    return x_smem + cut.scales_offset + (round * cut.warps + warp) * (GROUPS * SCALE_BYTES);
  };
  const auto ask_scales = [&](int round) {
    const uint8_t* const from = static_cast<const uint8_t*>(args.scales) + unit_of(round) * SCALE_BYTES;
#pragma unroll
    for (int i = lane * 16; i < GROUPS * SCALE_BYTES; i += WARP * 16) cp_async_cg(scales_of(round) + i, from + i);
  };
  const uint8_t* codes = args.codes + unit_of(0) * UNIT_BYTES + lane * 16;
  uint32_t bytes = has_tile(0) ? 16 : 0;

  // A warp brings eight columns of B and 64 of K at a time. Where lane 4g + t owns columns 16t to 16t + 15 of A, K is permuted so
  // that a word is a product: of its four columns two are in the first eight of 16, two in the second. Columns of B past the last
  // are copies of it, and dropped at the end.
  constexpr int X_TASKS = GROUPS * 2 * NT;
  static_assert(X_TASKS >= TILE_WARPS, "each warp asks for words when it has asked for x");
  const auto x_of = [&](int task) {
    const int row = min(task % NT * 8 + g, args.m - 1);
    return static_cast<const uint16_t*>(args.x) + row * args.x_stride + rank * (GROUPS * GROUP) + task / NT * 64 + t * 16;
  };
  const auto put_x = [&](int task, int pair, const uint4& x) {
    const uint32_t to = x_smem + ((task / NT * 8 + pair * 4) * NT + task % NT) * CORE_BYTES + lane * 4;
    const uint32_t parts[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) st_shared_f32(to + c * NT * CORE_BYTES, __uint_as_float(parts[c]));
  };
  if (args.chained) griddepcontrol_wait();
  uint32_t ends = 0;
#pragma unroll 1
  for (int begin = warp; begin < X_TASKS; begin += X_BATCH * cut.warps) {
    uint4 x[X_BATCH][2];
#pragma unroll
    for (int i = 0; i < X_BATCH; ++i) {
      if (begin + i * cut.warps >= X_TASKS) break;
      const uint16_t* const from = x_of(begin + i * cut.warps);
      x[i][0] = ld_global_v4_u32(from);
      x[i][1] = ld_global_v4_u32(from + 8);
    }
    if (begin == warp) {
      ask_scales(0);
#pragma unroll
      for (int group = 0; group < GROUPS_AHEAD; ++group) ask(codes, bytes, group);
    }
#pragma unroll
    for (int i = 0; i < X_BATCH; ++i) {
      if (begin + i * cut.warps >= X_TASKS) break;
      put_x(begin + i * cut.warps, 0, times_x_factor(x[i][0], ends));
      put_x(begin + i * cut.warps, 1, times_x_factor(x[i][1], ends));
    }
  }
  fence_proxy_async_shared();
  float restore = 0x1p126f / X_FACTOR;
  if (__syncthreads_or((ends & 0x80008000u) != 0)) {  // too large: as it came
    restore = 0x1p126f;
#pragma unroll 1
    for (int i = warp * 2; i < X_TASKS * 2; i += i % 2 == 0 ? 1 : cut.warps * 2 - 1)
      put_x(i / 2, i % 2, ld_global_v4_u32(x_of(i / 2) + i % 2 * 8));
    fence_proxy_async_shared();
    __syncthreads();
  }

  [[maybe_unused]] float4 mine[ROUNDS];  // what this block adds up of the rounds, the newest first
  const uint64_t b = wgmma_descriptor(x_smem, NT * CORE_BYTES, CORE_BYTES, Swizzle::none);
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const uint8_t* next_codes = codes;
    uint32_t next_bytes = 0;
    if (!ONE && round + 1 < ROUNDS) ask_scales(round + 1);  // without a tile the last one's, as zeros are multiplied too
    if (!ONE && has_tile(round + 1)) {
      next_codes = args.codes + unit_of(round + 1) * UNIT_BYTES + lane * 16;
      next_bytes = 16;
    }
    const uint32_t scales = scales_of(round) + g * 2 * sizeof(Scale);
    float y[NT * 4] = {}, sums[NT * 4] = {}, scale[2] = {};
    uint32_t a[2][4][4];
    cp_async_wait_group<GROUPS_AHEAD - 1>();
    __syncwarp();  // the scales are for all lanes
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      cp_async_wait_group<GROUPS_AHEAD - 1>();
      const uint32_t from = words + group % GROUPS_AHEAD * UNIT_BYTES;
      const uint4 half[2] = {ld_shared_v4_u32(from), ld_shared_v4_u32(from + 512)};
      const auto decode_half = [&](int i) {
        decode(a[i][0], half[i].x), decode(a[i][1], half[i].y), decode(a[i][2], half[i].z), decode(a[i][3], half[i].w);
      };
      const auto multiply = [&](int i) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wgmma_k16<bf16, NT * 8>(sums, a[i][j], wgmma_advance(b, (group * 8 + i * 4 + j) * NT * 2 * CORE_BYTES), i + j > 0);
        wgmma_commit_group();
      };
      if (group + GROUPS_AHEAD < GROUPS) {  // first of all, as a warp waits for products
        ask(codes, bytes, group + GROUPS_AHEAD);
      } else {
        ask(next_codes, next_bytes, group + GROUPS_AHEAD);
      }
      wgmma_wait_group<1>();  // the first half of the group before
      decode_half(0);
      wgmma_wait_group<0>();
#pragma unroll
      for (int c = 0; c < NT * 4; ++c) y[c] += sums[c] * scale[c / 2 % 2];
      Scale pair[2];
#pragma unroll
      for (int c = 0; c < static_cast<int>(sizeof(pair)) / 4; ++c)
        reinterpret_cast<uint32_t*>(pair)[c] = ld_shared_u32(scales + group * SCALE_BYTES + c * 4);
      scale[0] = to_float(pair[0]) * restore, scale[1] = to_float(pair[1]) * restore;
      multiply(0);
      decode_half(1);
      multiply(1);
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int c = 0; c < NT * 4; ++c) y[c] += sums[c] * scale[c / 2 % 2];
    // After the wait: what the kernel in front wrote can be seen by all that follow, as they read weights at once.
    if (round + 1 == ROUNDS) griddepcontrol_launch_dependents();
    if (round == 0) barrier_cluster_wait();
    const auto columns = [&](int j) { return make_float4(y[4 * j], y[4 * j + 1], y[4 * j + 2], y[4 * j + 3]); };
    if constexpr (ONE) {
      const uint32_t to = owned + ((warp / CLUSTER * CLUSTER + rank) * NT * WARP + lane) * 16;
      if (has_tile(0))
#pragma unroll
        for (int j = 0; j < NT; ++j)
          st_shared_cluster_v4_f32(mapa_shared_cluster(to + j * WARP * 16, warp % CLUSTER), columns(j));
    } else {
#pragma unroll
      for (int i = ROUNDS - 1; i > 0; --i) mine[i] = mine[i - 1];
      mine[0] = rank == 0 ? columns(0) : columns(1);
      st_shared_cluster_v4_f32(mapa_shared_cluster(owned + ((round * TILE_WARPS + warp) * WARP + lane) * 16, rank ^ 1),
                               rank == 0 ? columns(1) : columns(0));
    }
    codes = next_codes, bytes = next_bytes;
  }

  barrier_cluster_arrive();
  barrier_cluster_wait();
  const auto add = [](float (&sum)[4], const uint4& part) {
    sum[0] += __uint_as_float(part.x), sum[1] += __uint_as_float(part.y);
    sum[2] += __uint_as_float(part.z), sum[3] += __uint_as_float(part.w);
  };
  if constexpr (!ONE) {
    uint4 theirs[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) theirs[i] = ld_shared_v4_u32(owned + (((ROUNDS - 1 - i) * TILE_WARPS + warp) * WARP + lane) * 16);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int round = ROUNDS - 1 - i;
      float sum[4] = {mine[i].x, mine[i].y, mine[i].z, mine[i].w};
      add(sum, theirs[i]);
      if (has_tile(round)) store_four(args, tile_of(round), rank, lane, sum);
    }
  } else {
    for (int i = warp; i < cut.own_tiles * NT; i += cut.warps) {
      const int j = i % NT, first = i / NT * CLUSTER, tile = cluster * cut.take + first + rank;
      if (first + rank >= cut.take || tile >= cut.tiles) continue;
      const uint32_t from = owned + ((first * NT + j) * WARP + lane) * 16;
      uint4 parts[CLUSTER];
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part) parts[part] = ld_shared_v4_u32(from + part * NT * WARP * 16);
      float sum[4] = {};
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part) add(sum, parts[part]);
      store_four(args, tile, j, lane, sum);
    }
  }
}

// No warps: the columns do not come out even, there are too many tiles, or another kernel is faster. Two rounds pay with 16
// columns of B, for which registers are short.
TileCut tile_cut_for(const MatvecFp4Args& args, int nt, int scale_bytes) {
  TileCut cut = {};
  cut.groups = args.k / GROUP;
  cut.tiles = ceil_div(args.n, TILE_ROWS);
  for (cut.rounds = 1; cut.rounds <= (nt == 1 ? 1 : MOST_ROUNDS); ++cut.rounds) {
    const int cluster = cluster_of(cut.rounds);
    // Larger clusters do not come out even in the parts of a chip that they must lie in.
    const int clusters = (cluster <= 2 ? args.sm_count : args.sm_count * 94 / 100) / cluster;
    if (clusters == 0 || ceil_div(cut.tiles, clusters * TILE_WARPS) != cut.rounds) continue;
    for (const int groups : TILE_GROUPS) {
      if (cluster * groups != cut.groups || (cut.rounds > 1 && groups % GROUPS_AHEAD != 0)) continue;
      cut.block_groups = groups;
      cut.take = ceil_div(cut.tiles, clusters * cut.rounds);
      const int warps = ceil_div(cut.take, 4) * 4;
      cut.clusters = ceil_div(cut.tiles, cut.take * cut.rounds);
      cut.blocks = cut.clusters * cluster;
      cut.own_tiles = ceil_div(cut.take, cluster);
      cut.scales_offset = groups * x_group_bytes(nt);
      cut.words_offset = cut.scales_offset + cut.rounds * warps * groups * TILE_ROWS * scale_bytes;
      cut.own_offset = cut.words_offset + warps * GROUPS_AHEAD * static_cast<int>(UNIT_BYTES);
      cut.smem_bytes = cut.own_offset + (cut.rounds == 1 ? cut.own_tiles * cluster * nt : cut.rounds * TILE_WARPS) * WARP * 16;
      if (cut.smem_bytes > args.smem_limit - 1024) continue;
      cut.warps = warps;
      return cut;
    }
  }
  return {};
}

template <typename Scale, int NT>
const char* launch_wgmma_tiles(const MatvecFp4Args& args, const TileCut& cut, cudaStream_t stream) {
  auto kernel = cut.block_groups == TILE_GROUPS[0] ? matvec_wgmma_tiles<Scale, NT, TILE_GROUPS[0], 1>
                                                   : matvec_wgmma_tiles<Scale, NT, TILE_GROUPS[1], 1>;
  if constexpr (NT == 2) {
    if (cut.rounds == 2) kernel = matvec_wgmma_tiles<Scale, NT, TILE_GROUPS[0], 2>;
  }
  return launch_cluster(kernel, cut.blocks, cluster_of(cut.rounds), cut.warps * WARP, cut.smem_bytes, stream, args, cut);
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(args->m * terms_of(args->dtype), [&]<int NT>() -> const char* {
      if constexpr (NT <= 2) {
        const TileCut tiles = tile_cut_for(*args, NT, sizeof(Scale));
        if (args->dtype == DTYPE_BF16 && tiles.warps > 0) return launch_wgmma_tiles<Scale, NT>(*args, tiles, stream);
      }
      return launch_predecessor(args, stream);
    });
  });
}
