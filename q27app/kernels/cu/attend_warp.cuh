// attend_prefill by warps (mma_f16): QUERY_WARPS warps of 16 rows, whose queries stay in registers. Keys and values lie in shared
// memory as fp16, STEP positions at a time: fp16 ones are copied there two steps ahead, codes one step ahead of being expanded.
#pragma once
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int THREADS = QUERY_WARPS * 32, STEP = 32, KEY_GROUPS = STEP / 8, DIM_GROUPS = HEAD_DIM / 8, DIM_STEPS = HEAD_DIM / 16;
constexpr int TILE = STEP * HEAD_DIM * 2;
static_assert(BLOCK_POSITIONS % STEP == 0, "a step lies in one block");

// Where keys, or values, of a step are: fp16 in a ring of three, or codes in a ring of two and what they become in another.
template <int CODE> struct Tiles {
  static constexpr bool CODED = CODE != CODE_HALF;
  static constexpr int ROW = code_row_bytes(CODE), RAW = STEP * ROW, BYTES = CODED ? 2 * RAW + 2 * TILE : 3 * TILE;
  unsigned char* shared;

  __device__ __forceinline__ unsigned char* tile(int index) const { return shared + (CODED ? index % 2 : index % 3) * TILE; }
  __device__ __forceinline__ unsigned char* raw(int index) const { return shared + 2 * TILE + index % 2 * RAW; }

  // source: of the head in the block of `start`, the first position of step `index`.
  __device__ __forceinline__ void copy(const unsigned char* source, int index, int first, int end) const {
    const int start = index * STEP;
    const unsigned char* from = source + start % BLOCK_POSITIONS * ROW;
    if constexpr (CODED) {
      for (int chunk = threadIdx.x; chunk < RAW / 16; chunk += THREADS) copy_async_16(raw(index) + chunk * 16, from + chunk * 16);
    } else {
      constexpr int PIECES = HEAD_DIM / 8, AT_ONCE = THREADS / PIECES;   // of 16 bytes in a row; rows of a round
      static_assert(AT_ONCE % 8 == 0 && STEP % AT_ONCE == 0, "whole rounds, of equal places but for the row");
      const int key = threadIdx.x / PIECES;
      unsigned char* to = reinterpret_cast<unsigned char*>(SwizzledRows<STEP>{tile(index)}.at(key, threadIdx.x % PIECES * 8));
#pragma unroll
      for (int i = 0; i < STEP; i += AT_ONCE)
        copy_async_16(to + i * 128, from + threadIdx.x * 16 + i * ROW, start + key + i >= first && start + key + i < end);
    }
  }
  __device__ __forceinline__ void expand(int index, int first, int end) const {
    const int start = index * STEP;
    const SwizzledRows<STEP> rows = {tile(index)};
    if constexpr (is_turned(CODE)) {
      constexpr int PIECES = HEAD_DIM / 32;
      const float level = level_of<low_bits(CODE)>(threadIdx.x);
#pragma unroll
      for (int base = 0; base < STEP * PIECES; base += THREADS) {
        static_assert(STEP * PIECES % THREADS == 0, "whole warps");
        const int at = base + threadIdx.x, key = at / PIECES;
        TurnedPiece<CODE> piece;
        piece.load(raw(index) + key * ROW, at % PIECES);
        expand_turned<CODE>(piece, at % PIECES, start + key >= first && start + key < end, level, rows, key);
      }
    } else if constexpr (CODED) {
#pragma unroll
      for (int base = 0; base < RAW / 16; base += THREADS) {
        const int chunk = base + threadIdx.x, key = chunk / (ROW / 16);
        if (chunk >= RAW / 16) break;
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (start + key >= first && start + key < end) codes = *reinterpret_cast<const uint4*>(raw(index) + chunk * 16);
        expand_fp8(codes, rows, key, chunk % (ROW / 16) * 16);
      }
    }
  }
};
using Keys = Tiles<KEY_CODE>;
using Values = Tiles<VALUE_CODE>;
static_assert(!TURNED_VALUES || QUERIES * BLOCK_DIMS * 4 <= Keys::BYTES + Values::BYTES, "what was attended fits in shared memory");

// Fragments of 16 lines of queries.
__device__ __forceinline__ void load_queries(const Attend& p, const Tile& tile, int from, uint32_t (&a)[DIM_STEPS][4]) {
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = min(from + g + 8 * i, tile.lines - 1);
    const uint16_t* q = p.q_half + ((long long)tile.row(line) * NUM_HEADS + tile.head_of(line)) * HEAD_DIM + 2 * c;
#pragma unroll
    for (int d = 0; d < DIM_STEPS; ++d) {
      a[d][i] = *reinterpret_cast<const uint32_t*>(q + d * 16);
      a[d][2 + i] = *reinterpret_cast<const uint32_t*>(q + d * 16 + 8);
    }
  }
}

