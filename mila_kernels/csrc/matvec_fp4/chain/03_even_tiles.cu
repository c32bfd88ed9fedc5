// Change: tiles are dealt so that work comes out even between two borders at which all of x is waited for: a block with a
//   tile more of gate_up has one less of fc_down. x of matvecs that need only the first part of the outputs before them
//   (local_o, global_o, fc_down) is fetched during the last tiles of the one before.
// Prediction: the block with most work has 5.3% more than the mean in 02, and 1.7% this way. x that is there already costs
//   1,600 clocks a matvec, half of the borders: together 3 to 5%.
// Measured: H200, 2026-11-30, the 192 FP4 matvecs of 48 layers, three runs each with 02 (in brackets) by turns: 1,514, 1,513
//   and 1,517 us (1,481, 1,480, 1,480): 81.8% of reading (83.7%). Prototypes without the early x in another run, where 02 took
//   1,482: 1,501; with the two helping warps in front, where the scheduler takes them first, 1,483, and so with tiles dealt as
//   in 02 1,501, even within each matvec alone 1,483, two halves on their way 1,478, four 1,566, five 1,621, ten 1,693, four
//   stages 1,497, looks at x 20 ns apart 1,504, without waiting for x 1,424.
// Verdict: Slower by 2%. Even tiles gain 1.2%; the shorter code that asks loses as much, as every faster one did; x fetched
//   early costs 1% more. Borders wait for x to come, not for the block with most tiles.
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
  int32_t first;  // not used: see the schedule
  int32_t early;  // whether x is written long before its turn comes
  int32_t unused[2];
};

// In device memory. The first x is whole; each other one is the y of a matvec before, all 0xffff at the start. A block's row
// of the schedule: how many tiles it has of each matvec, up to the next multiple of eight, then which, in order.
struct ChainArgs {
  const ChainMatvec* list;
  int32_t count, blocks;
  const uint16_t* schedule;
  int32_t pitch;
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

DEVICE const uint16_t* schedule_of(Smem& smem, int count) {
  return reinterpret_cast<const uint16_t*>(list_of(smem) + count);
}

DEVICE int behind_counts(int count) { return (count + 7) / 8 * 8; }

// Calls f(matvec, tile) for the tiles of a block, in order.
template <typename F>
DEVICE void for_my_tiles(Smem& smem, int count, F f) {
  const uint16_t* counts = schedule_of(smem, count);
  const uint16_t* tile = counts + behind_counts(count);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const ChainMatvec matvec = list_of(smem)[i];
#pragma unroll 1
    for (int left = counts[i]; left > 0; --left) f(matvec, *tile++);
  }
}

// By one thread: keeps the ring full, with FLIGHT parts at most on their way. Behind the last chunk comes one of nothing,
// which is waited for and not used.
DEVICE void bring_weights(Smem& smem, int count) {
  const uint32_t full_at = smem_u32(smem.full), empty_at = smem_u32(smem.empty);
  const uint32_t codes_at = smem_u32(smem.codes), scales_at = smem_u32(smem.scales);
  int stage = 0, before = FLIGHT, landed = 0;
  uint32_t parity = 1, landed_parity = 0;
  for_my_tiles(smem, count, [&](const ChainMatvec& matvec, int tile) {
    const uint64_t unit = static_cast<uint64_t>(tile) * matvec.groups;
    const uint8_t* codes = matvec.codes + unit * UNIT_BYTES;
    const bf16* scales = matvec.scales + unit * TILE_ROWS;
#pragma unroll 1
    for (int chunk = 0; chunk < matvec.chunks; ++chunk) {
      mbarrier_wait(empty_at + stage * 8, parity);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (before > 0) {
          --before;
        } else {
          mbarrier_wait(full_at + landed * 8, landed_parity);
          if (++landed == STAGES * PARTS) landed = 0, landed_parity ^= 1;
        }
        constexpr uint32_t PART_BYTES = PART_GROUPS * UNIT_BYTES, PART_SCALES = PART_GROUPS * UNIT_SCALES;
        const int groups = min(PART_GROUPS, matvec.chunk_groups - part * PART_GROUPS);
        const uint32_t full = full_at + (stage * PARTS + part) * 8;
        if (groups <= 0) {
          mbarrier_arrive(full);
          continue;
        }
        mbarrier_arrive_expect_tx(full, groups * (UNIT_BYTES + UNIT_SCALES));
        cp_async_bulk_g2s(codes_at + (stage * PARTS + part) * PART_BYTES, codes + part * PART_BYTES, groups * UNIT_BYTES,
                          full);
        cp_async_bulk_g2s(scales_at + (stage * PARTS + part) * PART_SCALES, scales + part * (PART_GROUPS * TILE_ROWS),
                          groups * UNIT_SCALES, full);
      }
      codes += matvec.chunk_groups * UNIT_BYTES;
      scales += matvec.chunk_groups * TILE_ROWS;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  });
  mbarrier_wait(empty_at + stage * 8, parity);
  for (int part = 0; part < PARTS; ++part) mbarrier_arrive(full_at + (stage * PARTS + part) * 8);
}

