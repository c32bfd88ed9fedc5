// Change: more than 8 columns of B: a warp owns a tile of 16 rows, and x lies in shared memory once a block. No sums over
//   warps; where x is too long for a block, a cluster of up to 8 splits the columns and sums up once, through distributed
//   shared memory. Up to 8 columns all stays as it was.
// Prediction: at 16 rows of x, 12's warps leave 15 KB of sums for every 31 KB of weights; on fc_down each of 120 blocks reads
//   all of x, 0.5 MB, together twice the weight's bytes. The sums go, and a block's part of that x shrinks to an eighth:
//   gate_up 30 to 20 us, fc_down 26 to 12.
// Measured: H200, 2026-11-29: M = 16, gate_up 24.7 us, fc_down 15.8, where 10 had 29.9 and 25.7 in another run. M = 1: gate_up
//   18.1 us, fc_down 11.4, local_qkv 7.3, local_o 5.2, global_qk 7.9, global_o 7.5, lm_head 130.8; gate_up M = 2, 4, 8: 18.4,
//   19.2, 20.6. Of prototypes: only 15 clusters of 8 fit its 132 multiprocessors at a time: 16 took 27. Clusters of 4 with half
//   the warps 22.7; bulk prefetches into L2 28.5 and 18.4; a barrier for each quarter of x 25.7 and 16.5; M = 8 on gate_up this
//   way 23.8, with the columns split over warps 22.0.
// Verdict: Kept. Still far from the targets (19 and 11.5): each block brings 123 KB of x in, a quarter of its weights' bytes, and
//   scales it, before its first product.
// Architectures: sm_90a sm_100a sm_120
// Spills: a register or two in kernels for more than 8 columns of B, on sm_100a and sm_120.
// Instances: scale_dtype column_tiles
#include "../hopper.cuh"
#include "args.cuh"

constexpr uint32_t UNIT_BYTES = TILE_ROWS * GROUP / 2;
constexpr int HELD = 2;  // groups of a tile that a warp holds in registers at a time
constexpr int max_warps(int nt) { return nt == 4 ? 12 : 16; }  // by the registers that columns of B take
constexpr int X_PITCH = HELD * GROUP + 8;  // of a column; 16 bytes more for other banks
constexpr uint32_t BF16_BITS = 0x81c081c0u;

// The same as _unfold in mila_kernels/layouts.py, which solves for the word.
DEVICE void decode(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & BF16_BITS;
  a[1] = (word << 6) & BF16_BITS;
  a[2] = __funnelshift_l(word, word, 12) & BF16_BITS;
  a[3] = (word >> 6 ^ word << 2) & BF16_BITS;
}

// How a launch cuts the work. A round is a tile of each block, a pass HELD groups of each warp. Shared memory holds, per
// warp, x[x_passes][columns][X_PITCH] and after all of them y[y_rounds][warps][columns][TILE_ROWS].
struct Cut {
  int warps, passes, rounds;
  int x_passes;  // whose x is in shared memory at a time: all, or one
  int y_rounds;  // between two sums over the warps
  int tiles, groups;
  int pass_units, round_units;  // from one pass, and from the last one of a round, to the next; in groups of a tile
  int blocks, smem_bytes;
};

// Eight BF16 times X_FACTOR. Bits 15 and 31 of `ends` are set where one became an infinity or a NaN: too large.
DEVICE uint4 times_x_factor(const uint4& x, uint32_t& ends) {
  const __nv_bfloat162 factor = __float2bfloat162_rn(X_FACTOR);
  const auto both = [&](uint32_t pair) {
    const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), factor);
    const uint32_t bits = reinterpret_cast<const uint32_t&>(product);
    ends |= (bits & 0x7f807f80u) + 0x00800080u;
    return bits;
  };
  return make_uint4(both(x.x), both(x.y), both(x.z), both(x.w));
}

