// Who reads which keys when lengths differ: all tiles of the batch in one row, cut into equal parts, one a block. A block's
// part may end within one KV head's keys and go on with the next; each of its pieces gives one partial result a row.
#pragma once

#include "merge.cuh"

constexpr int MIN_TILES = 1;  // a block gets no fewer: more blocks read sooner, but leave more to merge

// One KV head (and tile of its rows) of one sequence is an item. Tiles [first, last) of it, whose result goes to
// `slot`.
struct Piece {
  int batch, item, first, last, slot;
};

// What any row of a sequence sees.
DEVICE KeyRange seen_keys(const DecodeArgs& args, int length) {
  return {visible_keys(args, length, 0).begin, visible_keys(args, length, args.q_len - 1).end};
}

DEVICE int lane_sum(int x) {
#pragma unroll
  for (int bit = WARP / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(ALL_LANES, x, bit);
  return x;
}

// The sum over the lanes up to this one.
DEVICE int running_sum(int x) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int below = __shfl_up_sync(ALL_LANES, x, distance);
    if (static_cast<int>(threadIdx.x % WARP) >= distance) x += below;
  }
  return x;
}

template <int Bc>
struct Schedule {
  const DecodeArgs& args;
  int items;         // of a sequence
  int counts, upto;  // of the first 32 sequences, one a lane: the tiles of its items, and of all up to it
  int total;         // tiles of all items
  int blocks, each, more;  // a block has `each` tiles, the first `more` blocks one more

  // `min_tiles`: a power of two. One that is not needed is not worked out.
  DEVICE explicit Schedule(const DecodeArgs& args, int min_tiles = MIN_TILES, bool needed = true)
      : args(args), items(args.kv_heads * ceil_div(row_count(args), ROWS)) {
    if (!needed) return;
    const int lane = threadIdx.x % WARP;
    if (args.batch == 1) {  // nothing to add up: every lane has it
      counts = upto = tile_count(0) * items;
    } else {
      counts = lane < args.batch ? tile_count(lane) * items : 0;
      upto = running_sum(counts);
    }
    int rest = 0;
#pragma unroll 1
    for (int batch = WARP + lane; batch < args.batch; batch += WARP) rest += tile_count(batch);
    if (args.batch > WARP) rest = lane_sum(rest);
    total = __shfl_sync(ALL_LANES, upto, WARP - 1) + rest * items;
    blocks = min((total + min_tiles - 1) >> log2_exact(min_tiles), args.blocks);
    each = blocks > 0 ? total / blocks : 0;
    more = total - each * blocks;
  }

  DEVICE KeyRange keys(int batch) const {
    return seen_keys(args, sequence_length(args, batch));
  }

  DEVICE int tile_count(int batch) const {
    const KeyRange range = keys(batch);
    return range.begin < range.end ? ceil_div(range.end, Bc) - range.begin / Bc : 0;
  }

  // The tiles [begin(b), begin(b + 1)) of the row are block b's.
  DEVICE int begin(int block) const { return block < blocks ? block * each + min(block, more) : total; }
  DEVICE int end(int block) const { return begin(block + 1); }
  DEVICE int block_of(int tile) const {
    const int longer = more * (each + 1);
    return tile < longer ? tile / (each + 1) : more + (tile - longer) / each;
  }

  // The sequence that tile x of the row belongs to, and where its tiles start.
  DEVICE int find_sequence(int x, int& start) const {
    const int lane = threadIdx.x % WARP;
    int own = counts, sum = upto;
    start = 0;
    if (args.batch == 1) return 0;
#pragma unroll 1
    for (int first = 0;; first += WARP) {
      const unsigned past = __ballot_sync(ALL_LANES, start + sum > x);
      if (past) {
        const int hit = __ffs(static_cast<int>(past)) - 1;
        start += __shfl_sync(ALL_LANES, sum - own, hit);
        return first + hit;
      }
      start += __shfl_sync(ALL_LANES, sum, WARP - 1);
      const int next = first + WARP + lane;
      own = next < args.batch ? tile_count(next) * items : 0;
      sum = running_sum(own);
    }
  }

  // Block b's piece that starts with tile x of the row, x < total, and the x of its next one.
  DEVICE Piece piece(int block, int& x) const {
    int start;
    const int batch = find_sequence(x, start);
    const KeyRange range = keys(batch);
    const int first = range.begin / Bc, count = ceil_div(range.end, Bc) - first;
    const int item = (x - start) / count, tile = x - start - item * count;
    const int size = min(end(block) - x, count - tile);
    x += size;
    // Every next piece has the next block, the next item, or both: the sum of the two numbers names it.
    return {batch, item, first + tile, first + tile + size, block + batch * items + item};
  }

  // The slots of an item's pieces: the first, and how many.
  DEVICE int2 slots(int batch, int item) const {
    const int lane = threadIdx.x % WARP, count = tile_count(batch);
    if (count == 0) return {0, 0};
    int start = __shfl_sync(ALL_LANES, upto - counts, batch % WARP);
    if (batch >= WARP) {
      start = 0;
#pragma unroll 1
      for (int i = lane; i < batch; i += WARP) start += tile_count(i);
      start = lane_sum(start) * items;
    }
    start += item * count;
    const int first = block_of(start), last = block_of(start + count - 1);
    return {first + batch * items + item, last - first + 1};
  }
};

// Block b's piece where the caller has chosen the number of splits: one, perhaps an empty one.
template <int Bc>
DEVICE Piece split_piece(const DecodeArgs& args, int block, int& x) {
  ++x;
  const int items = args.kv_heads * ceil_div(row_count(args), ROWS), item = block / args.splits;
  const int batch = item / items, split = block - item * args.splits;
  const KeyRange keys = seen_keys(args, sequence_length(args, batch));
  const int first = keys.begin / Bc, count = keys.begin < keys.end ? ceil_div(keys.end, Bc) - first : 0;
  const int each = count / args.splits, more = count - each * args.splits;
  const int begin = first + split * each + min(split, more);
  return {batch, item - batch * items, begin, begin + each + (split < more), block};
}

// Row r of slot s is row s * slot_rows + r of the workspace.
DEVICE int slot_rows(const DecodeArgs& args) { return min(row_count(args), ROWS); }

// EARLY: the next call's blocks may take the place of those that have read; they wait for the merge to end.
template <int HS, int Bc, bool EARLY = false>
__global__ void __launch_bounds__(MERGE_WARPS* WARP) merge_pieces(const DecodeArgs args) {
  if constexpr (EARLY) griddepcontrol_launch_dependents();
  const int token = blockIdx.y / args.q_heads, head = blockIdx.y % args.q_heads, batch = blockIdx.z;
  const int kv_head = head / args.group, row = token * args.group + head % args.group;
  const int item = kv_head * ceil_div(row_count(args), ROWS) + row / ROWS;
  const Schedule<Bc> schedule(args);
  const int2 slots = args.automatic ? schedule.slots(batch, item)
                                    : int2{(batch * schedule.items + item) * args.splits, args.splits};
  griddepcontrol_wait();  // nothing to wait for where the launch is an ordinary one
  const int rows = slot_rows(args);
  merge_row<HS>(args, batch, token, head, {static_cast<int64_t>(slots.x) * rows + row % ROWS, rows, slots.y});
}

inline int item_count(const DecodeArgs& args) {
  return args.batch * args.kv_heads * ceil_div(args.q_len * args.group, ROWS);
}

// A block a split where the caller has chosen them, else as many as fill the device.
inline int schedule_grid(const DecodeArgs& args) { return args.automatic ? args.blocks : item_count(args) * args.splits; }
