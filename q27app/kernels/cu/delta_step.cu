// delta_step, delta_steps, delta_one, delta_many: convolution, gates and gated delta rule for few rows of a sequence or of several, or
// one row of each. delta_fold: accepted rows of a deferred pass.
// Reference: reference.delta      Used by: layers.run_layer, Backend.commit
// Shapes:    y [rows, C + 2 Nv (+ Nv Dv)] f32 -> out [rows, Nv Dv] f32 before the gated norm; state [Nv, Dv, Dk] f32 and
//            window [4, C] of a slot
// Layout:    delta.cuh
// Launch:    by Form: grid (value heads * SLICES, seqs), block (THREADS), static shared memory; delta_fold grid
//            (value heads * SLICES + channels / THREADS, seqs, layers), block (THREADS) of its Form;
//            delta_window grid (channels / 256, seqs), block (256); delta_gate grid (rows), block (256)
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH    Limits: 16 rows a sequence
// Numbers:   f32 throughout, fixed order; equals the reference to 1e-5. Bound: memory (the state), latency.
//
// A column of a head's state never mixes with another. LANES lanes share a column, each with VALUES key dimensions in
// registers; the state lies in memory as [value dim][key dim], so a column is contiguous. With raw keys and queries, n their norms:
//   l = beta nk (v - decay nk k . S);  o = decay nq q . S + nq (q . k) l;  S = decay S + k l
// so that norms and products are sums over the same lanes at once, and a row has the same bits in every Form and company.
// The gated norm needs a whole head and is applied where the output is next read (staging.cuh), or by delta_gate. State, window and
// the pass's arrays are fetched before the kernel waits for its inputs: nothing since the last pass has written them.
#include "delta.cuh"

constexpr int VALUES = 16, LANES = DIM / VALUES;
static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32, "lanes of a column are a power of two");
constexpr int MAX_ROWS = 16;
// Floats of a deferred row: raw channels for the window, keys before their norm, what each column learns of them, decays.
constexpr int KEYS_AT = CHANNELS, STEPS_AT = KEYS_AT + KEY_HEADS * DIM, DECAYS_AT = STEPS_AT + VALUE_HEADS * DIM;
constexpr int RECORD = (DECAYS_AT + VALUE_HEADS + 3) / 4 * 4;


// How a head is shared out: value dims of a block, columns of a lane, rows of a sequence at most.
template <int COLUMNS_, int NUM_, int ROWS_> struct Form {
  static constexpr int COLUMNS = COLUMNS_, NUM = NUM_, ROWS = ROWS_, SLICES = DIM / COLUMNS;
  static constexpr int STATE_THREADS = COLUMNS / NUM * LANES, BLOCK_CHANNELS = 2 * DIM + COLUMNS;
  // Several rows: a channel a thread, some threads without columns; one row: the channels are shared out.
  static constexpr int WIDE = (BLOCK_CHANNELS + 31) / 32 * 32, THREADS = ROWS == 1 || WIDE < STATE_THREADS ? STATE_THREADS : WIDE;
  static constexpr int EACH = (BLOCK_CHANNELS + THREADS - 1) / THREADS;
  static_assert(STATE_THREADS % 32 == 0 && THREADS <= 1024 && DIM % COLUMNS == 0, "block size");
};
constexpr int HALF = DIM < 64 ? DIM : 64;   // columns of most blocks
using Step = Form<HALF, 2, MAX_ROWS>;
using One = Form<HALF, 1, 1>;
using Many = Form<32, 2, 1>;
using Fold = Form<DIM < 128 ? DIM : DIM / 4, 1, 1>;

// Of a row and head, see above. `scale` and `beta` before the norms are known: see with_norms.
struct __align__(16) Gates {
  float decay, learned, read, both, scale, beta, unused[2];
};
template <class F> struct __align__(16) Inputs {
  float q[F::ROWS][DIM], k[F::ROWS][DIM], v[F::ROWS][F::COLUMNS];
  Gates gates[F::ROWS];
};

