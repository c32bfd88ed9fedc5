// Change: 1 and 2 rows of BF16: products on wgmma of E4M3 and E5M2. A word's codes become bytes of E4M3 in four instructions
//   (LAYOUT_BYTES), eight before; x becomes three E5M2 that sum to each element, columns of B of their own. The four warps
//   of a warpgroup have other groups of one tile, as its rows have other columns. Where a launch is one round, its passes
//   are one straight line, so that a group's words are waited for alone. Where x is long, a warp's first words are asked for
//   when its part of x has come, and the others when that of all warps has. A third tile that only few blocks have comes
//   into the L2 from the start. Who has no work reads one sector of another's words, as the answer is left out; x stands in
//   front of all words.
// Prediction: a warp spends 8 instructions of the ALU, at half rate, and a product on 8 weights: 100 clocks of a scheduler a
//   group. With 4, and a quarter of the products, half of it. 19 without decoding takes 9.5 us on fc_down (10.4), without
//   products 8.9. In a loop a warp waits for the words of both its groups, as all that is asked for before a branch has one
//   scoreboard; in a straight line the first is multiplied while the second is on its way. Together 0.5 to 1 us of each
//   launch. global_qk has 544 tiles for 264 places: the last 16 cost a whole wait for the memory, 0.2 us, which goes if the
//   L2 has them. One warp of 16 has no groups of 3840 columns, and its copies are 6% of what the L2 sends: 1%.
// Measured: H200, 2026-11-30, forms of this step, each in a run with 19 (in brackets): one row, local_o 4.1 us (4.8),
//   global_o 6.0 to 6.3 (6.9), local_qkv 6.05 (6.3), global_qk 6.6 (6.75), gate_up 15.8 (16.2), fc_down 10.1 (10.4), lm_head
//   114.5 to 115.7 (115.2); two rows, gate_up 16.4 (17.2), local_o 4.4 (5.4), local_qkv 6.6 (7.2), global_qk 7.2 (7.65),
//   global_o 6.7 (7.9), fc_down 12.1 (11.9). The straight line is most of it: global_o in a loop of two passes takes 7.3,
//   local_o 4.5, and with BF16 products in one 6.5 and 4.4, fc_down 9.9. Loads that the compiler moves to the end of a loop
//   cost 0.3 us of gate_up. Columns of B 128 bytes apart for each 16 of K, not 144: 13.6 on fc_down, 6.9 on global_o, as the
//   lanes that store x meet in the same banks. One block a multiprocessor, whose halves have x together: fc_down 9.9 to 10.2
//   (11.5 with two), but local_o 4.5, gate_up 16.1, global_qk 7.0. The second group asked for behind x: global_o 6.2 (5.85),
//   fc_down 9.8 (10.1). Two rounds in a straight line: local_qkv 6.1, global_qk 6.9. Four rows, as two times two columns'
//   products, gate_up 22.7 (18.0). Other designs, gate_up, fc_down and local_o: words by cp.async, each lane its own, 17.1,
//   10.5 and 4.8 (without products and x 17.2, 10.0 and 4.3: so it is slower to read); a ring of bulk copies of 4 KB, 64 KB
//   deep, 22.6, 13.3 and 5.9, 128 KB deep 23.2, 13.7 and 6.8 (x stands behind what has been asked for, and one thread cannot
//   ask fast enough), in two blocks 17.6, 14.3 and 5.4; the same with four threads that ask, tiles cut so that all blocks
//   have as many groups, and their sums through global memory 18.6, 12.3 and 6.0; that with BF16 products and cp.async 18.4,
//   10.8 and 5.7. Tiles of 15 rows, which come out even, in 16: nothing. The last three changes, by the project's clock, the
//   form before in the same run in brackets: fc_down 9.62 us (10.22), global_qk 6.22 (6.51), gate_up with two rows, where
//   they are left out, 16.32 (16.33); on another machine, a percent slower, 9.47 to 9.65, 6.30 to 6.46, 16.5, local_o 4.10,
//   local_qkv 5.92, global_o 6.00, gate_up 15.76, lm_head 115.5; by a shorter clock local_qkv 5.75 (5.95), gate_up 15.53
//   (15.66), local_o 4.13 (4.14), global_o 5.79 (5.74). Of them, by that clock: global_qk with the third tile 6.49, and one
//   sector for who has no work 6.41 (6.57); the third tile by cp.async into shared memory 6.58, by a bulk copy into the L2
//   6.80; the second tile of all blocks too 7.5, though gate_up takes 15.5 that way (15.9). fc_down 9.75 (10.2): words
//   before x, which only loads that are not .nc do, as the assembler moves those behind x 10.1; all words behind the barrier
//   10.3; the first pass's words into the L2 before x 10.9, the second's 11.5; the scales through shared memory 10.1 to
//   10.6; half of x after the first pass 10.0; without the split of x 9.9 to 10.1, without products 10.0, both in slower
//   orders. Which loads the assembler puts where makes 0.4 us of it: the largest exponent by two halves at a time 9.7 or
//   10.0.
// Verdict: Kept: 2 to 15% of one row, 5 to 18% of two, but for fc_down with two.
// Architectures: sm_90a
// Most rows: 2
// Spills: one to 14 registers with two rows, to three with one, in four passes or with FP32 scales; for more than 8 columns
//   of B.
// Instances: scale_dtype column_tiles few_rows chained
#include "../hopper.cuh"
#include "args.cuh"

