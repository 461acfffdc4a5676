// Packed weights: how every number type of a matrix lies in device memory and enters the tensor cores.
//
// A matrix [rows, cols] is cut into tiles of 16 rows; a tile is a run of units of 64 columns, cols padded with zeros.
// With g = lane / 4, q = lane % 4, a lane owns columns 16 q .. 16 q + 15 of a unit, of rows g and g + 8. Step s (0..3)
// of a unit takes columns 16 q + 4 s .. + 3: the first two as the low half of a k16 fragment, the others as the high.
//
//   KIND_F16  4 steps x 32 lanes x {a0, a1, a2, a3}                                          2,048 bytes
//   KIND_Q8   2 x 32 lanes x {row g step 2i, row g+8 step 2i, row g step 2i+1, row g+8 ..}, byte = code + 128,
//             then 8 x {scale of row g, of row g + 8} fp16                                   1,056 bytes
//   KIND_Q4   32 lanes x {row g cols 0-7, row g+8 cols 0-7, row g cols 8-15, row g+8 ..}, then scales as above
//             nibbles of a word, low to high: columns 0 4 2 6 1 5 3 7                          544 bytes
//
// A masked nibble or byte used as the bits of an fp16 is code * 2^-24 exactly (a subnormal, which the tensor cores
// multiply at full rate); the codes' offset is taken off through the accumulator's start value, offset * -sum(x).
#pragma once
#include "mma.cuh"

constexpr int KIND_F16 = 0, KIND_Q8 = 1, KIND_Q4 = 2;
constexpr int UNIT_COLS = 64, TILE_ROWS = 16;
constexpr float CODE_SCALE = 5.9604644775390625e-08f;   // 2^-24
constexpr float CODE_UNSCALE = 16777216.0f;

template <int KIND_> struct Kind {
  static constexpr int value = KIND_;
};
template <int KIND> struct Unit;
template <> struct Unit<KIND_F16> { static constexpr int DATA = 2048, BYTES = 2048; };
template <> struct Unit<KIND_Q8> { static constexpr int DATA = 1024, BYTES = 1056; };
template <> struct Unit<KIND_Q4> { static constexpr int DATA = 512, BYTES = 544; };

// Rows of a row list that share a number type. Tiles are numbered through the whole list.
struct Segment {
  int first_tile, num_tiles, first_row, num_rows, kind, tile_bytes;
  long long offset;
};

