// linear_tiles by warpgroups (compute capability 9.0). A block takes one piece of out after another: one or two warpgroups, a
// weight tile a warp, and one that copies ahead of them, over the border of two pieces too. Weights are decoded into registers
// while the tensor cores multiply the unit before; activations go from shared memory.
#pragma once
#include "quant.cuh"
#include "warpgroup.cuh"

constexpr int ALIGNED = 1024, RING_START = 2 * ALIGNED, MAX_STAGES = 8;
constexpr int COPIERS = 4;                                   // warps, the first of a block

template <int SHAPE> struct Shape {
  static constexpr int TOKENS = SHAPE == WIDE ? 256 : SHAPE == MEDIUM ? 128 : 64, TILES = SHAPE == FEW ? 4 : 8;
  static constexpr int BLOCKS_AT_ONCE = SHAPE == SLIM ? 2 : SHAPE == FEW ? 3 : 1, THREADS = 32 * (COPIERS + TILES);
  // Registers of a thread. What a block has is shared out at its launch: what multiplying warps take, copying ones must have given.
  static constexpr int LAUNCH_REGISTERS = 65536 / (THREADS * BLOCKS_AT_ONCE) / 8 * 8, COPY_REGISTERS = SHAPE == SLIM ? 32 : 40;
  static constexpr int MULTIPLY_REGISTERS = SHAPE == SLIM ? 104 : SHAPE == FEW ? 120 : 232;
  static constexpr int PARTS = SHAPE == SLIM ? 2 : 1;   // of a unit, multiplied one at a time: fewer registers
  static_assert(COPIERS * COPY_REGISTERS + TILES * MULTIPLY_REGISTERS <= (COPIERS + TILES) * LAUNCH_REGISTERS, "or they wait for ever");
  static constexpr int AT_ONCE = SHAPE == MEDIUM ? 8 : SHAPE == WIDE ? 4 : 2;   // of put_sums
};