// More instances of a library: those that a build names, else all.
#ifndef ONLY_FEW_ROWS
#define ONLY_FEW_ROWS -1
#endif
#ifndef ONLY_CHAINED
#define ONLY_CHAINED -1
#endif

constexpr auto LAYOUT_BYTES = static_cast<Layout>(3);  // words whose codes become bytes of E4M3
constexpr uint32_t UNIT_BYTES = TILE_ROWS * GROUP / 2;
constexpr int HELD = 2;  // groups of a tile that a warp holds in registers at a time
constexpr uint32_t E4M3_BITS = 0x9c9c9c9cu;

// Four codes each of rows g and g + 8, as values x 2^-6. The same as _unfold_bytes in mila_kernels/layouts.py, which solves for
// the word.
DEVICE void decode(uint32_t& first, uint32_t& second, uint32_t word) {
  first = word & E4M3_BITS;
  second = (word >> 2 ^ word << 2) & E4M3_BITS;
}

// ---- any number of rows: BF16 products -------------------------------------------------------------------------------

constexpr int max_warps(int nt) { return nt == 4 ? 12 : 16; }  // by the registers that columns of B take
constexpr int X_PITCH = HELD * GROUP + 8;  // of a column; 16 bytes more for other banks

// The A operand of m16n8k16 from a word, as values x 2^-126: lane 4g + t has the columns 4t to 4t + 3 of 16.
DEVICE void to_bf16(uint32_t (&a)[4], uint32_t word) {
  uint32_t rows[2];
  decode(rows[0], rows[1], word);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = prmt(rows[i % 2], 0, i < 2 ? 0x1404 : 0x3424);  // in the upper bytes of two halves
    a[i] = (pair & 0x80008000u) | (pair >> 4 & 0x01c001c0u);
  }
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
  for (int j = 0; j < NT; ++j) x_lane[j] = x_warp + min(j * 8 + g, columns - 1) * X_PITCH + t * 4;
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
                to_bf16(a[0], pair == 0 ? words[i][half].x : words[i][half].z);
                to_bf16(a[1], pair == 0 ? words[i][half].y : words[i][half].w);
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                  const bf16* x = x_lane[j] + x_pass + i * GROUP + half * 64 + pair * 32;
                  const uint2 b[2] = {*reinterpret_cast<const uint2*>(x), *reinterpret_cast<const uint2*>(x + 16)};
                  mma_m16n8k16<bf16>(sums[half][j], a[0], b[0].x, b[0].y);
                  mma_m16n8k16<bf16>(sums[half][j], a[1], b[1].x, b[1].y);
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

