// Activation rows on their way into the tensor cores: norm (or gated norm), a scale, fp16, sums of units.
//
// A thread takes 4 columns of every 2,048, a warp 128 at a time (one head of the delta rule), half a warp a unit: sums and
// maxima have one order whoever converts a row.
#pragma once
#include "quant.cuh"
#include "follow.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, GATED_HEAD = 128;
enum { PLAIN = 0, NORMED = 1, GATED = 2, HALVES = 3, READY = 4, FOLLOWED = 5 };   // where a row comes from

struct Rows {
  const float* x;
  const float* norm;         // NORMED [cols], GATED [128]
  const float* gate;         // GATED: z of row 0
  const int* row_map;        // row of x for each row, or null
  uint16_t* halves;          // HALVES: FragmentOrder, staged_units units
  float* starts;             // HALVES: [staged_units][row groups][16], `start` of quant.cuh
  float* inverse;            // HALVES: [rows]
  int cols, units, wrap, row_groups, x_stride, gate_stride;   // row_groups: 1, or 2 for more than 8 rows
  float eps;
  Ready ready;               // READY, FOLLOWED
  Follow* follow;            // FOLLOWED: what the addition before says of the rows; of an addition that leaves such rows: where it says it
  Follow* next;              // FOLLOWED: for the next addition; NORMED: alike, or null
};

__device__ __forceinline__ int staged_units(const Rows& p) { return p.wrap ? p.wrap : p.units; }

// Where a row's halves go: one row after the other, or as the lanes read them: [unit][row group][half of 16 columns][lane][8].
struct RowMajor {
  uint16_t* row;
  float* starts;     // [unit][4]: of row 0, 1, 0, 1
  int index;
  __device__ __forceinline__ uint16_t* four(int at) const { return row + at * 4; }
  __device__ __forceinline__ float* start(int unit) const { return starts + unit * 4 + index; }
};
struct FragmentOrder {
  uint16_t* halves;
  float* starts;
  int row, row_groups;
  __device__ __forceinline__ uint16_t* four(int at) const {
    const int unit = at / 16, inner = at % 16, lane = (row & 7) * 4 + inner / 4;
    return halves + (((unit * row_groups + (row >> 3)) * 2 + (inner & 2) / 2) * 32 + lane) * 8 + (inner & 1) * 4;
  }
  __device__ __forceinline__ float* start(int unit) const { return starts + (unit * row_groups + (row >> 3)) * 16 + (row & 6) * 2 + (row & 1); }
};

// Pieces of 2,048 columns that stay in registers between the two passes over a row, and what of the norm the thread needs for them.
template <int SOURCE> struct Norm {
  static constexpr int KEEP = SOURCE == PLAIN ? 9 : 3, WEIGHTS = SOURCE == NORMED ? KEEP : 1;
  float4 weights[WEIGHTS];
  __device__ __forceinline__ void load(const Rows& p) {   // before the kernel in front has ended: nobody writes it
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      const int k = SOURCE == GATED ? threadIdx.x % (GATED_HEAD / 4) : threadIdx.x + i * THREADS;
      weights[i] = make_float4(0, 0, 0, 0);
      if ((SOURCE == NORMED || SOURCE == GATED) && k < (SOURCE == GATED ? GATED_HEAD : p.cols) / 4) weights[i] = reinterpret_cast<const float4*>(p.norm)[k];
    }
  }
  __device__ __forceinline__ float4 at(const Rows& p, int i, int k) const {   // piece i, or one that is not kept
    return SOURCE == GATED ? weights[0] : i < WEIGHTS ? weights[i] : reinterpret_cast<const float4*>(p.norm)[k];
  }
};

