// linear_rows: out = norm(x) W^T | x W^T added | silu(g) * u, for 1 to 16 rows; the weights are read once.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer, Backend.head
// Shapes:    x [rows, cols] f32, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x rows contiguous and 16-byte aligned; tiles of W one after the other, a unit list each
// Launch:    linear_rows_*: grid (blocks), block (512), shared as cuda_weights.rows_shared_bytes, at most one block a
//            multiprocessor and all at once: a block waits for the one before it; stage_*: grid (rows), block (512)
// Defines:   none    Limits: cols % 4 == 0, rows <= 8 NB
// Numbers:   activations scaled per row, its peak to 2^14, then fp16; exact products; f32 sums in a fixed order: units of a
//            warp ascending, warps ascending, blocks ascending, whatever the rows. Bound: memory.
//
// The units of all groups, one after the other, are shared out evenly (row_shares.cuh): a block takes an equal part of
// them, a warp an equal part of its block's. So every multiprocessor reads as many bytes as the others, and nobody waits for
// anybody before the end. Each lane reads its 16 bytes of a unit straight into registers, an item ahead, the first of them before
// the kernel in front has ended. Sums go to shared memory where a warp leaves a group. A group that lies in two blocks is
// finished by the second: the first leaves its sums in `border`, word by word, and the second takes and empties them.
// One or two rows are normed and converted by every block (staging.cuh); more rows are converted once, by stage_*, before.
#include "row_shares.cuh"

enum { STORE = 0, ADD = 1, GATE_UP = 2 };

template <int SOURCE_, int EPILOGUE_, int NB_> struct Shape {
  static constexpr int SOURCE = SOURCE_, EPILOGUE = EPILOGUE_, NB = NB_;
  static constexpr bool FUSED = SOURCE != HALVES;
  static constexpr int COLUMNS = FUSED ? 2 : 8, TILE_SUMS = COLUMNS * 20;   // [columns][16 rows + 4]
  static constexpr int WARP_SUMS = 2 * GROUP_TILES * NB * TILE_SUMS;        // of two groups
};

template <class S> struct Memory {   // the block's shared memory
  float* sums;          // [warps][2 groups][tiles][NB][TILE_SUMS]
  float* head;          // [tiles][MAX_ROWS][TILE_ROWS]: of a group that the block before began
  float* inverse;       // FUSED: [16] 1 / scale of each row
  float* stats;         // FUSED: [2 rows][2 WARPS]
  int* edges;           // [ROUND_GROUPS][2] first and last warp of a group, [warps] first group of a warp
  float* minus_sums;    // FUSED: [units][8]
  uint16_t* rows;       // FUSED: [rows][stride]
  int stride;
  __device__ __forceinline__ void open(unsigned char* shared, int units) {
    sums = reinterpret_cast<float*>(shared);
    head = sums + BLOCK_WARPS * S::WARP_SUMS;
    inverse = head + BORDER_WORDS;
    stats = inverse + 16;
    edges = reinterpret_cast<int*>(stats + 2 * 2 * WARPS);
    minus_sums = reinterpret_cast<float*>(edges + 2 * ROUND_GROUPS + BLOCK_WARPS);
    rows = reinterpret_cast<uint16_t*>(minus_sums + units * 8);
    stride = units * UNIT_COLS + 8;
  }
};

// Units of both tiles of a group whose loads are in flight.
template <int KIND, int NB> struct Item {
  static constexpr int WORDS = KIND == KIND_Q4 ? 1 : KIND == KIND_Q8 ? 2 : 4;                       // of 16 bytes a lane and unit
  static constexpr int UNITS = KIND == KIND_F16 || NB == 2 && KIND == KIND_Q8 ? 1 : KIND == KIND_Q8 || NB == 2 ? 2 : 4;
};
struct Flight {
  uint4 words[8];
  uint32_t scales[8];
};

