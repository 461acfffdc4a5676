// peaks: what a card can do at most, measured: reading memory once, and matrix instructions out of registers.
// Reference: peaks.expected_read           Used by: peaks.measure_peaks
// Shapes:    peak_read: data [words] uint4 -> out [grid * block] uint32, the exclusive or of what each thread read
//            peak_mma: -> out [grid * block] f32, the sum of each thread's accumulators
// Layout:    data 16-byte aligned; thread t of all T threads reads words t, t + T, ...
// Launch:    grid (any), block (256)
// Defines:   none     Limits: words % (8 T) == 0, so that every thread has whole rounds of 8 reads
// Numbers:   integers; mma_f16 in f32. Bound: memory; tensor cores.
#include "mma.cuh"

struct Peaks {
  const void* data;
  void* out;
  long long words;
  int rounds;
};

extern "C" __global__ void __launch_bounds__(256) peak_read(const __grid_constant__ Peaks p) {
  const uint4* data = (const uint4*)p.data;
  const long long threads = (long long)gridDim.x * blockDim.x, me = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t sum = 0;
  for (long long word = me; word < p.words; word += 8 * threads) {
    uint4 part[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) part[i] = data[word + i * threads];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum ^= part[i].x ^ part[i].y ^ part[i].z ^ part[i].w;
  }
  ((uint32_t*)p.out)[me] = sum;
}

// Eight independent chains of accumulators a warp: 8 * 4096 floating-point operations a round.
extern "C" __global__ void __launch_bounds__(256) peak_mma(const __grid_constant__ Peaks p) {
  float c[8][4];
  const uint32_t small = 0x14001400u, a = small + (threadIdx.x & 1);   // about 2^-10, so that no sum overflows
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
  for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) mma_f16(c[i], a, small, a, small, small, small + i);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  ((float*)p.out)[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
