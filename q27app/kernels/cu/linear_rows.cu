// linear_rows: out = norm(x) W^T | x W^T added | silu(g) * u, for 1 to 16 rows; the weights are read once.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer, Backend.head
// Shapes:    x [rows, cols] f32, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x rows contiguous and 16-byte aligned; tiles of W one after the other, a unit list each
// Launch:    linear_rows_*: grid (tile groups * splits), block (256), shared as cuda_weights.rows_shared_bytes;
//            stage_*: grid (rows, splits), block (256)
// Defines:   RING_BYTES_8, RING_BYTES_16 (a warp)    Limits: cols % 4 == 0, rows <= 8 NB
// Numbers:   activations scaled per row (and K split) by a power of two, then fp16; exact products; f32 sums in a fixed
//            order: units of a warp ascending, warps ascending, splits ascending. Bound: memory.
//
// A block owns a run of tiles and one K split; its 8 warps share the columns of that split. Each warp streams its units of
// several tiles at a time through a ring of asynchronous copies, already filling while the kernel before still runs. One or
// two rows are normed and converted by every block (staging.cuh); more rows are converted once, by stage_*, before.
#include "quant.cuh"
#include "staging.cuh"

constexpr int MAX_SEGMENTS = 4, FLAGS = 256;
constexpr int TILE_SUMS = 160;   // floats of a tile's sums: [8 columns][16 rows + 4]
enum { STORE = 0, ADD = 1, GATE_UP = 2 };

struct LinearRows {
  const unsigned char* weights;
  const int* block_tiles;      // [groups + 1] first tile of each group
  float* out;
  float* partial;              // [splits, num_tiles, 16, 16], only when splits > 1
  int* counters;               // [num_tiles], zero between launches
  Rows rows_in;
  Segment segments[MAX_SEGMENTS];
  int num_segments, num_tiles, rows, out_stride, out_rows;
};

struct Slice {   // what a block works on
  int first_tile, end_tile, split, first_unit, num_units;
};

__device__ __forceinline__ Slice block_slice(const LinearRows& p) {
  Slice s;
  const int group = blockIdx.x / p.rows_in.splits;
  s.split = blockIdx.x % p.rows_in.splits;
  s.first_tile = p.block_tiles[group];
  s.end_tile = p.block_tiles[group + 1];
  s.first_unit = split_unit(p.rows_in, s.split);
  s.num_units = split_unit(p.rows_in, s.split + 1) - s.first_unit;
  return s;
}

template <int NB> __host__ __device__ constexpr int ring_bytes() { return NB == 1 ? RING_BYTES_8 : RING_BYTES_16; }
// Tiles that share an activation fragment.
template <int KIND, int NB> __host__ __device__ constexpr int tiles_at_once() {
  return NB == 1 && 8 * Unit<KIND>::BYTES <= ring_bytes<NB>() ? 4 : 2;
}

