// Change: all FP4 matvecs of a token in one launch, for one row of BF16. A block a multiprocessor walks through the list;
//   bulk copies bring its weights into a ring that runs ahead over the borders, and a warp waits only for its own columns
//   of x. An output is its own flag: y holds -NaN until it is written, so that whoever reads x reads until it is there.
// Prediction: at a border of 12's chain the memory idles for 2 us: sums, launch, x, the first weights. 130 KB a multiprocessor
//   in the ring are 4 us of the memory's time, longer than x takes to get from one block to all others (sum, store, load:
//   1.5 us). Then only x waits, and the ring's 98% of the read limit, less what it takes to catch up, are reached: 93%.
// Measured: H200, 2026-11-30, the 192 FP4 matvecs of 48 layers, reading at 4,535 GB/s: 1,603 us, 77.3%; 1,615 to 1,650 with a
//   ring of five tiles or with other places for the sums; 1,683 with 32 warps of one group, two of which do the filling and
//   the sums beside their own work; naps of 20 to 100 ns between looks at x change nothing. Without waiting for x 1,362 us
//   (91%), without products 1,266 (98%). With the lm_head, which is a launch of its own, 76.7%; launches that overlap 70% (15)
//   and 67% (13), a prototype with one barrier of all blocks a border 69.6%.
// Verdict: Kept, in a chain; no step of the ladder, as it takes a list. 93% was the aim. fc_down's last tile is done after 13,000
//   clocks in half of the blocks and after 18,000 in the last, and gate_up's x waits for 2,900 to 5,200 clocks; a tile in the
//   ring then takes 1,330 clocks, where the memory brings one in 1,620: what a wait has cost is caught up slowly. Next: tiles
//   that come out even over the blocks, and fewer instructions a weight than 1.7.
// Architectures: sm_90a
#include "../../hopper.cuh"
#include "../args.cuh"

// Mirrored by ChainMatvec in mila_kernels/token_chain.py. A tile's groups are read in `chunks` parts of `chunk_groups`.
struct ChainMatvec {
  const uint8_t* codes;  // LAYOUT_FOLDED
  const bf16* scales;
  const bf16* x;
  bf16* y;
  int32_t tiles, groups, chunk_groups, chunks;
  int32_t first;  // which block takes the first tile
  int32_t unused[3];
};

// The list is in device memory. The first x is whole; each other one is the y of a matvec before, all 0xffff at the start.
struct ChainArgs {
  const ChainMatvec* list;
  int32_t count, blocks;
};

constexpr int CHUNK_GROUPS = 32, HELD = 2, WARPS = CHUNK_GROUPS / HELD, MAX_CHUNKS = 4;
constexpr int FILLS = WARPS, SUMS = WARPS + 1;  // two more warps: one asks for weights, one adds up
constexpr int STAGES = 4, SLOTS = 8;
constexpr uint32_t UNIT_BYTES = TILE_ROWS * GROUP / 2, UNIT_SCALES = TILE_ROWS * sizeof(bf16);
constexpr uint32_t BF16_BITS = 0x81c081c0u, UNWRITTEN = 0xffffu;

struct Smem {
  uint64_t full[STAGES], empty[STAGES], y_full[SLOTS], y_empty[SLOTS];
  alignas(128) unsigned char codes[STAGES][CHUNK_GROUPS * UNIT_BYTES];
  unsigned char scales[STAGES][CHUNK_GROUPS * UNIT_SCALES];
  bf16 x[WARPS][MAX_CHUNKS][HELD * GROUP];
  float y[SLOTS][WARPS][TILE_ROWS];
};

// Behind the rest of the shared memory.
DEVICE ChainMatvec* list_of(Smem& smem) { return reinterpret_cast<ChainMatvec*>(&smem + 1); }

// The same as _unfold in mila_kernels/layouts.py, which solves for the word.
DEVICE void decode(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & BF16_BITS;
  a[1] = (word << 6) & BF16_BITS;
  a[2] = __funnelshift_l(word, word, 12) & BF16_BITS;
  a[3] = (word >> 6 ^ word << 2) & BF16_BITS;
}

DEVICE bool unwritten(const uint4& x) {
  const auto either = [](uint32_t pair) { return (pair & 0xffffu) == UNWRITTEN || pair >> 16 == UNWRITTEN; };
  return either(x.x) || either(x.y) || either(x.z) || either(x.w);
}

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

DEVICE int first_tile(const ChainMatvec& matvec) {
  const int tile = static_cast<int>(blockIdx.x) - matvec.first;
  return tile < 0 ? tile + static_cast<int>(gridDim.x) : tile;
}

