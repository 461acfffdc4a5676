// Rows of the stream that an addition leaves ready for the norm behind it (ready.cuh), before anybody knows how long they are.
//
// They are x times the norm's weights times a power of two that was right for the row before the addition: its largest number came to
// lie in [2^7, 2^8). 1 / rms is multiplied to the sums of products. A row whose largest number is no longer where halves are exact
// enough (`holds`) is converted anew as if nothing had been left. All of this is a row's own, whatever is beside it.
#pragma once
#include "ready.cuh"

constexpr int FOLLOW_ROWS = 16, FOLLOW_GROUPS = 192;   // of 32 columns

struct Follow {   // of up to 16 rows
  float scales[FOLLOW_ROWS];                  // powers of two for the rows after the next addition
  uint32_t words[FOLLOW_ROWS];                // what sums are multiplied by, negative where a row was converted anew; 0 as long as it is not known
  float2 stats[FOLLOW_ROWS][FOLLOW_GROUPS];   // of 32 columns after the addition: sum of squares, largest times the norm's weight
};

// Halves of such a row are exact enough: none is infinite, and what is lost below 2^-24 is no more than elsewhere. No scale: no.
__device__ __forceinline__ bool holds(float scale, float largest) {
  const float top = __fmul_rn(scale, largest);
  return top >= 0.5f && top <= 65504.0f;
}
__device__ __forceinline__ float following_scale(float largest) { return __fmul_rn(half_range_scale(largest), 0.0078125f); }
