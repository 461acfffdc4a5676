// attend_rows: q/k norm, rope and the turn of a format's frame for every row; keys and values enter the cache, queries wait as fp16.
// store_rows writes keys and values as they are, without norm and rope.
// Reference: reference.attention_inputs      Used by: layers.run_layer, before attend_decode and attend_prefill
// Shapes:    y [rows, 2 A D + 2 G D] f32 -> the cache; q_half [rows, A, D] fp16, q_factor [rows, A] f32
// Layout:    kv_format.cuh
// Launch:    grid (rows, ceil((2 G + A) / 8)), block (256), one warp a key, a value or a query; grid.y of the keys and values
//            alone where q_half is null; store_rows: that grid, y's keys and values alone
// Defines:   HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_DIM, KV_FORMAT
// Numbers:   f32; turned rows are coded to the byte as the NumPy codec does. Bound: latency.
#include "kv_format.cuh"

// Of a row: how many others have begun. A lane looks at a sequence.
__device__ __forceinline__ int sequence_of(const Attend& p, int row) {
  if (p.num_seqs == 1) return 0;
  int begun = 0;
  for (int seq = 1 + threadIdx.x % 32; seq < p.num_seqs; seq += 32) begun += row >= p.row_starts[seq];
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) begun += __shfl_xor_sync(ALL_LANES, begun, distance);
  return begun;
}

extern "C" __global__ void __launch_bounds__(256) attend_rows(const __grid_constant__ Attend p) {
  __align__(16) __shared__ float work[8][HEAD_DIM];
  allow_next();
  const int row = blockIdx.x, warp = threadIdx.x / 32, task = blockIdx.y * 8 + warp, seq = sequence_of(p, row);
  const RowPlace to(p, seq, row);   // like the weights nothing that an earlier kernel makes
  const NormWeights norm(task < NUM_KV_HEADS ? p.k_norm : p.q_norm);
  wait_for_earlier();
  if (task < NUM_KV_HEADS) {
    write_key(p, to, norm, row, task, work[warp]);
  } else if (task < 2 * NUM_KV_HEADS) {
    write_value(p, to, row, task - NUM_KV_HEADS);
  } else if (task < 2 * NUM_KV_HEADS + NUM_HEADS && p.q_half) {
    const long long at = (long long)row * NUM_HEADS + task - 2 * NUM_KV_HEADS;
    const float factor = write_query(p, norm, row, task - 2 * NUM_KV_HEADS, work[warp], p.q_half + at * HEAD_DIM);
    if (threadIdx.x % 32 == 0) p.q_factor[at] = factor;
  }
}

extern "C" __global__ void __launch_bounds__(256) store_rows(const __grid_constant__ Attend p) {
  const int row = blockIdx.x, task = blockIdx.y * 8 + threadIdx.x / 32, seq = sequence_of(p, row);
  const RowPlace to(p, seq, row);
  if (task < NUM_KV_HEADS) {
    store_row<KEY_CODE>(p.y + (long long)row * p.y_stride + (2 * NUM_HEADS + task) * HEAD_DIM, to.key(task));
  } else if (task < 2 * NUM_KV_HEADS) {
    write_value(p, to, row, task - NUM_KV_HEADS);
  }
}
