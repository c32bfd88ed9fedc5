// Change: one block a multiprocessor with twice the registers a thread, and as many blocks as give each the same number of
//   tiles. x is brought in for all passes at once where it fits, eight loads of a lane at a time.
// Prediction: x is read by half as many blocks; all read the same lines at the same moment, which queue in a few slices of
//   the L2. Half the bytes in flight, 30 KB a multiprocessor, are just what 4.5 TB/s needs. Short weights and many rows of
//   x gain, long weights lose a little.
// Measured: M = 1: 18.4 us on gate_up (07 in the same run: 18.7), 13.3 on fc_down (13.7), 7.6 on local_qkv (8.1), 5.5 on local_o
//   (6.1), 127.9 on the lm_head (128.2); gate_up with 8 and 16 rows 22.0 and 30.0 (23.9, 35.6); fc_down with 16 25.3 (32.5)
//   (H200, 2026-11-29).
// Verdict: Kept: a little on all shapes, and 15 to 22% with 16 rows of x.
// Instances: scale_dtype column_tiles
#include "args.cuh"

constexpr uint32_t UNIT_BYTES = TILE_ROWS * GROUP / 2;
constexpr int HELD = 2;  // groups of a tile that a warp holds in registers at a time
constexpr int max_warps(int nt) { return nt == 1 ? 16 : nt == 2 ? 15 : 12; }  // by the registers that columns of B take
constexpr uint32_t BF16_BITS = 0x81c081c0u;

// The same as _unfold in mila_kernels/layouts.py, which solves for the word.
DEVICE void decode(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & BF16_BITS;
  a[1] = (word << 6) & BF16_BITS;
  a[2] = __funnelshift_l(word, word, 12) & BF16_BITS;
  a[3] = (word >> 6 ^ word << 2) & BF16_BITS;
}

// How a launch cuts the work. Shared memory holds, per warp, x[x_passes][HELD groups][columns][GROUP_PITCH] and after all
// of them y[tiles][warps][columns][TILE_ROWS].
struct Cut {
  int warps, passes;  // a pass takes HELD groups a warp
  int x_passes;       // whose x is in shared memory at a time: all, or one
  int tiles;          // of a block between two sums over its warps
  int blocks, smem_bytes;
};

// A warp's place in the walk over its units: for so many tiles, all passes; in each pass, the tiles.
struct Walk {
  int begin, end, tile, pass;
  uint32_t unit;    // tile * groups + group
  uint32_t second;  // 1, or 0 where the warp has one group only: it reads it twice
};

template <typename Scale>
struct Held {
  uint4 words[HELD][2];
  Scale scales[HELD][2];
};

// Brings x in from a pass on, for as many passes as are held, and gives the factor: one for all.
DEVICE float bring_passes(const MatvecFp4Args& args, int pass, const Cut& cut, bf16* x_warp, int x_of_a_pass, int warp,
                          int lane) {
  const auto bring = [&](int p, float factor) {
    const int group = ((pass + p) * cut.warps + warp) * HELD;
    const WarpActivations activations = {args.x, args.x_stride, args.dtype, args.m, args.k, group * GROUP};
    return activations.copy<HELD, 8>(x_warp + p * x_of_a_pass, lane, factor);
  };
  bool found = false;
  for (int p = 0; p < cut.x_passes; ++p) found |= bring(p, X_FACTOR);
  const bool too_large = __any_sync(ALL_LANES, found);
  if (too_large)
    for (int p = 0; p < cut.x_passes; ++p) bring(p, 1.0f);
  __syncwarp();
  return too_large ? 1.0f : X_FACTOR;
}

