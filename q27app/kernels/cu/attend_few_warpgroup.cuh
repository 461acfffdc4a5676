// Few rows by a warpgroup (compute capability 9.0): keys, and dimensions of values, are the 64 rows of a product, expanded in registers
// once for all columns; queries and weights lie in shared memory. Two groups of products are on their way at a time, and none from one
// round to the next: nvcc 13.0 would make each product wait (C7515).
//
// Weights are taken against a reference: the largest score of a column's tile when it was last raised, and HEADROOM powers of two
// above it. A tile seldom asks for more; then its weights are made anew against raised ones.
#pragma once
#include "attend_make.cuh"
#include "warpgroup.cuh"

constexpr int DIM_TILES = HEAD_DIM / 64, AT_ONCE = 4;   // of 64 dimensions; products of a group
constexpr int KEY_GROUPS = K_STEPS / AT_ONCE, ALIGNED = 1024;
constexpr float HEADROOM = 4.0f, NO_REFERENCE = -1e30f;
constexpr bool WHOLE_TILES = TURNED_KEYS && TURNED_VALUES;   // lie in the cache as in shared memory: a copy for all of it
constexpr bool EARLY_TILES = !TURNED_KEYS && !TURNED_VALUES;   // rows of this pass come apart from those before them

// How a block works, by the rows of its items, and where things lie in shared memory. Rings: tiles on their way or in use; norms of
// turned values are used a round before the values.
template <int ROWS> struct Plan {
  static constexpr int WARPS = 4, THREADS = 128, NEEDED = (ROWS * GROUP + 7) / 8;
  static constexpr int GROUPS = NEEDED <= 4 ? NEEDED : NEEDED <= 6 ? 6 : 8, COLUMNS = 8 * GROUPS;
  static constexpr int KEY_RING = 2, VALUE_RING = TURNED_VALUES ? 3 : 2, WEIGHTS = COLUMNS * KEYS * 2;   // bytes of a tile's weights
  static constexpr int Q = 0, P = COLUMNS * HEAD_DIM * 2, TILE_KEYS = P + 2 * P_COPIES * WEIGHTS, TILE_VALUES = TILE_KEYS + KEY_RING * K_HEAD;
  static constexpr int LARGEST = TILE_VALUES + VALUE_RING * V_HEAD, FACTOR = LARGEST + KEY_WARPS * COLUMNS * 4;
  static constexpr int REFERENCE = FACTOR + COLUMNS * 4, RAISED = REFERENCE + KEY_WARPS * COLUMNS * 4;
  static constexpr int COPIES = ROWS == 1 && KEY_CODE == CODE_5 ? 4 : 1, TABLE = PairTable<COPIES>::BYTES;
  static constexpr int ITEM = RAISED + 32, ARRIVALS = ITEM + 48, BYTES = TABLE + ARRIVALS + 16 + ALIGNED;
  static_assert(NEEDED <= 8, "at most 64 columns");
};

