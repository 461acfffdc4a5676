// delta_step, delta_steps, delta_one, delta_many: convolution, gates and gated delta rule for few rows of a sequence or of several, or
// one row of each. delta_fold: accepted rows of a deferred pass.
// Reference: reference.delta      Used by: layers.run_layer, Backend.commit
// Shapes:    y [rows, C + 2 Nv (+ Nv Dv)] f32 -> ready [rows, Nv Dv] (ready.cuh), or out f32 before the gated norm; state [Nv, Dv, Dk] f32 and
//            window [4, C] of a slot
// Layout:    delta.cuh, delta_few.cuh
// Launch:    by Form: grid (value heads * SLICES, seqs), block (THREADS), static shared memory; delta_fold grid
//            (value heads * SLICES + channels / THREADS, seqs, layers), block (THREADS) of its Form;
//            delta_window grid (channels / 256, seqs), block (256); delta_gate grid (rows), block (256)
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH    Limits: 16 rows a sequence
// Numbers:   f32 throughout, fixed order; equals the reference to 1e-5. Bound: memory (the state), latency.
//
// The gated norm needs a whole head: blocks post their columns to the last one of the head, which leaves the head ready for the next stage
// (delta_few.cuh), if a scale is known that holds for all rows; else it is applied where the output is next read (staging.cuh), or by delta_gate. State, window and
// the pass's arrays are fetched before the kernel waits for its inputs: nothing since the last pass has written them.
#include "delta_few.cuh"

// Weights of the next kernel into the second cache: its blocks find no room beside these, and memory would rest while these wait.
__device__ __forceinline__ void bring_near(const Delta& p) {
#if __CUDA_ARCH__ >= 900
  constexpr int PIECE = 4096;
  const long long blocks = gridDim.x * gridDim.y, block = (long long)blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x >= 32) return;
  for (long long i = block + threadIdx.x * blocks; i < p.ahead_bytes / PIECE; i += 32 * blocks)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.ahead + i * PIECE), "r"(PIECE) : "memory");
#endif
}

// Rows as they come, by the warps without a state of the block that has a head's last columns.
template <class F> __device__ __forceinline__ void leave_rows(const Delta& p, const Place<F>& at) {
  constexpr int FIRST = F::STATE_THREADS / 32, WARPS = F::THREADS / 32 - FIRST;
  const float4 norm = load_norm(p);
  for (int r = threadIdx.x / 32 - FIRST; r < at.span.rows; r += WARPS) {
    const float4 z = load_z(p, at.span.first + r, at.head);
    leave_head(p, at.span.first + r, at.head, [&] { return gate_of(norm, z); });
  }
}

template <class F> __device__ __forceinline__ void delta_rows(const Delta& p, Inputs<F>& in) {
  Place<F> at;
  at.open(p);
  allow_next();
  float* state = state_of(p, at.span.slot, p.layer, at.head) + (long long)(at.slice * F::COLUMNS + at.column) * DIM;
  float* window = window_of(p, at.span.slot, p.layer);
  Columns<F::NUM> s;
  if (at.has_state) s.load(state, at.j);
  Taps taps[F::EACH];
#pragma unroll
  for (int e = 0; e < F::EACH; ++e) taps[e].load(p.conv, window, at.span.position, at.channel(e));
  const float a = p.a[at.head], dt_bias = p.dt_bias[at.head];
  bring_near(p);
  const bool is_last = leaves(p) && at.slice == F::SLICES - 1, is_leaver = F::LOOKS_AHEAD && is_last && threadIdx.x / 32 == F::LEAVER;
  float4 norm, z;
  if (is_leaver) norm = load_norm(p);
  wait_for_earlier();
  if (at.span.rows <= 0) return;
  if (is_leaver) z = load_z(p, at.span.first, at.head);
  prepare(p, in, at, taps, window, a, dt_bias);
  if (is_leaver) in.left[threadIdx.x % 32] = gate_of(norm, z);
  __syncthreads();
  if constexpr (F::ROWS > 1) {
    norm_rows(in, at.span.rows, at.j);
    __syncthreads();
  }
  if constexpr (F::THREADS > F::STATE_THREADS) {
    if (!at.has_state) {
      if (is_last) leave_rows(p, at);
      return;
    }
  }
  float* out = p.out + (long long)at.span.first * p.out_stride + at.output();
  float* record = p.deferred ? p.record + (long long)at.span.first * RECORD + STEPS_AT + at.output() : nullptr;
  Row<F::NUM> row;
  if constexpr (F::ROWS == 1) {
    row.load(in, 0, at);
    float o[F::NUM], learned[F::NUM];
    s.step(row, o, learned);
#pragma unroll
    for (int c = 0; c < F::NUM; ++c)
      if (at.j == c % LANES) {
        put(p, out + c, o[c]);
        if (record) record[c] = learned[c];
      }
  } else {
    using C = Columns<F::NUM>;
    const bool is_out = at.j >= C::HALF_LANES, stores = (is_out || record) && at.j % (C::HALF_LANES / F::NUM) == 0;
    float* target = (is_out ? out : record) + C::column_of(at.j);
    const int stride = is_out ? p.out_stride : RECORD;
#pragma unroll 2
    for (int r = 0; r < at.span.rows; ++r) {
      row.load(in, r, at);
      const float value = s.step_of_several(row, at.j);
      if (stores && is_out) put(p, target, value);
      else if (stores) *target = value;
      target += stride;
    }
  }
  if (!p.deferred) s.store(state, at.j);
  if (F::ROWS == 1 && leaves(p) && block_anew() % F::SLICES == F::SLICES - 1 && thread_index() / 32 == F::LEAVER) {   // anew, as registers are scarce before
    const int head = block_anew() / F::SLICES;
    float4 norm, z;
    if (!F::LOOKS_AHEAD) norm = load_norm(p), z = load_z(p, blockIdx.y, head);
    leave_head(p, blockIdx.y, head, [&] { return F::LOOKS_AHEAD ? in.left[threadIdx.x % 32] : gate_of(norm, z); });
  }
}

