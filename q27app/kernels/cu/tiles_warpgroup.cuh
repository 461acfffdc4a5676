// linear_tiles by warpgroups: SHAPE of them a block, two tiles a warp, 8 tiles a warpgroup. Weights are decoded into registers
// while the tensor cores multiply the unit before; activations go from shared memory.
//
// x lies in blocks [row / 64][unit][row % 64][64 halves]: 128 bytes a row of a block, the columns in the order of the fragments
// (halve_position), the 16-byte pieces swizzled by row % 8: a block is copied as it lies.
#pragma once
#include "quant.cuh"
#include "warpgroup.cuh"

constexpr int ROW_BLOCK = 64, ROW_BLOCK_BYTES = ROW_BLOCK * UNIT_COLS * 2, ALIGNED = 1024;
template <int SHAPE> __host__ __device__ constexpr int block_tiles() { return 8 * SHAPE; }
template <int SHAPE> __host__ __device__ constexpr int block_threads() { return 128 * SHAPE; }
template <int SHAPE> __host__ __device__ constexpr int blocks_at_once() { return SHAPE == 1 ? 2 : 1; }
template <int KIND> __host__ __device__ constexpr int tile_stages() { return KIND == KIND_Q4 ? TILE_STAGES : KIND == KIND_Q8 ? TILE_STAGES * 3 / 4 : TILE_STAGES / 2; }

template <int KIND, int TOKENS, int SHAPE> struct TilePipe {
  static constexpr int TILES = block_tiles<SHAPE>(), STAGES = tile_stages<KIND>(), BLOCKS = TOKENS / ROW_BLOCK;
  static constexpr int ROWS = TOKENS * UNIT_COLS * 2, WEIGHTS = TILES * Unit<KIND>::BYTES;
  static_assert(TILES + BLOCKS <= 32, "a lane a copy");
  const LinearTiles& p;
  unsigned char* shared;           // arrivals [STAGES], at ALIGNED rows [STAGES][ROWS], then weights [STAGES][WEIGHTS]
  const unsigned char* weights;    // of the block's first tile
  int tile_bytes, last_tile, row_block, row_blocks, begin, units;

  __device__ __forceinline__ uint64_t* arrival(int unit) const { return reinterpret_cast<uint64_t*>(shared) + unit % STAGES; }
  __device__ __forceinline__ unsigned char* rows_of(int unit) const { return shared + ALIGNED + unit % STAGES * ROWS; }
  __device__ __forceinline__ unsigned char* weights_of(int unit) const { return shared + ALIGNED + STAGES * ROWS + unit % STAGES * WEIGHTS; }
  __device__ __forceinline__ void wait(int unit) const { arrival_wait(arrival(unit), unit / STAGES); }

  // One warp: a lane a tile, then a lane a block of rows.
  __device__ __forceinline__ void fetch(int unit) const {
    const int lane = threadIdx.x % 32;
    if (unit >= units) return;
    if (lane == 0) arrival_announce(arrival(unit), ROWS + WEIGHTS);
    __syncwarp();
    if (lane < TILES) {
      copy_whole(weights_of(unit) + lane * Unit<KIND>::BYTES,
                 weights + (long long)min(lane, last_tile) * tile_bytes + (long long)(begin + unit) * Unit<KIND>::BYTES, Unit<KIND>::BYTES,
                 arrival(unit));
    } else if (lane < TILES + BLOCKS) {
      const int column = p.wrap && begin + unit >= p.wrap ? begin + unit - p.wrap : begin + unit, block = lane - TILES;
      const unsigned char* rows = reinterpret_cast<const unsigned char*>(p.x)
                                  + ((long long)min(row_block + block, row_blocks - 1) * (p.x_stride / UNIT_COLS) + column) * ROW_BLOCK_BYTES;
      copy_whole(rows_of(unit) + block * ROW_BLOCK_BYTES, rows, ROW_BLOCK_BYTES, arrival(unit));
    }
  }
};

template <int KIND>
__device__ __forceinline__ void decode_unit(const unsigned char* tiles, int lane, uint32_t (&a)[2][4][4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t steps[2][4];
      decode_half_unit<KIND>(tiles + m * Unit<KIND>::BYTES, lane, half, steps);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][2 * half][i] = steps[0][i], a[m][2 * half + 1][i] = steps[1][i];
    }
}

template <int KIND, int EPILOGUE, int TOKENS, int SHAPE>
__device__ __forceinline__ void multiply_block(const LinearTiles& p, const Segment& segment, int first_tile, int split) {
  SHARED_BYTES(dynamic);
  using Pipe = TilePipe<KIND, TOKENS, SHAPE>;
  constexpr int N = TOKENS / 8, STAGES = Pipe::STAGES;
  const int lane = threadIdx.x % 32, g = lane >> 2, q = lane & 3, warp_tile = threadIdx.x / 32 * 2, token = blockIdx.x * TOKENS;
  unsigned char* shared = dynamic + (ALIGNED - reinterpret_cast<uintptr_t>(dynamic) % ALIGNED) % ALIGNED;
  const int begin = split_begin(p, split);
  const Pipe pipe = {p, shared, p.weights + segment.offset + (long long)(first_tile - segment.first_tile) * segment.tile_bytes,
                     segment.tile_bytes, segment.first_tile + segment.num_tiles - 1 - first_tile, token / ROW_BLOCK,
                     (p.rows + ROW_BLOCK - 1) / ROW_BLOCK, begin, split_begin(p, split + 1) - begin};
  float acc[2][N][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) arrival_init(pipe.arrival(i));
      arrival_publish();
    }
    __syncwarp();
    for (int i = 0; i < STAGES - 1; ++i) pipe.fetch(i);
  }
  __syncthreads();
  uint32_t even[2][4][4], odd[2][4][4];
  pipe.wait(0);
  decode_unit<KIND>(pipe.weights_of(0) + warp_tile * Unit<KIND>::BYTES, lane, even);

  // Unit u multiplies from `now`; the weights of u + 1 go to `next`, whose last reader was unit u - 1.
  const auto turn = [&](int u, uint32_t (&now)[2][4][4], uint32_t (&next)[2][4][4]) {
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int m = 0; m < 2; ++m) warpgroup_mma(acc[m], now[m][step], pipe.rows_of(u), step);
    warpgroup_commit();
    warpgroup_wait<1>();
    if (u + 1 < pipe.units) {
      pipe.wait(u + 1);
      decode_unit<KIND>(pipe.weights_of(u + 1) + warp_tile * Unit<KIND>::BYTES, lane, next);
    }
    __syncthreads();                 // nobody reads unit u - 1 any more
    if (threadIdx.x < 32) pipe.fetch(u + STAGES - 1);
  };
#pragma unroll 1
  for (int u = 0; u < pipe.units; u += 2) {
    turn(u, even, odd);
    if (u + 1 < pipe.units) turn(u + 1, odd, even);
  }
  warpgroup_wait<0>();
  warpgroup_settle(acc[0]);
  warpgroup_settle(acc[1]);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = token + n * 8 + 2 * q + j;
      if (column >= p.rows) continue;
      const float inverse = p.inverse[column];
#pragma unroll
      for (int m = 0; m < 2; m += EPILOGUE == GATE_UP ? 2 : 1)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          put_value<EPILOGUE>(p, segment, first_tile + warp_tile + m, g + 8 * upper, column, __fmul_rn(acc[m][n][2 * upper + j], inverse),
                              EPILOGUE == GATE_UP ? __fmul_rn(acc[1][n][2 * upper + j], inverse) : 0.0f);
    }
}