// Calls f(matvec, tile) for the tiles of a block, in order.
template <typename F>
DEVICE void for_my_tiles(const ChainMatvec* list, int count, F f) {
  for (int i = 0; i < count; ++i)
    for (int tile = first_tile(list[i]); tile < list[i].tiles; tile += gridDim.x) f(list[i], tile);
}

// By one thread: keeps the ring full.
DEVICE void bring_weights(Smem& smem, int count) {
  int stage = 0;
  uint32_t parity = 1;
  for_my_tiles(list_of(smem), count, [&](const ChainMatvec& matvec, int tile) {
    uint64_t unit = static_cast<uint64_t>(tile) * matvec.groups;
    const uint32_t codes = matvec.chunk_groups * UNIT_BYTES, scales = matvec.chunk_groups * UNIT_SCALES;
    for (int chunk = 0; chunk < matvec.chunks; ++chunk, unit += matvec.chunk_groups) {
      const uint32_t full = smem_u32(&smem.full[stage]);
      mbarrier_wait(smem_u32(&smem.empty[stage]), parity);
      mbarrier_arrive_expect_tx(full, codes + scales);
      cp_async_bulk_g2s(smem_u32(smem.codes[stage]), matvec.codes + unit * UNIT_BYTES, codes, full);
      cp_async_bulk_g2s(smem_u32(smem.scales[stage]), matvec.scales + unit * TILE_ROWS, scales, full);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  });
}

// Brings the warp's columns of x in, of all chunks, as soon as they are written, and gives the factor they were multiplied by.
DEVICE float bring_x(const ChainMatvec& matvec, uint32_t x_warp, int warp, int lane, bool wait) {
  constexpr int PIECES = HELD * GROUP / 8, MOST = MAX_CHUNKS * PIECES / WARP;  // of a chunk; of a lane
  const int pieces = matvec.chunks * PIECES;
  uint4 loaded[MOST];
  bool again;
  do {
    again = false;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      const int piece = i * WARP + lane, column = (piece / PIECES * matvec.chunk_groups + warp * HELD) * GROUP + piece % PIECES * 8;
      loaded[i] = make_uint4(0, 0, 0, 0);
      if (piece < pieces) loaded[i] = ld_relaxed_gpu_v4_u32(matvec.x + column);
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) again |= wait && unwritten(loaded[i]);
    again = __any_sync(ALL_LANES, again);
    if (again) __nanosleep(20);
  } while (again);
  uint32_t ends = 0;
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i * WARP + lane < pieces) st_shared_v4_u32(x_warp + (i * WARP + lane) * 16, times_x_factor(loaded[i], ends));
  const bool too_large = __any_sync(ALL_LANES, (ends & 0x80008000u) != 0);
  if (too_large)
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (i * WARP + lane < pieces) st_shared_v4_u32(x_warp + (i * WARP + lane) * 16, loaded[i]);
  __syncwarp();
  return too_large ? 1.0f : X_FACTOR;
}

DEVICE void store_sums(const ChainMatvec& matvec, const float (*y)[TILE_ROWS], int tile, int lane) {
  const int row = lane % TILE_ROWS, warps = matvec.chunk_groups / HELD;
  float sum = 0.0f;
#pragma unroll 4
  for (int w = lane / TILE_ROWS; w < warps; w += 2) sum += y[w][row];
  sum += __shfl_xor_sync(ALL_LANES, sum, TILE_ROWS);
  if (lane >= TILE_ROWS) return;
  const bf16 rounded = from_float<bf16>(sum);
  const uint16_t bits = reinterpret_cast<const uint16_t&>(rounded);
  st_relaxed_gpu_u16(matvec.y + tile * TILE_ROWS + row, bits == UNWRITTEN ? 0x7fff : bits);
}

// By one warp: adds up what the others have of each tile.
DEVICE void add_up(Smem& smem, int count, int lane) {
  int slot = 0;
  uint32_t parity = 0;
  for_my_tiles(list_of(smem), count, [&](const ChainMatvec& matvec, int tile) {
    mbarrier_wait(smem_u32(&smem.y_full[slot]), parity);
    store_sums(matvec, smem.y[slot], tile, lane);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_u32(&smem.y_empty[slot]));
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  });
}

