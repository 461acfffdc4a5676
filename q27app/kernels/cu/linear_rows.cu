// linear_rows: out = norm(x) W^T | x W^T added | silu(g) * u, for 1 to 16 rows; the weights are read once.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer, Backend.head
// Shapes:    x [rows, cols] f32, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x rows contiguous and 16-byte aligned; tiles of W one after the other, a unit list each
// Launch:    grid (tile groups * splits), block (256), dynamic shared memory computed by cuda_ops.rows_shared_bytes
// Defines:   RING_BYTES_8, RING_BYTES_16 (a warp), SUM_BUFFERS (up to 8 rows)    Limits: cols % 4 == 0, rows <= 8 NB
// Numbers:   activations scaled per row (and K split) by a power of two, then fp16; exact products; f32 sums in a fixed
//            order: units of a warp ascending, warps ascending, splits ascending. Bound: memory.
//
// A block owns a run of tiles and one K split; its 8 warps share the columns of that split. Each warp streams its units of
// two tiles at a time through a ring of asynchronous copies, already filling while the kernel before is still running.
#include "quant.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_SEGMENTS = 4, FLAGS = 256;
enum { STORE = 0, ADD = 1, GATE_UP = 2 };

struct LinearRows {
  const unsigned char* weights;
  const int* block_tiles;      // [groups + 1] first tile of each group
  const float* x;
  const float* norm;           // [cols] or null
  const int* row_map;          // row of x for each row, or null
  float* out;
  float* partial;              // [splits, num_tiles, NB * 128], only when splits > 1
  int* counters;               // [num_tiles], zero between launches
  Segment segments[MAX_SEGMENTS];
  int num_segments, num_tiles, rows, cols, units, wrap, splits, x_stride, out_stride, out_rows;
  float eps;
};

struct Slice {   // what a block works on
  int first_tile, end_tile, split, first_unit, num_units;
};

__device__ __forceinline__ Slice block_slice(const LinearRows& p) {
  Slice s;
  const int group = blockIdx.x / p.splits;
  s.split = blockIdx.x % p.splits;
  s.first_tile = p.block_tiles[group];
  s.end_tile = p.block_tiles[group + 1];
  s.first_unit = (int)((long long)p.units * s.split / p.splits);
  s.num_units = (int)((long long)p.units * (s.split + 1) / p.splits) - s.first_unit;
  return s;
}

// One warp's stream of stages; stage i is unit i % count of tile pair i / count.
template <int NB> __host__ __device__ constexpr int ring_bytes() { return NB == 1 ? RING_BYTES_8 : RING_BYTES_16; }
template <int NB> __host__ __device__ constexpr int sum_buffers() { return NB == 1 ? SUM_BUFFERS : 1; }

template <int KIND, int NB> struct Ring {
  static constexpr int STAGE = 2 * Unit<KIND>::BYTES, STAGES = ring_bytes<NB>() / STAGE;
  static constexpr int CHUNKS = STAGE / 16, HALF = CHUNKS / 2, PER_LANE = (CHUNKS + 31) / 32;
  static_assert(STAGES >= 1, "the ring must hold a stage");
  unsigned char* shared;
  const unsigned char* base;   // unit 0 of the warp in the first tile
  int tile_bytes, count, total, num_tiles, issued, pair, unit, slot;

  __device__ __forceinline__ void open(unsigned char* ring, const LinearRows& p, const Segment& segment, int first_tile,
                                       int end_tile, int first_unit, int units) {
    shared = ring;
    tile_bytes = segment.tile_bytes;
    base = p.weights + segment.offset + (long long)(first_tile - segment.first_tile) * tile_bytes +
           (long long)first_unit * Unit<KIND>::BYTES;
    num_tiles = end_tile - first_tile;
    count = units;
    total = (num_tiles + 1) / 2 * units;
    issued = pair = unit = slot = 0;
  }
  __device__ __forceinline__ void issue(int lane) {
    if (issued < total) {
      const unsigned char* source = base + (long long)(2 * pair) * tile_bytes + (long long)unit * Unit<KIND>::BYTES;
      const int second = 2 * pair + 1 < num_tiles ? tile_bytes : 0;
      unsigned char* target = shared + slot * STAGE;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int chunk = lane + 32 * i;
        if (CHUNKS % 32 == 0 || chunk < CHUNKS)
          copy_async_16(target + chunk * 16, source + (chunk < HALF ? chunk * 16 : second + (chunk - HALF) * 16));
      }
      if (++unit == count) unit = 0, ++pair;
      if (++slot == STAGES) slot = 0;
      ++issued;
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void prime(int lane) {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) issue(lane);
  }
  // The state that prime() left, without issuing.
  __device__ __forceinline__ void resume() {
    issued = total < STAGES ? total : STAGES;
    pair = count ? issued / count : 0;
    unit = count ? issued % count : 0;
    slot = issued % STAGES;
  }
};

