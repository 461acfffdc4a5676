// delta_chunk: the same as delta_step for the many rows of a prefill chunk, in three launches.
// Reference: reference.delta      Used by: layers.run_layer
// Shapes:    y [rows, C + Nv Dv + 2 Nv] f32 -> out [rows, Nv Dv] f32; state and window of each slot advance; keeps: other slots
//            get those of a sequence after its first rows, up to a position 64 n
// Layout:    delta.cuh
// Launch:    delta_inputs grid (rows), block (256); delta_chunk grid (value heads * SLICES, seqs), block (DELTA_THREADS);
//            delta_outputs grid (rows + seqs + keeps), block (256)
// Defines:   as delta_step    Limits: none on rows
// Numbers:   f32 throughout; a row's bits are those of delta_step, whatever the chunk. Bound: latency of the recurrence.
#include "delta.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, STAGE_ROWS = 16, KEEP_STEP = 64;

__device__ __forceinline__ int sequence_of(const Delta& p, int row) {
  int seq = 0;
  while (seq + 1 < p.num_seqs && row >= p.row_starts[seq + 1]) ++seq;
  return seq;
}

// Convolution and silu of a head's channels of a row, by a warp; lane l has channels l + 32 i.
__device__ __forceinline__ void convolve_head(const Delta& p, const float* y, const float* window, int head, int position, int before, float* out) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) {
    const int channel = head * DIM + lane + 32 * i;
    float taps[CONV_WIDTH], past[CONV_WIDTH];
#pragma unroll
    for (int j = 0; j < CONV_WIDTH; ++j) {
      taps[j] = p.conv[channel * CONV_WIDTH + j];
      const int back = WINDOW - j;
      past[j] = back <= before ? y[channel - (long long)back * p.y_stride] : window[window_row(position + CONV_WIDTH - back) * CHANNELS + channel];
    }
    out[lane + 32 * i] = convolve(taps, past);
  }
  __syncwarp();
}

// Convolution, silu, norms of q and k, gates: one row a block; a warp has a query with its key, or a value.
extern "C" __global__ void __launch_bounds__(THREADS) delta_inputs(const __grid_constant__ Delta p) {
  __shared__ float heads[WARPS][2][DIM];
  const int row = blockIdx.x, seq = sequence_of(p, row), before = row - p.row_starts[seq], position = p.positions[row];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* window = window_of(p, p.slot_ids[seq], p.layer);
  const float* y = p.y + (long long)row * p.y_stride;
  float* channels = p.channels + (long long)row * CHANNELS;
  float* gates = p.gates + (long long)row * VALUE_HEADS * 4;
  float (&pair)[2][DIM] = heads[warp];
  for (int item = warp; item < KEY_HEADS + VALUE_HEADS; item += WARPS) {
    const bool is_key = item < KEY_HEADS;
    convolve_head(p, y, window, is_key ? item : item + KEY_HEADS, position, before, pair[0]);
    if (is_key) {
      convolve_head(p, y, window, item + KEY_HEADS, position, before, pair[1]);
      normalize_head(pair[0], true);
      normalize_head(pair[1], false);
      const float product = head_product(pair[0], pair[1]);
      for (int head = item + lane * KEY_HEADS; head < VALUE_HEADS; head += 32 * KEY_HEADS) gates[head * 4 + 2] = product;
    }
    for (int i = lane; i < DIM; i += 32) {
      channels[(is_key ? item : item + KEY_HEADS) * DIM + i] = pair[0][i];
      if (is_key) channels[(item + KEY_HEADS) * DIM + i] = pair[1][i];
    }
    __syncwarp();
  }
  for (int head = threadIdx.x; head < VALUE_HEADS; head += THREADS) {
    gates[head * 4] = decay_of(y[p.alpha_offset + head], p.a[head], p.dt_bias[head]);
    gates[head * 4 + 1] = sigmoid(y[p.beta_offset + head]);
  }
}

struct __align__(16) Stage {
  float q[STAGE_ROWS][DIM], k[STAGE_ROWS][DIM], v[STAGE_ROWS][COLUMNS], gates[STAGE_ROWS][4];
};