// Brings the warp's columns of x in, of all chunks, as soon as they are written, and gives the factor they were multiplied
// by. What is there is not looked at again; the pieces from `first_here` on were fetched before.
DEVICE float bring_x(const ChainMatvec& matvec, uint32_t x_warp, int warp, int lane, bool wait, int first_here) {
  constexpr int PIECES = HELD * GROUP / 8 / WARP, MOST = MAX_CHUNKS * PIECES;  // of a lane; in a chunk, and in all
  const int pieces = matvec.chunks * PIECES * WARP, chunk_columns = matvec.chunk_groups * GROUP;
  const int column = warp * HELD * GROUP + lane * 8;
  uint4 loaded[MOST] = {};
  uint32_t missing = 0;
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (i / PIECES < matvec.chunks && column + i % PIECES * (WARP * 8) < chunk_columns) {
      missing |= 1u << i;
      if (i >= first_here) {
        loaded[i] = ld_shared_v4_u32(x_warp + (i * WARP + lane) * 16);
        if (!unwritten(loaded[i])) missing ^= 1u << i;
      }
    }
#pragma unroll 1
  while (__any_sync(ALL_LANES, missing != 0)) {
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
  for_my_tiles(smem, count, [&](const ChainMatvec& matvec, int tile) {
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
  for (int i = threadIdx.x; i < args.pitch / 8; i += blockDim.x)
    reinterpret_cast<uint4*>(list_of(smem) + args.count)[i] =
        reinterpret_cast<const uint4*>(args.schedule + blockIdx.x * args.pitch)[i];
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
  const uint16_t* counts = schedule_of(smem, args.count);
  int first_here = 1 << 20;
  for (int i = 0; i < args.count; ++i) {
    const ChainMatvec& matvec = list_of(smem)[i];
    const int chunks = matvec.chunks;
    int left = counts[i];
    const bool active = warp * HELD < matvec.chunk_groups;
    if (left == 0) {
      first_here = 1 << 20;
      continue;
    }
    float restore = 0.0f;
    if (active) restore = 0x1p126f / bring_x(matvec, x_at, warp, lane, i > 0, first_here);
    if (active && chunks == 1) load_x(0);
    // The next x, if it is written by now, comes during the last tiles, a piece a tile, to where this one was.
    constexpr int PIECES = HELD * GROUP / 8 / WARP;
    const bool has_next = chunks == 1 && i + 1 < args.count;
    const int early = has_next && list_of(smem)[i + 1].early ? list_of(smem)[i + 1].chunks * PIECES : 0;
    first_here = early > 0 ? early - min(early, left) : 1 << 20;
    const bf16* early_from = list_of(smem)[has_next ? i + 1 : i].x + warp * HELD * GROUP + lane * 8;
#pragma unroll 1
    for (; left > 0; --left) {
      y_regs[0] = y_regs[1] = 0.0f;
      const int piece = early - left;
      uint4 ahead = make_uint4(~0u, ~0u, ~0u, ~0u);
      if (piece >= 0) {
        const int next_groups = list_of(smem)[i + 1].chunk_groups, within = piece % PIECES * (WARP * 8);
        if (warp * HELD * GROUP + lane * 8 + within < next_groups * GROUP)
          ahead = ld_relaxed_gpu_v4_u32(early_from + piece / PIECES * next_groups * GROUP + within);
      }
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
      if (piece >= 0) st_shared_v4_u32(x_at + (piece * WARP + lane) * 16, ahead);
    }
  }
}

extern "C" const char* launch_step(const ChainArgs* args, cudaStream_t stream) {
  const size_t smem = sizeof(Smem) + args->count * sizeof(ChainMatvec) + args->pitch * sizeof(uint16_t);
  return launch(matvec_chain, dim3(args->blocks), dim3((WARPS + 2) * WARP), smem, stream, *args);
}