// One warp on its part [first, end) of a segment's units, counted from the segment's first.
template <int KIND, class S> struct Stream {
  static constexpr int UNITS = Item<KIND, S::NB>::UNITS, WORDS = Item<KIND, S::NB>::WORDS, BYTES = Unit<KIND>::BYTES;
  const unsigned char* at[GROUP_TILES];   // the lane's part of the next item
  int group, unit, left, count;           // of the item in flight

  __device__ __forceinline__ void aim(const LinearRows& p, const Segment& segment, int lane) {
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t)   // at an odd end the last tile again; its sums are not used
      at[t] = p.weights + segment.offset + (long long)min(group * GROUP_TILES + t, segment.num_tiles - 1) * segment.tile_bytes + (unit * BYTES + lane * 16);
  }
  __device__ __forceinline__ void open(const LinearRows& p, const Segment& segment, int first, int end, int lane) {
    group = p.rows_in.units == 1 ? first : divided(first, p.per_unit), unit = first - group * p.rows_in.units, left = end - first;
    aim(p, segment, lane);
    count = min(UNITS, min(p.rows_in.units - unit, left));
  }
  __device__ __forceinline__ void fetch(Flight& flight, int j, int lane) const {
    const unsigned char* scales = at[0] + (j * BYTES + Unit<KIND>::DATA + (lane >> 2) * 4 - lane * 16);
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
      for (int i = 0; i < WORDS; ++i) load_once_16(flight.words[(j * GROUP_TILES + t) * WORDS + i], at[t] + j * BYTES + i * 512, j < count);
    if (KIND == KIND_F16) return;
    load_once_4(flight.scales[j * GROUP_TILES], scales, j < count);
    load_once_4(flight.scales[j * GROUP_TILES + 1], scales + (at[1] - at[0]), j < count);
  }
  __device__ __forceinline__ void begin(Flight& flight, int lane) const {
#pragma unroll
    for (int j = 0; j < UNITS; ++j) fetch(flight, j, lane);
  }

  // Activations of a unit: halves b and -sums.
  __device__ __forceinline__ static void activations(const LinearRows& p, const Memory<S>& m, int unit, int lane, uint32_t (&b)[S::NB][8], float (&minus)[S::NB][2]) {
    const int u = KIND == KIND_F16 && p.rows_in.wrap && unit >= p.rows_in.wrap ? unit - p.rows_in.wrap : unit;
#pragma unroll
    for (int nb = 0; nb < S::NB; ++nb) {
      uint4 low, high;
      float2 sum;
      if constexpr (S::FUSED) {
        const uint16_t* row = m.rows + min(lane >> 2, p.rows - 1) * m.stride + u * UNIT_COLS + (lane & 3) * 16;
        low = *reinterpret_cast<const uint4*>(row), high = *reinterpret_cast<const uint4*>(row + 8);
        sum = *reinterpret_cast<const float2*>(m.minus_sums + u * 8 + 2 * (lane & 3));
      } else {
        const uint4* row = reinterpret_cast<const uint4*>(p.rows_in.halves) + (u * S::NB + nb) * 64 + lane;
        low = row[0], high = row[32];
        sum = *reinterpret_cast<const float2*>(p.rows_in.minus_sums + (u * S::NB + nb) * 8 + 2 * (lane & 3));
      }
      b[nb][0] = low.x, b[nb][1] = low.y, b[nb][2] = low.z, b[nb][3] = low.w;
      b[nb][4] = high.x, b[nb][5] = high.y, b[nb][6] = high.z, b[nb][7] = high.w;
      minus[nb][0] = sum.x, minus[nb][1] = sum.y;
    }
  }

  // place: which of the warp's two groups this is.
  __device__ __forceinline__ static void leave(const Memory<S>& m, float (&acc)[GROUP_TILES][S::NB][4], int warp, int lane, int place) {
    const int g = lane >> 2, q = lane & 3;
    float* base = m.sums + warp * S::WARP_SUMS + place * GROUP_TILES * S::NB * S::TILE_SUMS + 40 * q + g;
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
      for (int nb = 0; nb < S::NB; ++nb) {
        float(&c)[4] = acc[t][nb];
        float* target = base + (t * S::NB + nb) * S::TILE_SUMS;
        if (!S::FUSED || q == 0) target[0] = c[0], target[20] = c[1], target[8] = c[2], target[28] = c[3];
        c[0] = c[1] = c[2] = c[3] = 0.0f;
      }
  }

  // place: groups of this round that the warp has left already. Returns them with those of this part.
  __device__ __forceinline__ int run(const LinearRows& p, const Segment& segment, const Memory<S>& m, Flight& flight, int warp, int lane, int place) {
    float acc[GROUP_TILES][S::NB][4] = {};
#pragma unroll 1
    while (left > 0) {
      const int here = unit, had = count, was = group;
      left -= had, unit += had;
      at[0] += had * BYTES, at[1] += had * BYTES;
      if (unit == p.rows_in.units) unit = 0, ++group, aim(p, segment, lane);
      count = min(UNITS, min(p.rows_in.units - unit, left));
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {   // what an item lacks of its units is multiplied by 0
        uint32_t b[S::NB][8];
        float minus[S::NB][2];
        activations(p, m, min(here + j, here + had - 1), lane, b, minus);
#pragma unroll
        for (int t = 0; t < GROUP_TILES; ++t)
          multiply_words<KIND, S::NB>(flight.words + (j * GROUP_TILES + t) * WORDS, j < had ? flight.scales[j * GROUP_TILES + t] : 0u, b, minus, acc[t]);
        fetch(flight, j, lane);
      }
      if (group != was || left == 0) leave(m, acc, warp, lane, place++);
    }
    return place;
  }
};

