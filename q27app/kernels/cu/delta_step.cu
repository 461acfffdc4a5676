// delta_step: convolution, gates and gated delta rule for few rows of each sequence. delta_fold: accepted rows of a deferred pass.
// Reference: reference.delta      Used by: layers.run_layer, Backend.commit
// Shapes:    y [rows, C + 2 Nv (+ Nv Dv)] f32 -> out [rows, Nv Dv] f32 before the gated norm; state [Nv, Dv, Dk] f32 and
//            window [4, C] of a slot
// Layout:    delta.cuh
// Launch:    delta_step grid (value heads * SLICES, seqs), block (BLOCK_THREADS), static shared memory; delta_fold grid
//            (value heads * SLICES + channels / DELTA_THREADS, seqs, layers), block (DELTA_THREADS);
//            delta_window grid (channels / 256, seqs), block (256); delta_gate grid (rows), block (256)
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH, SLICES, LANE_COLUMNS    Limits: 16 rows a sequence
// Numbers:   f32 throughout, fixed order; equals the reference to 1e-5. Bound: memory (the state), latency.
//
// A column of a head's state never mixes with another. LANES lanes share a column, each with VALUES key dimensions in
// registers; the state lies in memory as [value dim][key dim], so a column is contiguous.
//   d = beta (v - decay k . S);  o = decay q . S + (q . k) d;  S = decay S + k d
// The gated norm needs a whole head and is applied where the output is next read (staging.cuh), or by delta_gate. State and
// window are fetched before the kernel waits for its inputs: nothing since the last pass has written them.
#include "delta.cuh"

constexpr int VALUES = 16, LANES = DIM / VALUES;
constexpr int COLUMNS = DIM / SLICES;                        // value dims of a block
constexpr int DELTA_THREADS = COLUMNS / LANE_COLUMNS * LANES;
static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32, "lanes of a column are a power of two");
static_assert(DELTA_THREADS % 32 == 0 && DELTA_THREADS <= 1024 && DIM % SLICES == 0, "block size");
constexpr int MAX_ROWS = 16;
// Floats of a deferred row: raw channels for the window, keys after their norms, d of every column, decays.
constexpr int KEYS_AT = CHANNELS, STEPS_AT = KEYS_AT + KEY_HEADS * DIM, DECAYS_AT = STEPS_AT + VALUE_HEADS * DIM;
constexpr int RECORD = (DECAYS_AT + VALUE_HEADS + 3) / 4 * 4;

// l2 norms of a query and a key in place; one warp. Every lane gets their product.
__device__ __forceinline__ float normalize_pair(float* query, float* key) {
  const int lane = threadIdx.x % 32;
  float q[DIM / 32], k[DIM / 32], queries = 0.0f, keys = 0.0f, product = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) {
    q[i] = query[lane + 32 * i], k[i] = key[lane + 32 * i];
    queries = fmaf(q[i], q[i], queries), keys = fmaf(k[i], k[i], keys), product = fmaf(q[i], k[i], product);
  }
  product = warp_sum(product);
  const float query_factor = head_factor(queries, true), key_factor = head_factor(keys, false);
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) query[lane + 32 * i] = __fmul_rn(q[i], query_factor), key[lane + 32 * i] = __fmul_rn(k[i], key_factor);
  return __fmul_rn(__fmul_rn(product, query_factor), key_factor);
}

struct __align__(16) Inputs {
  float q[MAX_ROWS][DIM], k[MAX_ROWS][DIM], v[MAX_ROWS][COLUMNS], gates[MAX_ROWS][4];   // gates: decay, beta, q . k
};

// What a lane needs of a row; asked for a row ahead.
template <int NUM> struct Row {
  float4 q[VALUES / 4], k[VALUES / 4], gates;
  float v[NUM];
  __device__ __forceinline__ void load(const Inputs& in, int r, int column, int j) {
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) {
      k[i] = reinterpret_cast<const float4*>(in.k[r])[j + LANES * i];
      q[i] = reinterpret_cast<const float4*>(in.q[r])[j + LANES * i];
    }
    gates = *reinterpret_cast<const float4*>(in.gates[r]);
#pragma unroll
    for (int c = 0; c < NUM; ++c) v[c] = in.v[r][column + c];
  }
};

