// linear_tiles: the prefill GEMM, out = x W^T | added | silu(g) * u, for any number of rows, from the packed weights.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer in prefill
// Shapes:    x fp16 [rows, units * 64] with 1 / scale per row, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x rows contiguous, padded with zeros to whole units
// Launch:    grid (ceil(rows / TOKENS), blocks of 8 tiles), block (256), shared STAGES * (weights + activations)
// Defines:   WIDE_TOKENS, TILE_STAGES    Limits: none on rows
// Numbers:   weights rounded to fp16 once (scale applied), f32 accumulation in the tensor cores, units ascending: a row's
//            bits depend neither on the other rows nor on the tile width. Bound: tensor cores.
//
// The weights are the A operand (16 rows a tile, already in fragment order), 8 tiles a block; tokens are columns.
#include "quant.cuh"

constexpr int THREADS = 256, BLOCK_TILES = 8, MAX_SEGMENTS = 4;
constexpr int ROW_HALVES = UNIT_COLS + 8;
enum { STORE = 0, ADD = 1, GATE_UP = 2 };

struct LinearTiles {
  const unsigned char* weights;
  const uint16_t* x;
  const float* inverse;      // [rows]
  float* out;
  Segment segments[MAX_SEGMENTS];
  int num_segments, rows, units, wrap, x_stride, out_stride, out_rows;
};

template <int KIND> __host__ __device__ constexpr int weight_stage() { return BLOCK_TILES * Unit<KIND>::BYTES; }

template <int KIND, int TOKENS>
__device__ __forceinline__ void fetch(const LinearTiles& p, const unsigned char* weights, int tile_bytes, int last_tile, int token,
                                      int unit, unsigned char* stage) {
  constexpr int CHUNKS = Unit<KIND>::BYTES / 16;
  for (int i = threadIdx.x; i < BLOCK_TILES * CHUNKS; i += THREADS) {
    const int tile = i / CHUNKS, chunk = i % CHUNKS;
    copy_async_16(stage + i * 16, weights + (long long)min(tile, last_tile) * tile_bytes + (long long)unit * Unit<KIND>::BYTES + chunk * 16);
  }
  unsigned char* rows = stage + weight_stage<KIND>();
  const int column = (p.wrap && unit >= p.wrap ? unit - p.wrap : unit) * UNIT_COLS;
#pragma unroll
  for (int i = 0; i < TOKENS * 8 / THREADS; ++i) {
    const int chunk = threadIdx.x + i * THREADS, row = chunk / 8, piece = chunk % 8;
    copy_async_16(rows + row * ROW_HALVES * 2 + piece * 16,
                  p.x + (long long)min(token + row, p.rows - 1) * p.x_stride + column + piece * 8);
  }
}

template <int KIND, int EPILOGUE, int TOKENS, int WARPS_W, int STAGES>
__device__ __forceinline__ void multiply_block(const LinearTiles& p, const Segment& segment, int first_tile) {
  SHARED_BYTES(shared);
  constexpr int WARPS_T = THREADS / 32 / WARPS_W, M = BLOCK_TILES / WARPS_W, N = TOKENS / WARPS_T / 8;
  constexpr int STAGE = weight_stage<KIND>() + TOKENS * ROW_HALVES * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, q = lane & 3;
  const int warp_tile = warp % WARPS_W * M, warp_token = warp / WARPS_W * N * 8, token = blockIdx.x * TOKENS;
  const unsigned char* weights = p.weights + segment.offset + (long long)(first_tile - segment.first_tile) * segment.tile_bytes;
  const int last_tile = segment.first_tile + segment.num_tiles - 1 - first_tile;
  float acc[M][N][4];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < p.units) fetch<KIND, TOKENS>(p, weights, segment.tile_bytes, last_tile, token, i, shared + i * STAGE);
    copy_async_commit();
  }
#pragma unroll 1
  for (int unit = 0; unit < p.units; ++unit) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    const int next = unit + STAGES - 1;
    if (next < p.units) fetch<KIND, TOKENS>(p, weights, segment.tile_bytes, last_tile, token, next, shared + next % STAGES * STAGE);
    copy_async_commit();
    const unsigned char* stage = shared + unit % STAGES * STAGE;
    const uint16_t* rows = reinterpret_cast<const uint16_t*>(stage + weight_stage<KIND>());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b[N];
#pragma unroll
      for (int n = 0; n < N; ++n)
        b[n] = *reinterpret_cast<const uint4*>(rows + (warp_token + n * 8 + g) * ROW_HALVES + q * 16 + half * 8);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        uint32_t a[2][4];
        decode_half_unit<KIND>(stage + (warp_tile + m) * Unit<KIND>::BYTES, lane, half, a);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          mma_f16(acc[m][n], a[0][0], a[0][1], a[0][2], a[0][3], b[n].x, b[n].y);
          mma_f16(acc[m][n], a[1][0], a[1][1], a[1][2], a[1][3], b[n].z, b[n].w);
        }
      }
    }
  }
  copy_async_wait<0>();
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = token + warp_token + n * 8 + 2 * q + j;
      if (column >= p.rows) continue;
      const float inverse = p.inverse[column];
      float* out = p.out + (long long)column * p.out_stride;
#pragma unroll
      for (int m = 0; m < M; m += EPILOGUE == GATE_UP ? 2 : 1)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int tile = first_tile + warp_tile + m, i = g + 8 * upper;
          const float value = __fmul_rn(acc[m][n][2 * upper + j], inverse);
          if (EPILOGUE == GATE_UP) {
            const int row = tile / 2 * TILE_ROWS + i;
            if (row < p.out_rows) out[row] = __fmul_rn(silu(value), __fmul_rn(acc[m + (EPILOGUE == GATE_UP)][n][2 * upper + j], inverse));
          } else {
            const int row = (tile - segment.first_tile) * TILE_ROWS + i;
            if (row < segment.num_rows) {
              float* target = out + segment.first_row + row;
              *target = EPILOGUE == ADD ? __fadd_rn(*target, value) : value;
            }
          }
        }
    }
}

template <int EPILOGUE, int TOKENS, int WARPS_W> __device__ __forceinline__ void linear_tiles(const LinearTiles& p) {
  int block = blockIdx.y;
  for (int i = 0; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    const int blocks = (segment.num_tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    if (block < blocks) {
      const int first = segment.first_tile + block * BLOCK_TILES;
      if (segment.kind == KIND_Q4) multiply_block<KIND_Q4, EPILOGUE, TOKENS, WARPS_W, TILE_STAGES>(p, segment, first);
      else if (segment.kind == KIND_Q8) multiply_block<KIND_Q8, EPILOGUE, TOKENS, WARPS_W, TILE_STAGES>(p, segment, first);
      else multiply_block<KIND_F16, EPILOGUE, TOKENS, WARPS_W, TILE_STAGES>(p, segment, first);
      return;
    }
    block -= blocks;
  }
}

#define LINEAR_TILES(NAME, EPILOGUE, TOKENS, WARPS_W)                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ LinearTiles p) {    \
    linear_tiles<EPILOGUE, TOKENS, WARPS_W>(p);                                                             \
  }
LINEAR_TILES(linear_tiles_plain_wide, STORE, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_add_wide, ADD, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_gate_up_wide, GATE_UP, WIDE_TOKENS, 2)
LINEAR_TILES(linear_tiles_plain_narrow, STORE, 64, 4)
LINEAR_TILES(linear_tiles_add_narrow, ADD, 64, 4)
LINEAR_TILES(linear_tiles_gate_up_narrow, GATE_UP, 64, 4)
