// Change: 3 to 8 rows of BF16: the words of a warp's second tile are asked for when x has come, and not together with the
//   first tile's; the first 16 rounds are one straight line; words wait in registers from 2 rounds on, not from 12. With
//   16 columns of B up to 8 rounds are one straight line. From 8 to 16 rounds of 8 columns, the second tile's words come
//   as far as the L2 from the start and the third's when x has come, a line a lane, and a tile is added up three tiles
//   later, not two.
// Prediction: All 60 KB of words that a multiprocessor asks for at the start stand before x, which all products wait for.
//   Half of them stand for less time, and the other half is asked for early enough as long as the first is being
//   multiplied. What a loop has asked for is waited for at its head, all of it: in a line a warp waits for one tile only.
//   0.3 us each.
// Measured: H200, 2026-11-30, prototypes in one run with 19's (in brackets): 8 rows, gate_up 17.2 us (17.9), fc_down 11.6
//   (11.9), local_qkv 7.4 (7.8), local_o 5.4 (5.6), global_qk 7.8 (8.3), global_o 8.0 (8.2), lm_head 127 (128); 16 rows,
//   gate_up 20.6 (20.6), fc_down 13.2 (13.6), local_qkv 8.7 (8.7), local_o 6.3 (6.4), global_qk 9.2 (9.4), global_o 9.3
//   (9.3). With 8 rows the second tile alone gives gate_up 17.3, both tiles behind x 17.8, a line of 8 rounds 17.5, and
//   registers without a line local_qkv 7.5, global_qk 8.0. With 16 rows and 16 rounds in a line gate_up takes 28. x
//   brought by pairs of blocks, half by each, which sends it to the other: 18.6 and 22.9. Without products gate_up takes
//   17.3 with 8 rows (before the line) and 19.9 with 16: neither decoding nor the tensor cores are what is left, but x,
//   61 and 123 KB from the L2 for each multiprocessor, and the ends. Other designs, all with bytes of E4M3 for the
//   weights (four instructions for eight), x as three E5M2 that sum to it, columns of B of their own, and four tiles a
//   warpgroup. Their errors are those of BF16's rounding. A set of 64 rows and 128 columns takes 145 clocks of a
//   multiprocessor with 16 rows of x and 103 with 8, with decoding and sums; the memory brings one in 208. Still, gate_up
//   with 8 and 16 rows took: x split by four warps of their own and passing by in a ring, 16 warps with a tile each,
//   words in registers 19.3 and 23.5 us, words by cp.async, six groups ahead, blocks beginning at different columns, 20.1
//   and 26.9, all beginning at the same, which wait for the same part of the L2, 30 to 32 with 16. x split once, four
//   tiles a round, their groups shared by eight and six warpgroups, words in registers, 19.5 and 25.3, by six and five
//   with three groups ahead 20.0 and 23.1; the second group asked for behind x 18.9 and 26.1; with x as two E4M3, which
//   hold all but what is below 2^-10 of a group's largest, 18.6 and 21.9. Without x and products these take 16.4 and
//   17.7, so they wait for words; they were not put into a straight line. In clusters of 8 fc_down took 13.3 and 14.6, in
//   clusters of 2 local_qkv 9.6 and 10.1. The second tile in the L2, by the project's clock, the form before in the same
//   run in brackets: gate_up with 8 rows 16.70 us (17.17), with 4 16.83 (17.14), on another machine, a percent slower,
//   16.83 to 16.95 and 16.97; by a shorter clock 17.0 and 16.85 (17.6 and 17.25), fc_down with 8 rows 11.2 (11.65). Of
//   that, three tiles later makes 0.2. Two tiles in the L2 17.8 with 8 rows, one before x is asked for 17.5, one in each
//   round 19.8; with two rounds local_o takes 5.6 (5.2), with 125 lm_head 128 (126.5). x before the words, which the
//   assembler puts first, makes no difference; nor do the second tile's scales in the L2, its words asked for before x is
//   multiplied (17.4 by the shorter clock, 17.25), zeros for columns past the last (17.45) or fewer instructions to see
//   what is too large (17.3); three tiles in registers 18.0, all blocks with 14 or 15 tiles, not 128 with 15, 17.6
//   (17.5). Other designs of it by the project's clock, with 4 and 8 rows (16.9 both): only the code that BF16 without
//   bias and clusters needs, 5,100 instructions and not 9,100, 17.2 and 17.3; that with half of the parts added up by
//   each half of a warp, as with 4 rows the others are empty, 17.1; words by cp.async in the same line, two and three
//   tiles ahead, 18.4 and 19.1, with 8 rows 18.7 and 19.5. Where 16.9 us go, with 4 or 8 rows, by leaving parts out: 14.8
//   for the loads alone, 15.7 without decoding and products, 16.5 without products, 16.7 without x, 16.75 without sums.
//   Lines asked for by the lanes, not by a warp's bulk copy, 16.7, the third tile's too 16.55 and, with 8 rows, 16.7;
//   both before x 17.0, the third's when the first has been multiplied 16.7, a fourth's 16.8, one more in each round
//   19.4. Words asked for in front of a group's last products, which spills, 17.8, in front of half of them 21. Lines
//   without asking whether there is such a tile, in the same run, 16.85 and 17.0: where the assembler puts the loads. The
//   sums of a slot by named barriers, in place of a second mbarrier, take as long, but racecheck reports them from the
//   slot's second turn on. A block's tiles side by side 17.15, a sum four tiles later with six slots 17.3, x behind the
//   first words 17.0, 136 registers the same. Recorded: 16.5 to 16.7 with 4 rows, 16.75 with 8.
// Verdict: Kept: 3 to 8% with 8 rows, up to 3 with 16. 16.8 on gate_up with 4 rows is met; short of 19 with 16, and of
//   11.5 on fc_down.
// Rows: 3
// Predecessor: 19_words_in_shared_memory
// Architectures: sm_90a sm_100a sm_120
// Spills: a register or two, for more than 8 columns of B on sm_100a and sm_120, and with FP32 scales.
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

