// linear_tiles: the prefill GEMM, out = x W^T | added | silu(g) * u, for any number of rows, from the packed weights.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer in prefill
// Shapes:    x fp16 [rows, units * 64] with 1 / scale per row, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x padded with zeros to whole units; as halve_rows writes it: row-major, or in blocks where WARPGROUPS
// Launch:    linear_tiles_*, one a number type: grid (ceil(rows / tokens), blocks of tiles, parallel splits), block (256, narrow on warpgroups
//            128), shared as cuda_linear.tiles_shared_bytes; linear_tiles_merge: grid (rows), block (256)
// Defines:   WARPGROUPS, WIDE_TOKENS, TILE_STAGES    Limits: none on rows
// Numbers:   weights rounded to fp16 once (scale applied), f32 accumulation in the tensor cores, units ascending within a
//            K split, splits added in order: a row's bits depend neither on the other rows nor on the tile width. Bound: tensor cores.
//
// The weights are the A operand (16 rows a tile, already in fragment order), tokens are columns. The splits of a matrix are
// fixed; few rows run them side by side and merge them, many rows one after the other.
#include "quant.cuh"

constexpr int MAX_SEGMENTS = 4;
enum { STORE = 0, ADD = 1, GATE_UP = 2 };

struct LinearTiles {
  const unsigned char* weights;
  const uint16_t* x;
  const float* inverse;      // [rows]
  float* out;
  float* partial;            // [splits, rows, out_rows] where the splits run side by side, else null
  Segment segments[MAX_SEGMENTS];
  int num_segments, rows, units, wrap, x_stride, out_stride, out_rows, splits;
};

__device__ __forceinline__ int split_begin(const LinearTiles& p, int split) { return p.units * split / p.splits; }

// One token's value of a row, or of a pair of rows (gate, up), to where it belongs.
template <int EPILOGUE>
__device__ __forceinline__ void put_value(const LinearTiles& p, const Segment& segment, int tile, int i, int token, float value, float other) {
  float* out = p.out + (long long)token * p.out_stride;
  if constexpr (EPILOGUE == GATE_UP) {
    const int row = tile / 2 * TILE_ROWS + i;
    if (row < p.out_rows) out[row] = __fmul_rn(silu(value), other);
  } else {
    const int row = (tile - segment.first_tile) * TILE_ROWS + i;
    if (row >= segment.num_rows) return;
    if (EPILOGUE == ADD && p.partial) {
      p.partial[((long long)blockIdx.z * p.rows + token) * p.out_rows + segment.first_row + row] = value;
      return;
    }
    float* target = out + segment.first_row + row;
    *target = EPILOGUE == ADD ? __fadd_rn(*target, value) : value;
  }
}

// Splits that ran side by side, in their order.
extern "C" __global__ void __launch_bounds__(256) linear_tiles_merge(const __grid_constant__ LinearTiles p) {
  const int token = blockIdx.x;
  for (int row = threadIdx.x; row < p.out_rows; row += 256) {
    float value = p.out[(long long)token * p.out_stride + row];
    for (int split = 0; split < p.splits; ++split) value = __fadd_rn(value, p.partial[((long long)split * p.rows + token) * p.out_rows + row]);
    p.out[(long long)token * p.out_stride + row] = value;
  }
}

#if WARPGROUPS
#include "tiles_warpgroup.cuh"
#else
#include "tiles_warp.cuh"
#endif

// The segments of one number type; a launch for each type that a row list holds.
template <int KIND, int EPILOGUE, int TOKENS, int SHAPE> __device__ __forceinline__ void linear_tiles(const LinearTiles& p) {
  constexpr int BLOCK_TILES = block_tiles<SHAPE>();
  int block = blockIdx.y;
  allow_next();
  for (int i = 0; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    const int blocks = segment.kind == KIND ? (segment.num_tiles + BLOCK_TILES - 1) / BLOCK_TILES : 0;
    if (block < blocks) {
      const int first = segment.first_tile + block * BLOCK_TILES;
      const int begin = p.partial ? blockIdx.z : 0, end = p.partial ? begin + 1 : p.splits;
#pragma unroll 1
      for (int split = begin; split < end; ++split) {
        multiply_block<KIND, EPILOGUE, TOKENS, SHAPE>(p, segment, first, split);
        __syncthreads();
      }
      break;
    }
    block -= blocks;
  }
  wait_for_earlier();   // another type's launch may still be running; whoever follows waits for this one
}

#define LINEAR_TILES(NAME, KIND, EPILOGUE, TOKENS, SHAPE)                                                                \
  extern "C" __global__ void __launch_bounds__(block_threads<SHAPE>(), blocks_at_once<SHAPE>())                          \
      NAME(const __grid_constant__ LinearTiles p) {                                                                      \
    linear_tiles<KIND, EPILOGUE, TOKENS, SHAPE>(p);                                                                      \
  }
LINEAR_TILES(linear_tiles_plain_wide_f16, KIND_F16, STORE, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_add_wide_f16, KIND_F16, ADD, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_gate_up_wide_f16, KIND_F16, GATE_UP, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_plain_narrow_f16, KIND_F16, STORE, 64, 1)
LINEAR_TILES(linear_tiles_add_narrow_f16, KIND_F16, ADD, 64, 1)
LINEAR_TILES(linear_tiles_gate_up_narrow_f16, KIND_F16, GATE_UP, 64, 1)
LINEAR_TILES(linear_tiles_plain_wide_q8, KIND_Q8, STORE, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_add_wide_q8, KIND_Q8, ADD, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_gate_up_wide_q8, KIND_Q8, GATE_UP, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_plain_narrow_q8, KIND_Q8, STORE, 64, 1)
LINEAR_TILES(linear_tiles_add_narrow_q8, KIND_Q8, ADD, 64, 1)
LINEAR_TILES(linear_tiles_gate_up_narrow_q8, KIND_Q8, GATE_UP, 64, 1)
LINEAR_TILES(linear_tiles_plain_wide_q4, KIND_Q4, STORE, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_add_wide_q4, KIND_Q4, ADD, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_gate_up_wide_q4, KIND_Q4, GATE_UP, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_plain_narrow_q4, KIND_Q4, STORE, 64, 1)
LINEAR_TILES(linear_tiles_add_narrow_q4, KIND_Q4, ADD, 64, 1)
LINEAR_TILES(linear_tiles_gate_up_narrow_q4, KIND_Q4, GATE_UP, 64, 1)