// Brings a warp's part of x in, for x_passes passes from group `first` on, BATCH rows at a time, and gives the factor that
// it was multiplied by. Calls meanwhile() while the first rows are on their way.
template <int BATCH, typename F>
DEVICE float bring_x(const MatvecFp4Args& args, const Cut& cut, bf16* x_warp, int first, int lane, F meanwhile) {
  const int terms = terms_of(args.dtype), rows = cut.x_passes * args.m;
#pragma unroll 1
  for (float factor = X_FACTOR;; factor = 1.0f) {
    const uint16_t* from = static_cast<const uint16_t*>(args.x) + first * GROUP + lane * 8;
    int k = first * GROUP + lane * 8, m = 0;
    bf16* to = x_warp + lane * 8;
    uint32_t ends = 0;
#pragma unroll 1
    for (int row = 0; row < rows; row += BATCH) {
      uint4 loaded[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (row + i >= rows) break;
        loaded[i] = k < args.k ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        from += args.x_stride;
        if (++m < args.m) continue;
        m = 0;
        k += cut.pass_units * GROUP;
        from += cut.pass_units * GROUP - args.m * args.x_stride;
      }
      if (row == 0 && factor == X_FACTOR) meanwhile();
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (row + i >= rows) break;
        if (args.dtype == DTYPE_FP16) {  // ends at 65504: never too large
          uint4 split[2];
          split_terms(split, loaded[i], factor);
          *reinterpret_cast<uint4*>(to) = split[0];
          *reinterpret_cast<uint4*>(to + X_PITCH) = split[1];
        } else {
          *reinterpret_cast<uint4*>(to) = factor == 1.0f ? loaded[i] : times_x_factor(loaded[i], ends);
        }
        to += terms * X_PITCH;
      }
    }
    const bool too_large = factor != 1.0f && __any_sync(ALL_LANES, (ends & 0x80008000u) != 0);
    __syncwarp();
    if (!too_large) return factor;
  }
}

