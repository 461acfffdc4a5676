// Rows turned before they are rounded: the turn of 128 numbers, and how a block of them is coded (kernels/kv_turned.py says
// what each byte is). A warp holds a block, lane l the numbers 4 l .. 4 l + 3. Every step is one rounded operation in the
// order of the NumPy codec: the same numbers give the same bytes there and here.
#pragma once
#include "common.cuh"

constexpr int BLOCK_DIMS = 128;
__constant__ float LEVELS_3[4] = {0.021663f, 0.066822f, 0.118786f, 0.190207f};
__constant__ float THRESHOLDS_3[3] = {0.044243f, 0.092804f, 0.154496f};
__constant__ float LEVELS_5[16] = {0.00582388f, 0.01750547f, 0.02928998f, 0.04125080f, 0.05346908f, 0.06603809f, 0.07906913f, 0.09270022f,
                                   0.10710939f, 0.12253633f, 0.13932019f, 0.15797059f, 0.17931595f, 0.20486116f, 0.23786362f, 0.28821075f};
__constant__ float THRESHOLDS_5[15] = {0.01166468f, 0.02339773f, 0.03527039f, 0.04735994f, 0.05975358f, 0.07255360f, 0.08588468f, 0.09990481f,
                                       0.11482286f, 0.13092826f, 0.14864540f, 0.16864327f, 0.19208856f, 0.22136238f, 0.26303717f};
// Signs of the turn, bit j set: number j changes its sign before (FLIP_1) and after (FLIP_2) the butterfly.
__constant__ uint32_t FLIP_1[4] = {0xe46a0359u, 0x42f85949u, 0xa4c63bbbu, 0x49f250a9u};
__constant__ uint32_t FLIP_2[4] = {0x16acee90u, 0x3f628fdcu, 0xb7a5357au, 0xbea56562u};

// Bytes of a block of 128 numbers with `low` bits beside the highest one.
__host__ __device__ constexpr int turned_bytes(int low) { return 2 + BLOCK_DIMS * low / 8 + BLOCK_DIMS / 8; }

__device__ __forceinline__ void flip_signs(float (&v)[4], const uint32_t* flips) {
  const int lane = threadIdx.x % 32;
  const uint32_t bits = flips[lane / 8] >> (4 * (lane % 8));
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(__float_as_uint(v[i]) ^ ((bits >> i & 1) << 31));
}
__device__ __forceinline__ void butterfly(float (&v)[4]) {
  const float a = __fadd_rn(v[0], v[1]), b = __fsub_rn(v[0], v[1]), c = __fadd_rn(v[2], v[3]), d = __fsub_rn(v[2], v[3]);
  v[0] = __fadd_rn(a, c), v[1] = __fadd_rn(b, d), v[2] = __fsub_rn(a, c), v[3] = __fsub_rn(b, d);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(ALL_LANES, v[i], distance);
      v[i] = threadIdx.x & distance ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(v[i], 0.08838834764831845f);
}
__device__ __forceinline__ void turn(float (&v)[4]) { flip_signs(v, FLIP_1), butterfly(v), flip_signs(v, FLIP_2); }
__device__ __forceinline__ void turn_back(float (&v)[4]) { flip_signs(v, FLIP_2), butterfly(v), flip_signs(v, FLIP_1); }

// sqrt of the sum of squares of a block.
__device__ __forceinline__ float block_length(const float (&v)[4]) {
  float square[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) square[i] = __fmul_rn(v[i], v[i]);
  return __fsqrt_rn(warp_sum(__fadd_rn(__fadd_rn(square[0], square[1]), __fadd_rn(square[2], square[3]))));
}

// The number of thresholds that are not above `value`; `count` thresholds above 0.
__device__ __forceinline__ int level_index(float value, const float* thresholds, int count) {
  const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
  const bool above = value >= 0.0f;
  const float magnitude = __uint_as_float(above ? bits : bits - 1);   // a number on a threshold goes up on either side
  int index = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) index += magnitude >= thresholds[i];
  return above ? count + 1 + index : count - index;
}

// One warp: 128 numbers -> a block at target (even address).
template <int LOW> __device__ __forceinline__ void store_turned(float (&v)[4], unsigned char* target) {
  constexpr int COUNT = (1 << LOW) - 1;
  const float* levels = LOW == 2 ? LEVELS_3 : LEVELS_5;
  const float* thresholds = LOW == 2 ? THRESHOLDS_3 : THRESHOLDS_5;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = v[i] > 65504.0f ? 65504.0f : v[i] < -65504.0f ? -65504.0f : v[i];   // NaN stays
  const float length = block_length(v);
  const bool is_nan = length != length, skipped = is_nan || length <= 1e-10f;
  float chosen[4];
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = skipped ? 0.0f : __fdiv_rn(v[i], length);
  turn(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = level_index(v[i], thresholds, COUNT);
    const bool above = index > COUNT;
    chosen[i] = levels[above ? index - COUNT - 1 : COUNT - index];
    low |= (uint32_t)(index & COUNT) << (LOW * i), high |= (uint32_t)above << i;
  }
  const float norm = __fdiv_rn(length, block_length(chosen));
  if (skipped) low = high = 0;
  high |= __shfl_xor_sync(ALL_LANES, high, 1) << 4;
  if (lane == 0)
    *reinterpret_cast<uint16_t*>(target) = is_nan ? 0x7e00 : skipped ? 0 : half_from_float(norm > 65504.0f ? 65504.0f : norm);
  if (LOW == 2) target[2 + lane] = (unsigned char)low;
  else *reinterpret_cast<uint16_t*>(target + 2 + 2 * lane) = (uint16_t)low;
  if (lane % 2 == 0) target[2 + 16 * LOW + lane / 2] = (unsigned char)high;
}

