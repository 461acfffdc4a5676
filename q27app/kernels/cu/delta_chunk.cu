// delta_chunk: the gated delta rule over the many rows of a prefill, in blocks of 16 positions counted from 0, in four launches.
// Reference: reference.delta      Used by: layers.run_layer
// Shapes:    y [rows, C + Nv Dv + 2 Nv] f32 -> out [rows, Nv Dv] f32; state and window of each slot advance; keeps: other slots
//            get those of a sequence after its first rows, up to a position 64 n
// Layout:    delta.cuh; pairs [rows, Nv, 2, CHUNK] f32: rows of the two matrices of a block
// Launch:    delta_inputs grid (rows / INPUT_ROWS, heads / 8), block (256); delta_pairs grid (blocks of positions, key heads), block (256);
//            delta_chunk grid (value heads * SPLITS, seqs), block (CHUNK_THREADS), shared sizeof(ChunkShared);
//            delta_outputs grid (rows + (seqs + keeps) * channels / 256), block (256)
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH    Limits: none on rows
// Numbers:   f32, products of matrices in three of tf32: to 1e-5 of the reference. A row's bits depend on its block of positions
//            and the state before it, not on what else is computed. Bound: tensor cores, one warp on each.
//
// With G_i the product of the decays from the block's first row to row i, R_ij that of the rows after j up to i:
//   (I + A) D = beta (V - G K S)    A_ij = beta_i R_ij k_i . k_j  for j < i
//   O = G Q S + M D                 M_ij = R_ij q_i . k_j         for j <= i
//   S' = G_last S + K^T (E D)       E_j = R_last,j
// delta_pairs makes (I + A)^-1 beta, M, G and E. The state of 16 columns lies in the accumulators of two warps, half the
// key dimensions each, which are the first operand of the next products as they are; they exchange what these products give, and
// one more warp fetches the next block. Products of decays are made of decays: sums of logarithms would lose digits.
#include "delta.cuh"
#include "mma.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int CHUNK = 16, ROW_TILES = CHUNK / 8, DIM_TILES = DIM / 16;   // of a warp: half the key dimensions
constexpr int CHUNK_COLUMNS = DIM >= 64 ? 64 : 32, SPLITS = DIM / CHUNK_COLUMNS;
constexpr int CHUNK_WARPS = CHUNK_COLUMNS / 8, CHUNK_THREADS = 32 * CHUNK_WARPS + 32;   // two warps for 16 columns, and one that fetches
constexpr int KEY_STRIDE = DIM + 8, PAIR_STRIDE = CHUNK + 8, VALUE_STRIDE = CHUNK_COLUMNS + 4;   // rows meet different banks

struct Block {   // rows of a sequence in one block of positions
  int first, rows;
};

__device__ __forceinline__ int blocks_of(const Delta& p, int seq) {
  const int first = p.row_starts[seq], rows = p.row_starts[seq + 1] - first;
  return rows ? (p.positions[first] % CHUNK + rows + CHUNK - 1) / CHUNK : 0;
}
__device__ __forceinline__ Block block_of(const Delta& p, int seq, int index) {
  const int first = p.row_starts[seq], end = p.row_starts[seq + 1], start = index * CHUNK - p.positions[first] % CHUNK;
  const int from = first + max(0, start);
  return {from, min(end, first + start + CHUNK) - from};
}

__device__ __forceinline__ int sequence_of(const Delta& p, int row) {
  int seq = 0;
  while (seq + 1 < p.num_seqs && row >= p.row_starts[seq + 1]) ++seq;
  return seq;
}

constexpr int INPUT_ROWS = 8;   // of a block of delta_inputs

