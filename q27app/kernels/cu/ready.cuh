// Activation rows that their producer leaves ready for the tensor cores: halves in the order that the row family's lanes read.
//
// They are scaled by a power of two known from the weights (cuda_ready.py): no value that can come out reaches 2^15. By 16 rows,
// a record for each 64 columns: [row / 8][half of a lane's 16 columns][lane][8] halves, those of every second four columns divided by
// 16 (quant.cuh); then [row / 8][lane] the sum of a lane's 16 columns / 16 as two halves, its high and its low part: the sums of 64
// that Q4 and Q8 begin with are then one product. A lane is 4 (row % 8) + column / 16 % 4.
#pragma once
#include "common.cuh"

constexpr int READY_COLS = 64, READY_SUMS = 2048, READY_BYTES = READY_SUMS + 256;

struct Ready {
  unsigned char* records;    // [rows / 16][units], from the launch's first row on
  int units;                 // 0: nothing is left ready
  float scale, unscale;

  __device__ __forceinline__ int lane_of(int row, int place) const { return (row & 7) * 4 + (place / 16 & 3); }
  __device__ __forceinline__ unsigned char* record(int row, int place) const { return records + (long long)((row >> 4) * units + place / READY_COLS) * READY_BYTES; }
  __device__ __forceinline__ uint16_t* half(int row, int place) const {
    const int i = place % 16;
    return reinterpret_cast<uint16_t*>(record(row, place)) + ((row >> 3 & 1) * 2 + i / 8) * 256 + lane_of(row, place) * 8 + i % 8;
  }

  // A column of a row by each lane, the 16 of a place by 16 lanes from a multiple of 16 on. The whole warp calls, and what is not
  // `wanted` is not written.
  __device__ __forceinline__ void leave(int row, int place, float value, bool wanted) const {
    const bool is_second = place & 4;
    const uint16_t bits = half_from_float(__fmul_rn(value, is_second ? __fmul_rn(scale, 0.0625f) : scale));
    float sum = __fmul_rn(half_to_float(bits), is_second ? 1.0f : 0.0625f);
#pragma unroll
    for (int distance = 8; distance > 0; distance >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
    if (!wanted) return;
    *half(row, place) = bits;
    leave_sum(row, place, sum);
  }
  // Four columns of a row by each lane, from a multiple of 4 on. The whole warp calls.
  __device__ __forceinline__ void leave_four(int row, int place, const float4& v) const {
    const bool is_second = place & 4;
    const float factor = is_second ? __fmul_rn(scale, 0.0625f) : scale;
    const uint32_t first = half2_from_floats(__fmul_rn(v.x, factor), __fmul_rn(v.y, factor)), second = half2_from_floats(__fmul_rn(v.z, factor), __fmul_rn(v.w, factor));
    float sum = __fadd_rn(__fadd_rn(half_to_float((uint16_t)first), half_to_float((uint16_t)(first >> 16))),
                          __fadd_rn(half_to_float((uint16_t)second), half_to_float((uint16_t)(second >> 16))));
    sum = __fmul_rn(sum, is_second ? 1.0f : 0.0625f);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
    *reinterpret_cast<uint2*>(half(row, place)) = make_uint2(first, second);
    leave_sum(row, place, sum);
  }
  __device__ __forceinline__ void leave_sum(int row, int place, float sum) const {
    const uint16_t high = half_from_float(sum), low = half_from_float(__fsub_rn(sum, half_to_float(high)));
    if (place % 16 == 0) reinterpret_cast<uint32_t*>(record(row, place) + READY_SUMS)[(row >> 3 & 1) * 32 + lane_of(row, place)] = high | (uint32_t)low << 16;
  }
  __device__ __forceinline__ float value(int row, int place) const { return __fmul_rn(half_to_float(*half(row, place)), place & 4 ? __fmul_rn(unscale, 16.0f) : unscale); }
};
