// The gated delta rule: what the row family and the prefill share. A head's state lies in memory as [value dim][key dim].
#pragma once
#include "ready.cuh"

constexpr int DIM = DELTA_DIM, KEY_HEADS = DELTA_KEY_HEADS, VALUE_HEADS = DELTA_VALUE_HEADS;
constexpr int CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM;
constexpr int WINDOW = CONV_WIDTH - 1;
static_assert(DIM % 32 == 0, "a warp takes a head");

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
  float* record;              // deferred: [rows, RECORD] (delta_step.cu); else null
  float* out;                 // [rows, out_stride]; the row family leaves out the gated norm; with `ready` words in its place, zero between launches
  float* channels;            // prefill: [rows, CHANNELS] after convolution and norms
  float* gates;               // prefill: [rows, VALUE_HEADS, 4] decay and beta, then products of decays (delta_chunk.cu)
  float* pairs;               // prefill: [rows, VALUE_HEADS, 32] (delta_chunk.cu)
  const unsigned char* ahead; // what the next kernel reads first
  const int* lacks;           // [seqs] delta_flow: rows that a sequence's states lack, as many records; ~rows: the states are written, and lack none from then on
  float* lacking;             // [slots, lacking_stride] records of rows that states lack (delta_flow.cu)
  long long slot_bytes, state_offset, window_offset;           // of layer 0 in a slot
  long long state_stride, window_stride;                       // from one delta layer to the next
  long long record_stride;                                     // floats, commit only
  long long ahead_bytes, lacking_stride;                       // lacking_stride: floats
  const int* keeps;                                            // prefill: [num_keeps, 3] sequence, rows, slot
  Ready ready;                                                 // row family: where rows go with their gated norm; no units: to out, without it
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

// What a head is multiplied by, from a lane's share of its squares: l2 norm, and 1 / sqrt(DIM) for a query. One warp.
__device__ __forceinline__ float head_factor(float squares, bool query) {
  return __fmul_rn(rsqrtf(__fadd_rn(warp_sum(squares), 1e-6f)), query ? rsqrtf((float)DIM) : 1.0f);
}

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
