// Keys and values in the cache: addresses, how a row is stored, how a piece of a tile becomes fp16 in shared memory.
//
// A block holds 64 positions of every layer; layer_offset leads to [K: kv head][64][HEAD_DIM], then V alike.
// KV_FORMAT 0: fp16, saturating. 1: fp8 e4m3, saturating (compute capability 8.9).
#pragma once
#include "common.cuh"

constexpr int BLOCK_POSITIONS = 64;
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;   // query heads of a key head
constexpr int KV_BYTES = KV_FORMAT == 0 ? 2 : 1;
constexpr int KV_ROW = HEAD_DIM * KV_BYTES;
constexpr int KV_HEAD = BLOCK_POSITIONS * KV_ROW;
constexpr int KV_VALUES = NUM_KV_HEADS * KV_HEAD;   // offset of the values in a layer's part
static_assert(HEAD_DIM % 32 == 0 && NUM_HEADS % NUM_KV_HEADS == 0 && ROTARY_DIM % 2 == 0, "head geometry");

struct Attend {
  const float* y;             // [rows, y_stride]: per head (query, gate), keys, values
  const float* q_norm;        // [HEAD_DIM]
  const float* k_norm;
  const float* rope;          // [rows, ROTARY_DIM / 2, 2]
  const int* positions;       // [rows]
  const int* row_starts;      // [seqs + 1]
  const int* block_tables;    // [seqs, max_blocks]
  unsigned char* blocks;
  float* part_ml;             // [rows, max_splits, heads, 2]
  float* part_o;              // [rows, max_splits, heads, HEAD_DIM]
  uint16_t* q_half;           // prefill: [rows, heads, HEAD_DIM] fp16
  float* q_factor;            // prefill: [rows, heads]
  float* out;                 // [rows, out_stride]
  long long block_bytes, layer_offset;
  int num_seqs, rows, y_stride, out_stride, max_blocks, first_position, max_splits;
  float eps;
};

__device__ __forceinline__ unsigned char* kv_tile(const Attend& p, int seq, int position, int head) {
  const int block = p.block_tables[seq * p.max_blocks + position / BLOCK_POSITIONS];
  return p.blocks + block * p.block_bytes + p.layer_offset + head * KV_HEAD + (position % BLOCK_POSITIONS) * KV_ROW;
}

// One warp: norm over the head, rotary angles on the first ROTARY_DIM dimensions. Leaves [HEAD_DIM] in work.
__device__ __forceinline__ void norm_rope(const Attend& p, const float* source, const float* norm, int row, float* work) {
  const int lane = threadIdx.x % 32;
  constexpr int PER_LANE = HEAD_DIM / 32, HALF = ROTARY_DIM / 2;
  float value[PER_LANE], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    value[i] = source[lane + 32 * i];
    squares = fmaf(value[i], value[i], squares);
  }
  const float rms = rsqrtf(warp_sum(squares) / (float)HEAD_DIM + p.eps);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) work[lane + 32 * i] = value[i] * rms * norm[lane + 32 * i];
  __syncwarp();
  const float2* angles = reinterpret_cast<const float2*>(p.rope) + (long long)row * HALF;
  for (int d = lane; d < HALF; d += 32) {
    const float a = work[d], b = work[d + HALF];
    const float2 turn = angles[d];
    work[d] = fmaf(a, turn.x, -__fmul_rn(b, turn.y));
    work[d + HALF] = fmaf(b, turn.x, __fmul_rn(a, turn.y));
  }
  __syncwarp();
}

__device__ __forceinline__ float to_half_range(float value) { return fminf(fmaxf(value, -65504.0f), 65504.0f); }

// One warp: [HEAD_DIM] floats -> a row of the cache.
__device__ __forceinline__ void store_kv_row(const float* values, unsigned char* target) {
  for (int d = 2 * (threadIdx.x % 32); d < HEAD_DIM; d += 64) {
    if (KV_FORMAT == 0)
      *reinterpret_cast<uint32_t*>(target + d * 2) = half2_from_floats(to_half_range(values[d]), to_half_range(values[d + 1]));
    else
      *reinterpret_cast<uint16_t*>(target + d) = (uint16_t)e4m3x2_from_floats(values[d], values[d + 1]);
  }
}

// One warp: key and value of a row and key head into the cache. work: [HEAD_DIM] floats.
__device__ __forceinline__ void write_kv(const Attend& p, int seq, int row, int head, float* work) {
  const float* keys = p.y + (long long)row * p.y_stride + 2 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM;
  unsigned char* target = kv_tile(p, seq, p.positions[row], head);
  norm_rope(p, keys, p.k_norm, row, work);
  store_kv_row(work, target);
  store_kv_row(keys + NUM_KV_HEADS * HEAD_DIM, target + KV_VALUES);
  __syncwarp();
}

// One warp: a query row as fp16, scaled by a power of two; returns what brings a product back and divides by sqrt(D).
__device__ __forceinline__ float write_query(const Attend& p, int row, int head, float* work, uint16_t* target) {
  norm_rope(p, p.y + (long long)row * p.y_stride + head * 2 * HEAD_DIM, p.q_norm, row, work);
  float largest = 0.0f;
  for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32) largest = fmaxf(largest, fabsf(work[d]));
  const float scale = half_range_scale(warp_max(largest));
  for (int d = 2 * (threadIdx.x % 32); d < HEAD_DIM; d += 64)
    *reinterpret_cast<uint32_t*>(target + d) = half2_from_floats(work[d] * scale, work[d + 1] * scale);
  __syncwarp();
  return power_inverse(scale) * rsqrtf((float)HEAD_DIM);
}

// 16 bytes of the cache -> fp16 at target.
__device__ __forceinline__ void expand_kv(const uint4& raw, uint16_t* target) {
  if (KV_FORMAT == 0) {
    *reinterpret_cast<uint4*>(target) = raw;
  } else {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      reinterpret_cast<uint4*>(target)[i] =
          make_uint4(half2_from_e4m3x2(word[2 * i] & 0xffff), half2_from_e4m3x2(word[2 * i] >> 16),
                     half2_from_e4m3x2(word[2 * i + 1] & 0xffff), half2_from_e4m3x2(word[2 * i + 1] >> 16));
  }
}

// A tile of KEYS consecutive positions of one head, carried in registers from the cache to shared memory.
template <int KEYS, int TILE_THREADS> struct KvTile {
  static constexpr int CHUNKS = KEYS * KV_ROW / 16, PER_THREAD = (CHUNKS + TILE_THREADS - 1) / TILE_THREADS;
  static constexpr int ROW_CHUNKS = KV_ROW / 16, VALUES = 16 / KV_BYTES;
  static_assert(KV_ROW % 16 == 0, "a row is a whole number of 16-byte pieces");
  uint4 raw[PER_THREAD];

  // Keys outside [first, end) become zeros.
  __device__ __forceinline__ void load(const unsigned char* tile, int position, int first, int end) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int chunk = threadIdx.x + i * TILE_THREADS, key = position + chunk / ROW_CHUNKS;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (chunk < CHUNKS && key >= first && key < end) raw[i] = __ldcg(reinterpret_cast<const uint4*>(tile) + chunk);
    }
  }
  __device__ __forceinline__ void store(uint16_t* shared, int stride) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int chunk = threadIdx.x + i * TILE_THREADS;
      if (chunk < CHUNKS) expand_kv(raw[i], shared + chunk / ROW_CHUNKS * stride + chunk % ROW_CHUNKS * VALUES);
    }
  }
};
