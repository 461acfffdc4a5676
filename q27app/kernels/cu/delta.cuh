// The gated delta rule: shared by the row family and the prefill, so that both give a row the same bits.
//
// A column of a head's state never mixes with another. LANES lanes share a column, each with VALUES key dimensions in
// registers; the state lies in memory as [value dim][key dim], so a column is contiguous.
//   d = beta (v - decay k . S);  o = decay q . S + (q . k) d;  S = decay S + k d
#pragma once
#include "common.cuh"

constexpr int DIM = DELTA_DIM, KEY_HEADS = DELTA_KEY_HEADS, VALUE_HEADS = DELTA_VALUE_HEADS;
constexpr int CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM;
constexpr int WINDOW = CONV_WIDTH - 1;
constexpr int VALUES = 16, LANES = DIM / VALUES;
constexpr int COLUMNS = DIM / SLICES;                        // value dims of a block
constexpr int DELTA_THREADS = COLUMNS / LANE_COLUMNS * LANES;
static_assert(DIM % 32 == 0 && (LANES & (LANES - 1)) == 0 && LANES <= 32, "lanes of a column are a power of two");
static_assert(DELTA_THREADS % 32 == 0 && DELTA_THREADS <= 1024 && DIM % SLICES == 0, "block size");

struct Delta {
  const float* y;             // [rows, y_stride]: channels, z, beta, alpha at the offsets below
  const float* conv;          // [CHANNELS, CONV_WIDTH]
  const float* a;             // [VALUE_HEADS]  -exp(A_log)
  const float* dt_bias;
  const float* norm;          // [DIM]
  unsigned char* slots;
  const int* positions;       // [rows]
  const int* row_starts;
  const int* slot_ids;
  const int* accepted;        // commit: rows to fold of each sequence; else null
  float* record;              // deferred: [rows, CHANNELS + 2 VALUE_HEADS]; else null
  float* out;                 // [rows, out_stride]; the row family leaves out the gated norm; null in a commit
  float* channels;            // prefill: [rows, CHANNELS] after convolution and norms
  float* gates;               // prefill: [rows, VALUE_HEADS, 4] decay, beta, q . k
  long long slot_bytes, state_offset, window_offset;           // of layer 0 in a slot
  long long state_stride, window_stride;                       // from one delta layer to the next
  long long record_stride;                                     // floats, commit only
  const float* const* layer_weights;                           // commit: [layers, 4] conv, a, dt_bias, norm
  const int* keeps;                                            // prefill: [num_keeps, 3] sequence, rows, slot
  int layer, num_seqs, y_stride, z_offset, beta_offset, alpha_offset, out_stride, deferred, num_keeps;
  float eps;
};

__device__ __forceinline__ float* state_of(const Delta& p, int slot, int layer, int head) {
  return reinterpret_cast<float*>(p.slots + slot * p.slot_bytes + p.state_offset + layer * p.state_stride) + (long long)head * DIM * DIM;
}
__device__ __forceinline__ float* window_of(const Delta& p, int slot, int layer) {
  return reinterpret_cast<float*>(p.slots + slot * p.slot_bytes + p.window_offset + layer * p.window_stride);
}

// Channel c of the causal convolution: taps oldest first.
__device__ __forceinline__ float convolve(const float* taps, const float (&past)[CONV_WIDTH]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < CONV_WIDTH; ++j) sum = fmaf(taps[j], past[j], sum);
  return silu(sum);
}

__device__ __forceinline__ float decay_of(float alpha, float a, float dt_bias) {
  const float t = __fadd_rn(alpha, dt_bias);
  const float softplus = t > 20.0f ? t : log1pf(expf(t));
  return expf(__fmul_rn(a, softplus));
}

// l2 norm of a head in place; one warp. q also takes 1 / sqrt(DIM).
__device__ __forceinline__ void normalize_head(float* head, bool query) {
  const int lane = threadIdx.x % 32;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) squares = fmaf(head[lane + 32 * i], head[lane + 32 * i], squares);
  const float factor = __fmul_rn(rsqrtf(__fadd_rn(warp_sum(squares), 1e-6f)), query ? rsqrtf((float)DIM) : 1.0f);
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) head[lane + 32 * i] = __fmul_rn(head[lane + 32 * i], factor);
}

// q . k of a normed head; every lane of the warp gets it.
__device__ __forceinline__ float head_product(const float* q, const float* k) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) sum = fmaf(q[lane + 32 * i], k[lane + 32 * i], sum);
  return warp_sum(sum);
}

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
  // One row; every lane of a column gets its o. gates: decay, beta, q . k. Both products are of the state before the row, so
  // that one exchange between lanes is on the way to the next row: q . (decay S + k d) = decay (q . S) + (q . k) d.
  __device__ __forceinline__ void step(const float* q, const float* k, const float (&v)[NUM], const float4& gates, int j, float (&o)[NUM]) {
    float key[VALUES], guess[NUM], read[NUM];
#pragma unroll
    for (int c = 0; c < NUM; ++c) guess[c] = read[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) {
      const float4 x = reinterpret_cast<const float4*>(k)[j + LANES * i], y = reinterpret_cast<const float4*>(q)[j + LANES * i];
      key[4 * i] = x.x, key[4 * i + 1] = x.y, key[4 * i + 2] = x.z, key[4 * i + 3] = x.w;
#pragma unroll
      for (int c = 0; c < NUM; ++c) {
        const float* at = s[c] + 4 * i;
        guess[c] = __fadd_rn(guess[c], fmaf(x.w, at[3], fmaf(x.z, at[2], fmaf(x.y, at[1], __fmul_rn(x.x, at[0])))));
        read[c] = __fadd_rn(read[c], fmaf(y.w, at[3], fmaf(y.z, at[2], fmaf(y.y, at[1], __fmul_rn(y.x, at[0])))));
      }
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
      const float d = __fmul_rn(gates.y, fmaf(-gates.x, guess[c], v[c]));
      o[c] = fmaf(gates.x, read[c], __fmul_rn(gates.z, d));
#pragma unroll
      for (int i = 0; i < VALUES; ++i) s[c][i] = fmaf(key[i], d, __fmul_rn(s[c][i], gates.x));
    }
  }
};

// One warp: out = norm(o) * silu(z) of one head.
__device__ __forceinline__ void gated_norm(const float* o, const float* z, const float* norm, float* out, float eps) {
  const int lane = threadIdx.x % 32;
  float value[DIM / 32], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) {
    value[i] = __ldcg(o + lane + 32 * i);
    squares = fmaf(value[i], value[i], squares);
  }
  const float rms = rsqrtf(warp_sum(squares) / (float)DIM + eps);
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i)
    out[lane + 32 * i] = __fmul_rn(__fmul_rn(__fmul_rn(value[i], rms), norm[lane + 32 * i]), silu(z[lane + 32 * i]));
}

// Row of the window that holds the raw inputs of a position. One row more than the convolution looks back: the row that is
// written is never one that another block still reads.
__device__ __forceinline__ int window_row(int position) { return position % CONV_WIDTH; }

// Keep the last inputs of `rows` rows from `position` on; source points at the first of them.
__device__ __forceinline__ void advance_window(float* window, const float* source, int stride, int rows, int position, int channel) {
  for (int row = max(0, rows - CONV_WIDTH); row < rows; ++row)
    window[window_row(position + row) * CHANNELS + channel] = source[(long long)row * stride + channel];
}