// One warp's stream of stages; stage i is unit i % count of tile set i / count.
template <int KIND, int NB> struct Ring {
  static constexpr int T = tiles_at_once<KIND, NB>(), UNIT = Unit<KIND>::BYTES, STAGE = T * UNIT;
  static constexpr int STAGES = ring_bytes<NB>() / STAGE, TILE_CHUNKS = UNIT / 16, CHUNKS = STAGE / 16;
  static constexpr int PER_LANE = (CHUNKS + 31) / 32;
  static_assert(STAGES >= 1, "the ring must hold a stage");
  unsigned char* shared;
  const unsigned char* source;   // next unit of the first tile of the set
  int offset[PER_LANE];          // of the lane's chunks from there
  int next_set, count, left, tiles, unit, slot;

  __device__ __forceinline__ void open(unsigned char* ring, const LinearRows& p, const Segment& segment, int first_tile,
                                       int end_tile, int first_unit, int units, int lane) {
    shared = ring + lane * 16;
    source = p.weights + segment.offset + (long long)(first_tile - segment.first_tile) * segment.tile_bytes + (long long)first_unit * UNIT;
    tiles = end_tile - first_tile;
    count = units;
    left = (tiles + T - 1) / T * units;
    next_set = T * segment.tile_bytes - units * UNIT;
    unit = slot = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int chunk = lane + 32 * i;
      offset[i] = chunk / TILE_CHUNKS * segment.tile_bytes + chunk % TILE_CHUNKS * 16;
    }
  }
  __device__ __forceinline__ void issue(int lane) {
    if (left > 0) {
      const int chunks = min(tiles, T) * TILE_CHUNKS;
      unsigned char* target = shared + slot * STAGE;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (lane + 32 * i < chunks) copy_async_16(target + i * 512, source + offset[i]);
      source += UNIT;
      if (++unit == count) unit = 0, source += next_set, tiles -= T;
      if (++slot == STAGES) slot = 0;
      --left;
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void prime(int lane) {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) issue(lane);
  }
  // The state that prime() left, without issuing.
  __device__ __forceinline__ void resume() {
    const int issued = min(left, STAGES);
    if (count == 0) return;
    const int sets = issued / count;
    unit = issued % count;
    source += (long long)issued * UNIT + (long long)sets * next_set;
    tiles -= sets * T;
    slot = issued % STAGES;
    left -= issued;
  }
};

template <int NB> struct Memory {   // the block's shared memory
  static constexpr int T = NB == 1 ? 4 : 2;
  float* inverse;        // [16] 1 / scale of each row
  float* stats;          // [2][16][WARPS]
  unsigned char* flags;  // [FLAGS]
  float* sums;           // [WARPS][T][NB][TILE_SUMS]
  float* minus_sums;     // [units][8 * NB]
  uint16_t* rows;        // [rows][stride]
  unsigned char* ring;
  int stride;

  __device__ __forceinline__ void open(unsigned char* shared, const LinearRows& p, int units) {
    inverse = reinterpret_cast<float*>(shared);
    stats = inverse + 16;
    flags = reinterpret_cast<unsigned char*>(stats + 2 * 16 * WARPS);
    sums = reinterpret_cast<float*>(flags + FLAGS);
    minus_sums = sums + WARPS * T * NB * TILE_SUMS;
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

template <int NB> __device__ __forceinline__ float sum_of_warps(const Memory<NB>& m, int t, int column, int i) {
  const float* at = m.sums + (t * NB + (column >> 3)) * TILE_SUMS + (column & 7) * 20 + i;
  float total = at[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) total = __fadd_rn(total, at[w * Memory<NB>::T * NB * TILE_SUMS]);
  return total;
}

// Sums of the warps for `tiles` tiles, to where they belong or to the last block of the tile.
template <int EPILOGUE, int NB>
__device__ __forceinline__ void reduce_tiles(const LinearRows& p, const Segment& segment, const Slice& s, const Memory<NB>& m, int tile,
                                             int tiles, float unscale) {
  const bool pairs = EPILOGUE == GATE_UP && p.rows_in.splits == 1;
  const int values = (pairs ? tiles / 2 : tiles) * TILE_ROWS * p.rows;
  for (int o = threadIdx.x; o < values; o += THREADS) {
    const int i = o % TILE_ROWS, rest = o / TILE_ROWS, column = rest % p.rows, t = rest / p.rows;
    const float factor = unscale * m.inverse[column];
    if (pairs) {
      finish_pair(p, tile / 2 + t, i, column, __fmul_rn(sum_of_warps<NB>(m, 2 * t, column, i), factor),
                  __fmul_rn(sum_of_warps<NB>(m, 2 * t + 1, column, i), factor));
      continue;
    }
    const float value = __fmul_rn(sum_of_warps<NB>(m, t, column, i), factor);
    if (p.rows_in.splits > 1) *partial_of(p, s.split, tile + t, column, i) = value;
    else finish_value<EPILOGUE>(p, segment, tile + t, i, column, value);
  }
}

template <int KIND, int EPILOGUE, int NB>
__device__ __forceinline__ void run_tiles(const LinearRows& p, const Segment& segment, const Slice& s, const Memory<NB>& m,
                                          int first_tile, int end_tile, bool primed) {
  using Stream = Ring<KIND, NB>;
  constexpr int T = Stream::T;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, q = lane & 3;
  const int warp_unit = s.num_units * warp / WARPS, units = s.num_units * (warp + 1) / WARPS - warp_unit;
  Stream ring;
  ring.open(m.ring + warp * ring_bytes<NB>(), p, segment, first_tile, end_tile, s.first_unit + warp_unit, units, lane);
  if (primed) ring.resume();
  else ring.prime(lane);
  int slot = 0;
  const int wrap = p.rows_in.wrap;
  const uint16_t* row[NB];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) row[nb] = m.rows + min(nb * 8 + g, p.rows - 1) * m.stride + q * 16;
  const unsigned char* stages = m.ring + warp * ring_bytes<NB>();
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; tile += T) {
    const int tiles = min(T, end_tile - tile);
    float acc[T][NB][4];
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][nb][i] = 0.0f;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
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
      copy_async_wait<Stream::STAGES - 1>();
      __syncwarp();
      const unsigned char* stage = stages + slot * Stream::STAGE;
      if (tiles == T) {
#pragma unroll
        for (int t = 0; t < T; ++t) multiply_unit<KIND, NB>(stage + t * Stream::UNIT, lane, b, minus_sum, acc[t]);
      } else {
#pragma unroll
        for (int t = 0; t < T - 1; ++t)
          if (t < tiles) multiply_unit<KIND, NB>(stage + t * Stream::UNIT, lane, b, minus_sum, acc[t]);
      }
      __syncwarp();
      ring.issue(lane);
      if (++slot == Stream::STAGES) slot = 0;
    }
    __syncthreads();   // the sums before have been read
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        float* target = m.sums + ((warp * Memory<NB>::T + t) * NB + nb) * TILE_SUMS + 40 * q + g;
        target[0] = acc[t][nb][0], target[20] = acc[t][nb][1], target[8] = acc[t][nb][2], target[28] = acc[t][nb][3];
      }
    __syncthreads();
    reduce_tiles<EPILOGUE, NB>(p, segment, s, m, tile, tiles, KIND == KIND_F16 ? 1.0f : CODE_UNSCALE);
  }
  copy_async_wait<0>();
  __syncwarp();
}

