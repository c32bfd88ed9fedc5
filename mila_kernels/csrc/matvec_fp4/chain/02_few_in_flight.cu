// Change: no more than 50 KB of a multiprocessor are on their way at a time, in halves of a tile, however much room the ring
//   has. Words move from the ring into registers where 01 waits for the next tile, what has been seen of x is not looked at
//   again, and looks at x are 200 ns apart.
// Prediction: 01 loses 2.2 us at a border and is no faster with more stages. All that fits into the ring is asked for at once:
//   132 times 130 KB stand in line for the memory, and x, which is in the L2, seems to stand behind them. The memory needs 35
//   to 50 KB a multiprocessor to be busy. With no more than that x comes as fast as in an idle machine, and 90% of the read
//   limit are reached.
// Measured: H200, 2026-11-30, the 192 FP4 matvecs of 48 layers, reading at 4,535 GB/s, three runs with 01 (in brackets):
//   1,463, 1,528 and 1,490 us (1,649, 1,649 and 1,666): 81.1 to 84.7% (74.4 to 75.2%). With looks at x 20 ns apart, by halves
//   on their way: two 1,528, three 1,496, four 1,528, five 1,541, six 1,558, ten 1,618; four stages 1,503. Without waiting
//   for x 1,439, without products 1,342, without both 1,285. To read x that is there takes 1,130 to 1,830 clocks on average,
//   and 1,450 to 3,180 with ten halves; gate_up's x comes 2.0 us after local_o's last sum, of which the last block has 1.2 us
//   after the median. Other designs: eight warps of four groups 1,619; quarters of a tile 1,776 to 1,791, whether five or
//   ten are on their way; whole tiles, two on their way, 1,533; a thread for each half 1,570, and 1,648 with four on their
//   way; asking in even steps, at 1.0 to 1.4 times the memory's rate, 1,559 at best; bulk prefetches into L2, ten tiles ahead,
//   2,470; a rotation as a wide multiplication, or two chains of products, the same to 0.2%. The FP8 lm_head as a last
//   matvec of the same launch: 218 us for it, 234 alone, but 1,570 to 1,585 for the rest.
//   Later, 1,482 us by turns with: all weights from the L2, no waiting for x, 1,306, without products 731; with waiting 1,436,
//   without products 975. A warp's clocks a chunk, of 2,214 (by its clock): 669 for x, 143 for words, 60 for room for sums,
//   the rest products; without waiting for x 2,041, of which 230 to read x and 264 for words. A shorter loop that asks 1,504;
//   helping warps first for the scheduler 1,554, on the one with least to multiply 1,592; two or three looks at x under way
//   at a time 1,629 and 1,696.
// Verdict: Kept: 7 to 11% less than 01. Less than predicted, and short of the 93% that were the aim. What limits it is a warp's
//   own path: with weights from the L2 and x at once it still takes 1,306 us, 95% of reading, and nothing hides a border
//   behind that. Neither the rotation's pipe nor chains of products change it, so it is latency between a warp's barriers, its
//   words and its sums: 1,340 clocks a chunk where the ALU needs 770. Why a faster thread that asks makes it slower is not
//   understood; more looks at x slow it down, so fewer warps that look may help. Next: words of the next chunk in registers
//   of their own (setmaxnreg gives 112), and one block of a cluster that looks at x and passes it on.
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
constexpr int STAGES = 5, SLOTS = 4, Y_PITCH = WARPS + 4;
constexpr int PARTS = 2, PART_GROUPS = CHUNK_GROUPS / PARTS;  // of a stage; each has a barrier of its own
constexpr int FLIGHT = 3;                                     // parts that are on their way at a time
constexpr int NAP = 200;                                      // ns between looks at x
constexpr uint32_t UNIT_BYTES = TILE_ROWS * GROUP / 2, UNIT_SCALES = TILE_ROWS * sizeof(bf16);
constexpr uint32_t BF16_BITS = 0x81c081c0u, UNWRITTEN = 0xffffu;

