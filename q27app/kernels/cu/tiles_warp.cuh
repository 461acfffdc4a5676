// linear_tiles by warps (mma_f16): a block takes TILES tiles and TOKENS tokens, a warp M tiles and N groups of 8 tokens. Units come
// through a ring; a warp decodes its tiles in registers, activations come by ldmatrix. What the next step multiplies is taken
// from shared memory while this one's is multiplied, over the border of two units too.
#pragma once
#include "quant.cuh"

template <int SHAPE> struct Shape {
  static constexpr int TILES = SHAPE == WIDE ? 16 : SHAPE == FEW ? 4 : 8, TOKENS = SHAPE == WIDE || SHAPE == MEDIUM ? 128 : 64;
  static constexpr int WARPS = SHAPE == WIDE ? 8 : 4, THREADS = 32 * WARPS, BLOCKS_AT_ONCE = SHAPE == WIDE ? 1 : SHAPE == FEW ? 3 : 2;
  static constexpr int ASIDE = SHAPE == WIDE ? 4 : 2;   // warps side by side on the tiles
  static constexpr int M = TILES / ASIDE, N = TOKENS / (WARPS / ASIDE) / 8;
};

template <int KIND, class S> struct Ring {
  static constexpr int ROWS = S::TOKENS * UNIT_COLS * 2, WEIGHTS = S::TILES * Unit<KIND>::BYTES, STAGE = ROWS + WEIGHTS, MAX_STAGES = 4;
  static constexpr int FITTING = (TILE_SHARED / S::BLOCKS_AT_ONCE - BLOCK_SHARED) / STAGE;
  static constexpr int STAGES = FITTING < 2 ? 2 : FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
};

// What a thread copies of every unit: pieces of 16 bytes, THREADS apart.
template <int KIND, class S> struct Copier {
  using R = Ring<KIND, S>;
  static constexpr int PIECES = Unit<KIND>::BYTES / 16, ROUNDS = (S::TILES * PIECES + S::THREADS - 1) / S::THREADS;
  static constexpr int BLOCKS = S::TOKENS / ROW_BLOCK, BLOCK_ROUNDS = ROW_BLOCK_BYTES / 16 / S::THREADS;
  static_assert(ROW_BLOCK_BYTES / 16 % S::THREADS == 0, "whole rounds");
  const unsigned char* weights;
  const unsigned char* rows;
  uint32_t tile_at[ROUNDS], block_at[BLOCKS];

  __device__ __forceinline__ Copier(const LinearTiles& p, const Segment& segment, int first_tile, int token) {
    weights = p.weights + segment.offset + (long long)(first_tile - segment.first_tile) * segment.tile_bytes;
    rows = reinterpret_cast<const unsigned char*>(p.x) + threadIdx.x * 16;
    const int last_tile = segment.first_tile + segment.num_tiles - 1 - first_tile, last_block = (p.rows - 1) / ROW_BLOCK;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int at = threadIdx.x + i * S::THREADS;
      tile_at[i] = (uint32_t)min(at / PIECES, last_tile) * (uint32_t)segment.tile_bytes + at % PIECES * 16;
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      block_at[i] = (uint32_t)min(token / ROW_BLOCK + i, last_block) * (uint32_t)(p.x_stride / UNIT_COLS * ROW_BLOCK_BYTES);
  }
  __device__ __forceinline__ void copy(const LinearTiles& p, int unit, unsigned char* stage) const {
    const unsigned char* column = rows + (p.wrap && unit >= p.wrap ? unit - p.wrap : unit) * ROW_BLOCK_BYTES;
    unsigned char* to = stage + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j < BLOCK_ROUNDS; ++j)
        copy_async_16(to + i * ROW_BLOCK_BYTES + j * S::THREADS * 16, column + block_at[i] + j * S::THREADS * 16);
    const unsigned char* from = weights + (long long)unit * Unit<KIND>::BYTES;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if ((i + 1) * S::THREADS <= S::TILES * PIECES || threadIdx.x + i * S::THREADS < S::TILES * PIECES)
        copy_async_16(to + R::ROWS + i * S::THREADS * 16, from + tile_at[i]);
  }
};

