// attend_prefill: tiled causal attention of a chunk's rows over the cache, turned back where values are turned, with the output gate.
// Reference: reference.attend      Used by: layers.run_layer in prefill, after attend_rows
// Shapes:    q_half [rows, A, D], the cache, gates of y [rows, 2 A D + 2 G D] f32 -> out [rows, A D] f32
// Layout:    kv_format.cuh
// Launch:    grid (query tiles, heads), block and shared as cuda_attention.prefill_block
// Defines:   HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_DIM, KV_FORMAT, WARPGROUPS
// Numbers:   fp16 products, f32 sums and softmax; steps of 32 or 64 positions from 0, ascending: a row's bits depend on its
//            position and prefix alone. Bound: tensor cores.
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int QUERY_WARPS = 8, QUERIES = QUERY_WARPS * 16, DIM_BLOCKS = HEAD_DIM / 64;

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

// What 16 rows of a warp attended, laid out as mma_f16's sums -> out, with the gate. work: of turned values, 16 rows of BLOCK_DIMS.
__device__ __forceinline__ void put_attended(const Attend& p, float (&out)[DIM_BLOCKS][8][4], const float (&sum)[2], int head, int first, int end,
                                             float* work) {
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int half = 0; half < (TURNED_VALUES ? HEAD_DIM / BLOCK_DIMS : 1); ++half) {
    constexpr int BLOCKS = TURNED_VALUES ? BLOCK_DIMS / 64 : DIM_BLOCKS;
    if constexpr (TURNED_VALUES) __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + g + 8 * i;
      if (row >= end) continue;
      const float share = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
      const float* gate = p.y + (long long)row * p.y_stride + head * 2 * HEAD_DIM + HEAD_DIM;
      float* target = p.out + (long long)row * p.out_stride + head * HEAD_DIM;
      constexpr int AT_ONCE = 8;   // gates that are loaded before anything is stored
#pragma unroll
      for (int from = 0; from < BLOCKS * 8; from += AT_ONCE) {
        float2 gates[AT_ONCE];
        if constexpr (!TURNED_VALUES)
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) gates[n] = *reinterpret_cast<const float2*>(gate + (from + n) * 8 + 2 * c);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          const int d = (from + n) * 8 + 2 * c;
          const float(&sums)[4] = out[half * BLOCKS + (from + n) / 8][(from + n) % 8];
          const float low = __fmul_rn(sums[2 * i], share), high = __fmul_rn(sums[2 * i + 1], share);
          if constexpr (TURNED_VALUES) *reinterpret_cast<float2*>(work + (g + 8 * i) * BLOCK_DIMS + d) = make_float2(low, high);
          else *reinterpret_cast<float2*>(target + d) = make_float2(gated(low, gates[n].x), gated(high, gates[n].y));
        }
      }
    }
    if constexpr (TURNED_VALUES) {
      __syncwarp();
#pragma unroll 1
      for (int base = 0; base < 16 && first + base < end; base += 4) {
        const int d = half * BLOCK_DIMS + 4 * lane;
        float4 gates[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          gates[i] = *reinterpret_cast<const float4*>(p.y + (long long)min(first + base + i, end - 1) * p.y_stride + (2 * head + 1) * HEAD_DIM + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first + base + i;
          const float4 four = *reinterpret_cast<const float4*>(work + (base + i) * BLOCK_DIMS + 4 * lane);
          float value[4] = {four.x, four.y, four.z, four.w};
          turn_back(value);
          if (row < end)
            *reinterpret_cast<float4*>(p.out + (long long)row * p.out_stride + head * HEAD_DIM + d) = make_float4(
                gated(value[0], gates[i].x), gated(value[1], gates[i].y), gated(value[2], gates[i].z), gated(value[3], gates[i].w));
        }
      }
    }
  }
}

// Scores of a tile -> shares as fp16 fragments; out and sum are brought to the new maximum.
template <int GROUPS>
__device__ __forceinline__ void soften(float (&score)[GROUPS][4], const float (&factor)[2], const int (&position)[2], bool is_cut, int start,
                                       int first_position, float (&top)[2], float (&sum)[2], float (&correction)[2], uint32_t (&a)[GROUPS / 2][4]) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float now = top[i];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& s = score[n][2 * i + j];
        s = __fmul_rn(s, factor[i]);
        if (is_cut) {
          const int key = start + n * 8 + 2 * c + j;
          if (key > position[i] || key < first_position) s = -INFINITY;
        }
        now = fmaxf(now, s);
      }
    now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
    now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
    const float base = now == -INFINITY ? 0.0f : now;
    correction[i] = exp2_quick(top[i] - base);
    top[i] = now;
    float part = 0.0f;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& s = score[n][2 * i + j];
        s = exp2_quick(s - base);
        part = __fadd_rn(part, s);
      }
    part = __fadd_rn(part, __shfl_xor_sync(ALL_LANES, part, 1));
    part = __fadd_rn(part, __shfl_xor_sync(ALL_LANES, part, 2));
    sum[i] = fmaf(sum[i], correction[i], part);
  }
#pragma unroll
  for (int s = 0; s < GROUPS / 2; ++s) {
    a[s][0] = half2_from_floats(score[2 * s][0], score[2 * s][1]), a[s][1] = half2_from_floats(score[2 * s][2], score[2 * s][3]);
    a[s][2] = half2_from_floats(score[2 * s + 1][0], score[2 * s + 1][1]), a[s][3] = half2_from_floats(score[2 * s + 1][2], score[2 * s + 1][3]);
  }
}

#if WARPGROUPS
#include "attend_warpgroup.cuh"
#else
#include "attend_warp.cuh"
#endif
