// linear_rows: out = norm(x) W^T | x W^T added | silu(g) * u, for 1 to 16 rows; the weights are read once.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer, Backend.head
// Shapes:    x [rows, cols] f32, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x rows contiguous and 16-byte aligned; tiles of W one after the other, a unit list each
// Launch:    linear_rows_*: grid (runs / 2 * splits), block (512), shared as cuda_weights.rows_shared_bytes;
//            stage_*: grid (rows, splits), block (256)
// Defines:   RING_BYTES_8, RING_BYTES_16 (a warp)    Limits: cols % 4 == 0, rows <= 8 NB
// Numbers:   activations scaled per row (and K split), its peak to 2^14, then fp16; exact products; f32 sums in a fixed
//            order: units of a warp ascending, warps ascending, splits ascending. Bound: memory.
//
// A group of 8 warps owns a run of tiles and one K split; its warps share the columns. A block is two groups on the same staged
// rows, one block a multiprocessor: smaller blocks would be dealt out unevenly while the kernel before still runs. Each warp streams its units of two tiles (one where there are more than 8 rows) through a ring of
// asynchronous copies, already filling while the kernel before still runs. One or two rows are normed and converted by every
// block (staging.cuh); more rows are converted once, by stage_*, before.
#include "quant.cuh"
#include "staging.cuh"

constexpr int MAX_SEGMENTS = 4, FLAGS = 256, MAX_RUNS = 512, GROUPS = 2, BLOCK = GROUPS * THREADS;
constexpr int TILE_SUMS = 160;   // floats of a tile's sums: [8 columns][16 rows + 4]
enum { STORE = 0, ADD = 1, GATE_UP = 2 };

struct LinearRows {
  const unsigned char* weights;
  float* out;
  float* partial;              // [splits, num_tiles, 16, 16], only when splits > 1
  int* counters;               // [num_tiles], zero between launches
  Rows rows_in;
  Segment segments[MAX_SEGMENTS];
  int num_segments, num_tiles, rows, out_stride, out_rows;
  unsigned short run_tiles[MAX_RUNS + 2];   // first tile of each run
};

struct Slice {   // what a block works on; its groups take runs first_run, first_run + 1
  int first_run, split, first_unit, num_units;
};

__device__ __forceinline__ Slice block_slice(const LinearRows& p) {
  Slice s;
  s.first_run = GROUPS * (blockIdx.x / p.rows_in.splits);
  s.split = blockIdx.x % p.rows_in.splits;
  s.first_unit = split_unit(p.rows_in, s.split);
  s.num_units = split_unit(p.rows_in, s.split + 1) - s.first_unit;
  return s;
}

template <int NB> __host__ __device__ constexpr int ring_bytes() { return NB == 1 ? RING_BYTES_8 : RING_BYTES_16; }
// Tiles that share an activation fragment; F16 takes one at a time, so that two stages fit the ring.
template <int NB> __host__ __device__ constexpr int most_tiles() { return NB == 1 && RING_BYTES_8 >= 4 * Unit<KIND_Q8>::BYTES ? 2 : 1; }
template <int KIND, int NB> __host__ __device__ constexpr int tiles_at_once() { return KIND == KIND_F16 ? 1 : most_tiles<NB>(); }
template <int KIND, int NB> __host__ __device__ constexpr int stages() { return ring_bytes<NB>() / (tiles_at_once<KIND, NB>() * Unit<KIND>::BYTES); }