// ---- few rows of BF16: two blocks a multiprocessor --------------------------------------------------------------------

constexpr int FEW_WARPS = 16, MOST_FEW = 2;  // with more, x in registers is faster even for 8 rows
constexpr int MOST_PASSES = 4;

// A warp's part of one row of x, [passes][X_PITCH], of which every lane has 16 bytes a pass.
template <int PASSES>
struct OneRow {
  uint4 loaded[PASSES];

  DEVICE void ask(const MatvecFp4Args& args, const Cut& cut) {
    const uint4* const from = static_cast<const uint4*>(args.x) + threadIdx.x;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
      if (PASSES == 1 || pass < cut.passes) loaded[pass] = ld_global_v4_u32(from + pass * cut.pass_units * (GROUP / 8));
  }

  // Multiplies what came and puts it down for the warp; gives the factor.
  DEVICE float bring(const Cut& cut, uint32_t to) const {
    uint32_t ends = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
      if (PASSES == 1 || pass < cut.passes)
        st_shared_v4_u32(to + pass * X_PITCH * sizeof(bf16), times_x_factor(loaded[pass], ends));
    const bool too_large = __any_sync(ALL_LANES, (ends & 0x80008000u) != 0);
    if (too_large)
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
        if (PASSES == 1 || pass < cut.passes) st_shared_v4_u32(to + pass * X_PITCH * sizeof(bf16), loaded[pass]);
    __syncwarp();
    return too_large ? 1.0f : X_FACTOR;
  }
};

// The same for up to MOST_FEW rows, [passes][rows][X_PITCH]. Calls meanwhile() while the first rows are on their way.
template <typename F>
DEVICE float bring_few_x(const MatvecFp4Args& args, const Cut& cut, uint32_t to, F meanwhile) {
  const uint4* const from = static_cast<const uint4*>(args.x) + threadIdx.x;
#pragma unroll 1
  for (float factor = X_FACTOR;; factor = 1.0f) {
    uint32_t ends = 0, at = to;
#pragma unroll 1
    for (int pass = 0; pass < cut.passes; ++pass) {
      const uint4* const row = from + pass * cut.pass_units * (GROUP / 8);
      uint4 loaded[MOST_FEW];
#pragma unroll
      for (int m = 0; m < MOST_FEW; ++m)
        if (m < args.m) loaded[m] = ld_global_v4_u32(row + m * (args.x_stride / 8));
      if (pass == 0 && factor == X_FACTOR) meanwhile();
#pragma unroll
      for (int m = 0; m < MOST_FEW; ++m) {
        if (m >= args.m) break;
        st_shared_v4_u32(at, factor == 1.0f ? loaded[m] : times_x_factor(loaded[m], ends));
        at += X_PITCH * sizeof(bf16);
      }
    }
    const bool too_large = factor != 1.0f && __any_sync(ALL_LANES, (ends & 0x80008000u) != 0);
    __syncwarp();
    if (!too_large) return factor;
  }
}