__device__ __forceinline__ float dot4(const float4& x, const float4& y) { return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, __fmul_rn(x.x, y.x)))); }
__device__ __forceinline__ float dot(const float4 (&x)[VALUES / 4], const float4 (&y)[VALUES / 4]) {   // a lane's part, in the order of all of them
  float part[VALUES / 4];
#pragma unroll
  for (int i = 0; i < VALUES / 4; ++i) part[i] = dot4(x[i], y[i]);
#pragma unroll
  for (int distance = VALUES / 8; distance > 0; distance >>= 1)
#pragma unroll
    for (int i = 0; i < distance; ++i) part[i] = __fadd_rn(part[i], part[i + distance]);
  return part[0];
}
template <int NUM> __device__ __forceinline__ void lanes_sum(float (&value)[NUM]) {   // over the lanes of a column; every lane gets it
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance >>= 1)
#pragma unroll
    for (int i = 0; i < NUM; ++i) value[i] = __fadd_rn(value[i], __shfl_xor_sync(ALL_LANES, value[i], distance));
}
__device__ __forceinline__ void load_lane(float4 (&x)[VALUES / 4], const float* row, int j) {
#pragma unroll
  for (int i = 0; i < VALUES / 4; ++i) x[i] = reinterpret_cast<const float4*>(row)[j + LANES * i];
}
// sums: of squares of queries, of keys, of their products.
__device__ __forceinline__ Gates with_norms(const Gates& g, const float* sums) {
  const float q = __fmul_rn(rsqrtf(__fadd_rn(sums[0], 1e-6f)), rsqrtf((float)DIM)), k = rsqrtf(__fadd_rn(sums[1], 1e-6f));
  Gates out = g;
  out.scale = __fmul_rn(g.beta, k);
  out.learned = __fmul_rn(__fmul_rn(out.scale, g.decay), k);
  out.read = __fmul_rn(g.decay, q);
  out.both = __fmul_rn(q, sums[2]);
  return out;
}

