// linear_tiles by warps (mma_f16): a block takes 8 tiles and TOKENS tokens, x row-major, TILES_ASIDE warps side by side on the tiles.
#pragma once
#include "quant.cuh"

constexpr int ROW_HALVES = UNIT_COLS + 8, BLOCK_TILES = 8;
template <int KIND> __host__ __device__ constexpr int weight_stage() { return 8 * Unit<KIND>::BYTES; }

template <int KIND, int TOKENS>
__device__ __forceinline__ void fetch(const LinearTiles& p, const unsigned char* weights, int tile_bytes, int last_tile, int token,
                                      int unit, unsigned char* stage) {
  constexpr int CHUNKS = Unit<KIND>::BYTES / 16, THREADS = 256;
  for (int i = threadIdx.x; i < 8 * CHUNKS; i += THREADS) {
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

template <int KIND, int EPILOGUE, int TOKENS, int TILES_ASIDE>
__device__ __forceinline__ void multiply_block(const LinearTiles& p, const Segment& segment, int first_tile) {
  SHARED_BYTES(shared);
  constexpr int WARPS_W = TILES_ASIDE, WARPS_T = 8 / WARPS_W, M = 8 / WARPS_W, N = TOKENS / WARPS_T / 8, STAGES = TILE_STAGES;
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
        if constexpr (EPILOGUE == GATE_UP) {
          const unsigned char* pair = stage + (warp_tile + m / 2 * 2) * Unit<KIND>::BYTES;
          decode_half_pair<KIND>(pair, pair + Unit<KIND>::BYTES, lane, m % 2, half, a);
        } else {
          decode_half_unit<KIND>(stage + (warp_tile + m) * Unit<KIND>::BYTES, lane, half, a);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
          mma_f16(acc[m][n], a[0][0], a[0][1], a[0][2], a[0][3], b[n].x, b[n].y);
          mma_f16(acc[m][n], a[1][0], a[1][1], a[1][2], a[1][3], b[n].z, b[n].w);
        }
      }
    }
  }
  copy_async_wait<0>();
  put_sums<EPILOGUE, M == 4 ? 2 : 4>(p, segment, first_tile + warp_tile, token + warp_token, 0, acc);
}

// The segments of one number type; a launch for each type that a row list holds. grid (blocks of tokens, blocks of tiles)
template <int KIND, int EPILOGUE, int TOKENS, int TILES_ASIDE> __device__ __forceinline__ void linear_tiles(const LinearTiles& p) {
  int block = blockIdx.y;
  allow_next();
  for (int i = 0; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    const int blocks = segment.kind == KIND ? (segment.num_tiles + BLOCK_TILES - 1) / BLOCK_TILES : 0;
    if (block < blocks) {
      multiply_block<KIND, EPILOGUE, TOKENS, TILES_ASIDE>(p, segment, segment.first_tile + block * BLOCK_TILES);
      break;
    }
    block -= blocks;
  }
  wait_for_earlier();   // another type's launch may still be running; whoever follows waits for this one
}