// Only for cuts in which every warp has HELD groups in every pass, all of x fits, and so do the sums of all rounds. ONE: a
// single row of x.
template <typename Scale, int PASSES, bool ONE>
__global__ void __launch_bounds__(FEW_WARPS* WARP, 2)
    matvec_few_rows(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ Cut cut) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int passes = PASSES == 1 ? 1 : cut.passes, columns = ONE ? 1 : args.m;
  bf16* const x_smem = &dynamic_smem<bf16>();
  uint32_t x_warp = smem_u32(x_smem + warp * passes * columns * X_PITCH);

  uint4 words[HELD][2];
  Scale scales[HELD][2];
  const uint8_t* codes;
  const Scale* group_scales;
  const auto load = [&](int i) {
    words[i][0] = ld_global_nc_no_allocate_v4_u32(codes + i * UNIT_BYTES);
    words[i][1] = ld_global_nc_no_allocate_v4_u32(codes + i * UNIT_BYTES + 512);
    load_pair(scales[i], group_scales + i * TILE_ROWS);
  };
  const auto step_on = [&](uint32_t units) {
    codes += units * UNIT_BYTES;
    group_scales += units * TILE_ROWS;
  };
  // Where the block's first tile lies is the same for all; the rest is a thread's number and little more.
  const auto load_first = [&] {
    const uint64_t tile = static_cast<uint64_t>(blockIdx.x);
    codes = args.codes + tile * (cut.groups * UNIT_BYTES) + (warp * (HELD * UNIT_BYTES - WARP * 16) + threadIdx.x * 16);
    group_scales = static_cast<const Scale*>(args.scales) + tile * (cut.groups * TILE_ROWS) + (warp * HELD * TILE_ROWS + g * 2);
#pragma unroll
    for (int i = 0; i < HELD; ++i) load(i);
  };
  float restore = 0x1p126f;
  if constexpr (ONE) {
    OneRow<PASSES> row;
    if (args.chained) {
      load_first();
      griddepcontrol_wait();
      row.ask(args, cut);
    } else {
      row.ask(args, cut);
      load_first();
    }
    restore /= row.bring(cut, x_warp + lane * 16);
  } else {
    if (args.chained) {
      load_first();
      griddepcontrol_wait();
    }
    restore /= bring_few_x(args, cut, x_warp + lane * 16, [&] {
      if (!args.chained) load_first();
    });
  }

  // The last round is not for all blocks. Columns past the last are copies of it, and dropped at the end.
  const int rounds = cut.rounds - (blockIdx.x + (cut.rounds - 1) * gridDim.x < cut.tiles ? 0 : 1);
  const uint32_t y_smem = smem_u32(x_smem + cut.warps * passes * columns * X_PITCH);
  uint32_t y_lane = y_smem + (warp * columns * TILE_ROWS + 2 * t * TILE_ROWS + g) * sizeof(float);
  x_warp += (ONE ? 0 : min(g, columns - 1) * X_PITCH * static_cast<int>(sizeof(bf16))) + t * 32;
  keep_here(x_warp);
  keep_here(y_lane);
  const uint32_t y_step = cut.warps * columns * TILE_ROWS * sizeof(float);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    // After the wait: what the kernel in front wrote can be seen by all that follow, as they read weights at once.
    if (round + 1 == rounds) griddepcontrol_launch_dependents();
    float y_regs[4] = {};  // columns 2t and 2t + 1 of row g, then of row g + 8
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const bool last = PASSES == 1 || pass + 1 == passes, more = !last || round + 1 < rounds;
      step_on(last ? cut.round_units : cut.pass_units);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        float sums[ONE ? 2 : 1][4] = {};  // two chains where registers are left
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t a[2][4];
            decode(a[0], pair == 0 ? words[i][half].x : words[i][half].z);
            decode(a[1], pair == 0 ? words[i][half].y : words[i][half].w);
            const uint4 b = ld_shared_v4_u32(x_warp + (pass * columns * X_PITCH + i * GROUP + half * 64 + pair * 8) * sizeof(bf16));
            mma_m16n8k16<bf16>(sums[0], a[0], b.x, b.y);
            mma_m16n8k16<bf16>(sums[ONE ? 1 : 0], a[1], b.z, b.w);
          }
        const float scale[2] = {to_float(scales[i][0]), to_float(scales[i][1])};
        if (more) load(i);
#pragma unroll
        for (int c = 0; c < 4; c += ONE ? 2 : 1)
          y_regs[c] += (ONE ? sums[0][c] + sums[ONE ? 1 : 0][c] : sums[0][c]) * restore * scale[c / 2];
      }
    }