// Convolution, silu, norms of q and k, gates: a warp has a head's channels of consecutive rows, lane l channels l + 32 i.
extern "C" __global__ void __launch_bounds__(THREADS) delta_inputs(const __grid_constant__ Delta p) {
  const int lane = threadIdx.x % 32, head = blockIdx.y * WARPS + threadIdx.x / 32;
  const int first = blockIdx.x * INPUT_ROWS, end = min(first + INPUT_ROWS, p.row_starts[p.num_seqs]);
  if (blockIdx.y == 0)
    for (int i = threadIdx.x; i < (end - first) * VALUE_HEADS; i += THREADS) {
      const int row = first + i / VALUE_HEADS, value_head = i % VALUE_HEADS;
      const float* y = p.y + (long long)row * p.y_stride;
      float* gates = p.gates + ((long long)row * VALUE_HEADS + value_head) * 4;
      gates[0] = decay_of(y[p.alpha_offset + value_head], p.a[value_head], p.dt_bias[value_head]);
      gates[1] = sigmoid(y[p.beta_offset + value_head]);
    }
  if (head >= 2 * KEY_HEADS + VALUE_HEADS) return;
  const int channel = head * DIM + lane;
  float taps[DIM / 32][CONV_WIDTH], past[DIM / 32][CONV_WIDTH];
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i)
#pragma unroll
    for (int j = 0; j < CONV_WIDTH; ++j) taps[i][j] = p.conv[(channel + 32 * i) * CONV_WIDTH + j];
  for (int row = first; row < end; ++row) {
    const float* y = p.y + (long long)row * p.y_stride + channel;
    const int seq = sequence_of(p, row), before = row - p.row_starts[seq], position = p.positions[row];
    if (row == first || !before) {
      const float* window = window_of(p, p.slot_ids[seq], p.layer) + channel;
#pragma unroll
      for (int j = 1; j < CONV_WIDTH; ++j) {
        const int back = CONV_WIDTH - j;
        const float* source = back <= before ? y - (long long)back * p.y_stride : window + window_row(position + CONV_WIDTH - back) * CHANNELS;
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) past[i][j] = source[32 * i];
      }
    }
    float value[DIM / 32], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) {
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) past[i][j] = past[i][j + 1];
      past[i][WINDOW] = y[32 * i];
      value[i] = convolve(taps[i], past[i]);
      squares = fmaf(value[i], value[i], squares);
    }
    if (head < 2 * KEY_HEADS) {
      const float factor = head_factor(squares, head < KEY_HEADS);
#pragma unroll
      for (int i = 0; i < DIM / 32; ++i) value[i] = __fmul_rn(value[i], factor);
    }
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) p.channels[(long long)row * CHANNELS + channel + 32 * i] = value[i];
  }
}

