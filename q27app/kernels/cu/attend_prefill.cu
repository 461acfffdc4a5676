// attend_prefill: tiled causal attention of a chunk's rows over the cache, turned back where values are turned, with the output gate.
// attend_prefill_merge: the cuts of a row, where blocks of attend_prefill took one each.
// Reference: reference.attend      Used by: layers.run_layer in prefill, after attend_rows
// Shapes:    q_half [rows, A, D], the cache, gates of y [rows, 2 A D + 2 G D] f32 -> out [rows, A D] f32;
//            part_o [rows, max_splits, A, D], part_ml [rows, max_splits, A, 2], totals [rows, A, 2] f32
// Layout:    kv_format.cuh
// Launch:    grid (query tiles, heads or key heads, cuts or 1), block and shared as cuda_attention.prefill_block; the merge: grid
//            (rows A / 8), block (256). cuda_prompts.py says which
// Defines:   HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_DIM, KV_FORMAT, WARPGROUPS, KEY_CUT, FIRST_CUTS
// Numbers:   fp16 products, f32 sums and softmax; steps of 32 or 64 positions, ascending, within cuts of fixed positions from 0 on,
//            which are merged in ascending order by whoever does it: a row's bits depend on its position and prefix alone.
//            Bound: tensor cores.
//
// A tile is 128 lines. A line is a row of a head, or, where a key head's queries share a tile, one of GROUP of a row: few rows fill
// tiles so. With part_o a block takes one cut, and what it found waits there; else it takes all, and what the cuts so far gave
// waits in out.
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int QUERY_WARPS = 8, QUERIES = QUERY_WARPS * 16, DIM_BLOCKS = HEAD_DIM / 64;

__device__ __forceinline__ float gated(float value, float gate) { return __fmul_rn(value, __fdividef(1.0f, 1.0f + __expf(-gate))); }

// Cuts have KEY_CUT positions, and twice as many behind the first ones: cuda_prompts.cut_of.
constexpr int FIRST_KEYS = FIRST_CUTS * KEY_CUT;
static_assert(KEY_CUT % BLOCK_POSITIONS == 0 && FIRST_CUTS % 2 == 0, "borders of blocks, and multiples of the longer cuts");
__device__ __forceinline__ int cut_of(int position) {
  return position < FIRST_KEYS ? position / KEY_CUT : FIRST_CUTS + (position - FIRST_KEYS) / (2 * KEY_CUT);
}
__device__ __forceinline__ int cut_begin(int cut) { return cut < FIRST_CUTS ? cut * KEY_CUT : FIRST_KEYS + (cut - FIRST_CUTS) * 2 * KEY_CUT; }

// Lines of a block, all of one sequence, and the keys that it takes.
struct Tile {
  int seq, first, lines, head, begin, end;   // first row; keys begin .. end - 1
  int part;                                  // of the launch's cuts, the one that is taken
  bool shared;                               // by the queries of a key head, of which `head` is the first

  __device__ __forceinline__ int row(int line) const { return first + (shared ? line / GROUP : line); }
  __device__ __forceinline__ int head_of(int line) const { return head + (shared ? line % GROUP : 0); }
};

// False: there is nothing to do.
__device__ __forceinline__ bool find_tile(const Attend& p, Tile& tile) {
  tile.shared = GROUP > 1 && gridDim.y == NUM_KV_HEADS;
  tile.head = blockIdx.y * (tile.shared ? GROUP : 1);
  const int most = tile.shared ? QUERIES / GROUP : QUERIES;
  int index = blockIdx.x;
  for (tile.seq = 0; tile.seq < p.num_seqs; ++tile.seq) {
    const int start = p.row_starts[tile.seq], stop = p.row_starts[tile.seq + 1], tiles = (stop - start + most - 1) / most;
    if (index < tiles) {
      tile.first = start + (tiles - 1 - index) * most;   // the longest first
      const int rows = min(most, stop - tile.first);
      tile.lines = tile.shared ? rows * GROUP : rows;
      tile.begin = 0, tile.end = p.positions[tile.first + rows - 1] + 1;
      tile.part = gridDim.z - 1 - blockIdx.z;   // the longest first
      if (p.part_o) tile.begin = cut_begin(p.first_cut + tile.part), tile.end = min(tile.end, cut_begin(p.first_cut + tile.part + 1));
      return tile.begin < tile.end;
    }
    index -= tiles;
  }
  return false;
}