// The lane's share of NUM columns: key dims 4 (j + LANES i) + e in [i].
template <int NUM> struct Columns {
  float4 s[NUM][VALUES / 4];
  __device__ __forceinline__ void load(const float* column, int j) {
#pragma unroll
    for (int c = 0; c < NUM; ++c)
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i) s[c][i] = __ldcg(reinterpret_cast<const float4*>(column + c * DIM) + j + LANES * i);
  }
  __device__ __forceinline__ void store(float* column, int j) const {
#pragma unroll
    for (int c = 0; c < NUM; ++c)
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i) reinterpret_cast<float4*>(column + c * DIM)[j + LANES * i] = s[c][i];
  }
  __device__ __forceinline__ void advance(int c, const float4 (&k)[VALUES / 4], float learned, float decay) {
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) {
      float4& at = s[c][i];
      at.x = fmaf(k[i].x, learned, __fmul_rn(at.x, decay)), at.y = fmaf(k[i].y, learned, __fmul_rn(at.y, decay));
      at.z = fmaf(k[i].z, learned, __fmul_rn(at.z, decay)), at.w = fmaf(k[i].w, learned, __fmul_rn(at.w, decay));
    }
  }
  // One row; every lane of a column gets its o. Products are of the state before the row, so that one exchange between lanes is on
  // the way to the next row. ALONE: norms too.
  template <bool ALONE, class R> __device__ __forceinline__ void step(const R& row, float (&o)[NUM], float (&learned)[NUM]) {
    float sums[2 * NUM + (ALONE ? 3 : 0)];
#pragma unroll
    for (int c = 0; c < NUM; ++c) sums[2 * c] = dot(row.k, s[c]), sums[2 * c + 1] = dot(row.q, s[c]);
    if constexpr (ALONE) sums[2 * NUM] = dot(row.q, row.q), sums[2 * NUM + 1] = dot(row.k, row.k), sums[2 * NUM + 2] = dot(row.q, row.k);
    lanes_sum(sums);
    const Gates g = ALONE ? with_norms(row.gates, sums + 2 * NUM) : row.gates;
#pragma unroll
    for (int c = 0; c < NUM; ++c) {
      learned[c] = fmaf(-g.learned, sums[2 * c], __fmul_rn(g.scale, row.v[c]));
      o[c] = fmaf(g.read, sums[2 * c + 1], __fmul_rn(g.both, learned[c]));
      advance(c, row.k, learned[c], g.decay);
    }
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

template <class F> __device__ __forceinline__ int channel_of(int i, int head, int slice) {
  const int key_head = head % KEY_HEADS;
  return i < DIM ? key_head * DIM + i : i < 2 * DIM ? (KEY_HEADS + key_head) * DIM + i - DIM : (2 * KEY_HEADS + head) * DIM + slice * F::COLUMNS + i - 2 * DIM;
}

static_assert(CONV_WIDTH == 4, "taps are read at once");
struct Taps {   // of a channel; loaded before the inputs are there
  float taps[CONV_WIDTH], past[CONV_WIDTH];
  __device__ __forceinline__ void load(const float* conv, const float* window, int position, int channel) {
    const float4 all = reinterpret_cast<const float4*>(conv)[channel];
    taps[0] = all.x, taps[1] = all.y, taps[2] = all.z, taps[3] = all.w;
#pragma unroll
    for (int j = 0; j < WINDOW; ++j) past[j + 1] = __ldcg(window + window_row(position + 1 + j) * CHANNELS + channel);
  }
};


// What a block works on.
template <class F> struct Place {
  Span span;
  int head, slice, column, j;   // the thread's first column in the block, its lane there
  bool has_state;
  __device__ __forceinline__ void open(const Delta& p) {
    head = blockIdx.x / F::SLICES, slice = blockIdx.x % F::SLICES;
    column = threadIdx.x / LANES * F::NUM, j = threadIdx.x % LANES;
    has_state = F::THREADS == F::STATE_THREADS || threadIdx.x < F::STATE_THREADS;
    span = span_of(p, blockIdx.y);
  }
  __device__ __forceinline__ int channel(int e) const { return channel_of<F>(min((int)threadIdx.x + e * F::THREADS, F::BLOCK_CHANNELS - 1), head, slice); }
  __device__ __forceinline__ int output() const { return head * DIM + slice * F::COLUMNS + column; }
};

// Convolution and gates of all rows into shared memory; what a commit needs of them to the record. One block keeps each channel.
template <class F> __device__ __forceinline__ void prepare(const Delta& p, Inputs<F>& in, const Place<F>& at, Taps (&t)[F::EACH], float* window, float a, float dt_bias) {
  const int rows = F::ROWS == 1 ? 1 : at.span.rows, gate_row = F::THREADS - 1 - threadIdx.x;
  const float* y = p.y + (long long)at.span.first * p.y_stride;
  float raw[F::EACH][F::ROWS], alpha = 0.0f, beta = 0.0f;
#pragma unroll
  for (int e = 0; e < F::EACH; ++e)
#pragma unroll
    for (int r = 0; r < F::ROWS; ++r) raw[e][r] = r < rows ? __ldcg(y + (long long)r * p.y_stride + at.channel(e)) : 0.0f;
  if (gate_row < rows) {
    const float* row = y + (long long)gate_row * p.y_stride + at.head;
    alpha = __ldcg(row + p.alpha_offset), beta = __ldcg(row + p.beta_offset);
  }
#pragma unroll
  for (int e = 0; e < F::EACH; ++e) {
    const int i = threadIdx.x + e * F::THREADS, channel = at.channel(e);
    if (i >= F::BLOCK_CHANNELS) break;
    const bool mine = i >= 2 * DIM || (at.head < KEY_HEADS && at.slice == 0);
    float* target = i < DIM ? in.q[0] + i : i < 2 * DIM ? in.k[0] + i - DIM : in.v[0] + i - 2 * DIM;
    if (mine && !p.deferred && rows == 1) window[window_row(at.span.position) * CHANNELS + channel] = raw[e][0];
    float* record = mine && p.deferred ? p.record + (long long)at.span.first * RECORD : nullptr;
#pragma unroll
    for (int r = 0; r < F::ROWS; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int n = 0; n < WINDOW; ++n) t[e].past[n] = t[e].past[n + 1];
      t[e].past[WINDOW] = raw[e][r];
      const float value = convolve(t[e].taps, t[e].past);
      target[r * (i < 2 * DIM ? DIM : F::COLUMNS)] = value;
      if (!record) continue;
      record[r * RECORD + channel] = raw[e][r];
      if (i >= DIM && i < 2 * DIM) record[r * RECORD + KEYS_AT + at.head * DIM + i - DIM] = value;
    }
  }
  if (gate_row < rows) {
    Gates& g = in.gates[gate_row];
    g.decay = decay_of(alpha, a, dt_bias), g.beta = sigmoid(beta);
    if (p.deferred && at.slice == 0) p.record[(long long)(at.span.first + gate_row) * RECORD + DECAYS_AT + at.head] = g.decay;
  }
}