// The two matrices of a block of positions for the value heads of a key head, and its decays: gates become G, E.
extern "C" __global__ void __launch_bounds__(THREADS) delta_pairs(const __grid_constant__ Delta p) {
  constexpr int STRIDE = DIM + 4, GROUP_HEADS = VALUE_HEADS / KEY_HEADS;
  __align__(16) __shared__ float keys[CHUNK][STRIDE], queries[CHUNK][STRIDE];
  __shared__ float key_products[CHUNK][CHUNK + 1], query_products[CHUNK][CHUNK + 1];
  __shared__ float gates[GROUP_HEADS][2][CHUNK], ratio[GROUP_HEADS][CHUNK][CHUNK + 1], inverse[GROUP_HEADS][CHUNK][CHUNK + 1];
  __align__(16) __shared__ float mixing[GROUP_HEADS][CHUNK][CHUNK];   // A
  int seq = 0, index = blockIdx.x;
  while (seq < p.num_seqs && index >= blocks_of(p, seq)) index -= blocks_of(p, seq++);
  if (seq == p.num_seqs) return;
  const Block block = block_of(p, seq, index);
  const int key_head = blockIdx.y;
  for (int i = threadIdx.x; i < CHUNK * DIM; i += THREADS) {
    const int row = i / DIM, d = i % DIM;
    const float* source = p.channels + (long long)(block.first + row) * CHANNELS + key_head * DIM + d;
    queries[row][d] = row < block.rows ? source[0] : 0.0f;
    keys[row][d] = row < block.rows ? source[KEY_HEADS * DIM] : 0.0f;
  }
  for (int i = threadIdx.x; i < GROUP_HEADS * CHUNK; i += THREADS) {
    const int head = key_head + i / CHUNK * KEY_HEADS, row = i % CHUNK;
    const float* source = p.gates + ((long long)(block.first + row) * VALUE_HEADS + head) * 4;
    gates[i / CHUNK][0][row] = row < block.rows ? source[0] : 1.0f;
    gates[i / CHUNK][1][row] = row < block.rows ? source[1] : 0.0f;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) {
    const int row = i / CHUNK, column = i % CHUNK;
    if (column > row) continue;
    float key = 0.0f, query = 0.0f;
#pragma unroll 4
    for (int d = 0; d < DIM; d += 4) {
      const float4 right = *reinterpret_cast<const float4*>(keys[column] + d);
      const float4 a = *reinterpret_cast<const float4*>(keys[row] + d), b = *reinterpret_cast<const float4*>(queries[row] + d);
      key = fmaf(a.w, right.w, fmaf(a.z, right.z, fmaf(a.y, right.y, fmaf(a.x, right.x, key))));
      query = fmaf(b.w, right.w, fmaf(b.z, right.z, fmaf(b.y, right.y, fmaf(b.x, right.x, query))));
    }
    key_products[row][column] = key, query_products[row][column] = query;
  }
  for (int i = threadIdx.x; i < GROUP_HEADS * CHUNK; i += THREADS) {   // a column of decays
    float product = 1.0f;
    for (int row = i % CHUNK; row < CHUNK; ++row) {
      if (row > i % CHUNK) product = __fmul_rn(product, gates[i / CHUNK][0][row]);
      ratio[i / CHUNK][row][i % CHUNK] = product;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP_HEADS * CHUNK * CHUNK; i += THREADS) {
    const int head = i / CHUNK / CHUNK, row = i / CHUNK % CHUNK, column = i % CHUNK;
    mixing[head][row][column] = column < row ? __fmul_rn(gates[head][1][row], __fmul_rn(ratio[head][row][column], key_products[row][column])) : 0.0f;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP_HEADS * CHUNK; i += THREADS) {   // a column of the inverse, forwards
    const int head = i / CHUNK, column = i % CHUNK;
    float x[CHUNK];
#pragma unroll
    for (int row = 0; row < CHUNK; ++row) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < row; ++j) sum = fmaf(mixing[head][row][j], x[j], sum);
      x[row] = row < column ? 0.0f : row == column ? 1.0f : -sum;
      inverse[head][row][column] = x[row];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP_HEADS * CHUNK * CHUNK; i += THREADS) {
    const int head = i / CHUNK / CHUNK, row = i / CHUNK % CHUNK, column = i % CHUNK;
    if (row >= block.rows) continue;
    float* target = p.pairs + ((long long)(block.first + row) * VALUE_HEADS + key_head + head * KEY_HEADS) * 2 * CHUNK + column;
    target[0] = __fmul_rn(inverse[head][row][column], gates[head][1][column]);
    target[CHUNK] = column > row ? 0.0f : __fmul_rn(ratio[head][row][column], query_products[row][column]);
  }
  for (int i = threadIdx.x; i < GROUP_HEADS * block.rows; i += THREADS) {
    const int head = i / block.rows, row = i % block.rows;
    float* target = p.gates + ((long long)(block.first + row) * VALUE_HEADS + key_head + head * KEY_HEADS) * 4;
    target[0] = __fmul_rn(gates[head][0][0], ratio[head][row][0]);
    target[1] = ratio[head][CHUNK - 1][row];
  }
}

