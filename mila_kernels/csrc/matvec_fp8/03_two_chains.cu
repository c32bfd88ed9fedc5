// Change: two sums a tile that take turns, so that a product never waits for the one issued right before it.
// Prediction: 8 dependent products of about 33 clocks become two chains of 4. With seven warps a scheduler most of the wait
//   was hidden: 1 to 2% less.
// Measured: 233.1 us on the lm_head, M = 1, 95.2% of the read limit; 02 took 237.3 in another run (H200, 2026-11-29). Two
//   designs were slower: bulk prefetches into L2, one to eight tiles ahead of the loads, 285 to 317 us; two blocks of half
//   the warps a multiprocessor 236.0.
// Verdict: Kept. As predicted. The prefetches show that loads in flight were enough: what is asked for twice queues twice.
// Instances: column_tiles
#include "args.cuh"

constexpr int max_warps(int nt) { return nt == 4 ? 16 : 32; }  // 32 columns of B take more than 64 registers

// Sums of a tile that take turns; with more columns there are several anyway, and no registers to spare.
template <int NT>
constexpr int CHAINS = NT == 1 ? 2 : 1;

// Two registers of an A operand: the first from the high bytes of the word's halves, the second from the low ones.
DEVICE void decode(uint32_t& first, uint32_t& second, uint32_t word) {
  const uint32_t low = word << 8;
  first = (word & 0x80008000u) | (word >> 4 & 0x07f007f0u);
  second = (low & 0x80008000u) | (low >> 4 & 0x07f007f0u);
}

// How a launch cuts the work. Shared memory holds, per warp, x[columns][GROUP_PITCH] and after all of them
// y[tiles][warps][columns][TILE_ROWS].
struct Cut {
  int warps, passes;  // a pass takes a group a warp
  int tiles;          // of a block between two sums over its warps
  int blocks, smem_bytes;
};

// A warp's place in the walk over its units: for so many tiles, all passes; in each pass, the tiles.
struct Walk {
  int begin, end, tile, pass;
  uint32_t unit;  // tile * groups + group
};

template <int NT>
__global__ void __launch_bounds__(max_warps(NT) * WARP, 1)
    matvec_two_chains(const MatvecFp8Args args, const Cut cut) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int groups = args.k / GROUP, terms = terms_of(args.dtype), columns = args.m * terms;
  const int tiles = ceil_div(args.n, TILE_ROWS);
  const int my_tiles = (tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  bf16* const x_smem = &dynamic_smem<bf16>();
  bf16* const x_warp = x_smem + warp * columns * GROUP_PITCH;
  float* const y_smem = reinterpret_cast<float*>(x_smem + cut.warps * columns * GROUP_PITCH);
  const uint8_t* const codes = args.codes + lane * 16;

  // Past the last group a warp reads the last one again, and multiplies it by zeros of x.
  const auto group_of = [&](int pass) { return pass * cut.warps + warp; };
  const auto enter = [&](Walk& at) {
    at.unit = (blockIdx.x + static_cast<uint32_t>(at.tile) * gridDim.x) * groups + min(group_of(at.pass), groups - 1);
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

  Walk next = {0, min(cut.tiles, my_tiles), 0, 0, 0};
  enter(next);
  uint4 held[4];
  const auto load = [&](int quarter) {
    held[quarter] = ld_global_nc_no_allocate_v4_u32(codes + static_cast<uint64_t>(next.unit) * (TILE_ROWS * GROUP) +
                                                    quarter * 512);
  };
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) load(quarter);

  float restore = 0.0f;
  for (int begin = 0; begin < my_tiles; begin += cut.tiles) {
    const int end = min(begin + cut.tiles, my_tiles);
    for (int pass = 0; pass < cut.passes; ++pass) {
      if (begin == 0 || cut.passes > 1) {
        __syncwarp();  // the last part of x has been read
        const WarpActivations activations = {args.x, args.x_stride, args.dtype, args.m, args.k, group_of(pass) * GROUP};
        restore = 0x1p120f / activations.bring<1, 1>(x_warp, lane);
      }
      for (int tile = begin; tile < end; ++tile) {
        advance(next);
        const bool more = next.tile < my_tiles;
        float sums[CHAINS<NT>][NT][4] = {};
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const uint4 words = held[quarter];
          uint32_t a[2][4];
          decode(a[0][0], a[0][1], words.x);
          decode(a[0][2], a[0][3], words.y);
          decode(a[1][0], a[1][1], words.z);
          decode(a[1][2], a[1][3], words.w);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            // Columns past the last are copies of it, and dropped at the end.
            const bf16* x = x_warp + min(j * 8 + g, columns - 1) * GROUP_PITCH + t * 16;
            const uint4 b = *reinterpret_cast<const uint4*>(x + quarter / 2 * 64 + quarter % 2 * 8);
            mma_m16n8k16<bf16>(sums[0][j], a[0], b.x, b.y);
            mma_m16n8k16<bf16>(sums[CHAINS<NT> - 1][j], a[1], b.z, b.w);
          }
          if (more) load(quarter);
        }
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int column = j * 8 + 2 * t + c % 2;
            if (column >= columns) continue;
            float& y = y_smem[(((tile - begin) * cut.warps + warp) * columns + column) * TILE_ROWS + g + c / 2 * 8];
            const float sum = CHAINS<NT> == 2 ? sums[0][j][c] + sums[CHAINS<NT> - 1][j][c] : sums[0][j][c];
            y = sum * restore + (pass > 0 ? y : 0.0f);
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
      if (n < args.n) store_y(args, m, static_cast<int>(n), sum * args.scales[n]);
    }
    if (end < my_tiles) __syncthreads();  // the sums have been read
  }
}

// The cut of a launch with at most so many warps a block, one block a multiprocessor.
Cut cut_for(const MatvecFp8Args& args, int warps, int x_bytes_a_warp, int y_bytes_a_warp) {
  const int most_warps = min(warps, (args.smem_limit - 4096) / (x_bytes_a_warp + y_bytes_a_warp));
  const int groups = args.k / GROUP, tiles = ceil_div(args.n, TILE_ROWS);
  Cut cut;
  cut.passes = ceil_div(groups, most_warps);
  cut.warps = ceil_div(groups, cut.passes);
  cut.blocks = min(tiles, args.sm_count);
  const int spare = args.smem_limit - cut.warps * x_bytes_a_warp - 1024;
  cut.tiles = min(ceil_div(tiles, cut.blocks), max(1, spare / (cut.warps * y_bytes_a_warp)));
  cut.smem_bytes = cut.warps * (x_bytes_a_warp + cut.tiles * y_bytes_a_warp);
  return cut;
}

extern "C" const char* launch_step(const MatvecFp8Args* args, cudaStream_t stream) {
  if (args->layout != LAYOUT_FRAGMENTS) return "the weight is in another layout than this step reads";
  const int columns = args->m * terms_of(args->dtype);
  const int x_bytes_a_warp = columns * GROUP_PITCH * static_cast<int>(sizeof(bf16));
  const int y_bytes_a_warp = columns * TILE_ROWS * static_cast<int>(sizeof(float));  // and a tile
  return with_columns(columns, [&]<int NT>() {
    const Cut cut = cut_for(*args, max_warps(NT), x_bytes_a_warp, y_bytes_a_warp);
    return launch(matvec_two_chains<NT>, cut.blocks, cut.warps * WARP, cut.smem_bytes, stream, *args, cut);
  });
}
