// linear_tiles by warpgroups (compute capability 9.0). A block takes one piece of out after another: WARPGROUPS_OF x 4 warps,
// each with TILES_OF weight tiles and TOKENS tokens. Weights are decoded into registers while the tensor cores multiply the
// half unit before; activations go from shared memory. A warp copies its own tiles, the first ones the activations too, ahead of
// the multiplication and over the border of two pieces.
//
// x lies in blocks [row / 64][unit][row % 64][64 halves]: 128 bytes a row of a block, the columns in the order of the fragments
// (halve_position), the 16-byte pieces swizzled by row % 8: a block is copied as it lies.
#pragma once
#include "quant.cuh"
#include "warpgroup.cuh"

constexpr int ROW_BLOCK = 64, ROW_BLOCK_BYTES = ROW_BLOCK * UNIT_COLS * 2, ALIGNED = 1024, RING_START = 2 * ALIGNED, MAX_STAGES = 8;
constexpr int SM_SHARED = 228 * 1024, BLOCK_SHARED = 1024;   // of a multiprocessor, and what a block takes of it beside its own

// SHAPE: cuda_linear.SHAPES. A gate and its up tile stay in one warp.
enum { WIDE = 0, NARROW = 1, SLIM = 2, FEW = 3, LONG = 4 };
template <int EPILOGUE, int SHAPE> struct Shape {
  static constexpr int TOKENS = SHAPE == LONG ? 256 : SHAPE == WIDE ? 128 : 64;
  static constexpr int WARPGROUPS_OF = SHAPE == FEW || SHAPE == SLIM && EPILOGUE == GATE_UP ? 1 : 2;
  static constexpr int TILES_OF = SHAPE == FEW || SHAPE == LONG || SHAPE == SLIM && EPILOGUE != GATE_UP ? 1 : 2;
  static constexpr int BLOCKS_AT_ONCE = SHAPE == WIDE || SHAPE == LONG ? 1 : SHAPE == NARROW ? 2 : SHAPE == SLIM ? WARPGROUPS_OF == 1 ? 3 : 2 : 4;
  static constexpr int AT_ONCE = TILES_OF == 2 && SHAPE != WIDE ? 1 : 4;   // of put_sums
  static constexpr int WARPS = 4 * WARPGROUPS_OF, TILES = WARPS * TILES_OF, THREADS = 32 * WARPS;
};

