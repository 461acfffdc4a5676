// What a warp of the row family does of a row list, as it was worked out when the list was loaded (kernels/row_plans.py).
//
// Two tiles make a group, and so many of its units as make about 4 KiB a step: 4 of Q4, 2 of Q8, 1 of F16, of both tiles. The
// groups of all segments stand one after the other on a line of steps; a block takes its part of them, in rounds of few groups, a
// warp an equal part of its block's round. A warp reads where it begins: with 16 of them on a multiprocessor, a hundred
// instructions before the first weights are asked for would take half a microsecond of every stage.
#pragma once
#include "staging.cuh"

constexpr int MAX_SEGMENTS = 4, GROUP_TILES = 2, BLOCK_WARPS = 16, BLOCK = 32 * BLOCK_WARPS, MAX_ROWS = 16;
constexpr int ROUND_GROUPS = 36;   // between two barriers, at most
constexpr int BORDER_WORDS = GROUP_TILES * MAX_ROWS * TILE_ROWS;

struct alignas(16) Plan {
  long long offset;   // of the warp's first step from the weights on; of one that is there, if it has none
  int second, left;   // bytes to the step's other tile; steps
  int kinds;          // segment, kind << 2, groups of the block's round << 4
  int group, step, unit;   // of the first step: group within its segment, step within its group, unit among the activations
};
// How the sums of a group of a block's round come together, and where they belong.
struct alignas(16) Gather {
  int warps;          // the first one that has steps of it, the last one << 8, groups of the round that the first one leaves before << 16
  int row, left;      // its first row of out, unless gate and up; rows from there to the end of its segment
  int flags;          // GATHER_*, from 8 on its first column of gate and up
};
enum { GATHER_TAKES = 1, GATHER_GIVES = 2, GATHER_F16 = 4 };   // the block before has its beginning; the next one has the rest

struct LinearRows {
  const Plan* plans;           // [rounds][blocks][BLOCK_WARPS]
  const Gather* gathers;       // [rounds][blocks][ROUND_GROUPS]
  const unsigned char* weights;
  float* out;
  uint32_t* border;            // [blocks + 1][tile of a group][MAX_ROWS][TILE_ROWS], zero between launches
  Rows rows_in;
  Ready ready;                 // GATE_UP: where the products go as halves; no units: to out, as floats
  Segment segments[MAX_SEGMENTS];
  int group_steps[MAX_SEGMENTS];
  int rows, out_stride, out_rows;
  uint32_t per_row;            // `divided` by rows
  int rounds, places;          // places: groups of a round that a warp is in, at most
};

// n / d by 2^32 / d rounded up, 0 for d = 1; exact while n d < 2^32.
__device__ __forceinline__ int divided(int n, uint32_t reciprocal) { return reciprocal ? (int)(((unsigned long long)(uint32_t)n * reciprocal) >> 32) : n; }

// Where Q4 begins with a unit that was left ready: -2^-17 times a sixteenth of the sum of 64, by the lanes' sums of 16.
__device__ __forceinline__ float4 ready_start(uint32_t sums) {
  float start[4];
  mma_f16_short(start, 0x80808080u, 0x80808080u, sums);
  return make_float4(start[0], start[1], start[2], start[3]);
}