template <int NB> struct Memory {   // the block's shared memory
  float* inverse;        // [16] 1 / scale of each row
  float* stats;          // [2][16][WARPS]
  unsigned char* flags;  // [FLAGS]
  float* sums;           // [sum_buffers][WARPS][2][NB * 128]
  float* minus_sums;     // [units][8 * NB]
  uint16_t* rows;        // [rows][stride]
  unsigned char* ring;
  int stride;

  __device__ __forceinline__ void open(unsigned char* shared, const LinearRows& p, int units) {
    inverse = reinterpret_cast<float*>(shared);
    stats = inverse + 16;
    flags = reinterpret_cast<unsigned char*>(stats + 2 * 16 * WARPS);
    sums = reinterpret_cast<float*>(flags + FLAGS);
    minus_sums = sums + sum_buffers<NB>() * WARPS * 2 * NB * 128;
    stride = units * UNIT_COLS + 8;
    rows = reinterpret_cast<uint16_t*>(minus_sums + units * 8 * NB);
    ring = reinterpret_cast<unsigned char*>(rows + p.rows * stride);
  }
};

__device__ __forceinline__ const float4* row_pointer(const LinearRows& p, int row) {
  const int source = p.row_map ? p.row_map[row] : row;
  return reinterpret_cast<const float4*>(p.x + (long long)source * p.x_stride);
}

// Stage the block's columns of every row: (norm,) power-of-two scale, fp16, and the sums that the packed codes need.
template <bool NORM, int NB> __device__ __forceinline__ void stage_rows(const LinearRows& p, const Slice& s, Memory<NB>& m) {
  constexpr int BATCH = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int staged = p.wrap ? p.wrap : s.num_units, first = p.wrap ? 0 : s.first_unit;
  const int begin = NORM ? 0 : first * (UNIT_COLS / 4), cols4 = p.cols / 4;
  const int end = NORM ? cols4 : min(cols4, (first + staged) * (UNIT_COLS / 4));
  const float4* norm4 = reinterpret_cast<const float4*>(p.norm);
#pragma unroll 1
  for (int r0 = 0; r0 < p.rows; r0 += BATCH) {
    float squares[BATCH] = {0, 0, 0, 0}, largest[BATCH] = {0, 0, 0, 0};
    const float4* x4[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) x4[j] = row_pointer(p, min(r0 + j, p.rows - 1));
#pragma unroll 2
    for (int k = begin + threadIdx.x; k < end; k += THREADS) {
      const float4 w = NORM ? norm4[k] : make_float4(1, 1, 1, 1);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        if (j > 0 && r0 + j >= p.rows) continue;
        const float4 v = x4[j][k];
        if (NORM) squares[j] = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares[j]))));
        largest[j] = fmaxf(largest[j], fmaxf(fmaxf(fabsf(__fmul_rn(v.x, w.x)), fabsf(__fmul_rn(v.y, w.y))),
                                             fmaxf(fabsf(__fmul_rn(v.z, w.z)), fabsf(__fmul_rn(v.w, w.w)))));
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const float sum = NORM ? warp_sum(squares[j]) : 0.0f, top = warp_max(largest[j]);
      if (lane == 0 && r0 + j < p.rows) {
        m.stats[(r0 + j) * WARPS + warp] = sum;
        m.stats[(16 + r0 + j) * WARPS + warp] = top;
      }
    }
  }
  __syncthreads();
  const int half_warp = threadIdx.x / 16, part = threadIdx.x % 16;
