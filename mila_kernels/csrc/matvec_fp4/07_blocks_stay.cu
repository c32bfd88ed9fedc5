// Change: two blocks a multiprocessor stay and walk over the tiles. A warp keeps the same columns of every tile and brings
//   their part of x in for itself, so no warp waits for another until the sums are due; as soon as a word is consumed its
//   register takes the next tile's, so that loads are always in flight.
// Prediction: 05 starts and drains 15 times a multiprocessor; here once. 60 KB in flight a multiprocessor, where 4.5 TB/s
//   times 1 us of latency ask for 33: within 10% of the read limit on long weights, and about 2 us above it on short ones.
// Measured: 18.4 us on gate_up, 8.1 on local_qkv, 6.2 on local_o, 124.7 on the lm_head (92% of the read limit); fc_down 13.7,
//   where x was brought in anew for each of four passes (H200, 2026-11-29).
// Verdict: Kept. Long weights are within 8% of the limit; on short ones an empty kernel takes 1.0 of the 6 us, and x comes late.
// Instances: scale_dtype column_tiles
#include "args.cuh"

constexpr int HELD = 2;  // groups of a tile that a warp holds in registers at a time

// 32 columns of B take more than 128 registers.
constexpr int max_warps(int nt) { return nt == 4 ? 12 : 16; }
constexpr int blocks_per_sm(int nt) { return nt == 1 ? 2 : 1; }  // x of more columns fills the shared memory
constexpr uint32_t BF16_BITS = 0x81c081c0u;

// The same as _unfold in mila_kernels/layouts.py, which solves for the word.
DEVICE void decode(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & BF16_BITS;
  a[1] = (word << 6) & BF16_BITS;
  a[2] = __funnelshift_l(word, word, 12) & BF16_BITS;
  a[3] = (word >> 6 ^ word << 2) & BF16_BITS;
}

// How a launch cuts the work. Shared memory holds, per warp, x[HELD groups][columns][GROUP_PITCH] and after all of them
// y[tiles][warps][columns][TILE_ROWS].
struct Cut {
  int warps, passes;  // a pass takes HELD groups a warp
  int tiles;          // of a block between two sums over its warps
  int blocks, smem_bytes;
};

// A warp's place in the walk over its units: for so many tiles, all passes; in each pass, the tiles.
struct Walk {
  int begin, end, tile, pass;
  uint32_t unit;  // tile * groups + group
};

template <typename Scale>
struct Held {
  uint4 words[HELD][2];
  Scale scales[HELD][2];
};

template <typename Scale, int NT>
__global__ void __launch_bounds__(max_warps(NT) * WARP, blocks_per_sm(NT))
    matvec_blocks_stay(const MatvecFp4Args args, const Cut cut) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int groups = args.k / GROUP, terms = terms_of(args.dtype), columns = args.m * terms;
  const int tiles = ceil_div(args.n, TILE_ROWS);
  const int my_tiles = (tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  bf16* const x_smem = &dynamic_smem<bf16>();
  bf16* const x_warp = x_smem + warp * HELD * columns * GROUP_PITCH;
  float* const y_smem = reinterpret_cast<float*>(x_smem + cut.warps * HELD * columns * GROUP_PITCH);
  const uint8_t* const codes = args.codes + lane * 16;
  const Scale* const scales = static_cast<const Scale*>(args.scales) + g * 2;

  // Past the last group a warp reads the last one again, and multiplies it by zeros of x.
  const auto group_of = [&](int pass, int i) { return (pass * cut.warps + warp) * HELD + i; };
  const auto enter = [&](Walk& at) {
    at.unit = (blockIdx.x + static_cast<uint32_t>(at.tile) * gridDim.x) * groups + min(group_of(at.pass, 0), groups - 1);
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
  const auto second = [&](int pass) { return group_of(pass, 1) < groups ? 1u : 0u; };

  Walk next = {0, min(cut.tiles, my_tiles), 0, 0, 0};
  enter(next);
  Held<Scale> held;
  const auto load_words = [&](int i, int half) {
    const uint64_t unit = next.unit + i * second(next.pass);
    held.words[i][half] = ld_global_nc_no_allocate_v4_u32(codes + unit * (TILE_ROWS * GROUP / 2) + half * 512);
  };
  const auto load_scales = [&](int i) {
    const uint64_t unit = next.unit + i * second(next.pass);
    load_pair(held.scales[i], scales + unit * TILE_ROWS);
  };
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
      if (begin == 0 || cut.passes > 1) {
        __syncwarp();  // the last part of x has been read
        const WarpActivations activations = {args.x, args.x_stride, args.dtype, args.m, args.k, group_of(pass, 0) * GROUP};
        restore = 0x1p126f / activations.bring<HELD, 1>(x_warp, lane);
      }
      for (int tile = begin; tile < end; ++tile) {
        advance(next);
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
                const bf16* x = x_warp + (i * columns + min(j * 8 + g, columns - 1)) * GROUP_PITCH + t * 16;
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
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int column = j * 8 + 2 * t + c % 2;
            if (column >= columns) continue;
            float& y = y_smem[(((tile - begin) * cut.warps + warp) * columns + column) * TILE_ROWS + g + c / 2 * 8];
            y = pass > 0 ? y + y_regs[j][c] : y_regs[j][c];
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

// The cut of a launch with at most so many warps a block, and so many blocks a multiprocessor.
Cut cut_for(const MatvecFp4Args& args, int warps, int blocks_a_sm, int x_bytes_a_warp, int y_bytes_a_warp) {
  const int most_warps = min(warps, (args.smem_limit - 4096) / (x_bytes_a_warp + y_bytes_a_warp));
  const int groups = args.k / GROUP, tiles = ceil_div(args.n, TILE_ROWS);
  Cut cut;
  cut.passes = ceil_div(groups, most_warps * HELD);
  cut.warps = ceil_div(groups, cut.passes * HELD);
  cut.blocks = min(tiles, args.sm_count * blocks_a_sm);
  const int spare = args.smem_limit / blocks_a_sm - cut.warps * x_bytes_a_warp - 1024;
  cut.tiles = min(ceil_div(tiles, cut.blocks), max(1, min(spare, 40 * 1024) / (cut.warps * y_bytes_a_warp)));
  cut.smem_bytes = cut.warps * (x_bytes_a_warp + cut.tiles * y_bytes_a_warp);
  return cut;
}

extern "C" const char* launch_step(const MatvecFp4Args* args, cudaStream_t stream) {
  const int columns = args->m * terms_of(args->dtype);
  const int x_bytes_a_warp = HELD * columns * GROUP_PITCH * static_cast<int>(sizeof(bf16));
  const int y_bytes_a_warp = columns * TILE_ROWS * static_cast<int>(sizeof(float));  // and a tile
  return with_scale(*args, LAYOUT_FOLDED, [&]<typename Scale>() {
    return with_columns(columns, [&]<int NT>() {
      const Cut cut = cut_for(*args, max_warps(NT), blocks_per_sm(NT), x_bytes_a_warp, y_bytes_a_warp);
      return launch(matvec_blocks_stay<Scale, NT>, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, *args, cut);
    });
  });
}