// One warp's stream of stages; stage i is unit i % count of tile set i / count.
template <int NB> struct Ring {
  static constexpr int PIECES = 3;   // of a lane, unrolled
  unsigned char* shared;
  unsigned char* target;         // the lane's place in the next stage
  const unsigned char* source;   // next unit of the first tile of the set
  int offset[PIECES];             // of the lane's first pieces from there
  int together, unit_bytes, tile_bytes, chunks, num_stages, next_set, count, left, tiles, unit, slot;

  __device__ __forceinline__ void open(unsigned char* ring, const LinearRows& p, const Segment& segment, int first_tile,
                                       int end_tile, int first_unit, int units, int lane) {
    unit_bytes = segment.kind == KIND_Q4 ? Unit<KIND_Q4>::BYTES : segment.kind == KIND_Q8 ? Unit<KIND_Q8>::BYTES : Unit<KIND_F16>::BYTES;
    tile_bytes = segment.tile_bytes;
    together = segment.kind == KIND_F16 ? 1 : most_tiles<NB>();
    chunks = together * unit_bytes / 16;
    num_stages = ring_bytes<NB>() / (together * unit_bytes);
    shared = ring;
    target = ring + lane * 16;
    source = p.weights + segment.offset + (long long)(first_tile - segment.first_tile) * tile_bytes + (long long)first_unit * unit_bytes;
    tiles = end_tile - first_tile;
    count = units;
    left = (tiles + together - 1) / together * units;
    next_set = together * tile_bytes - units * unit_bytes;
    unit = slot = 0;
    aim(lane);
  }
  // At an odd end the second tile's place takes what follows the first: in bounds, and not used.
  __device__ __forceinline__ int place(int at) const { return at * 16 + (together == 2 && tiles > 1 && at * 16 >= unit_bytes ? tile_bytes - unit_bytes : 0); }
  __device__ __forceinline__ void aim(int lane) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) offset[i] = place(lane + 32 * i);
  }
  __device__ __forceinline__ void issue(int lane) {
    if (left > 0) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        if (i == 0 || lane + 32 * i < chunks) copy_async_16(target + i * 512, source + offset[i]);
#pragma unroll 1
      for (int at = lane + 32 * PIECES; at < chunks; at += 32) copy_async_16(target + (at - lane) * 16, source + place(at));
      source += unit_bytes;
      target += chunks * 16;
      if (++slot == num_stages) slot = 0, target = shared + lane * 16;
      if (++unit == count) {
        unit = 0, source += next_set, tiles -= together;
        if (tiles == 1) aim(lane);
      }
      --left;
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void prime(int lane) {
#pragma unroll 1
    for (int i = 0; i < num_stages; ++i) issue(lane);
  }
};

template <int NB> struct Memory {   // the block's shared memory
  static constexpr int T = most_tiles<NB>();
  float* inverse;        // [16] 1 / scale of each row
  float* stats;          // [2 rows][2][WARPS]
  unsigned char* flags;  // [FLAGS]
  float* sums;           // [GROUPS][WARPS][T][NB][TILE_SUMS]
  float* minus_sums;     // [units][8 * NB]
  uint16_t* rows;        // [rows][stride]
  unsigned char* ring;
  int stride;

  __device__ __forceinline__ void open(unsigned char* shared, const LinearRows& p, int units) {
    inverse = reinterpret_cast<float*>(shared);
    stats = inverse + 16;
    flags = reinterpret_cast<unsigned char*>(stats + 2 * 2 * WARPS);
    sums = reinterpret_cast<float*>(flags + FLAGS);
    minus_sums = sums + GROUPS * WARPS * T * NB * TILE_SUMS;
    stride = units * UNIT_COLS + 8;
    rows = reinterpret_cast<uint16_t*>(minus_sums + units * 8 * NB);
    ring = reinterpret_cast<unsigned char*>(rows + p.rows * stride);
  }
};

template <int EPILOGUE> __device__ __forceinline__ void put(const LinearRows& p, int row, int column, float value) {
  float* target = p.out + (long long)column * p.out_stride + row;
  *target = EPILOGUE == ADD ? __fadd_rn(*target, value) : value;
}
template <int EPILOGUE>
__device__ __forceinline__ void finish_value(const LinearRows& p, const Segment& segment, int tile, int i, int column, float value) {
  const int row = (tile - segment.first_tile) * TILE_ROWS + i;
  if (row < segment.num_rows) put<EPILOGUE>(p, segment.first_row + row, column, value);
}
__device__ __forceinline__ void finish_pair(const LinearRows& p, int pair, int i, int column, float gate, float up) {
  const int row = pair * TILE_ROWS + i;
  if (row < p.out_rows) put<STORE>(p, row, column, __fmul_rn(silu(gate), up));
}
// Place of a value among the partial sums.
__device__ __forceinline__ float* partial_of(const LinearRows& p, int split, int tile, int column, int i) {
  return p.partial + (((long long)split * p.num_tiles + tile) * 16 + column) * 16 + i;
}