// The lane's share of NUM columns: key dims 4 (j + LANES i) + e at [i * 4 + e].
template <int NUM> struct Columns {
  float s[NUM][VALUES];
  __device__ __forceinline__ void load(const float* column, int j) {
#pragma unroll
    for (int c = 0; c < NUM; ++c)
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(column + c * DIM) + j + LANES * i);
        s[c][4 * i] = v.x, s[c][4 * i + 1] = v.y, s[c][4 * i + 2] = v.z, s[c][4 * i + 3] = v.w;
      }
  }
  __device__ __forceinline__ void store(float* column, int j) const {
#pragma unroll
    for (int c = 0; c < NUM; ++c)
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i)
        reinterpret_cast<float4*>(column + c * DIM)[j + LANES * i] = make_float4(s[c][4 * i], s[c][4 * i + 1], s[c][4 * i + 2], s[c][4 * i + 3]);
  }
  // One row; every lane of a column gets its o. Both products are of the state before the row, so that one exchange between
  // lanes is on the way to the next row: q . (decay S + k d) = decay (q . S) + (q . k) d.
  __device__ __forceinline__ void step(const Row<NUM>& row, float (&o)[NUM], float (&d)[NUM]) {
    float guess[NUM], read[NUM];
#pragma unroll
    for (int c = 0; c < NUM; ++c) {
      float part[VALUES / 4][2];
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i) {
        const float* at = s[c] + 4 * i;
        const float4 x = row.k[i], y = row.q[i];
        part[i][0] = fmaf(x.w, at[3], fmaf(x.z, at[2], fmaf(x.y, at[1], __fmul_rn(x.x, at[0]))));
        part[i][1] = fmaf(y.w, at[3], fmaf(y.z, at[2], fmaf(y.y, at[1], __fmul_rn(y.x, at[0]))));
      }
#pragma unroll
      for (int distance = VALUES / 8; distance > 0; distance >>= 1)
#pragma unroll
        for (int i = 0; i < distance; ++i)
          part[i][0] = __fadd_rn(part[i][0], part[i + distance][0]), part[i][1] = __fadd_rn(part[i][1], part[i + distance][1]);
      guess[c] = part[0][0], read[c] = part[0][1];
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance >>= 1)
#pragma unroll
      for (int c = 0; c < NUM; ++c) {
        guess[c] = __fadd_rn(guess[c], __shfl_xor_sync(ALL_LANES, guess[c], distance));
        read[c] = __fadd_rn(read[c], __shfl_xor_sync(ALL_LANES, read[c], distance));
      }
#pragma unroll
    for (int c = 0; c < NUM; ++c) {
      d[c] = __fmul_rn(row.gates.y, fmaf(-row.gates.x, guess[c], row.v[c]));
      o[c] = fmaf(row.gates.x, read[c], __fmul_rn(row.gates.z, d[c]));
      advance(c, row.k, d[c], row.gates.x);
    }
  }
  __device__ __forceinline__ void advance(int c, const float4 (&k)[VALUES / 4], float d, float decay) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) s[c][i] = fmaf(get(k[i / 4], i % 4), d, __fmul_rn(s[c][i], decay));
  }
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

// A thread has a channel of the block: q and k of its key head, its columns of v. Some threads have no columns of the state.
constexpr int BLOCK_CHANNELS = 2 * DIM + COLUMNS;
constexpr int BLOCK_THREADS = BLOCK_CHANNELS > DELTA_THREADS ? (BLOCK_CHANNELS + 31) / 32 * 32 : DELTA_THREADS;

__device__ __forceinline__ int channel_of(int i, int head, int slice) {
  const int key_head = head % KEY_HEADS;
  return i < DIM ? key_head * DIM + i : i < 2 * DIM ? (KEY_HEADS + key_head) * DIM + i - DIM : (2 * KEY_HEADS + head) * DIM + slice * COLUMNS + i - 2 * DIM;
}