__device__ __forceinline__ void fetch(const Delta& p, Stage& stage, int row, int rows, int head, int slice) {
  constexpr int QK = DIM / 4, V = COLUMNS / 4, PIECES = 2 * QK + V;
  const int key_head = head % KEY_HEADS;
  for (int i = threadIdx.x; i < rows * PIECES; i += DELTA_THREADS) {
    const int r = i / PIECES, piece = i % PIECES;
    const float* source = p.channels + (long long)(row + r) * CHANNELS;
    if (piece < QK) copy_async_16(stage.q[r] + 4 * piece, source + key_head * DIM + 4 * piece);
    else if (piece < 2 * QK) copy_async_16(stage.k[r] + 4 * (piece - QK), source + (KEY_HEADS + key_head) * DIM + 4 * (piece - QK));
    else copy_async_16(stage.v[r] + 4 * (piece - 2 * QK), source + (2 * KEY_HEADS + head) * DIM + slice * COLUMNS + 4 * (piece - 2 * QK));
  }
  for (int i = threadIdx.x; i < rows; i += DELTA_THREADS)
    copy_async_16(stage.gates[i], p.gates + ((long long)(row + i) * VALUE_HEADS + head) * 4);
  copy_async_commit();
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS) delta_chunk(const __grid_constant__ Delta p) {
  __shared__ Stage stages[2];
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, seq = blockIdx.y;
  const int first = p.row_starts[seq], rows = p.row_starts[seq + 1] - first, slot = p.slot_ids[seq], base = p.positions[first];
  const int column = threadIdx.x / LANES * LANE_COLUMNS, j = threadIdx.x % LANES;
  float* state = state_of(p, slot, p.layer, head) + (long long)(slice * COLUMNS + column) * DIM;
  Columns<LANE_COLUMNS> s;
  s.load(state, j);
  fetch(p, stages[0], first, min(STAGE_ROWS, rows), head, slice);
  for (int done = 0, at = 0; done < rows; done += STAGE_ROWS, at ^= 1) {
    const int next = done + STAGE_ROWS;
    if (next < rows) fetch(p, stages[at ^ 1], first + next, min(STAGE_ROWS, rows - next), head, slice);
    else copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    const Stage& stage = stages[at];
    const int count = min(STAGE_ROWS, rows - done);
    float* out = p.out + (long long)(first + done) * p.out_stride + head * DIM + slice * COLUMNS + column;
#pragma unroll 2
    for (int r = 0; r < count; ++r) {
      float v[LANE_COLUMNS], o[LANE_COLUMNS];
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) v[c] = stage.v[r][column + c];
      s.step(stage.q[r], stage.k[r], v, *reinterpret_cast<const float4*>(stage.gates[r]), j, o);
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c)
        if (j == c) out[(long long)r * p.out_stride + c] = o[c];
    }
    if ((base + done + count) % KEEP_STEP == 0)
      for (int keep = 0; keep < p.num_keeps; ++keep)
        if (p.keeps[3 * keep] == seq && p.keeps[3 * keep + 1] == done + count)
          s.store(state_of(p, p.keeps[3 * keep + 2], p.layer, head) + (long long)(slice * COLUMNS + column) * DIM, j);
    __syncthreads();
  }
  s.store(state, j);
}

// Gated norm of the rows; the blocks past the rows move the windows on, and give those of the keeps (4 rows or more replace a window).
extern "C" __global__ void __launch_bounds__(THREADS) delta_outputs(const __grid_constant__ Delta p) {
  const int total = p.row_starts[p.num_seqs], warp = threadIdx.x / 32;
  if ((int)blockIdx.x >= total) {
    const int item = blockIdx.x - total, *keep = item < p.num_seqs ? nullptr : p.keeps + 3 * (item - p.num_seqs);
    const int seq = keep ? keep[0] : item, first = p.row_starts[seq], rows = keep ? keep[1] : p.row_starts[seq + 1] - first;
    float* window = window_of(p, keep ? keep[2] : p.slot_ids[seq], p.layer);
    for (int channel = threadIdx.x; channel < CHANNELS; channel += THREADS)
      advance_window(window, p.y + (long long)first * p.y_stride, p.y_stride, rows, p.positions[first], channel);
    return;
  }
  const long long row = blockIdx.x;
  for (int head = warp; head < VALUE_HEADS; head += WARPS) {
    float* o = p.out + row * p.out_stride + head * DIM;
    gated_norm(o, p.y + row * p.y_stride + p.z_offset + head * DIM, p.norm, o, p.eps);
  }
}