template <int KIND, class S> struct Ring {
  static constexpr int BLOCKS = S::TOKENS / ROW_BLOCK, ROWS = BLOCKS * ROW_BLOCK_BYTES, WEIGHTS = S::TILES * Unit<KIND>::BYTES;
  static constexpr int FITTING = (SM_SHARED / S::BLOCKS_AT_ONCE - BLOCK_SHARED - RING_START) / (ROWS + WEIGHTS);
  static constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
  static constexpr int LAG = STAGES > 3 ? 2 : 1;   // units between the one that is multiplied and the one whose place is filled
  static_assert(STAGES > LAG && BLOCKS <= S::WARPS && 16 * STAGES <= ALIGNED, "a ring, and a warp a block of rows");
  unsigned char* shared;           // full [STAGES], free [STAGES], at ALIGNED rows [STAGES][ROWS], then weights [STAGES][WEIGHTS]
  int stage, phase;

  __device__ __forceinline__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(shared) + stage; }
  __device__ __forceinline__ uint64_t* free() const { return reinterpret_cast<uint64_t*>(shared) + STAGES + stage; }
  __device__ __forceinline__ unsigned char* rows() const { return shared + ALIGNED + stage * ROWS; }
  __device__ __forceinline__ unsigned char* weights() const { return shared + ALIGNED + STAGES * ROWS + stage * WEIGHTS; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// A piece of out: its tiles and tokens.
struct Piece {
  const Segment* segment;
  int first_tile, token;
};

// Pieces go by token blocks within GROUP_TOKENS tokens, whose activations the cache holds, then by tiles.
constexpr int GROUP_TOKENS = 2048;
template <int KIND, class S> __device__ __forceinline__ bool find_piece(const LinearTiles& p, int index, Piece& piece) {
  int tile_blocks = 0;
  for (int i = 0; i < p.num_segments; ++i)
    if (p.segments[i].kind == KIND) tile_blocks += (p.segments[i].num_tiles + S::TILES - 1) / S::TILES;
  const int token_blocks = (p.rows + S::TOKENS - 1) / S::TOKENS, group_blocks = GROUP_TOKENS / S::TOKENS;
  if (index >= tile_blocks * token_blocks) return false;
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

// What a warp copies, by one lane: its tiles, and a block of rows if it is one of the first.
template <int KIND, class S> struct Feed {
  using R = Ring<KIND, S>;
  R ring;
  int index, unit;                   // unit: -1 where no piece is left
  unsigned weights, second, rows;    // bytes to the first tile, from it to the second, to the block of rows; at unit 0

  __device__ __forceinline__ void begin_piece(const LinearTiles& p, int next) {
    const int warp = threadIdx.x / 32;
    Piece piece;
    index = next, unit = find_piece<KIND, S>(p, index, piece) ? 0 : -1;
    if (unit < 0) return;
    const Segment& segment = *piece.segment;
    const int end = segment.first_tile + segment.num_tiles - 1, tile = min(piece.first_tile + warp * S::TILES_OF, end);
    const int block = min(piece.token / ROW_BLOCK + warp, (p.rows + ROW_BLOCK - 1) / ROW_BLOCK - 1);
    weights = (unsigned)segment.offset + (unsigned)(tile - segment.first_tile) * segment.tile_bytes;
    second = tile < end ? segment.tile_bytes : 0;
    rows = (unsigned)block * (p.x_stride / UNIT_COLS) * ROW_BLOCK_BYTES;
  }
  // A unit into the next stage, once nobody reads it.
  __device__ __forceinline__ void copy_unit(const LinearTiles& p) {
    const int warp = threadIdx.x / 32;
    if (unit < 0) return;
    if (threadIdx.x % 32 == 0) {
      arrival_wait(ring.free(), ring.phase ^ 1);
      arrival_announce(ring.full(), S::TILES_OF * Unit<KIND>::BYTES + (warp < R::BLOCKS ? ROW_BLOCK_BYTES : 0));
#pragma unroll
      for (int m = 0; m < S::TILES_OF; ++m)
        copy_whole(ring.weights() + (warp * S::TILES_OF + m) * Unit<KIND>::BYTES, p.weights + (weights + m * second + unit * Unit<KIND>::BYTES),
                   Unit<KIND>::BYTES, ring.full());
      if (warp < R::BLOCKS) {
        const int column = p.wrap && unit >= p.wrap ? unit - p.wrap : unit;
        copy_whole(ring.rows() + warp * ROW_BLOCK_BYTES, reinterpret_cast<const unsigned char*>(p.x) + (rows + column * ROW_BLOCK_BYTES),
                   ROW_BLOCK_BYTES, ring.full());
      }
    }
    ring.next();
    if (++unit == p.units) begin_piece(p, index + gridDim.x);
  }
};

template <int KIND, int EPILOGUE, class S> __device__ __forceinline__ void multiply_pieces(const LinearTiles& p, Ring<KIND, S> ring, Feed<KIND, S>& feed) {
  constexpr int M = S::TILES_OF, N = S::TOKENS / 8;
  const int lane = threadIdx.x % 32, warp_weights = threadIdx.x / 32 * M * Unit<KIND>::BYTES;
  Piece piece;
  for (int index = blockIdx.x; find_piece<KIND, S>(p, index, piece); index += gridDim.x) {
    float acc[M][N][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
    uint32_t low[M][2][4], high[M][2][4];   // of the two halves of a unit: one is multiplied while the other is decoded
    const auto half_unit = [&](int half, uint32_t (&a)[M][2][4]) {
#pragma unroll
      for (int m = 0; m < M; ++m) decode_half_unit<KIND>(ring.weights() + warp_weights + m * Unit<KIND>::BYTES, lane, half, a[m]);
      warpgroup_begin();
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int m = 0; m < M; ++m) warpgroup_mma(acc[m], a[m][step], ring.rows(), 2 * half + step);
      warpgroup_commit();
      warpgroup_wait<1>();   // the half before is done
    };
    uint64_t* behind = nullptr;
#pragma unroll 1
    for (int unit = 0; unit < p.units; ++unit, ring.next()) {
      arrival_wait(ring.full(), ring.phase);
      half_unit(0, low);
      if (behind && lane == 0) arrive(behind);
      behind = ring.free();
      feed.copy_unit(p);
      half_unit(1, high);
    }
    warpgroup_wait<0>();
    if (lane == 0) arrive(behind);
#pragma unroll
    for (int m = 0; m < M; ++m) warpgroup_settle(acc[m]);
    put_sums<EPILOGUE, S::AT_ONCE>(p, *piece.segment, piece.first_tile + threadIdx.x / 32 * M, piece.token, acc);
  }
}

template <int KIND, int EPILOGUE, int SHAPE> __device__ __forceinline__ void linear_tiles(const LinearTiles& p) {
  SHARED_BYTES(dynamic);
  using S = Shape<EPILOGUE, SHAPE>;
  using R = Ring<KIND, S>;
  allow_next();
  R ring = {dynamic + (ALIGNED - reinterpret_cast<uintptr_t>(dynamic) % ALIGNED) % ALIGNED, 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::STAGES; ++i, ring.next()) arrival_init(ring.full(), S::WARPS), arrival_init(ring.free(), S::WARPS);
    ring.stage = ring.phase = 0;
    arrival_publish();
  }
  __syncthreads();
  Feed<KIND, S> feed = {ring};
  feed.begin_piece(p, blockIdx.x);
#pragma unroll 1
  for (int i = 0; i < R::STAGES - R::LAG; ++i) feed.copy_unit(p);
  multiply_pieces<KIND, EPILOGUE, S>(p, ring, feed);
  wait_for_earlier();   // another type's launch may still be running; whoever follows waits for this one
}