// WHOLE: every warp has HELD groups in every pass, and all of x fits.
template <typename Scale, int NT, bool WHOLE>
__global__ void __launch_bounds__(max_warps(NT) * WARP, 1)
    matvec_column_split(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ Cut cut) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int terms = terms_of(args.dtype), columns = args.m * terms;
  bf16* const x_smem = &dynamic_smem<bf16>();
  bf16* const x_warp = x_smem + warp * cut.x_passes * columns * X_PITCH;
  const auto group_of = [&](int pass) { return (pass * cut.warps + warp) * HELD; };
  // Past the last group a warp reads the last one again, and multiplies it by zeros of x.
  uint4 words[HELD][2];
  Scale scales[HELD][2];
  uint32_t unit, second = 1;  // of the next to load: tile * groups + group; whether the warp has a second one there
  const auto aim = [&](int round, int pass) {
    unit = (blockIdx.x + round * gridDim.x) * cut.groups + min(group_of(pass), cut.groups - 1);
    second = group_of(pass) + 1 < cut.groups ? 1 : 0;
  };
  const auto load = [&](int i) {
    const uint64_t from = unit + (WHOLE ? i : i * second);
    const uint8_t* codes = args.codes + from * UNIT_BYTES + lane * 16;
    words[i][0] = ld_global_nc_no_allocate_v4_u32(codes);
    words[i][1] = ld_global_nc_no_allocate_v4_u32(codes + 512);
    load_pair(scales[i], static_cast<const Scale*>(args.scales) + from * TILE_ROWS + g * 2);
  };
  const auto load_first = [&] {
    aim(0, 0);
#pragma unroll
    for (int i = 0; i < HELD; ++i) load(i);
  };
  if (args.chained) {
    load_first();
    griddepcontrol_wait();
  }
  const auto bring = [&](int pass, auto meanwhile) {
    return 0x1p126f / bring_x<WHOLE ? 8 : NT == 1 ? 4 : 2>(args, cut, x_warp, group_of(pass), lane, meanwhile);
  };
  float restore = bring(0, [&] {
    if (!args.chained) load_first();
  });

  // The last round is not for all blocks. Columns past the last are copies of it, and dropped at the end.
  const int rounds = cut.rounds - (blockIdx.x + (cut.rounds - 1) * gridDim.x < cut.tiles ? 0 : 1);
  const bf16* x_lane[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) x_lane[j] = x_warp + min(j * 8 + g, columns - 1) * X_PITCH + t * 16;
  float* const y_smem = reinterpret_cast<float*>(x_smem + cut.warps * cut.x_passes * columns * X_PITCH);
  float* const y_lane = y_smem + (warp * columns + 2 * t) * TILE_ROWS + g;

  for (int begin = 0; begin < rounds; begin += cut.y_rounds) {
    const int end = min(begin + cut.y_rounds, rounds);
    for (int first = 0; first < cut.passes; first += WHOLE ? cut.passes : cut.x_passes) {
      const int last = WHOLE ? cut.passes : first + cut.x_passes;
      if (!WHOLE && cut.x_passes < cut.passes && begin + first > 0) {
        __syncwarp();  // the last part of x has been read
        restore = bring(first, [] {});
      }
      for (int round = begin; round < end; ++round) {
        // After the wait: what the kernel in front wrote can be seen by all that follow, as they read weights at once.
        if (round + 1 == rounds) griddepcontrol_launch_dependents();
        float y_regs[NT][4] = {};
        for (int pass = first; pass < last; ++pass) {
          bool more = pass + 1 < last || round + 1 < (WHOLE ? rounds : end);
          if (WHOLE) {
            unit += pass + 1 < last ? cut.pass_units : cut.round_units;
          } else if (more) {
            pass + 1 < last ? aim(round, pass + 1) : aim(round + 1, first);
          } else if (last < cut.passes) {
            aim(begin, last), more = true;
          } else if (end < rounds) {
            aim(end, 0), more = true;
          }
          const int x_pass = (pass - first) * columns * X_PITCH;
#pragma unroll
          for (int i = 0; i < HELD; ++i) {
            float sums[2][NT][4] = {};
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                uint32_t a[2][4];
                decode(a[0], pair == 0 ? words[i][half].x : words[i][half].z);
                decode(a[1], pair == 0 ? words[i][half].y : words[i][half].w);
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                  const bf16* x = x_lane[j] + x_pass + i * GROUP + half * 64 + pair * 8;
                  const uint4 b = *reinterpret_cast<const uint4*>(x);
                  mma_m16n8k16<bf16>(sums[half][j], a[0], b.x, b.y);
                  mma_m16n8k16<bf16>(sums[half][j], a[1], b.z, b.w);
                }
              }
            const float scale[2] = {to_float(scales[i][0]), to_float(scales[i][1])};
            if (more) load(i);
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
              for (int c = 0; c < 4; ++c) y_regs[j][c] += (sums[0][j][c] + sums[1][j][c]) * restore * scale[c / 2];
          }
        }
        float* const y_tile = y_lane + (round - begin) * cut.warps * columns * TILE_ROWS;
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (j * 8 + 2 * t + c % 2 >= columns) continue;
            float& y = y_tile[(j * 8 + c % 2) * TILE_ROWS + c / 2 * 8];
            y = !WHOLE && first > 0 ? y + y_regs[j][c] : y_regs[j][c];
          }
      }
    }

    __syncthreads();
    for (int i = threadIdx.x; i < (end - begin) * args.m * TILE_ROWS; i += blockDim.x) {
      const int row = i % TILE_ROWS, round = i / TILE_ROWS / args.m, m = i / TILE_ROWS - round * args.m;
      const float* y = y_smem + (round * cut.warps * columns + m * terms) * TILE_ROWS + row;
      float sum = sum_over_warps(y, cut.warps, columns * TILE_ROWS);
      if (terms == 2) sum += sum_over_warps(y + TILE_ROWS, cut.warps, columns * TILE_ROWS);
      const int64_t n = (blockIdx.x + static_cast<int64_t>(begin + round) * gridDim.x) * TILE_ROWS + row;
      if (n < args.n) store_y(args, m, static_cast<int>(n), sum);
    }
    if (end < rounds) __syncthreads();  // the sums have been read
  }
}

Cut cut_for(const MatvecFp4Args& args, int columns, int warps) {
  const int x_bytes = columns * X_PITCH * static_cast<int>(sizeof(bf16));       // of a warp and a pass
  const int y_bytes = columns * TILE_ROWS * static_cast<int>(sizeof(float));  // of a warp and a round
  const int limit = args.smem_limit - 1024;
  Cut cut;
  cut.groups = args.k / GROUP;
  cut.tiles = ceil_div(args.n, TILE_ROWS);
  cut.passes = ceil_div(cut.groups, min(warps, limit / (x_bytes + y_bytes)) * HELD);
  cut.warps = ceil_div(cut.groups, cut.passes * HELD);
  cut.rounds = ceil_div(cut.tiles, args.sm_count);
  cut.blocks = ceil_div(cut.tiles, cut.rounds);
  cut.x_passes = cut.warps * (cut.passes * x_bytes + y_bytes) <= limit ? cut.passes : 1;
  cut.y_rounds = min(cut.rounds, (limit / cut.warps - cut.x_passes * x_bytes) / y_bytes);
  cut.smem_bytes = cut.warps * (cut.x_passes * x_bytes + cut.y_rounds * y_bytes);
  cut.pass_units = cut.warps * HELD;
  cut.round_units = cut.blocks * cut.groups - (cut.passes - 1) * cut.pass_units;
  return cut;
}

