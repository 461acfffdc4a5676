// checksum: one 64-bit number of a piece of memory, the sum over its 32-bit words of a mix of word and place.
// Reference: reference.checksum      Used by: Backend.checksums
// Shapes:    words [count] u32 -> *sum u64, added to what stands there
// Layout:    words 4-byte aligned
// Launch:    grid (blocks), block (256), each thread every grid-th word
// Defines:   none     Limits: count < 2^32
// Numbers:   integers modulo 2^64, so that the order of the additions does not matter. Bound: memory.
#include "common.cuh"

struct Checksum {
  const uint32_t* words;
  unsigned long long* sum;
  long long count;
};

extern "C" __global__ void __launch_bounds__(256) checksum(const __grid_constant__ Checksum p) {
  unsigned long long sum = 0;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < p.count; i += gridDim.x * 256ll) {
    unsigned long long x = ((unsigned long long)p.words[i] << 32 | (uint32_t)i) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9ull;
    sum += x ^ x >> 32;
  }
  atomicAdd(p.sum, sum);
}