extern "C" __global__ void __launch_bounds__(Step::THREADS, 2) delta_step(const __grid_constant__ Delta p) {
  __shared__ Inputs<Step> in;
  delta_rows(p, in);
}
extern "C" __global__ void __launch_bounds__(Steps::THREADS, 2) delta_steps(const __grid_constant__ Delta p) {
  __shared__ Inputs<Steps> in;
  delta_rows(p, in);
}
extern "C" __global__ void __launch_bounds__(One::THREADS, 1024 / One::THREADS) delta_one(const __grid_constant__ Delta p) {
  __shared__ Inputs<One> in;
  delta_rows(p, in);
}
#if __CUDA_ARCH__ >= 1200
constexpr int MANY_THREADS = 640;   // of a multiprocessor; more spill
#else
constexpr int MANY_THREADS = 768;
#endif
extern "C" __global__ void __launch_bounds__(Many::THREADS, MANY_THREADS / Many::THREADS) delta_many(const __grid_constant__ Delta p) {
  __shared__ Inputs<Many> in;
  delta_rows(p, in);
}

// A channel's inputs of the last rows, which the next rows look back on. layer: from p.layer on, of those that p.y has.
__device__ __forceinline__ void keep_window(const Delta& p, int layer, int channel) {
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0 || channel >= CHANNELS || (span.rows == 1 && !p.accepted)) return;
  const float* y = p.y + layer * p.record_stride + (long long)span.first * p.y_stride;
  advance_window(window_of(p, span.slot, p.layer + layer), y, p.y_stride, span.rows, span.position, channel);
}

struct __align__(16) Recorded {
  float k[MAX_ROWS][DIM], learned[MAX_ROWS][Fold::COLUMNS], decay[MAX_ROWS];
};

// The state after the accepted rows of a deferred pass, with the bits that they would have left there: what depends on the state is
// recorded, so rows follow each other without an exchange between lanes.
//
// Blocks past those of the heads keep the inputs that the next rows look back on.
extern "C" __global__ void __launch_bounds__(Fold::THREADS) delta_fold(const __grid_constant__ Delta p) {
  __shared__ Recorded in;
  const int head = blockIdx.x / Fold::SLICES, slice = blockIdx.x % Fold::SLICES, layer = blockIdx.z;
  allow_next();
  if (head >= VALUE_HEADS) {
    wait_for_earlier();
    keep_window(p, layer, (blockIdx.x - VALUE_HEADS * Fold::SLICES) * Fold::THREADS + threadIdx.x);
    return;
  }
  const int column = threadIdx.x / LANES * Fold::NUM, j = threadIdx.x % LANES;
  float* state = state_of(p, p.slot_ids[blockIdx.y], layer, head) + (long long)(slice * Fold::COLUMNS + column) * DIM;
  Columns<Fold::NUM> s;
  s.load(state, j);
  wait_for_earlier();
  const Span span = span_of(p, blockIdx.y);
  if (span.rows <= 0) return;
  const float* record = p.y + layer * p.record_stride + (long long)span.first * RECORD;
  for (int i = threadIdx.x; i < span.rows * DIM / 4; i += Fold::THREADS) {
    const int r = i / (DIM / 4), at = i % (DIM / 4);
    reinterpret_cast<float4*>(in.k[r])[at] = __ldcg(reinterpret_cast<const float4*>(record + r * RECORD + KEYS_AT + head % KEY_HEADS * DIM) + at);
  }
  for (int i = threadIdx.x; i < span.rows * Fold::COLUMNS; i += Fold::THREADS)
    in.learned[i / Fold::COLUMNS][i % Fold::COLUMNS] = __ldcg(record + i / Fold::COLUMNS * RECORD + STEPS_AT + head * DIM + slice * Fold::COLUMNS + i % Fold::COLUMNS);
  if (threadIdx.x < span.rows) in.decay[threadIdx.x] = __ldcg(record + threadIdx.x * RECORD + DECAYS_AT + head);
  __syncthreads();
  for (int r = 0; r < span.rows; ++r) {
    float4 k[VALUES / 4];
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) k[i] = reinterpret_cast<const float4*>(in.k[r])[j + LANES * i];
#pragma unroll
    for (int c = 0; c < Fold::NUM; ++c) s.advance(c, k, in.learned[r][column + c], in.decay[r]);
  }
  s.store(state, j);
}

// After several rows in place.
extern "C" __global__ void __launch_bounds__(256) delta_window(const __grid_constant__ Delta p) {
  allow_next();
  wait_for_earlier();
  keep_window(p, 0, blockIdx.x * 256 + threadIdx.x);
}

// The gated norm in place.
extern "C" __global__ void __launch_bounds__(256) delta_gate(const __grid_constant__ Delta p) {
  allow_next();
  wait_for_earlier();
  const long long row = blockIdx.x;
  for (int head = threadIdx.x / 32; head < VALUE_HEADS; head += 8) {
    float* o = p.out + row * p.out_stride + head * DIM;
    gated_norm(o, p.y + row * p.y_stride + p.z_offset + head * DIM, p.norm, o, p.eps);
  }
}