// Norms of several rows, LANES lanes a row.
template <class F> __device__ __forceinline__ void norm_rows(Inputs<F>& in, int rows, int j) {
  constexpr int TOGETHER = 32 / LANES;   // rows of a warp: it stays together
  for (int r = threadIdx.x / LANES; r / TOGETHER * TOGETHER < rows; r += F::THREADS / LANES) {
    float4 k[VALUES / 4], q[VALUES / 4];
    load_lane(k, in.k[min(r, rows - 1)], j), load_lane(q, in.q[min(r, rows - 1)], j);
    float sums[3] = {dot(q, q), dot(k, k), dot(q, k)};
    lanes_sum(sums);
    if (j == 0 && r < rows) in.gates[r] = with_norms(in.gates[r], sums);
  }
}

// What a lane needs of a row; of several, asked for a row ahead.
template <int NUM> struct Row {
  float4 k[VALUES / 4], q[VALUES / 4];
  Gates gates;
  float v[NUM];
  template <class F> __device__ __forceinline__ void load(const Inputs<F>& in, int r, const Place<F>& at) {
    load_lane(k, in.k[r], at.j), load_lane(q, in.q[r], at.j);
    gates = in.gates[r];
#pragma unroll
    for (int c = 0; c < NUM; ++c) v[c] = in.v[r][at.column + c];
  }
};

// Weights of the next kernel into the second cache: its blocks find no room beside these, and memory would rest while these wait.
__device__ __forceinline__ void bring_near(const Delta& p) {
#if __CUDA_ARCH__ >= 900
  constexpr int PIECE = 4096;
  const long long blocks = gridDim.x * gridDim.y, block = (long long)blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x >= 32) return;
  for (long long i = block + threadIdx.x * blocks; i < p.ahead_bytes / PIECE; i += 32 * blocks)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.ahead + i * PIECE), "r"(PIECE) : "memory");
#endif
}

template <class F> __device__ __forceinline__ void delta_rows(const Delta& p, Inputs<F>& in) {
  Place<F> at;
  at.open(p);
  allow_next();
  float* state = state_of(p, at.span.slot, p.layer, at.head) + (long long)(at.slice * F::COLUMNS + at.column) * DIM;
  float* window = window_of(p, at.span.slot, p.layer);
  Columns<F::NUM> s;
  if (at.has_state) s.load(state, at.j);
  Taps taps[F::EACH];
#pragma unroll
  for (int e = 0; e < F::EACH; ++e) taps[e].load(p.conv, window, at.span.position, at.channel(e));
  const float a = p.a[at.head], dt_bias = p.dt_bias[at.head];
  if constexpr (F::ROWS == 1) bring_near(p);
  wait_for_earlier();
  if (at.span.rows <= 0) return;
  prepare(p, in, at, taps, window, a, dt_bias);
  __syncthreads();
  if constexpr (F::ROWS > 1) {
    norm_rows(in, at.span.rows, at.j);
    __syncthreads();
  }
  if (!at.has_state) return;
  float* out = p.out + (long long)at.span.first * p.out_stride + at.output();
  float* record = p.deferred ? p.record + (long long)at.span.first * RECORD + STEPS_AT + at.output() : nullptr;
  Row<F::NUM> row, next;
  row.load(in, 0, at);
#pragma unroll 2
  for (int r = 0; r < (F::ROWS == 1 ? 1 : at.span.rows); ++r) {
    float o[F::NUM], learned[F::NUM];
    if constexpr (F::ROWS > 1) next.load(in, min(r + 1, at.span.rows - 1), at);
    s.template step<F::ROWS == 1>(row, o, learned);
    if constexpr (F::ROWS > 1) row = next;
#pragma unroll
    for (int c = 0; c < F::NUM; ++c)
      if (at.j == c % LANES) {
        out[c] = o[c];
        if (record) record[c] = learned[c];
      }
    out += p.out_stride;
    if (record) record += RECORD;
  }
  if (!p.deferred) s.store(state, at.j);
}