template <int KIND, class S> struct Ring {
  static constexpr int BLOCKS = S::TOKENS / ROW_BLOCK, ROWS = BLOCKS * ROW_BLOCK_BYTES, WEIGHTS = S::TILES * Unit<KIND>::BYTES;
  static constexpr int FITTING = (TILE_SHARED / S::BLOCKS_AT_ONCE - BLOCK_SHARED - RING_START) / (ROWS + WEIGHTS);
  static constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
  static_assert(STAGES > 1 && BLOCKS <= COPIERS && 16 * STAGES <= ALIGNED, "a ring, and a warp a block of rows");
  unsigned char* shared;           // full [STAGES], free [STAGES], at ALIGNED rows [STAGES][ROWS], then weights [STAGES][WEIGHTS]
  int stage = 0, phase = 0;

  __device__ __forceinline__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(shared) + stage; }
  __device__ __forceinline__ uint64_t* free() const { return reinterpret_cast<uint64_t*>(shared) + STAGES + stage; }
  __device__ __forceinline__ unsigned char* rows() const { return shared + ALIGNED + stage * ROWS; }
  __device__ __forceinline__ unsigned char* weights() const { return shared + ALIGNED + STAGES * ROWS + stage * WEIGHTS; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// A piece of out: its tiles and tokens, and the K splits that it is made of.
struct Piece {
  const Segment* segment;
  int first_tile, token, split, last_split;
};

// Pieces go by token blocks within GROUP_TOKENS tokens, whose activations the cache holds, then by tiles.
constexpr int GROUP_TOKENS = 2048;
template <int KIND, int EPILOGUE, class S> __device__ __forceinline__ bool find_piece(const LinearTiles& p, int index, Piece& piece) {
  int tile_blocks = 0;
  for (int i = 0; i < p.num_segments; ++i)
    if (p.segments[i].kind == KIND) tile_blocks += (p.segments[i].num_tiles + S::TILES - 1) / S::TILES;
  const int token_blocks = (p.rows + S::TOKENS - 1) / S::TOKENS, group_blocks = GROUP_TOKENS / S::TOKENS;
  piece.split = piece.last_split = EPILOGUE == ADD ? index / (tile_blocks * token_blocks) : 0;
  if (EPILOGUE == ADD ? piece.split >= (p.partial ? p.splits : 1) : index >= tile_blocks * token_blocks) return false;
  if (EPILOGUE == ADD) index %= tile_blocks * token_blocks;
  if (EPILOGUE == ADD && !p.partial) piece.last_split = p.splits - 1;
  const int group = index / (group_blocks * tile_blocks), inner = index % (group_blocks * tile_blocks);
  const int width = min(group_blocks, token_blocks - group * group_blocks);
  piece.token = (group * group_blocks + inner % width) * S::TOKENS;
  int block = inner / width;
  for (int i = 0; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    const int blocks = segment.kind == KIND ? (segment.num_tiles + S::TILES - 1) / S::TILES : 0;
    if (block < blocks) {
      piece.segment = &segment, piece.first_tile = segment.first_tile + block * S::TILES;
      return true;
    }
    block -= blocks;
  }
  return false;
}

// One thread of each copying warp: every COPIERS-th tile, and a block of rows.
template <int KIND, int EPILOGUE, class S> __device__ __forceinline__ void copy_pieces(const LinearTiles& p, Ring<KIND, S> ring) {
  using R = Ring<KIND, S>;
  constexpr int TILES = S::TILES / COPIERS, BYTES = Unit<KIND>::BYTES;
  const int warp = threadIdx.x / 32;
  Piece piece;
  for (int index = blockIdx.x; find_piece<KIND, EPILOGUE, S>(p, index, piece); index += gridDim.x) {
    const Segment& segment = *piece.segment;
    const unsigned char* weights[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int tile = min(piece.first_tile - segment.first_tile + warp + i * COPIERS, segment.num_tiles - 1);
      weights[i] = p.weights + segment.offset + (long long)tile * segment.tile_bytes;
    }
    const int block = min(piece.token / ROW_BLOCK + warp, (p.rows + ROW_BLOCK - 1) / ROW_BLOCK - 1);
    const unsigned char* rows = reinterpret_cast<const unsigned char*>(p.x) + (long long)block * (p.x_stride / UNIT_COLS) * ROW_BLOCK_BYTES;
#pragma unroll 1
    for (int unit = EPILOGUE == ADD ? split_begin(p, piece.split) : 0; unit < (EPILOGUE == ADD ? split_begin(p, piece.last_split + 1) : p.units);
         ++unit, ring.next()) {
      arrival_wait(ring.free(), ring.phase ^ 1);
      arrival_announce(ring.full(), TILES * BYTES + (warp < R::BLOCKS ? ROW_BLOCK_BYTES : 0));
      const int column = p.wrap && unit >= p.wrap ? unit - p.wrap : unit;
      if (warp < R::BLOCKS)
        copy_whole(ring.rows() + warp * ROW_BLOCK_BYTES, rows + (long long)column * ROW_BLOCK_BYTES, ROW_BLOCK_BYTES, ring.full());
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        copy_whole(ring.weights() + (warp + i * COPIERS) * BYTES, weights[i] + (long long)unit * BYTES, BYTES, ring.full());
    }
  }
}

// A warp's fragments of half a unit.
template <int KIND, int EPILOGUE> __device__ __forceinline__ void decode_half(const unsigned char* weights, int warp, int half, uint32_t (&a)[2][4]) {
  constexpr int BYTES = Unit<KIND>::BYTES;
  const int lane = threadIdx.x % 32;
  if constexpr (EPILOGUE == GATE_UP) decode_half_pair<KIND>(weights + warp / 2 * 2 * BYTES, weights + (warp / 2 * 2 + 1) * BYTES, lane, warp % 2, half, a);
  else decode_half_unit<KIND>(weights + warp * BYTES, lane, half, a);
}

// A part of a unit is multiplied while the next one is decoded.
template <int KIND, int EPILOGUE, class S> struct Multiplier {
  static constexpr int N = S::TOKENS / 8, HALVES = 2 / S::PARTS;
  Ring<KIND, S> ring;
  uint64_t* behind;   // of the unit whose place is free once what was begun before is done
  int warp;

  __device__ __forceinline__ void part(float (&acc)[1][N][4], uint32_t (&a)[HALVES][2][4], int first) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) decode_half<KIND, EPILOGUE>(ring.weights(), warp, first + half, a[half]);
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < 2 * HALVES; ++step) warpgroup_mma(acc[0], a[step / 2][step % 2], ring.rows(), 2 * first + step);
    warpgroup_commit();
    warpgroup_wait<1>();   // the part before is done
  }
  __device__ __forceinline__ void release() {
    if (behind && threadIdx.x % 32 == 0) arrive(behind);
  }
  __device__ __forceinline__ void whole(float (&acc)[1][N][4], uint32_t (&a)[HALVES][2][4]) {
    arrival_wait(ring.full(), ring.phase);
    part(acc, a, 0);
    release();
    behind = ring.free();
    ring.next();
  }
  __device__ __forceinline__ void halves(float (&acc)[1][N][4], uint32_t (&low)[HALVES][2][4], uint32_t (&high)[HALVES][2][4]) {
    arrival_wait(ring.full(), ring.phase);
    part(acc, low, 0);
    release();
    part(acc, high, 1);
    behind = ring.free();
    ring.next();
  }
  __device__ __forceinline__ void all(float (&acc)[1][N][4], int units) {
    uint32_t one[HALVES][2][4], other[HALVES][2][4];
    behind = nullptr;
    if constexpr (S::PARTS == 2) {
#pragma unroll 1
      for (int unit = 0; unit < units; ++unit) halves(acc, one, other);
    } else {
#pragma unroll 1
      for (int unit = 1; unit < units; unit += 2) whole(acc, one), whole(acc, other);
      if (units % 2) whole(acc, one);
    }
    warpgroup_wait<0>();
    release();
    warpgroup_settle(acc[0]);
  }
};