// a, scales: the lane's words of a unit.
// acc += unit x activations for NB groups of 8 activation rows, exact products, f32 accumulation, fixed order.
// b[nb][i]: halves 2 i, 2 i + 1 of the lane's 16 columns of activation row nb * 8 + g; those of every second four columns (i & 2)
// are divided by 16, as the upper nibbles of Q4 come out 16 times too large.
// start[nb]: Q4's codes' offset, -8 * 2^-24 * sum over the unit, of the activation rows nb * 8 + 2 q, + 1, and the two again.
// The sums of quantised kinds come out multiplied by 2^-24. SUMS: 4 as the tensor cores have them, or the first of each two, of every second activation row.
template <int KIND, int NB, int SUMS>
__device__ __forceinline__ void multiply_words(const uint4* a, uint32_t scales, const uint32_t (&b)[NB][8], const float4 (&start)[NB], float (&acc)[NB][SUMS]) {
  constexpr uint32_t SIXTEEN = 0x4c004c00u;
  if constexpr (KIND == KIND_F16) {
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      float c[4];
      mma_f16_from(c, a[0].x, a[0].y, a[0].z, a[0].w, b[nb][0], b[nb][1], 0.0f, 0.0f, 0.0f, 0.0f);
      mma_f16(c, a[1].x, a[1].y, a[1].z, a[1].w, half2_mul(b[nb][2], SIXTEEN), half2_mul(b[nb][3], SIXTEEN));
      mma_f16(c, a[2].x, a[2].y, a[2].z, a[2].w, b[nb][4], b[nb][5]);
      mma_f16(c, a[3].x, a[3].y, a[3].z, a[3].w, half2_mul(b[nb][6], SIXTEEN), half2_mul(b[nb][7], SIXTEEN));
#pragma unroll
      for (int i = 0; i < SUMS; ++i) acc[nb][i] = __fadd_rn(acc[nb][i], c[4 / SUMS * i]);
    }
  } else {
    const float scale_low = half_to_float((uint16_t)(scales & 0xffff)), scale_high = half_to_float((uint16_t)(scales >> 16));
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      float c[4];
      if constexpr (KIND == KIND_Q4) {
        const uint4 w = a[0];
        constexpr uint32_t LOW = 0x000f000fu, HIGH = 0x00f000f0u;
        // Of few rows some of the work is the floating-point units': a word's upper bytes less their upper nibbles, exactly. Of more rows it costs more than it saves.
        const auto upper = [](uint32_t word) { return SUMS == 2 ? __byte_perm(word, 0, 0x4341) : word >> 8; };
        const auto low_of = [](uint32_t bytes) { return SUMS == 2 ? half2_sub(bytes, bytes & HIGH) : bytes & LOW; };
        const uint32_t x8 = upper(w.x), y8 = upper(w.y), z8 = upper(w.z), w8 = upper(w.w);
        mma_f16_from(c, w.x & LOW, w.y & LOW, low_of(x8), low_of(y8), b[nb][0], b[nb][1], start[nb].x, start[nb].y, start[nb].z, start[nb].w);
        mma_f16(c, w.x & HIGH, w.y & HIGH, x8 & HIGH, y8 & HIGH, b[nb][2], b[nb][3]);
        mma_f16(c, w.z & LOW, w.w & LOW, low_of(z8), low_of(w8), b[nb][4], b[nb][5]);
        mma_f16(c, w.z & HIGH, w.w & HIGH, z8 & HIGH, w8 & HIGH, b[nb][6], b[nb][7]);
      } else {
        const uint4 w0 = a[0], w1 = a[1];
        const float start0 = 16.0f * start[nb].x, start1 = 16.0f * start[nb].y;
        mma_f16_from(c, __byte_perm(w0.x, 0, 0x4140), __byte_perm(w0.y, 0, 0x4140), __byte_perm(w0.x, 0, 0x4342),
                     __byte_perm(w0.y, 0, 0x4342), b[nb][0], b[nb][1], start0, start1, start0, start1);
        mma_f16(c, __byte_perm(w0.z, 0, 0x4140), __byte_perm(w0.w, 0, 0x4140), __byte_perm(w0.z, 0, 0x4342),
                __byte_perm(w0.w, 0, 0x4342), half2_mul(b[nb][2], SIXTEEN), half2_mul(b[nb][3], SIXTEEN));
        mma_f16(c, __byte_perm(w1.x, 0, 0x4140), __byte_perm(w1.y, 0, 0x4140), __byte_perm(w1.x, 0, 0x4342),
                __byte_perm(w1.y, 0, 0x4342), b[nb][4], b[nb][5]);
        mma_f16(c, __byte_perm(w1.z, 0, 0x4140), __byte_perm(w1.w, 0, 0x4140), __byte_perm(w1.z, 0, 0x4342),
                __byte_perm(w1.w, 0, 0x4342), half2_mul(b[nb][6], SIXTEEN), half2_mul(b[nb][7], SIXTEEN));
      }
#pragma unroll
      for (int i = 0; i < SUMS; ++i) acc[nb][i] = fmaf(i < SUMS / 2 ? scale_low : scale_high, c[4 / SUMS * i], acc[nb][i]);
    }
  }
}