template <class S> __device__ __forceinline__ float inverse_of(const LinearRows& p, const Memory<S>& m, int row) {
  if constexpr (S::FUSED) return m.inverse[row];
  else return p.rows_in.inverse[row];
}
template <class S> __device__ __forceinline__ void finish_value(const LinearRows& p, const Segment& segment, int group, int t, int i, int row, float value) {
  const int place = (group * GROUP_TILES + t) * TILE_ROWS + i;
  if (place >= segment.num_rows) return;
  float* target = p.out + (long long)row * p.out_stride + segment.first_row + place;
  *target = S::EPILOGUE == ADD ? __fadd_rn(*target, value) : value;
}
__device__ __forceinline__ void finish_pair(const LinearRows& p, int group, int i, int row, float gate, float up) {
  const int place = group * TILE_ROWS + i;
  if (place < p.out_rows) p.out[(long long)row * p.out_stride + place] = __fmul_rn(silu(gate), up);
}
template <class S> __device__ __forceinline__ float sum_of_warps(const Memory<S>& m, int number, int low, int high, int t, int i, int row) {
  const float* base = m.sums + (t * S::NB + (row >> 3)) * S::TILE_SUMS + (row & 7) * 20 + i;
  const int* first_group = m.edges + 2 * ROUND_GROUPS;
  float total = 0.0f;
  for (int warp = low; warp <= high; ++warp) {
    const int place = number - first_group[warp];
    if (place < 2) total = __fadd_rn(total, base[warp * S::WARP_SUMS + place * GROUP_TILES * S::NB * S::TILE_SUMS]);
  }
  return total;
}

// Sums of a round's groups, to where they belong: out, the block's head, or the border with the next block.
template <class S> __device__ __forceinline__ void reduce_round(const LinearRows& p, const Share& share, const Memory<S>& m, int low, int high) {
  const int first = group_at(p, low).number, groups = group_at(p, high - 1).number - first + 1;
  constexpr bool PAIRS = S::EPILOGUE == GATE_UP;
  constexpr int EACH = (PAIRS ? 1 : GROUP_TILES) * TILE_ROWS;
  for (int o = threadIdx.x; o < groups * EACH * p.rows; o += BLOCK) {
    const int i = o % TILE_ROWS, t = PAIRS ? 0 : o / TILE_ROWS % GROUP_TILES, number = first + o / EACH % groups, row = o / EACH / groups;
    const Group g = group_at(p, share.group_start(p, number));
    const Segment& segment = p.segments[g.segment];
    const int* edges = m.edges + 2 * (number - first);
    const float factor = (segment.kind == KIND_F16 ? 1.0f : CODE_UNSCALE) * inverse_of(p, m, row);
    float value[2];
#pragma unroll
    for (int e = 0; e < (PAIRS ? 2 : 1); ++e) value[e] = __fmul_rn(sum_of_warps<S>(m, number, edges[0], edges[1], t + e, i, row), factor);
    const bool is_head = g.start < share.begin, is_tail = g.end > share.end;
    if (!is_head && !is_tail) {
      if constexpr (PAIRS) finish_pair(p, g.index, i, row, value[0], value[1]);
      else finish_value<S>(p, segment, g.index, t, i, row, value[0]);
      continue;
    }
#pragma unroll
    for (int e = 0; e < (PAIRS ? 2 : 1); ++e) {
      const int word = ((t + e) * MAX_ROWS + row) * TILE_ROWS + i;
      if (is_head) m.head[word] = value[e];
      else post_word(p.border + (blockIdx.x + 1) * BORDER_WORDS + word, value[e]);
    }
  }
}

