// Embedding rows and norms of rows, by a block of JOIN_THREADS: the first steps of a pass and of the draft layer.
#pragma once
#include "quant.cuh"

constexpr int JOIN_THREADS = 512;

struct Embed {
  const unsigned char* weights;   // packed [vocab, hidden]
  const float* norm;              // mtp: norm of the embedding half
  const float* hidden;            // mtp: [rows, width], null otherwise
  const float* hidden_norm;
  const int* tokens;
  float* out;                     // [rows, width] or [rows, 2 * width]
  int kind, tile_bytes, vocab, width;
  float eps;
  int wrap_units;                 // units of the high part of an f32 matrix, 0 otherwise
};

// Columns 4 four .. 4 four + 3 of a token's row.
__device__ __forceinline__ float4 embed_four(const Embed& p, int token, int four) {
  const unsigned char* tile = p.weights + (long long)(token / TILE_ROWS) * p.tile_bytes;
  float value[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[i] = packed_value(p.kind, tile, token % TILE_ROWS, 4 * four + i);
    if (p.wrap_units) value[i] += packed_value(p.kind, tile, token % TILE_ROWS, 4 * four + i + p.wrap_units * UNIT_COLS);
  }
  return make_float4(value[0], value[1], value[2], value[3]);
}

// out = row / rms(row) * norm. load(k): columns 4 k .. 4 k + 3 of the row; the first of them stay in registers. shared: [JOIN_THREADS / 32].
template <class Load>
__device__ __forceinline__ void put_normed(float* out, const float* norm, int width, float eps, float* shared, const Load& load) {
  constexpr int HELD = 3;
  float4 held[HELD];
  float squares = 0.0f;
  const auto add = [&](const float4& v) { squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares)))); };
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int k = threadIdx.x + i * JOIN_THREADS;
    held[i] = k < width / 4 ? load(k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    add(held[i]);
  }
  for (int k = threadIdx.x + HELD * JOIN_THREADS; k < width / 4; k += JOIN_THREADS) add(load(k));
  const float sum = warp_sum(squares);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < JOIN_THREADS / 32; ++w) total = __fadd_rn(total, shared[w]);
  const float rms = rsqrtf(total / (float)width + eps);
  const auto put = [&](int k, const float4& v) {
    const float4 n = reinterpret_cast<const float4*>(norm)[k];
    reinterpret_cast<float4*>(out)[k] = make_float4(v.x * rms * n.x, v.y * rms * n.y, v.z * rms * n.z, v.w * rms * n.w);
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i)
    if (const int k = threadIdx.x + i * JOIN_THREADS; k < width / 4) put(k, held[i]);
  for (int k = threadIdx.x + HELD * JOIN_THREADS; k < width / 4; k += JOIN_THREADS) put(k, load(k));
}

// [norm(embedding) ; norm(hidden)], the input of the draft layer, half by half.
__device__ __forceinline__ void join_embedding(const Embed& p, int row, int token, float* shared) {
  token = min(max(token, 0), p.vocab - 1);
  put_normed(p.out + (long long)row * 2 * p.width, p.norm, p.width, p.eps, shared, [&](int k) { return embed_four(p, token, k); });
}
__device__ __forceinline__ void join_hidden(const Embed& p, int row, float* shared) {
  const float4* hidden = reinterpret_cast<const float4*>(p.hidden + (long long)row * p.width);
  put_normed(p.out + (long long)(2 * row + 1) * p.width, p.hidden_norm, p.width, p.eps, shared, [&](int k) { return hidden[k]; });
}
