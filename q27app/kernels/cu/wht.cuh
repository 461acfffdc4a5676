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

// Halves of two neighbouring numbers of one row, by their low bits (2 x LOW) and above them the two highest bits.
template <int LOW> __device__ __forceinline__ uint32_t level_pair(int entry) {
  const int low = (1 << LOW) - 1, high = entry >> 2 * LOW;
  return half2_from_floats(level_of<LOW>((entry & low) | (high & 1) << LOW), level_of<LOW>((entry >> LOW & low) | (high >> 1) << LOW));
}
__host__ __device__ constexpr int level_pairs(int low) { return 1 << (2 * low + 2); }

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

// The levels of 3-bit numbers as halves: low bytes of indices 0 to 3, 4 to 7, then the high bytes.
constexpr uint32_t LOW_BYTES_3[2] = {0x8c479a16u, 0x169a478cu};
constexpr uint32_t HIGH_BYTES_3[2] = {0xa5acafb2u, 0x322f2c25u};

// The same eight numbers of two rows (spread_indices) -> out[i]: halves of number i, the first row's in the low half.
__device__ __forceinline__ void pair_rows(uint32_t a, uint32_t b, uint32_t (&out)[8]) {
  const uint32_t even = (a & 0x0f0f0f0fu) | (b << 4 & 0xf0f0f0f0u), odd = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
  // even: numbers 0, 4 below, 1, 5 above; odd: 2, 6 below, 3, 7 above.
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const uint32_t select = (part < 2 ? even : odd) >> (16 * (part % 2));
    const uint32_t low = __byte_perm(LOW_BYTES_3[0], LOW_BYTES_3[1], select), high = __byte_perm(HIGH_BYTES_3[0], HIGH_BYTES_3[1], select);
    const int number = part / 2 * 2 + part % 2;
    out[number] = __byte_perm(low, high, 0x5140), out[number + 4] = __byte_perm(low, high, 0x7362);
  }
}

// Eight 3-bit numbers (spread_indices), four of one row and then the same four of another -> out[i]: halves of number i, the
// first row's in the low half.
__device__ __forceinline__ void pair_halves(uint32_t index, uint32_t (&out)[4]) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {   // numbers 0, 2 below, 1, 3 above
    const uint32_t select = index >> (16 * part);
    const uint32_t low = __byte_perm(LOW_BYTES_3[0], LOW_BYTES_3[1], select), high = __byte_perm(HIGH_BYTES_3[0], HIGH_BYTES_3[1], select);
    out[part] = __byte_perm(low, high, 0x6240), out[2 + part] = __byte_perm(low, high, 0x7351);
  }
}