template <int KIND, int EPILOGUE, class S> __device__ __forceinline__ void multiply_pieces(const LinearTiles& p, Ring<KIND, S> ring) {
  Multiplier<KIND, EPILOGUE, S> multiplier = {ring, nullptr, (int)threadIdx.x / 32 - COPIERS};
  Piece piece;
  for (int index = blockIdx.x; find_piece<KIND, EPILOGUE, S>(p, index, piece); index += gridDim.x) {
    const auto one_split = [&](int split, int units) {
      float acc[1][S::TOKENS / 8][4];
#pragma unroll
      for (int n = 0; n < S::TOKENS / 8; ++n) acc[0][n][0] = acc[0][n][1] = acc[0][n][2] = acc[0][n][3] = 0.0f;
      multiplier.all(acc, units);
      put_sums<EPILOGUE, S::AT_ONCE>(p, *piece.segment, piece.first_tile + multiplier.warp, piece.token, split, acc);
    };
    if constexpr (EPILOGUE == ADD) {
#pragma unroll 1
      for (int split = piece.split; split <= piece.last_split; ++split) one_split(split, split_begin(p, split + 1) - split_begin(p, split));
    } else {
      one_split(0, p.units);
    }
  }
}

template <int KIND, int EPILOGUE, int SHAPE> __device__ __forceinline__ void linear_tiles(const LinearTiles& p) {
  SHARED_BYTES(dynamic);
  using S = Shape<SHAPE>;
  using R = Ring<KIND, S>;
  allow_next();
  R ring = {dynamic + (ALIGNED - reinterpret_cast<uintptr_t>(dynamic) % ALIGNED) % ALIGNED};
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::STAGES; ++i) {
      ring.stage = i;
      arrival_init(ring.full(), COPIERS), arrival_init(ring.free(), S::TILES);
    }
    arrival_publish();
  }
  __syncthreads();
  ring.stage = 0;
  if (threadIdx.x < 32 * COPIERS) {
    give_registers<S::COPY_REGISTERS>();
    if (threadIdx.x % 32 == 0) copy_pieces<KIND, EPILOGUE, S>(p, ring);
  } else {
    take_registers<S::MULTIPLY_REGISTERS>();
    multiply_pieces<KIND, EPILOGUE, S>(p, ring);
  }
  wait_for_earlier();   // another type's launch may still be running; whoever follows waits for this one
}
