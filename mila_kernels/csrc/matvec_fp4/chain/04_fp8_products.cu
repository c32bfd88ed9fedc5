// Change: products on the FP8 tensor cores, exactly. E2M1 placed in a byte is E4M3, and x is a sum of three E5M2,
//   which are three columns of a wgmma. A warpgroup has one tile of 16 rows and four slices of its K, a warp each; x
//   of a chunk lies in shared memory as the warpgroup's b. Twelve halves of a tile in the ring.
// Prediction: decoding takes half the instructions and no x is loaded, so that a warp's path is two thirds of the
//   memory's time instead of as long. A block then catches up behind a border, and with a ring of 200 KB the memory
//   goes on while x is waited for: 93% of reading.
// Measured: H200, 2026-11-30, the 192 FP4 matvecs of 48 layers, reading at 4,535 GB/s, with 02 by turns (in
//   brackets): 1,312 to 1,320 us (1,472 to 1,477): 93.9 to 94.5% (84.0%). With the FP8 lm_head, 232 us alone, 1,540
//   to 1,548 us (1,692 to 1,697): 94.9% (86.4%); recorded 1,555 to 1,564, on machines that read at 4,563 to 4,567:
//   92.9 to 93.4%. Without the ring and without waiting for x a warp's path is 970 us. Prototypes, in runs where 02
//   took 1,457 to 1,519: x in an order in which threads that store it meet in their banks, between two barriers,
//   1,508 to 1,530, as 970 clocks went to placing a chunk of it; then, with three halves on their way, 1,356, two
//   1,427, four 1,411, five 1,455, though without waiting for x four take 1,282 and three 1,313. Fewer on their way
//   near borders only 1,385 to 1,403, quarters of a tile 1,538 to 1,586, a warp of its own that asks for scales 1,349
//   where the rest took 1,359. A chunk of x for two tiles at a time, or x fetched early where it is written by then,
//   1,339 where neither took 1,322. The next words in registers while the ones before are multiplied 1,599, and one
//   lane that looks for its warp 1,947. Tiles that a block claims from a counter when it has asked for the one before
//   1,620. BF16 products on words in registers, two blocks a multiprocessor and no ring, 1,739 to 2,000, without
//   waiting 1,517. The lm_head as a programmatic dependent launch that loads its first weights before it waits 1,545
//   to 1,549 where it took 1,542 without.
// Verdict: Kept: 11% less than 02, and the 93% that 01 was made for. A border still costs x's way from the slowest
//   block to all others; the ring hides it now, because between borders a block multiplies faster than the memory
//   reads. What is left is the memory with 50 KB a multiprocessor on their way, 94 to 96% without waiting; with more,
//   x comes later.
// Architectures: sm_90a
#include "../../hopper.cuh"
#include "../args.cuh"

// Mirrored by ChainMatvec in mila_kernels/token_chain.py. A tile's groups are read in `chunks` parts of `chunk_groups`.
struct ChainMatvec {
  const uint8_t* codes;  // LAYOUT_BYTES
  const bf16* scales;
  const bf16* x;
  bf16* y;
  int32_t tiles, groups, chunk_groups, chunks;
  int32_t first;  // which block takes the first tile
  int32_t unused[3];
};

// The list is in device memory. The first x is whole; each other one is the y of the matvec before, all 0xffff at the start.
struct ChainArgs {
  const ChainMatvec* list;
  int32_t count, blocks;
};

// The same in shared memory.
struct Matvec {
  const uint8_t* codes;
  const bf16* scales;
  bf16* y;
  uint16_t tiles, first;
  uint8_t groups, chunk_groups, chunks;
};