// The last block to finish a tile adds the splits in ascending order.
template <int EPILOGUE, int NB>
__device__ __forceinline__ void merge_splits(const LinearRows& p, const Slice& s, const Memory<NB>& m) {
  constexpr int STEP = EPILOGUE == GATE_UP ? 2 : 1;
  const int splits = p.rows_in.splits;
  __threadfence();
  __syncthreads();
#pragma unroll 1
  for (int base = s.first_tile; base < s.end_tile; base += FLAGS) {
    const int mine = base + threadIdx.x, tiles = min(FLAGS, s.end_tile - base);
    bool last = false;
    if (mine < s.end_tile && threadIdx.x % STEP == 0) {
      last = atomicAdd(&p.counters[mine], 1) == splits - 1;
      if (last) p.counters[mine] = 0;
    }
    m.flags[threadIdx.x] = last;
    __syncthreads();
    __threadfence();
    for (int o = threadIdx.x; o < tiles / STEP * TILE_ROWS * p.rows; o += THREADS) {
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

// Part of the block's tiles that lies in a segment.
__device__ __forceinline__ bool overlap(const Segment& segment, const Slice& s, int& first, int& end) {
  first = max(s.first_tile, segment.first_tile);
  end = min(s.end_tile, segment.first_tile + segment.num_tiles);
  return first < end;
}

// Rows that stage_* converted before: copy the block's columns.
template <int NB> __device__ __forceinline__ void copy_rows(const LinearRows& p, const Slice& s, const Memory<NB>& m) {
  const Rows& in = p.rows_in;
  const int staged = in.wrap ? in.wrap : s.num_units, first = in.wrap ? 0 : s.first_unit, width = staged_units(in);
  const int chunks = staged * 8;
  for (int i = threadIdx.x; i < p.rows * chunks; i += THREADS) {
    const int row = i / chunks, chunk = i % chunks;
    copy_async_16(m.rows + row * m.stride + chunk * 8, in.halves + ((long long)row * width + first) * UNIT_COLS + chunk * 8);
  }
  copy_async_commit();
  for (int i = threadIdx.x; i < p.rows * staged; i += THREADS)
    m.minus_sums[i % staged * 8 * NB + i / staged] = in.minus_sums[(long long)(i / staged) * width + first + i % staged];
  for (int row = threadIdx.x; row < p.rows; row += THREADS) m.inverse[row] = in.inverse[row * in.splits + s.split];
  copy_async_wait<0>();
  __syncthreads();
}

template <int SOURCE, int EPILOGUE, int NB> __device__ __forceinline__ void linear_rows(const LinearRows& p) {
  SHARED_BYTES(shared);
  allow_next();
  const Slice s = block_slice(p);
  Memory<NB> m;
  m.open(shared, p, p.rows_in.wrap ? p.rows_in.wrap : s.num_units);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_unit = s.num_units * warp / WARPS, units = s.num_units * (warp + 1) / WARPS - warp_unit;
  int first, end, start = 0;
  while (start < p.num_segments && !overlap(p.segments[start], s, first, end)) ++start;
  if (start < p.num_segments) {
    const Segment& segment = p.segments[start];
#define PRIME(KIND)                                                                                                       \
  {                                                                                                                       \
    Ring<KIND, NB> ring;                                                                                                  \
    ring.open(m.ring + warp * ring_bytes<NB>(), p, segment, first, end, s.first_unit + warp_unit, units, lane);           \
    ring.prime(lane);                                                                                                     \
  }
    if (segment.kind == KIND_Q4) PRIME(KIND_Q4)
    else if (segment.kind == KIND_Q8) PRIME(KIND_Q8)
    else PRIME(KIND_F16)
#undef PRIME
  }
  wait_for_earlier();
  if constexpr (SOURCE == HALVES) {
    copy_rows<NB>(p, s, m);
  } else {
    const int staged = p.rows_in.wrap ? p.rows_in.wrap : s.num_units, first_unit = p.rows_in.wrap ? 0 : s.first_unit;
    for (int row = 0; row < p.rows; ++row)
      stage_row<SOURCE>(p.rows_in, row, first_unit, staged, m.stats + 16 * row, m.rows + row * m.stride, m.minus_sums + row, 8 * NB, m.inverse + row);
    __syncthreads();
  }
#pragma unroll 1
  for (int i = start; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    if (!overlap(segment, s, first, end)) continue;
    if (segment.kind == KIND_Q4) run_tiles<KIND_Q4, EPILOGUE, NB>(p, segment, s, m, first, end, i == start);
    else if (segment.kind == KIND_Q8) run_tiles<KIND_Q8, EPILOGUE, NB>(p, segment, s, m, first, end, i == start);
    else run_tiles<KIND_F16, EPILOGUE, NB>(p, segment, s, m, first, end, i == start);
  }
  if (p.rows_in.splits > 1) merge_splits<EPILOGUE, NB>(p, s, m);
}

#define LINEAR_ROWS(NAME, SOURCE, EPILOGUE, NB)                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ LinearRows p) {     \
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
  __shared__ float stats[16];
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x, split = blockIdx.y, width = staged_units(p);
  const int first = p.wrap ? 0 : split_unit(p, split), units = p.wrap ? p.wrap : split_unit(p, split + 1) - first;
  stage_row<SOURCE>(p, row, first, units, stats, p.halves + ((long long)row * width + first) * UNIT_COLS,
                    p.minus_sums + (long long)row * width + first, 1, p.inverse + row * p.splits + split);
}
extern "C" __global__ void __launch_bounds__(THREADS) stage_norm(const __grid_constant__ Rows p) { stage_split<NORMED>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) stage_plain(const __grid_constant__ Rows p) { stage_split<PLAIN>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) stage_gated(const __grid_constant__ Rows p) { stage_split<GATED>(p); }
