// Rows of a pass made where they are attended, so that attend_rows need not run before: every block makes the queries of its item, and what its
// cut lacks of the pass's keys and values; those with the same keys write the same bytes to the cache.
// Reference: reference.attention_inputs      Numbers: those of attend_rows, to the bit
// Bound: latency.
#pragma once
#include "attend_few.cuh"

// A sequence of the pass by each lane, and the cuts that hold its keys; of one alone every lane has it.
struct Sequences {
  int seq, first, end, position, cuts;
  bool is_alone;

  __device__ __forceinline__ explicit Sequences(const Attend& p) : seq(0), first(0), end(p.rows), is_alone(p.num_seqs == 1) {
    if (!is_alone) {
      seq = threadIdx.x & 31;
      first = seq < p.num_seqs ? p.row_starts[seq] : 0, end = seq < p.num_seqs ? p.row_starts[seq + 1] : 0;
    }
    position = first < end ? p.positions[first] : 0;
    cuts = first < end ? cuts_of(position + end - first) : 0;
  }
  __device__ __forceinline__ int items_here(int rows) const { return cuts * NUM_KV_HEADS * ((end - first + rows - 1) / rows); }
  // How many items of up to `rows` rows the pass has.
  __device__ __forceinline__ int items(int rows) const {
    int sum = items_here(rows);
    if (!is_alone)
#pragma unroll
      for (int distance = 16; distance > 0; distance >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    return sum;
  }
  // The item of number `index`, if there are so many.
  template <int ROWS> __device__ __forceinline__ bool find(int index, Item& item) const {
    Sequences of = *this;
    if (is_alone) {
      if (index >= items_here(ROWS)) return false;
    } else {
      int past = items_here(ROWS);   // items of the sequences up to this one
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int others = __shfl_sync(ALL_LANES, past, seq - distance);
        if (seq >= distance) past += others;
      }
      if (index >= __shfl_sync(ALL_LANES, past, 31)) return false;
      int before = past <= index;   // sequences
#pragma unroll
      for (int distance = 16; distance > 0; distance >>= 1) before += __shfl_xor_sync(ALL_LANES, before, distance);
      index -= __shfl_sync(ALL_LANES, past - items_here(ROWS), before);
      of.seq = before, of.first = __shfl_sync(ALL_LANES, first, before), of.end = __shfl_sync(ALL_LANES, end, before);
      of.position = __shfl_sync(ALL_LANES, position, before), of.cuts = __shfl_sync(ALL_LANES, cuts, before);
    }
    const int groups = (of.end - of.first + ROWS - 1) / ROWS, head = index % NUM_KV_HEADS, rest = index / NUM_KV_HEADS;
    const int cut = (int)__fdividef((float)rest + 0.5f, (float)groups), group = rest - cut * groups;   // exact: few thousand at most
    item.seq = of.seq, item.first_row = of.first + group * ROWS, item.rows = min(ROWS, of.end - item.first_row), item.head = head, item.cut = cut;
    item.position = of.position + group * ROWS, item.old = of.position, item.start = cut_start(cut), item.end = min(cut_start(cut + 1), item.position + item.rows);
    return true;
  }
};

constexpr int HEADS_AT_ONCE = 2;   // of a warp: GROUP is even, so that both are queries of a row or both keys
struct TwoHeads {
  float value[HEADS_AT_ONCE][HEAD_DIM / 32];
  float2 angle[HEADS_AT_ONCE];

  // As norm_rope, with all numbers in registers.
  __device__ __forceinline__ void norm_rope(float eps, const float (&weight)[HEAD_DIM / 32]) {
    float squares[HEADS_AT_ONCE] = {};
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n)
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; ++i) squares[n] = fmaf(value[n][i], value[n][i], squares[n]);
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
#pragma unroll
      for (int n = 0; n < HEADS_AT_ONCE; ++n) squares[n] = __fadd_rn(squares[n], __shfl_xor_sync(ALL_LANES, squares[n], distance));
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n) {
      const float rms = rsqrtf(squares[n] / (float)HEAD_DIM + eps);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; ++i) value[n][i] = value[n][i] * rms * weight[i];
      const float a = value[n][0], b = value[n][1];   // dimensions d and d + ROTARY_DIM / 2 are in one lane
      value[n][0] = fmaf(a, angle[n].x, -__fmul_rn(b, angle[n].y));
      value[n][1] = fmaf(b, angle[n].x, __fmul_rn(a, angle[n].y));
    }
  }
};