constexpr int CHUNK_GROUPS = 32, MAX_CHUNKS = 4, PARTS = 2, PART_GROUPS = CHUNK_GROUPS / PARTS;
constexpr int TEAMS = 4, TEAM = 128, WARPS = 4 * TEAMS;  // warpgroups that multiply
constexpr int FILLS = WARPS, SUMS = WARPS + 1;           // two more warps: one asks for weights, one adds up
constexpr int SLICES = 4, TEAM_GROUPS = CHUNK_GROUPS / TEAMS, SETS = TEAM_GROUPS / SLICES;
constexpr int RING = 12, FLIGHT = 3;  // parts: for which there is room, and that are on their way at a time
constexpr int SLOTS = 2, Y_PITCH = WARPS + 4, NAP = 200;  // ns between looks at x
constexpr uint32_t UNIT_BYTES = TILE_ROWS * GROUP / 2, UNIT_SCALES = TILE_ROWS * sizeof(bf16);
constexpr uint32_t E4M3_BITS = 0x9c9c9c9cu, UNWRITTEN = 0xffffu;
// b of a wgmma: 16 rows, four of each slice (its terms, and one that nobody needs), in two core matrices of 8; 16 bytes
// between columns 0-15 and 16-31 keep threads that store eight columns each out of each other's banks.
constexpr int N = 4 * SLICES;
constexpr uint32_t K16_BYTES = 16 * N + 16, K32_BYTES = 2 * K16_BYTES, SET_BYTES = GROUP / 32 * K32_BYTES;

struct Smem {
  uint64_t full[RING], empty[RING], y_full[SLOTS], y_empty[SLOTS];
  alignas(128) unsigned char codes[RING][PART_GROUPS * UNIT_BYTES];
  unsigned char scales[RING][PART_GROUPS * UNIT_SCALES];
  alignas(128) unsigned char x[TEAMS * SETS][SET_BYTES];
  float restore[CHUNK_GROUPS];
  alignas(16) float y[SLOTS][TILE_ROWS][Y_PITCH];
};

// Behind the rest of the shared memory.
DEVICE Matvec* list_of(Smem& smem) { return reinterpret_cast<Matvec*>(&smem + 1); }

// Two words make the warp's 16 x 32 of a: a code's sign, exponent and mantissa stand where E4M3 has them, a 64th of it.
DEVICE void decode(uint32_t (&a)[4], uint32_t first, uint32_t second) {
  a[0] = first & E4M3_BITS;
  a[1] = (first >> 2 ^ first << 2) & E4M3_BITS;
  a[2] = second & E4M3_BITS;
  a[3] = (second >> 2 ^ second << 2) & E4M3_BITS;
}

DEVICE bool unwritten(const uint4& x) {
  const auto either = [](uint32_t pair) { return (pair & 0xffffu) == UNWRITTEN || pair >> 16 == UNWRITTEN; };
  return either(x.x) || either(x.y) || either(x.z) || either(x.w);
}

DEVICE int first_tile(const Matvec& matvec) {
  const int tile = static_cast<int>(blockIdx.x) - matvec.first;
  return tile < 0 ? tile + static_cast<int>(gridDim.x) : tile;
}

// Calls f(matvec, unit's first group of all, groups) for the parts of a block, in order.
template <typename F>
DEVICE void for_my_parts(Smem& smem, int count, F f) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Matvec matvec = list_of(smem)[i];
#pragma unroll 1
    for (int tile = first_tile(matvec); tile < matvec.tiles; tile += gridDim.x) {
      uint64_t unit = static_cast<uint64_t>(tile) * matvec.groups;
#pragma unroll 1
      for (int chunk = 0; chunk < matvec.chunks; ++chunk, unit += matvec.chunk_groups) {
#pragma unroll 1
        for (int first = 0; first < CHUNK_GROUPS; first += PART_GROUPS)
          f(matvec, unit + first, min(PART_GROUPS, matvec.chunk_groups - first));
      }
    }
  }
}

