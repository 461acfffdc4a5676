// linear_tiles: the prefill GEMM, out = x W^T | added | silu(g) * u, for any number of rows, from the packed weights.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer in prefill
// Shapes:    x fp16 [rows, units * 64] with 1 / scale per row, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x padded with zeros to whole units; in blocks, as halve_rows writes it
// Launch:    linear_tiles_STAGE_SHAPE_KIND, one a number type: cuda_linear.TileShape says blocks, threads and shared memory
// Defines:   WARPGROUPS, TILE_SHARED    Limits: none on rows
// Numbers:   weights rounded to fp16 once (scale applied), f32 accumulation in the tensor cores, units ascending within a K
//            split, splits added in order: a row's bits depend neither on the other rows nor on the shape. Bound: tensor cores.
//
// The weights are the A operand (16 rows a tile, already in fragment order), tokens are columns. The splits of a matrix are
// fixed: few rows run them side by side and merge them, many rows one after the other.
#include "quant.cuh"

constexpr int MAX_SEGMENTS = 4;
enum { STORE = 0, ADD = 1, GATE_UP = 2 };
enum { WIDE = 0, MEDIUM = 1, SLIM = 2, FEW = 3 };   // shapes of blocks: cuda_tiles.tile_shapes

// x lies in blocks [row / 64][unit][row % 64][64 halves]: 128 bytes a row of a block, the columns in the order of the fragments
// (put_halves in rows.cu), the 16-byte pieces swizzled by row % 8: a block is copied as it lies.
constexpr int ROW_BLOCK = 64, ROW_BLOCK_BYTES = ROW_BLOCK * UNIT_COLS * 2, BLOCK_SHARED = 1024;   // what a block takes beside its own

struct LinearTiles {
  const unsigned char* weights;
  const uint16_t* x;
  const float* inverse;      // [rows]
  float* out;
  float* partial;            // [splits, rows, out_rows], part_stride floats a split, where splits run side by side, else null
  Segment segments[MAX_SEGMENTS];
  int num_segments, rows, units, wrap, x_stride, out_stride, out_rows, splits, part_stride;
};

__device__ __forceinline__ int split_begin(const LinearTiles& p, int split) { return p.units * split / p.splits; }

// A warp's sums of M tiles from `tile` on and of N groups of 8 tokens from `first_token` on, laid out as mma_f16's -> out. Rows g and
// g + 8 of a tile of gates and ups are the gate and the up of one row (decode_half_pair).
// Scales, and what is added to, are read for AT_ONCE groups before any of them is stored: else every sum would wait for memory.
template <int EPILOGUE, int AT_ONCE, int M, int N>
__device__ __forceinline__ void put_sums(const LinearTiles& p, const Segment& segment, int tile, int first_token, int split, float (&acc)[M][N][4]) {
  constexpr bool PAIRED = EPILOGUE == GATE_UP;
  constexpr int STEP = PAIRED ? 8 : 16, ROWS = PAIRED ? 1 : 2;   // rows of out from a tile to the next, and of this thread in a tile
  const int lane = threadIdx.x % 32, g = lane >> 2, q = lane & 3;
  const int row = (PAIRED ? tile : tile - segment.first_tile) * STEP + g;
  const int end = PAIRED ? min(p.out_rows, (segment.first_tile + segment.num_tiles) * STEP) : segment.num_rows;
  const bool is_part = EPILOGUE == ADD && p.partial;
  const int stride = is_part ? p.out_rows : p.out_stride;
  float* out = (is_part ? p.partial + (long long)split * p.part_stride : p.out) + (PAIRED ? 0 : segment.first_row) + row;
  static_assert(N % AT_ONCE == 0, "whole groups");
#pragma unroll
  for (int first = 0; first < N; first += AT_ONCE) {
    float inverse[AT_ONCE][2], old[AT_ONCE][2][M][2];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = first_token + (first + n) * 8 + 2 * q + j;
        inverse[n][j] = token < p.rows ? p.inverse[token] : 0.0f;
        if constexpr (EPILOGUE == ADD)
#pragma unroll
          for (int m = 0; m < M; ++m)
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
              const int i = 16 * m + 8 * upper;
              old[n][j][m][upper] = !is_part && token < p.rows && row + i < end ? out[(long long)token * stride + i] : 0.0f;
            }
      }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = first_token + (first + n) * 8 + 2 * q + j;
        if (token >= p.rows) continue;
        float* target = out + (long long)token * stride;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int upper = 0; upper < ROWS; ++upper) {
            const int i = STEP * m + 8 * upper;
            float value = __fmul_rn(acc[m][first + n][2 * upper + j], inverse[n][j]);
            if constexpr (PAIRED) value = __fmul_rn(silu(value), __fmul_rn(acc[m][first + n][2 + j], inverse[n][j]));
            if (EPILOGUE == ADD && !is_part) value = __fadd_rn(old[n][j][m][upper], value);
            if (row + i < end) target[i] = value;
          }
      }
  }
}