template <int NB> __device__ __forceinline__ float sum_of_warps(const float* sums, int t, int column, int i) {
  const float* at = sums + (t * NB + (column >> 3)) * TILE_SUMS + (column & 7) * 20 + i;
  float total = at[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) total = __fadd_rn(total, at[w * most_tiles<NB>() * NB * TILE_SUMS]);
  return total;
}

// Sums of the warps for `tiles` tiles, to where they belong or to the last block of the tile.
template <int EPILOGUE, int NB, int T, class M>
__device__ __forceinline__ void reduce_tiles(const LinearRows& p, const Segment& segment, const Slice& s, const M& m,
                                             const float* sums, int tile, int tiles, float unscale, float& held) {
  const bool pairs = EPILOGUE == GATE_UP && p.rows_in.splits == 1;
  static_assert(TILE_ROWS * 8 * NB <= THREADS, "a value of a tile for each thread");
  const int values = (pairs && T == 2 ? tiles / 2 : tiles) * TILE_ROWS * p.rows;
  for (int o = threadIdx.x % THREADS; o < values; o += THREADS) {
    const int i = o % TILE_ROWS, rest = o / TILE_ROWS, column = rest % p.rows, t = rest / p.rows;
    const float factor = unscale * m.inverse[column];
    if (pairs && T == 1) {   // one value a thread: the gate waits for the tile after it
      const float value = __fmul_rn(sum_of_warps<NB>(sums, 0, column, i), factor);
      if (tile % 2 == 0) held = value;
      else finish_pair(p, tile / 2, i, column, held, value);
      continue;
    }
    if (pairs) {
      finish_pair(p, tile / 2 + t, i, column, __fmul_rn(sum_of_warps<NB>(sums, 2 * t, column, i), factor),
                  __fmul_rn(sum_of_warps<NB>(sums, 2 * t + 1, column, i), factor));
      continue;
    }
    const float value = __fmul_rn(sum_of_warps<NB>(sums, t, column, i), factor);
    if (p.rows_in.splits > 1) *partial_of(p, s.split, tile + t, column, i) = value;
    else finish_value<EPILOGUE>(p, segment, tile + t, i, column, value);
  }
}

// The group's tiles of a segment; the ring has been opened and primed for them.
template <int KIND, int EPILOGUE, int NB, class M>
__device__ __forceinline__ void run_tiles(const LinearRows& p, const Segment& segment, const Slice& s, const M& m,
                                          Ring<NB>& ring, int first_tile, int end_tile, int warp_unit) {
  constexpr int T = tiles_at_once<KIND, NB>(), UNIT = Unit<KIND>::BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % THREADS / 32, group = threadIdx.x / THREADS, g = lane >> 2, q = lane & 3;
  const int wrap = p.rows_in.wrap;
  const uint16_t* row[NB];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) row[nb] = m.rows + min(nb * 8 + g, p.rows - 1) * m.stride + q * 16;
  float* sums = m.sums + group * WARPS * most_tiles<NB>() * NB * TILE_SUMS;
  int slot = 0;
  float held = 0.0f;
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; tile += T) {
    float acc[T][NB][4];
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][nb][i] = 0.0f;
#pragma unroll 1
    for (int unit = 0; unit < ring.count; ++unit) {
      const int u = wrap && warp_unit + unit >= wrap ? warp_unit + unit - wrap : warp_unit + unit;
      uint32_t b[NB][8];
      float minus_sum[NB][2];
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const uint4 low = *reinterpret_cast<const uint4*>(row[nb] + u * UNIT_COLS);
        const uint4 high = *reinterpret_cast<const uint4*>(row[nb] + u * UNIT_COLS + 8);
        b[nb][0] = low.x, b[nb][1] = low.y, b[nb][2] = low.z, b[nb][3] = low.w;
        b[nb][4] = high.x, b[nb][5] = high.y, b[nb][6] = high.z, b[nb][7] = high.w;
        const float2 sum = *reinterpret_cast<const float2*>(m.minus_sums + u * 8 * NB + nb * 8 + 2 * q);
        minus_sum[nb][0] = sum.x, minus_sum[nb][1] = sum.y;
      }
      copy_async_wait<stages<KIND, NB>() - 1>();
      __syncwarp();
      const unsigned char* stage = ring.shared + slot * (T * UNIT);
      // The second tile of an odd end is what the ring last held; its sums are not used.