// The group that the block before began: its sums, then this block's.
template <class S> __device__ __forceinline__ void finish_head(const LinearRows& p, const Share& share, const Memory<S>& m) {
  constexpr bool PAIRS = S::EPILOGUE == GATE_UP;
  constexpr int EACH = (PAIRS ? 1 : GROUP_TILES) * TILE_ROWS;
  for (int o = threadIdx.x; o < EACH * p.rows; o += BLOCK) {
    const int i = o % TILE_ROWS, t = PAIRS ? 0 : o / TILE_ROWS % GROUP_TILES, row = o / EACH;
    float value[2];
#pragma unroll
    for (int e = 0; e < (PAIRS ? 2 : 1); ++e) {
      const int word = ((t + e) * MAX_ROWS + row) * TILE_ROWS + i;
      value[e] = __fadd_rn(take_word(p.border + blockIdx.x * BORDER_WORDS + word), m.head[word]);
    }
    if constexpr (PAIRS) finish_pair(p, share.first.index, i, row, value[0], value[1]);
    else finish_value<S>(p, p.segments[share.first.segment], share.first.index, t, i, row, value[0]);
  }
}

// Rows that were converted before: bring what the warp reads near, or it would wait for each unit in turn.
template <class S> __device__ __forceinline__ void touch(const LinearRows& p, int first, int units, int lane) {
  const int all = p.rows_in.wrap ? p.rows_in.wrap : p.rows_in.units, lines = min(units, all) * S::NB * 8;
  uint32_t seen = 0;
#pragma unroll 8
  for (int line = lane; line < lines; line += 32) {
    int at = first * S::NB * 8 + line;
    while (at >= all * S::NB * 8) at -= all * S::NB * 8;
    seen |= reinterpret_cast<const uint32_t*>(p.rows_in.halves)[at * 32];
  }
  if (seen == 0xfffefffeu) asm volatile("" ::"r"(seen));
}

// A warp's part of a round, segment by segment.
template <class S> __device__ __forceinline__ void run_round(const LinearRows& p, const Memory<S>& m, int round, int from, int to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Flight flight = {};
  int place = 0, position = from;
  bool waited = round > 0;
#pragma unroll 1
  do {
    const Group g = group_at(p, min(position, p.total - 1));
    const Segment& segment = p.segments[g.segment];
    const int shift = unit_shift(segment.kind), base = g.start - (g.index * p.rows_in.units << shift);
    const int stop = min(to, base + (groups_of(segment) * p.rows_in.units << shift));
    const bool mine = position < stop;
    auto part = [&](auto stream) {
      if (mine) stream.open(p, segment, (position - base) >> shift, (stop - base) >> shift, lane), stream.begin(flight, lane);
      if (!waited) {
        wait_for_earlier();
        if constexpr (S::FUSED) {
#pragma unroll 1
          for (int row = 0; row < p.rows; ++row)
            stage_row<S::SOURCE>(p.rows_in, row, m.stats + 2 * WARPS * row, RowMajor{m.rows + row * m.stride, m.minus_sums + row}, m.inverse + row);
          __syncthreads();
        } else if (mine) {
          touch<S>(p, (position - g.start) >> shift, (stop - position) >> shift, lane);
        }
        waited = true;
      }
      if (mine) place = stream.run(p, segment, m, flight, warp, lane, place);
    };
    if (segment.kind == KIND_Q4) part(Stream<KIND_Q4, S>());
    else if (segment.kind == KIND_Q8) part(Stream<KIND_Q8, S>());
    else part(Stream<KIND_F16, S>());
    position = stop;
  } while (position < to);
}

