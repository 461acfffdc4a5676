// How the row family shares a row list out: the line of all steps, its groups, a block's and a warp's part of it.
//
// Two tiles make a group, and so many of its units as make about 4 KiB a step: 4 of Q4, 2 of Q8, 1 of F16, of both tiles. The
// groups of all segments stand one after the other on a line of steps. Block b takes from border b to border b + 1
// (cuda_weights.RowShares says the same), in rounds of few groups; a warp takes an equal part of its block's round.
#pragma once
#include "staging.cuh"

constexpr int MAX_SEGMENTS = 4, GROUP_TILES = 2, BLOCK_WARPS = 16, BLOCK = 32 * BLOCK_WARPS, MAX_ROWS = 16;
constexpr int ROUND_GROUPS = 36;   // between two barriers, at most
constexpr int BORDER_WORDS = GROUP_TILES * MAX_ROWS * TILE_ROWS;

struct LinearRows {
  const unsigned char* weights;
  float* out;
  uint32_t* border;            // [blocks + 1][tile of a group][MAX_ROWS][TILE_ROWS], zero between launches
  Rows rows_in;
  Ready ready;                 // GATE_UP: where the products go as halves; no units: to out, as floats
  Segment segments[MAX_SEGMENTS];
  int first_step[MAX_SEGMENTS], first_group[MAX_SEGMENTS], group_steps[MAX_SEGMENTS];   // first ones of no segment: 2^31 - 1
  uint32_t per_group[MAX_SEGMENTS];   // `divided` by group_steps
  int rows, out_stride, out_rows, total, whole;   // total: steps of all; whole: blocks take whole groups
  int share, extra;            // total = share * blocks + extra
  uint32_t per_block, per_row; // `divided` by the blocks, by rows
  int rounds, places;          // places: groups of a round that a warp is in, at most
};

// n / d by 2^32 / d rounded up, 0 for d = 1; exact while n d < 2^32.
__device__ __forceinline__ int divided(int n, uint32_t reciprocal) { return reciprocal ? (int)(((unsigned long long)(uint32_t)n * reciprocal) >> 32) : n; }

// Where a step lies.
struct Place {
  int segment, group, step;   // group within its segment, step within its group
};
__device__ __forceinline__ int segment_of(const int (&first)[MAX_SEGMENTS], int n) { return (n >= first[1]) + (n >= first[2]) + (n >= first[3]); }
__device__ __forceinline__ Place place_at(const LinearRows& p, int position) {
  const int segment = segment_of(p.first_step, position), within = position - p.first_step[segment];
  const int group = divided(within, p.per_group[segment]);
  return {segment, group, within - group * p.group_steps[segment]};
}
__device__ __forceinline__ int border_of(const LinearRows& p, int block) {
  const int position = p.share * block + divided(p.extra * block, p.per_block);
  if (!p.whole || position >= p.total) return position;
  const Place at = place_at(p, position);
  const int rest = p.group_steps[at.segment] - at.step;
  return at.step < rest ? position - at.step : position + rest;
}

// A round of a block.
struct Share {
  int begin, end, low, high;   // of the block, of the round
  __device__ __forceinline__ void open(const LinearRows& p, int block, int round) {
    begin = border_of(p, block), end = border_of(p, block + 1);
    low = begin, high = end;
    if (p.rounds == 1) return;
    if (round > 0) low = round_start(p, round);
    if (round + 1 < p.rounds) high = round_start(p, round + 1);
  }
  __device__ __forceinline__ int round_start(const LinearRows& p, int round) const {   // where a group begins
    const int position = begin + (end - begin) * round / p.rounds;
    return max(begin, position - place_at(p, position).step);
  }
  __device__ __forceinline__ int warp_start(int warp) const { return low + ((high - low) * warp >> 4); }
};

// Where Q4 begins with a unit that was left ready: -2^-17 times a sixteenth of the sum of 64, by the lanes' sums of 16.
__device__ __forceinline__ float4 ready_start(uint32_t sums) {
  float start[4];
  mma_f16_short(start, 0x80808080u, 0x80808080u, sums);
  return make_float4(start[0], start[1], start[2], start[3]);
}