// What cuts gave -> what they gave together. top: the largest score in powers of two.
struct Joined {
  float top, before, now;   // and by what the sums before, and those of this cut, are multiplied
  __device__ __forceinline__ Joined(float earlier, float later) {
    top = fmaxf(earlier, later);
    const float base = top == -INFINITY ? 0.0f : top;
    before = exp2_quick(earlier - base), now = exp2_quick(later - base);
  }
  __device__ __forceinline__ float sum(float earlier, float later) const { return fmaf(later, now, __fmul_rn(earlier, before)); }
};

// A cut ends and a block goes on: its sums join those of the cuts before, in out or, of the last cut, in registers. The whole warp calls.
// joined: [QUERIES] of the block, the largest score and the sum of shares of the cuts before.
__device__ __forceinline__ void join_cut(const Attend& p, const Tile& tile, float2* joined, int from, bool is_first, bool is_last,
                                         float (&out)[DIM_BLOCKS][8][4], float (&top)[2], float (&sum)[2]) {
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = from + g + 8 * i;
    const float2 earlier = is_first ? make_float2(-INFINITY, 0.0f) : joined[line];
    const Joined both(earlier.x, top[i]);
    const float shares = is_first ? sum[i] : both.sum(earlier.y, sum[i]);
    __syncwarp();
    if (c == 0) joined[line] = make_float2(both.top, shares);
    __syncwarp();
    top[i] = -INFINITY, sum[i] = is_last ? shares : 0.0f;
    float* target = p.out + (long long)tile.row(line) * p.out_stride + tile.head_of(line) * HEAD_DIM + 2 * c;
    constexpr int AT_ONCE = 8;
#pragma unroll
    for (int base = 0; base < DIM_BLOCKS * 8; base += AT_ONCE) {
      float2 before[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)
        before[n] = !is_first && line < tile.lines ? *reinterpret_cast<const float2*>(target + (base + n) * 8) : make_float2(0, 0);
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        float(&own)[4] = out[(base + n) / 8][(base + n) % 8];
        float& low = own[2 * i];
        float& high = own[2 * i + 1];
        if (!is_first) low = both.sum(before[n].x, low), high = both.sum(before[n].y, high);
        if (is_last) continue;
        if (line < tile.lines) *reinterpret_cast<float2*>(target + (base + n) * 8) = make_float2(low, high);
        low = high = 0.0f;
      }
    }
  }
}

// What a cut gave a warp's lines, to be merged.
__device__ __forceinline__ void put_part(const Attend& p, const Tile& tile, int from, const float (&out)[DIM_BLOCKS][8][4], const float (&top)[2],
                                         const float (&sum)[2]) {
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = from + g + 8 * i;
    if (line >= tile.lines) continue;
    const long long at = ((long long)tile.row(line) * p.max_splits + tile.part) * NUM_HEADS + tile.head_of(line);
    if (c == 0) *reinterpret_cast<float2*>(p.part_ml + 2 * at) = make_float2(top[i], sum[i]);
    float* target = p.part_o + at * HEAD_DIM + 2 * c;
#pragma unroll
    for (int n = 0; n < DIM_BLOCKS * 8; ++n)
      *reinterpret_cast<float2*>(target + n * 8) = make_float2(out[n / 8][n % 8][2 * i], out[n / 8][n % 8][2 * i + 1]);
  }
}

