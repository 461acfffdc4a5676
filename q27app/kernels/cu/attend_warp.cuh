// attend_prefill by warps (mma_f16): QUERY_WARPS warps of 16 rows, queries, keys and values in shared memory, row by row.
#pragma once
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int THREADS = QUERY_WARPS * 32, STRIDE = HEAD_DIM + 8;
constexpr int DIM_TILES = HEAD_DIM / 8, STEP = 32, KEY_TILES = STEP / 8;   // keys of a softmax step
static_assert(!TURNED_VALUES || QUERIES * BLOCK_DIMS * 4 <= (QUERIES + 2 * KEYS) * STRIDE * 2, "what was attended fits in shared memory");

extern "C" __global__ void __launch_bounds__(THREADS) attend_prefill(const __grid_constant__ Attend p) {
  SHARED_BYTES(shared);
  uint16_t* q = reinterpret_cast<uint16_t*>(shared);
  uint16_t* k = q + QUERIES * STRIDE;
  uint16_t* v = k + KEYS * STRIDE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, c = lane & 3, head = blockIdx.y, key_head = head / GROUP;
  int seq, first, end;
  if (!find_tile(p, blockIdx.x, seq, first, end)) return;
  for (int i = threadIdx.x; i < QUERIES * (HEAD_DIM / 8); i += THREADS) {
    const int r = i / (HEAD_DIM / 8), piece = i % (HEAD_DIM / 8);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (first + r < end) value = *reinterpret_cast<const uint4*>(p.q_half + ((long long)(first + r) * NUM_HEADS + head) * HEAD_DIM + piece * 8);
    *reinterpret_cast<uint4*>(q + r * STRIDE + piece * 8) = value;
  }
  float factor[2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  int position[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + warp * 16 + g + 8 * i;
    position[i] = row < end ? p.positions[row] : -1;
    factor[i] = row < end ? p.q_factor[(long long)row * NUM_HEADS + head] : 0.0f;
  }
  float out[DIM_BLOCKS][8][4];
#pragma unroll
  for (int n = 0; n < DIM_TILES; ++n) out[n / 8][n % 8][0] = out[n / 8][n % 8][1] = out[n / 8][n % 8][2] = out[n / 8][n % 8][3] = 0.0f;
  const int keys = p.positions[end - 1] + 1;
  const int warp_last = first + warp * 16 < end ? p.positions[min(first + warp * 16 + 15, end - 1)] : -1;
#pragma unroll 1
  for (int start = 0; start < keys; start += KEYS) {
    const unsigned char* source = kv_block(p, seq, start);
    __syncthreads();
    expand_tile<KEY_CODE, THREADS>(source + key_head * K_HEAD, start, p.first_position, keys, StridedRows{k, STRIDE}, threadIdx.x);
    expand_tile<VALUE_CODE, THREADS>(source + KV_VALUES + key_head * V_HEAD, start, p.first_position, keys, StridedRows{v, STRIDE}, threadIdx.x);
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < KEYS; step += STEP) {
    if (start + step > warp_last) break;   // nothing here for this warp
    float score[KEY_TILES][4];
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < HEAD_DIM; d += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, q + (warp * 16 + lane % 16) * STRIDE + d + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < KEY_TILES; n += 2) {
        load_matrices(b, k + (step + (n + lane / 16) * 8 + lane % 8) * STRIDE + d + lane / 8 % 2 * 8);
        mma_f16(score[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_f16(score[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = top[i];
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = start + step + n * 8 + 2 * c + j;
          float& s = score[n][2 * i + j];
          s = key <= position[i] && key >= p.first_position ? __fmul_rn(s, factor[i]) : -INFINITY;
          now = fmaxf(now, s);
        }
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
      correction[i] = now == top[i] ? 1.0f : expf(top[i] - now);
      top[i] = now;
      float part = 0.0f;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& s = score[n][2 * i + j];
          s = now == -INFINITY ? 0.0f : expf(s - now);
          part = __fadd_rn(part, s);
        }
      part = __fadd_rn(part, __shfl_xor_sync(ALL_LANES, part, 1));
      part = __fadd_rn(part, __shfl_xor_sync(ALL_LANES, part, 2));
      sum[i] = fmaf(sum[i], correction[i], part);
    }
    if (__any_sync(ALL_LANES, correction[0] != 1.0f || correction[1] != 1.0f))
#pragma unroll
      for (int n = 0; n < DIM_TILES; ++n) {
        float(&o)[4] = out[n / 8][n % 8];
        o[0] *= correction[0], o[1] *= correction[0], o[2] *= correction[1], o[3] *= correction[1];
      }
    uint32_t a[KEY_TILES / 2][4];
#pragma unroll
    for (int s = 0; s < KEY_TILES / 2; ++s) {
      a[s][0] = half2_from_floats(score[2 * s][0], score[2 * s][1]), a[s][1] = half2_from_floats(score[2 * s][2], score[2 * s][3]);
      a[s][2] = half2_from_floats(score[2 * s + 1][0], score[2 * s + 1][1]), a[s][3] = half2_from_floats(score[2 * s + 1][2], score[2 * s + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n) {
      uint32_t b[4];
      load_transposed(b, v + (step + lane) * STRIDE + n * 8);
      mma_f16(out[n / 8][n % 8], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
      mma_f16(out[n / 8][n % 8], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
    }
    }
  }
  if constexpr (TURNED_VALUES) __syncthreads();   // keys and values give their place to what was attended
  put_attended(p, out, sum, head, first + warp * 16, end, reinterpret_cast<float*>(shared) + warp * 16 * BLOCK_DIMS);
}