__device__ __forceinline__ void score_keys(const uint32_t (&a)[DIM_STEPS][4], const unsigned char* keys, float (&score)[KEY_GROUPS][4]) {
  const int lane = threadIdx.x % 32, at = (lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
  for (int n = 0; n < KEY_GROUPS; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
  for (int d = 0; d < DIM_STEPS; ++d) {
#pragma unroll
    for (int n = 0; n < KEY_GROUPS; n += 2) {
      uint32_t b[4];
      load_matrices(b, keys + (at ^ d % 4 * 32) + (d / 4 * STEP + n * 8) * 128);
      mma_f16(score[n], a[d][0], a[d][1], a[d][2], a[d][3], b[0], b[1]);
      mma_f16(score[n + 1], a[d][0], a[d][1], a[d][2], a[d][3], b[2], b[3]);
    }
  }
}

__device__ __forceinline__ void weigh_values(float (&out)[DIM_BLOCKS][8][4], const uint32_t (&a)[STEP / 16][4], const unsigned char* values) {
  const int lane = threadIdx.x % 32, at = lane * 128 + lane % 8 * 16;
#pragma unroll
  for (int n = 0; n < DIM_GROUPS; n += 2) {
    uint32_t b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_transposed(b[i], values + (at ^ (n + i) % 8 * 16) + n / 8 * STEP * 128);
#pragma unroll
    for (int s = 0; s < STEP / 16; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i) mma_f16(out[n / 8][(n + i) % 8], a[s][0], a[s][1], a[s][2], a[s][3], b[i][2 * s], b[i][2 * s + 1]);
  }
}
static_assert(STEP == 32, "a lane names a position");

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prefill(const __grid_constant__ Attend p) {
  SHARED_BYTES(shared);
  __shared__ float2 joined[QUERIES];
  __shared__ Tile tile;   // not in registers, of which there are few
  const Keys key_tiles = {shared};
  const Values value_tiles = {shared + Keys::BYTES};
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 >> 2, own = warp * 16;
  if (threadIdx.x == 0 && !find_tile(p, tile)) tile.lines = 0;
  __syncthreads();
  if (!tile.lines) return;
  const int keys = tile.end, from = tile.begin / STEP, steps = (keys + STEP - 1) / STEP, key_head = tile.head / GROUP;
  const auto source = [&](int index) { return kv_block(p, tile.seq, min(index, steps - 1) * STEP); };
  const auto copy = [&](const unsigned char* block, int index) {
    if (index < steps) {
      key_tiles.copy(block + key_head * K_HEAD, index, p.first_position, keys);
      value_tiles.copy(block + KV_VALUES + key_head * V_HEAD, index, p.first_position, keys);
    }
    copy_async_commit();
  };
  const auto expand = [&](int index) {
    if (index < steps) key_tiles.expand(index, p.first_position, keys), value_tiles.expand(index, p.first_position, keys);
  };
  copy(source(from), from), copy(source(from + 1), from + 1);
  uint32_t queries[DIM_STEPS][4];
  load_queries(p, tile, own, queries);
  float factor[2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const int base = p.positions[tile.first] - tile.first;   // rows of a sequence have positions one after the other
  int position[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = min(own + g + 8 * i, tile.lines - 1);
    position[i] = own < tile.lines ? base + tile.row(line) : -1;
    factor[i] = __fmul_rn(p.q_factor[(long long)tile.row(line) * NUM_HEADS + tile.head_of(line)], 1.44269504f);   // powers of two from here on
  }
  float out[DIM_BLOCKS][8][4];
#pragma unroll
  for (int n = 0; n < DIM_GROUPS; ++n) out[n / 8][n % 8][0] = out[n / 8][n % 8][1] = out[n / 8][n % 8][2] = out[n / 8][n % 8][3] = 0.0f;
  constexpr bool CODED = Keys::CODED || Values::CODED;
  if constexpr (CODED) {
    copy_async_wait<1>();
    __syncthreads();
    expand(from);
  }
  const auto attend = [&](int index) {
    const int start = index * STEP;
    if (!__any_sync(ALL_LANES, start <= position[1])) return;   // nothing here for this warp
    float score[KEY_GROUPS][4], correction[2];
    uint32_t shares[STEP / 16][4];
    score_keys(queries, key_tiles.tile(index), score);
    soften(score, factor, position, __any_sync(ALL_LANES, start + STEP - 1 > position[0]) || start < p.first_position, start, p.first_position, top, sum, correction, shares);
    if (__any_sync(ALL_LANES, correction[0] != 1.0f || correction[1] != 1.0f))
#pragma unroll
      for (int n = 0; n < DIM_GROUPS; ++n) {
        float(&o)[4] = out[n / 8][n % 8];
        o[0] *= correction[0], o[1] *= correction[0], o[2] *= correction[1], o[3] *= correction[1];
      }
    weigh_values(out, shares, value_tiles.tile(index));
  };
#pragma unroll 1
  for (int index = from; index < steps; ++index) {
    const unsigned char* block = source(index + 2);
    copy_async_wait<CODED ? 0 : 1>();
    __syncthreads();   // whatever was read or written in the step before is done with
    copy(block, index + 2);
    if constexpr (CODED) {   // half of the warps expand first, the others multiply first
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if (turn == warp / (QUERY_WARPS / 2)) expand(index + 1);
        else attend(index);
      }
    } else {
      attend(index);
    }
    const int next = (index + 1) * STEP;
    if (next % (next <= FIRST_KEYS ? KEY_CUT : 2 * KEY_CUT) == 0 && index + 1 < steps)
      join_cut(p, tile, joined, own, next == KEY_CUT, false, out, top, sum);
  }
  copy_async_wait<0>();
  if (p.part_o) return put_part(p, tile, own, out, top, sum);
  if (keys > KEY_CUT) join_cut(p, tile, joined, own, false, true, out, top, sum);
  if constexpr (TURNED_VALUES) __syncthreads();   // keys and values give their place to what was attended
  put_attended(p, tile, own, out, sum, reinterpret_cast<float*>(shared) + warp * 16 * BLOCK_DIMS);
}