#pragma unroll 1
  for (int r = 0; r < p.rows; ++r) {
    float sum = 0.0f, top = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      sum = __fadd_rn(sum, m.stats[r * WARPS + w]);
      top = fmaxf(top, m.stats[(16 + r) * WARPS + w]);
    }
    const float rms = NORM ? rsqrtf(sum / (float)p.cols + p.eps) : 1.0f;
    const float scale = half_range_scale(__fmul_rn(top, rms));
    const float factor = __fmul_rn(rms, scale);
    if (threadIdx.x == 0) m.inverse[r] = power_inverse(scale);
    const float4* x4 = row_pointer(p, r);
#pragma unroll 2
    for (int u0 = 0; u0 < staged; u0 += THREADS / 16) {
      const int u = u0 + half_warp, k = (first + u) * (UNIT_COLS / 4) + part;
      float4 v = make_float4(0, 0, 0, 0);
      if (u < staged && k < cols4) {
        v = x4[k];
        if (NORM) {
          const float4 w = norm4[k];
          v.x = __fmul_rn(v.x, w.x), v.y = __fmul_rn(v.y, w.y), v.z = __fmul_rn(v.z, w.z), v.w = __fmul_rn(v.w, w.w);
        }
      }
      const uint32_t low = half2_from_floats(__fmul_rn(v.x, factor), __fmul_rn(v.y, factor));
      const uint32_t high = half2_from_floats(__fmul_rn(v.z, factor), __fmul_rn(v.w, factor));
      float total = __fadd_rn(__fadd_rn(half_to_float((uint16_t)low), half_to_float((uint16_t)(low >> 16))),
                              __fadd_rn(half_to_float((uint16_t)high), half_to_float((uint16_t)(high >> 16))));
#pragma unroll
      for (int distance = 8; distance > 0; distance >>= 1)
        total = __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, distance));
      if (u >= staged) continue;
      *reinterpret_cast<uint2*>(m.rows + r * m.stride + u * UNIT_COLS + part * 4) = make_uint2(low, high);
      if (part == 0) m.minus_sums[u * 8 * NB + r] = -CODE_SCALE * total;
    }
  }
  __syncthreads();
}

// Put one output value where it belongs, or leave it to the last block of its tile.
template <int EPILOGUE> __device__ __forceinline__ void put(const LinearRows& p, int row, int column, float value) {
  float* target = p.out + (long long)column * p.out_stride + row;
  *target = EPILOGUE == ADD ? __fadd_rn(*target, value) : value;
}

template <int EPILOGUE>
__device__ __forceinline__ void finish_value(const LinearRows& p, const Segment& segment, int tile, int r, float value) {
  const int column = (r >> 7) * 8 + (r & 7), row = (tile - segment.first_tile) * TILE_ROWS + ((r & 127) >> 3);
  if (column < p.rows && row < segment.num_rows) put<EPILOGUE>(p, segment.first_row + row, column, value);
}
__device__ __forceinline__ void finish_pair(const LinearRows& p, int pair, int r, float gate, float up) {
  const int column = (r >> 7) * 8 + (r & 7), row = pair * TILE_ROWS + ((r & 127) >> 3);
  if (column < p.rows && row < p.out_rows) put<STORE>(p, row, column, __fmul_rn(silu(gate), up));
}

template <int NB> __device__ __forceinline__ float sum_of_warps(const float* sums, int t, int r) {
  float total = sums[t * NB * 128 + r];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) total = __fadd_rn(total, sums[(w * 2 + t) * NB * 128 + r]);
  return total;
}