#pragma unroll
    for (int c = 0; c < 4; c += ONE ? 2 : 1)
      if (2 * t + c % 2 < columns) st_shared_f32(y_lane + (c % 2 * TILE_ROWS + c / 2 * 8) * sizeof(float), y_regs[c]);
    y_lane += y_step;
  }

  // A warp adds up a tile's sums of a row of x, two lanes one of them, half of the warps' parts each.
  const int row = lane % TILE_ROWS, half = lane / TILE_ROWS;
  __syncthreads();
  for (int unit = warp; unit < rounds * columns; unit += cut.warps) {
    const int round = ONE ? unit : unit / columns, column = unit - round * columns;
    const uint32_t from = y_smem + (((round * cut.warps + half) * columns + column) * TILE_ROWS + row) * sizeof(float);
    float y[FEW_WARPS / 2];
#pragma unroll
    for (int i = 0; i < FEW_WARPS / 2; ++i) {
      const uint32_t at = from + 2 * i * columns * TILE_ROWS * sizeof(float);
      y[i] = half + 2 * i < cut.warps ? __uint_as_float(ld_shared_u32(at)) : 0.0f;
    }
#pragma unroll
    for (int i = FEW_WARPS / 4; i > 0; i /= 2)
#pragma unroll
      for (int j = 0; j < i; ++j) y[j] += y[j + i];
    const float sum = y[0] + __shfl_xor_sync(ALL_LANES, y[0], TILE_ROWS);
    const int64_t n = (blockIdx.x + static_cast<int64_t>(round) * gridDim.x) * TILE_ROWS + row;
    if (half == 0 && n < args.n) store_y<bf16>(args, column, static_cast<int>(n), sum);
  }
}

// No warps: the columns do not come out even, or something does not fit.
Cut few_cut_for(const MatvecFp4Args& args) {
  Cut cut = {};
  cut.groups = args.k / GROUP;
  cut.tiles = ceil_div(args.n, TILE_ROWS);
  cut.passes = ceil_div(cut.groups, FEW_WARPS * HELD);
  cut.x_passes = cut.passes;
  cut.pass_units = cut.groups / cut.passes;
  cut.rounds = ceil_div(cut.tiles, args.sm_count * 2);
  cut.y_rounds = cut.rounds;
  cut.blocks = min(cut.tiles, args.sm_count * 2);
  cut.round_units = cut.blocks * cut.groups - (cut.passes - 1) * cut.pass_units;
  const int warps = cut.pass_units / HELD;
  cut.smem_bytes = warps * args.m * (cut.passes * X_PITCH * static_cast<int>(sizeof(bf16)) +
                                     cut.rounds * TILE_ROWS * static_cast<int>(sizeof(float)));
  const bool even = cut.pass_units * cut.passes == cut.groups && cut.pass_units % HELD == 0;
  if (even && cut.passes <= MOST_PASSES && cut.smem_bytes <= args.smem_limit / 2 - 1024) cut.warps = warps;
  return cut;
}

template <typename Scale, bool ONE>
const char* launch_few_rows(const MatvecFp4Args& args, const Cut& cut, cudaStream_t stream) {
  const auto kernel = cut.passes == 1 ? matvec_few_rows<Scale, 1, ONE> : matvec_few_rows<Scale, MOST_PASSES, ONE>;
  return launch_overlapping(args.chained, kernel, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, args, cut);
}

// ---- more than 8 columns of B: a warp owns a tile ---------------------------------------------------------------------

constexpr int ROW_WARPS = 16;
constexpr int FEWEST_ROW_WARPS = 12;  // with fewer, too few bytes are in flight
constexpr int Y_PITCH = TILE_ROWS + 1;
constexpr __host__ __device__ int row_held(int nt) { return nt == 4 ? 2 : 3; }  // groups of a tile in registers; columns of B take them too

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

// ---- more rows: x stays in registers ------------------------------------------------------------------------------------

constexpr int REG_WARPS = 16, FEWEST_REG_WARPS = 8;
constexpr int SUM_BATCH = 4;  // parts of a sum that a warp reads at a time
constexpr __host__ __device__ int sum_slots(int nt) { return nt == 1 ? 4 : 6; }  // tiles whose sums wait in shared memory
// Where a warp's next words wait: of two tiles in registers, or of STAGES tiles in shared memory.
constexpr int ROUNDS_FOR_REGISTERS = 2;  // from so many rounds on, for 8 columns of B: for 16 x leaves no room
// Rounds in one straight line: for 8 columns of B the first ones, for 16 all or none, as the caches of instructions hold no
// more.
constexpr __host__ __device__ int line_rounds(int nt) { return nt == 1 ? 16 : 8; }
constexpr int FEWEST_AHEAD = 8;  // rounds from which the next tiles' words come into the L2, if all are in the line
constexpr int STAGES = 2;
constexpr __host__ __device__ int stage_bytes(int scale_bytes) { return HELD * (UNIT_BYTES + TILE_ROWS * scale_bytes); }