struct __align__(16) Stage {
  float k[CHUNK][KEY_STRIDE], q[CHUNK][KEY_STRIDE], v[CHUNK][VALUE_STRIDE], inverse[CHUNK][PAIR_STRIDE], reading[CHUNK][PAIR_STRIDE];
  float gates[CHUNK][4];
};

struct __align__(16) ChunkShared {
  Stage stages[2];
  float sums[CHUNK_WARPS][4 * ROW_TILES + 4][32];   // of a warp's half, for the other one
};

// 16 bytes of a row that the block has on their way, or zeros.
__device__ __forceinline__ void fetch_16(float* target, const float* source, bool has) {
  if (has) copy_async_16(target, source);
  else *reinterpret_cast<float4*>(target) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// One warp: a block on its way to shared memory.
__device__ __forceinline__ void fetch(const Delta& p, Stage& stage, const Block& block, int head, int split) {
  const int lane = threadIdx.x % 32;
  const float* channels = p.channels + (long long)block.first * CHANNELS;
  const float* queries = channels + head % KEY_HEADS * DIM;
  const float* values = channels + (2 * KEY_HEADS + head) * DIM + split * CHUNK_COLUMNS;
  const float* pairs = p.pairs + ((long long)block.first * VALUE_HEADS + head) * 2 * CHUNK;
  const float* gates = p.gates + ((long long)block.first * VALUE_HEADS + head) * 4;
#pragma unroll 4
  for (int i = lane; i < CHUNK * DIM / 4; i += 32) {
    const int row = i / (DIM / 4), d = i % (DIM / 4) * 4;
    fetch_16(stage.q[row] + d, queries + row * CHANNELS + d, row < block.rows);
    fetch_16(stage.k[row] + d, queries + row * CHANNELS + KEY_HEADS * DIM + d, row < block.rows);
  }
#pragma unroll 4
  for (int i = lane; i < CHUNK * CHUNK_COLUMNS / 4; i += 32) {
    const int row = i / (CHUNK_COLUMNS / 4), d = i % (CHUNK_COLUMNS / 4) * 4;
    fetch_16(stage.v[row] + d, values + row * CHANNELS + d, row < block.rows);
  }
#pragma unroll
  for (int i = lane; i < CHUNK * CHUNK / 4; i += 32) {
    const int row = i / (CHUNK / 4), d = i % (CHUNK / 4) * 4;
    fetch_16(stage.inverse[row] + d, pairs + row * VALUE_HEADS * 2 * CHUNK + d, row < block.rows);
    fetch_16(stage.reading[row] + d, pairs + row * VALUE_HEADS * 2 * CHUNK + CHUNK + d, row < block.rows);
  }
  if (lane < CHUNK) fetch_16(stage.gates[lane], gates + lane * VALUE_HEADS * 4, lane < block.rows);
  copy_async_commit();
}

// A number as two of tf32: the tensor core takes the upper bits of each.
struct Parts {
  uint32_t high, low;
};
__device__ __forceinline__ Parts parts_of(float value) {
  const uint32_t high = __float_as_uint(value) & 0xffffe000u;
  return {high, __float_as_uint(__fadd_rn(value, -__uint_as_float(high)))};
}

// Sixteen columns (rows of the tile) by 8 places each: the first operand of a product over these places.
struct Left {
  uint32_t high[4], low[4];
  __device__ __forceinline__ explicit Left(const float (&tile)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Parts part = parts_of(tile[(i & 1) << 1 | i >> 1]);
      high[i] = part.high, low[i] = part.low;
    }
  }
};

// sum += left * right, right's two numbers of this thread x and y.
__device__ __forceinline__ void multiply(float (&sum)[4], const Left& left, float x, float y) {
  const Parts a = parts_of(x), b = parts_of(y);
  mma_tf32(sum, left.low, a.high, b.high);
  mma_tf32(sum, left.high, a.low, b.low);
  mma_tf32(sum, left.high, a.high, b.high);
}

