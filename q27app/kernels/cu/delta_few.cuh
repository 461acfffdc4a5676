// What the kernels of few rows share (delta_step.cu, delta_flow.cu): how a head is shared out, a lane's part of a column and its step, the
// convolution's inputs.
//
// A column of a head's state never mixes with another. LANES lanes share a column, each with VALUES key dimensions in
// registers; the state lies in memory as [value dim][key dim], so a column is contiguous. With raw keys and queries, n their norms:
//   l = beta nk (v - decay nk k . S);  o = decay nq q . S + nq (q . k) l;  S = decay S + k l
// so that norms and products are sums over the same lanes at once, and a row has the same bits in every Form and company.
#pragma once
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
  static constexpr int LEAVER = STATE_THREADS / 32 - 2;   // one row: the warp that leaves a head
  static constexpr bool LOOKS_AHEAD = ROWS == 1 && NUM == 1 && DIM == 128;   // and whether it has room for what it multiplies it by
  static constexpr int WIDE = (BLOCK_CHANNELS + 31) / 32 * 32, THREADS = ROWS == 1 || WIDE < STATE_THREADS ? STATE_THREADS : WIDE;
  static constexpr int EACH = (BLOCK_CHANNELS + THREADS - 1) / THREADS;
  static_assert(STATE_THREADS % 32 == 0 && THREADS <= 1024 && DIM % COLUMNS == 0, "block size");
};
constexpr int HALF = DIM < 64 ? DIM : 64;   // columns of most blocks
using Step = Form<32, LANES < 4 ? 1 : 2, MAX_ROWS>;
using Steps = Form<HALF, LANES < 4 ? 1 : 2, MAX_ROWS>;
using One = Form<HALF, 1, 1>;
using Many = Form<32, 2, 1>;
using Fold = Form<DIM < 128 ? DIM : DIM / 4, 1, 1>;