// A round is a tile of each cluster. Each warp has HELD groups of all tiles, and each block of a cluster block_groups.
// Shared memory holds two mbarriers a slot, y[sum_slots][NT][parts][WARP] of float4, of which those past the last warp
// are zeros, words[warps][stages][stage_bytes] and, where blocks share the columns, what they send: y[own tiles][cluster][NT][WARP].
struct RegCut {
  int cluster, cluster_bits, clusters, rounds, warps;
  int parts;  // warps, rounded up to SUM_BATCH
  int groups, block_groups, tiles;
  int own_tiles;  // that a block of a cluster adds up
  int words_offset, own_offset, blocks, smem_bytes;
};
constexpr int SLOTS_OFFSET = 128;  // after the mbarriers

// Columns 2t and 2t + 1 of the j-th eight, of row g, then of row g + 8 of a tile. By all lanes of a warp.
DEVICE void store_four(const MatvecFp4Args& args, int tile, int j, int lane, const float (&y)[4]) {
  const int g = lane / 4, n = tile * TILE_ROWS + g, column = j * 8 + 2 * (lane % 4), terms = terms_of(args.dtype);
  if (args.dtype == DTYPE_BF16 && args.bias == nullptr && (args.n | args.y_stride) % 2 == 0 &&
      reinterpret_cast<uint64_t>(args.y) % 4 == 0) {  // lanes of two rows trade, so that each has both of one column
    const bool odd = g % 2 != 0;
    const int m = column + odd, row = n - odd;
    const float other[2] = {__shfl_xor_sync(ALL_LANES, odd ? y[0] : y[1], 4), __shfl_xor_sync(ALL_LANES, odd ? y[2] : y[3], 4)};
    bf16* const to = static_cast<bf16*>(args.y) + m * args.y_stride + row;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float first = odd ? other[c] : y[2 * c], second = odd ? y[2 * c + 1] : other[c];
      if (m < args.m && row + c * 8 < args.n)
        *reinterpret_cast<__nv_bfloat162*>(to + c * 8) = __floats2bfloat162_rn(first, second);
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int row = n + c / 2 * 8;
    if (row >= args.n || column + c % 2 >= args.m * terms || (terms == 2 && c % 2 == 1)) continue;
    const float other = terms == 2 ? y[c | 1] : 0.0f;  // the second term of the same row of x
    store_y(args, (column + c % 2) / terms, row, y[c] + other);
  }
}

