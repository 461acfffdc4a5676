// What compute-sanitizer's racecheck says of the ways in which the kernels share memory, each once as they do it and once broken on
// purpose: nvcc -arch=sm_90a -std=c++17 -I q27app/kernels/cu -o races tests/gpu/races.cu; compute-sanitizer --tool racecheck ./races
//
// A report that names a kernel ending in _right is the tool's; every kernel ending in _wrong must be named.
#include <stdio.h>

#include "warpgroup.cuh"

constexpr int STAGES = 2, BYTES = 2048, UNITS = 12, WARPS = 4;

// A bulk copy into a ring by one warp, read by others (linear_tiles, attend_prefill). One lane says that a place is free: MEET, once all
// lanes are there; ALONE, when it has read its own part; EARLY, before it has.
enum Way { MEET, ALONE, EARLY };
template <Way WAY> __device__ __forceinline__ void ring(const unsigned char* source, unsigned* out) {
  __shared__ __align__(128) unsigned char places[STAGES * BYTES];
  __shared__ uint64_t full[STAGES], free_[STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) arrival_init(full + i, 1), arrival_init(free_ + i, WARPS);
    arrival_publish();
  }
  __syncthreads();
  if (warp == WARPS) {
    if (lane == 0)
      for (int unit = 0; unit < UNITS; ++unit) {
        const int stage = unit % STAGES, phase = unit / STAGES;
        arrival_wait(free_ + stage, phase ^ 1);
        arrival_announce(full + stage, BYTES);
        copy_whole(places + stage * BYTES, source + unit * BYTES, BYTES, full + stage);
      }
    return;
  }
  unsigned sum = 0;
  for (int unit = 0; unit < UNITS; ++unit) {
    const int stage = unit % STAGES;
    arrival_wait(full + stage, unit / STAGES);
    if (WAY == EARLY && lane == 0) arrive(free_ + stage);
    for (int i = threadIdx.x; i < BYTES / 4; i += 32 * WARPS) sum += reinterpret_cast<const unsigned*>(places + stage * BYTES)[i];
    if (WAY == MEET) __syncwarp();
    if (WAY != EARLY && lane == 0) arrive(free_ + stage);
  }
  out[threadIdx.x] = sum;
}
extern "C" __global__ void ring_right(const unsigned char* source, unsigned* out) { ring<MEET>(source, out); }
extern "C" __global__ void ring_alone(const unsigned char* source, unsigned* out) { ring<ALONE>(source, out); }
extern "C" __global__ void ring_wrong(const unsigned char* source, unsigned* out) { ring<EARLY>(source, out); }

// One barrier of the block that warps reach at different places (linear_rows: each warp in the loop of its matrix kind).
template <bool WAIT> __device__ __forceinline__ void places(unsigned* out) {
  __shared__ unsigned values[128];
  values[threadIdx.x] = threadIdx.x;
  unsigned other;
  if (threadIdx.x / 32 % 2) {
    if (WAIT) __syncthreads();
    other = values[threadIdx.x ^ 64] + 1;
  } else {
    if (WAIT) __syncthreads();
    other = values[threadIdx.x ^ 64] * 3;
  }
  out[threadIdx.x] = other;
}
extern "C" __global__ void barrier_at_two_places_right(const unsigned char*, unsigned* out) { places<true>(out); }
extern "C" __global__ void barrier_at_two_places_wrong(const unsigned char*, unsigned* out) { places<false>(out); }

// Barriers of halves of a block, then one of the whole block (attend_prefill's groups).
template <bool WHOLE> __device__ __forceinline__ void halves(unsigned* out) {
  __shared__ unsigned values[128];
  const int half = threadIdx.x / 64;
  values[threadIdx.x] = threadIdx.x;
  group_barrier(1 + half, 64);
  const unsigned mine = values[threadIdx.x ^ 32];
  group_barrier(1 + half, 64);
  values[threadIdx.x] = mine + 1;
  if (WHOLE) __syncthreads();
  out[threadIdx.x] = values[threadIdx.x ^ 64];
}
extern "C" __global__ void barriers_of_halves_right(const unsigned char*, unsigned* out) { halves<true>(out); }
extern "C" __global__ void barriers_of_halves_wrong(const unsigned char*, unsigned* out) { halves<false>(out); }

// Asynchronous copies of 16 bytes, waited for by each thread, then a barrier (attend_decode).
template <bool WAIT> __device__ __forceinline__ void copies(const unsigned char* source, unsigned* out) {
  __shared__ __align__(16) unsigned char place[2][128 * 16];
  unsigned sum = 0;
  copy_async_16(place[0] + threadIdx.x * 16, source + threadIdx.x * 16);
  copy_async_commit();
  for (int round = 0; round < 4; ++round) {
    if (WAIT) copy_async_wait<0>();
    __syncthreads();
    copy_async_16(place[(round + 1) % 2] + threadIdx.x * 16, source + (round + 1) * 2048 + threadIdx.x * 16);
    copy_async_commit();
    sum += reinterpret_cast<const unsigned*>(place[round % 2])[threadIdx.x ^ 32];
  }
  copy_async_wait<0>();
  out[threadIdx.x] = sum;
}
extern "C" __global__ void copies_right(const unsigned char* source, unsigned* out) { copies<true>(source, out); }
extern "C" __global__ void copies_wrong(const unsigned char* source, unsigned* out) { copies<false>(source, out); }

int main() {
  unsigned char* source;
  unsigned* out;
  if (cudaMalloc(&source, UNITS * BYTES) || cudaMalloc(&out, 4096) || cudaMemset(source, 1, UNITS * BYTES)) return 1;
#define RUN(KERNEL, THREADS) KERNEL<<<1, THREADS>>>(source, out), printf(#KERNEL ": %s\n", cudaGetErrorString(cudaDeviceSynchronize()))
  RUN(ring_right, 32 * WARPS + 32);
  RUN(ring_alone, 32 * WARPS + 32);
  RUN(ring_wrong, 32 * WARPS + 32);
  RUN(barrier_at_two_places_right, 128);
  RUN(barrier_at_two_places_wrong, 128);
  RUN(barriers_of_halves_right, 128);
  RUN(barriers_of_halves_wrong, 128);
  RUN(copies_right, 128);
  RUN(copies_wrong, 128);
  return 0;
}