// For the sums of a round: which groups the warp was in, and where it was the first or the last.
template <class S> __device__ __forceinline__ void note_edges(const LinearRows& p, const Share& share, const Memory<S>& m, int low, int high, int from, int to) {
  if (threadIdx.x % 32) return;
  const int warp = threadIdx.x / 32, first = group_at(p, low).number;
  int* first_group = m.edges + 2 * ROUND_GROUPS + warp;
  *first_group = -2;   // in no group
  if (from >= to) return;
  const Group start = group_at(p, from), stop = group_at(p, to - 1);
  *first_group = start.number;
  for (int number = start.number; number <= stop.number; ++number) {
    const int begin = share.group_start(p, number), end = group_at(p, begin).end;
    if (max(begin, low) >= from) m.edges[2 * (number - first)] = warp;
    if (min(end, high) <= to) m.edges[2 * (number - first) + 1] = warp;
  }
}

template <int SOURCE, int EPILOGUE, int NB> __device__ __forceinline__ void linear_rows(const LinearRows& p) {
  using S = Shape<SOURCE, EPILOGUE, NB>;
  SHARED_BYTES(shared);
  allow_next();
  Memory<S> m;
  m.open(shared, staged_units(p.rows_in));
#pragma unroll 1
  for (int round = 0;; ++round) {
    int from, to;
    {
      Share share;
      share.open(p);
      const int low = share.round_start(p, round), high = share.round_start(p, round + 1), warp = threadIdx.x / 32;
      from = share.warp_start(p, low, high, warp), to = share.warp_start(p, low, high, warp + 1);
    }
    run_round<S>(p, m, round, from, to);
    Share share;
    share.open(p);
    const int low = share.round_start(p, round), high = share.round_start(p, round + 1);
    note_edges<S>(p, share, m, low, high, from, to);
    __syncthreads();
    reduce_round<S>(p, share, m, low, high);
    const bool has_head = share.first.start < share.begin, is_over = round + 1 >= share.rounds;
    if (!is_over || has_head) __syncthreads();
    if (!is_over) continue;
    if (has_head) finish_head<S>(p, share, m);
    return;
  }
}

#define LINEAR_ROWS(NAME, SOURCE, EPILOGUE, NB)                                                             \
  extern "C" __global__ void __launch_bounds__(BLOCK, 1) NAME(const __grid_constant__ LinearRows p) {     \
    linear_rows<SOURCE, EPILOGUE, NB>(p);                                                                   \
  }
LINEAR_ROWS(linear_rows_norm_store, NORMED, STORE, 1)
LINEAR_ROWS(linear_rows_norm_gate_up, NORMED, GATE_UP, 1)
LINEAR_ROWS(linear_rows_plain_store, PLAIN, STORE, 1)
LINEAR_ROWS(linear_rows_plain_add, PLAIN, ADD, 1)
LINEAR_ROWS(linear_rows_gated_add, GATED, ADD, 1)
LINEAR_ROWS(linear_rows_halves_store, HALVES, STORE, 1)
LINEAR_ROWS(linear_rows_halves_add, HALVES, ADD, 1)
LINEAR_ROWS(linear_rows_halves_gate_up, HALVES, GATE_UP, 1)
LINEAR_ROWS(linear_rows_wide_store, HALVES, STORE, 2)
LINEAR_ROWS(linear_rows_wide_add, HALVES, ADD, 2)
LINEAR_ROWS(linear_rows_wide_gate_up, HALVES, GATE_UP, 2)

// Convert a row once for all blocks, into fragment order. grid (rows)
template <int SOURCE> __device__ __forceinline__ void stage_all(const Rows& p) {
  __shared__ float stats[2 * WARPS];
  allow_next();
  wait_for_earlier();
  stage_row<SOURCE>(p, blockIdx.x, stats, FragmentOrder{p.halves, p.minus_sums, (int)blockIdx.x, p.row_groups}, p.inverse + blockIdx.x);
}
extern "C" __global__ void __launch_bounds__(THREADS) stage_norm(const __grid_constant__ Rows p) { stage_all<NORMED>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) stage_plain(const __grid_constant__ Rows p) { stage_all<PLAIN>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) stage_gated(const __grid_constant__ Rows p) { stage_all<GATED>(p); }