// By one thread: keeps the ring full, with FLIGHT parts at most on their way.
DEVICE void bring_weights(Smem& smem, int count) {
  int slot = 0, landed = 0, before = FLIGHT;
  uint32_t parity = 1, landed_parity = 0;
  for_my_parts(smem, count, [&](const Matvec& matvec, uint64_t unit, int groups) {
    mbarrier_wait(smem_u32(&smem.empty[slot]), parity);
    if (before > 0) {
      --before;
    } else {
      mbarrier_wait(smem_u32(&smem.full[landed]), landed_parity);
      if (++landed == RING) landed = 0, landed_parity ^= 1;
    }
    const uint32_t full = smem_u32(&smem.full[slot]);
    if (groups > 0) {
      mbarrier_arrive_expect_tx(full, groups * (UNIT_BYTES + UNIT_SCALES));
      cp_async_bulk_g2s(smem_u32(smem.codes[slot]), matvec.codes + unit * UNIT_BYTES, groups * UNIT_BYTES, full);
      cp_async_bulk_g2s(smem_u32(smem.scales[slot]), matvec.scales + unit * TILE_ROWS, groups * UNIT_SCALES, full);
    } else {
      mbarrier_arrive(full);
    }
    if (++slot == RING) slot = 0, parity ^= 1;
  });
}

// A thread's eight columns of each chunk of x.
struct Columns {
  const bf16* from;
  int pitch;
  uint4 loaded[MAX_CHUNKS];

  DEVICE void begin(const bf16* x, const Matvec& matvec, int column) {
    from = x + column;
    pitch = matvec.chunk_groups * GROUP;
#pragma unroll
    for (int i = 0; i < MAX_CHUNKS; ++i) {
      loaded[i] = make_uint4(0, 0, 0, 0);
      if (i < matvec.chunks && column < pitch) loaded[i] = ld_relaxed_gpu_v4_u32(from + i * pitch);
    }
  }

  // Those of a chunk as soon as the whole warp's are written; what is there is not looked at again.
  DEVICE uint4 await(int chunk, bool wait) {
    uint4 x;
#pragma unroll
    for (int i = 0; i < MAX_CHUNKS; ++i) {
      if (i != chunk) continue;
#pragma unroll 1
      for (;;) {
        const bool missing = wait && unwritten(loaded[i]);
        if (!__any_sync(ALL_LANES, missing)) break;
        __nanosleep(NAP);
        if (missing) loaded[i] = ld_relaxed_gpu_v4_u32(from + i * pitch);
      }
      x = loaded[i];
    }
    return x;
  }
};

// Eight columns a lane, times a power of two, as sums of three E5M2: in the rows of b at `hi`, the next, and eight further.
// Gives what undoes the power, and E4M3's 2^-6 for a weight. A term is the upper byte of FP16, which holds BF16 exactly
// down to 2^-24 of the warp's largest. Where that is infinite or NaN the first term says so alone.
DEVICE float store_terms(unsigned char* hi, const uint4& x) {
  const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, max(pairs[i] << 16 & 0x7fffffffu, pairs[i] & 0x7fff0000u));
  const uint32_t exponent = __reduce_max_sync(ALL_LANES, largest) >> 23, power = min(268 - exponent, 253u);
  const uint32_t rest = exponent == 255 ? 0 : 0xff00ff00u;
  const float factor = __uint_as_float(power << 23);
  const auto minus = [](uint32_t a, uint32_t b) {
    const __half2 difference = __hsub2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(difference);
  };
  uint32_t terms[3][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __uint_as_float(pairs[i] << 16), high = __uint_as_float(pairs[i] & 0xffff0000u);
    const uint32_t both = cvt_rn_f16x2_f32(high * factor, low * factor);
    terms[0][i] = both & 0xff00ff00u;
    const uint32_t without = minus(both, terms[0][i]);
    terms[1][i] = without & rest;
    terms[2][i] = minus(without, terms[1][i]) & rest;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i)
    *reinterpret_cast<uint2*>(hi + (i < 2 ? i * 16 : 128)) =
        make_uint2(prmt(terms[i][0], terms[i][1], 0x7531), prmt(terms[i][2], terms[i][3], 0x7531));
  return __uint_as_float((260 - power) << 23);
}