// ---- few rows of BF16 ------------------------------------------------------------------------------------------------

// Warps for a tile. A multiprocessor has two tiles at a time: two blocks, or the two halves of one, which have x together.
constexpr int FEW_WARPS = 16, AT_A_TIME = 2;
constexpr int SLICES = 4;  // groups that a warpgroup multiplies at a time, one a warp
static_assert(FEW_WARPS % SLICES == 0);
constexpr int TERMS = 3;   // E5M2 that an element of x is the sum of
constexpr uint32_t E5M2_BITS = 0xff00ff00u;  // of a pair of FP16: an E5M2 is the upper byte of one
// Columns of B lie in rows of 16 bytes of K, eight of which follow each other: from such 16 bytes to the next (16 bytes more
// for other banks), and from eight columns to the next.
constexpr uint32_t X_K_STEP = 144, X_N_STEP = 8 * X_K_STEP;

// A warp's columns of B are two in each eight, those whose sums its lanes t hold, t being its slice.
template <int ROWS>
struct Columns {
  static constexpr int N = ceil_div(ROWS * TERMS, 2) * 8;
  static constexpr uint32_t BYTES = N / 8 * X_N_STEP;  // of four slices of a group
};

// The exponent's field of the largest of a group, of which each of 16 lanes has eight.
DEVICE int largest_exponent(const uint4& x) {
  const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = max(most, max(pairs[i] << 17, pairs[i] << 1 & 0xffff0000u));
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lanes));
  return most >> 24;
}

// Eight BF16 times `factor`, which makes the group's largest one of 2^14 to 2^15, as sums of E5M2: exact for what is no less
// than 2^-22 of the largest. Where that is infinite or a NaN, the first term says so and the others are zero.
DEVICE void split(uint2 (&terms)[TERMS], const uint4& x, float factor, bool finite) {
  const uint32_t pairs[4] = {x.x, x.y, x.z, x.w}, rest_bits = finite ? E5M2_BITS : 0;
  uint32_t parts[TERMS][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t rest = pack2<fp16>(__uint_as_float(pairs[i] << 16) * factor, __uint_as_float(pairs[i] & 0xffff0000u) * factor);
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      parts[term][i] = rest & (term == 0 ? E5M2_BITS : rest_bits);
      const __half2 left = __hsub2(reinterpret_cast<const __half2&>(rest), reinterpret_cast<const __half2&>(parts[term][i]));
      rest = reinterpret_cast<const uint32_t&>(left);
    }
  }
#pragma unroll
  for (int term = 0; term < TERMS; ++term)
    terms[term] = make_uint2(prmt(parts[term][0], parts[term][1], 0x7531), prmt(parts[term][2], parts[term][3], 0x7531));
}

// A round is a tile of each half of a block, a pass HELD groups of each of a half's first `active` warps. Shared memory holds
// x[warpgroups of a half][passes][HELD] of Columns::BYTES, x as it came, the factors that undo x's [warps of a
// half][passes][HELD][rows], and y[halves][rounds][warps of a half][rows][TILE_ROWS].
struct FewCut {
  int groups, tiles, rounds, blocks, active;
  uint32_t pass_units, round_units;  // from one pass, and from the last one of a round, to the next; in groups of a tile
  uint32_t raw, factors, y, smem_bytes;
  uint32_t zero;  // what the compiler takes for any number
};

