// attend_decode: q/k norm, rope, KV write, causal attention split over the context for few rows; merge and output gate.
// Reference: reference.attend      Used by: layers.run_layer
// Shapes:    y [rows, 2 A D + 2 G D] f32 -> out [rows, A D] f32; keys and values of the rows enter the cache
// Layout:    kv_format.cuh
// Launch:    attend_decode_*: grid (blocks, persistent over items), block (256), shared AttendShared<MT>::BYTES;
//            attend_merge: grid (rows, heads), block (HEAD_DIM); attend_keys: grid (rows, kv heads), block (32)
// Defines:   HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_DIM, KV_FORMAT, CUT_0..2, BORDER_0..1
// Limits:    at most 8 (16) rows of a sequence an item
// Numbers:   fp16 products, f32 sums and softmax. Keys are cut at fixed positions; a row sees tiles and cuts in ascending
//            order, and those past it change nothing: its bits do not depend on other rows. Bound: memory at long context.
//
// An item is (sequence, group of rows, key head, cut): all query heads of the key head and all rows share one read of the
// keys. The block whose cut holds the new positions writes them to the cache first.
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int THREADS = 256, WARPS = 8, KEYS = 32;
constexpr int Q_STRIDE = HEAD_DIM + 16, K_STRIDE = HEAD_DIM + 16, V_STRIDE = HEAD_DIM + 8;
constexpr int S_STRIDE = KEYS + 4, P_STRIDE = KEYS + 8;
constexpr int DIM_TILES = HEAD_DIM >= 64 ? HEAD_DIM / 64 : 1;   // n8 tiles of values a warp
static_assert(HEAD_DIM % 64 == 0 || HEAD_DIM == 32, "values are shared by 8 warps");
static_assert(CUT_0 % KEYS == 0 && CUT_1 % KEYS == 0 && CUT_2 % KEYS == 0, "cuts hold whole tiles");
constexpr int CUTS_0 = BORDER_0 / CUT_0, CUTS_1 = (BORDER_1 - BORDER_0) / CUT_1;

// Cuts that hold keys 0 .. count - 1.
__device__ __forceinline__ int cuts_of(int count) {
  if (count <= BORDER_0) return (count + CUT_0 - 1) / CUT_0;
  if (count <= BORDER_1) return CUTS_0 + (count - BORDER_0 + CUT_1 - 1) / CUT_1;
  return CUTS_0 + CUTS_1 + (count - BORDER_1 + CUT_2 - 1) / CUT_2;
}
__device__ __forceinline__ int cut_start(int cut) {
  if (cut <= CUTS_0) return cut * CUT_0;
  if (cut <= CUTS_0 + CUTS_1) return BORDER_0 + (cut - CUTS_0) * CUT_1;
  return BORDER_1 + (cut - CUTS_0 - CUTS_1) * CUT_2;
}

struct Item {
  int seq, first_row, rows, head, cut, start, end;   // keys start .. end - 1
};

template <int ROWS> __device__ __forceinline__ bool find_item(const Attend& p, int index, Item& item) {
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int first = p.row_starts[seq], end = p.row_starts[seq + 1];
    for (int row = first; row < end; row += ROWS) {
      const int rows = min(ROWS, end - row), keys = p.positions[row + rows - 1] + 1, cuts = cuts_of(keys);
      if (index < cuts * NUM_KV_HEADS) {
        const int cut = cuts - 1 - index / NUM_KV_HEADS;
        item = {seq, row, rows, index % NUM_KV_HEADS, cut, cut_start(cut), min(cut_start(cut + 1), keys)};
        return true;
      }
      index -= cuts * NUM_KV_HEADS;
    }
  }
  return false;
}

template <int MT> struct AttendShared {
  static constexpr int ROWS = MT * 16;
  static constexpr int Q = 0, K = Q + ROWS * Q_STRIDE * 2, V = K + KEYS * K_STRIDE * 2, S = V + KEYS * V_STRIDE * 2;
  static constexpr int S_BYTES = 2 * ROWS * S_STRIDE * 4, WORK = WARPS * HEAD_DIM * 4;
  static constexpr int P = S + (S_BYTES > WORK ? S_BYTES : WORK), STATS = P + ROWS * P_STRIDE * 2;
  static constexpr int BYTES = STATS + 5 * ROWS * 4;   // running maximum, sum, correction, factor, position
};

// S = Q K^T of one tile: warp w takes 8 keys (w % 4) and one half of the dimensions (w / 4).
template <int MT> __device__ __forceinline__ void score_tile(const uint16_t* q, const uint16_t* k, float* scores, int tiles) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, c = lane & 3;
  const int half = warp >> 2, key = (warp & 3) * 8;
  float acc[MT][4];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) acc[mt][0] = acc[mt][1] = acc[mt][2] = acc[mt][3] = 0.0f;