// The team's columns of a chunk become b.
DEVICE void place_x(Smem& smem, const uint4& x, int team, int thread) {
  const int group = thread / 16, k8 = thread % 16;
  const int at = k8 / 2 * K16_BYTES + group % SLICES * 32 + k8 % 2 * 8;
  const float restore = store_terms(smem.x[team * SETS + group / SLICES] + at, x);
  if (k8 == 0) smem.restore[team * TEAM_GROUPS + group] = restore;
  fence_proxy_async_shared();
  bar_sync(1 + team, TEAM);
}

DEVICE void store_sums(const Matvec& matvec, const float (*y)[Y_PITCH], int tile, int lane) {
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
  for (int i = 0; i < count; ++i) {
    const Matvec& matvec = list_of(smem)[i];
    for (int tile = first_tile(matvec); tile < matvec.tiles; tile += gridDim.x) {
      mbarrier_wait(smem_u32(&smem.y_full[slot]), parity);
      store_sums(matvec, smem.y[slot], tile, lane);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_u32(&smem.y_empty[slot]));
      if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
  }
}

__global__ void __launch_bounds__((WARPS + 2) * WARP, 1) matvec_chain(const ChainArgs args) {
  Smem& smem = dynamic_smem<Smem>();
  // The compiler has to see that a warp does not part before it lets wgmma run.
  const int lane = threadIdx.x % WARP, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), g = lane / 4, t = lane % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; ++i) {
      mbarrier_init(smem_u32(&smem.full[i]), 1);
      mbarrier_init(smem_u32(&smem.empty[i]), WARPS / PARTS);
    }
    for (int i = 0; i < SLOTS; ++i) {
      mbarrier_init(smem_u32(&smem.y_full[i]), WARPS);
      mbarrier_init(smem_u32(&smem.y_empty[i]), 1);
    }
    fence_mbarrier_init();
  }
  // Words behind the last group of a chunk, and the rows of b that nobody needs, are multiplied too.
  constexpr int MULTIPLIED = sizeof(smem.codes) + sizeof(smem.scales) + sizeof(smem.x);
  static_assert(sizeof(smem.scales) % 128 == 0);
  for (int i = threadIdx.x; i < MULTIPLIED / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(smem.codes)[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async_shared();
  for (int i = threadIdx.x; i < args.count; i += blockDim.x) {
    const ChainMatvec& from = args.list[i];
    list_of(smem)[i] = {from.codes,
                        from.scales,
                        from.y,
                        static_cast<uint16_t>(from.tiles),
                        static_cast<uint16_t>(from.first),
                        static_cast<uint8_t>(from.groups),
                        static_cast<uint8_t>(from.chunk_groups),
                        static_cast<uint8_t>(from.chunks)};
  }
  __syncthreads();
  if (warp == FILLS) {
    if (lane == 0) bring_weights(smem, args.count);
    return;
  }
  if (warp == SUMS) {
    add_up(smem, args.count, lane);
    return;
  }

  const int team = warp / 4, slice = warp % 4, thread = threadIdx.x % TEAM, grid = gridDim.x;
  const int column = team * TEAM_GROUPS * GROUP + thread * 8;
  int part = team / (TEAMS / PARTS), slot = 0;
  uint32_t parity = 0, slot_parity = 1;
  uint32_t words_at = smem_u32(smem.codes[0]) + (team % (TEAMS / PARTS) * TEAM_GROUPS + slice) * UNIT_BYTES + lane * 16;
  uint32_t scales_at = smem_u32(smem.scales[0]) + (team % (TEAMS / PARTS) * TEAM_GROUPS + slice) * UNIT_SCALES + g * 4;
  uint32_t restore_at = smem_u32(&smem.restore[team * TEAM_GROUPS + slice]);
  uint32_t full_at = smem_u32(smem.full), y_at = smem_u32(&smem.y[0][g][warp]);
  keep_here(words_at);
  keep_here(scales_at);
  keep_here(restore_at);
  keep_here(full_at);
  keep_here(y_at);
  const uint64_t b = wgmma_descriptor(smem_u32(smem.x[team * SETS]), K16_BYTES, 128, Swizzle::none);
  uint4 words[SETS][2];
  uint32_t scales[SETS], a[SETS][4][4];
  float d[SETS][N / 2], scale[SETS][2];
  const auto take = [&] {
    mbarrier_wait(full_at + part * 8, parity);
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      const uint32_t from = words_at + part * (PART_GROUPS * UNIT_BYTES) + set * (SLICES * UNIT_BYTES);
      words[set][0] = ld_shared_v4_u32(from);
      words[set][1] = ld_shared_v4_u32(from + 512);
      scales[set] = ld_shared_u32(scales_at + part * (PART_GROUPS * UNIT_SCALES) + set * (SLICES * UNIT_SCALES));
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full_at + (RING + part) * 8);
    part += PARTS;
    if (part >= RING) part -= RING, parity ^= 1;
  };
  const auto decode_set = [&](int set) {
    decode(a[set][0], words[set][0].x, words[set][0].y);
    decode(a[set][1], words[set][0].z, words[set][0].w);
    decode(a[set][2], words[set][1].x, words[set][1].y);
    decode(a[set][3], words[set][1].z, words[set][1].w);
#pragma unroll
    for (int j = 0; j < 16; ++j) keep_here(a[set][j / 4][j % 4]);
  };
  const auto multiply = [&](int set) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wgmma_k32_e4m3_e5m2<N>(d[set], a[set][j], wgmma_advance(b, set * SET_BYTES + j * K32_BYTES), j > 0);
    wgmma_commit_group();
  };
  // Of rows g and g + 8, in the lanes with t == slice.
  float y[2] = {};
  const auto promote = [&](int set) {
    y[0] += (d[set][0] + d[set][1] + d[set][4]) * scale[set][0];
    y[1] += (d[set][2] + d[set][3] + d[set][6]) * scale[set][1];
  };
  const auto hand_over = [&] {
    mbarrier_wait(full_at + (2 * RING + SLOTS + slot) * 8, slot_parity);
    if (t == slice) {
      st_shared_f32(y_at + slot * sizeof(smem.y[0]), y[0]);
      st_shared_f32(y_at + slot * sizeof(smem.y[0]) + sizeof(smem.y[0][0]) * 8, y[1]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full_at + (2 * RING + slot) * 8);
    if (++slot == SLOTS) slot = 0, slot_parity ^= 1;
    y[0] = y[1] = 0.0f;
  };
  Columns columns;
  for (int i = 0; i < args.count; ++i) {
    const Matvec& matvec = list_of(smem)[i];
    const int chunks = matvec.chunks, tiles = matvec.tiles;
    int tile = first_tile(matvec), place = 1;
    if (tile >= tiles) continue;
    columns.begin(i == 0 ? args.list[0].x : list_of(smem)[i - 1].y, matvec, column);
#pragma unroll 1
    for (; tile < tiles; tile += grid) {
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        take();
        decode_set(0);
        if (place) {
          bar_sync(1 + team, TEAM);  // nobody multiplies with what was there any more
          place_x(smem, columns.await(chunk, i > 0), team, thread);
          place = chunks > 1;
        }
        multiply(0);
        decode_set(1);
        multiply(1);
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
          const float restore = __uint_as_float(ld_shared_u32(restore_at + set * (SLICES * 4)));
          scale[set][0] = __uint_as_float(scales[set] << 16) * restore;
          scale[set][1] = __uint_as_float(scales[set] & 0xffff0000u) * restore;
        }
        wgmma_wait_group<1>();
        promote(0);
        wgmma_wait_group<0>();
        promote(1);
        if (chunk == chunks - 1) hand_over();
      }
    }
  }
}

extern "C" const char* launch_step(const ChainArgs* args, cudaStream_t stream) {
  const size_t smem = sizeof(Smem) + args->count * sizeof(Matvec);
  return launch(matvec_chain, dim3(args->blocks), dim3((WARPS + 2) * WARP), smem, stream, *args);
}