#pragma unroll
      for (int t = 0; t < T; ++t) multiply_unit<KIND, NB>(stage + t * UNIT, lane, b, minus_sum, acc[t]);
      __syncwarp();
      ring.issue(lane);
      if (++slot == stages<KIND, NB>()) slot = 0;
    }
    group_barrier(group + 1, THREADS);   // the sums before have been read
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        float* target = sums + ((warp * most_tiles<NB>() + t) * NB + nb) * TILE_SUMS + 40 * q + g;
        target[0] = acc[t][nb][0], target[20] = acc[t][nb][1], target[8] = acc[t][nb][2], target[28] = acc[t][nb][3];
      }
    group_barrier(group + 1, THREADS);
    reduce_tiles<EPILOGUE, NB, T, M>(p, segment, s, m, sums, tile, min(T, end_tile - tile), KIND == KIND_F16 ? 1.0f : CODE_UNSCALE, held);
  }
  copy_async_wait<0>();
  __syncwarp();
}

// The last block to finish a tile adds the splits in ascending order.
template <int EPILOGUE, class M>
__device__ __forceinline__ void merge_splits(const LinearRows& p, const Slice& s, const M& m) {
  constexpr int STEP = EPILOGUE == GATE_UP ? 2 : 1;
  const int splits = p.rows_in.splits, first_tile = p.run_tiles[s.first_run], end_tile = p.run_tiles[s.first_run + GROUPS];
  __threadfence();
  __syncthreads();
#pragma unroll 1
  for (int base = first_tile; base < end_tile; base += FLAGS) {
    const int mine = base + threadIdx.x, tiles = min(FLAGS, end_tile - base);
    bool last = false;
    if (threadIdx.x < FLAGS && mine < end_tile && threadIdx.x % STEP == 0) {
      last = atomicAdd(&p.counters[mine], 1) == splits - 1;
      if (last) p.counters[mine] = 0;
    }
    if (threadIdx.x < FLAGS) m.flags[threadIdx.x] = last;
    __syncthreads();
    __threadfence();
    for (int o = threadIdx.x; o < tiles / STEP * TILE_ROWS * p.rows; o += BLOCK) {
      const int i = o % TILE_ROWS, rest = o / TILE_ROWS, column = rest % p.rows, t = rest / p.rows * STEP, tile = base + t;
      if (!m.flags[t]) continue;
      float total[STEP];
#pragma unroll
      for (int e = 0; e < STEP; ++e) {
        total[e] = __ldcg(partial_of(p, 0, tile + e, column, i));
        for (int split = 1; split < splits; ++split) total[e] = __fadd_rn(total[e], __ldcg(partial_of(p, split, tile + e, column, i)));
      }
      int index = 0;
      while (tile >= p.segments[index].first_tile + p.segments[index].num_tiles) ++index;
      if (EPILOGUE == GATE_UP) finish_pair(p, tile / 2, i, column, total[0], total[STEP - 1]);
      else finish_value<EPILOGUE>(p, p.segments[index], tile, i, column, total[0]);
    }
    __syncthreads();
  }
}

// Part of the group's tiles that lies in a segment.
__device__ __forceinline__ bool overlap(const Segment& segment, int begin, int stop, int& first, int& end) {
  first = max(begin, segment.first_tile);
  end = min(stop, segment.first_tile + segment.num_tiles);
  return first < end;
}