struct Smem {
  uint64_t full[STAGES * PARTS], empty[STAGES], y_full[SLOTS], y_empty[SLOTS];
  alignas(128) unsigned char codes[STAGES][CHUNK_GROUPS * UNIT_BYTES];
  unsigned char scales[STAGES][CHUNK_GROUPS * UNIT_SCALES];
  alignas(16) bf16 x[WARPS][MAX_CHUNKS][HELD * GROUP];
  alignas(16) float y[SLOTS][TILE_ROWS][Y_PITCH];
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

// Calls f(unit's first group of all, matvec) for the units of a block, in order.
template <typename F>
DEVICE void for_my_units(const ChainMatvec* list, int count, F f) {
  for_my_tiles(list, count, [&](const ChainMatvec& matvec, int tile) {
    uint64_t unit = static_cast<uint64_t>(tile) * matvec.groups;
    for (int chunk = 0; chunk < matvec.chunks; ++chunk, unit += matvec.chunk_groups) f(matvec, unit);
  });
}

// By one thread: keeps the ring full, with FLIGHT parts at most on their way. Behind the last chunk comes one of nothing,
// which is waited for and not used.
DEVICE void bring_weights(Smem& smem, int count) {
  int asked = 0, landed = 0;
  uint32_t landed_parity = 0;
  int stage = 0;
  uint32_t parity = 1;
  for_my_units(list_of(smem), count, [&](const ChainMatvec& matvec, uint64_t unit) {
    mbarrier_wait(smem_u32(&smem.empty[stage]), parity);
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
      if (asked++ >= FLIGHT) {
        mbarrier_wait(smem_u32(&smem.full[landed]), landed_parity);
        if (++landed == STAGES * PARTS) landed = 0, landed_parity ^= 1;
      }
      const int first = part * PART_GROUPS, groups = min(PART_GROUPS, matvec.chunk_groups - first);
      const uint32_t full = smem_u32(&smem.full[stage * PARTS + part]);
      if (groups <= 0) {
        mbarrier_arrive(full);
        continue;
      }
      mbarrier_arrive_expect_tx(full, groups * (UNIT_BYTES + UNIT_SCALES));
      cp_async_bulk_g2s(smem_u32(smem.codes[stage]) + first * UNIT_BYTES, matvec.codes + (unit + first) * UNIT_BYTES,
                        groups * UNIT_BYTES, full);
      cp_async_bulk_g2s(smem_u32(smem.scales[stage]) + first * UNIT_SCALES, matvec.scales + (unit + first) * TILE_ROWS,
                        groups * UNIT_SCALES, full);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  });
  mbarrier_wait(smem_u32(&smem.empty[stage]), parity);
  for (int part = 0; part < PARTS; ++part) mbarrier_arrive(smem_u32(&smem.full[stage * PARTS + part]));
}

// Brings the warp's columns of x in, of all chunks, as soon as they are written, and gives the factor they were multiplied
// by. What is there is not looked at again.
DEVICE float bring_x(const ChainMatvec& matvec, uint32_t x_warp, int warp, int lane, bool wait) {
  constexpr int PIECES = HELD * GROUP / 8 / WARP, MOST = MAX_CHUNKS * PIECES;  // of a lane; in a chunk, and in all
  const int pieces = matvec.chunks * PIECES * WARP, chunk_columns = matvec.chunk_groups * GROUP;
  const int column = warp * HELD * GROUP + lane * 8;
  uint4 loaded[MOST] = {};
  uint32_t missing = 0;
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i / PIECES < matvec.chunks && column + i % PIECES * (WARP * 8) < chunk_columns) missing |= 1u << i;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (missing >> i & 1)
        loaded[i] = ld_relaxed_gpu_v4_u32(matvec.x + column + i / PIECES * chunk_columns + i % PIECES * (WARP * 8));
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if ((missing >> i & 1) && !(wait && unwritten(loaded[i]))) missing ^= 1u << i;
    if (!__any_sync(ALL_LANES, missing != 0)) break;
    __nanosleep(NAP);
  }
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