// Half of the key dimensions of 16 columns, from one block of positions to the next. Thread (g, c) holds columns g and g + 8, and
// of each tile of 8 places (key dimensions, or rows) 2 c and 2 c + 1.
struct Half {
  float state[DIM_TILES][4];

  // This thread's part of the state of a head and split at `place`: columns of the warp, half of the dimensions.
  __device__ __forceinline__ void load(const float* place) {
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float2 two = __ldcg(reinterpret_cast<const float2*>(place + 8 * upper * DIM + 8 * n));
        state[n][2 * upper] = two.x, state[n][2 * upper + 1] = two.y;
      }
  }
  __device__ __forceinline__ void store(float* place) const {
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
        *reinterpret_cast<float2*>(place + 8 * upper * DIM + 8 * n) = make_float2(state[n][2 * upper], state[n][2 * upper + 1]);
  }

  // This half's share of K S and Q S to the other warp: of Q S only the rows that are the other's to give.
  __device__ __forceinline__ void read(const Stage& stage, int half, float (&keys)[ROW_TILES][4], float (&queries)[ROW_TILES][4], float (*sums)[32]) const {
    const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) keys[t][0] = keys[t][1] = keys[t][2] = keys[t][3] = queries[t][0] = queries[t][1] = queries[t][2] = queries[t][3] = 0.0f;
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n) {
      const Left left(state[n]);
      const int d = half * (DIM / 2) + 8 * n + 2 * c;
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        const float2 k = *reinterpret_cast<const float2*>(stage.k[8 * t + g] + d), q = *reinterpret_cast<const float2*>(stage.q[8 * t + g] + d);
        multiply(keys[t], left, k.x, k.y);
        multiply(queries[t], left, q.x, q.y);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) sums[4 * t + i][lane] = keys[t][i];
      sums[4 * ROW_TILES + i][lane] = half ? queries[0][i] : queries[1][i];
    }
  }

  // The block's rows of half `half` in `out`, and the state after it. sums: the other half's.
  __device__ __forceinline__ void step(const Stage& stage, int half, int columns, float (&keys)[ROW_TILES][4], const float (&queries)[ROW_TILES][4],
                                       const float (*sums)[32], float (&out)[4]) {
    const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
    float right[ROW_TILES][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        const int row = 8 * t + 2 * c + i % 2;
        const float product = __fadd_rn(keys[t][i], sums[4 * t + i][lane]);
        keys[t][i] = fmaf(-stage.gates[row][0], product, stage.v[row][columns + g + 8 * (i / 2)]);
        right[t][i] = 0.0f;
      }
      out[i] = __fmul_rn(stage.gates[8 * half + 2 * c + i % 2][0], __fadd_rn(half ? queries[1][i] : queries[0][i], sums[4 * ROW_TILES + i][lane]));
    }
#pragma unroll
    for (int from = 0; from < ROW_TILES; ++from)
#pragma unroll
      for (int t = from; t < ROW_TILES; ++t) over_rows(stage.inverse, from, t, keys[from], right[t]);
    over_rows(stage.reading, 0, half, right[0], out);
    if (half) over_rows(stage.reading, 1, 1, right[1], out);
    const float whole = stage.gates[0][0] * stage.gates[0][1];
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[n][i] = __fmul_rn(state[n][i], whole);
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      const int row = 8 * t + 2 * c, d = half * (DIM / 2) + g;
      const float first = stage.gates[row][1], second = stage.gates[row + 1][1];
      const float faded[4] = {right[t][0] * first, right[t][1] * second, right[t][2] * first, right[t][3] * second};
      const Left left(faded);