// ---- more than 8 columns of B: a warp owns a tile ---------------------------------------------------------------------

constexpr int ROW_WARPS = 16;
constexpr int FEWEST_ROW_WARPS = 12;  // with fewer, too few bytes are in flight
constexpr int Y_PITCH = TILE_ROWS + 1;
constexpr int row_held(int nt) { return nt == 4 ? 2 : 3; }  // groups of a tile in registers; columns of B take them too

// A cluster takes `warps` tiles a round, each of its blocks `block_groups` of their groups. Shared memory holds
// x[columns][x_pitch(block_groups)] and, where blocks share the columns, y[warps][NT * 8][Y_PITCH].
struct RowCut {
  int cluster, warps, rounds, tile_step;  // tile_step: from one round to the next
  int block_groups, groups, tiles;
  int slot_groups, slot_rows;  // what 16 threads bring of x is a slot; the block's slots are so many groups and rows
  int y_offset, blocks, smem_bytes;
};

// Brings groups of x in, from `first` on, by all threads of the block, with a barrier at the end; else as bring_x.
template <int BATCH, typename F>
DEVICE float bring_x_of_block(const MatvecFp4Args& args, const RowCut& cut, bf16* x_smem, int first, int groups, F meanwhile) {
  const int terms = terms_of(args.dtype), pitch = x_pitch(cut.block_groups * GROUP);
  const int slot = threadIdx.x / 16, column = threadIdx.x % 16 * 8;
  const uint16_t* const from = static_cast<const uint16_t*>(args.x) + first * GROUP + column;
#pragma unroll 1
  for (float factor = X_FACTOR;; factor = 1.0f) {
    int group = slot / args.m, row = slot - group * args.m;
    uint32_t ends = 0;
    bool begun = factor != X_FACTOR;
    do {
      uint4 loaded[BATCH];
      int to[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        to[i] = -1;
        if (group < groups) {
          loaded[i] = *reinterpret_cast<const uint4*>(from + row * args.x_stride + group * GROUP);
          to[i] = row * terms * pitch + group * GROUP + column;
        }
        group += cut.slot_groups;
        row += cut.slot_rows;
        if (row >= args.m) row -= args.m, ++group;
      }
      if (!begun) meanwhile();
      begun = true;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (to[i] < 0) continue;
        if (args.dtype == DTYPE_FP16) {
          uint4 split[2];
          split_terms(split, loaded[i], factor);
          *reinterpret_cast<uint4*>(x_smem + to[i]) = split[0];
          *reinterpret_cast<uint4*>(x_smem + to[i] + pitch) = split[1];
        } else {
          *reinterpret_cast<uint4*>(x_smem + to[i]) = factor == 1.0f ? loaded[i] : times_x_factor(loaded[i], ends);
        }
      }
    } while (group < groups);
    const bool too_large = __syncthreads_or(factor != 1.0f && (ends & 0x80008000u) != 0);
    if (!too_large) return factor;
  }
}

