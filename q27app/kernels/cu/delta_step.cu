// delta_step: convolution, gates, gated delta rule and gated norm for few rows of each sequence; folds rows in a commit.
// Reference: reference.delta      Used by: layers.run_layer, Backend.commit
// Shapes:    y [rows, C + 2 Nv (+ Nv Dv)] f32 -> out [rows, Nv Dv] f32; state [Nv, Dv, Dk] f32 and window [3, C] of a slot
// Layout:    delta.cuh
// Launch:    grid (value heads * SLICES, seqs, layers), block (DELTA_THREADS), static shared memory
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH, SLICES    Limits: 16 rows a sequence
// Numbers:   f32 throughout, fixed order; equals the reference to 1e-5. Bound: memory (the state), latency.
//
// Blocks of one key head count themselves; the last one, when every block has read window and inputs, applies the gated
// norm of its heads, moves the window on (or records the rows of a deferred pass).
#include "delta.cuh"

constexpr int MAX_ROWS = 16, RECORD = CHANNELS + 2 * VALUE_HEADS;

struct __align__(16) Inputs {
  float q[MAX_ROWS][DIM], k[MAX_ROWS][DIM], v[MAX_ROWS][COLUMNS], gates[MAX_ROWS][2];
  int last;
};

__device__ __forceinline__ void prepare(const Delta& p, Inputs& in, const float* y, const float* window, int rows, int head, int slice,
                                        const float* conv, const float* a, const float* dt_bias) {
  const int key_head = head % KEY_HEADS, warp = threadIdx.x / 32, warps = DELTA_THREADS / 32;
  for (int i = threadIdx.x; i < 2 * DIM + COLUMNS; i += DELTA_THREADS) {
    const int channel = i < DIM ? key_head * DIM + i
                      : i < 2 * DIM ? (KEY_HEADS + key_head) * DIM + i - DIM
                                    : (2 * KEY_HEADS + head) * DIM + slice * COLUMNS + i - 2 * DIM;
    float taps[CONV_WIDTH], past[CONV_WIDTH];
#pragma unroll
    for (int j = 0; j < CONV_WIDTH; ++j) taps[j] = conv[channel * CONV_WIDTH + j];
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) past[j + 1] = window[j * CHANNELS + channel];
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) past[j] = past[j + 1];
      past[WINDOW] = y[(long long)r * p.y_stride + channel];
      const float value = convolve(taps, past);
      if (i < DIM) in.q[r][i] = value;
      else if (i < 2 * DIM) in.k[r][i - DIM] = value;
      else in.v[r][i - 2 * DIM] = value;
    }
  }
  for (int r = threadIdx.x; r < rows; r += DELTA_THREADS) {
    const float* row = y + (long long)r * p.y_stride;
    in.gates[r][0] = decay_of(row[p.alpha_offset + head], a[head], dt_bias[head]);
    in.gates[r][1] = sigmoid(row[p.beta_offset + head]);
  }
  __syncthreads();
  for (int i = warp; i < 2 * rows; i += warps) normalize_head(i & 1 ? in.k[i / 2] : in.q[i / 2], !(i & 1));
  __syncthreads();
}

__device__ __forceinline__ void finish(const Delta& p, const float* y, float* window, int first, int rows, int key_head, const float* norm) {
  const int warp = threadIdx.x / 32, warps = DELTA_THREADS / 32;
  if (p.out)
    for (int i = warp; i < rows * HEADS_PER_KEY; i += warps) {
      const int row = i / HEADS_PER_KEY, head = key_head + (i % HEADS_PER_KEY) * KEY_HEADS;
      gated_norm(p.raw + (long long)(first + row) * WIDTH + head * DIM, y + (long long)row * p.y_stride + p.z_offset + head * DIM, norm,
                 p.out + (long long)(first + row) * p.out_stride + head * DIM, p.eps);
    }
  if (!p.deferred) {
    for (int i = threadIdx.x; i < GROUP_CHANNELS; i += DELTA_THREADS) advance_window(window, y, p.y_stride, rows, group_channel(key_head, i));
  } else {
    for (int r = 0; r < rows; ++r) {
      const float* row = y + (long long)r * p.y_stride;
      float* target = p.record + (long long)(first + r) * RECORD;
      for (int i = threadIdx.x; i < GROUP_CHANNELS; i += DELTA_THREADS) target[group_channel(key_head, i)] = row[group_channel(key_head, i)];
      for (int i = threadIdx.x; i < HEADS_PER_KEY; i += DELTA_THREADS) {
        const int head = key_head + i * KEY_HEADS;
        target[CHANNELS + head] = row[p.beta_offset + head];
        target[CHANNELS + VALUE_HEADS + head] = row[p.alpha_offset + head];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 1) delta_step(const __grid_constant__ Delta p) {
  __shared__ Inputs in;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, seq = blockIdx.y, key_head = head % KEY_HEADS;
  const int layer = p.layer + blockIdx.z;
  allow_next();
  wait_for_earlier();
  const int first = p.row_starts[seq], slot = p.slot_ids[seq];
  int rows = p.row_starts[seq + 1] - first;
  if (p.accepted) rows = min(max(p.accepted[seq], 0), rows);
  if (rows <= 0) return;
  const float* conv = p.layer_weights ? p.layer_weights[4 * layer] : p.conv;
  const float* a = p.layer_weights ? p.layer_weights[4 * layer + 1] : p.a;
  const float* dt_bias = p.layer_weights ? p.layer_weights[4 * layer + 2] : p.dt_bias;
  const float* y = p.y + blockIdx.z * p.record_stride + (long long)first * p.y_stride;
  float* window = window_of(p, slot, layer);
  const int column = threadIdx.x / LANES, j = threadIdx.x % LANES;
  float* state = state_of(p, slot, layer, head) + (long long)(slice * COLUMNS + column) * DIM;
  Column s;
  s.load(state, j);
  prepare(p, in, y, window, rows, head, slice, conv, a, dt_bias);
  for (int r = 0; r < rows; ++r) {
    const float o = s.step(in.q[r], in.k[r], in.v[r][column], in.gates[r][0], in.gates[r][1], j);
    if (p.out && j == 0) p.raw[(long long)(first + r) * WIDTH + head * DIM + slice * COLUMNS + column] = o;
  }
  if (!p.deferred) s.store(state, j);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = p.counters + (blockIdx.z * p.num_seqs + seq) * KEY_HEADS + key_head;
    in.last = atomicAdd(counter, 1) == HEADS_PER_KEY * SLICES - 1;
    if (in.last) *counter = 0;
  }
  __syncthreads();
  if (!in.last) return;
  __threadfence();
  finish(p, y, window, first, rows, key_head, p.norm);
}
