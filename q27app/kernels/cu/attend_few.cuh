// What both kernels of few rows share (attend_few_warp.cuh, attend_few_warpgroup.cuh): items of keys, tiles on their way to shared
// memory, keys and values as the tensor core takes them.
#pragma once
#include "kv_format.cuh"
#include "mma.cuh"

constexpr int KEYS = 64, KEY_WARPS = KEYS / 16;
constexpr int K_STEPS = HEAD_DIM / 16;   // of a score
constexpr int RUN = KEY_CODE == CODE_HALF ? 8 : KEY_CODE == CODE_FP8 ? 16 : 32;   // consecutive numbers of a key that a thread reads
constexpr int RUN_STEPS = RUN / 4;
constexpr int P_COPIES = TURNED_VALUES ? HEAD_DIM / BLOCK_DIMS : 1;
constexpr int PAIRS = TURNED_KEYS ? level_pairs(low_bits(KEY_CODE)) : 0;
constexpr int RUNS = K_STEPS / RUN_STEPS;
static_assert(KEYS == BLOCK_POSITIONS && CUT_0 % KEYS == 0 && CUT_1 % KEYS == 0 && CUT_2 % KEYS == 0 && CUT_3 % KEYS == 0, "cuts hold whole tiles");
constexpr int CUTS_0 = BORDER_0 / CUT_0, CUTS_1 = CUTS_0 + (BORDER_1 - BORDER_0) / CUT_1, CUTS_2 = CUTS_1 + (BORDER_2 - BORDER_1) / CUT_2;

// Cuts that hold keys 0 .. count - 1.
__device__ __forceinline__ int cuts_of(int count) {
  if (count <= BORDER_0) return (count + CUT_0 - 1) / CUT_0;
  if (count <= BORDER_1) return CUTS_0 + (count - BORDER_0 + CUT_1 - 1) / CUT_1;
  if (count <= BORDER_2) return CUTS_1 + (count - BORDER_1 + CUT_2 - 1) / CUT_2;
  return CUTS_2 + (count - BORDER_2 + CUT_3 - 1) / CUT_3;
}
__device__ __forceinline__ int cut_start(int cut) {
  if (cut <= CUTS_0) return cut * CUT_0;
  if (cut <= CUTS_1) return BORDER_0 + (cut - CUTS_0) * CUT_1;
  if (cut <= CUTS_2) return BORDER_1 + (cut - CUTS_1) * CUT_2;
  return BORDER_2 + (cut - CUTS_2) * CUT_3;
}

// Who makes queries, keys and values of the rows: attend_rows, a block the one row of its item, or every block what its item needs of
// several (attend_make.cuh).
enum class Maker { ATTEND_ROWS, ONE_ROW, EACH_BLOCK };

struct Item {   // lies in shared memory, as registers are scarce; in these where a block makes its rows
  int seq, first_row, rows, head, cut, start, end, position;   // keys start .. end - 1; position of the first row
  int found, next, old;   // old: the keys below it are of earlier passes; the position of the sequence's first row, not of this group's
};
static_assert(sizeof(Item) <= 48, "bytes that plans keep for it");

// Groups of rows of one cut follow each other: they find its keys in the second cache. One that does not reach the cut gets no keys of it.
// All lanes of a warp call, a sequence each.
template <int ROWS> __device__ __forceinline__ void find_item(const Attend& p, int index, Item& item) {
  const int lane = threadIdx.x % 32;
  int found = 0;
  for (int base = 0; base < p.num_seqs && !found; base += 32) {
    const int seq = base + lane, first = seq < p.num_seqs ? p.row_starts[seq] : 0, end = seq < p.num_seqs ? p.row_starts[seq + 1] : 0;
    int groups = 0, position = 0, cuts = 0;
    if (first < end) groups = (end - first + ROWS - 1) / ROWS, position = p.positions[first], cuts = cuts_of(position + end - first);
    const int items = cuts * NUM_KV_HEADS * groups;
    int past = items;   // of the sequences up to this one
    for (int distance = 1; distance < min(32, p.num_seqs - base); distance *= 2) {
      const int others = __shfl_sync(ALL_LANES, past, lane - distance);
      if (lane >= distance) past += others;
    }
    const int at = index - (past - items);
    if (at >= 0 && at < items) {
      const int group = at % groups, head = at / groups % NUM_KV_HEADS, cut = cuts - 1 - at / groups / NUM_KV_HEADS;   // the longest first
      item.seq = seq, item.first_row = first + group * ROWS, item.rows = min(ROWS, end - item.first_row), item.head = head, item.cut = cut;
      item.position = position + group * ROWS, item.old = position, item.start = cut_start(cut), item.end = min(cut_start(cut + 1), item.position + item.rows);
    }
    found = __any_sync(ALL_LANES, at >= 0 && at < items);
    index -= __shfl_sync(ALL_LANES, past, min(31, p.num_seqs - base - 1));
  }
  if (lane == 0) item.found = found;
}

