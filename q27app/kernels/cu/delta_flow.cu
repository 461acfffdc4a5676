// delta_flow: convolution, gates and gated delta rule in place for one row of each of several sequences, on cards with bulk copies. delta_settle: the
// rows that states lack.
// Reference: reference.delta      Used by: layers.run_layer
// Shapes:    as delta_step.cu     Layout: delta.cuh, delta_few.cuh
// Launch:    grid (blocks, which take shares of a head until none is left), block (Flow::THREADS), shared sizeof(Flowing); delta_settle grid
//            (HEAD_SHARES, slots, layers), block (Flow::THREADS)
// Defines:   DELTA_DIM, DELTA_KEY_HEADS, DELTA_VALUE_HEADS, CONV_WIDTH    Limits: one row a sequence, not deferred
// Numbers:   f32 throughout, the bits of delta_step.cu. Bound: memory (the states).
//
// A share is COLUMNS value dims of a head of a sequence: 32 KiB of state at 128 dims. PLACES of them are on their way to shared memory while
// the block works on one, so that memory never waits for the work; the convolution's inputs come a share ahead into registers. State, window
// and the pass's arrays are fetched before the kernel waits for its inputs: nothing since the last pass has written them.
//
// A state that is only read takes less than half as long as one that is written back. So most rows leave a record of what they add to it, and the state,
// read with the records so far and made up for them by the rows' own arithmetic, is written with every fourth row (Delta.lacks says which).
#include "delta_few.cuh"
#include "warpgroup.cuh"

using Flow = Form<HALF, 2, 1>;
constexpr int PLACES = 3, STATE_FLOATS = Flow::COLUMNS * DIM, HEAD_SHARES = VALUE_HEADS * Flow::SLICES;

// Records of the rows that states lack: what `advance` takes of each. Of a slot and layer: keys [KEY_HEADS][LACKS][DIM], then of each share decays
// [LEARNED_AT], the last unused, and what its columns learned [LACKS][COLUMNS].
constexpr int LACKS = 3, LEARNED_AT = 4, SHARE_LACKING = LEARNED_AT + LACKS * Flow::COLUMNS, KEYS_LACKING = KEY_HEADS * LACKS * DIM;
constexpr int LACKING = KEYS_LACKING + HEAD_SHARES * SHARE_LACKING;
static_assert(LACKS <= LEARNED_AT, "a decay a row");

struct __align__(16) Flowing {
  float state[PLACES][STATE_FLOATS];
  float keys[PLACES][LACKS][DIM], lacking[PLACES][SHARE_LACKING];
  float q[2][DIM], k[2][DIM], v[2][Flow::COLUMNS];   // of the share at work and of the one before
  Gates gates[2];
  uint64_t there[PLACES];
  int lacks[PLACES];
};

__device__ __forceinline__ int rows_of(int lacks) { return lacks < 0 ? ~lacks : lacks; }
__device__ __forceinline__ float* keys_of(const Delta& p, int slot, int layer, int head) {
  return p.lacking + slot * p.lacking_stride + (long long)layer * LACKING + head % KEY_HEADS * (LACKS * DIM);
}
__device__ __forceinline__ float* lacking_of(const Delta& p, int slot, int layer, int share) {   // share: of its sequence
  return p.lacking + slot * p.lacking_stride + (long long)layer * LACKING + KEYS_LACKING + share * SHARE_LACKING;
}
// The rows that columns lack, as `step` left them. keys: [LACKS][DIM]; lacking: of the share.
__device__ __forceinline__ void catch_up(Columns<Flow::NUM>& s, const float* keys, const float* lacking, int rows, int column, int j) {
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    float4 k[VALUES / 4];
    load_lane(k, keys + r * DIM, j);
#pragma unroll
    for (int c = 0; c < Flow::NUM; ++c) s.advance(c, k, lacking[LEARNED_AT + r * Flow::COLUMNS + column + c], lacking[r]);
  }
}

// Of a share: where it lies, and what a thread convolves.
struct Share {
  int head, slice;
  Span span;
  Taps taps[Flow::EACH];
  float raw[Flow::EACH], alpha, beta, a, dt_bias;