#pragma unroll 4
  for (int j = 0; j < HEAD_DIM / 32; ++j) {
    const int d = half * (HEAD_DIM / 2) + j * 16 + c * 4;
    const uint2 b = *reinterpret_cast<const uint2*>(k + (key + g) * K_STRIDE + d);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      if (mt >= tiles) break;
      const uint2 low = *reinterpret_cast<const uint2*>(q + (mt * 16 + g) * Q_STRIDE + d);
      const uint2 high = *reinterpret_cast<const uint2*>(q + (mt * 16 + g + 8) * Q_STRIDE + d);
      mma_f16(acc[mt], low.x, high.x, low.y, high.y, b.x, b.y);
    }
  }
  float* target = scores + half * MT * 16 * S_STRIDE + key + 2 * c;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
    if (mt >= tiles) break;
    *reinterpret_cast<float2*>(target + (mt * 16 + g) * S_STRIDE) = make_float2(acc[mt][0], acc[mt][1]);
    *reinterpret_cast<float2*>(target + (mt * 16 + g + 8) * S_STRIDE) = make_float2(acc[mt][2], acc[mt][3]);
  }
}

template <int MT, int ROWS> __device__ __forceinline__ void attend_item(const Attend& p, const Item& item, unsigned char* shared) {
  using M = AttendShared<MT>;
  uint16_t* q = reinterpret_cast<uint16_t*>(shared + M::Q);
  uint16_t* k = reinterpret_cast<uint16_t*>(shared + M::K);
  uint16_t* v = reinterpret_cast<uint16_t*>(shared + M::V);
  uint16_t* weights = reinterpret_cast<uint16_t*>(shared + M::P);
  float* scores = reinterpret_cast<float*>(shared + M::S);
  float* running_max = reinterpret_cast<float*>(shared + M::STATS);
  float* running_sum = running_max + M::ROWS;
  float* correction = running_sum + M::ROWS;
  float* factor = correction + M::ROWS;
  int* position = reinterpret_cast<int*>(factor + M::ROWS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, c = lane & 3;
  const int used = item.rows * GROUP, tiles = (used + 15) / 16;
  float* work = scores + warp * HEAD_DIM;

  const int new_first = p.positions[p.row_starts[item.seq]];
  for (int at = max(item.start, new_first) + warp; at < item.end; at += WARPS)
    write_kv(p, item.seq, p.row_starts[item.seq] + at - new_first, item.head, work);
  for (int r = warp; r < tiles * 16; r += WARPS) {
    float scale = 0.0f;
    int at = -1;
    if (r < used) {
      const int row = item.first_row + r / GROUP;
      scale = write_query(p, row, item.head * GROUP + r % GROUP, work, q + r * Q_STRIDE);
      at = p.positions[row];
    } else {
      for (int d = lane; d < HEAD_DIM; d += 32) q[r * Q_STRIDE + d] = 0;
      weights[r * P_STRIDE + lane] = 0;   // rows that pad a tile weigh nothing
    }
    if (lane == 0) correction[r] = 1.0f, running_max[r] = -INFINITY, running_sum[r] = 0.0f, factor[r] = scale, position[r] = at;
  }
  float out[MT][DIM_TILES][4];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n) out[mt][n][0] = out[mt][n][1] = out[mt][n][2] = out[mt][n][3] = 0.0f;
  const int dim = warp * DIM_TILES * 8;
  __syncthreads();
  KvTile<KEYS, THREADS> key_tile, value_tile;
  const unsigned char* source = kv_tile(p, item.seq, item.start, item.head);
  key_tile.load(source, item.start, p.first_position, item.end);
  value_tile.load(source + KV_VALUES, item.start, p.first_position, item.end);
  // The address of a tile is looked up a tile before its keys are asked for.
  source = kv_tile(p, item.seq, min(item.start + KEYS, item.end - 1), item.head);
#pragma unroll 1
  for (int start = item.start; start < item.end; start += KEYS) {
    key_tile.store(k, K_STRIDE);
    value_tile.store(v, V_STRIDE);
    __syncthreads();
    if (start + KEYS < item.end) {
      key_tile.load(source, start + KEYS, p.first_position, item.end);
      value_tile.load(source + KV_VALUES, start + KEYS, p.first_position, item.end);
      source = kv_tile(p, item.seq, min(start + 2 * KEYS, item.end - 1), item.head);
    }
    score_tile<MT>(q, k, scores, tiles);
    __syncthreads();
    for (int r = warp; r < used; r += WARPS) {
      const int key = start + lane;
      const bool seen = key <= position[r] && key >= p.first_position;
      const float score = seen ? (scores[r * S_STRIDE + lane] + scores[(M::ROWS + r) * S_STRIDE + lane]) * factor[r] : -INFINITY;
      const float before = running_max[r], now = fmaxf(before, warp_max(score));
      const float weight = now == -INFINITY ? 0.0f : expf(score - now);
      const float change = now == before ? 1.0f : expf(before - now);
      const float sum = warp_sum(weight);
      weights[r * P_STRIDE + lane] = half_from_float(weight);
      if (lane == 0) {
        running_max[r] = now, correction[r] = change;
        running_sum[r] = fmaf(running_sum[r], change, sum);
      }
    }
    __syncthreads();
    if (dim < HEAD_DIM) {
      uint32_t b[DIM_TILES][4];
#pragma unroll
      for (int n = 0; n < DIM_TILES; ++n) load_transposed(b[n], v + lane * V_STRIDE + dim + n * 8);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        if (mt >= tiles) break;
        const float low = correction[mt * 16 + g], high = correction[mt * 16 + g + 8];
        const uint16_t* row_low = weights + (mt * 16 + g) * P_STRIDE + 2 * c;
        const uint16_t* row_high = row_low + 8 * P_STRIDE;
        uint32_t a[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          a[s][0] = *reinterpret_cast<const uint32_t*>(row_low + 16 * s);
          a[s][1] = *reinterpret_cast<const uint32_t*>(row_high + 16 * s);
          a[s][2] = *reinterpret_cast<const uint32_t*>(row_low + 16 * s + 8);
          a[s][3] = *reinterpret_cast<const uint32_t*>(row_high + 16 * s + 8);
        }
#pragma unroll
        for (int n = 0; n < DIM_TILES; ++n) {
          float (&o)[4] = out[mt][n];
          o[0] *= low, o[1] *= low, o[2] *= high, o[3] *= high;
          mma_f16(o, a[0][0], a[0][1], a[0][2], a[0][3], b[n][0], b[n][1]);
          mma_f16(o, a[1][0], a[1][1], a[1][2], a[1][3], b[n][2], b[n][3]);
        }
      }
    }
    __syncthreads();
  }
  for (int r = threadIdx.x; r < used; r += THREADS) {
    const long long at = ((long long)(item.first_row + r / GROUP) * p.max_splits + item.cut) * NUM_HEADS + item.head * GROUP + r % GROUP;
    reinterpret_cast<float2*>(p.part_ml)[at] = make_float2(running_max[r], running_sum[r]);
  }
  if (dim < HEAD_DIM)
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int r = mt * 16 + g + 8 * upper;
        if (r >= used) continue;
        const long long at = ((long long)(item.first_row + r / GROUP) * p.max_splits + item.cut) * NUM_HEADS + item.head * GROUP + r % GROUP;