template <typename Scale, int NT>
__global__ void __launch_bounds__(ROW_WARPS* WARP, 1)
    matvec_tile_per_warp(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ RowCut cut) {
  constexpr int HELD_ROW = row_held(NT);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int terms = terms_of(args.dtype), columns = args.m * terms, pitch = x_pitch(cut.block_groups * GROUP);
  const int part = cut.cluster == 1 ? 0 : static_cast<int>(cluster_ctarank());
  const int first_tile = static_cast<int>(blockIdx.x) / cut.cluster * cut.warps + warp;
  const int first_group = min(part * cut.block_groups, cut.groups);
  const int groups = min(cut.block_groups, cut.groups - first_group);  // of this block, perhaps none
  bf16* const x_smem = &dynamic_smem<bf16>();
  float* const y_smem = reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(x_smem) + cut.y_offset);

  uint4 words[HELD_ROW][2];
  Scale scales[HELD_ROW][2];
  const uint8_t* codes;
  const Scale* tile_scales;
  const auto load_words = [&](int i, int group) {
    words[i][0] = ld_global_nc_no_allocate_v4_u32(codes + group * UNIT_BYTES);
    words[i][1] = ld_global_nc_no_allocate_v4_u32(codes + group * UNIT_BYTES + 512);
  };
  const auto load_first = [&](int round) {  // past the last tile, of the last one again
    const uint64_t unit = static_cast<uint64_t>(min(first_tile + round * cut.tile_step, cut.tiles - 1)) * cut.groups + first_group;
    codes = args.codes + unit * UNIT_BYTES + lane * 16;
    tile_scales = static_cast<const Scale*>(args.scales) + unit * TILE_ROWS + g * 2;
#pragma unroll
    for (int i = 0; i < HELD_ROW; ++i) {
      if (i >= groups) break;
      load_words(i, i);
      load_pair(scales[i], tile_scales + i * TILE_ROWS);
    }
  };
  if (args.chained) {
    load_first(0);
    griddepcontrol_wait();
  }
  const float restore = 0x1p126f / bring_x_of_block<NT == 4 ? 4 : 8>(args, cut, x_smem, first_group, groups, [&] {
    if (!args.chained) load_first(0);
  });

  // Columns past the last are copies of it, and dropped at the end.
  const bf16* x_lane[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) x_lane[j] = x_smem + min(j * 8 + g, columns - 1) * pitch + t * 16;

  for (int round = 0; round < cut.rounds; ++round) {
    // After the wait: what the kernel in front wrote can be seen by all that follow, as they read weights at once.
    if (round + 1 == cut.rounds) griddepcontrol_launch_dependents();
    float y_regs[NT][4] = {};
    for (int begin = 0; begin < groups; begin += HELD_ROW) {
#pragma unroll
      for (int i = 0; i < HELD_ROW; ++i) {
        const int group = begin + i, next = group + HELD_ROW;
        if (group >= groups) break;
        float sums[NT][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t word[4] = {words[i][half].x, words[i][half].y, words[i][half].z, words[i][half].w};
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            uint32_t a[2][4];
            decode(a[0], word[2 * pair]);
            decode(a[1], word[2 * pair + 1]);
            if (half == 1 && pair == 1 && next < groups) load_words(i, next);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              const uint4 b = *reinterpret_cast<const uint4*>(x_lane[j] + group * GROUP + half * 64 + pair * 8);
              mma_m16n8k16<bf16>(sums[j], a[0], b.x, b.y);
              mma_m16n8k16<bf16>(sums[j], a[1], b.z, b.w);
            }
          }
        }
        const float scale[2] = {to_float(scales[i][0]), to_float(scales[i][1])};
        if (next < groups) load_pair(scales[i], tile_scales + next * TILE_ROWS);
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) y_regs[j][c] += sums[j][c] * restore * scale[c / 2];
      }
    }
    if (round + 1 < cut.rounds) load_first(round + 1);

    if (cut.cluster == 1) {
      const int64_t row = (first_tile + static_cast<int64_t>(round) * cut.tile_step) * TILE_ROWS + g;
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = j * 8 + 2 * t + c % 2;
          const int64_t n = row + c / 2 * 8;
          if (column >= columns || n >= args.n || (terms == 2 && c % 2 == 1)) continue;
          const float other = terms == 2 ? y_regs[j][c | 1] : 0.0f;  // the second term of the same row of x
          store_y(args, column / terms, static_cast<int>(n), y_regs[j][c] + other);
        }
      continue;
    }
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        y_smem[(warp * NT * 8 + j * 8 + 2 * t + c % 2) * Y_PITCH + g + c / 2 * 8] = y_regs[j][c];
    barrier_cluster_arrive();
    barrier_cluster_wait();
    const int outputs = cut.warps * args.m * TILE_ROWS;
    for (int i = part * blockDim.x + threadIdx.x; i < outputs; i += cut.cluster * blockDim.x) {
      const int row = i % TILE_ROWS, tile = i / TILE_ROWS / args.m, m = i / TILE_ROWS - tile * args.m;
      float sum = 0.0f;
      for (int term = 0; term < terms; ++term) {
        const uint32_t here = smem_u32(y_smem + (tile * NT * 8 + m * terms + term) * Y_PITCH + row);
        for (int p = 0; p < cut.cluster; ++p) sum += __uint_as_float(ld_shared_cluster_u32(mapa_shared_cluster(here, p)));
      }
      const int64_t n = (first_tile - warp + tile + static_cast<int64_t>(round) * cut.tile_step) * TILE_ROWS + row;
      if (n < args.n) store_y(args, m, static_cast<int>(n), sum);
    }
    barrier_cluster_arrive();  // the sums have been read
    barrier_cluster_wait();
  }
}