// LINE: rounds in one straight line, a multiple of DEPTH; with 16 columns of B there are no more. AHEAD: the second and the
// third tile's words come as far as the L2, where they stand before no one.
template <typename Scale, int NT, bool SHARED, int LINE, bool AHEAD = false>
__global__ void __launch_bounds__(REG_WARPS* WARP, 1)
    matvec_x_in_registers(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ RegCut cut) {
  constexpr int SLOTS = sum_slots(NT);
  constexpr int LAG = AHEAD ? 3 : 2;  // a warp adds up a tile when it has done so many more
  static_assert(LAG < SLOTS && 2 * SLOTS * 8 <= SLOTS_OFFSET);
  constexpr int DEPTH = SHARED ? 1 : 2, STAGE_BYTES = stage_bytes(sizeof(Scale));
  constexpr int CHAINS = SHARED && NT == 1 ? 2 : 1;  // of products a group, where registers are left
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4, terms = terms_of(args.dtype);
  const int rank = cut.cluster == 1 ? 0 : static_cast<int>(cluster_ctarank());
  const int cluster = static_cast<int>(blockIdx.x) >> cut.cluster_bits, group = rank * cut.block_groups + warp * HELD;
  // The last round is not for all.
  const int rounds = cut.rounds - (cluster + (cut.rounds - 1) * cut.clusters < cut.tiles ? 0 : 1);
  unsigned char* const smem = reinterpret_cast<unsigned char*>(&dynamic_smem<uint4>());
  // All lanes arrive at the mbarriers: racecheck does not follow one lane's arrival for what its warp has stored, nor a named
  // barrier's second turn.
  const uint32_t empty = smem_u32(smem), full = empty + SLOTS * 8, slots = empty + SLOTS_OFFSET, owned = empty + cut.own_offset;
  if (cut.cluster > 1) barrier_cluster_arrive_relaxed();  // its blocks are there: they may be sent to

  uint4 words[DEPTH][HELD][2];
  Scale scales[DEPTH][HELD][2];
  const uint64_t unit = static_cast<uint64_t>(cluster) * cut.groups + group;
  const uint8_t* codes = args.codes + unit * UNIT_BYTES + lane * 16;
  const Scale* group_scales = static_cast<const Scale*>(args.scales) + unit * TILE_ROWS + g * 2;
  const uint32_t round_units = cut.clusters * cut.groups;
  const auto load = [&](int ahead, int i) {
    words[ahead][i][0] = ld_global_nc_no_allocate_v4_u32(codes + i * UNIT_BYTES);
    words[ahead][i][1] = ld_global_nc_no_allocate_v4_u32(codes + i * UNIT_BYTES + 512);
    load_pair(scales[ahead][i], group_scales + i * TILE_ROWS);
  };
  const auto step_on = [&] {
    codes += static_cast<uint64_t>(round_units) * UNIT_BYTES;
    group_scales += round_units * TILE_ROWS;
  };
  // Each lane brings the codes that it will read; the scales are for all lanes.
  const uint32_t ring = empty + cut.words_offset + warp * (STAGES * STAGE_BYTES);
  const uint8_t* scale_bytes = static_cast<const uint8_t*>(args.scales) + (unit * TILE_ROWS * sizeof(Scale) + lane * 16);
  int asked = 0;
  const auto ask = [&] {
    if (asked < rounds) {
      const uint32_t to = ring + asked % STAGES * STAGE_BYTES + lane * 16;
#pragma unroll
      for (int i = 0; i < HELD * 2; ++i) cp_async_cg(to + i * 512, codes + i * 512);
      if (lane < HELD * TILE_ROWS * static_cast<int>(sizeof(Scale)) / 16) cp_async_cg(to + HELD * UNIT_BYTES, scale_bytes);
    }
    cp_async_commit_group();
    ++asked;
    codes += static_cast<uint64_t>(round_units) * UNIT_BYTES;
    scale_bytes += round_units * (TILE_ROWS * static_cast<uint32_t>(sizeof(Scale)));
  };
  const auto take = [&](int round) {
    cp_async_wait_group<STAGES - 2>();
    __syncwarp();  // all lanes' copies have landed, and the stage before has been read
    ask();
    const uint32_t from = ring + round % STAGES * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      words[0][i][0] = ld_shared_v4_u32(from + i * UNIT_BYTES + lane * 16);
      words[0][i][1] = ld_shared_v4_u32(from + i * UNIT_BYTES + lane * 16 + 512);
      uint32_t* const pair = reinterpret_cast<uint32_t*>(scales[0][i]);
#pragma unroll
      for (int c = 0; c < static_cast<int>(sizeof(scales[0][i])) / 4; ++c)
        pair[c] = ld_shared_u32(from + HELD * UNIT_BYTES + (i * TILE_ROWS + g * 2) * sizeof(Scale) + c * 4);
    }
  };
  const auto load_tile = [&](int ahead) {
    if (ahead < rounds)
#pragma unroll
      for (int i = 0; i < HELD; ++i) load(ahead, i);
    step_on();
  };
  const auto load_first = [&] {
    if constexpr (SHARED) {
#pragma unroll
      for (int stage = 0; stage < STAGES - 1; ++stage) ask();
    } else {
      load_tile(0);
      if (args.chained) load_tile(1);
    }
  };
  // The next tile's words, a line a lane: a bulk copy takes 0.2 us more. Callers ask first whether there is such a tile, though in
  // these launches there always is: without that the assembler puts loads elsewhere, 0.3 us.
  const auto bring_to_L2 = [&] {
    if (lane < HELD * UNIT_BYTES / 128) prefetch_global_L2(codes + lane * (128 - 16));
  };
  // As the B operand has them: column g of each eight, of which a lane owns 16 of 64 rows. Columns past the last are copies
  // of it, and dropped at the end.
  uint4 x[HELD][NT][4];
  const auto ask_x = [&] {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int row = min((j * 8 + g) / terms, args.m - 1);
        const uint16_t* const from = static_cast<const uint16_t*>(args.x) + row * args.x_stride + (group + i) * GROUP + t * 16;
#pragma unroll
        for (int q = 0; q < 4; ++q) x[i][j][q] = ld_global_v4_u32(from + q / 2 * 64 + q % 2 * 8);
      }
  };
  if (args.chained) {
    load_first();
    griddepcontrol_wait();
    ask_x();
  } else {
    ask_x();
    if (!SHARED) load_first();
    if (AHEAD && rounds > 1) bring_to_L2();
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(empty + slot * 8, NT * WARP);
      mbarrier_init(full + slot * 8, cut.warps * WARP);
    }
    fence_mbarrier_init();
  }
  const int pads = cut.parts - cut.warps;
  for (int i = warp; i < SLOTS * NT * pads; i += cut.warps)
    st_shared_v4_u32(slots + ((i / pads * cut.parts + cut.warps + i % pads) * WARP + lane) * 16, make_uint4(0, 0, 0, 0));
  __syncthreads();
  // Behind the barrier, or the assembler asks for words before x, which then comes last: 1 us.
  if (SHARED && !args.chained) load_first();
  bool too_large = false;
  if (args.dtype == DTYPE_FP16) {  // ends at 65504: never too large
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          uint4 split[2];
          split_terms(split, x[i][j][q], X_FACTOR);
          x[i][j][q] = g % 2 == 0 ? split[0] : split[1];
        }
  } else {
    uint32_t ends = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) x[i][j][q] = times_x_factor(x[i][j][q], ends);
    too_large = __any_sync(ALL_LANES, (ends & 0x80008000u) != 0);
    if (too_large) ask_x();
  }
  if constexpr (!SHARED)
    if (!args.chained) {
      load_tile(1);  // behind x, or that stands behind these words too
      if (AHEAD && rounds > 2) bring_to_L2();
    }
  const float restore = too_large ? 0x1p126f : 0x1p126f / X_FACTOR;
  if (cut.cluster > 1) barrier_cluster_wait();

  const uint32_t column_bytes = cut.parts * WARP * 16, slot_bytes = NT * column_bytes;
  // One warp adds up eight columns of a tile; where blocks share the columns, it sends the sums to the block that adds up those.
  const auto add_up = [&](int sum) {
    const int round = sum / NT, j = sum % NT, slot = round % SLOTS;
    mbarrier_wait(full + slot * 8, round / SLOTS & 1);
    float y[4] = {};
    uint32_t from = slots + slot * slot_bytes + j * column_bytes + lane * 16;
#pragma unroll 1
    for (int part = 0; part < cut.parts; part += SUM_BATCH, from += SUM_BATCH * WARP * 16) {
      uint4 more[SUM_BATCH];
#pragma unroll
      for (int i = 0; i < SUM_BATCH; ++i) more[i] = ld_shared_v4_u32(from + i * WARP * 16);
#pragma unroll
      for (int i = 0; i < SUM_BATCH; ++i) {
        y[0] += __uint_as_float(more[i].x), y[1] += __uint_as_float(more[i].y);
        y[2] += __uint_as_float(more[i].z), y[3] += __uint_as_float(more[i].w);
      }
    }
    mbarrier_arrive(empty + slot * 8);
    if (cut.cluster == 1) {
      store_four(args, cluster + round * cut.clusters, j, lane, y);
    } else {
      const uint32_t to = owned + ((((round >> cut.cluster_bits) << cut.cluster_bits) + rank) * NT + j) * WARP * 16 + lane * 16;
      st_shared_cluster_v4_f32(mapa_shared_cluster(to, round & (cut.cluster - 1)), make_float4(y[0], y[1], y[2], y[3]));
    }
  };

  int next_sum = warp;
  const uint32_t to = slots + (warp * WARP + lane) * 16;
  const auto multiply = [&](int round, int ahead) {
    // After the wait: what the kernel in front wrote can be seen by all that follow, as they read weights at once.
    if (round + 1 == rounds) griddepcontrol_launch_dependents();
    if constexpr (SHARED) take(round);
    const bool more = !SHARED && round + DEPTH < rounds;
    float y[NT][4] = {};
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      float sums[CHAINS][NT][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          uint32_t a[2][4];
          decode(a[0], pair == 0 ? words[ahead][i][half].x : words[ahead][i][half].z);
          decode(a[1], pair == 0 ? words[ahead][i][half].y : words[ahead][i][half].w);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            const uint4& b = x[i][j][half * 2 + pair];
            mma_m16n8k16<bf16>(sums[CHAINS == 2 ? half : 0][j], a[0], b.x, b.y);
            mma_m16n8k16<bf16>(sums[CHAINS == 2 ? half : 0][j], a[1], b.z, b.w);
          }
        }
      const float scale[2] = {to_float(scales[ahead][i][0]) * restore, to_float(scales[ahead][i][1]) * restore};
      if (more) load(ahead, i);
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          y[j][c] += (CHAINS == 2 ? sums[0][j][c] + sums[CHAINS - 1][j][c] : sums[0][j][c]) * scale[c / 2];
    }
    if (!SHARED) step_on();
    const int slot = round % SLOTS;
    mbarrier_wait(empty + slot * 8, (round / SLOTS & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < NT; ++j)
      st_shared_v4_u32(to + slot * slot_bytes + j * column_bytes, make_uint4(__float_as_uint(y[j][0]), __float_as_uint(y[j][1]),
                                                                            __float_as_uint(y[j][2]), __float_as_uint(y[j][3])));
    mbarrier_arrive(full + slot * 8);
    if (round - LAG == next_sum / NT) {
      add_up(next_sum);
      next_sum += cut.warps;
    }
  };
