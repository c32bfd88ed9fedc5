// Change: few instructions before the first load and after the last. The host cuts the work, so that nothing is divided; a
//   warp asks for its own part of x before the weights and not behind them, and scales it as packed BF16.
// Prediction: 10 issues 160 instructions a warp before its first load and as many before the first product: with 15 warps
//   a multiprocessor that is 0.6 us, on short weights as on long ones; x behind 30 KB of weights waits another 0.5.
// Measured: H200, 2026-11-29, gate_up, M = 1: 18.2 us, as 10 in the same run (18.1). A prototype of it against 10 in another
//   run: gate_up 17.9 us (10: 18.3), fc_down 10.5 (13.0), local_qkv 7.1 (7.5), local_o 5.0 (5.5), global_qk 7.7, global_o 7.1,
//   lm_head 128.4 (127.3). Measured as well, and not better: two blocks a multiprocessor 17.9, 10.9, 7.4, 5.1; 30 warps with a
//   group each 18.5, 10.8, 7.1, 5.0; x by cp.async 18.1, 11.3, 7.3, 5.2; adjacent tiles for a block 18.4; words asked for before
//   the products, not after: the same; bulk prefetches into L2 two rounds ahead 20.2, 14.2, 8.6, 6.3; a ring in shared memory by
//   cp.async 18.6, 12.0, 8.2, 6.3.
// Verdict: Kept. Clocks of a block on local_o, in the form with cp.async: 6,860, of which 750 until all loads are issued,
//   2,200 until x is there, 1,200 for the first tile, 2,000 for the second, 700 for the sums. A launch of nothing takes
//   0.8 us, and reading alone 3.5: what is left is one latency after the other, not instructions.
// Instances: scale_dtype column_tiles
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
    matvec_short_ends(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ Cut cut) {
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
    // Only now: what the kernel in front wrote can be seen by all that follow, as they read weights without waiting.
    griddepcontrol_launch_dependents();
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

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      const Cut cut = cut_for(*args, columns, max_warps(NT));
      const bool whole = cut.groups == cut.passes * cut.pass_units && cut.x_passes == cut.passes;
      const auto kernel = whole ? matvec_short_ends<Scale, NT, true> : matvec_short_ends<Scale, NT, false>;
      return launch_overlapping(args->chained, kernel, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, *args, cut);
    });
  });
}