template <int EPILOGUE, int NB>
__device__ __forceinline__ void reduce_tiles(const LinearRows& p, const Segment& segment, const Slice& s, const Memory<NB>& m,
                                             const float* sums, int tile, int end_tile, float unscale) {
  constexpr int VALUES = NB * 128;
  if (EPILOGUE == GATE_UP && p.splits == 1) {
    for (int r = threadIdx.x; r < VALUES; r += THREADS) {
      const float factor = unscale * m.inverse[(r >> 7) * 8 + (r & 7)];
      finish_pair(p, tile / 2, r, __fmul_rn(sum_of_warps<NB>(sums, 0, r), factor), __fmul_rn(sum_of_warps<NB>(sums, 1, r), factor));
    }
    return;
  }
  for (int o = threadIdx.x; o < 2 * VALUES; o += THREADS) {
    const int t = o / VALUES, r = o % VALUES;
    if (tile + t >= end_tile) continue;
    const float value = __fmul_rn(sum_of_warps<NB>(sums, t, r), unscale * m.inverse[(r >> 7) * 8 + (r & 7)]);
    if (p.splits > 1)
      p.partial[((long long)s.split * p.num_tiles + tile + t) * VALUES + r] = value;
    else
      finish_value<EPILOGUE>(p, segment, tile + t, r, value);
  }
}

template <int KIND, int EPILOGUE, int NB>
__device__ __forceinline__ void run_tiles(const LinearRows& p, const Segment& segment, const Slice& s, const Memory<NB>& m,
                                          int first_tile, int end_tile, bool primed, int& buffer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, q = lane & 3;
  const int warp_unit = s.num_units * warp / WARPS, units = s.num_units * (warp + 1) / WARPS - warp_unit;
  Ring<KIND, NB> ring;
  ring.open(m.ring + warp * ring_bytes<NB>(), p, segment, first_tile, end_tile, s.first_unit + warp_unit, units);
  if (primed) ring.resume();
  else ring.prime(lane);
  int slot = 0;
  const uint16_t* row[NB];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) row[nb] = m.rows + min(nb * 8 + g, p.rows - 1) * m.stride + q * 16;
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; tile += 2) {
    float acc[2][NB][4];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][nb][i] = 0.0f;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      const int u = warp_unit + unit >= p.wrap && p.wrap ? warp_unit + unit - p.wrap : warp_unit + unit;
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
      copy_async_wait<Ring<KIND, NB>::STAGES - 1>();
      __syncwarp();
      const unsigned char* stage = ring.shared + slot * Ring<KIND, NB>::STAGE;
      multiply_unit<KIND, NB>(stage, lane, b, minus_sum, acc[0]);
      multiply_unit<KIND, NB>(stage + Unit<KIND>::BYTES, lane, b, minus_sum, acc[1]);
      __syncwarp();
      ring.issue(lane);
      if (++slot == Ring<KIND, NB>::STAGES) slot = 0;
    }
    float* sums = m.sums + buffer * WARPS * 2 * NB * 128;
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        float* target = sums + ((warp * 2 + t) * NB + nb) * 128 + 2 * q;
        *reinterpret_cast<float2*>(target + g * 8) = make_float2(acc[t][nb][0], acc[t][nb][1]);
        *reinterpret_cast<float2*>(target + (g + 8) * 8) = make_float2(acc[t][nb][2], acc[t][nb][3]);
      }
    __syncthreads();
    reduce_tiles<EPILOGUE, NB>(p, segment, s, m, sums, tile, end_tile, KIND == KIND_F16 ? 1.0f : CODE_UNSCALE);
    if (sum_buffers<NB>() == 1) __syncthreads();
    else buffer ^= 1;
  }
  copy_async_wait<0>();
  __syncwarp();
}

template <int EPILOGUE, int NB> __device__ __forceinline__ void merge_splits(const LinearRows& p, const Slice& s, const Memory<NB>& m);

// Part of the block's tiles that lies in a segment.
__device__ __forceinline__ bool overlap(const Segment& segment, const Slice& s, int& first, int& end) {
  first = max(s.first_tile, segment.first_tile);
  end = min(s.end_tile, segment.first_tile + segment.num_tiles);
  return first < end;
}