#pragma unroll
  for (int round = 0; round < LINE; ++round) {
    if (round >= rounds) break;
    multiply(round, round % DEPTH);
  }
  if constexpr (LINE == 0 || NT == 1) {
#pragma unroll 1
    for (int first = LINE; first < rounds; first += DEPTH) {
#pragma unroll
      for (int ahead = 0; ahead < DEPTH; ++ahead) {
        if (first + ahead >= rounds) break;
        multiply(first + ahead, ahead);
      }
    }
  }
  for (; next_sum < rounds * NT; next_sum += cut.warps) add_up(next_sum);
  if (cut.cluster == 1) return;

  barrier_cluster_arrive();
  barrier_cluster_wait();
  for (int i = threadIdx.x; i < cut.own_tiles * NT * WARP; i += blockDim.x) {
    const int own = i / (NT * WARP), round = (own << cut.cluster_bits) + rank;
    if (round >= rounds) continue;
    float y[4] = {};
    for (int p = 0; p < cut.cluster; ++p) {
      const uint4 more = ld_shared_v4_u32(owned + (((own << cut.cluster_bits) + p) * NT * WARP + i % (NT * WARP)) * 16);
      y[0] += __uint_as_float(more.x), y[1] += __uint_as_float(more.y);
      y[2] += __uint_as_float(more.z), y[3] += __uint_as_float(more.w);
    }
    store_four(args, cluster + round * cut.clusters, i / WARP % NT, lane, y);
  }
}