DEVICE void store_sums(const ChainMatvec& matvec, const float (*y)[Y_PITCH], int tile, int lane) {
  const int row = lane % TILE_ROWS;
  const float4* sums = reinterpret_cast<const float4*>(y[row] + lane / TILE_ROWS * (WARPS / 2));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS / 8; ++i) {
    const float4 part = sums[i];
    sum += (part.x + part.y) + (part.z + part.w);
  }
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
      for (int part = 0; part < PARTS; ++part) mbarrier_init(smem_u32(&smem.full[i * PARTS + part]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), WARPS);
    }
    for (int i = 0; i < SLOTS; ++i) {
      mbarrier_init(smem_u32(&smem.y_full[i]), WARPS);
      mbarrier_init(smem_u32(&smem.y_empty[i]), 1);
    }
    fence_mbarrier_init();
  }
  // Warps take words behind the last group of a chunk too, and do not use them.
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.codes) + sizeof(smem.scales)) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(smem.codes)[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async_shared();
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
  uint32_t full_at = smem_u32(&smem.full[warp / (WARPS / PARTS)]), empty_at = smem_u32(smem.empty);
  uint32_t x_at = smem_u32(smem.x[warp][0]), y_at = smem_u32(&smem.y[0][g + t % 2 * 8][warp]);
  keep_here(words_at);
  keep_here(scales_at);
  keep_here(full_at);
  keep_here(x_at);
  keep_here(y_at);
  // The words of a chunk are taken out of the ring as soon as the ones before are multiplied, where they are there by then.
  uint4 words[HELD][2], x[HELD][2][2];
  uint32_t scales[HELD];
  const auto take = [&](int k) {
    const uint32_t from = words_at + stage * (CHUNK_GROUPS * UNIT_BYTES) + k * UNIT_BYTES;
    words[k][0] = ld_shared_v4_u32(from);
    words[k][1] = ld_shared_v4_u32(from + 512);
    scales[k] = ld_shared_u32(scales_at + stage * (CHUNK_GROUPS * UNIT_SCALES) + k * UNIT_SCALES);
  };
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty_at + stage * 8);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  const auto take_all = [&] {
    mbarrier_wait(full_at + stage * (8 * PARTS), parity);
#pragma unroll
    for (int k = 0; k < HELD; ++k) take(k);
    release();
  };
  const auto load_x = [&](int chunk) {
#pragma unroll
    for (int k = 0; k < HELD * 4; ++k)
      x[k / 4][k / 2 % 2][k % 2] =
          ld_shared_v4_u32(x_at + t * 32 + chunk * (HELD * GROUP * 2) + k / 4 * 256 + k / 2 % 2 * 128 + k % 2 * 16);
  };
  float y_regs[2];  // of rows g and g + 8
  const auto multiply = [&](auto takes) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      float sums[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          uint32_t a[2][4];
          decode(a[0], pair == 0 ? words[k][half].x : words[k][half].z);
          decode(a[1], pair == 0 ? words[k][half].y : words[k][half].w);
          mma_m16n8k16<bf16>(sums, a[0], x[k][half][pair].x, x[k][half][pair].y);
          mma_m16n8k16<bf16>(sums, a[1], x[k][half][pair].z, x[k][half][pair].w);
        }
      const float upper = __uint_as_float(scales[k] << 16), lower = __uint_as_float(scales[k] & 0xffff0000u);
      if constexpr (takes()) take(k);
      y_regs[0] += sums[0] * upper;
      y_regs[1] += sums[2] * lower;
    }
  };
  take_all();
  for (int i = 0; i < args.count; ++i) {
    const ChainMatvec& matvec = list_of(smem)[i];
    const int chunks = matvec.chunks, tiles = matvec.tiles;
    const bool active = warp * HELD < matvec.chunk_groups;
    int tile = first_tile(matvec);
    if (tile >= tiles) continue;
    float restore = 0.0f;
    if (active) restore = 0x1p126f / bring_x(matvec, x_at, warp, lane, i > 0);
    if (active && chunks == 1) load_x(0);
#pragma unroll 1
    for (; tile < tiles; tile += gridDim.x) {
      y_regs[0] = y_regs[1] = 0.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const bool there = __all_sync(ALL_LANES, mbarrier_test_wait_parity(full_at + stage * (8 * PARTS), parity));
        if (active && chunks > 1) load_x(chunk);
        if (there) {
          if (active) {
            multiply(std::true_type());
          } else {
#pragma unroll
            for (int k = 0; k < HELD; ++k) take(k);
          }
          release();
        } else if (active) {
          multiply(std::false_type());
        }
        if (chunk == chunks - 1) {
          mbarrier_wait(empty_at + (STAGES + SLOTS + slot) * 8, slot_parity);
          if (t < 2) st_shared_f32(y_at + slot * sizeof(smem.y[0]), (t == 0 ? y_regs[0] : y_regs[1]) * restore);
          __syncwarp();
          if (lane == 0) mbarrier_arrive(empty_at + (STAGES + slot) * 8);
          if (++slot == SLOTS) slot = 0, slot_parity ^= 1;
        }
        if (!there) take_all();
      }
    }
  }
}

extern "C" const char* launch_step(const ChainArgs* args, cudaStream_t stream) {
  const size_t smem = sizeof(Smem) + args->count * sizeof(ChainMatvec);
  return launch(matvec_chain, dim3(args->blocks), dim3((WARPS + 2) * WARP), smem, stream, *args);
}