// Rows that stage_* converted before: copy the block's columns.
template <int NB, class M> __device__ __forceinline__ void copy_rows(const LinearRows& p, const Slice& s, const M& m) {
  const Rows& in = p.rows_in;
  const int staged = in.wrap ? in.wrap : s.num_units, first = in.wrap ? 0 : s.first_unit, width = staged_units(in);
  const int chunks = staged * 8;
  for (int i = threadIdx.x; i < p.rows * chunks; i += BLOCK) {
    const int row = i / chunks, chunk = i % chunks;
    copy_async_16(m.rows + row * m.stride + chunk * 8, in.halves + ((long long)row * width + first) * UNIT_COLS + chunk * 8);
  }
  copy_async_commit();
  for (int i = threadIdx.x; i < p.rows * staged; i += BLOCK)
    m.minus_sums[i % staged * 8 * NB + i / staged] = in.minus_sums[(long long)(i / staged) * width + first + i % staged];
  for (int row = threadIdx.x; row < p.rows; row += BLOCK) m.inverse[row] = in.inverse[row * in.splits + s.split];
  copy_async_wait<0>();
  __syncthreads();
}

template <int SOURCE, int EPILOGUE, int NB> __device__ __forceinline__ void linear_rows(const LinearRows& p) {
  SHARED_BYTES(shared);
  allow_next();
  const Slice s = block_slice(p);
  Memory<NB> m;
  m.open(shared, p, p.rows_in.wrap ? p.rows_in.wrap : s.num_units);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % THREADS / 32, group = threadIdx.x / THREADS;
  const int warp_unit = s.num_units * warp / WARPS, units = s.num_units * (warp + 1) / WARPS - warp_unit;
  const int begin = p.run_tiles[s.first_run + group], stop = p.run_tiles[s.first_run + group + 1];
  unsigned char* own = m.ring + (threadIdx.x / 32) * ring_bytes<NB>();
  int first, end, index = 0;
  while (index < p.num_segments && !overlap(p.segments[index], begin, stop, first, end)) ++index;
  Ring<NB> ring;
  if (index < p.num_segments) {
    ring.open(own, p, p.segments[index], first, end, s.first_unit + warp_unit, units, lane);
    ring.prime(lane);
  }
  wait_for_earlier();
  if constexpr (SOURCE == HALVES) {
    copy_rows<NB>(p, s, m);
  } else {
    const int staged = p.rows_in.wrap ? p.rows_in.wrap : s.num_units, first_unit = p.rows_in.wrap ? 0 : s.first_unit;
    if (group < p.rows)   // one or two rows: one a group
      stage_row<SOURCE>(p.rows_in, group, first_unit, staged, m.stats + 2 * WARPS * group, m.rows + group * m.stride, m.minus_sums + group,
                        8 * NB, m.inverse + group, group);
    __syncthreads();
  }
#pragma unroll 1
  while (index < p.num_segments) {
    const Segment& segment = p.segments[index];
    if (segment.kind == KIND_Q4) run_tiles<KIND_Q4, EPILOGUE, NB>(p, segment, s, m, ring, first, end, warp_unit);
    else if (segment.kind == KIND_Q8) run_tiles<KIND_Q8, EPILOGUE, NB>(p, segment, s, m, ring, first, end, warp_unit);
    else run_tiles<KIND_F16, EPILOGUE, NB>(p, segment, s, m, ring, first, end, warp_unit);
    if (++index == p.num_segments || !overlap(p.segments[index], begin, stop, first, end)) break;
    ring.open(own, p, p.segments[index], first, end, s.first_unit + warp_unit, units, lane);
    ring.prime(lane);
  }
  if (p.rows_in.splits > 1) merge_splits<EPILOGUE>(p, s, m);
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

// Convert a row's columns of one split once for all blocks. grid (rows, splits)
template <int SOURCE> __device__ __forceinline__ void stage_split(const Rows& p) {
  __shared__ float stats[2 * WARPS];
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x, split = blockIdx.y, width = staged_units(p);
  const int first = p.wrap ? 0 : split_unit(p, split), units = p.wrap ? p.wrap : split_unit(p, split + 1) - first;
  stage_row<SOURCE>(p, row, first, units, stats, p.halves + ((long long)row * width + first) * UNIT_COLS,
                    p.minus_sums + (long long)row * width + first, 1, p.inverse + row * p.splits + split, 0);
}
extern "C" __global__ void __launch_bounds__(THREADS) stage_norm(const __grid_constant__ Rows p) { stage_split<NORMED>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) stage_plain(const __grid_constant__ Rows p) { stage_split<PLAIN>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) stage_gated(const __grid_constant__ Rows p) { stage_split<GATED>(p); }