// Thread (g, c) of warp w holds, of each 8 columns, the columns 2 c and 2 c + 1: scores of keys 16 w + g and 8 above, and sums of dimensions
// as in value_tiles, w being the slice.
template <int ROWS, Maker MAKER = Maker::ATTEND_ROWS> struct Columns {
  using M = Plan<ROWS>;
  static constexpr bool OWN = MAKER == Maker::ONE_ROW, MAKES = MAKER == Maker::EACH_BLOCK;
  static constexpr int GROUPS = M::GROUPS, COLUMNS = M::COLUMNS, THREADS = M::THREADS;
  const Attend& p;
  unsigned char* shared;
  const unsigned char* table;   // of PairTable
  float out[DIM_TILES][GROUPS][4], sum[GROUPS][2];
  uint32_t operand[2][AT_ONCE][4];   // of the products on their way, by turns
  uint32_t phases = 0;   // WHOLE_TILES: a bit for each arrival
  int block_ahead = 0;   // of the first thread: the block of the tile that is asked for next

  __device__ __forceinline__ float* at(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  __device__ __forceinline__ unsigned char* key_tile(int tile) const { return shared + M::TILE_KEYS + tile % M::KEY_RING * K_HEAD; }
  __device__ __forceinline__ unsigned char* value_tile(int tile) const { return shared + M::TILE_VALUES + tile % M::VALUE_RING * V_HEAD; }
  __device__ __forceinline__ unsigned char* weights(int tile, int copy) const { return shared + M::P + (copy * 2 + (tile & 1)) * M::WEIGHTS; }
  // This warp's references of columns.
  __device__ __forceinline__ float* reference(int warp) const { return at(M::REFERENCE) + warp * COLUMNS; }

  __device__ __forceinline__ void clear() {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2 * AT_ONCE * 4; ++i) operand[i / (AT_ONCE * 4)][i / 4 % AT_ONCE][i % 4] = 0;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
      for (int t = 0; t < DIM_TILES; ++t) out[t][n][0] = out[t][n][1] = out[t][n][2] = out[t][n][3] = 0.0f;
    }
    for (int column = thread; column < KEY_WARPS * COLUMNS; column += THREADS) at(M::REFERENCE)[column] = NO_REFERENCE;
  }

  // OWN: numbers of a warp, queries and their factors, where the second tile of values will come.
  __device__ __forceinline__ float* own_work(int warp) const { return reinterpret_cast<float*>(value_tile(1)) + warp * HEAD_DIM; }
  __device__ __forceinline__ uint16_t* own_query(int column) const { return reinterpret_cast<uint16_t*>(own_work(KEY_WARPS)) + column * HEAD_DIM; }
  __device__ __forceinline__ float* own_factor(int column) const { return reinterpret_cast<float*>(own_query(GROUP)) + column; }
  // The queries of the item's key head and, where the item holds the row itself, its key and value: into the cache, and into tiles that
  // were fetched without them.
  __device__ __forceinline__ void make_own(const Item& item, const RowPlace& to, const NormWeights& q_norm, const NormWeights& k_norm) const {
    constexpr int TASKS = GROUP + 2, TURNS = (TASKS + KEY_WARPS - 1) / KEY_WARPS;
    static_assert(!OWN || (EARLY_TILES && KEY_WARPS * HEAD_DIM * 4 + GROUP * (HEAD_DIM * 2 + 4) <= V_HEAD), "plain rows, and a tile's room");
    const int warp = threadIdx.x / 32, row = item.first_row, tasks = item.end > item.position ? TASKS : GROUP, local = item.position - item.start;
    float* work = own_work(warp);
    Turning from[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {   // all on their way before the first is needed
      const int task = warp + KEY_WARPS * i;
      if (task < tasks) from[i].load(p, task < GROUP ? query_of(p, row, item.head * GROUP + task) : key_of(p, row, item.head + (task > GROUP ? NUM_KV_HEADS : 0)), row);
    }
    __syncthreads();   // rows that a tile lacks were filled with zeros
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int task = warp + KEY_WARPS * i;
      if (task >= tasks) break;
      if (task < GROUP) {
        const float factor = write_query(p, from[i], q_norm, row, work, own_query(task));
        if (threadIdx.x % 32 == 0) *own_factor(task) = factor;
      } else if (task == GROUP) {
        norm_rope(p, from[i], k_norm, row, work);
        store_row<KEY_CODE>(work, to.key(item.head));
        if (local < M::KEY_RING * KEYS)
          store_plain<KEY_CODE>(work, [&](int byte) { return key_tile(local / KEYS) + local % KEYS * K_ROW + key_chunk(local % KEYS, byte / 16) * 16 + byte % 16; });
      } else {
#pragma unroll
        for (int j = 0; j < Turning::PER_LANE; ++j) work[threadIdx.x % 32 + 32 * j] = from[i].value[j];
        __syncwarp();
        store_row<VALUE_CODE>(work, to.value(item.head));
        if (local < KEYS) store_plain<VALUE_CODE>(work, [&](int byte) { return value_tile(0) + local * V_ROW + value_chunk(local, byte / 16) * 16 + byte % 16; });
      }
      __syncwarp();
    }
    __syncthreads();
  }

  // Queries of the item, in the order of k in which KeyRun gives keys; columns that no row has are zeros.
  __device__ __forceinline__ void load_queries(const Item& item) const {
    constexpr int EIGHTS = HEAD_DIM / 8;
    const int used = item.rows * GROUP;
    const uint16_t* queries = p.q_half + (long long)(item.first_row * NUM_HEADS + item.head * GROUP) * HEAD_DIM;
#pragma unroll 4
    for (int i = threadIdx.x; i < COLUMNS * EIGHTS; i += THREADS) {
      const int column = i / EIGHTS, eight = i % EIGHTS, run = eight * 8 / (4 * RUN), c = eight * 8 % (4 * RUN) / RUN;
      const int step = run * RUN_STEPS + eight * 8 % RUN / 4;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (column < used) value = OWN ? *reinterpret_cast<const uint4*>(own_query(column) + eight * 8) : __ldcg(reinterpret_cast<const uint4*>(queries + (column / GROUP * NUM_HEADS + column % GROUP) * HEAD_DIM + eight * 8));
      const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int s = step + j / 2, piece = s % 4 * 2 + j % 2;
        *reinterpret_cast<uint32_t*>(shared + M::Q + (s / 4 * COLUMNS + column) * 128 + (piece ^ column % 8) * 16 + 4 * c) = word[j];
      }
    }
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
      const float* factor = p.q_factor + (item.first_row + column / GROUP) * NUM_HEADS + item.head * GROUP + column % GROUP;
      at(M::FACTOR)[column] = column < used ? (OWN ? *own_factor(column) : __ldcg(factor)) * 1.4426950408889634f : 1.0f;
    }
  }

  // MAKES: a place for heads on their way, where the second tile of values will come.
  __device__ __forceinline__ float* made_place(int place) const {
    static_assert(KEY_WARPS * MadeRows<Columns>::PLACES * HEADS_AT_ONCE * HEAD_DIM * 4 <= V_HEAD, "a tile's room");
    return reinterpret_cast<float*>(value_tile(1)) + place * HEADS_AT_ONCE * HEAD_DIM;
  }
  // 64 numbers of a column's query, and where numbers `number`, even, and the next lie in load_queries' order.
  __device__ __forceinline__ unsigned char* query_row(int column, int sixty_four) const { return shared + M::Q + (sixty_four * COLUMNS + column) * 128; }
  __device__ __forceinline__ uint32_t* query_place(int column, int number) const {
    const int step = number / (4 * RUN) * RUN_STEPS + number % RUN / 4, piece = step % 4 * 2 + number % 4 / 2;
    return reinterpret_cast<uint32_t*>(query_row(column, step / 4) + (piece ^ column % 8) * 16 + number % (4 * RUN) / RUN * 4);
  }

  // The group of products before the one that was begun last is done, its operands are free.
  template <int PENDING> __device__ __forceinline__ void finish(int turn) {
    warpgroup_wait<PENDING>();
    warpgroup_hold(operand[turn]);
  }

  // Products of the warpgroup's keys with the queries.
  __device__ __forceinline__ void score(const Item& item, const unsigned char* keys, int start, bool whole, float (&scores)[GROUPS][4]) {
    const int thread = thread_index(), warp = thread / 32, g = thread % 32 >> 2, c = thread & 3, low = warp * 16 + g;
    const unsigned char* q = shared + M::Q;
    const PairTable<M::COPIES> pairs(table);
    constexpr int PARTS = TURNED_KEYS ? HEAD_DIM / BLOCK_DIMS : 1;
    float part[PARTS][GROUPS][4];
#pragma unroll
    for (int h = 0; h < PARTS; ++h)
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) part[h][n][0] = part[h][n][1] = part[h][n][2] = part[h][n][3] = 0.0f;
    if (KEY_GROUPS % 2) finish<0>(0), finish<0>(1);   // turns do not come out even
    KeyRun<1> keep;