  __device__ __forceinline__ void find(const Delta& p, int share) {
    head = share % HEAD_SHARES / Flow::SLICES, slice = share % Flow::SLICES;
    span = one_row(p, share / HEAD_SHARES);
  }
  __device__ __forceinline__ bool keeps_key() const { return head < KEY_HEADS && slice == 0; }
  __device__ __forceinline__ float* keys(const Delta& p) const { return keys_of(p, span.slot, p.layer, head); }
  __device__ __forceinline__ float* lacking(const Delta& p) const { return lacking_of(p, span.slot, p.layer, head * Flow::SLICES + slice); }
  __device__ __forceinline__ float* state(const Delta& p) const { return state_of(p, span.slot, p.layer, head) + (long long)slice * STATE_FLOATS; }
  __device__ __forceinline__ int channel(int e) const { return channel_of<Flow>(min((int)threadIdx.x + e * Flow::THREADS, Flow::BLOCK_CHANNELS - 1), head, slice); }
  __device__ __forceinline__ bool has_gates() const { return threadIdx.x == Flow::THREADS - 1; }

  // Nothing that an earlier kernel of the pass makes.
  __device__ __forceinline__ void look_back(const Delta& p) {
    a = p.a[head], dt_bias = p.dt_bias[head];
#pragma unroll
    for (int e = 0; e < Flow::EACH; ++e) taps[e].load(p.conv, window_of(p, span.slot, p.layer), span.position, channel(e));
  }
  __device__ __forceinline__ void read(const Delta& p) {
    const float* y = p.y + (long long)span.first * p.y_stride;
#pragma unroll
    for (int e = 0; e < Flow::EACH; ++e) raw[e] = __ldcg(y + channel(e));
    if (has_gates()) alpha = __ldcg(y + p.alpha_offset + head), beta = __ldcg(y + p.beta_offset + head);
  }
  // Convolution and gates into shared memory. One block keeps each channel.
  __device__ __forceinline__ void prepare(const Delta& p, Flowing& in, int side) {
    float* window = window_of(p, span.slot, p.layer) + window_row(span.position) * CHANNELS;
#pragma unroll
    for (int e = 0; e < Flow::EACH; ++e) {
      const int i = threadIdx.x + e * Flow::THREADS;
      if (i >= Flow::BLOCK_CHANNELS) break;
      if (i >= 2 * DIM || keeps_key()) window[channel(e)] = raw[e];
#pragma unroll
      for (int n = 0; n < WINDOW; ++n) taps[e].past[n] = taps[e].past[n + 1];
      taps[e].past[WINDOW] = raw[e];
      float* target = i < DIM ? in.q[side] + i : i < 2 * DIM ? in.k[side] + i - DIM : in.v[side] + i - 2 * DIM;
      *target = convolve(taps[e].taps, taps[e].past);
    }
    if (has_gates()) in.gates[side].decay = decay_of(alpha, a, dt_bias), in.gates[side].beta = sigmoid(beta);
  }
};

// copy_whole of what is not read again soon: the second cache may forget it first.
__device__ __forceinline__ void copy_once(void* shared, const void* global, int bytes, uint64_t* arrival) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], p; }" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(arrival))
      : "memory");
#else
  copy_whole(shared, global, bytes, arrival);
#endif
}

// One thread.
__device__ __forceinline__ void bring(const Delta& p, Flowing& in, int place, int share) {
  Share of;
  of.find(p, share);
  const int lacks = p.lacks[of.span.first], rows = rows_of(lacks), keys = rows * DIM * 4, learned = rows ? (LEARNED_AT + rows * Flow::COLUMNS) * 4 : 0;
  in.lacks[place] = lacks;
  arrival_announce(in.there + place, STATE_FLOATS * 4 + keys + learned);
  copy_once(in.state[place], of.state(p), STATE_FLOATS * 4, in.there + place);
  if (rows == 0) return;
  copy_whole(in.keys[place], of.keys(p), keys, in.there + place);
  copy_whole(in.lacking[place], of.lacking(p), learned, in.there + place);
}

// The head whose last columns a share is: one warp.
__device__ __forceinline__ void leave_head(const Delta& p, int share) {
  const int row = share / HEAD_SHARES, head = share % HEAD_SHARES / Flow::SLICES;
  const float4 norm = load_norm(p), z = load_z(p, row, head);   // on their way beside the words
  leave_head(p, row, head, [&] { return gate_of(norm, z); });
}