// What 16 lines of a warp attended, laid out as mma_f16's sums -> out, with the gate. work: of turned values, 16 rows of BLOCK_DIMS.
__device__ __forceinline__ void put_attended(const Attend& p, const Tile& tile, int from, float (&out)[DIM_BLOCKS][8][4], const float (&sum)[2],
                                             float* work) {
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int half = 0; half < (TURNED_VALUES ? HEAD_DIM / BLOCK_DIMS : 1); ++half) {
    constexpr int BLOCKS = TURNED_VALUES ? BLOCK_DIMS / 64 : DIM_BLOCKS;
    if constexpr (TURNED_VALUES) __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int line = from + g + 8 * i, row = tile.row(line), head = tile.head_of(line);
      if (line >= tile.lines) continue;
      const float share = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
      const float* gate = p.y + (long long)row * p.y_stride + head * 2 * HEAD_DIM + HEAD_DIM;
      float* target = p.out + (long long)row * p.out_stride + head * HEAD_DIM;
      constexpr int AT_ONCE = 8;   // gates that are loaded before anything is stored
#pragma unroll
      for (int start = 0; start < BLOCKS * 8; start += AT_ONCE) {
        float2 gates[AT_ONCE];
        if constexpr (!TURNED_VALUES)
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) gates[n] = *reinterpret_cast<const float2*>(gate + (start + n) * 8 + 2 * c);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          const int d = (start + n) * 8 + 2 * c;
          const float(&sums)[4] = out[half * BLOCKS + (start + n) / 8][(start + n) % 8];
          const float low = __fmul_rn(sums[2 * i], share), high = __fmul_rn(sums[2 * i + 1], share);
          if constexpr (TURNED_VALUES) *reinterpret_cast<float2*>(work + (g + 8 * i) * BLOCK_DIMS + d) = make_float2(low, high);
          else *reinterpret_cast<float2*>(target + d) = make_float2(gated(low, gates[n].x), gated(high, gates[n].y));
        }
      }
    }
    if constexpr (TURNED_VALUES) {
      __syncwarp();
#pragma unroll 1
      for (int base = 0; base < 16 && from + base < tile.lines; base += 4) {
        const int d = half * BLOCK_DIMS + 4 * lane;
        float4 gates[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int line = min(from + base + i, tile.lines - 1);
          gates[i] = *reinterpret_cast<const float4*>(p.y + (long long)tile.row(line) * p.y_stride + (2 * tile.head_of(line) + 1) * HEAD_DIM + d);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int line = from + base + i, row = tile.row(line), head = tile.head_of(line);
          const float4 four = *reinterpret_cast<const float4*>(work + (base + i) * BLOCK_DIMS + 4 * lane);
          float value[4] = {four.x, four.y, four.z, four.w};
          turn_back(value);
          if (line < tile.lines)
            *reinterpret_cast<float4*>(p.out + (long long)row * p.out_stride + head * HEAD_DIM + d) = make_float4(
                gated(value[0], gates[i].x), gated(value[1], gates[i].y), gated(value[2], gates[i].z), gated(value[3], gates[i].w));
        }
      }
    }
  }
}

// Scores of a tile -> shares as fp16 fragments; out and sum are brought to the new maximum.
template <int GROUPS>
__device__ __forceinline__ void soften(float (&score)[GROUPS][4], const float (&factor)[2], const int (&position)[2], bool is_cut, int start,
                                       int first_position, float (&top)[2], float (&sum)[2], float (&correction)[2], uint32_t (&a)[GROUPS / 2][4]) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < GROUPS; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) score[n][j] = __fmul_rn(score[n][j], factor[j / 2]);
  if (is_cut)   // seldom
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = start + n * 8 + 2 * c + j % 2;
        if (key > position[j / 2] || key < first_position) score[n][j] = -INFINITY;
      }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float now = top[i];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) now = fmaxf(now, score[n][2 * i + j]);
    now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
    now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
    const float base = now == -INFINITY ? 0.0f : now;
    correction[i] = exp2_quick(top[i] - base);
    top[i] = now;
    float part = 0.0f;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& s = score[n][2 * i + j];
        s = exp2_quick(s - base);
        part = __fadd_rn(part, s);
      }
    part = __fadd_rn(part, __shfl_xor_sync(ALL_LANES, part, 1));
    part = __fadd_rn(part, __shfl_xor_sync(ALL_LANES, part, 2));
    sum[i] = fmaf(sum[i], correction[i], part);
  }