// SINGLE: there is one round. Then a group's words are waited for alone; in a loop all wait for the newest.
template <typename Scale, int ROWS, int HALVES, int PASSES, bool SINGLE, bool CHAINED>
__global__ void __launch_bounds__(HALVES* FEW_WARPS* WARP, AT_A_TIME / HALVES)
    matvec_few_rows(const __grid_constant__ MatvecFp4Args args, const __grid_constant__ FewCut cut) {
  using Cols = Columns<ROWS>;
  constexpr int ENTRIES = ROWS * PASSES * FEW_WARPS, BATCH = ceil_div(ENTRIES, HALVES * FEW_WARPS);
  constexpr bool BY_UNIT = SINGLE && PASSES != 2;  // addresses are made anew for each load: faster, or slower, as measured
  constexpr bool LATE = SINGLE && ROWS == 1 && PASSES == 4;  // words after x, which is long
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int half = threadIdx.x / (FEW_WARPS * WARP), warp = threadIdx.x / WARP % FEW_WARPS, slice = warp % SLICES;
  unsigned char* const smem_bytes = &dynamic_smem<unsigned char>();
  const uint32_t smem = smem_u32(smem_bytes);
  const int first_tile = blockIdx.x + half * gridDim.x, tile_step = HALVES * gridDim.x;

  // Who has no groups or no tile reads another's, or a sector of them, and its sums are left out: no branches before the
  // products.
  uint4 words[HELD][2];
  Scale scales[HELD][2];
  const int has = first_tile >= cut.tiles ? 0 : 1;  // a tile
  const int tile = BY_UNIT ? (has > 0 ? first_tile : blockIdx.x) : min(first_tile, cut.tiles - 1);
  uint32_t unit = tile * cut.groups + min(warp, cut.active - 1) * HELD;  // the next to load
  const Scale* const all_scales = static_cast<const Scale*>(args.scales);
  const bool all = ROWS > 1 || LATE || (warp < cut.active && has > 0);
  const int lane_bytes = all ? lane * 16 : 0, lane_rows = all ? g * 2 : 0;
  const uint64_t first_unit = static_cast<uint64_t>(tile) * cut.groups + min(warp, cut.active - 1) * HELD;
  const uint8_t* codes = args.codes + first_unit * UNIT_BYTES + lane_bytes;
  const Scale* group_scales = all_scales + first_unit * TILE_ROWS + lane_rows;
  // LATE: those of the .nc kind do not stay behind a barrier.
  const auto load = [&](int i) {
    const uint64_t here = unit;
    const uint8_t* const from = BY_UNIT ? args.codes + here * UNIT_BYTES + (i * UNIT_BYTES + lane_bytes) : codes + i * UNIT_BYTES;
    words[i][0] = LATE ? ld_global_no_allocate_v4_u32(from) : ld_global_nc_no_allocate_v4_u32(from);
    words[i][1] = LATE ? ld_global_no_allocate_v4_u32(from + 512) : ld_global_nc_no_allocate_v4_u32(from + 512);
    load_pair(scales[i], BY_UNIT ? all_scales + here * TILE_ROWS + (i * TILE_ROWS + lane_rows) : group_scales + i * TILE_ROWS);
  };
  const auto step_on = [&](uint32_t units) {
    unit += units;
    codes += static_cast<uint64_t>(units) * UNIT_BYTES;
    group_scales += units * TILE_ROWS;
  };
  // Where few blocks have a third tile it is the last that the memory brings, and nothing else is under way then.
  const auto third_tile = [&] {
    if (SINGLE || ROWS > 1 || cut.rounds != 3 || first_tile + 2 * tile_step >= cut.tiles) return;
    const uint8_t* const line = codes + 2ull * cut.round_units * UNIT_BYTES - lane_bytes + lane * 128;
    const void* const scales_line = group_scales - lane_rows + 2ull * cut.round_units * TILE_ROWS;
    constexpr int LINES = HELD * UNIT_BYTES / 128;
    if (lane <= LINES && warp < cut.active) prefetch_global_L2(lane < LINES ? static_cast<const void*>(line) : scales_line);
  };
  if (CHAINED) {
    load(0);
    load(1);
    griddepcontrol_wait();
  }

  // Both halves bring x: a warp two groups of a row at a time, those of one of a half's warps in a pass.
  {
    const int loader = threadIdx.x / WARP, pair = lane / 16;
    uint4 loaded[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int entry = loader + i * HALVES * FEW_WARPS, owner = entry % FEW_WARPS, line = entry / FEW_WARPS;
      const int pass = line % PASSES, m = line / PASSES;
      const uint16_t* const from = static_cast<const uint16_t*>(args.x) + m * args.x_stride + pass * cut.pass_units * GROUP;
      loaded[i] = make_uint4(0, 0, 0, 0);
      if (owner < cut.active && m < ROWS) loaded[i] = ld_global_v4_u32(from + (owner * WARP + lane) * 8);
    }
    if (!CHAINED) {
      if (LATE) step_on(loaded[0].x & cut.zero);  // not before x is here
      load(0);
      if (LATE) __syncthreads();  // nor the second group's before all have x
      load(1);
      third_tile();
      if (!BY_UNIT) __syncwarp();  // or the compiler asks for them when x is here
    }
    const auto prepare = [&](const uint4& x, int i) {
      const int entry = loader + i * HALVES * FEW_WARPS, owner = entry % FEW_WARPS, line = entry / FEW_WARPS;
      const int pass = line % PASSES, m = line / PASSES;
      const int exponent = largest_exponent(x), inverse = max(exponent - 14, 1);  // fields of FP32
      uint2 terms[TERMS];
      split(terms, x, __uint_as_float((254 - inverse) << 23), exponent != 255);
      const int set = (owner / SLICES * PASSES + pass) * HELD + pair;
      const int column = owner % SLICES * 2;  // of each eight
      unsigned char* const to = smem_bytes + set * Cols::BYTES + lane % 16 / 2 * X_K_STEP + lane % 2 * 8 + column * 16;
      if (ENTRIES % (HALVES * FEW_WARPS) != 0 && entry >= ENTRIES) return;
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        const int place = m * TERMS + term;
        *reinterpret_cast<uint2*>(to + place / 2 * X_N_STEP + place % 2 * 16) = terms[term];
      }
      if (ROWS == 1) *reinterpret_cast<uint2*>(to + X_N_STEP + 16) = make_uint2(0, 0);
      // 2^6 more, for the weights are 2^-6 of what they stand for.
      const uint32_t factor = smem + cut.factors + (((owner * PASSES + pass) * HELD + pair) * ROWS + m) * 4;
      if (lane % 16 == 0) st_shared_f32(factor, __uint_as_float((inverse + 6) << 23));
    };
    if constexpr (BATCH == 1 || BY_UNIT) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) prepare(loaded[i], i);
    } else {
      // Through shared memory into a loop: in a straight line the compiler asks for words after that.
      const uint32_t raw = smem + cut.raw + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) st_shared_v4_u32(raw + i * (HALVES * FEW_WARPS * WARP * 16), loaded[i]);
