// How the row family shares a row list out: the line of all units, its groups, a block's and a warp's part of it.
//
// Two tiles make a group; the groups of all segments stand one after the other on a line, a unit as long as its bytes / 512,
// about. Block b takes from border b to border b + 1 (cuda_weights.RowShares says the same), in rounds of few groups; a warp
// takes an equal part of its block's round.
#pragma once
#include "staging.cuh"

constexpr int MAX_SEGMENTS = 4, GROUP_TILES = 2, BLOCK_WARPS = 16, BLOCK = 32 * BLOCK_WARPS, MAX_ROWS = 16;
constexpr int ROUND_GROUPS = 16;   // between two barriers, fewer of unlike lengths: a warp's part then lies in two groups at most
constexpr int BORDER_WORDS = GROUP_TILES * MAX_ROWS * TILE_ROWS;

struct LinearRows {
  const unsigned char* weights;
  float* out;
  uint32_t* border;            // [blocks + 1][tile of a group][MAX_ROWS][TILE_ROWS], zero between launches
  Rows rows_in;
  Segment segments[MAX_SEGMENTS];
  int num_segments, rows, out_stride, out_rows, total, whole;   // total: length of all units; whole: blocks take whole groups
  int share, extra;            // total = share * blocks + extra
  uint32_t per_unit, per_block;   // 2^32 / units, 2^32 / blocks, rounded up: `divided`
};

// n / d by d's reciprocal; exact while n d < 2^32.
__device__ __forceinline__ int divided(int n, uint32_t reciprocal) { return (int)(((unsigned long long)(uint32_t)n * reciprocal) >> 32); }
// Length of a unit, about its bytes / 512, is a power of two.
__device__ __forceinline__ int unit_shift(int kind) { return kind == KIND_Q4 ? 0 : kind == KIND_Q8 ? 1 : 2; }
__device__ __forceinline__ int groups_of(const Segment& segment) { return (segment.num_tiles + GROUP_TILES - 1) / GROUP_TILES; }

// A group on the line of all units.
struct Group {
  int segment, index, number, start, end;   // index: within its segment, number: of all
};
__device__ __forceinline__ Group group_at(const LinearRows& p, int position) {
  int before = 0, number = 0, segment = 0;
  for (; segment + 1 < p.num_segments; ++segment) {
    const int length = groups_of(p.segments[segment]) * p.rows_in.units << unit_shift(p.segments[segment].kind);
    if (position < before + length) break;
    before += length, number += groups_of(p.segments[segment]);
  }
  const int shift = unit_shift(p.segments[segment].kind), each = p.rows_in.units << shift;
  const int index = p.rows_in.units == 1 ? (position - before) >> shift : divided((position - before) >> shift, p.per_unit);
  return {segment, index, number + index, before + index * each, before + (index + 1) * each};
}
// Down to the border of a unit, or to the nearest border of a group.
__device__ __forceinline__ int snapped(const LinearRows& p, int position, bool to_group) {
  if (position >= p.total) return p.total;
  const Group g = group_at(p, position);
  if (to_group) return position - g.start < g.end - position ? g.start : g.end;
  return position - ((position - g.start) & ((1 << unit_shift(p.segments[g.segment].kind)) - 1));
}

// By how many doublings the lengths of units differ within these segments.
__device__ __forceinline__ int spread(const LinearRows& p, int first, int last) {
  int low = 2, high = 0;
  for (int i = first; i < last + 1; ++i) low = min(low, unit_shift(p.segments[i].kind)), high = max(high, unit_shift(p.segments[i].kind));
  return high - low;
}

// The block's part, round by round.
struct Share {
  int begin, end, rounds;
  Group first, last;
  __device__ __forceinline__ static int border(const LinearRows& p, int block) {
    return p.share * block + (gridDim.x == 1 ? p.extra * block : divided(p.extra * block, p.per_block));
  }
  // Called again where the shares are needed again: kept, they would take registers from the loads in flight.
  __device__ __forceinline__ void open(const LinearRows& p) {
    const int block = block_anew();
    begin = snapped(p, border(p, block), p.whole), end = snapped(p, border(p, block + 1), p.whole);
    first = group_at(p, begin), last = group_at(p, end - 1);
    const int most = ROUND_GROUPS >> spread(p, first.segment, last.segment);
    rounds = max(1, (last.number - first.number + most) / most);
  }
  __device__ __forceinline__ int group_start(const LinearRows& p, int number) const {
    int before = 0;
    for (int i = 0; i < p.num_segments; ++i) {
      const int groups = groups_of(p.segments[i]), each = p.rows_in.units << unit_shift(p.segments[i].kind);
      if (number < groups || i + 1 == p.num_segments) return before + number * each;
      number -= groups, before += groups * each;
    }
    return before;
  }
  __device__ __forceinline__ int round_group(int round) const { return min(last.number + 1, first.number + ((last.number - first.number + rounds) / rounds) * round); }
  __device__ __forceinline__ int round_start(const LinearRows& p, int round) const {
    return round == 0 ? begin : round == rounds ? end : group_start(p, round_group(round));
  }
  __device__ __forceinline__ int warp_start(const LinearRows& p, int low, int high, int warp) const {
    return warp == BLOCK_WARPS ? high : snapped(p, low + (high - low >> 4) * warp + (((high - low & 15) * warp) >> 4), false);
  }
};