// Eight 4-bit codes of two rows -> their fragment of an even or an odd step as fp16 weights. low, high: the rows g and g + 8 of the
// fragment, scales alike.
__device__ __forceinline__ void decode_q4(uint32_t low, uint32_t high, uint32_t scale_low, uint32_t scale_high, int odd, uint32_t (&a)[4]) {
  constexpr uint32_t LOW = 0x000f000fu, HIGH = 0x00f000f0u, MAGIC = 0x64006400u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = (i & 1 ? high : low) >> (i < 2 ? 0 : 8), scale = i & 1 ? scale_high : scale_low;
    if (odd) a[i] = half2_mul(half2_fma(masked_or(word, HIGH, MAGIC), 0x2c002c00u, 0xd480d480u), scale);  // (1024 + 16 code) / 16 - 72
    else a[i] = half2_mul(half2_sub(masked_or(word, LOW, MAGIC), 0x64086408u), scale);                    // 1024 + code - 1032
  }
}
// Four bytes of two rows -> a fragment.
__device__ __forceinline__ void decode_q8(uint32_t low, uint32_t high, uint32_t scale_low, uint32_t scale_high, uint32_t (&a)[4]) {
  constexpr uint32_t MAGIC = 0x64646464u, OFFSET = 0x64806480u;                        // 1024 + code + 128 - 1152
  a[0] = half2_mul(half2_sub(__byte_perm(low, MAGIC, 0x4140), OFFSET), scale_low);
  a[1] = half2_mul(half2_sub(__byte_perm(high, MAGIC, 0x4140), OFFSET), scale_high);
  a[2] = half2_mul(half2_sub(__byte_perm(low, MAGIC, 0x4342), OFFSET), scale_low);
  a[3] = half2_mul(half2_sub(__byte_perm(high, MAGIC, 0x4342), OFFSET), scale_high);
}

// Fragments of half a unit (columns 16 q + 8 half .. + 7 of each lane) as fp16 weights, scale applied: a[step][0..3].
template <int KIND>
__device__ __forceinline__ void decode_half_unit(const unsigned char* unit, int lane, int half, uint32_t (&a)[2][4]) {
  if constexpr (KIND == KIND_F16) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint4 v = *reinterpret_cast<const uint4*>(unit + (2 * half + s) * 512 + lane * 16);
      a[s][0] = v.x, a[s][1] = v.y, a[s][2] = v.z, a[s][3] = v.w;
    }
  } else {
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(unit + Unit<KIND>::DATA + (lane >> 2) * 4);
    const uint32_t low = __byte_perm(scales, 0, 0x1010), high = __byte_perm(scales, 0, 0x3232);
    if constexpr (KIND == KIND_Q4) {
      const uint2 w = *reinterpret_cast<const uint2*>(unit + lane * 16 + half * 8);
      decode_q4(w.x, w.y, low, high, 0, a[0]), decode_q4(w.x, w.y, low, high, 1, a[1]);
    } else {
      const uint4 w = *reinterpret_cast<const uint4*>(unit + half * 512 + lane * 16);
      decode_q8(w.x, w.y, low, high, a[0]), decode_q8(w.z, w.w, low, high, a[1]);
    }
  }
}

// The same of two units: fragment rows g are the first one's rows 8 upper + g, fragment rows g + 8 those of the second, so that
// what belongs together, a gate and its up, lies in one thread's sums.
template <int KIND>
__device__ __forceinline__ void decode_half_pair(const unsigned char* first, const unsigned char* second, int lane, int upper, int half,
                                                 uint32_t (&a)[2][4]) {
  const auto word = [&](const unsigned char* unit, int at) { return *reinterpret_cast<const uint32_t*>(unit + at + lane * 16 + 4 * upper); };
  if constexpr (KIND == KIND_F16) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int at = (2 * half + s) * 512;
      a[s][0] = word(first, at), a[s][1] = word(second, at), a[s][2] = word(first, at + 8), a[s][3] = word(second, at + 8);
    }
  } else {
    const int at = Unit<KIND>::DATA + (lane >> 2) * 4 + 2 * upper;
    const uint32_t low = *reinterpret_cast<const uint16_t*>(first + at) * 0x10001u, high = *reinterpret_cast<const uint16_t*>(second + at) * 0x10001u;
    if constexpr (KIND == KIND_Q4) {
#pragma unroll
      for (int s = 0; s < 2; ++s) decode_q4(word(first, 8 * half), word(second, 8 * half), low, high, s, a[s]);
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) decode_q8(word(first, 512 * half + 8 * s), word(second, 512 * half + 8 * s), low, high, a[s]);
    }
  }
}