// The cut that brings the fewest bytes to a multiprocessor. What a cluster's sums take counts as 50 KB, and may be half of
// the weights at most. No warps: x fits no block, or too few tiles are left for the warps of one.
RowCut row_cut_for(const MatvecFp4Args& args, int columns, int nt) {
  RowCut best = {};
  int64_t fewest = INT64_MAX;
  const int groups = args.k / GROUP, tiles = ceil_div(args.n, TILE_ROWS);
  for (int cluster = 1; cluster <= 8; cluster *= 2) {
    // Larger clusters do not come out even in the parts of a chip that they must lie in.
    const int clusters = (cluster <= 2 ? args.sm_count : args.sm_count * 94 / 100) / cluster;
    if (clusters == 0) break;
    RowCut cut = {};
    cut.cluster = cluster;
    cut.groups = groups;
    cut.tiles = tiles;
    cut.rounds = ceil_div(tiles, clusters * ROW_WARPS);
    cut.warps = ceil_div(tiles, clusters * cut.rounds);
    cut.blocks = ceil_div(tiles, cut.rounds * cut.warps) * cluster;
    cut.tile_step = cut.blocks / cluster * cut.warps;
    cut.block_groups = ceil_div(groups, cluster);
    cut.slot_groups = cut.warps * 2 / args.m;
    cut.slot_rows = cut.warps * 2 % args.m;
    cut.y_offset = static_cast<int>(x_smem_bytes(columns, cut.block_groups * GROUP));
    const int y_bytes = cluster == 1 ? 0 : cut.warps * nt * 8 * Y_PITCH * static_cast<int>(sizeof(float));
    cut.smem_bytes = cut.y_offset + y_bytes;
    if (static_cast<int64_t>(columns) * cut.block_groups * GROUP * 2 + y_bytes > args.smem_limit - 2048) continue;
    if (cut.warps < FEWEST_ROW_WARPS) continue;
    const int64_t weights = static_cast<int64_t>(cut.rounds) * cut.warps * cut.block_groups * UNIT_BYTES;
    const int64_t sums = cluster > 1 ? cut.rounds * 50000 : 0, bytes = weights + cut.y_offset + sums;
    if (bytes < fewest && sums <= weights / 2) fewest = bytes, best = cut;
  }
  return best;
}

template <typename Scale, int NT>
const char* launch_tile_per_warp(const MatvecFp4Args& args, const RowCut& cut, cudaStream_t stream) {
  const auto kernel = matvec_tile_per_warp<Scale, NT>;
  const int threads = cut.warps * WARP;
  if (cut.cluster == 1)
    return launch_overlapping(args.chained, kernel, cut.blocks, threads, cut.smem_bytes, stream, args, cut);
  return launch_cluster(kernel, cut.blocks, cut.cluster, threads, cut.smem_bytes, stream, args, cut);
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      if constexpr (NT > 1) {
        const RowCut rows = row_cut_for(*args, columns, NT);
        if (rows.warps > 0) return launch_tile_per_warp<Scale, NT>(*args, rows, stream);
      }
      const Cut cut = cut_for(*args, columns, max_warps(NT));
      const bool whole = cut.groups == cut.passes * cut.pass_units && cut.x_passes == cut.passes;
      const auto kernel = whole ? matvec_column_split<Scale, NT, true> : matvec_column_split<Scale, NT, false>;
      return launch_overlapping(args->chained, kernel, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, *args, cut);
    });
  });
}