template <typename Scale, int NT>
__global__ void __launch_bounds__(max_warps(NT) * WARP, 1)
    matvec_one_block(const MatvecFp4Args args, const Cut cut) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int groups = args.k / GROUP, terms = terms_of(args.dtype), columns = args.m * terms;
  const int tiles = ceil_div(args.n, TILE_ROWS);
  const int my_tiles = (tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  bf16* const x_smem = &dynamic_smem<bf16>();
  const int x_of_a_pass = HELD * columns * GROUP_PITCH;
  bf16* const x_warp = x_smem + warp * cut.x_passes * x_of_a_pass;
  float* const y_smem = reinterpret_cast<float*>(x_smem + cut.warps * cut.x_passes * x_of_a_pass);
  float* const y_warp = y_smem + (warp * columns + 2 * t) * TILE_ROWS + g;
  const uint8_t* const codes = args.codes + lane * 16;
  const Scale* const scales = static_cast<const Scale*>(args.scales) + g * 2;

  // Past the last group a warp reads the last one again, and multiplies it by zeros of x.
  const auto group_of = [&](int pass, int i) { return (pass * cut.warps + warp) * HELD + i; };
  const auto enter = [&](Walk& at) {
    at.unit = (blockIdx.x + static_cast<uint32_t>(at.tile) * gridDim.x) * groups + min(group_of(at.pass, 0), groups - 1);
    at.second = group_of(at.pass, 1) < groups ? 1 : 0;
  };
  const auto advance = [&](Walk& at) {
    at.unit += gridDim.x * groups;
    if (++at.tile < at.end) return;
    if (++at.pass == cut.passes) {
      at.pass = 0;
      at.begin = at.end;
      at.end = min(at.end + cut.tiles, my_tiles);
    }
    at.tile = at.begin;
    enter(at);
  };

  Walk next = {0, min(cut.tiles, my_tiles), 0, 0, 0, 0};
  enter(next);
  Held<Scale> held;
  const uint8_t* codes_from[HELD];
  const Scale* scales_from[HELD];
  const auto aim = [&] {
    codes_from[0] = codes + static_cast<uint64_t>(next.unit) * UNIT_BYTES;
    codes_from[1] = codes_from[0] + next.second * UNIT_BYTES;
    scales_from[0] = scales + static_cast<uint64_t>(next.unit) * TILE_ROWS;
    scales_from[1] = scales_from[0] + next.second * TILE_ROWS;
  };
  const auto load_words = [&](int i, int half) {
    held.words[i][half] = ld_global_nc_no_allocate_v4_u32(codes_from[i] + half * 512);
  };
  const auto load_scales = [&](int i) { load_pair(held.scales[i], scales_from[i]); };
  aim();
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    load_words(i, 0);
    load_words(i, 1);
    load_scales(i);
  }

  float restore = 0.0f;
  for (int begin = 0; begin < my_tiles; begin += cut.tiles) {
    const int end = min(begin + cut.tiles, my_tiles);
    for (int pass = 0; pass < cut.passes; ++pass) {
      if (cut.x_passes < cut.passes || (begin == 0 && pass == 0)) {
        __syncwarp();  // the last part of x has been read
        restore = 0x1p126f / bring_passes(args, pass, cut, x_warp, x_of_a_pass, warp, lane);
      }
      const bf16* const x_pass = x_warp + (cut.x_passes < cut.passes ? 0 : pass * x_of_a_pass);
      for (int tile = begin; tile < end; ++tile) {
        advance(next);
        aim();
        const bool more = next.tile < my_tiles;
        float y_regs[NT][4] = {};
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
          float sums[NT][4] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4 loaded = held.words[i][half];
            const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              uint32_t a[2][4];
              decode(a[0], words[2 * pair]);
              decode(a[1], words[2 * pair + 1]);
#pragma unroll
              for (int j = 0; j < NT; ++j) {
                // Columns past the last are copies of it, and dropped at the end.
                const bf16* x = x_pass + (i * columns + min(j * 8 + g, columns - 1)) * GROUP_PITCH + t * 16;
                const uint4 b = *reinterpret_cast<const uint4*>(x + half * 64 + pair * 8);
                mma_m16n8k16<bf16>(sums[j], a[0], b.x, b.y);
                mma_m16n8k16<bf16>(sums[j], a[1], b.z, b.w);
              }
            }
            if (more) load_words(i, half);
          }
          const float scale[2] = {to_float(held.scales[i][0]), to_float(held.scales[i][1])};
          if (more) load_scales(i);
#pragma unroll
          for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) y_regs[j][c] += sums[j][c] * restore * scale[c / 2];
        }
        float* const y_tile = y_warp + (tile - begin) * cut.warps * columns * TILE_ROWS;
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (j * 8 + 2 * t + c % 2 >= columns) continue;
            float& y = y_tile[(j * 8 + c % 2) * TILE_ROWS + c / 2 * 8];
            if (pass > 0) y_regs[j][c] += y;
            y = y_regs[j][c];
          }
      }
    }

    __syncthreads();
    for (int i = threadIdx.x; i < (end - begin) * args.m * TILE_ROWS; i += blockDim.x) {
      const int row = i % TILE_ROWS, tile = i / TILE_ROWS / args.m, m = i / TILE_ROWS - tile * args.m;
      const float* y = y_smem + (tile * cut.warps * columns + m * terms) * TILE_ROWS + row;
      float sum = sum_over_warps(y, cut.warps, columns * TILE_ROWS);
      if (terms == 2) sum += sum_over_warps(y + TILE_ROWS, cut.warps, columns * TILE_ROWS);
      const int64_t n = (blockIdx.x + static_cast<int64_t>(begin + tile) * gridDim.x) * TILE_ROWS + row;
      if (n < args.n) store_y(args, m, static_cast<int>(n), sum);
    }
    if (end < my_tiles) __syncthreads();  // the sums have been read
  }
}

// The cut of a launch with at most so many warps a block.
Cut cut_for(const MatvecFp4Args& args, int warps, int x_bytes_a_warp, int y_bytes_a_warp) {
  const int limit = args.smem_limit - 1024;
  const int most_warps = min(warps, limit / (x_bytes_a_warp + y_bytes_a_warp));
  const int groups = args.k / GROUP, tiles = ceil_div(args.n, TILE_ROWS);
  Cut cut;
  cut.passes = ceil_div(groups, most_warps * HELD);
  cut.warps = ceil_div(groups, cut.passes * HELD);
  cut.x_passes = cut.warps * (cut.passes * x_bytes_a_warp + y_bytes_a_warp) <= limit / 2 ? cut.passes : 1;
  const int rounds = ceil_div(tiles, args.sm_count);
  cut.blocks = ceil_div(tiles, rounds);
  const int spare = limit - cut.warps * cut.x_passes * x_bytes_a_warp;
  cut.tiles = min(rounds, max(1, min(spare, 96 * 1024) / (cut.warps * y_bytes_a_warp)));
  cut.smem_bytes = cut.warps * (cut.x_passes * x_bytes_a_warp + cut.tiles * y_bytes_a_warp);
  return cut;
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  const int x_bytes_a_warp = HELD * columns * GROUP_PITCH * static_cast<int>(sizeof(bf16));  // and a pass
  const int y_bytes_a_warp = columns * TILE_ROWS * static_cast<int>(sizeof(float));          // and a tile
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      const Cut cut = cut_for(*args, max_warps(NT), x_bytes_a_warp, y_bytes_a_warp);
      return launch(matvec_one_block<Scale, NT>, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, *args, cut);
    });
  });
}