// Of a row and head, see above. `scale` and `beta` before the norms are known: see with_norms.
struct __align__(16) Gates {
  float decay, learned, scale, read, both, beta, unused[2];
};
template <class F> struct __align__(16) Inputs {
  float q[F::ROWS][DIM], k[F::ROWS][DIM], v[F::ROWS][F::COLUMNS];
  Gates gates[F::ROWS];
  float4 left[F::LOOKS_AHEAD ? 32 : 1];   // what a head is multiplied by where it is left
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
// The same sums, bit for bit, with each lane left with one of them: number j * NUM / LANES in lane j of a column.
template <int NUM> __device__ __forceinline__ float spread_sum(float (&value)[NUM], int j) {
  static_assert(NUM <= LANES, "a lane is left with one");
#pragma unroll
  for (int distance = LANES / 2, left = NUM / 2; distance > 0; distance >>= 1, left /= 2) {
    const bool is_upper = j & distance;
    if (left == 0) value[0] = __fadd_rn(value[0], __shfl_xor_sync(ALL_LANES, value[0], distance));
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float other = __shfl_xor_sync(ALL_LANES, is_upper ? value[i] : value[i + left], distance);
      value[i] = __fadd_rn(is_upper ? value[i + left] : value[i], other);
    }
  }
  return value[0];
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
  template <bool ONCE = false> __device__ __forceinline__ void store(float* column, int j) const {   // ONCE: the caches need not keep it
#pragma unroll
    for (int c = 0; c < NUM; ++c)
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i) {
        float4* at = reinterpret_cast<float4*>(column + c * DIM) + j + LANES * i;
#ifdef __CUDA_ARCH__
        if constexpr (ONCE) __stcs(at, s[c][i]);
        else
#endif
          *at = s[c][i];
      }
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
  // the way to the next row.
  template <class R> __device__ __forceinline__ void step(const R& row, float (&o)[NUM], float (&learned)[NUM]) {
    float sums[2 * NUM + 3];
#pragma unroll
    for (int c = 0; c < NUM; ++c) sums[2 * c] = dot(row.k, s[c]), sums[2 * c + 1] = dot(row.q, s[c]);
    sums[2 * NUM] = dot(row.q, row.q), sums[2 * NUM + 1] = dot(row.k, row.k), sums[2 * NUM + 2] = dot(row.q, row.k);
    lanes_sum(sums);
    const Gates g = with_norms(row.gates, sums + 2 * NUM);
#pragma unroll
    for (int c = 0; c < NUM; ++c) {
      learned[c] = fmaf(-g.learned, sums[2 * c], __fmul_rn(g.scale, row.v[c]));
      o[c] = fmaf(g.read, sums[2 * c + 1], __fmul_rn(g.both, learned[c]));
      advance(c, row.k, learned[c], g.decay);
    }
  }
  // One of several rows, whose norms are known, with fewer exchanges. Returns what is stored by the lane: in the first half of a column's lanes what
  // column j * NUM / HALF_LANES learned, in the second half the o of column (j - HALF_LANES) * NUM / HALF_LANES.
  static constexpr int HALF_LANES = LANES / 2;
  template <class R> __device__ __forceinline__ float step_of_several(const R& row, int j) {
    float sums[2 * NUM], learned[NUM];
#pragma unroll
    for (int c = 0; c < NUM; ++c) sums[c] = dot(row.k, s[c]), sums[NUM + c] = dot(row.q, s[c]);
    const float own = spread_sum(sums, j);
    const int first = threadIdx.x % 32 - j;
#pragma unroll
    for (int c = 0; c < NUM; ++c) {
      learned[c] = fmaf(-row.gates.learned, __shfl_sync(ALL_LANES, own, first + c * HALF_LANES / NUM), __fmul_rn(row.gates.scale, row.v[c]));
      advance(c, row.k, learned[c], row.gates.decay);
    }
    float mine = learned[0];
#pragma unroll
    for (int c = 1; c < NUM; ++c) mine = column_of(j) == c ? learned[c] : mine;
    return j < HALF_LANES ? mine : fmaf(row.gates.read, own, __fmul_rn(row.gates.both, mine));
  }
  __device__ __forceinline__ static int column_of(int j) { return j % HALF_LANES * NUM / HALF_LANES; }
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

// Where every sequence has one row: nothing is looked up by what was looked up.
__device__ __forceinline__ Span one_row(const Delta& p, int seq) { return {seq, 1, p.positions[seq], p.slot_ids[seq]}; }

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
  int channels[F::EACH];   // not with one row of each, where a thread has several and registers are scarce
  bool has_state;
  __device__ __forceinline__ void open(const Delta& p) {
    head = blockIdx.x / F::SLICES, slice = blockIdx.x % F::SLICES;
    column = threadIdx.x / LANES * F::NUM, j = threadIdx.x % LANES;
    has_state = F::THREADS == F::STATE_THREADS || threadIdx.x < F::STATE_THREADS;
    if constexpr (F::ROWS == 1) span = one_row(p, blockIdx.y);
    else {
      span = span_of(p, blockIdx.y);
#pragma unroll
      for (int e = 0; e < F::EACH; ++e) channels[e] = once(find_channel(e));
    }
  }
  __device__ __forceinline__ int find_channel(int e) const { return channel_of<F>(min((int)threadIdx.x + e * F::THREADS, F::BLOCK_CHANNELS - 1), head, slice); }
  __device__ __forceinline__ int channel(int e) const { return F::ROWS == 1 ? find_channel(e) : channels[e]; }
  __device__ __forceinline__ int output() const { return head * DIM + slice * F::COLUMNS + column; }
};

