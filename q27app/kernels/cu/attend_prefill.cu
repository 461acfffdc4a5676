// attend_prefill: tiled causal attention of a chunk's rows over the cache, turned back where values are turned, with the output gate.
// Reference: reference.attend      Used by: layers.run_layer in prefill, after attend_rows
// Shapes:    q_half [rows, A, D], the cache, gates of y [rows, 2 A D + 2 G D] f32 -> out [rows, A D] f32
// Layout:    kv_format.cuh
// Launch:    grid (query tiles, heads), block and shared as cuda_attention.prefill_block
// Defines:   HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_DIM, KV_FORMAT, QUERY_WARPS, WARPGROUPS
// Numbers:   fp16 products, f32 sums and softmax; key tiles of 64 positions from 0, ascending: a row's bits depend on its
//            position and prefix alone. Bound: tensor cores.
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int KEYS = 64, QUERIES = QUERY_WARPS * 16;

__device__ __forceinline__ float gated(float value, float gate) { return __fmul_rn(value, __fdividef(1.0f, 1.0f + __expf(-gate))); }

// Tile of queries -> its rows; tiles are cut within a sequence.
__device__ __forceinline__ bool find_tile(const Attend& p, int index, int& seq, int& first, int& end) {
  for (seq = 0; seq < p.num_seqs; ++seq) {
    const int start = p.row_starts[seq], stop = p.row_starts[seq + 1], tiles = (stop - start + QUERIES - 1) / QUERIES;
    if (index < tiles) {
      const int tile = tiles - 1 - index;   // the longest first
      first = start + tile * QUERIES, end = min(first + QUERIES, stop);
      return true;
    }
    index -= tiles;
  }
  return false;
}

#if WARPGROUPS
#include "attend_warpgroup.cuh"
#else
#include "attend_warp.cuh"
#endif
