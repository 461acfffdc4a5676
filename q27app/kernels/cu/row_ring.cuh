// Activations of the row family on their way through shared memory: what stage_* converted or gate_up left, a few units ahead of its products.
//
// 16 rows' fragments are twice the bytes of two tiles' weights and come from the second cache. Asked for where they are needed,
// every unit would be waited for in turn; with no registers left for them, they go by asynchronous copies into slots of each
// warp's own, one group of copies a unit. Cards whose blocks have less shared memory are built with ROW_RING 0: no ring.
#pragma once
#include "row_shares.cuh"

#ifndef ROW_RING
#define ROW_RING 0   // units of 8 rows
#endif

template <int NB, int SOURCE> struct RowRing {
  static constexpr int UNITS = ROW_RING / NB, HALVES_BYTES = NB * 1024, AFTER = NB * (SOURCE >= READY ? 128 : 64), SLOT = HALVES_BYTES + AFTER, BYTES = UNITS * SLOT;
  unsigned char* slots;   // of the warp: [UNITS]{[NB][half of 16 columns][lane][8] halves, then [NB][16] starts or, READY, [NB][32] sums}

  // Ask for a unit, or for none of it: a group of copies either way. rows: of them 1 or 2, or 8 for all that there are; the others' columns are not used.
  __device__ __forceinline__ void copy(const Rows& p, int slot, int unit, int rows, int lane, bool wanted) const {
    unsigned char* to = slots + slot * SLOT + lane * 16;
    const uint4* from = SOURCE >= READY ? reinterpret_cast<const uint4*>(p.ready.records) + unit * (READY_BYTES / 16) + lane : reinterpret_cast<const uint4*>(p.halves) + unit * (NB * 64) + lane;
    const uint4* after = SOURCE >= READY ? from + READY_SUMS / 16 : reinterpret_cast<const uint4*>(p.starts) + unit * (NB * 4) + lane;
#pragma unroll
    for (int i = 0; i < 2 * NB; ++i) copy_async_near_16(to + i * 512, from + i * 32, wanted && lane < 4 * rows);
    copy_async_near_16(to + HALVES_BYTES, after, wanted && lane < (rows < 8 ? rows : AFTER / 16));
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