// Four columns of a row before the scale; z: GATED's; squares: of what the norm is over.
template <int SOURCE> __device__ __forceinline__ float4 staged_value(const Rows& p, const Norm<SOURCE>& norm, float4 v, const float4& z, int i, int k, float& squares) {
  squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
  if constexpr (SOURCE == NORMED) {
    const float4 w = norm.at(p, i, k);
    v.x = __fmul_rn(v.x, w.x), v.y = __fmul_rn(v.y, w.y), v.z = __fmul_rn(v.z, w.z), v.w = __fmul_rn(v.w, w.w);
  }
  if constexpr (SOURCE == GATED) {
    const float4 w = norm.at(p, i, k);
    const float rms = rsqrtf(warp_sum(fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, __fmul_rn(v.w, v.w))))) / (float)GATED_HEAD + p.eps);
    v.x = __fmul_rn(__fmul_rn(__fmul_rn(v.x, rms), w.x), silu(z.x)), v.y = __fmul_rn(__fmul_rn(__fmul_rn(v.y, rms), w.y), silu(z.y));
    v.z = __fmul_rn(__fmul_rn(__fmul_rn(v.z, rms), w.z), silu(z.z)), v.w = __fmul_rn(__fmul_rn(__fmul_rn(v.w, rms), w.w), silu(z.w));
  }
  return v;
}
__device__ __forceinline__ float largest_of(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// ROWS rows from `row` on by a block of THREADS, side by side. stats: [ROWS][2 WARPS] shared floats, 16-byte aligned. Not `wanted`: the same without a row:
// of its numbers nothing is read (row_map is, which the pass begins with), and nothing is written.
template <int SOURCE, int ROWS, class Target>
__device__ __forceinline__ void stage_rows(const Rows& p, const Norm<SOURCE>& norm, int row, float* stats, const Target (&target)[ROWS], float* inverse, bool wanted = true) {
  constexpr int KEEP = Norm<SOURCE>::KEEP;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, part = thread % 16;
  const int cols4 = wanted ? p.cols / 4 : 0;
  const float4 *x[ROWS], *gate[ROWS];
  float squares[ROWS], largest[ROWS], factor[ROWS];
  float4 kept[ROWS][KEEP], gates[ROWS][SOURCE == GATED ? KEEP : 1];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int source = p.row_map ? p.row_map[row + r] : row + r;
    x[r] = reinterpret_cast<const float4*>(p.x + (long long)source * p.x_stride);
    gate[r] = SOURCE == GATED ? reinterpret_cast<const float4*>(p.gate + (long long)(row + r) * p.gate_stride) : nullptr;
    squares[r] = largest[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < KEEP; ++i) {   // all of them on their way before the first is needed
      const int k = thread + i * THREADS;
      kept[r][i] = make_float4(0, 0, 0, 0);
      if (SOURCE == GATED) gates[r][i] = kept[r][i];
      if (k < cols4) kept[r][i] = x[r][k];
      if (SOURCE == GATED && k < cols4) gates[r][i] = gate[r][k];
    }
  }
  auto again = [&](int r, int k) { return staged_value<SOURCE>(p, norm, x[r][k], SOURCE == GATED ? gate[r][k] : make_float4(0, 0, 0, 0), KEEP, k, squares[r]); };
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < KEEP; ++i) {   // zeros past the end too: lanes that add up together do not part
      const int k = thread + i * THREADS;
      if (SOURCE != PLAIN) kept[r][i] = staged_value<SOURCE>(p, norm, kept[r][i], gates[r][SOURCE == GATED ? i : 0], i, k, squares[r]);
      largest[r] = fmaxf(largest[r], largest_of(kept[r][i]));
    }
#pragma unroll 1
    for (int k = thread + KEEP * THREADS; k < cols4; k += THREADS) largest[r] = fmaxf(largest[r], largest_of(again(r, k)));
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float warp_squares = SOURCE == NORMED ? warp_sum(squares[r]) : 0.0f;
    largest[r] = warp_max_positive(largest[r]);
    if (lane == 0) stats[r * 2 * WARPS + warp] = warp_squares, stats[r * 2 * WARPS + WARPS + warp] = largest[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float top = warp_max_positive(stats[r * 2 * WARPS + WARPS + lane % WARPS]);
    float sum = 0.0f;
    if constexpr (SOURCE == NORMED) {
      float4 four[WARPS / 4];
#pragma unroll
      for (int i = 0; i < WARPS / 4; ++i) four[i] = reinterpret_cast<const float4*>(stats + r * 2 * WARPS)[i];
#pragma unroll
      for (int i = 0; i < WARPS / 4; ++i) sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, four[i].x), four[i].y), four[i].z), four[i].w);
    }
    const float rms = SOURCE == NORMED ? rsqrtf(sum / (float)p.cols + p.eps) : 1.0f;
    float unscale;
    factor[r] = __fmul_rn(rms, peak_scale(__fmul_rn(top, rms), unscale));
    if (thread == 0 && wanted) inverse[r] = unscale;
    if (SOURCE == NORMED && thread == 0 && wanted && p.next) p.next->scales[row + r] = following_scale(top);   // every block the same
  }
  const int last = staged_units(p) * (UNIT_COLS / 4);
  const float weight = thread & 1 ? -128.0f * CODE_SCALE : -8.0f * CODE_SCALE;
  auto convert = [&](int r, int at, const float4& v) {   // at: float4 index within the staged columns; whole half warps agree
    const float mine = thread & 1 ? __fmul_rn(factor[r], 0.0625f) : factor[r];
    const uint32_t low = half2_from_floats(__fmul_rn(v.x, mine), __fmul_rn(v.y, mine));
    const uint32_t high = half2_from_floats(__fmul_rn(v.z, mine), __fmul_rn(v.w, mine));
    float total = __fadd_rn(__fadd_rn(half_to_float((uint16_t)low), half_to_float((uint16_t)(low >> 16))),
                            __fadd_rn(half_to_float((uint16_t)high), half_to_float((uint16_t)(high >> 16))));
    total = __fmul_rn(total, weight);
#pragma unroll
    for (int distance = 8; distance > 0; distance >>= 1) total = __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, distance));
    if (at < last && wanted) *reinterpret_cast<uint2*>(target[r].four(at)) = make_uint2(low, high);
    if (at < last && wanted && part == 0) target[r].start(at / 16)[0] = total, target[r].start(at / 16)[2] = total;
  };
#pragma unroll
  for (int three = 0; three < KEEP; three += 3)   // side by side
    if (three * THREADS < last) {
#pragma unroll
      for (int i = three; i < three + 3; ++i)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) convert(r, thread + i * THREADS, kept[r][i]);
    }
#pragma unroll 1
  for (int i = KEEP * THREADS; i < last; i += THREADS) {
    const int k = thread + i;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) convert(r, k, k < cols4 ? again(r, k) : make_float4(0, 0, 0, 0));
  }
}