struct Taps {   // of the thread's channel; loaded before the inputs are there
  float taps[CONV_WIDTH], past[CONV_WIDTH];
  __device__ __forceinline__ void load(const float* conv, const float* window, int position, int channel) {
#pragma unroll
    for (int j = 0; j < CONV_WIDTH; ++j) taps[j] = conv[channel * CONV_WIDTH + j];
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) past[j + 1] = __ldcg(window + window_row(position + 1 + j) * CHANNELS + channel);
  }
};

// Gates of the rows, by the last warp.
__device__ __forceinline__ void prepare_gates(const Delta& p, Inputs& in, const Span& span, const float* y, int head, int slice, const float* a, const float* dt_bias) {
  const int r = threadIdx.x - (BLOCK_THREADS - 32);
  if (r < 0 || r >= span.rows) return;
  const float* row = y + (long long)r * p.y_stride;
  const float alpha = __ldcg(row + p.alpha_offset + head), beta = __ldcg(row + p.beta_offset + head);
  in.gates[r][0] = decay_of(alpha, a[head], dt_bias[head]);
  in.gates[r][1] = sigmoid(beta);
  if (p.deferred && slice == 0) p.record[(long long)(span.first + r) * RECORD + DECAYS_AT + head] = in.gates[r][0];
}

__device__ __forceinline__ void prepare(const Delta& p, Inputs& in, const Span& span, const float* y, float* window, int head, int slice,
                                        Taps& t, const float* a, const float* dt_bias) {
  const int i = threadIdx.x, channel = channel_of(min(i, BLOCK_CHANNELS - 1), head, slice);
  float raw[MAX_ROWS];
#pragma unroll
  for (int r = 0; r < MAX_ROWS; ++r) raw[r] = r < span.rows ? __ldcg(y + (long long)r * p.y_stride + channel) : 0.0f;
  prepare_gates(p, in, span, y, head, slice, a, dt_bias);
  if (i < BLOCK_CHANNELS) {
    const bool mine = i >= 2 * DIM || (head < KEY_HEADS && slice == 0);   // one block keeps each channel
    float* target = i < DIM ? in.q[0] + i : i < 2 * DIM ? in.k[0] + i - DIM : in.v[0] + i - 2 * DIM;
    const int stride = i < 2 * DIM ? DIM : COLUMNS;
    if (mine && !p.deferred && span.rows == 1) window[window_row(span.position) * CHANNELS + channel] = raw[0];
    float* record = mine && p.deferred ? p.record + (long long)span.first * RECORD + channel : nullptr;
#pragma unroll
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r >= span.rows) break;
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) t.past[j] = t.past[j + 1];
      t.past[WINDOW] = raw[r];
      target[r * stride] = convolve(t.taps, t.past);
      if (record) record[r * RECORD] = raw[r];
    }
  }
  __syncthreads();
  for (int r = threadIdx.x / 32; r < span.rows; r += BLOCK_THREADS / 32) {
    const float product = normalize_pair(in.q[r], in.k[r]);
    if (threadIdx.x % 32 == 0) in.gates[r][2] = product;
  }
  __syncthreads();
  if (p.deferred && head < KEY_HEADS && slice == 0 && i < DIM)
    for (int r = 0; r < span.rows; ++r) p.record[(long long)(span.first + r) * RECORD + KEYS_AT + head * DIM + i] = in.k[r][i];
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCK_THREADS <= 288 ? 2 : 1) delta_step(const __grid_constant__ Delta p) {
  __shared__ Inputs in;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, slot = p.slot_ids[blockIdx.y];
  allow_next();
  const bool has_state = threadIdx.x < DELTA_THREADS;
  const int column = threadIdx.x / LANES * LANE_COLUMNS, j = threadIdx.x % LANES;
  float* state = state_of(p, slot, p.layer, head) + (long long)(slice * COLUMNS + column) * DIM;
  float* window = window_of(p, slot, p.layer);
  Columns<LANE_COLUMNS> s;
  if (has_state) s.load(state, j);
  Taps taps;
  taps.load(p.conv, window, p.positions[p.row_starts[blockIdx.y]], channel_of(min((int)threadIdx.x, BLOCK_CHANNELS - 1), head, slice));
  wait_for_earlier();
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0) return;
  prepare(p, in, span, p.y + (long long)span.first * p.y_stride, window, head, slice, taps, p.a, p.dt_bias);
  if (!has_state) return;
  const int place = head * DIM + slice * COLUMNS + column;
  float* out = p.out + (long long)span.first * p.out_stride + place;
  float* record = p.deferred ? p.record + (long long)span.first * RECORD + STEPS_AT + place : nullptr;
  Row<LANE_COLUMNS> row;
  row.load(in, 0, column, j);