__global__ void __launch_bounds__((WARPS + 2) * WARP, 1) matvec_chain(const ChainArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), WARPS);
    }
    for (int i = 0; i < SLOTS; ++i) {
      mbarrier_init(smem_u32(&smem.y_full[i]), WARPS);
      mbarrier_init(smem_u32(&smem.y_empty[i]), 1);
    }
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < args.count * static_cast<int>(sizeof(ChainMatvec) / 16); i += blockDim.x)
    reinterpret_cast<uint4*>(list_of(smem))[i] = reinterpret_cast<const uint4*>(args.list)[i];
  __syncthreads();
  if (warp == FILLS) {
    if (lane == 0) bring_weights(smem, args.count);
    return;
  }
  if (warp == SUMS) {
    add_up(smem, args.count, lane);
    return;
  }

  int stage = 0, slot = 0;
  uint32_t parity = 0, slot_parity = 1;
  uint32_t words_at = smem_u32(smem.codes[0]) + warp * HELD * UNIT_BYTES + lane * 16;
  uint32_t scales_at = smem_u32(smem.scales[0]) + warp * HELD * UNIT_SCALES + g * 4;
  uint32_t full_at = smem_u32(smem.full), x_at = smem_u32(smem.x[warp][0]), y_at = smem_u32(&smem.y[0][warp][g]);
  keep_here(words_at);
  keep_here(scales_at);
  keep_here(full_at);
  keep_here(x_at);
  keep_here(y_at);
  for (int i = 0; i < args.count; ++i) {
    const ChainMatvec& matvec = list_of(smem)[i];
    const int chunks = matvec.chunks, tiles = matvec.tiles;
    const bool active = warp * HELD < matvec.chunk_groups;
    int tile = first_tile(matvec);
    if (tile >= tiles) continue;
    float restore = 0.0f;
    if (active) restore = 0x1p126f / bring_x(matvec, x_at, warp, lane, i > 0);
    uint4 x[HELD][2][2];
    const auto load_x = [&](int chunk) {
#pragma unroll
      for (int k = 0; k < HELD * 4; ++k)
        x[k / 4][k / 2 % 2][k % 2] =
            ld_shared_v4_u32(x_at + t * 32 + chunk * (HELD * GROUP * 2) + k / 4 * 256 + k / 2 % 2 * 128 + k % 2 * 16);
    };
    if (active && chunks == 1) load_x(0);
#pragma unroll 1
    for (; tile < tiles; tile += gridDim.x) {
      float y_regs[2] = {};  // of rows g and g + 8; only lanes with t = 0 hold the column that x is in
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        mbarrier_wait(full_at + stage * 8, parity);
        uint4 words[HELD][2];
        uint32_t scales[HELD];
        if (active) {
#pragma unroll
          for (int k = 0; k < HELD; ++k) {
            const uint32_t from = words_at + stage * (CHUNK_GROUPS * UNIT_BYTES) + k * UNIT_BYTES;
            words[k][0] = ld_shared_v4_u32(from);
            words[k][1] = ld_shared_v4_u32(from + 512);
            scales[k] = ld_shared_u32(scales_at + stage * (CHUNK_GROUPS * UNIT_SCALES) + k * UNIT_SCALES);
          }
          if (chunks > 1) load_x(chunk);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full_at + (STAGES + stage) * 8);
        if (active) {
#pragma unroll
          for (int k = 0; k < HELD; ++k) {
            float sums[2][4] = {};
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                uint32_t a[2][4];
                decode(a[0], pair == 0 ? words[k][half].x : words[k][half].z);
                decode(a[1], pair == 0 ? words[k][half].y : words[k][half].w);
                mma_m16n8k16<bf16>(sums[half], a[0], x[k][half][pair].x, x[k][half][pair].y);
                mma_m16n8k16<bf16>(sums[half], a[1], x[k][half][pair].z, x[k][half][pair].w);
              }
            y_regs[0] += (sums[0][0] + sums[1][0]) * restore * __uint_as_float(scales[k] << 16);
            y_regs[1] += (sums[0][2] + sums[1][2]) * restore * __uint_as_float(scales[k] & 0xffff0000u);
          }
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      mbarrier_wait(full_at + (2 * STAGES + SLOTS + slot) * 8, slot_parity);
      if (active && t == 0) {
        st_shared_f32(y_at + slot * sizeof(smem.y[0]), y_regs[0]);
        st_shared_f32(y_at + slot * sizeof(smem.y[0]) + 32, y_regs[1]);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(full_at + (2 * STAGES + slot) * 8);
      if (++slot == SLOTS) slot = 0, slot_parity ^= 1;
    }
  }
}

extern "C" const char* launch_step(const ChainArgs* args, cudaStream_t stream) {
  const size_t smem = sizeof(Smem) + args->count * sizeof(ChainMatvec);
  return launch(matvec_chain, dim3(args->blocks), dim3((WARPS + 2) * WARP), smem, stream, *args);
}
