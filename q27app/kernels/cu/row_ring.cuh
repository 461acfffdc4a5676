// Activations of the row family on their way through shared memory: what stage_* converted or others left, a few units ahead of its products.
//
// 16 rows' fragments are twice the bytes of two tiles' weights and come from the second cache. Asked for where they are needed,
// every unit would be waited for in turn; with no registers left for them, they go by asynchronous copies into slots of each
// warp's own, one group of copies a unit. On cards whose blocks have less shared memory ROW_RING is 2, and more than 8 rows go without.
#pragma once
#include "row_shares.cuh"

#ifndef ROW_RING
#define ROW_RING 2   // units of 8 rows
#endif

template <int NB, int SOURCE> struct RowRing {
  static constexpr int UNITS = ROW_RING / NB, HALVES_BYTES = NB * 1024, AFTER = NB * (SOURCE >= READY ? 128 : 64), SLOT = HALVES_BYTES + AFTER, BYTES = UNITS * SLOT;
  unsigned char* slots;   // of the warp: [UNITS]{[NB][half of 16 columns][lane][8] halves, then [NB][16] starts or, READY, [NB][32] sums}

  // Ask for a unit, or for none of it: a group of copies either way.
  __device__ __forceinline__ void copy(const Rows& p, int slot, int unit, int lane, bool wanted) const {
    unsigned char* to = slots + slot * SLOT + lane * 16;
    const uint4* from = SOURCE >= READY ? reinterpret_cast<const uint4*>(p.ready.records) + unit * (READY_BYTES / 16) + lane : reinterpret_cast<const uint4*>(p.halves) + unit * (NB * 64) + lane;
    const uint4* after = SOURCE >= READY ? from + READY_SUMS / 16 : reinterpret_cast<const uint4*>(p.starts) + unit * (NB * 4) + lane;
#pragma unroll
    for (int i = 0; i < 2 * NB; ++i) copy_async_near_16(to + i * 512, from + i * 32, wanted);
    copy_async_near_16(to + HALVES_BYTES, after, wanted && lane < AFTER / 16);
    copy_async_commit();
  }
  // A slot's unit, after UNITS - 1 more were asked for.
  __device__ __forceinline__ void take(int slot, int lane, uint32_t (&b)[NB][8], float4 (&start)[NB]) const {
    const unsigned char* from = slots + slot * SLOT;
    copy_async_wait<UNITS - 1>();
    __syncwarp();
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      const uint4 low = *reinterpret_cast<const uint4*>(from + nb * 1024 + lane * 16), high = *reinterpret_cast<const uint4*>(from + nb * 1024 + 512 + lane * 16);
      if constexpr (SOURCE >= READY) start[nb] = ready_start(*reinterpret_cast<const uint32_t*>(from + HALVES_BYTES + nb * 128 + lane * 4));
      else start[nb] = *reinterpret_cast<const float4*>(from + HALVES_BYTES + nb * 64 + (lane & 3) * 16);
      b[nb][0] = low.x, b[nb][1] = low.y, b[nb][2] = low.z, b[nb][3] = low.w;
      b[nb][4] = high.x, b[nb][5] = high.y, b[nb][6] = high.z, b[nb][7] = high.w;
    }
  }
};

// One or two rows that were left ready, by steps: one is multiplied while the next comes. Row r is column 2 r of a product, so that a
// lane has all that is wanted in the first of each two sums. Every other column is zeros: what is multiplied for nothing costs power,
// and zeros cost little of it. Two steps lie side by side, 64 bytes apart; where a lane reads goes from one to the other by TURN.
struct FewRing {
  static constexpr int UNIT = 256, HALF = 128, ROW = 1024, SUMS = 2 * ROW, TURN = 64, BYTES = 3 * ROW;
  unsigned char* slots;   // of the warp, at a multiple of 128: [row][unit][half of 16 columns][step][16 columns][8] halves, then [unit][half][step]{16 bytes of zeros, sums of each row}

  struct Places {
    unsigned halves, sums;   // where the lane reads, of the step's first unit
    __device__ __forceinline__ void turn() { halves ^= TURN, sums ^= TURN; }
  };
  __device__ __forceinline__ static Places places(int rows, int lane, int step) {
    const int row = lane >> 3, q = lane & 3;
    const bool is_there = row < rows && !(lane & 4);   // zeros are those of the other step, in other banks
    const int turned = (step & 1) * TURN, zeros = SUMS + TURN;
    return {(unsigned)((is_there ? row * ROW + q * 16 : zeros) ^ turned), (unsigned)((is_there ? SUMS + 16 + row * 16 + q * 4 : zeros) ^ turned)};
  }
  __device__ __forceinline__ void clear(int lane) const {
    if (lane < 16) *reinterpret_cast<uint4*>(slots + SUMS + lane * TURN) = make_uint4(0, 0, 0, 0);
  }
  // Ask for a step's units, up to 4. All that was asked for before has been waited for.
  template <int COUNT> __device__ __forceinline__ void copy(const Rows& p, int step, int unit, int rows, int lane, bool wanted) const {
    const int n = lane >> 3, half = lane >> 2 & 1, q = lane & 3;
    const unsigned char* from = p.ready.records + unit * READY_BYTES + (n * READY_BYTES + half * 512 + q * 16);
    unsigned char* to = slots + (step & 1) * TURN + (n * UNIT + half * HALF + q * 16);
#pragma unroll
    for (int row = 0; row < 2; ++row) copy_async_near_16(to + row * ROW, from + row * 64, wanted && row < rows && n < COUNT);
    copy_async_near_16(to + SUMS + 16, from + READY_SUMS, wanted && lane % 8 < rows && n < COUNT);   // a row's by the lane of its number
    copy_async_commit();
  }
  __device__ __forceinline__ void take(const Places& mine, int n, uint32_t (&b)[1][8], float4 (&start)[1]) const {
    const unsigned char* from = slots + mine.halves + n * UNIT;
    const uint4 low = *reinterpret_cast<const uint4*>(from), high = *reinterpret_cast<const uint4*>(from + HALF);
    start[0] = ready_start(*reinterpret_cast<const uint32_t*>(slots + mine.sums + n * UNIT));
    b[0][0] = low.x, b[0][1] = low.y, b[0][2] = low.z, b[0][3] = low.w;
    b[0][4] = high.x, b[0][5] = high.y, b[0][6] = high.z, b[0][7] = high.w;
  }
};
