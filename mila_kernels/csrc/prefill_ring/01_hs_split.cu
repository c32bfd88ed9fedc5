// Change: the head dim split over 8 warps, as at head dim 512 (prefill/08_ldmatrix), with ring addressing: the block
//   walks positions, and a row is read from slot position % capacity.
// Prediction: the modulus is one comparison a row. At head dim 256 a warp has only 32 columns, so the barriers and the
//   sum of the partial scores weigh twice what they do at 512.
// Measured: H200, 2026-11-29, prefill_ring/d256-16x8-w1024-n8192: 1,794 us, 72 TFLOP/s; n32768: 7,336 us; error 2.1e-3
//   against float64. Counters: tensor cores work 12% of the time, and 68% of the clocks issue an instruction: 1,136
//   million of them, where step 02 needs 156.
// Verdict: Kept: it takes head dim 512 too, and it is what the rows' split is measured against.
// Head dims: 64 128 256 512
// Alignment: 16
#include "../ptx.cuh"
#include "args.cuh"

constexpr int Br = 16;  // query rows a block
constexpr int Bc = 32;  // keys a tile
constexpr int PAD = 8;  // elements after each row: 16-bit rows then start 4 banks apart

template <int HS>
constexpr int WARPS = HS / 16 < 8 ? HS / 16 : 8;  // a warp owns at least the 16 columns of a fragment

template <typename T, int HS>
struct Smem {
  T k[Bc][HS + PAD];
  T v[Bc][HS + PAD];  // before the first tile, Q
  float s_part[WARPS<HS>][Br][Bc + PAD];  // what each warp's columns contribute to the scores
  T p[Br][Bc + PAD];
  float row_sum[Br], rescale[Br];
};

// Starts the copy of the rows from `first` on, of a ring of `capacity` rows, and of zeros after `count` rows: 0 times
// what was there must be 0. One group.
template <typename T, int HS>
DEVICE void load_tile_async(T (&tile)[Bc][HS + PAD], const void* base, const int64_t (&stride)[3], int batch, int first,
                            int head, int count, int capacity) {
  constexpr int VECTORS = HS / 8;  // of 16 bytes, in a row
  for (int i = threadIdx.x; i < Bc * VECTORS; i += blockDim.x) {
    const int j = i / VECTORS, column = i % VECTORS * 8;
    const int slot = first + min(j, count - 1);
    const T* source = row<T>(base, stride, batch, slot < capacity ? slot : slot - capacity, head) + column;
    cp_async_cg_zfill(smem_u32(&tile[j][column]), source, j < count ? 16 : 0);
  }
  cp_async_commit_group();
}

// The lane's row and column of a 16 x 16 tile for ldmatrix.x4: matrices 0 and 1 are rows 0-7 and 8-15 of columns 0-7,
// matrices 2 and 3 those of columns 8-15. That is the A fragment. As B, keys in rows, registers 0 and 2 are the first 8
// keys; transposed, keys in the columns of the product, registers 0 and 1 are the first 8 columns.
DEVICE int tile_row() { return threadIdx.x % 16; }
DEVICE int tile_column() { return threadIdx.x % WARP / 16 * 8; }

