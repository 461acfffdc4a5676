// attend_decode: causal attention of few rows, split over the context; attend_merge, attend_merge_many: the splits of a row, turned
// back, and the output gate.
// Reference: reference.attend      Used by: layers.run_layer, after attend_rows
// Shapes:    q_half [rows, A, D], the cache, gates of y [rows, 2 A D + 2 G D] f32 -> out [rows, A D] f32, or left ready (ready.cuh)
// Layout:    kv_format.cuh
// Launch:    attend_decode_*: grid (blocks, which take items until none is left), block (Plan::THREADS), shared
//            at least Plan::BYTES; attend_merge: grid (rows, heads, HEAD_DIM / MERGE_DIMS), block (256)
// Defines:   HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_DIM, KV_FORMAT, CUT_0..3, BORDER_0..2, WIDE
// Limits:    at most 1, 4, 8 (16) rows of a sequence an item; without attend_rows before them attend_decode_own (one row of each sequence)
//            and attend_decode_make (up to 32 sequences in one launch, items of up to 4 rows)
// Numbers:   fp16 products, f32 sums and softmax. Keys are cut at fixed positions into cuts, and these into tiles of 64; a row
//            sees both in ascending order, and those past it change nothing: its bits do not depend on other rows. The merge
//            adds each eighth cut, then the eight sums in order. Bound: memory.
//
// An item is (sequence, group of rows, key head, cut): all query heads of the key head and all rows, the columns, share one
// read of the keys. A warp multiplies 16 keys of a tile with its share of the columns, then all weights with its share of the
// values' dimensions: quarters or eighths; where there are more warps than these, they share the columns. Keys and dimensions
// stand as rows of the products, so that a key or value is expanded in registers.
#if WARPGROUPS
#include "attend_few_warpgroup.cuh"
#else
#include "attend_few_warp.cuh"
#endif

template <int ROWS, Maker MAKER = Maker::ATTEND_ROWS> __device__ __forceinline__ void attend_items(const Attend& p) {
  SHARED_BYTES(dynamic);
  using C = Columns<ROWS, MAKER>;
  unsigned char* shared = dynamic + C::M::TABLE;
  shared += (ALIGNED - reinterpret_cast<uintptr_t>(shared) % ALIGNED) % ALIGNED;
  if constexpr (TURNED_KEYS) PairTable<C::M::COPIES>::template fill<C::THREADS>(dynamic);
  Item& item = *reinterpret_cast<Item*>(shared + C::M::ITEM);
  allow_next();
  C columns = {p, shared, dynamic};
  columns.start_arrivals();
  int index = blockIdx.x;
#pragma unroll 1
  while (true) {
    if (threadIdx.x < 32) find_item<ROWS>(p, index, item);
    __syncthreads();
    if (!item.found) return;
    columns.attend(item, index == (int)blockIdx.x);
    index = item.next;
    __syncthreads();
  }
}

#define MAKES_ROWS (WARPGROUPS && KV_FORMAT == 1 && HEAD_DIM == 256 && ROTARY_DIM == 64 && NUM_HEADS / NUM_KV_HEADS % 2 == 0)   // attend_make.cuh
#if MAKES_ROWS
// Items whose blocks make their rows: seldom more than one a block.
template <int ROWS> __device__ __forceinline__ void attend_made(const Attend& p, const Sequences& sequences) {
  SHARED_BYTES(dynamic);
  Item item;
#pragma unroll 1
  for (int index = blockIdx.x; sequences.find<ROWS>(index, item); index += gridDim.x) {
    Columns<ROWS, Maker::EACH_BLOCK> columns = {p, dynamic + (ALIGNED - reinterpret_cast<uintptr_t>(dynamic) % ALIGNED) % ALIGNED, dynamic};
    columns.attend(item, true);
    __syncthreads();
  }
}
// Of as few rows as let all of them begin at once: there are more of them at work, and a block makes fewer rows.
__device__ __forceinline__ void attend_and_make(const Attend& p) {
  allow_next();
  const Sequences sequences(p);
  if (sequences.items(1) <= (int)gridDim.x) attend_made<1>(p, sequences);
  else if (sequences.items(2) <= (int)gridDim.x) attend_made<2>(p, sequences);
  else attend_made<4>(p, sequences);
}
#endif