// What a block makes of its item. Block: Columns, which knows where things lie in shared memory. What is known before the earlier kernel ends is
// computed by then.
template <class Block> struct MadeRows {
  static_assert(!Block::MAKES || (ROTARY_DIM == 64 && HEAD_DIM == 256 && GROUP % HEADS_AT_ONCE == 0 && KEY_CODE == CODE_FP8 && VALUE_CODE == CODE_FP8), "a lane's numbers, plain rows");
  static constexpr int PER_LANE = HEAD_DIM / 32, HALF = ROTARY_DIM / 2, FOURS = HEAD_DIM / 4, CHUNKS = K_ROW / 16;
  static constexpr int TURN = HEADS_AT_ONCE * KEY_WARPS, PLACES = 2;   // heads at a time, and places of a warp for those on their way
  static constexpr int ROWS_AT_ONCE = Block::THREADS / FOURS, VALUES_AT_ONCE = 4;   // of values: rows side by side, and of a thread
  const Attend& p;
  const Block& to;
  const Item& item;
  unsigned lane, warp;
  int queries, heads;         // of the item, and with keys of this pass
  int count, row, local;      // these keys: how many, the first one's row and its place in the cut
  unsigned slot;              // and its place in the block
  unsigned char *block, *next;   // of the cache, that hold the first and the last of them

  __device__ __forceinline__ MadeRows(const Attend& attend, const Block& columns, const Item& it) : p(attend), to(columns), item(it) {
    const unsigned thread = threadIdx.x;
    lane = thread & 31, warp = thread >> 5;
    const int first = max(item.old, item.start);
    count = max(0, item.end - first), queries = item.rows * GROUP, heads = queries + count;
    row = item.first_row - item.position + first, local = first - item.start, slot = (unsigned)first % BLOCK_POSITIONS;
    block = next = nullptr;
    if (count > 0) block = kv_block(p, item.seq, first), next = kv_block(p, item.seq, item.end - 1);
  }

  // Rows of the first tiles that are of earlier passes, on their way; values that no row has are zeros.
  __device__ __forceinline__ void fetch_tiles() const {
    const int key = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, from = p.first_position - item.start;
    constexpr int STEP = Block::THREADS / CHUNKS;
    static_assert(STEP % 4 == 0, "places of a thread's chunks differ by whole rows");
#pragma unroll
    for (int tile = 0; tile < Block::M::KEY_RING; ++tile) {
      if (tile * KEYS >= min(local, item.end - item.start)) break;
      const unsigned char* source = kv_block(p, item.seq, item.start + tile * KEYS) + item.head * K_HEAD + threadIdx.x * 16;
      unsigned char* target = to.key_tile(tile) + key * K_ROW + key_chunk(key, chunk) * 16;
#pragma unroll
      for (int i = 0; i < KEYS; i += STEP)
        if (tile * KEYS + key + i < local) copy_async_16(target + i * K_ROW, source + i * K_ROW);
    }
    unsigned char* target = to.value_tile(0) + key * V_ROW + value_chunk(key, chunk) * 16;
    const unsigned char* source = kv_block(p, item.seq, item.start) + KV_VALUES + item.head * V_HEAD + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < KEYS; i += STEP) {
      if (key + i < local && key + i >= from) copy_async_16(target + i * V_ROW, source + i * V_ROW);
      else if (key + i >= local + count || key + i < local) *reinterpret_cast<uint4*>(target + i * V_ROW) = make_uint4(0, 0, 0, 0);
    }
    copy_async_commit();
  }

  // Columns that no row has, which ask nobody.
  __device__ __forceinline__ void clear_queries() const {
    constexpr int EIGHTS = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < (Block::COLUMNS - queries) * EIGHTS; i += Block::THREADS)
      *reinterpret_cast<uint4*>(to.query_row(queries + i / EIGHTS, i % EIGHTS / 8) + i % 8 * 16) = make_uint4(0, 0, 0, 0);
    for (int column = queries + threadIdx.x; column < Block::COLUMNS; column += Block::THREADS) to.at(Block::M::FACTOR)[column] = 1.0f;
  }

  // Heads `head` and the next: queries of a row, by rows, and behind all of these keys of two; past the last they are the last one.
  struct Two {
    const float* source;   // of a lane
    int step;              // from one to the other
    const float2 *angle, *other;
  };
  __device__ __forceinline__ Two two(int head) const {
    head = min(head, heads - 1);
    const bool is_query = head < queries;
    const int key = head - queries, of = is_query ? item.first_row + head / GROUP : row + key, next = !is_query && key + 1 < count;
    const int place = is_query ? (item.head * GROUP + head % GROUP) * 2 * HEAD_DIM : (2 * NUM_HEADS + item.head) * HEAD_DIM;
    const float2* angle = reinterpret_cast<const float2*>(p.rope) + of * HALF + lane;
    return {p.y + (long long)of * p.y_stride + place + 4 * lane, is_query ? 2 * HEAD_DIM * (head + 1 < queries) : next * p.y_stride, angle, angle + next * HALF};
  }
  __device__ __forceinline__ float* place(int turn) const { return to.made_place(warp * PLACES + turn % PLACES); }
  // On their way to a place.
  __device__ __forceinline__ void fetch(const Two& from, float* place) const {
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n)
#pragma unroll
      for (int i = 0; i < HEAD_DIM; i += 128) copy_async_16(place + n * HEAD_DIM + i + 4 * lane, from.source + n * from.step + i);
  }

  // As write_query, to where the products read them; the factor in powers of two.
  __device__ __forceinline__ void leave_queries(int column, const TwoHeads& from) const {
    const bool is_odd = lane & 1;
    float largest[HEADS_AT_ONCE];
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n) {
      largest[n] = fabsf(from.value[n][0]);
#pragma unroll
      for (int i = 1; i < PER_LANE; ++i) largest[n] = fmaxf(largest[n], fabsf(from.value[n][i]));
    }
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n) {
      const float scale = half_range_scale(warp_max_positive(largest[n]));
      uint32_t* words = to.query_place(column + n, lane + 31 * is_odd);
#pragma unroll
      for (int i = 0; i < PER_LANE; i += 2) {   // a lane and its neighbour have two neighbours among the numbers twice
        const float one = from.value[n][i] * scale, two = from.value[n][i + 1] * scale, other = __shfl_xor_sync(ALL_LANES, is_odd ? one : two, 1);
        words[i / 2 * (Block::COLUMNS * 32)] = half2_from_floats(is_odd ? other : one, is_odd ? two : other);
      }
      if (lane == 0) to.at(Block::M::FACTOR)[column + n] = power_inverse(scale) * rsqrtf((float)HEAD_DIM) * 1.4426950408889634f;
    }
  }

  // Four numbers of a key or value of this pass into the cache, and into a tile that was fetched without it. offset: of the head in the block.
  __device__ __forceinline__ void leave_four(int key, int offset, unsigned char* tile, bool is_near, const float4& four) const {
    const uint32_t word = e4m3x2_from_floats(four.x, four.y) | e4m3x2_from_floats(four.z, four.w) << 16;
    unsigned char* cache = slot + key < BLOCK_POSITIONS ? block : next - BLOCK_POSITIONS * K_ROW;
    *reinterpret_cast<uint32_t*>(cache + offset + (slot + key) * K_ROW) = word;
    if (is_near) *reinterpret_cast<uint32_t*>(tile) = word;
  }
  // place: where they came from.
  __device__ __forceinline__ void leave_keys(int key, const TwoHeads& from, float* place) const {
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n)
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) place[n * HEAD_DIM + lane + 32 * i] = from.value[n][i];
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; ++n, ++key) {
      if (key >= count) break;
      const unsigned at = local + key;
#pragma unroll
      for (unsigned d = 0; d < HEAD_DIM; d += 128)
        leave_four(key, item.head * K_HEAD + d + 4 * lane, to.key_tile(0) + at * K_ROW + key_chunk(at, (d + 4 * lane) / 16) * 16 + lane % 4 * 4, at < Block::M::KEY_RING * KEYS,
                   *reinterpret_cast<const float4*>(place + n * HEAD_DIM + d + 4 * lane));
    }
  }
  __device__ __forceinline__ void load_values(int from, float4 (&four)[VALUES_AT_ONCE]) const {
    const int key = from + threadIdx.x / FOURS;
    const float* source = value_of(p, row + key, item.head) + threadIdx.x % FOURS * 4;
#pragma unroll
    for (int n = 0; n < VALUES_AT_ONCE; ++n, source += ROWS_AT_ONCE * p.y_stride)
      if (key + n * ROWS_AT_ONCE < count) four[n] = *reinterpret_cast<const float4*>(source);
  }
  __device__ __forceinline__ void leave_values(int from, const float4 (&four)[VALUES_AT_ONCE]) const {
    const unsigned d = threadIdx.x % FOURS * 4;
    int key = from + threadIdx.x / FOURS;
#pragma unroll
    for (int n = 0; n < VALUES_AT_ONCE; ++n, key += ROWS_AT_ONCE) {
      if (key >= count) break;
      const unsigned at = local + key;
      leave_four(key, KV_VALUES + item.head * V_HEAD + d, to.value_tile(0) + at * V_ROW + value_chunk(at, d / 16) * 16 + d % 16, at < KEYS, four[n]);
    }
  }

  // From the earlier kernel's rows.
  __device__ __forceinline__ void make() const {
    float4 four[VALUES_AT_ONCE];
    float q_norm[PER_LANE], k_norm[PER_LANE];
    TwoHeads from;
    float2 angle[HEADS_AT_ONCE];
    int head = HEADS_AT_ONCE * warp;
    const Two begin = two(head), second = two(head + TURN);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) q_norm[i] = p.q_norm[lane + 32 * i], k_norm[i] = p.k_norm[lane + 32 * i];
    from.angle[0] = *begin.angle, from.angle[1] = *begin.other, angle[0] = *second.angle, angle[1] = *second.other;
    wait_for_earlier();
    fetch(begin, place(0)), copy_async_commit();
    fetch(second, place(1)), copy_async_commit();
    load_values(0, four);
#pragma unroll 1
    for (int turn = 0; head < heads; ++turn, head += TURN) {
      float* at = place(turn);
      const bool is_query = head < queries;
      float weight[PER_LANE];
      copy_async_wait<PLACES - 1>();
      __syncwarp();
#pragma unroll
      for (int n = 0; n < HEADS_AT_ONCE; ++n)
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) from.value[n][i] = at[n * HEAD_DIM + lane + 32 * i];
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) weight[i] = is_query ? q_norm[i] : k_norm[i];
      from.norm_rope(p.eps, weight);
      if (is_query) leave_queries(head, from);
      else leave_keys(head - queries, from, at);
      __syncwarp();
#pragma unroll
      for (int n = 0; n < HEADS_AT_ONCE; ++n) from.angle[n] = angle[n];
      if (head + PLACES * TURN < heads) {
        const Two more = two(head + PLACES * TURN);
        fetch(more, at);
        angle[0] = *more.angle, angle[1] = *more.other;
      }
      copy_async_commit();
    }
    copy_async_wait<0>();
#pragma unroll 1
    for (int done = 0; done < count; done += VALUES_AT_ONCE * ROWS_AT_ONCE) {
      if (done) load_values(done, four);
      leave_values(done, four);
    }
  }
};