#pragma unroll 1
      for (int i = 0; i < BATCH; ++i) prepare(ld_shared_v4_u32(raw + i * (HALVES * FEW_WARPS * WARP * 16)), i);
    }
    fence_proxy_async_shared();
    if (HALVES == 1) {  // a warpgroup has brought its own
      bar_sync(1 + warp / SLICES, SLICES * WARP);
    } else {
      __syncthreads();
    }
  }

  // The last round is not for all.
  const int rounds = BY_UNIT ? has : cut.rounds - (first_tile + (cut.rounds - 1) * tile_step < cut.tiles ? 0 : 1);
  const int warpgroup = __shfl_sync(ALL_LANES, warp / SLICES, 0);  // of a lane's, so that the compiler knows it to be one for all
  const uint32_t x_here = smem + warpgroup * PASSES * HELD * Cols::BYTES;
  const uint32_t factors = smem + cut.factors + warp * PASSES * HELD * ROWS * 4;
  const uint32_t y_half = smem + cut.y + half * cut.rounds * (FEW_WARPS * ROWS * TILE_ROWS * 4);
  uint32_t y_lane = y_half + (warp * ROWS * TILE_ROWS + g) * 4;
#pragma unroll 1
  for (int round = 0; SINGLE || round < rounds; ++round) {
    // After the wait: what the kernel in front wrote can be seen by all that follow, as they read weights at once.
    if (round + 1 >= rounds) griddepcontrol_launch_dependents();
    float y[ROWS][2] = {};  // of rows g and g + 8, right in lanes whose t is the warp's slice
#pragma unroll(SINGLE ? PASSES : 1)
    for (int pass = 0; pass < PASSES; ++pass) {
      const bool last = pass + 1 == PASSES, more = !last || (!SINGLE && round + 1 < rounds);
      step_on(last ? cut.round_units : cut.pass_units);
#pragma unroll
      for (int j = 0; j < HELD; ++j) {
        const uint32_t word[8] = {words[j][0].x, words[j][0].y, words[j][0].z, words[j][0].w,
                                  words[j][1].x, words[j][1].y, words[j][1].z, words[j][1].w};
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) decode(a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1], word[i]);
        const float scale[2] = {to_float(scales[j][0]), to_float(scales[j][1])};
#pragma unroll
        for (int i = 0; i < 16; ++i) keep_here(a[i / 4][i % 4]);
        if (more) {
          load(j);
          if (!BY_UNIT) __syncwarp();  // or the compiler asks for them at the end of the loop
        }
        const uint64_t b = wgmma_descriptor(x_here + (pass * HELD + j) * Cols::BYTES, X_K_STEP, X_N_STEP, Swizzle::none);
        float d[Cols::N / 2];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_k32_e4m3_e5m2<Cols::N>(d, a[i], wgmma_advance(b, i * 2 * X_K_STEP), i > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
          const float factor = __uint_as_float(ld_shared_u32(factors + ((pass * HELD + j) * ROWS + m) * 4));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const auto term = [&](int i) { return d[(m * TERMS + i) / 2 * 4 + 2 * r + (m * TERMS + i) % 2]; };
            y[m][r] += (term(2) + term(1) + term(0)) * factor * scale[r];
          }
        }
      }
    }
    if (t == slice) {
#pragma unroll
      for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) st_shared_f32(y_lane + (m * TILE_ROWS + r * 8) * 4, y[m][r]);
    }
    y_lane += FEW_WARPS * ROWS * TILE_ROWS * 4;
    if (SINGLE) break;
  }

  // A warp adds up a tile's sums of a row of x, two lanes one of them, half of the warps' parts each.
  if (HALVES == 1) {
    __syncthreads();
  } else {
    bar_sync(1 + half, FEW_WARPS * WARP);
  }
  const int row = lane % TILE_ROWS, part = lane / TILE_ROWS;
  for (int i = warp; i < rounds * args.m; i += FEW_WARPS) {
    const int round = ROWS == 1 ? i : i / args.m, m = i - round * args.m;
    const uint32_t from = y_half + (((round * FEW_WARPS + part) * ROWS + m) * TILE_ROWS + row) * 4;
    float y[FEW_WARPS / 2];
#pragma unroll
    for (int j = 0; j < FEW_WARPS / 2; ++j) {
      const float here = __uint_as_float(ld_shared_u32(from + 2 * j * ROWS * TILE_ROWS * 4));
      y[j] = part + 2 * j < cut.active ? here : 0.0f;
    }
#pragma unroll
    for (int j = FEW_WARPS / 4; j > 0; j /= 2)
#pragma unroll
      for (int k = 0; k < j; ++k) y[k] += y[k + j];
    const float sum = y[0] + __shfl_xor_sync(ALL_LANES, y[0], TILE_ROWS);
    const int64_t n = (first_tile + static_cast<int64_t>(round) * tile_step) * TILE_ROWS + row;
    if (part == 0 && n < args.n) store_y<bf16>(args, m, static_cast<int>(n), sum);
  }
}