// Where 16 bytes of a plain row lie in a tile: places are exchanged so that the threads of a warp meet different banks.
__device__ __forceinline__ int key_chunk(int key, int chunk) {
  constexpr int CHUNKS = K_ROW / 16;
  return TURNED_KEYS ? chunk : CHUNKS >= 8 ? chunk ^ (key & 1) << 2 : chunk;
}
__device__ __forceinline__ int value_chunk(int key, int chunk) {
  constexpr int CHUNKS = V_ROW / 16;
  return TURNED_VALUES ? chunk : CHUNKS >= 8 ? chunk ^ (key & 3) << 1 : chunk;
}

// A head's part of a block on its way to shared memory. Rows outside [first, end) become zeros, or stay as they are where they
// are turned: what they weigh is decided by their score.
template <int THREADS, int ROW, bool TURNED, class Chunk>
__device__ __forceinline__ void copy_tile(const unsigned char* source, unsigned char* target, int first, int end, Chunk place) {
  constexpr int CHUNKS = ROW / 16, ALL = KEYS * ROW / 16;
  const int thread = thread_index();
  if constexpr (TURNED) {
    const int wanted = min(ALL, (end * ROW + 15) / 16);
#pragma unroll
    for (int done = 0; done < ALL; done += THREADS) {
      const int i = done + thread;
      if (i < wanted) copy_async_16(target + i * 16, source + i * 16);
    }
  } else if (first <= 0 && end >= KEYS && THREADS % (4 * CHUNKS) == 0) {   // places of a thread's chunks differ by whole rows
    const int key = thread / CHUNKS;
    target += key * ROW + place(key, thread % CHUNKS) * 16, source += thread * 16;
#pragma unroll
    for (int done = 0; done < ALL; done += THREADS) copy_async_16(target + done * 16, source + done * 16);
  } else {
#pragma unroll 1
    for (int i = thread; i < ALL; i += THREADS) {
      const int key = i / CHUNKS;
      unsigned char* to = target + key * ROW + place(key, i % CHUNKS) * 16;
      if (key >= first && key < end) copy_async_16(to, source + i * 16);
      else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Tile `tile` of the item, if it has it, on its way: its keys below `end`.
template <int THREADS> __device__ __forceinline__ void fetch_keys(const Attend& p, const Item& item, int tile, unsigned char* target, int end) {
  const int start = item.start + tile * KEYS;
  if (tile < 0 || start >= item.end) return;
  const unsigned char* source = kv_block(p, item.seq, start) + item.head * K_HEAD;
  copy_tile<THREADS, K_ROW, TURNED_KEYS>(source, target, p.first_position - start, end - start, key_chunk);
}
template <int THREADS> __device__ __forceinline__ void fetch_values(const Attend& p, const Item& item, int tile, unsigned char* target, int end) {
  const int start = item.start + tile * KEYS;
  if (tile < 0 || start >= item.end) return;
  const unsigned char* source = kv_block(p, item.seq, start) + KV_VALUES + item.head * V_HEAD;
  copy_tile<THREADS, V_ROW, TURNED_VALUES>(source, target, p.first_position - start, end - start, value_chunk);
}
// Rows of a tile that this pass made, of plain ones, where the tile was fetched up to them. offset: of the head in the block.
template <int THREADS, int ROW, class Chunk>
__device__ __forceinline__ void fetch_new(const Attend& p, const Item& item, int tile, int offset, unsigned char* target, Chunk place) {
  constexpr int CHUNKS = ROW / 16;
  const int start = item.start + tile * KEYS, from = max(max(item.old, p.first_position) - start, 0), rows = min(item.end - start, KEYS) - from;
  if (rows <= 0) return;
  const unsigned char* source = kv_block(p, item.seq, start) + offset;
#pragma unroll 1
  for (int i = thread_index(); i < rows * CHUNKS; i += THREADS) {
    const int key = from + i / CHUNKS, chunk = i % CHUNKS;
    copy_async_16(target + key * ROW + place(key, chunk) * 16, source + (key * CHUNKS + chunk) * 16);
  }
}

// Place of a column in the partial results, or -1.
__device__ __forceinline__ long long place(const Attend& p, const Item& item, int column) {
  if (column >= item.rows * GROUP) return -1;
  return ((long long)(item.first_row + column / GROUP) * p.max_splits + item.cut) * NUM_HEADS + item.head * GROUP + column % GROUP;
}

// Halves of two neighbouring numbers of a key by their code, at the begin of shared memory, where the compiler knows its place.
// Look-ups of a warp meet fewer others in a bank where there are COPIES side by side.
template <int COPIES> struct PairTable {
  static constexpr int BYTES = PAIRS * 4 * COPIES;
  const unsigned char* table;
  uint32_t copy;   // where the thread's copy lies, in both halves
  __device__ __forceinline__ explicit PairTable(const unsigned char* dynamic) : table(dynamic), copy(COPIES > 1 ? thread_index() % COPIES * 0x40004u : 0) {}
  template <int THREADS> __device__ __forceinline__ static void fill(unsigned char* dynamic) {
    constexpr int LOW = low_bits(KEY_CODE), ONE = (1 << LOW) - 1;
    const float level = level_of<LOW>(threadIdx.x % 32);   // each lane has one: a look-up of constants takes a turn for every other one
#pragma unroll 1
    for (int from = 0; from < PAIRS; from += THREADS) {
      const int i = from + threadIdx.x, first = (i & ONE) | (i >> 2 * LOW & 1) << LOW, second = (i >> LOW & ONE) | (i >> (2 * LOW + 1) & 1) << LOW;
      const uint32_t pair = half2_from_floats(__shfl_sync(ALL_LANES, level, first), __shfl_sync(ALL_LANES, level, second));
      if (PAIRS % THREADS && i >= PAIRS) break;
      if constexpr (COPIES == 1) reinterpret_cast<uint32_t*>(dynamic)[i] = pair;
      else
#pragma unroll
        for (int j = 0; j < COPIES / 4; ++j) reinterpret_cast<uint4*>(dynamic)[i * (COPIES / 4) + j] = make_uint4(pair, pair, pair, pair);
    }
  }
  __device__ __forceinline__ uint32_t at(uint32_t index) const { return reinterpret_cast<const uint32_t*>(table)[index]; }
  // Of two indices of at most ten bits, one in each half.
  __device__ __forceinline__ void find(uint32_t indices, uint32_t& first, uint32_t& second) const {
    const uint32_t at = indices * (4 * COPIES) + copy;
    first = *reinterpret_cast<const uint32_t*>(table + pick_bytes(at, 0, 0x4410));
    second = *reinterpret_cast<const uint32_t*>(table + pick_bytes(at, 0, 0x4432));
  }
};

// The keys of rows `low` and `low + 8` as the tensor core takes them: a run, or of turned ones one of its PARTS.
template <int PARTS> struct KeyRun {
  static constexpr int LOW_WORDS = TURNED_KEYS ? low_bits(KEY_CODE) / PARTS : 4;
  uint32_t word[2][LOW_WORDS + TURNED_KEYS];   // the highest bits last

  __device__ __forceinline__ void read(const unsigned char* tile, int low, int run, int which, int c) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int key = low + 8 * upper;
      if constexpr (TURNED_KEYS) {
        constexpr int LOW = low_bits(KEY_CODE);
        const unsigned char* block = tile + key * K_ROW + run * turned_bytes(LOW);
        uint32_t part[LOW_WORDS], high[1];
        read_words(block + 2 + 4 * (LOW * c + LOW_WORDS * which), run == 0, part);
        read_words(block + 2 + 16 * LOW + 4 * c, run == 0, high);
#pragma unroll
        for (int i = 0; i < LOW_WORDS; ++i) word[upper][i] = part[i];
        word[upper][LOW_WORDS] = high[0] >> (32 / PARTS * which);
      } else {
        const uint4 raw = *reinterpret_cast<const uint4*>(tile + key * K_ROW + key_chunk(key, 4 * run + c) * 16);
        word[upper][0] = raw.x, word[upper][1] = raw.y, word[upper][2] = raw.z, word[upper][3] = raw.w;
      }
    }
  }
  // Numbers 4 step .. 4 step + 3 of it: a[upper] the first two, a[2 + upper] the others.
  template <class Table> __device__ __forceinline__ void expand(int step, const Table& pairs, uint32_t (&a)[4]) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      if constexpr (KEY_CODE == CODE_HALF) {
        a[upper] = word[upper][2 * step], a[upper + 2] = word[upper][2 * step + 1];
      } else if constexpr (KEY_CODE == CODE_FP8) {
        halves_from_e4m3x4(word[upper][step], a[upper], a[upper + 2]);
      } else if constexpr (!WARPGROUPS) {   // one by one: registers are scarce
#pragma unroll
        for (int i = 0; i < 2; ++i) a[upper + 2 * i] = pairs.at(index_of(upper, 2 * step + i));
      } else if constexpr (KEY_CODE == CODE_5) {   // indices of two pairs in one word: a byte of low nibbles and above it the two high bits, each
        constexpr uint32_t TWO_BITS = 0x03030303u;
        const int word_at = step / 2, at = word_at % 2 * 2 + 4, shift = step % 2 * 4;
        const uint32_t high = pick_bytes(word[upper][LOW_WORDS] >> shift & TWO_BITS, word[upper][LOW_WORDS] >> (shift + 2) & TWO_BITS, word_at / 2 ? 0x7362 : 0x5140);
        const uint32_t index = pick_bytes(word[upper][word_at], high, step % 2 * 0x0202 + (at << 4 | 0x0100 | (at + 1) << 12));
        pairs.find(index, a[upper], a[upper + 2]);
      } else {
        pairs.find(index_of(upper, 2 * step) | index_of(upper, 2 * step + 1) << 16, a[upper], a[upper + 2]);
      }
    }
  }
  // Where the table has a pair of turned numbers.
  __device__ __forceinline__ uint32_t index_of(int upper, int pair) const {
    constexpr int LOW = low_bits(KEY_CODE);
    const int at = pair * 2 * LOW;
    if constexpr (KEY_CODE == CODE_5)   // the two low nibbles are a byte; the high bits, shifted, come to stand right above it
      return __byte_perm(word[upper][pair / 4], word[upper][LOW_WORDS] >> (2 * (pair % 4)), pair % 4 + 16 * (4 + pair / 4)) & 0x3ff;
    else
      return word[upper][at / 32] >> (at % 32) & ((1 << 2 * LOW) - 1) | (word[upper][LOW_WORDS] >> (2 * pair) & 3) << (2 * LOW);
  }
  __device__ __forceinline__ static float norm(const unsigned char* tile, int key, int run) {
    return half_to_float(*reinterpret_cast<const uint16_t*>(tile + key * K_ROW + run * turned_bytes(low_bits(KEY_CODE))));
  }
};