template <typename T, int HS>
__global__ void __launch_bounds__(WARPS<HS>* WARP, 2) prefill_ring_hs_split(const PrefillRingArgs args) {
  constexpr int COLUMNS = HS / WARPS<HS>;  // of the head dim, a warp
  constexpr int ROWS = Br / WARPS<HS> / 2;  // of the softmax, half a warp
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first_column = warp * COLUMNS;
  const int g = lane / 4, t = lane % 4;  // an accumulator holds rows g and g + 8, columns 2t and 2t + 1
  const int first_query = blockIdx.x * Br, rows = min(Br, args.q_len - first_query);
  const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / (args.q_heads / args.kv_heads);
  Smem<T, HS>& smem = dynamic_smem<Smem<T, HS>>();

  const int position = first_position(args, batch) + first_query;
  const KeyRange block_keys = {visible_positions(args, position).begin,
                               visible_positions(args, position + rows - 1).end};
  load_tile_async<T, HS>(smem.v, args.q, args.q_stride, batch, first_query, head, rows, args.q_len);
  if (block_keys.begin < block_keys.end)
    load_tile_async<T, HS>(smem.k, args.k, args.k_stride, batch, block_keys.begin % args.capacity, kv_head,
                           min(Bc, block_keys.end - block_keys.begin), args.capacity);
  cp_async_wait_all();
  __syncthreads();
  uint32_t q_regs[COLUMNS / 16][4];
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k)
    ldmatrix_x4(q_regs[k], smem_u32(&smem.v[tile_row()][first_column + k * 16 + tile_column()]));

  float o_regs[COLUMNS / 8][4] = {};
  float row_max[ROWS], row_sum[ROWS];  // of the rows whose softmax this lane shares
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    row_max[i] = -INFINITY;
    row_sum[i] = 0.0f;
  }

  for (int tile = block_keys.begin; tile < block_keys.end; tile += Bc) {
    cp_async_wait_all();
    __syncthreads();  // K is there, and the last tile of V, or Q, has been read
    load_tile_async<T, HS>(smem.v, args.v, args.v_stride, batch, tile % args.capacity, kv_head,
                           min(Bc, block_keys.end - tile), args.capacity);

#pragma unroll
    for (int n = 0; n < Bc; n += 16) {
      float s_regs[2][4] = {};  // keys n to n + 7, and n + 8 to n + 15
#pragma unroll
      for (int k = 0; k < COLUMNS / 16; ++k) {
        uint32_t k_regs[4];
        ldmatrix_x4(k_regs, smem_u32(&smem.k[n + tile_row()][first_column + k * 16 + tile_column()]));
        mma_m16n8k16<T>(s_regs[0], q_regs[k], k_regs[0], k_regs[2]);
        mma_m16n8k16<T>(s_regs[1], q_regs[k], k_regs[1], k_regs[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = n + 8 * half + 2 * t;
        *reinterpret_cast<float2*>(&smem.s_part[warp][g][j]) = make_float2(s_regs[half][0], s_regs[half][1]);
        *reinterpret_cast<float2*>(&smem.s_part[warp][g + 8][j]) = make_float2(s_regs[half][2], s_regs[half][3]);
      }
    }
    __syncthreads();  // all scores are there, and K has been read

    const int next = tile + Bc;
    if (next < block_keys.end)
      load_tile_async<T, HS>(smem.k, args.k, args.k_stride, batch, next % args.capacity, kv_head,
                             min(Bc, block_keys.end - next), args.capacity);
    else
      cp_async_commit_group();  // an empty one, so that V is always the last but one

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = warp * 2 * ROWS + 2 * i + lane / 16, j = lane % 16 * 2;
      const KeyRange keys = r < rows ? visible_positions(args, position + r) : KeyRange{0, 0};
      float scores[2] = {};
#pragma unroll
      for (int w = 0; w < WARPS<HS>; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(&smem.s_part[w][r][j]);
        scores[0] += part.x;
        scores[1] += part.y;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e)
        scores[e] = tile + j + e >= keys.begin && tile + j + e < keys.end ? scores[e] * args.scale : -INFINITY;
      const float new_max = fmaxf(row_max[i], warp_max<16>(fmaxf(scores[0], scores[1])));

      // While no key was visible the maximum is -inf, and exp(-inf - -inf) would be NaN.
      const float shift = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = expf(row_max[i] - shift);
      const float p[2] = {expf(scores[0] - shift), expf(scores[1] - shift)};
      row_max[i] = new_max;
      row_sum[i] = row_sum[i] * rescale + warp_sum<16>(p[0] + p[1]);
      *reinterpret_cast<uint32_t*>(&smem.p[r][j]) = pack2<T>(p[0], p[1]);
      if (lane % 16 == 0) smem.rescale[r] = rescale;
    }
    cp_async_wait_group<1>();
    __syncthreads();  // P and V are there

    const float rescale_upper = smem.rescale[g], rescale_lower = smem.rescale[g + 8];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      o_regs[n][0] *= rescale_upper;
      o_regs[n][1] *= rescale_upper;
      o_regs[n][2] *= rescale_lower;
      o_regs[n][3] *= rescale_lower;
    }
#pragma unroll
    for (int k = 0; k < Bc; k += 16) {
      uint32_t p_regs[4];
      ldmatrix_x4(p_regs, smem_u32(&smem.p[tile_row()][k + tile_column()]));
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n += 2) {
        uint32_t v_regs[4];
        ldmatrix_x4_trans(v_regs, smem_u32(&smem.v[k + tile_row()][first_column + n * 8 + tile_column()]));
        mma_m16n8k16<T>(o_regs[n], p_regs, v_regs[0], v_regs[1]);
        mma_m16n8k16<T>(o_regs[n + 1], p_regs, v_regs[2], v_regs[3]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int r = warp * 2 * ROWS + 2 * i + lane / 16;
    if (lane % 16 != 0) continue;
    smem.row_sum[r] = row_sum[i];
    if (args.lse && r < rows)
      args.lse[(static_cast<int64_t>(batch) * args.q_heads + head) * args.q_len + first_query + r] =
          row_max[i] + logf(row_sum[i]);
  }
  __syncthreads();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = g + 8 * half;
    if (r >= rows) continue;
    const float inverse = smem.row_sum[r] == 0.0f ? 0.0f : 1.0f / smem.row_sum[r];
    T* o = row<T>(args.o, args.o_stride, batch, first_query + r, head) + first_column + 2 * t;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
      *reinterpret_cast<uint32_t*>(o + n * 8) =
          pack2<T>(o_regs[n][2 * half] * inverse, o_regs[n][2 * half + 1] * inverse);
  }
}

extern "C" const char* launch_step(const PrefillRingArgs* args, cudaStream_t stream) {
  return dispatch(*args, [&]<typename T, int HS>() {
    const dim3 grid(ceil_div(args->q_len, Br), args->q_heads, args->batch);
    return launch(prefill_ring_hs_split<T, HS>, grid, WARPS<HS> * WARP, sizeof(Smem<T, HS>), stream, *args);
  });
}