// No blocks: the groups do not come out even, or something does not fit.
template <int ROWS, int HALVES, int PASSES>
FewCut few_cut_for(const MatvecFp4Args& args) {
  FewCut cut = {};
  cut.groups = args.k / GROUP;
  cut.tiles = ceil_div(args.n, TILE_ROWS);
  const int places = AT_A_TIME * args.sm_count, blocks = min(cut.tiles, places / HALVES), pass_units = cut.groups / PASSES;
  cut.active = pass_units / HELD;
  cut.rounds = ceil_div(cut.tiles, HALVES * blocks);
  cut.pass_units = pass_units;
  cut.round_units = HALVES * blocks * cut.groups - (PASSES - 1) * pass_units;
  cut.raw = FEW_WARPS / SLICES * PASSES * HELD * Columns<ROWS>::BYTES;
  cut.factors = cut.raw + ROWS * PASSES * FEW_WARPS * WARP * 16;
  cut.y = cut.factors + FEW_WARPS * PASSES * HELD * ROWS * sizeof(float);
  cut.smem_bytes = cut.y + HALVES * cut.rounds * FEW_WARPS * ROWS * TILE_ROWS * sizeof(float);
  const bool even = cut.active * HELD * PASSES == cut.groups && cut.active <= FEW_WARPS;
  if (even && cut.smem_bytes <= static_cast<uint32_t>(args.smem_limit) * HALVES / AT_A_TIME - 1024) cut.blocks = blocks;
  return cut;
}