// Convolution and gates of all rows into shared memory; what a commit needs of them to the record. One block keeps each channel. Rows go by
// AT_ONCE: the last one stands for those that are missing.
template <class F> __device__ __forceinline__ void prepare(const Delta& p, Inputs<F>& in, const Place<F>& at, Taps (&t)[F::EACH], float* window, float a, float dt_bias) {
  constexpr int AT_ONCE = F::ROWS == 1 ? 1 : 4;
  const int rows = F::ROWS == 1 ? 1 : at.span.rows, gate_row = F::THREADS - 1 - threadIdx.x;
  const float* y = p.y + (long long)at.span.first * p.y_stride;
  float raw[F::EACH][F::ROWS], alpha = 0.0f, beta = 0.0f;
#pragma unroll
  for (int first = 0; first < F::ROWS; first += AT_ONCE)
    if (first < rows)
#pragma unroll
      for (int e = 0; e < F::EACH; ++e)
#pragma unroll
        for (int r = first; r < first + AT_ONCE; ++r) raw[e][r] = __ldcg(y + (at.channel(e) + min(r, rows - 1) * p.y_stride));
  if (gate_row < rows) {
    const float* row = y + (long long)gate_row * p.y_stride + at.head;
    alpha = __ldcg(row + p.alpha_offset), beta = __ldcg(row + p.beta_offset);
  }
#pragma unroll
  for (int e = 0; e < F::EACH; ++e) {
    const int i = threadIdx.x + e * F::THREADS, channel = at.channel(e);
    if (i >= F::BLOCK_CHANNELS) break;
    const bool mine = i >= 2 * DIM || (at.head < KEY_HEADS && at.slice == 0), is_recorded = mine && p.deferred, is_key = is_recorded && i >= DIM && i < 2 * DIM;
    const int step = i < 2 * DIM ? DIM : F::COLUMNS, inputs = at.span.first * RECORD + channel, keys = at.span.first * RECORD + KEYS_AT + at.head * DIM + i - DIM;
    float* target = i < DIM ? in.q[0] + i : i < 2 * DIM ? in.k[0] + i - DIM : in.v[0] + i - 2 * DIM;
    if (mine && !p.deferred && rows == 1) window[window_row(at.span.position) * CHANNELS + channel] = raw[e][0];
#pragma unroll
    for (int first = 0; first < F::ROWS; first += AT_ONCE) {
      if (first >= rows) break;
#pragma unroll
      for (int r = first; r < first + AT_ONCE; ++r) {
#pragma unroll
        for (int n = 0; n < WINDOW; ++n) t[e].past[n] = t[e].past[n + 1];
        t[e].past[WINDOW] = raw[e][r];
        const float value = convolve(t[e].taps, t[e].past);
        target[r * step] = value;
        if (is_recorded && r < rows) p.record[inputs + r * RECORD] = raw[e][r];
        if (is_key && r < rows) p.record[keys + r * RECORD] = value;
      }
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

// Rows that are left ready for the next stage (ready.cuh). The norm is over a head, so that blocks post what their columns give, word by word,
// and a warp of the block with the head's last columns takes all of it: blocks wait for those with smaller numbers alone.
constexpr bool LEAVES = DIM == 128;   // four columns a lane
__device__ __forceinline__ bool leaves(const Delta& p) { return LEAVES && p.ready.units; }
__device__ __forceinline__ void put(const Delta& p, float* at, float value) {
  if (leaves(p)) post_word(reinterpret_cast<uint32_t*>(at), value);
  else *at = value;
}
__device__ __forceinline__ float4 gate_of(const float4& norm, const float4& z) {
  return make_float4(__fmul_rn(norm.x, silu(z.x)), __fmul_rn(norm.y, silu(z.y)), __fmul_rn(norm.z, silu(z.z)), __fmul_rn(norm.w, silu(z.w)));
}
__device__ __forceinline__ float4 load_norm(const Delta& p) { return reinterpret_cast<const float4*>(p.norm)[threadIdx.x % 32]; }
__device__ __forceinline__ float4 load_z(const Delta& p, int row, int head) {
  return __ldcg(reinterpret_cast<const float4*>(p.y + (long long)row * p.y_stride + p.z_offset + head * DIM) + threadIdx.x % 32);
}
// One warp. gate_now(): what the columns are multiplied by, asked for behind the wait for the words.
template <class Gate> __device__ __forceinline__ void leave_head(const Delta& p, int row, int head, const Gate& gate_now) {
  const int place = head * DIM + threadIdx.x % 32 * 4;
  float4 o = take_words(reinterpret_cast<uint32_t*>(p.out) + (long long)row * p.out_stride + place);
  const float rms = rsqrtf(warp_sum(dot4(o, o)) / (float)DIM + p.eps);
  const float4 gate = gate_now();
  o.x = __fmul_rn(__fmul_rn(o.x, rms), gate.x), o.y = __fmul_rn(__fmul_rn(o.y, rms), gate.y);
  o.z = __fmul_rn(__fmul_rn(o.z, rms), gate.z), o.w = __fmul_rn(__fmul_rn(o.w, rms), gate.w);
  p.ready.leave_four(row, place, o);
  for (int after = place + DIM; head == VALUE_HEADS - 1 && after < p.ready.units * READY_COLS; after += DIM) p.ready.leave_four(row, after, make_float4(0, 0, 0, 0));
}

// What a lane needs of a row.
template <int NUM> struct Row {
  float4 k[VALUES / 4], q[VALUES / 4];
  Gates gates;
  float v[NUM];
  __device__ __forceinline__ void load(const float* queries, const float* keys, const float* values, const Gates& of, int j) {   // values: of the lane's columns
    load_lane(k, keys, j), load_lane(q, queries, j);
    gates = of;
#pragma unroll
    for (int c = 0; c < NUM; ++c) v[c] = values[c];
  }
  template <class F> __device__ __forceinline__ void load(const Inputs<F>& in, int r, const Place<F>& at) { load(in.q[r], in.k[r], in.v[r] + at.column, in.gates[r], at.j); }
};