#pragma unroll
    for (int group = 0; group < KEY_GROUPS; ++group) {
      uint32_t (&a)[AT_ONCE][4] = operand[group % 2];
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        const int step = group * AT_ONCE + s;
        if (step % RUN_STEPS == 0) keep.read(keys, low, step / RUN_STEPS, 0, c);
        keep.expand(step % RUN_STEPS, pairs, a[s]);
      }
      warpgroup_begin();
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) warpgroup_mma(part[group * PARTS / KEY_GROUPS], a[s], q + group * COLUMNS * 128, s);
      warpgroup_commit();
      finish<1>((group + 1) % 2);
    }
    finish<0>((KEY_GROUPS + 1) % 2);
#pragma unroll
    for (int h = 0; h < PARTS; ++h) warpgroup_settle(part[h]);
#pragma unroll
    for (int t = 0; t < DIM_TILES; ++t) warpgroup_settle(out[t]);
    if constexpr (TURNED_KEYS) {
      float norm[2][PARTS];
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
#pragma unroll
        for (int h = 0; h < PARTS; ++h) norm[upper][h] = KeyRun<1>::norm(keys, low + 8 * upper, h);
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[n][i] = __fmul_rn(part[0][n][i], norm[i / 2][0]);
#pragma unroll
          for (int h = 1; h < PARTS; ++h) scores[n][i] = fmaf(part[h][n][i], norm[i / 2][h], scores[n][i]);
        }
    } else {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = part[0][n][i];
    }
    if (!whole) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = start + low + 8 * (i / 2), column = n * 8 + 2 * c + i % 2;
          if (key > item.position + column / GROUP || key >= item.end || key < p.first_position) scores[n][i] = -INFINITY;
        }
    }
  }

  // Scores become weights in shared memory, times the norms of turned values. more: what a thread's keys add to the sums. Returns the largest exponent
  // above 0, or 0: exponents are in order with scores, which a quick exponential does not promise, so that a column's reference asks nobody else.
  template <bool WHOLE>
  __device__ __forceinline__ float weigh(const unsigned char* values, int tile, const float (&scores)[GROUPS][4], float (&more)[GROUPS][2]) const {
    const int thread = thread_index(), warp = thread / 32, g = thread % 32 >> 2, c = thread & 3, low = warp * 16 + g;
    float norm[2][P_COPIES], largest = 0.0f;
    if constexpr (TURNED_VALUES)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
#pragma unroll
        for (int half = 0; half < P_COPIES; ++half)
          norm[upper][half] = half_to_float(*reinterpret_cast<const uint16_t*>(values + (low + 8 * upper) * V_ROW + half * turned_bytes(2)));
    // Keys 16 w + g and 8 above are numbers 16 w + 2 g and 2 g + 1 of a column's row.
    unsigned char* target = weights(tile, 0) + 2 * c * 128 + (g & 3) * 4;
    const int piece = 2 * warp + (g >> 2);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(at(M::FACTOR) + n * 8 + 2 * c);
      const float2 base = *reinterpret_cast<const float2*>(reference(warp) + n * 8 + 2 * c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float weight[2];
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const float exponent = fmaf(scores[n][i + 2 * upper], i ? factor.y : factor.x, i ? -base.y : -base.x);
          weight[upper] = exp2_quick(exponent);
          largest = fmaxf(largest, exponent);
        }
        more[n][i] = __fadd_rn(weight[0], weight[1]);
        unsigned char* to = target + (n * 8 + i) * 128 + (piece ^ (2 * c + i)) * 16;
        if constexpr (TURNED_VALUES) {
#pragma unroll
          for (int half = 0; half < P_COPIES; ++half) {
            float scaled[2];
#pragma unroll
            for (int upper = 0; upper < 2; ++upper)
              scaled[upper] = !WHOLE && scores[n][i + 2 * upper] == -INFINITY ? 0.0f : weight[upper] * norm[upper][half];
            *reinterpret_cast<uint32_t*>(to + half * 2 * M::WEIGHTS) = half2_from_floats(scaled[0], scaled[1]);
          }
        } else {
          *reinterpret_cast<uint32_t*>(to) = half2_from_floats(weight[0], weight[1]);
        }
      }
    }
    return largest;
  }

  __device__ __forceinline__ static bool has_score(const float (&scores)[GROUPS][4]) {
    bool has = false;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) has |= scores[n][i] > -INFINITY;
    return has;
  }
  // The largest score of each column among the warp's keys.
  __device__ __forceinline__ void publish_largest(const float (&scores)[GROUPS][4]) const {
    const int thread = thread_index(), warp = thread / 32, g = thread % 32 >> 2, c = thread & 3;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      float largest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(scores[n][i], scores[n][i + 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) largest[i] = fmaxf(largest[i], __shfl_xor_sync(ALL_LANES, largest[i], distance));
      }
      if (g == 0) *reinterpret_cast<float2*>(at(M::LARGEST) + warp * COLUMNS + n * 8 + 2 * c) = make_float2(largest[0], largest[1]);
    }
  }

  // References of columns that ask for it are raised, sums brought to them. raised: which warps found one above its reference; the others
  // have none, and no part in this.
  __device__ __forceinline__ void raise(const uint4& raised) {
    const int thread = thread_index(), warp = thread / 32, g = thread % 32 >> 2, c = thread & 3;
    const uint32_t is_raised[KEY_WARPS] = {raised.x, raised.y, raised.z, raised.w};
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(at(M::FACTOR) + n * 8 + 2 * c);
      float2* base = reinterpret_cast<float2*>(reference(warp) + n * 8 + 2 * c);
      const float2 before = *base;
      float2 top = make_float2(-INFINITY, -INFINITY);
#pragma unroll
      for (int w = 0; w < KEY_WARPS; ++w) {
        if (!is_raised[w]) continue;
        const float2 other = *reinterpret_cast<const float2*>(at(M::LARGEST) + w * COLUMNS + n * 8 + 2 * c);
        top = make_float2(fmaxf(top.x, other.x), fmaxf(top.y, other.y));
      }
      float next[2], change[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float was = i ? before.y : before.x, f = i ? factor.y : factor.x, t = i ? top.y : top.x;
        const bool is_above = fmaf(t, f, -was) > 0.0f;   // as exponents were found
        next[i] = is_above ? __fadd_rn(__fmul_rn(t, f), HEADROOM) : was;
        change[i] = is_above ? exp2_quick(was - next[i]) : 1.0f;
        sum[n][i] *= change[i];
      }
#pragma unroll
      for (int t = 0; t < DIM_TILES; ++t) out[t][n][0] *= change[0], out[t][n][1] *= change[1], out[t][n][2] *= change[0], out[t][n][3] *= change[1];
      __syncwarp();
      if (g == 0) *base = make_float2(next[0], next[1]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void add_values(const unsigned char* values, int tile) {
    const int thread = thread_index(), warp = thread / 32, g = thread % 32 >> 2, c = thread & 3;
    const FirstLevels levels(thread_index() >> 10);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      const int turn = (KEY_GROUPS + step) % 2;
      uint32_t a[DIM_TILES][4];
      value_tiles<4, DIM_TILES, TURNED_VALUES>(levels, values, step * 16, warp, g, c, a);
#pragma unroll
      for (int t = 0; t < DIM_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[turn][t][i] = a[t][i];
      warpgroup_begin();
#pragma unroll
      for (int t = 0; t < DIM_TILES; ++t) warpgroup_mma(out[t], operand[turn][t], weights(tile, t * P_COPIES / DIM_TILES), step);
      warpgroup_commit();
      finish<1>((turn + 1) % 2);
    }
  }

  // Reference, sum and weighted values of every column to the partial results.
  __device__ __forceinline__ void store(const Item& item) {
    const int thread = thread_index(), warp = thread / 32, g = thread % 32 >> 2, c = thread & 3;
    leave_sums(sum, at(M::LARGEST) + warp * COLUMNS, g, c);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const long long to = place(p, item, n * 8 + 2 * c + i);
        const int first = TURNED_VALUES ? warp * 32 + g * 4 : (warp * 8 + g) * 2 * DIM_TILES;
        if (to >= 0) store_values<TURNED_VALUES ? BLOCK_DIMS : 4>(p.part_o + to * HEAD_DIM + first, out, n, i);
      }
    __syncthreads();
    for (int column = thread; column < COLUMNS; column += THREADS) {
      const long long to = place(p, item, column);
      const float total = total_of<KEY_WARPS, COLUMNS>(at(M::LARGEST), column);
      const float base = at(M::REFERENCE)[column];
      if (to >= 0) reinterpret_cast<float2*>(p.part_ml)[to] = make_float2(base == NO_REFERENCE ? -INFINITY : base, total);
    }
  }

  __device__ __forceinline__ uint64_t* arrival(int tile) const { return reinterpret_cast<uint64_t*>(shared + M::ARRIVALS) + tile % 2; }
  __device__ __forceinline__ void start_arrivals() const {
    if (WHOLE_TILES && threadIdx.x == 0) arrival_init(arrival(0), 1), arrival_init(arrival(1), 1), arrival_publish();
  }
  // After the barrier of round `tile`: nobody needs the keys of this tile and the values of the one before any more. Keys below `end`,
  // where tiles are not whole.
  __device__ __forceinline__ void refill(const Item& item, int tile, int end) {
    if constexpr (WHOLE_TILES) {
      static_assert(M::KEY_RING == 2 && M::VALUE_RING == 3, "keys and values of a tile are asked for together");
      const int next = tile + 2, start = item.start + next * KEYS;
      if (threadIdx.x == 0 && start < item.end) {
        const unsigned char* block = p.blocks + block_ahead * p.block_bytes + p.layer_offset;
        if (start + KEYS < item.end) look_ahead(item, next + 1);
        const int rows = min(KEYS, item.end - start), key_bytes = (rows * K_ROW + 15) / 16 * 16, value_bytes = (rows * V_ROW + 15) / 16 * 16;
        arrival_announce(arrival(next), key_bytes + value_bytes);
        copy_whole(key_tile(next), block + item.head * K_HEAD, key_bytes, arrival(next));
        copy_whole(value_tile(next), block + KV_VALUES + item.head * V_HEAD, value_bytes, arrival(next));
      }
    } else {
      fetch_keys<THREADS>(p, item, tile + M::KEY_RING, key_tile(tile + M::KEY_RING), end);
      fetch_values<THREADS>(p, item, tile - 1 + M::VALUE_RING, value_tile(tile - 1 + M::VALUE_RING), end);
      copy_async_commit();
    }
  }
  __device__ __forceinline__ void look_ahead(const Item& item, int tile) {
    if (WHOLE_TILES && threadIdx.x == 0) block_ahead = p.block_tables[item.seq * p.max_blocks + (item.start + tile * KEYS) / BLOCK_POSITIONS];
  }

  // What this pass made of the first tiles.
  __device__ __forceinline__ void fill_up(const Item& item) const {
    __syncthreads();   // its rows were filled with zeros
#pragma unroll
    for (int tile = 0; tile < M::KEY_RING; ++tile) fetch_new<THREADS, K_ROW>(p, item, tile, item.head * K_HEAD, key_tile(tile), key_chunk);
    static_assert(!EARLY_TILES || M::VALUE_RING == 2, "values of one tile are on their way");
    fetch_new<THREADS, V_ROW>(p, item, 0, KV_VALUES + item.head * V_HEAD, value_tile(0), value_chunk);
    copy_async_commit();
  }

  // First tiles and the queries.
  __device__ __forceinline__ void fetch(Item& item, int tiles, bool waits) {
    const bool all_old = item.end <= item.old;
    int taken = 0;
    if (tiles > 0) look_ahead(item, 0);
    const bool early = all_old || EARLY_TILES;
    if (waits && !early) wait_for_earlier();
#pragma unroll
    for (int tile = -2; tile < 0; ++tile) refill(item, tile, EARLY_TILES ? min(item.end, item.old) : item.end);
    if constexpr (OWN) {
      const NormWeights q_norm(p.q_norm), k_norm(p.k_norm);
      const RowPlace to(p, item.seq, item.first_row);
      if (waits) wait_for_earlier();
      if (tiles > 0) make_own(item, to, q_norm, k_norm);
    } else if (waits && early) wait_for_earlier();
    if (threadIdx.x == 0) taken = atomicAdd(p.counter, 1);
    if (tiles > 0) {
      if (EARLY_TILES && !OWN && !all_old) fill_up(item);
      load_queries(item);
      clear();
      publish_shared();
      if (EARLY_TILES && (OWN || all_old)) copy_async_wait<1>();
      else if (!WHOLE_TILES) copy_async_wait<0>();
    }
    if (threadIdx.x == 0) item.next = gridDim.x + taken;
    __syncthreads();
  }
  // The same with rows that are made here.
  __device__ __forceinline__ void fetch_and_make(const Item& item) {
    const MadeRows<Columns> made(p, *this, item);
    made.fetch_tiles();
    made.clear_queries();
    made.make();
    clear();
    publish_shared();
    __syncthreads();
  }

  // The block's next item is asked for at once. waits: this is the block's first item, which an earlier kernel may still make; keys of
  // earlier passes are fetched before that.
  __device__ __forceinline__ void attend(Item& item, bool waits) {
    const int tiles = max(0, (item.end - item.start + KEYS - 1) / KEYS), warp = thread_index() / 32;
    if constexpr (!MAKES) {
      fetch(item, tiles, waits);
      if (tiles == 0) return;
    } else if (tiles == 0) {
      return wait_for_earlier();
    } else {
      fetch_and_make(item);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int start = item.start + tile * KEYS;
      const bool whole = start + KEYS - 1 <= item.position && start >= p.first_position;   // every row sees every key
      const unsigned char* values = value_tile(tile);
      uint32_t* raised = reinterpret_cast<uint32_t*>(shared + M::RAISED) + 4 * (tile & 1);
      float scores[GROUPS][4], more[GROUPS][2];
      if constexpr (WHOLE_TILES) arrival_wait(arrival(tile), phases >> tile % 2), phases ^= 1 << tile % 2;
      score(item, key_tile(tile), start, whole, scores);
      if (!WHOLE_TILES) copy_async_wait<0>();   // of the tiles that were asked for a round ago; the barrier shows them to all
#pragma unroll 1
      for (int again = 0;; ++again) {
        float largest;   // of the first tile any score is above what there is: nothing is weighed against that
        if (tile + again == 0) largest = has_score(scores) ? 1.0f : 0.0f;
        else largest = whole ? weigh<true>(values, tile, scores, more) : weigh<false>(values, tile, scores, more);
        const bool above = __any_sync(ALL_LANES, largest > 0.0f);
        if (again == 0) {
          if (above) publish_largest(scores);
          if (threadIdx.x % 32 == 0) raised[warp] = above;
        }
        publish_shared();
        __syncthreads();
        if (again == 0) refill(item, tile, item.end);
        const uint4 all = *reinterpret_cast<const uint4*>(raised);
        if (again || !(all.x | all.y | all.z | all.w)) break;
        raise(all);
      }
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) sum[n][0] = __fadd_rn(sum[n][0], more[n][0]), sum[n][1] = __fadd_rn(sum[n][1], more[n][1]);
      add_values(values, tile);
      finish<0>(0), finish<0>(1);
#pragma unroll
      for (int t = 0; t < DIM_TILES; ++t) warpgroup_settle(out[t]);
    }
    finish<0>(0), finish<0>(1);
#pragma unroll
    for (int t = 0; t < DIM_TILES; ++t) warpgroup_settle(out[t]);
    store(item);
  }
};