// One sequence: fewer blocks than multiprocessors, so each may have all registers that it likes.
extern "C" __global__ void __launch_bounds__(Step::THREADS, 1) delta_step(const __grid_constant__ Delta p) {
  __shared__ Inputs<Step> in;
  delta_rows(p, in);
}
extern "C" __global__ void __launch_bounds__(Step::THREADS, Step::THREADS <= 320 ? 2 : 1) delta_steps(const __grid_constant__ Delta p) {
  __shared__ Inputs<Step> in;
  delta_rows(p, in);
}
extern "C" __global__ void __launch_bounds__(One::THREADS, 1024 / One::THREADS) delta_one(const __grid_constant__ Delta p) {
  __shared__ Inputs<One> in;
  delta_rows(p, in);
}
#if __CUDA_ARCH__ >= 1200
constexpr int MANY_THREADS = 640;   // of a multiprocessor; more spill
#else
constexpr int MANY_THREADS = 768;
#endif
extern "C" __global__ void __launch_bounds__(Many::THREADS, MANY_THREADS / Many::THREADS) delta_many(const __grid_constant__ Delta p) {
  __shared__ Inputs<Many> in;
  delta_rows(p, in);
}

// A channel's inputs of the last rows, which the next rows look back on. layer: from p.layer on, of those that p.y has.
__device__ __forceinline__ void keep_window(const Delta& p, int layer, int channel) {
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0 || channel >= CHANNELS || (span.rows == 1 && !p.accepted)) return;
  const float* y = p.y + layer * p.record_stride + (long long)span.first * p.y_stride;
  advance_window(window_of(p, span.slot, p.layer + layer), y, p.y_stride, span.rows, span.position, channel);
}

struct __align__(16) Recorded {
  float k[MAX_ROWS][DIM], learned[MAX_ROWS][Fold::COLUMNS], decay[MAX_ROWS];
};

// The state after the accepted rows of a deferred pass, with the bits that they would have left there: what depends on the state is
// recorded, so rows follow each other without an exchange between lanes.
//
// Blocks past those of the heads keep the inputs that the next rows look back on.
extern "C" __global__ void __launch_bounds__(Fold::THREADS) delta_fold(const __grid_constant__ Delta p) {
  __shared__ Recorded in;
  const int head = blockIdx.x / Fold::SLICES, slice = blockIdx.x % Fold::SLICES, layer = blockIdx.z;
  allow_next();
  if (head >= VALUE_HEADS) {
    wait_for_earlier();
    keep_window(p, layer, (blockIdx.x - VALUE_HEADS * Fold::SLICES) * Fold::THREADS + threadIdx.x);
    return;
  }
  const int column = threadIdx.x / LANES * Fold::NUM, j = threadIdx.x % LANES;
  float* state = state_of(p, p.slot_ids[blockIdx.y], layer, head) + (long long)(slice * Fold::COLUMNS + column) * DIM;
  Columns<Fold::NUM> s;
  s.load(state, j);
  wait_for_earlier();
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0) return;
  const float* record = p.y + layer * p.record_stride + (long long)span.first * RECORD;
  for (int i = threadIdx.x; i < span.rows * DIM / 4; i += Fold::THREADS) {
    const int r = i / (DIM / 4), at = i % (DIM / 4);
    reinterpret_cast<float4*>(in.k[r])[at] = __ldcg(reinterpret_cast<const float4*>(record + r * RECORD + KEYS_AT + head % KEY_HEADS * DIM) + at);
  }
  for (int i = threadIdx.x; i < span.rows * Fold::COLUMNS; i += Fold::THREADS)
    in.learned[i / Fold::COLUMNS][i % Fold::COLUMNS] = __ldcg(record + i / Fold::COLUMNS * RECORD + STEPS_AT + head * DIM + slice * Fold::COLUMNS + i % Fold::COLUMNS);
  if (threadIdx.x < span.rows) in.decay[threadIdx.x] = __ldcg(record + threadIdx.x * RECORD + DECAYS_AT + head);
  __syncthreads();
  for (int r = 0; r < span.rows; ++r) {
    float4 k[VALUES / 4];
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) k[i] = reinterpret_cast<const float4*>(in.k[r])[j + LANES * i];
#pragma unroll
    for (int c = 0; c < Fold::NUM; ++c) s.advance(c, k, in.learned[r][column + c], in.decay[r]);
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