#pragma unroll 2
  for (int r = 0; r < span.rows; ++r) {
    float o[LANE_COLUMNS], d[LANE_COLUMNS];
    Row<LANE_COLUMNS> next;
    next.load(in, min(r + 1, span.rows - 1), column, j);
    s.step(row, o, d);
    row = next;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c)
      if (j == c) {
        out[c] = o[c];
        if (record) record[c] = d[c];
      }
    out += p.out_stride;
    if (record) record += RECORD;
  }
  if (!p.deferred) s.store(state, j);
}

// A channel's inputs of the last rows, which the next rows look back on. layer: from p.layer on, of those that p.y has.
__device__ __forceinline__ void keep_window(const Delta& p, int layer, int channel) {
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0 || channel >= CHANNELS || (span.rows == 1 && !p.accepted)) return;
  const float* y = p.y + layer * p.record_stride + (long long)span.first * p.y_stride;
  advance_window(window_of(p, span.slot, p.layer + layer), y, p.y_stride, span.rows, span.position, channel);
}

struct __align__(16) Recorded {
  float k[MAX_ROWS][DIM], d[MAX_ROWS][COLUMNS], decay[MAX_ROWS];
};

// The state after the accepted rows of a deferred pass, with the bits that they would have left there: what depends on the state is
// recorded, so rows follow each other without an exchange between lanes.
//
// Blocks past those of the heads keep the inputs that the next rows look back on.
extern "C" __global__ void __launch_bounds__(DELTA_THREADS) delta_fold(const __grid_constant__ Delta p) {
  __shared__ Recorded in;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, layer = blockIdx.z;
  allow_next();
  if (head >= VALUE_HEADS) {
    wait_for_earlier();
    keep_window(p, layer, (blockIdx.x - VALUE_HEADS * SLICES) * DELTA_THREADS + threadIdx.x);
    return;
  }
  const int column = threadIdx.x / LANES * LANE_COLUMNS, j = threadIdx.x % LANES;
  float* state = state_of(p, p.slot_ids[blockIdx.y], layer, head) + (long long)(slice * COLUMNS + column) * DIM;
  Columns<LANE_COLUMNS> s;
  s.load(state, j);
  wait_for_earlier();
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0) return;
  const float* record = p.y + layer * p.record_stride + (long long)span.first * RECORD;
  for (int i = threadIdx.x; i < span.rows * DIM / 4; i += DELTA_THREADS) {
    const int r = i / (DIM / 4), at = i % (DIM / 4);
    reinterpret_cast<float4*>(in.k[r])[at] = __ldcg(reinterpret_cast<const float4*>(record + r * RECORD + KEYS_AT + head % KEY_HEADS * DIM) + at);
  }
  for (int i = threadIdx.x; i < span.rows * COLUMNS; i += DELTA_THREADS)
    in.d[i / COLUMNS][i % COLUMNS] = __ldcg(record + i / COLUMNS * RECORD + STEPS_AT + head * DIM + slice * COLUMNS + i % COLUMNS);
  if (threadIdx.x < span.rows) in.decay[threadIdx.x] = __ldcg(record + threadIdx.x * RECORD + DECAYS_AT + head);
  __syncthreads();
  for (int r = 0; r < span.rows; ++r) {
    float4 k[VALUES / 4];
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) k[i] = reinterpret_cast<const float4*>(in.k[r])[j + LANES * i];
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) s.advance(c, k, in.d[r][column + c], in.decay[r]);
  }
  s.store(state, j);
}

// After several rows in place.
extern "C" __global__ void __launch_bounds__(256) delta_window(const __grid_constant__ Delta p) {
  allow_next();
  wait_for_earlier();
  keep_window(p, 0, blockIdx.x * 256 + threadIdx.x);
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
