// Few rows by warps (mma_f16). A warp multiplies 16 keys of a tile with its share of the columns, then all weights with its share of the
// values' dimensions: quarters or eighths; where there are more warps than these, they share the columns.
#pragma once
#include "attend_few.cuh"

constexpr int Q_STRIDE = HEAD_DIM + 32, ALIGNED = 16;

// How a block works, by the rows of its items. PIPELINED: the scores of a tile become weights before the weights of the one before
// it meet their values, so that a tile costs one barrier; else it costs two, with less shared memory. Rings: tiles on their
// way or in use; a tile's values are used a round after its keys, and the norms of turned ones before that.
template <int ROWS> struct Plan {
  static constexpr int WARPS = ROWS <= 4 ? 4 : ROWS <= 8 ? 8 : 16, THREADS = 32 * WARPS, SHARE = WARPS / KEY_WARPS;
  static constexpr int TILES = ((ROWS * GROUP + 7) / 8 + SHARE - 1) / SHARE * SHARE, COLUMNS = 8 * TILES;
  static constexpr bool PIPELINED = WIDE && (KEY_CODE != CODE_HALF || ROWS == 16);
  static constexpr int KEY_RING = PIPELINED || KEY_CODE != CODE_HALF ? 2 : 1;
  static constexpr int VALUE_RING = PIPELINED ? (TURNED_VALUES ? 3 : 2) : TURNED_VALUES || KEY_CODE != CODE_HALF ? 2 : 1;
  static constexpr int P_BUFFERS = PIPELINED ? 2 : 1, P_BYTES = P_COPIES * COLUMNS * KEYS * 2;
  // Turned keys are expensive to expand: where two warps have the same keys, each expands one of the two runs of every key for the
  // columns of both, and they exchange the products.
  static constexpr bool HALVED = TURNED_KEYS && SHARE % 2 == 0 && (WIDE || ROWS <= 8);
  // Offsets in shared memory.
  static constexpr int TILE_KEYS = 0, TILE_VALUES = KEY_RING * K_HEAD, Q = TILE_VALUES + VALUE_RING * V_HEAD, P = Q + COLUMNS * Q_STRIDE * 2;
  static constexpr int LARGEST = P + P_BUFFERS * P_BYTES, FACTOR = LARGEST + 2 * KEY_WARPS * COLUMNS * 4, CHANGE = FACTOR + COLUMNS * 4;
  static constexpr int ITEM = CHANGE + P_BUFFERS * COLUMNS * 4, TOP = ITEM + 48;
  static constexpr int EXCHANGE = TOP + (HALVED ? 2 * COLUMNS * 4 : 0);
  static constexpr int COPIES = 1, TABLE = PairTable<COPIES>::BYTES, BYTES = TABLE + EXCHANGE + (HALVED ? KEY_WARPS * COLUMNS * 64 : 0);
};