// A lane's numbers of a tile for STEPS steps, taken from shared memory at once, and its fragments of one step as fp16 weights.
template <int KIND> struct Words {
  static constexpr int STEPS = KIND == KIND_Q4 ? 4 : KIND == KIND_Q8 ? 2 : 1;
  uint4 words;
  uint32_t scales;

  __device__ __forceinline__ void load(const unsigned char* unit, int lane, int step) {
    words = *reinterpret_cast<const uint4*>(unit + step / STEPS * 512 + lane * 16);
    if (KIND != KIND_F16) scales = *reinterpret_cast<const uint32_t*>(unit + Unit<KIND>::DATA + (lane >> 2) * 4);
  }
  __device__ __forceinline__ uint32_t word(int i) const { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }
  __device__ __forceinline__ uint32_t scale(int upper) const { return __byte_perm(scales, 0, upper ? 0x3232 : 0x1010); }

  __device__ __forceinline__ void tile(int step, uint32_t (&a)[4]) const {
    if constexpr (KIND == KIND_F16) {
      a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
    } else {
      const int at = KIND == KIND_Q4 ? step / 2 * 2 : step % 2 * 2;
      decode(word(at), word(at + 1), scale(0), scale(1), step, a);
    }
  }
  // Of two tiles, as decode_half_pair's: fragment rows g are this one's rows 8 upper + g, fragment rows g + 8 those of the second.
  __device__ __forceinline__ void pair(const Words& second, int upper, int step, uint32_t (&a)[4]) const {
    if constexpr (KIND == KIND_F16) {
      a[0] = word(upper), a[1] = second.word(upper), a[2] = word(2 + upper), a[3] = second.word(2 + upper);
    } else {
      const int at = upper + (KIND == KIND_Q4 ? step / 2 * 2 : step % 2 * 2);
      decode(word(at), second.word(at), scale(upper), second.scale(upper), step, a);
    }
  }
  __device__ __forceinline__ static void decode(uint32_t low, uint32_t high, uint32_t scale_low, uint32_t scale_high, int step, uint32_t (&a)[4]) {
    if constexpr (KIND == KIND_Q8) decode_q8(low, high, scale_low, scale_high, a);
    else decode_q4(low, high, scale_low, scale_high, step % 2, a);
  }
};

// One weight of a packed tile, for gathers. column within the padded row.
__device__ __forceinline__ float packed_value(int kind, const unsigned char* tile, int row, int column) {
  const int unit = column / UNIT_COLS, inner = column % UNIT_COLS, q = inner / 16, c = inner % 16;
  const int lane = (row % 8) * 4 + q, upper = row / 8;
  if (kind == KIND_F16) {
    const unsigned char* base = tile + (long long)unit * Unit<KIND_F16>::BYTES + (c / 4) * 512 + lane * 16;
    const int word = upper + 2 * ((c % 4) / 2);
    return half_to_float(*reinterpret_cast<const uint16_t*>(base + word * 4 + (c % 2) * 2));
  }
  if (kind == KIND_Q8) {
    const unsigned char* base = tile + (long long)unit * Unit<KIND_Q8>::BYTES;
    const int step = c / 4, word = upper + 2 * (step % 2);
    const int code = base[(step / 2) * 512 + lane * 16 + word * 4 + c % 4];
    const uint16_t scale = *reinterpret_cast<const uint16_t*>(base + 1024 + (row % 8) * 4 + upper * 2);
    return (float)(code - 128) * half_to_float(scale);
  }
  const unsigned char* base = tile + (long long)unit * Unit<KIND_Q4>::BYTES;
  const uint32_t word = *reinterpret_cast<const uint32_t*>(base + lane * 16 + (upper + 2 * (c / 8)) * 4);
  const int column8 = c % 8;   // nibble of columns 0..7: 0 4 2 6 1 5 3 7
  const int nibble = (column8 & 1) * 4 + (column8 & 2) + (column8 >> 2);
  const uint16_t scale = *reinterpret_cast<const uint16_t*>(base + 512 + (row % 8) * 4 + upper * 2);
  return (float)((int)((word >> (4 * nibble)) & 15) - 8) * half_to_float(scale);
}
