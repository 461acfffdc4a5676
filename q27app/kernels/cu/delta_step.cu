// delta_step: convolution, gates and gated delta rule for few rows of each sequence; folds rows in a commit.
// Reference: reference.delta      Used by: layers.run_layer, Backend.commit
// Shapes:    y [rows, C + 2 Nv (+ Nv Dv)] f32 -> out [rows, Nv Dv] f32 before the gated norm; state [Nv, Dv, Dk] f32 and
//            window [4, C] of a slot
// Layout:    delta.cuh
// Launch:    delta_step grid (value heads * SLICES, seqs, layers), block (DELTA_THREADS), static shared memory;
//            delta_window grid (channels / 256, seqs, layers), block (256); delta_gate grid (rows), block (256)
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH, SLICES    Limits: 16 rows a sequence
// Numbers:   f32 throughout, fixed order; equals the reference to 1e-5. Bound: memory (the state), latency.
//
// The gated norm needs a whole head and is applied where the output is next read (staging.cuh), or by delta_gate. The state
// is fetched before the kernel waits for its inputs: nothing since the last pass has written it.
#include "delta.cuh"

constexpr int MAX_ROWS = 16, RECORD = CHANNELS + 2 * VALUE_HEADS;

struct __align__(16) Inputs {
  float q[MAX_ROWS][DIM], k[MAX_ROWS][DIM], v[MAX_ROWS][COLUMNS], gates[MAX_ROWS][2];
};

struct Span {   // rows of a sequence
  int first, rows, position, slot;
};

__device__ __forceinline__ Span span_of(const Delta& p, int seq) {
  Span s;
  s.first = p.row_starts[seq];
  s.rows = p.row_starts[seq + 1] - s.first;
  if (p.accepted) s.rows = min(max(p.accepted[seq], 0), s.rows);
  s.position = p.positions[s.first];
  s.slot = p.slot_ids[seq];
  return s;
}

__device__ __forceinline__ void prepare(const Delta& p, Inputs& in, const Span& span, const float* y, float* window, int head, int slice,
                                        const float* conv, const float* a, const float* dt_bias) {
  const int key_head = head % KEY_HEADS, warp = threadIdx.x / 32, warps = DELTA_THREADS / 32;
  for (int i = threadIdx.x; i < 2 * DIM + COLUMNS; i += DELTA_THREADS) {
    const int channel = i < DIM ? key_head * DIM + i
                      : i < 2 * DIM ? (KEY_HEADS + key_head) * DIM + i - DIM
                                    : (2 * KEY_HEADS + head) * DIM + slice * COLUMNS + i - 2 * DIM;
    const bool mine = i >= 2 * DIM || (head < KEY_HEADS && slice == 0);   // one block keeps each channel
    float taps[CONV_WIDTH], past[CONV_WIDTH];
#pragma unroll
    for (int j = 0; j < CONV_WIDTH; ++j) taps[j] = conv[channel * CONV_WIDTH + j];
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) past[j + 1] = window[window_row(span.position + 1 + j) * CHANNELS + channel];
    constexpr int BATCH = 4;   // rows whose loads are in flight together
    for (int r0 = 0; r0 < span.rows; r0 += BATCH) {
      float raw[BATCH];
#pragma unroll
      for (int e = 0; e < BATCH; ++e) raw[e] = r0 + e < span.rows ? __ldcg(y + (long long)(r0 + e) * p.y_stride + channel) : 0.0f;
#pragma unroll
      for (int e = 0; e < BATCH; ++e) {
        const int r = r0 + e;
        if (r >= span.rows) break;
#pragma unroll
        for (int j = 0; j < WINDOW; ++j) past[j] = past[j + 1];
        past[WINDOW] = raw[e];
        const float value = convolve(taps, past);
        if (i < DIM) in.q[r][i] = value;
        else if (i < 2 * DIM) in.k[r][i - DIM] = value;
        else in.v[r][i - 2 * DIM] = value;
        if (mine && p.deferred) p.record[(long long)(span.first + r) * RECORD + channel] = past[WINDOW];
        if (mine && !p.deferred && span.rows == 1) window[window_row(span.position) * CHANNELS + channel] = past[WINDOW];
      }
    }
  }
  for (int r = threadIdx.x; r < span.rows; r += DELTA_THREADS) {
    const float* row = y + (long long)r * p.y_stride;
    const float alpha = row[p.alpha_offset + head], beta = row[p.beta_offset + head];
    in.gates[r][0] = decay_of(alpha, a[head], dt_bias[head]);
    in.gates[r][1] = sigmoid(beta);
    if (p.deferred && slice == 0) {
      float* target = p.record + (long long)(span.first + r) * RECORD + CHANNELS + head;
      target[0] = beta, target[VALUE_HEADS] = alpha;
    }
  }
  __syncthreads();
  for (int i = warp; i < 2 * span.rows; i += warps) normalize_head(i & 1 ? in.k[i / 2] : in.q[i / 2], !(i & 1));
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 1) delta_step(const __grid_constant__ Delta p) {
  __shared__ Inputs in;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
  const int layer = p.layer + blockIdx.z;
  allow_next();
  const int column = threadIdx.x / LANES, j = threadIdx.x % LANES;
  float* state = state_of(p, p.slot_ids[blockIdx.y], layer, head) + (long long)(slice * COLUMNS + column) * DIM;
  Column s;
  s.load(state, j);
  const float* conv = p.layer_weights ? p.layer_weights[4 * layer] : p.conv;
  const float* a = p.layer_weights ? p.layer_weights[4 * layer + 1] : p.a;
  const float* dt_bias = p.layer_weights ? p.layer_weights[4 * layer + 2] : p.dt_bias;
  wait_for_earlier();
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0) return;
  const float* y = p.y + blockIdx.z * p.record_stride + (long long)span.first * p.y_stride;
  prepare(p, in, span, y, window_of(p, span.slot, layer), head, slice, conv, a, dt_bias);
  for (int r = 0; r < span.rows; ++r) {
    const float o = s.step(in.q[r], in.k[r], in.v[r][column], in.gates[r][0], in.gates[r][1], j);
    if (p.out && j == 0) p.out[(long long)(span.first + r) * p.out_stride + head * DIM + slice * COLUMNS + column] = o;
  }
  if (!p.deferred) s.store(state, j);
}

// After several rows in place: keep the inputs that the next rows look back on.
extern "C" __global__ void __launch_bounds__(256) delta_window(const __grid_constant__ Delta p) {
  allow_next();
  wait_for_earlier();
  const Span span = span_of(p, blockIdx.y);
  const int layer = p.layer + blockIdx.z, channel = blockIdx.x * 256 + threadIdx.x;
  if (span.rows <= 0 || channel >= CHANNELS || (span.rows == 1 && !p.layer_weights)) return;
  const float* y = p.y + blockIdx.z * p.record_stride + (long long)span.first * p.y_stride;
  advance_window(window_of(p, span.slot, layer), y, p.y_stride, span.rows, span.position, channel);
}

// The gated norm in place.
extern "C" __global__ void __launch_bounds__(256) delta_gate(const __grid_constant__ Delta p) {
  allow_next();
  wait_for_earlier();
  const long long row = blockIdx.x;
  for (int head = threadIdx.x / 32; head < VALUE_HEADS; head += 8) {
    float* o = p.out + row * p.out_stride + head * DIM;
    gated_norm(o, p.y + row * p.y_stride + p.z_offset + head * DIM, p.norm, o, p.eps);
  }
}