// Tiles of 8 columns, shared by the warps. Thread (g, c) holds of its tiles of columns the columns 2 c and 2 c + 1: scores of
// keys g and g + 8 of its warp's 16 (NT tiles), and sums of dimensions as in value_tiles (VT tiles).
template <int ROWS, Maker MAKER = Maker::ATTEND_ROWS> struct Columns {
  static_assert(MAKER == Maker::ATTEND_ROWS, "by warpgroups alone");
  using M = Plan<ROWS>;
  static constexpr int TILES = M::TILES, WARPS = M::WARPS, COLUMNS = M::COLUMNS, THREADS = M::THREADS, NT = TILES * KEY_WARPS / WARPS;
  static constexpr int SLICES = WARPS < 8 ? WARPS : 8, VT = TILES * SLICES / WARPS, DIM_TILES = HEAD_DIM / 16 / SLICES;
  static constexpr int SHARED_KEYS = WARPS / 2;   // pairs of warps with the same keys, where they halve the work
  static_assert(NT * WARPS == TILES * KEY_WARPS && VT * WARPS == TILES * SLICES, "warps share the columns evenly");
  static_assert(!M::HALVED || RUNS == 2, "a run for each of two warps");
  const Attend& p;
  unsigned char* shared;
  const unsigned char* table;   // of PairTable
  float out[DIM_TILES][VT][4], sum[NT][2];
  float top[M::HALVED ? 1 : NT][2];   // HALVED: in shared memory, as registers are scarce

  __device__ __forceinline__ float* at(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  // Where a thread stands. Read anew in each part of a round: what could be kept of it would not fit into registers.
  struct Place {
    int g, c, key_warp, first_tile, slice, first_value_tile;
    __device__ __forceinline__ Place() {
      const int thread = thread_index(), warp = thread / 32;
      g = thread % 32 >> 2, c = thread & 3, key_warp = warp % KEY_WARPS, first_tile = warp / KEY_WARPS * NT;
      slice = warp % SLICES, first_value_tile = warp / SLICES * VT;
    }
  };

  __device__ __forceinline__ void start_arrivals() const {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      sum[n][0] = sum[n][1] = 0.0f;
      if constexpr (!M::HALVED) top[n][0] = top[n][1] = -INFINITY;
    }
    if constexpr (M::HALVED)
      for (int column = thread_index(); column < COLUMNS; column += THREADS) at(M::TOP)[COLUMNS + column] = -INFINITY;
#pragma unroll
    for (int n = 0; n < VT; ++n)
#pragma unroll
      for (int t = 0; t < DIM_TILES; ++t) out[t][n][0] = out[t][n][1] = out[t][n][2] = out[t][n][3] = 0.0f;
  }

  // Queries of the item on their way, four numbers of each of two steps together; columns that no row has are zeros.
  __device__ __forceinline__ void load_queries(const Item& item) const {
    constexpr int EIGHTS = HEAD_DIM / 8;
    const int used = item.rows * GROUP, thread = M::HALVED && KEY_CODE == CODE_5 ? thread_index() : threadIdx.x;   // registers
    const uint16_t* queries = p.q_half + (long long)(item.first_row * NUM_HEADS + item.head * GROUP) * HEAD_DIM;
#pragma unroll 4
    for (int i = thread; i < COLUMNS * EIGHTS; i += THREADS) {
      const int column = i / EIGHTS, eight = i % EIGHTS, run = eight * 8 / (4 * RUN), c = eight * 8 % (4 * RUN) / RUN, two = eight * 8 % RUN / 8;
      unsigned char* to = shared + M::Q + column * Q_STRIDE * 2 + ((run * (RUN_STEPS / 2) + two) * 4 + c) * 16;
      if (column < used) copy_async_16(to, queries + (column / GROUP * NUM_HEADS + column % GROUP) * HEAD_DIM + eight * 8);
      else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    copy_async_commit();
    for (int column = thread; column < COLUMNS; column += THREADS) {
      const float* factor = p.q_factor + (item.first_row + column / GROUP) * NUM_HEADS + item.head * GROUP + column % GROUP;
      at(M::FACTOR)[column] = column < used ? __ldcg(factor) * 1.4426950408889634f : 1.0f;
    }
  }

  // Where the weights of column `low` of a tile of columns and of keys 16 step + c, + 8, + 4 and + 12 lie, in words; exchanged so
  // that neither reads nor writes of a warp meet in a bank.
  __device__ __forceinline__ static int weights_at(int low, int step, int c) {
    const int swap = low >> 1 & 1 | ((low ^ low >> 2) & 1) << 1;
    return low * (KEYS / 2) + (step ^ swap) * 8 + 2 * c;
  }

  // Products of one run of the warp's 16 keys with COUNT tiles of columns, or with twice as many: `other` leads from a column of the
  // first ones to that of the others.
  template <int COUNT>
  __device__ __forceinline__ void multiply(const unsigned char* keys, const unsigned char* q, int other, int low, int run, int c, float (&to)[COUNT][4]) const {
    const PairTable<1> pairs(table);
    constexpr int PARTS = M::HALVED ? 2 : 1, STEPS = RUN_STEPS / PARTS;   // registers
#pragma unroll 1
    for (int which = 0; which < PARTS; ++which) {
      KeyRun<PARTS> keep;
      keep.read(keys, low, run, which, c);
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {
        uint32_t a[4], next[4];
        keep.expand(step, pairs, a);
        keep.expand(step + 1, pairs, next);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
          const unsigned char* from = n < NT ? q + n * 8 * Q_STRIDE * 2 : q + other + (n - NT) * 8 * Q_STRIDE * 2;
          const uint4 b = *reinterpret_cast<const uint4*>(from + (run * RUN_STEPS + which * STEPS + step) * 32);
          mma_f16(to[n], a[0], a[1], a[2], a[3], b.x, b.y);
          mma_f16(to[n], next[0], next[1], next[2], next[3], b.z, b.w);
        }
      }
    }
  }

  // One of the two runs with this warp's columns and those of the warp that has the same keys; then the other's products with its own.
  __device__ __forceinline__ void score_halved(const unsigned char* keys, float (&scores)[NT][4]) const {
    const Place here;
    const int g = here.g, c = here.c, low = here.key_warp * 16 + g, share = here.first_tile / NT, run = share & 1, step = run ? -NT : NT;
    float part[2 * NT][4];
#pragma unroll
    for (int n = 0; n < 2 * NT; ++n) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.0f;
    multiply<2 * NT>(keys, shared + M::Q + (here.first_tile * 8 + g) * Q_STRIDE * 2 + 16 * c, step * 8 * Q_STRIDE * 2, low, run, c, part);
    float4* places = reinterpret_cast<float4*>(shared + M::EXCHANGE) + thread_index() % 32;
    float4* mine = places + (share * KEY_WARPS + here.key_warp) * NT * 32;
    const float4* theirs = places + ((share ^ 1) * KEY_WARPS + here.key_warp) * NT * 32;
#pragma unroll
    for (int n = 0; n < NT; ++n) mine[32 * n] = make_float4(part[NT + n][0], part[NT + n][1], part[NT + n][2], part[NT + n][3]);
    group_barrier<SHARED_KEYS>(1 + (share >> 1) * KEY_WARPS + here.key_warp, 64);
    const float norm[2][2] = {{KeyRun<1>::norm(keys, low, 0), KeyRun<1>::norm(keys, low + 8, 0)}, {KeyRun<1>::norm(keys, low, 1), KeyRun<1>::norm(keys, low + 8, 1)}};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float4 got = theirs[32 * n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float first = run ? get(got, i) : part[n][i], second = run ? part[n][i] : get(got, i);
        scores[n][i] = fmaf(second, norm[1][i / 2], fmaf(first, norm[0][i / 2], 0.0f));
      }
    }
  }

  // Products of the warp's 16 keys with the queries.
  __device__ __forceinline__ void score_whole(const unsigned char* keys, float (&scores)[NT][4]) const {
    const Place here;
    const int g = here.g, c = here.c, low = here.key_warp * 16 + g;
    const unsigned char* q = shared + M::Q + (here.first_tile * 8 + g) * Q_STRIDE * 2 + 16 * c;
#pragma unroll
    for (int n = 0; n < NT; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
    constexpr int RUNS_AT_ONCE = NT < 3 ? RUNS : 1;   // registers
    float part[NT][4];
#pragma unroll RUNS_AT_ONCE
    for (int run = 0; run < RUNS; ++run) {
      if constexpr (TURNED_KEYS)
#pragma unroll
        for (int n = 0; n < NT; ++n) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.0f;
      multiply<NT>(keys, q, 0, low, run, c, TURNED_KEYS ? part : scores);
      if constexpr (TURNED_KEYS) {
        const float first = KeyRun<1>::norm(keys, low, run), second = KeyRun<1>::norm(keys, low + 8, run);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[n][i] = fmaf(part[n][i], i < 2 ? first : second, scores[n][i]);
      }
    }
  }

  // Scores of the warp's 16 keys, and the largest of each column, in powers of two. start: position of the tile; turn: 0, 1, 0...
  __device__ __forceinline__ void score(const Item& item, const unsigned char* keys, int start, int turn, float (&scores)[NT][4]) const {
    if constexpr (M::HALVED) score_halved(keys, scores);
    else score_whole(keys, scores);
    const Place here;
    const int g = here.g, c = here.c, low = here.key_warp * 16 + g;
    const bool whole = start + KEYS - 1 <= item.position && start >= p.first_position;   // every row sees every key
    if (!whole) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = start + low + 8 * (i / 2), column = (here.first_tile + n) * 8 + 2 * c + i % 2;
          if (key > item.position + column / GROUP || key >= item.end || key < p.first_position) scores[n][i] = -INFINITY;
        }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int column = (here.first_tile + n) * 8 + 2 * c;
      float largest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(scores[n][i], scores[n][i + 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) largest[i] = fmaxf(largest[i], __shfl_xor_sync(ALL_LANES, largest[i], distance));
      }
      if (g == 0) {
        const float2 factor = *reinterpret_cast<const float2*>(at(M::FACTOR) + column);
        *reinterpret_cast<float2*>(at(M::LARGEST) + (turn * KEY_WARPS + here.key_warp) * COLUMNS + column) = make_float2(largest[0] * factor.x, largest[1] * factor.y);
      }
    }
  }

  // Scores become weights in shared memory, times the norms of turned values.
  __device__ __forceinline__ void weigh(const unsigned char* values, int turn, const float (&scores)[NT][4]) {
    const Place here;
    const int g = here.g, c = here.c, low = here.key_warp * 16 + g;
    float norm[2][P_COPIES];
    if constexpr (TURNED_VALUES)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
#pragma unroll
        for (int half = 0; half < P_COPIES; ++half)
          norm[upper][half] = half_to_float(*reinterpret_cast<const uint16_t*>(values + (low + 8 * upper) * V_ROW + half * turned_bytes(2)));
    uint32_t* weights = reinterpret_cast<uint32_t*>(shared + M::P + turn % M::P_BUFFERS * M::P_BYTES) + here.first_tile * 8 * (KEYS / 2) + (g >> 2);
    const int first = weights_at(2 * c, here.key_warp, g & 3), second = weights_at(2 * c + 1, here.key_warp, g & 3);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int column = (here.first_tile + n) * 8 + 2 * c;
      const float* tops = at(M::LARGEST) + turn * KEY_WARPS * COLUMNS + column;
      float2 largest = *reinterpret_cast<const float2*>(tops);
#pragma unroll
      for (int w = 1; w < KEY_WARPS; ++w) {
        const float2 other = *reinterpret_cast<const float2*>(tops + w * COLUMNS);
        largest = make_float2(fmaxf(largest.x, other.x), fmaxf(largest.y, other.y));
      }
      const float2 factor = *reinterpret_cast<const float2*>(at(M::FACTOR) + column);
      uint32_t* target = weights + n * 8 * (KEYS / 2);
      float before[2], now[2], change[2];
      if constexpr (M::HALVED) {
        const float2 two = *reinterpret_cast<const float2*>(at(M::TOP) + (turn ^ 1) * COLUMNS + column);
        before[0] = two.x, before[1] = two.y;
      } else {
        before[0] = top[n][0], before[1] = top[n][1];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        now[i] = fmaxf(before[i], i ? largest.y : largest.x);
        const float shift = now[i] == -INFINITY ? 0.0f : now[i];
        change[i] = now[i] == before[i] ? 1.0f : exp2_quick(before[i] - now[i]);
        if constexpr (!M::HALVED) top[n][i] = now[i];
        float weight[2];
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) weight[upper] = exp2_quick(fmaf(scores[n][i + 2 * upper], i ? factor.y : factor.x, -shift));
        const int place = i ? second : first;
        if constexpr (TURNED_VALUES) {
#pragma unroll
          for (int half = 0; half < P_COPIES; ++half) {
            float scaled[2];
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) scaled[upper] = scores[n][i + 2 * upper] == -INFINITY ? 0.0f : weight[upper] * norm[upper][half];
            target[half * COLUMNS * (KEYS / 2) + place] = half2_from_floats(scaled[0], scaled[1]);
          }
        } else {
          target[place] = half2_from_floats(weight[0], weight[1]);
        }
        sum[n][i] = fmaf(sum[n][i], change[i], __fadd_rn(weight[0], weight[1]));
      }
      if (here.key_warp == 0 && g == 0) {
        *reinterpret_cast<float2*>(at(M::CHANGE) + turn % M::P_BUFFERS * COLUMNS + column) = make_float2(change[0], change[1]);
        if constexpr (M::HALVED) *reinterpret_cast<float2*>(at(M::TOP) + turn * COLUMNS + column) = make_float2(now[0], now[1]);
      }
    }
  }

  __device__ __forceinline__ void add_values(const unsigned char* values, int turn) {
    const Place here;
    const int g = here.g, c = here.c;
    const int copy = TURNED_VALUES ? here.slice * P_COPIES / SLICES : 0;
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(shared + M::P + turn % M::P_BUFFERS * M::P_BYTES) + (copy * COLUMNS + here.first_value_tile * 8) * (KEYS / 2);
#pragma unroll
    for (int n = 0; n < VT; ++n) {
      const float2 change = *reinterpret_cast<const float2*>(at(M::CHANGE) + turn % M::P_BUFFERS * COLUMNS + (here.first_value_tile + n) * 8 + 2 * c);
      if (__any_sync(ALL_LANES, change.x != 1.0f || change.y != 1.0f))
#pragma unroll
        for (int t = 0; t < DIM_TILES; ++t) out[t][n][0] *= change.x, out[t][n][1] *= change.y, out[t][n][2] *= change.x, out[t][n][3] *= change.y;
    }
    const FirstLevels levels(thread_index() >> 10);
#pragma unroll
    for (int key = 0; key < KEYS; key += 16) {
      uint32_t a[DIM_TILES][4];
      value_tiles<SLICES>(levels, values, key, here.slice, g, c, a);
#pragma unroll
      for (int n = 0; n < VT; ++n) {
        const uint2 b = *reinterpret_cast<const uint2*>(weights + n * 8 * (KEYS / 2) + weights_at(g, key / 16, c));
#pragma unroll
        for (int t = 0; t < DIM_TILES; ++t) mma_f16(out[t][n], a[t][0], a[t][1], a[t][2], a[t][3], b.x, b.y);
      }
    }
  }

  // Largest score, sum and weighted values of every column to the partial results.
  __device__ __forceinline__ void store(const Item& item) {
    const Place here;
    const int g = here.g, c = here.c;
    leave_sums(sum, at(M::LARGEST) + here.key_warp * COLUMNS + here.first_tile * 8, g, c);
#pragma unroll
    for (int n = 0; n < VT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const long long to = place(p, item, (here.first_value_tile + n) * 8 + 2 * c + i);
        if (to >= 0) store_values<4>(p.part_o + to * HEAD_DIM + here.slice * (HEAD_DIM / SLICES) + g * 2 * DIM_TILES, out, n, i);
      }
    __syncthreads();
    if (here.key_warp == 0 && g == 0)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = (here.first_tile + n) * 8 + 2 * c + i;
          const long long to = place(p, item, column);
          const float total = total_of<KEY_WARPS, COLUMNS>(at(M::LARGEST), column);
          const int turn = (item.end - item.start - 1) / KEYS & 1;   // of the last tile
          const float largest = M::HALVED ? at(M::TOP)[turn * COLUMNS + column] : top[M::HALVED ? 0 : n][i];
          if (to >= 0) reinterpret_cast<float2*>(p.part_ml)[to] = make_float2(largest, total);
        }
  }

  __device__ __forceinline__ void copy_keys(const Item& item, int tile) const { fetch_keys<THREADS>(p, item, tile, key_tile(tile), item.end); }
  __device__ __forceinline__ void copy_values(const Item& item, int tile) const { fetch_values<THREADS>(p, item, tile, value_tile(tile), item.end); }
  __device__ __forceinline__ unsigned char* key_tile(int tile) const { return shared + M::TILE_KEYS + tile % M::KEY_RING * K_HEAD; }
  __device__ __forceinline__ unsigned char* value_tile(int tile) const { return shared + M::TILE_VALUES + tile % M::VALUE_RING * V_HEAD; }

  // After the barrier of round `tile`: nobody needs the keys of this tile and the values of that before the last any more.
  __device__ __forceinline__ void refill(const Item& item, int tile) const {
    copy_keys(item, tile + M::KEY_RING);
    copy_values(item, tile - 2 + M::VALUE_RING);
    copy_async_commit();
  }

  // Round j takes the scores of tile j, weighs it (not pipelined: tile j - 1, before) and adds the values of tile j - 1. The block's next item is asked
  // for at once. waits: this is the block's first item, which an earlier kernel may still make; keys of earlier passes are
  // fetched before that.
  __device__ __forceinline__ void attend(Item& item, bool waits) {
    const int tiles = max(0, (item.end - item.start + KEYS - 1) / KEYS);
    const bool all_old = item.end <= item.old;
    float scores[NT][4];
    int taken = 0;
    if (waits && !all_old) wait_for_earlier();
    if constexpr (M::PIPELINED) {
#pragma unroll
      for (int tile = -2; tile < 0; ++tile) refill(item, tile);
    } else {
      copy_keys(item, 0), copy_async_commit();
      if (M::KEY_RING == 2) copy_keys(item, 1);
      copy_values(item, 0);
      if (M::VALUE_RING == 2) copy_values(item, 1);
      copy_async_commit();
    }
    if (waits && all_old) wait_for_earlier();
    if (threadIdx.x == 0) taken = atomicAdd(p.counter, 1);
    if (tiles > 0) {
      load_queries(item);
      clear();
      copy_async_wait<0>();
    }
    if (threadIdx.x == 0) item.next = gridDim.x + taken;
    __syncthreads();
    if (tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile <= tiles; ++tile) {
      const int before = tile - 1;
      if constexpr (!M::PIPELINED)
        if (tile > 0) weigh(value_tile(before), before & 1, scores);
      if (tile < tiles) score(item, key_tile(tile), item.start + tile * KEYS, tile & 1, scores);
      if constexpr (M::PIPELINED) {
        copy_async_wait<0>();
        __syncthreads();
        refill(item, tile);
        if (tile < tiles) weigh(value_tile(tile), tile & 1, scores);
        if (tile > 0) add_values(value_tile(before), before & 1);
      } else {
        copy_async_wait<M::VALUE_RING == 2 ? 2 : 0>();
        __syncthreads();
        copy_keys(item, tile + M::KEY_RING), copy_async_commit();
        if (tile > 0) add_values(value_tile(before), before & 1);
        copy_async_wait<M::KEY_RING == 2 ? 1 : 0>();
        __syncthreads();
        copy_values(item, before + M::VALUE_RING), copy_async_commit();
      }
    }
    store(item);
  }
};