// No warps: the columns do not come out even over the warps of a cluster, or the sums do not fit.
RegCut reg_cut_for(const MatvecFp4Args& args, int nt, int scale_bytes) {
  for (int bits = 0; bits <= 3; ++bits) {
    RegCut cut = {};
    cut.cluster_bits = bits;
    cut.cluster = 1 << bits;
    // Larger clusters do not come out even in the parts of a chip that they must lie in.
    const int clusters = (bits <= 1 ? args.sm_count : args.sm_count * 94 / 100) >> bits;
    cut.groups = args.k / GROUP;
    cut.block_groups = cut.groups >> bits;
    cut.warps = cut.block_groups / HELD;
    if (clusters == 0 || cut.block_groups << bits != cut.groups || cut.warps * HELD != cut.block_groups) break;
    if (cut.warps > REG_WARPS) continue;
    if (cut.warps < FEWEST_REG_WARPS) break;
    cut.parts = ceil_div(cut.warps, SUM_BATCH) * SUM_BATCH;
    cut.tiles = ceil_div(args.n, TILE_ROWS);
    cut.rounds = ceil_div(cut.tiles, clusters);
    cut.clusters = ceil_div(cut.tiles, cut.rounds);
    cut.blocks = cut.clusters << bits;
    cut.own_tiles = ceil_div(cut.rounds, cut.cluster);
    cut.words_offset = SLOTS_OFFSET + sum_slots(nt) * cut.parts * nt * WARP * 16;
    cut.own_offset = cut.words_offset + cut.warps * STAGES * stage_bytes(scale_bytes);
    const int64_t bytes = cut.own_offset + (bits > 0 ? static_cast<int64_t>(cut.own_tiles) * cut.cluster * nt * WARP * 16 : 0);
    if (bytes > args.smem_limit - 1024) break;
    cut.smem_bytes = static_cast<int>(bytes);
    return cut;
  }
  return {};
}

template <typename Scale, int NT>
const char* launch_x_in_registers(const MatvecFp4Args& args, const RegCut& cut, cudaStream_t stream) {
  auto kernel = matvec_x_in_registers<Scale, NT, true, 0>;
  if constexpr (NT == 1) {
    if (cut.rounds >= ROUNDS_FOR_REGISTERS) kernel = matvec_x_in_registers<Scale, NT, false, line_rounds(NT)>;
    if (cut.rounds >= FEWEST_AHEAD && cut.rounds <= line_rounds(NT))
      kernel = matvec_x_in_registers<Scale, NT, false, line_rounds(NT), true>;
  } else {
    if (cut.rounds <= line_rounds(NT)) kernel = matvec_x_in_registers<Scale, NT, true, line_rounds(NT)>;
  }
  const int threads = cut.warps * WARP;
  if (cut.cluster == 1)
    return launch_overlapping(args.chained, kernel, cut.blocks, threads, cut.smem_bytes, stream, args, cut);
  return launch_cluster(kernel, cut.blocks, cut.cluster, threads, cut.smem_bytes, stream, args, cut);
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  const Cut few = args->dtype == DTYPE_BF16 && columns <= MOST_FEW ? few_cut_for(*args) : Cut{};
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      if constexpr (NT == 1) {
        if (few.warps > 0)
          return args->m == 1 ? launch_few_rows<Scale, true>(*args, few, stream) : launch_few_rows<Scale, false>(*args, few, stream);
      }
      if constexpr (NT <= 2) {
        const RegCut regs = reg_cut_for(*args, NT, sizeof(Scale));
        if (regs.warps > 0) return launch_x_in_registers<Scale, NT>(*args, regs, stream);
      }
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