template <bool NORM, int EPILOGUE, int NB> __device__ __forceinline__ void linear_rows(const LinearRows& p) {
  SHARED_BYTES(shared);
  allow_next();
  const Slice s = block_slice(p);
  Memory<NB> m;
  m.open(shared, p, p.wrap ? p.wrap : s.num_units);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_unit = s.num_units * warp / WARPS, units = s.num_units * (warp + 1) / WARPS - warp_unit;
  int first, end, start = 0;
  while (start < p.num_segments && !overlap(p.segments[start], s, first, end)) ++start;
  if (start < p.num_segments) {
    const Segment& segment = p.segments[start];
#define PRIME(KIND)                                                                                                  \
  {                                                                                                                  \
    Ring<KIND, NB> ring;                                                                                                 \
    ring.open(m.ring + warp * ring_bytes<NB>(), p, segment, first, end, s.first_unit + warp_unit, units);                  \
    ring.prime(lane);                                                                                                \
  }
    if (segment.kind == KIND_Q4) PRIME(KIND_Q4)
    else if (segment.kind == KIND_Q8) PRIME(KIND_Q8)
    else PRIME(KIND_F16)
#undef PRIME
  }
  wait_for_earlier();
  stage_rows<NORM, NB>(p, s, m);
  int buffer = 0;
#pragma unroll 1
  for (int i = start; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    if (!overlap(segment, s, first, end)) continue;
    if (segment.kind == KIND_Q4) run_tiles<KIND_Q4, EPILOGUE, NB>(p, segment, s, m, first, end, i == start, buffer);
    else if (segment.kind == KIND_Q8) run_tiles<KIND_Q8, EPILOGUE, NB>(p, segment, s, m, first, end, i == start, buffer);
    else run_tiles<KIND_F16, EPILOGUE, NB>(p, segment, s, m, first, end, i == start, buffer);
  }
  if (p.splits > 1) merge_splits<EPILOGUE, NB>(p, s, m);
}

// The last block to finish a tile adds the splits in ascending order.
template <int EPILOGUE, int NB>
__device__ __forceinline__ void merge_splits(const LinearRows& p, const Slice& s, const Memory<NB>& m) {
  constexpr int VALUES = NB * 128, STEP = EPILOGUE == GATE_UP ? 2 : 1;
  __threadfence();
  __syncthreads();
#pragma unroll 1
  for (int base = s.first_tile; base < s.end_tile; base += FLAGS) {
    const int mine = base + threadIdx.x;
    bool last = false;
    if (threadIdx.x < FLAGS && mine < s.end_tile && (mine - base) % STEP == 0) {
      last = atomicAdd(&p.counters[mine], 1) == p.splits - 1;
      if (last) p.counters[mine] = 0;
    }
    m.flags[threadIdx.x] = last;
    __syncthreads();
    __threadfence();
    for (int tile = base; tile < min(base + FLAGS, s.end_tile); tile += STEP) {
      if (!m.flags[tile - base]) continue;
      int index = 0;
      while (tile >= p.segments[index].first_tile + p.segments[index].num_tiles) ++index;
      for (int r = threadIdx.x; r < VALUES; r += THREADS) {
        float total[STEP];
#pragma unroll
        for (int t = 0; t < STEP; ++t) {
          total[t] = __ldcg(p.partial + (long long)(tile + t) * VALUES + r);
          for (int split = 1; split < p.splits; ++split)
            total[t] = __fadd_rn(total[t], __ldcg(p.partial + ((long long)split * p.num_tiles + tile + t) * VALUES + r));
        }
        if (EPILOGUE == GATE_UP) finish_pair(p, tile / 2, r, total[0], total[STEP - 1]);
        else finish_value<EPILOGUE>(p, p.segments[index], tile, r, total[0]);
      }
    }
    __syncthreads();
  }
}

#define LINEAR_ROWS(NAME, NORM, EPILOGUE, NB)                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ LinearRows p) {        \
    linear_rows<NORM, EPILOGUE, NB>(p);                                                                     \
  }
LINEAR_ROWS(linear_rows_project_8, true, STORE, 1)
LINEAR_ROWS(linear_rows_project_16, true, STORE, 2)
LINEAR_ROWS(linear_rows_plain_8, false, STORE, 1)
LINEAR_ROWS(linear_rows_plain_16, false, STORE, 2)
LINEAR_ROWS(linear_rows_add_8, false, ADD, 1)
LINEAR_ROWS(linear_rows_add_16, false, ADD, 2)
LINEAR_ROWS(linear_rows_gate_up_8, true, GATE_UP, 1)
LINEAR_ROWS(linear_rows_gate_up_16, true, GATE_UP, 2)