// The level of an index, whose bits above the codec's do not count.
template <int LOW> __device__ __forceinline__ float level_of(int index) {
  constexpr int COUNT = (1 << LOW) - 1;
  const float* levels = LOW == 2 ? LEVELS_3 : LEVELS_5;
  const int low = index & COUNT;
  return index >> LOW & 1 ? levels[low] : -levels[COUNT - low];
}

// Entries of a table of two neighbouring numbers of one row, by their low bits (2 x LOW) and above them the two highest bits.
__host__ __device__ constexpr int level_pairs(int low) { return 1 << (2 * low + 2); }

// Four bytes of a and b, of which each is named by a nibble of selector below 8; what lies above the four lowest nibbles does not count.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef Q27_ON_HOST
  return __byte_perm(a, b, selector);
#else   // __byte_perm would clear the fourth bit of every nibble first
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
#endif
}

// N words that begin at an address that is a multiple of 4 (`shifted` false) or lies 2 above one.
template <int N> __device__ __forceinline__ void read_words(const unsigned char* at, bool shifted, uint32_t (&out)[N]) {
  if (!shifted) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = *reinterpret_cast<const uint32_t*>(at + 4 * i);
  } else {
    uint32_t word = *reinterpret_cast<const uint32_t*>(at - 2);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t next = *reinterpret_cast<const uint32_t*>(at + 2 + 4 * i);
      out[i] = __byte_perm(word, next, 0x5432);
      word = next;
    }
  }
}

// Eight 3-bit numbers of a row, 16 low bits and 8 highest: number 2 i as nibble i of the low half, 2 i + 1 of the high half.
__device__ __forceinline__ uint32_t spread_indices(uint32_t low, uint32_t high) {
  const uint32_t index = (low | low << 14) & 0x33333333u;
  high = (high | high << 15) & 0x00550055u;
  high = (high | high << 4) & 0x05050505u;
  high = (high | high << 2) & 0x11111111u;
  return index + 4 * high;
}

// The levels of 3-bit numbers as halves: low bytes of indices 0 to 3 and 4 to 7, then the high bytes.
constexpr uint32_t LOW_FIRST = 0x8c479a16u, LOW_SECOND = 0x169a478cu, HIGH_FIRST = 0xa5acafb2u, HIGH_SECOND = 0x322f2c25u;

// Bits of a where the mask has them, of b elsewhere.
__device__ __forceinline__ uint32_t merge_bits(uint32_t a, uint32_t b, uint32_t mask) {
#ifdef Q27_ON_HOST
  return a & mask | b & ~mask;
#else   // which the compiler makes two operations of
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
  return out;
#endif
}

// A byte of each of four rows, the low one.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return pick_bytes(pick_bytes(a, b, 0x0040), pick_bytes(c, d, 0x0040), 0x5410);
}

// The first four levels of 3-bit numbers, low and high bytes. none: a 0 that the compiler does not know, so that they stay in registers
// where it would move them there anew for every look-up.
struct FirstLevels {
  uint32_t low, high;
  __device__ __forceinline__ explicit FirstLevels(uint32_t none) : low(LOW_FIRST + none), high(HIGH_FIRST + none) {}
};

// Four 3-bit numbers of each of four rows -> out[n][i]: number n as halves, of row 2 i in the low half and of row 2 i + 1. Byte r of
// low: the low bits of row r; the low nibble of byte r of high: its highest bits.
__device__ __forceinline__ void halves_of_rows(const FirstLevels& first, uint32_t low, uint32_t high, uint32_t (&out)[4][2]) {
  // An index a nibble: numbers 0 and 2 of each row, then 1 and 3. A product brings two bits to their places at once; where its parts meet, between, nobody looks.
  const uint32_t even = merge_bits((high & 0x05050505u) * 20u, low, 0xccccccccu);
  const uint32_t odd = merge_bits((high & 0x0a0a0a0au) * 10u, low >> 2, 0xccccccccu);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t index = (n ? odd : even) >> (16 * i);
      const uint32_t lower = pick_bytes(first.low, LOW_SECOND, index), upper = pick_bytes(first.high, HIGH_SECOND, index);
      out[n][i] = pick_bytes(lower, upper, 0x6240), out[2 + n][i] = pick_bytes(lower, upper, 0x7351);
    }
}
