// Candidates of a draw: a value and an id in one integer, larger for a larger value and, of equal ones, for the lower id.
#pragma once
#include "common.cuh"

constexpr int CHUNKS = 64;   // parts of a vocabulary whose best are found apart

// NaN counts as -inf, +inf as the largest number: damaged logits still give one definite token.
__device__ __forceinline__ float defined(float value) { return value != value ? -INFINITY : fminf(value, 3.4028234663852886e38f); }
__device__ __forceinline__ uint32_t order(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ unsigned long long candidate(float value, int id) {
  return (unsigned long long)order(value) << 32 | (0xffffffffu - (uint32_t)id);
}
__device__ __forceinline__ int candidate_id(unsigned long long best) { return (int)(0xffffffffu - (uint32_t)best); }
__device__ __forceinline__ unsigned long long larger(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

__device__ __forceinline__ unsigned long long warp_best(unsigned long long value) {
  for (int distance = 16; distance > 0; distance >>= 1) value = larger(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

// The best of a row's chunks, by a block of at least CHUNKS threads, all of which get it. shared: [CHUNKS / 32].
__device__ __forceinline__ unsigned long long best_of_chunks(const unsigned long long* part_best, unsigned long long* shared) {
  unsigned long long best = threadIdx.x < CHUNKS ? part_best[threadIdx.x] : 0;
  if (threadIdx.x < CHUNKS) best = warp_best(best);
  if (threadIdx.x < CHUNKS && threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  best = 0;
  for (int w = 0; w < CHUNKS / 32; ++w) best = larger(best, shared[w]);
  return best;
}

// The two highest values of a row's chunks, likewise. shared: [CHUNKS / 32][2].
__device__ __forceinline__ void top_of_chunks(const float* part_top, float (*shared)[2], float& top, float& second) {
  top = second = -INFINITY;
  if (threadIdx.x < CHUNKS) {
    top = part_top[2 * threadIdx.x], second = part_top[2 * threadIdx.x + 1];
    for (int distance = 16; distance > 0; distance >>= 1) {
      const float other = __shfl_xor_sync(ALL_LANES, top, distance), other_second = __shfl_xor_sync(ALL_LANES, second, distance);
      second = fmaxf(fminf(top, other), fmaxf(second, other_second));
      top = fmaxf(top, other);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][0] = top, shared[threadIdx.x / 32][1] = second;
  }
  __syncthreads();
  top = shared[0][0], second = shared[0][1];
  for (int w = 1; w < CHUNKS / 32; ++w) {
    second = fmaxf(fminf(top, shared[w][0]), fmaxf(second, shared[w][1]));
    top = fmaxf(top, shared[w][0]);
  }
}