// Sums of the columns over the eight lanes that hold parts of each, left at to[column] for the sum over the warps.
template <int TILES> __device__ __forceinline__ void leave_sums(float (&sum)[TILES][2], float* to, int g, int c) {
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum[n][i] = __fadd_rn(sum[n][i], __shfl_xor_sync(ALL_LANES, sum[n][i], distance));
      if (g == 0) to[n * 8 + 2 * c + i] = sum[n][i];
    }
}
// Of one column, what WARPS warps left, in their order.
template <int WARPS, int COLUMNS> __device__ __forceinline__ float total_of(const float* sums, int column) {
  float total = sums[column];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) total = __fadd_rn(total, sums[w * COLUMNS + column]);
  return total;
}
// A thread's weighted values of column i of tile n; every second pair of dimensions lies STEP behind the one before.
template <int STEP, int DT, int TILES> __device__ __forceinline__ void store_values(float* target, const float (&out)[DT][TILES][4], int n, int i) {
  if constexpr (DT % 2 == 0) {
#pragma unroll
    for (int t = 0; t < DT; t += 2)
      *reinterpret_cast<float4*>(target + t / 2 * STEP) = make_float4(out[t][n][i], out[t][n][2 + i], out[t + 1][n][i], out[t + 1][n][2 + i]);
  } else {
#pragma unroll
    for (int t = 0; t < DT; ++t) *reinterpret_cast<float2*>(target + 2 * t) = make_float2(out[t][n][i], out[t][n][2 + i]);
  }
}