// A warp's numbers of a step: its tiles' words, and fragments of its activations of this step and of the next.
template <int KIND, int EPILOGUE, class S> struct Fragments {
  static constexpr int M = S::M, N = S::N;
  int lane, rows_at, tiles_at;
  uint32_t b[2][N][2];
  Words<KIND> words[M];

  __device__ __forceinline__ Fragments(int warp_tile, int warp_token) {
    lane = threadIdx.x % 32;
    rows_at = (warp_token + lane / 16 * 8 + lane % 8) * UNIT_COLS * 2 + (lane / 8 % 2 ^ lane % 8) * 16;
    tiles_at = Ring<KIND, S>::ROWS + warp_tile * Unit<KIND>::BYTES;
  }
  __device__ __forceinline__ void load(const unsigned char* stage, int step) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t four[4];
      load_matrices(four, stage + (rows_at ^ step * 32) + n * 8 * UNIT_COLS * 2);
      b[step % 2][n][0] = four[0], b[step % 2][n][1] = four[1], b[step % 2][n + 1][0] = four[2], b[step % 2][n + 1][1] = four[3];
    }
    if (step % Words<KIND>::STEPS == 0)
#pragma unroll
      for (int m = 0; m < M; ++m) words[m].load(stage + tiles_at + m * Unit<KIND>::BYTES, lane, step);
  }
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[M][4]) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if constexpr (EPILOGUE == GATE_UP) words[m / 2 * 2].pair(words[m / 2 * 2 + 1], m % 2, step, a[m]);
      else words[m].tile(step, a[m]);
    }
  }
};

template <int KIND, int EPILOGUE, class S>
__device__ __forceinline__ void multiply_block(const LinearTiles& p, const Segment& segment, int first_tile) {
  SHARED_BYTES(shared);
  using R = Ring<KIND, S>;
  constexpr int M = S::M, N = S::N, STAGES = R::STAGES;
  static_assert(M % 2 == 0 && N % 2 == 0, "pairs of tiles, and of groups");
  const int warp = threadIdx.x / 32, warp_tile = warp % S::ASIDE * M, warp_token = warp / S::ASIDE * N * 8, token = blockIdx.x * S::TOKENS;
  const Copier<KIND, S> copier(p, segment, first_tile, token);
  Fragments<KIND, EPILOGUE, S> fragments(warp_tile, warp_token);
  float acc[M][N][4];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < p.units) copier.copy(p, i, shared + i * R::STAGE);
    copy_async_commit();
  }
  copy_async_wait<STAGES - 2>();
  __syncthreads();
  fragments.load(shared, 0);
  int place = 0;   // of the unit in the ring
#pragma unroll 1
  for (int unit = 0; unit < p.units; ++unit) {
    const unsigned char* stage = shared + place * R::STAGE;
    const int before = place ? place - 1 : STAGES - 1;
    place = place + 1 < STAGES ? place + 1 : 0;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[M][4];
      fragments.decode(step, a);
      if (step < 3) {
        fragments.load(stage, step + 1);
      } else {   // the barrier also frees the place of this unit: its numbers are all in registers
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        fragments.load(shared + place * R::STAGE, 0);
      }
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) mma_f16(acc[m][n], a[m][0], a[m][1], a[m][2], a[m][3], fragments.b[step % 2][n][0], fragments.b[step % 2][n][1]);
      if (step == 0) {
        if (unit + STAGES - 1 < p.units) copier.copy(p, unit + STAGES - 1, shared + before * R::STAGE);
        copy_async_commit();
      }
    }
  }
  copy_async_wait<0>();
  put_sums<EPILOGUE, M == 4 ? 2 : 4>(p, segment, first_tile + warp_tile, token + warp_token, 0, acc);
}

// The segments of one number type; a launch for each type that a row list holds. grid (blocks of tokens, blocks of tiles)
template <int KIND, int EPILOGUE, int SHAPE> __device__ __forceinline__ void linear_tiles(const LinearTiles& p) {
  using S = Shape<SHAPE>;
  int block = blockIdx.y;
  allow_next();
  for (int i = 0; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    const int blocks = segment.kind == KIND ? (segment.num_tiles + S::TILES - 1) / S::TILES : 0;
    if (block < blocks) {
      multiply_block<KIND, EPILOGUE, S>(p, segment, segment.first_tile + block * S::TILES);
      break;
    }
    block -= blocks;
  }
  wait_for_earlier();   // another type's launch may still be running; whoever follows waits for this one
}