#pragma unroll
        for (int n = 0; n < DIM_TILES; ++n)
          *reinterpret_cast<float2*>(p.part_o + at * HEAD_DIM + dim + n * 8 + 2 * c) = make_float2(out[mt][n][2 * upper], out[mt][n][2 * upper + 1]);
      }
  __syncthreads();
}

template <int MT, int ROWS> __device__ __forceinline__ void attend_items(const Attend& p) {
  SHARED_BYTES(shared);
  allow_next();
  wait_for_earlier();
  Item item;
#pragma unroll 1
  for (int index = blockIdx.x; find_item<ROWS>(p, index, item); index += gridDim.x) attend_item<MT, ROWS>(p, item, shared);
}

constexpr int MT_1 = (GROUP + 15) / 16, MT_8 = (8 * GROUP + 15) / 16, MT_16 = GROUP;
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_decode_1(const __grid_constant__ Attend p) { attend_items<MT_1, 1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_decode_8(const __grid_constant__ Attend p) { attend_items<MT_8, 8>(p); }
#if WIDE_ATTENTION
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_decode_16(const __grid_constant__ Attend p) { attend_items<MT_16, 16>(p); }
#endif

// The cuts of each row and head in ascending order, then the output gate.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) attend_merge(const __grid_constant__ Attend p) {
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x, head = blockIdx.y, d = threadIdx.x, at = p.positions[row];
  const int cuts = cuts_of(at + 1);
  const long long base = (long long)row * p.max_splits * NUM_HEADS + head;
  const float2* ml = reinterpret_cast<const float2*>(p.part_ml);
  float top = -INFINITY;
  for (int cut = 0; cut < cuts; ++cut) top = fmaxf(top, ml[base + (long long)cut * NUM_HEADS].x);
  float sum = 0.0f, value = 0.0f;
  if (top != -INFINITY)
    for (int cut = 0; cut < cuts; ++cut) {
      const long long index = base + (long long)cut * NUM_HEADS;
      const float2 part = ml[index];
      const float share = part.x == -INFINITY ? 0.0f : expf(part.x - top);
      sum = fmaf(share, part.y, sum);
      value = fmaf(share, p.part_o[index * HEAD_DIM + d], value);
    }
  const float gate = p.y[(long long)row * p.y_stride + head * 2 * HEAD_DIM + HEAD_DIM + d];
  p.out[(long long)row * p.out_stride + head * HEAD_DIM + d] = sum > 0.0f ? value / sum * sigmoid(gate) : 0.0f;
}

// Keys and values of the rows into the cache, nothing else. One warp a row and key head.
extern "C" __global__ void __launch_bounds__(32) attend_keys(const __grid_constant__ Attend p) {
  __shared__ float work[HEAD_DIM];
  allow_next();
  wait_for_earlier();
  int seq = 0;
  while (seq + 1 < p.num_seqs && (int)blockIdx.x >= p.row_starts[seq + 1]) ++seq;
  write_kv(p, seq, blockIdx.x, blockIdx.y, work);
}
