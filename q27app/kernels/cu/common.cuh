// Shared device code: types, reductions, asynchronous copies, dependent launch, number conversions.
//
// Everything that needs an instruction of the device stands here or in mma.cuh, so that the same kernels also run on a
// CPU under the test suite's emulation (Q27_ON_HOST), thread by thread.
#pragma once

#ifdef Q27_ON_HOST
#include "emulated.h"
#else
#include <cuda_fp16.h>
#include <stdint.h>

#define SHARED_BYTES(name) extern __shared__ __align__(16) unsigned char name[]

// Start the next kernel of the stream early; it still waits for this one in wait_for_earlier().
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Every kernel calls this before it reads what an earlier one wrote, or writes anything.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  unsigned address = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
// Zeros where it is not `wanted`.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool wanted) {
  unsigned address = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(wanted ? 16 : 0) : "memory");
}
// Through the first cache, by the lanes where it is `wanted`; no branch.
__device__ __forceinline__ void copy_async_near_16(void* shared, const void* global, bool wanted) {
  unsigned address = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 16; }" ::"r"(address), "l"(global), "r"((unsigned)wanted) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// threadIdx.x, but not known to be the same as before: what is computed from it is not kept in registers.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(index));
  return index;
}

// Weights: read once, past the first cache, where `wanted`; no branch, or every load would be waited for before the next use.
__device__ __forceinline__ void load_once_16(uint4& v, const void* at, bool wanted) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(at), "r"((unsigned)wanted));
}
__device__ __forceinline__ void load_once_4(uint32_t& v, const void* at, bool wanted) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.L1::no_allocate.u32 %0, [%1]; }" : "+r"(v) : "l"(at), "r"((unsigned)wanted));
}

// What is written in this kernel later, asked for where it stands.
__device__ __forceinline__ void load_float(float& v, const float* at, bool wanted) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.f32 %0, [%1]; }" : "+f"(v) : "l"(at), "r"((unsigned)wanted));
}

// blockIdx.x, and what follows from it, computed anew.
__device__ __forceinline__ int block_anew() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// A float from one block to another that runs beside it, in a word that is zero while it is empty.
__device__ __forceinline__ void post_word(uint32_t* at, float value) {
  const uint32_t bits = ~__float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(bits ? bits : ~0x7fc00000u) : "memory");
}
__device__ __forceinline__ float take_word(uint32_t* at) {
  uint32_t bits = 0;
  while (bits == 0) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(0) : "memory");
  return __uint_as_float(~bits);
}

// The same for a word that many look at: it stays.
__device__ __forceinline__ float look_at_word(const uint32_t* at) {
  uint32_t bits = 0;
  while (bits == 0) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
  return __uint_as_float(~bits);
}

// Four of them, 16-byte aligned, asked for at once.
__device__ __forceinline__ float4 take_words(uint32_t* at) {
  uint4 bits;
  do asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(at) : "memory");
  while (bits.x == 0 || bits.y == 0 || bits.z == 0 || bits.w == 0);
  *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
  return make_float4(__uint_as_float(~bits.x), __uint_as_float(~bits.y), __uint_as_float(~bits.z), __uint_as_float(~bits.w));
}

// A barrier of some warps of a block; ids from 1 on (constants, or a block would hold all 16), LAST the largest of them.
template <int LAST = 2> __device__ __forceinline__ void group_barrier(int id, int threads) {
  if (id == LAST) asm volatile("bar.sync %0, %1;" ::"n"(LAST), "r"(threads) : "memory");
  else if constexpr (LAST > 1) group_barrier<LAST - 1>(id, threads);
}

__device__ __forceinline__ uint16_t half_from_float(float value) { return __half_as_ushort(__float2half_rn(value)); }
__device__ __forceinline__ float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ __forceinline__ uint32_t half2_from_floats(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}
// word & mask | bits in one instruction.
__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
  return out;
}
__device__ __forceinline__ uint32_t half2_sub(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t half2_mul(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// e4m3, saturating; needs compute capability 8.9. The low byte is the first value.
__device__ __forceinline__ uint32_t half2_from_e4m3x2(uint32_t bytes) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((uint16_t)bytes));
#endif
  return out;
}
// Four of them: low, the first two.
__device__ __forceinline__ void halves_from_e4m3x4(uint32_t bytes, uint32_t& low, uint32_t& high) {
  low = high = 0;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(bytes));
#endif
}
__device__ __forceinline__ uint32_t e4m3x2_from_floats(float low, float high) {
  uint16_t out = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
#endif
  return out;
}

// 2^value to 2 ulp; what would be below the normal range is 0.
__device__ __forceinline__ float exp2_quick(float value) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
}
// Where all blocks run at once, one does for the others what they need.
#define MEASURED_FROM(block) ((int)(block))
#define MEASURED_BY(blocks) ((int)(blocks))
#endif  // Q27_ON_HOST

constexpr unsigned ALL_LANES = 0xffffffffu;

// The same number, not known to be that: it is in a register from here on, and not computed anew where it is used.
__device__ __forceinline__ int once(int value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}
// The largest of what the lanes have, none of it below zero.
__device__ __forceinline__ float warp_max_positive(float value) {
#ifdef Q27_ON_HOST
  return warp_max(value);
#else
  return __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(value)));   // bits of floats without a sign are in their order
#endif
}

// The power of two that brings `largest` (>= 0) into [2^14, 2^15): what enters a tensor core is multiplied by it.
__device__ __forceinline__ float half_range_scale(float largest) {
  int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
  if (largest == 0.0f || exponent > 127) return 1.0f;
  if (exponent < -100) exponent = -100;
  return __uint_as_float((unsigned)(127 + 14 - exponent) << 23);
}
// The scale that makes `largest` (>= 0) 2^14, and 1 / scale, exact: one huge value in a row loses nothing in fp16.
__device__ __forceinline__ float peak_scale(float largest, float& inverse) {
  const float peak = largest > 1e-30f ? largest : largest > 0.0f ? 1e-30f : 16384.0f;
  inverse = __fmul_rn(peak, 6.103515625e-05f);
  return 16384.0f / peak;
}
// 1 / scale for a power of two, exact.
__device__ __forceinline__ float power_inverse(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

__device__ __forceinline__ float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }
__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

__device__ __forceinline__ float get(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Rotary angles of one row's position into table [rows, half, 2], by a block of `threads`.
__device__ __forceinline__ void rope_row(int position, const double* frequencies, float* table, int row, int half, int threads) {
  for (int d = threadIdx.x; d < half; d += threads) {
    double sine, cosine;
    sincos((double)position * frequencies[d], &sine, &cosine);
    float* target = table + ((long long)row * half + d) * 2;
    target[0] = (float)cosine, target[1] = (float)sine;
  }
}