#pragma unroll
      for (int n = 0; n < DIM_TILES; ++n) multiply(state[n], left, stage.k[row][d + 8 * n], stage.k[row + 1][d + 8 * n]);
    }
  }

  // sum += tile * matrix^T: from rows of tile `from` to those of tile `to`.
  __device__ __forceinline__ static void over_rows(const float (&matrix)[CHUNK][PAIR_STRIDE], int from, int to, const float (&tile)[4], float (&sum)[4]) {
    const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
    const float2 pair = *reinterpret_cast<const float2*>(matrix[8 * to + g] + 8 * from + 2 * c);
    multiply(sum, Left(tile), pair.x, pair.y);
  }
};
static_assert(ROW_TILES == 2, "each half gives one tile of rows");

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) delta_chunk(const __grid_constant__ Delta p) {
  SHARED_BYTES(bytes);
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(bytes);
  const int head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, seq = blockIdx.y, blocks = blocks_of(p, seq);
  if (!blocks) return;
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3, warp = threadIdx.x / 32;
  if (warp == CHUNK_WARPS) {
    fetch(p, shared.stages[0], block_of(p, seq, 0), head, split);
#pragma unroll 1
    for (int index = 0; index < blocks; ++index) {
      copy_async_wait<0>();
      __syncthreads();
      if (index + 1 < blocks) fetch(p, shared.stages[(index + 1) & 1], block_of(p, seq, index + 1), head, split);
      __syncthreads();
    }
    return;
  }
  const int half = warp & 1, columns = warp / 2 * 16;
  const long long place = (long long)(split * CHUNK_COLUMNS + columns + g) * DIM + half * (DIM / 2) + 2 * c;
  float* state = state_of(p, p.slot_ids[seq], p.layer, head) + place;
  const int first = p.row_starts[seq];
  Half own;
  own.load(state);
#pragma unroll 1
  for (int index = 0; index < blocks; ++index) {
    const Block block = block_of(p, seq, index);
    const Stage& stage = shared.stages[index & 1];
    float keys[ROW_TILES][4], queries[ROW_TILES][4], out[4];
    __syncthreads();
    own.read(stage, half, keys, queries, shared.sums[warp]);
    __syncthreads();
    own.step(stage, half, columns, keys, queries, shared.sums[warp ^ 1], out);
    float* target = p.out + (long long)block.first * p.out_stride + head * DIM + split * CHUNK_COLUMNS + columns + g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * half + 2 * c + i % 2;
      if (row < block.rows) target[(long long)row * p.out_stride + 8 * (i / 2)] = out[i];
    }
    for (int keep = 0; keep < p.num_keeps; ++keep)
      if (p.keeps[3 * keep] == seq && p.keeps[3 * keep + 1] == block.first + block.rows - first)
        own.store(state_of(p, p.keeps[3 * keep + 2], p.layer, head) + place);
  }
  own.store(state);
}

// Gated norm of the rows; the blocks past the rows move the windows on, and give those of the keeps (4 rows or more replace a window).
extern "C" __global__ void __launch_bounds__(THREADS) delta_outputs(const __grid_constant__ Delta p) {
  constexpr int PARTS = (CHANNELS + THREADS - 1) / THREADS;
  const int total = p.row_starts[p.num_seqs], warp = threadIdx.x / 32;
  if ((int)blockIdx.x >= total) {
    const int item = (blockIdx.x - total) / PARTS, channel = (blockIdx.x - total) % PARTS * THREADS + threadIdx.x;
    const int* keep = item < p.num_seqs ? nullptr : p.keeps + 3 * (item - p.num_seqs);
    const int seq = keep ? keep[0] : item, first = p.row_starts[seq], rows = keep ? keep[1] : p.row_starts[seq + 1] - first;
    if (channel < CHANNELS)
      advance_window(window_of(p, keep ? keep[2] : p.slot_ids[seq], p.layer), p.y + (long long)first * p.y_stride, p.y_stride, rows, p.positions[first], channel);
    return;
  }
  const long long row = blockIdx.x;
#pragma unroll 2
  for (int head = warp; head < VALUE_HEADS; head += WARPS) {
    float* o = p.out + row * p.out_stride + head * DIM;
    gated_norm(o, p.y + row * p.y_stride + p.z_offset + head * DIM, p.norm, o, p.eps);
  }
}