// Splits that ran side by side, in their order. grid (rows)
extern "C" __global__ void __launch_bounds__(256) linear_tiles_merge(const __grid_constant__ LinearTiles p) {
  const int token = blockIdx.x;
  float* out = p.out + (long long)token * p.out_stride;
  const float* part = p.partial + (long long)token * p.out_rows;
#pragma unroll 4
  for (int row = threadIdx.x; row < p.out_rows; row += 256) {
    float value = out[row];
    for (int split = 0; split < p.splits; ++split) value = __fadd_rn(value, part[(long long)split * p.part_stride + row]);
    out[row] = value;
  }
}

#if WARPGROUPS
#include "tiles_warpgroup.cuh"
#else
#include "tiles_warp.cuh"
#endif

#define LINEAR_TILES(NAME, KIND, EPILOGUE, SHAPE)                                                                        \
  extern "C" __global__ void __launch_bounds__(Shape<SHAPE>::THREADS, Shape<SHAPE>::BLOCKS_AT_ONCE)                      \
      NAME(const __grid_constant__ LinearTiles p) {                                                                      \
    linear_tiles<KIND, EPILOGUE, SHAPE>(p);                                                                              \
  }
LINEAR_TILES(linear_tiles_plain_wide_f16, KIND_F16, STORE, WIDE)
LINEAR_TILES(linear_tiles_plain_medium_f16, KIND_F16, STORE, MEDIUM)
LINEAR_TILES(linear_tiles_plain_slim_f16, KIND_F16, STORE, SLIM)
LINEAR_TILES(linear_tiles_plain_few_f16, KIND_F16, STORE, FEW)
LINEAR_TILES(linear_tiles_add_wide_f16, KIND_F16, ADD, WIDE)
LINEAR_TILES(linear_tiles_add_medium_f16, KIND_F16, ADD, MEDIUM)
LINEAR_TILES(linear_tiles_add_slim_f16, KIND_F16, ADD, SLIM)
LINEAR_TILES(linear_tiles_add_few_f16, KIND_F16, ADD, FEW)
LINEAR_TILES(linear_tiles_gate_up_wide_f16, KIND_F16, GATE_UP, WIDE)
LINEAR_TILES(linear_tiles_gate_up_medium_f16, KIND_F16, GATE_UP, MEDIUM)
LINEAR_TILES(linear_tiles_gate_up_slim_f16, KIND_F16, GATE_UP, SLIM)
LINEAR_TILES(linear_tiles_gate_up_few_f16, KIND_F16, GATE_UP, FEW)
LINEAR_TILES(linear_tiles_plain_wide_q8, KIND_Q8, STORE, WIDE)
LINEAR_TILES(linear_tiles_plain_medium_q8, KIND_Q8, STORE, MEDIUM)
LINEAR_TILES(linear_tiles_plain_slim_q8, KIND_Q8, STORE, SLIM)
LINEAR_TILES(linear_tiles_plain_few_q8, KIND_Q8, STORE, FEW)
LINEAR_TILES(linear_tiles_add_wide_q8, KIND_Q8, ADD, WIDE)
LINEAR_TILES(linear_tiles_add_medium_q8, KIND_Q8, ADD, MEDIUM)
LINEAR_TILES(linear_tiles_add_slim_q8, KIND_Q8, ADD, SLIM)
LINEAR_TILES(linear_tiles_add_few_q8, KIND_Q8, ADD, FEW)
LINEAR_TILES(linear_tiles_gate_up_wide_q8, KIND_Q8, GATE_UP, WIDE)
LINEAR_TILES(linear_tiles_gate_up_medium_q8, KIND_Q8, GATE_UP, MEDIUM)
LINEAR_TILES(linear_tiles_gate_up_slim_q8, KIND_Q8, GATE_UP, SLIM)
LINEAR_TILES(linear_tiles_gate_up_few_q8, KIND_Q8, GATE_UP, FEW)
LINEAR_TILES(linear_tiles_plain_wide_q4, KIND_Q4, STORE, WIDE)
LINEAR_TILES(linear_tiles_plain_medium_q4, KIND_Q4, STORE, MEDIUM)
LINEAR_TILES(linear_tiles_plain_slim_q4, KIND_Q4, STORE, SLIM)
LINEAR_TILES(linear_tiles_plain_few_q4, KIND_Q4, STORE, FEW)
LINEAR_TILES(linear_tiles_add_wide_q4, KIND_Q4, ADD, WIDE)
LINEAR_TILES(linear_tiles_add_medium_q4, KIND_Q4, ADD, MEDIUM)
LINEAR_TILES(linear_tiles_add_slim_q4, KIND_Q4, ADD, SLIM)
LINEAR_TILES(linear_tiles_add_few_q4, KIND_Q4, ADD, FEW)
LINEAR_TILES(linear_tiles_gate_up_wide_q4, KIND_Q4, GATE_UP, WIDE)
LINEAR_TILES(linear_tiles_gate_up_medium_q4, KIND_Q4, GATE_UP, MEDIUM)
LINEAR_TILES(linear_tiles_gate_up_slim_q4, KIND_Q4, GATE_UP, SLIM)
LINEAR_TILES(linear_tiles_gate_up_few_q4, KIND_Q4, GATE_UP, FEW)