template <typename Scale, int ROWS, int HALVES, int PASSES>
const char* launch_few_rows(const MatvecFp4Args& args, const FewCut& cut, cudaStream_t stream) {
  const auto with = [&]<bool SINGLE, bool CHAINED>() {
    const auto kernel = matvec_few_rows<Scale, ROWS, HALVES, PASSES, SINGLE, CHAINED>;
    return launch_overlapping(CHAINED, kernel, cut.blocks, HALVES * FEW_WARPS * WARP, cut.smem_bytes, stream, args, cut);
  };
  if constexpr (ONLY_CHAINED != 0)
    if (args.chained) return cut.rounds == 1 ? with.template operator()<true, true>() : with.template operator()<false, true>();
  if constexpr (ONLY_CHAINED != 1)
    if (!args.chained) return cut.rounds == 1 ? with.template operator()<true, false>() : with.template operator()<false, false>();
  return "this library was built for another chained";
}

// Whether the launch was one for few rows; with the fewest passes that come out even. Where x takes longer than the words of a
// few tiles, two blocks a multiprocessor do not prepare it both.
template <typename Scale, int ROWS, int PASSES = 1>
bool few_rows(const char*& error, const MatvecFp4Args& args, cudaStream_t stream) {
  constexpr int HALVES = ROWS * PASSES <= 2 ? 1 : 2;
  const FewCut cut = few_cut_for<ROWS, HALVES, PASSES>(args);
  if (cut.blocks > 0) {
    error = launch_few_rows<Scale, ROWS, HALVES, PASSES>(args, cut, stream);
    return true;
  }
  if constexpr (PASSES < 4) return few_rows<Scale, ROWS, 2 * PASSES>(error, args, stream);
  return false;
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  return with_scale(*args, LAYOUT_BYTES, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      if constexpr (NT == 1) {
        const char* error = nullptr;
        if constexpr (ONLY_FEW_ROWS == -1 || ONLY_FEW_ROWS == 1)
          if (args->dtype == DTYPE_BF16 && args->m == 1 && few_rows<Scale, 1>(error, *args, stream)) return error;
        if constexpr (ONLY_FEW_ROWS == -1 || ONLY_FEW_ROWS == 2)
          if (args->dtype == DTYPE_BF16 && args->m == 2 && few_rows<Scale, 2>(error, *args, stream)) return error;
      }
      const Cut cut = cut_for(*args, columns, max_warps(NT));
      const bool whole = cut.groups == cut.passes * cut.pass_units && cut.x_passes == cut.passes;
      const auto kernel = whole ? matvec_column_split<Scale, NT, true> : matvec_column_split<Scale, NT, false>;
      return launch_overlapping(args->chained, kernel, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, *args, cut);
    });
  });
}