// Values of 16 keys from `key` on and one of SLICES shares of the dimensions as the tensor core takes them: thread (g, c) has
// keys c, c + 8, c + 4, c + 12 and dimensions 2 DT g .. of the slice; a[t] holds dimensions 2 t and 2 t + 1 as rows g and g + 8.
// HALVED: thread g has dimensions 4 g .. 4 g + 3 of the slice in each of two halves, and a[0] and a[1] hold the first half's.
template <int SLICES, int DT, bool HALVED = false>
__device__ __forceinline__ void value_tiles(const FirstLevels& levels, const unsigned char* tile, int key, int slice, int g, int c, uint32_t (&a)[DT][4]) {
  key += c;
  if constexpr (TURNED_VALUES && (HALVED || DT == 2)) {
    static_assert(HALVED ? SLICES == 4 && DT == 4 : DT == 2, "four dimensions of a thread in a block");
    const int part = HALVED ? slice : slice & 3, low_at = 2 + part * 8 + g, high_at = 34 + part * 4 + (g >> 1), shift = 4 * (g & 1);
#pragma unroll
    for (int half = 0; half < DT / 2; ++half) {
      const unsigned char* row = tile + key * V_ROW + (HALVED ? half : slice >> 2) * turned_bytes(2);
      uint32_t number[4][2];
      halves_of_rows(levels, gather_bytes(row[low_at], row[8 * V_ROW + low_at], row[4 * V_ROW + low_at], row[12 * V_ROW + low_at]),
                     gather_bytes(row[high_at], row[8 * V_ROW + high_at], row[4 * V_ROW + high_at], row[12 * V_ROW + high_at]) >> shift, number);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) a[2 * half + n / 2][2 * i + n % 2] = number[n][i];
    }
  } else if constexpr (TURNED_VALUES) {
    static_assert(DT == 4, "eight dimensions of a thread in a block");
    const int low_at = 2 + (slice & 1) * 16 + 2 * g, high_at = 34 + (slice & 1) * 8 + g;
    const unsigned char* row = tile + key * V_ROW + (slice >> 1) * turned_bytes(2);
    uint32_t low[4], number[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = *reinterpret_cast<const uint16_t*>(row + (8 * (i & 1) + 4 * (i >> 1)) * V_ROW + low_at);
    const uint32_t high = gather_bytes(row[high_at], row[8 * V_ROW + high_at], row[4 * V_ROW + high_at], row[12 * V_ROW + high_at]);
    const uint32_t first = pick_bytes(low[0], low[1], 0x5140), second = pick_bytes(low[2], low[3], 0x5140);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      halves_of_rows(levels, pick_bytes(first, second, part ? 0x7632 : 0x5410), high >> (4 * part), number);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) a[2 * part + n / 2][2 * i + n % 2] = number[n][i];
    }
  } else {
    constexpr int BYTES = V_ROW / SLICES / 8, WORDS = BYTES >= 4 ? BYTES / 4 : 1;   // of a thread in a row
    uint32_t word[4][WORDS];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int offset = slice * (V_ROW / SLICES) + g * BYTES, row = key + 8 * (i & 1) + 4 * (i >> 1);
      const unsigned char* at = tile + row * V_ROW + value_chunk(c, offset / 16) * 16 + offset % 16;
      if constexpr (BYTES == 16) {
        const uint4 raw = *reinterpret_cast<const uint4*>(at);
        word[i][0] = raw.x, word[i][1] = raw.y, word[i][2] = raw.z, word[i][3] = raw.w;
      } else if constexpr (BYTES == 8) {
        const uint2 raw = *reinterpret_cast<const uint2*>(at);
        word[i][0] = raw.x, word[i][1] = raw.y;
      } else {
        word[i][0] = BYTES == 4 ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
      }
    }
    // a[t][2 i] and a[t][2 i + 1]: dimensions 2 t and 2 t + 1 of the keys i and i + 1 of each pair.
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int t = 0; t < DT; ++t) {
        if constexpr (VALUE_CODE == CODE_HALF) {
          a[t][2 * i] = __byte_perm(word[2 * i][t], word[2 * i + 1][t], 0x5410), a[t][2 * i + 1] = __byte_perm(word[2 * i][t], word[2 * i + 1][t], 0x7632);
        } else {
          halves_from_e4m3x4(__byte_perm(word[2 * i][t / 2], word[2 * i + 1][t / 2], t % 2 ? 0x7362 : 0x5140), a[t][2 * i], a[t][2 * i + 1]);
        }
      }
  }
}