extern "C" __global__ void __launch_bounds__(Flow::THREADS, 2) delta_flow(const __grid_constant__ Delta p) {
  SHARED_BYTES(bytes);
  Flowing& in = *reinterpret_cast<Flowing*>(bytes);
  const int shares = p.num_seqs * HEAD_SHARES, column = threadIdx.x / LANES * Flow::NUM, j = threadIdx.x % LANES;
  allow_next();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) arrival_init(in.there + i, 1);
    arrival_publish();
#pragma unroll
    for (int i = 0; i < PLACES; ++i)
      if ((int)(blockIdx.x + i * gridDim.x) < shares) bring(p, in, i, blockIdx.x + i * gridDim.x);
  }
  Share next;
  next.find(p, blockIdx.x);
  next.look_back(p);
  wait_for_earlier();
  next.read(p);
  __syncthreads();   // the barriers are there
  int place = 0, phase = 0, side = 0;
#pragma unroll 1
  for (int share = blockIdx.x; share < shares; share += gridDim.x) {
    float* out = p.out + (long long)next.span.first * p.out_stride + next.head * DIM + next.slice * Flow::COLUMNS + column;
    next.prepare(p, in, side);
    arrival_wait(in.there + place, phase);
    Columns<Flow::NUM> s;
#pragma unroll
    for (int c = 0; c < Flow::NUM; ++c) load_lane(s.s[c], in.state[place] + (column + c) * DIM, j);
    const int lacks = in.lacks[place];
    catch_up(s, in.keys[place][0], in.lacking[place], rows_of(lacks), column, j);
    __syncthreads();   // nobody needs this place any more, nor what lies on the other side
    float* kept = lacks < 0 ? next.state(p) + column * DIM : next.lacking(p) + LEARNED_AT + lacks * Flow::COLUMNS + column;   // the state, or what it lacks
    if (lacks >= 0) {
      if (next.keeps_key() && threadIdx.x < DIM) next.keys(p)[lacks * DIM + threadIdx.x] = in.k[side][threadIdx.x];
      if (threadIdx.x == 0) next.lacking(p)[lacks] = in.gates[side].decay;
    }
    if (threadIdx.x == 0 && (int)(share + PLACES * gridDim.x) < shares) bring(p, in, place, share + PLACES * gridDim.x);
    if ((int)(share + gridDim.x) < shares) next.find(p, share + gridDim.x), next.look_back(p), next.read(p);
    Row<Flow::NUM> row;
    row.load(in.q[side], in.k[side], in.v[side] + column, in.gates[side], j);
    float o[Flow::NUM], learned[Flow::NUM];
    s.step(row, o, learned);
#pragma unroll
    for (int c = 0; c < Flow::NUM; ++c)
      if (j == c % LANES) {
        put(p, out + c, o[c]);
        if (lacks >= 0) kept[c] = learned[c];
      }
    if (lacks < 0) s.store<true>(kept, j);
    side ^= 1;
    if (++place == PLACES) place = 0, ++phase;
  }
  if (leaves(p))   // at the end, a head a warp: between two shares every warp would wait for the one that has a head's words to wait for
    for (int share = blockIdx.x + threadIdx.x / 32 * gridDim.x; share < shares; share += Flow::THREADS / 32 * gridDim.x)
      if (share % Flow::SLICES == Flow::SLICES - 1) leave_head(p, share);
}

constexpr int MAX_SETTLED = 64;
struct Settle {
  Delta delta;
  int slots[MAX_SETTLED], rows[MAX_SETTLED];
};

// States with the rows that they lack.
extern "C" __global__ void __launch_bounds__(Flow::THREADS) delta_settle(const __grid_constant__ Settle p) {
  const int slot = p.slots[blockIdx.y], layer = blockIdx.z, head = blockIdx.x / Flow::SLICES, column = threadIdx.x / LANES * Flow::NUM, j = threadIdx.x % LANES;
  float* state = state_of(p.delta, slot, layer, head) + (long long)(blockIdx.x % Flow::SLICES) * STATE_FLOATS + column * DIM;
  Columns<Flow::NUM> s;
  s.load(state, j);
  catch_up(s, keys_of(p.delta, slot, layer, head), lacking_of(p.delta, slot, layer, blockIdx.x), p.rows[blockIdx.y], column, j);
  s.store(state, j);
}