extern "C" __global__ void __launch_bounds__(128, 4) attend_decode_1(const __grid_constant__ Attend p) { attend_items<1>(p); }
extern "C" __global__ void __launch_bounds__(128, 3) attend_decode_4(const __grid_constant__ Attend p) { attend_items<4>(p); }
#if WARPGROUPS
#if KV_FORMAT == 1
extern "C" __global__ void __launch_bounds__(128, 4) attend_decode_own(const __grid_constant__ Attend p) { attend_items<1, Maker::ONE_ROW>(p); }
#endif
#if MAKES_ROWS
extern "C" __global__ void __launch_bounds__(128, 2) attend_decode_make(const __grid_constant__ Attend p) { attend_and_make(p); }
#endif
extern "C" __global__ void __launch_bounds__(128, 2) attend_decode_8(const __grid_constant__ Attend p) { attend_items<8>(p); }
#else
extern "C" __global__ void __launch_bounds__(256, WIDE ? 2 : 1) attend_decode_8(const __grid_constant__ Attend p) { attend_items<8>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_decode_16(const __grid_constant__ Attend p) { attend_items<16>(p); }
#endif

#if __CUDA_ARCH__ == 800
constexpr int MERGE_BLOCKS = 4;   // of a multiprocessor; more spill
#else
constexpr int MERGE_BLOCKS = 6;
#endif
constexpr int MERGE_DIMS = HEAD_DIM >= 128 ? 128 : HEAD_DIM, MERGE_WARPS = 8, PER_LANE = MERGE_DIMS / 32;

// A lane's share of what a cut left.
struct Part {
  float2 ml, two[PER_LANE / 2];
  __device__ __forceinline__ void load(const Attend& p, long long index, int first) {
    ml = __ldcg(reinterpret_cast<const float2*>(p.part_ml) + index);
#pragma unroll
    for (int i = 0; i < PER_LANE / 2; ++i) two[i] = __ldcg(reinterpret_cast<const float2*>(p.part_o + index * HEAD_DIM + first) + i);
  }
  __device__ __forceinline__ void add(float top, float& sum, float (&value)[PER_LANE]) const {
    const float share = ml.x == -INFINITY ? 0.0f : exp2f(ml.x - top);
    sum = fmaf(share, ml.y, sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) value[i] = fmaf(share, i % 2 ? two[i / 2].y : two[i / 2].x, value[i]);
  }
};

// A lane's columns of a row as the next stage reads them, from `place` on. The whole warp calls. The scale is known from the weights;
// a cache that was filled by other means saturates.
__device__ __forceinline__ void leave_ready(const Ready& ready, int row, int place, const float (&value)[PER_LANE]) {
  const bool is_second = place & 4;
  const float scale = is_second ? __fmul_rn(ready.scale, 0.0625f) : ready.scale;
  uint32_t words[PER_LANE / 2];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE / 2; ++i) {
    words[i] = half2_from_floats(to_half_range(__fmul_rn(value[2 * i], scale)), to_half_range(__fmul_rn(value[2 * i + 1], scale)));
    sum = __fadd_rn(sum, __fadd_rn(half_to_float((uint16_t)words[i]), half_to_float((uint16_t)(words[i] >> 16))));
  }
  if (!is_second) sum = __fmul_rn(sum, 0.0625f);
#pragma unroll
  for (int distance = 8 / PER_LANE; distance > 0; distance >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
  if constexpr (PER_LANE == 4) *reinterpret_cast<uint2*>(ready.half(row, place)) = make_uint2(words[0], words[1]);
  else *reinterpret_cast<uint32_t*>(ready.half(row, place)) = words[0];
  if (place % 16 == 0) {
    const uint16_t high = half_from_float(sum), low = half_from_float(__fsub_rn(sum, half_to_float(high)));
    reinterpret_cast<uint32_t*>(ready.record(row, place) + READY_SUMS)[(row >> 3 & 1) * 32 + ready.lane_of(row, place)] = high | (uint32_t)low << 16;
  }
}

// Sums of each eighth cut by a warp, then the eight in order.
__device__ __forceinline__ void merge_cuts(const Attend& p) {
  __shared__ float values[MERGE_WARPS][MERGE_DIMS], sums[MERGE_WARPS], tops[MERGE_WARPS];
  allow_next();
  const int row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int cuts = cuts_of(p.positions[row] + 1), first = blockIdx.z * MERGE_DIMS + PER_LANE * lane;
  const long long base = (long long)row * p.max_splits * NUM_HEADS + head;
  const float2* ml = reinterpret_cast<const float2*>(p.part_ml);
  const float* gates = p.y + (long long)row * p.y_stride + (2 * head + 1) * HEAD_DIM + first;
  float top = -INFINITY, sum = 0.0f, value[PER_LANE], gate[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) value[i] = 0.0f;
  wait_for_earlier();
  if (row == 0 && head == 0 && blockIdx.z == 0 && threadIdx.x == 0) *p.counter = 0;   // before another attend_decode has waited
  Part next = {}, part;
  if (warp < cuts) next.load(p, base + (long long)warp * NUM_HEADS, first);   // on its way while the largest is found
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) gate[i] = warp ? 0.0f : __ldcg(gates + i);
  for (int cut = threadIdx.x; cut < cuts; cut += 32 * MERGE_WARPS) top = fmaxf(top, __ldcg(ml + base + (long long)cut * NUM_HEADS).x);
  top = warp_max(top);
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < MERGE_WARPS; ++w) top = fmaxf(top, tops[w]);
  if (top != -INFINITY && warp < cuts) {
    next.add(top, sum, value);
#pragma unroll 4
    for (int cut = warp + MERGE_WARPS; cut < cuts; cut += MERGE_WARPS) {
      part.load(p, base + (long long)cut * NUM_HEADS, first);
      part.add(top, sum, value);
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) values[warp][PER_LANE * lane + i] = value[i];
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int w = 1; w < MERGE_WARPS; ++w) {
    sum = __fadd_rn(sum, sums[w]);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) value[i] = __fadd_rn(value[i], values[w][PER_LANE * lane + i]);
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) value[i] = sum > 0.0f ? value[i] / sum : 0.0f;
  if constexpr (TURNED_VALUES) turn_back(value);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) value[i] *= sigmoid(gate[i]);
  if (p.ready.units) return leave_ready(p.ready, p.ready_row + row, head * HEAD_DIM + first, value);
  float* target = p.out + (long long)row * p.out_stride + head * HEAD_DIM + first;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) target[i] = value[i];
}

extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS) attend_merge(const __grid_constant__ Attend p) { merge_cuts(p); }
// With fewer registers, for so many rows that not all blocks would begin at once.
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS, MERGE_BLOCKS) attend_merge_many(const __grid_constant__ Attend p) { merge_cuts(p); }