#pragma unroll
  for (int s = 0; s < GROUPS / 2; ++s) {
    a[s][0] = half2_from_floats(score[2 * s][0], score[2 * s][1]), a[s][1] = half2_from_floats(score[2 * s][2], score[2 * s][3]);
    a[s][2] = half2_from_floats(score[2 * s + 1][0], score[2 * s + 1][1]), a[s][3] = half2_from_floats(score[2 * s + 1][2], score[2 * s + 1][3]);
  }
}

#if WARPGROUPS
#include "attend_warpgroup.cuh"
#else
#include "attend_warp.cuh"
#endif

constexpr int MERGE_WARPS = 8;

// A warp a row of a head: its cuts in ascending order, from the first one of this launch on.
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS) attend_prefill_merge(const __grid_constant__ Attend p) {
  constexpr int PAIRS = HEAD_DIM / 64;
  const int item = blockIdx.x * MERGE_WARPS + threadIdx.x / 32, row = item / NUM_HEADS, head = item % NUM_HEADS, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int last = cut_of(p.positions[row]), cuts = min(last + 1 - p.first_cut, p.max_splits);
  if (cuts <= 0) return;   // done by an earlier launch
  const auto place = [&](int pair) { return TURNED_VALUES ? pair / 2 * BLOCK_DIMS + 4 * lane + pair % 2 * 2 : pair * 64 + 2 * lane; };
  float* target = p.out + (long long)row * p.out_stride + head * HEAD_DIM;
  float2* total = reinterpret_cast<float2*>(p.totals) + item;
  float top = -INFINITY, sum = 0.0f, value[2 * PAIRS] = {};
  if (p.first_cut) {
    top = total->x, sum = total->y;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const float2 two = *reinterpret_cast<const float2*>(target + place(pair));
      value[2 * pair] = two.x, value[2 * pair + 1] = two.y;
    }
  }
  const long long first = (long long)row * p.max_splits * NUM_HEADS + head;
#pragma unroll 4
  for (int cut = 0; cut < cuts; ++cut) {
    const long long at = first + (long long)cut * NUM_HEADS;
    const float2 ml = *reinterpret_cast<const float2*>(p.part_ml + 2 * at);
    float2 part[PAIRS];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) part[pair] = *reinterpret_cast<const float2*>(p.part_o + at * HEAD_DIM + place(pair));
    const bool is_first = p.first_cut + cut == 0;
    const Joined joined(top, ml.x);
    top = joined.top, sum = is_first ? ml.y : joined.sum(sum, ml.y);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      float& low = value[2 * pair];
      float& high = value[2 * pair + 1];
      low = is_first ? part[pair].x : joined.sum(low, part[pair].x), high = is_first ? part[pair].y : joined.sum(high, part[pair].y);
    }
  }
  const bool is_last = last < p.first_cut + p.max_splits;
  if (is_last) {
    const float share = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) value[i] = __fmul_rn(value[i], share);
    if constexpr (TURNED_VALUES)
#pragma unroll
      for (int half = 0; half < PAIRS / 2; ++half) turn_back(reinterpret_cast<float(&)[4]>(value[4 * half]));
  } else {
    __syncwarp();   // all have read it
    if (lane == 0) *total = make_float2(top, sum);
  }
  const float* gate = p.y + (long long)row * p.y_stride + (2 * head + 1) * HEAD_DIM;
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    float2 two = make_float2(value[2 * pair], value[2 * pair + 1]);
    if (is_last) {
      const float2 gates = *reinterpret_cast<const float2*>(gate + place(pair));
      two = make_float2(gated(two.x, gates.x), gated(two.y, gates.y));
    }
    *reinterpret_cast<float2*>(target + place(pair)) = two;
  }
}
