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

struct Item {   // lies in shared memory, as registers are scarce
  int seq, first_row, rows, head, cut, start, end, position;   // keys start .. end - 1; position of the first row
  int found, next, old;   // old: the keys below it are of earlier passes; the position of the sequence's first row, not of this group's
};
static_assert(sizeof(Item) <= 48, "bytes that plans keep for it");

// Groups of rows of one cut follow each other: they find its keys in the second cache. One that does not reach the cut gets no keys of it.
template <int ROWS> __device__ __forceinline__ bool find_item(const Attend& p, int index, Item& item) {
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int first = p.row_starts[seq], end = p.row_starts[seq + 1];
    if (first >= end) continue;
    const int groups = (end - first + ROWS - 1) / ROWS, position = p.positions[first], cuts = cuts_of(position + end - first);
    const int items = cuts * NUM_KV_HEADS * groups;
    if (index < items) {
      const int group = index % groups, head = index / groups % NUM_KV_HEADS, cut = cuts - 1 - index / groups / NUM_KV_HEADS;   // the longest first
      item.seq = seq, item.first_row = first + group * ROWS, item.rows = min(ROWS, end - item.first_row), item.head = head, item.cut = cut;
      item.position = position + group * ROWS, item.old = position, item.start = cut_start(cut), item.end = min(cut_start(cut + 1), item.position + item.rows);
      return true;
    }
    index -= items;
  }
  return false;
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

// Tile `tile` of the item, if it has it, on its way.
template <int THREADS> __device__ __forceinline__ void fetch_keys(const Attend& p, const Item& item, int tile, unsigned char* target) {
  const int start = item.start + tile * KEYS;
  if (tile < 0 || start >= item.end) return;
  const unsigned char* source = kv_block(p, item.seq, start) + item.head * K_HEAD;
  copy_tile<THREADS, K_ROW, TURNED_KEYS>(source, target, p.first_position - start, item.end - start, key_chunk);
}
template <int THREADS> __device__ __forceinline__ void fetch_values(const Attend& p, const Item& item, int tile, unsigned char* target) {
  const int start = item.start + tile * KEYS;
  if (tile < 0 || start >= item.end) return;
  const unsigned char* source = kv_block(p, item.seq, start) + KV_VALUES + item.head * V_HEAD;
  copy_tile<THREADS, V_ROW, TURNED_VALUES>(source, target, p.first_position - start, item.end - start, value_chunk);
}

// Place of a column in the partial results, or -1.
__device__ __forceinline__ long long place(const Attend& p, const Item& item, int column) {
  if (column >= item.rows * GROUP) return -1;
  return ((long long)(item.first_row + column / GROUP) * p.max_splits + item.cut) * NUM_HEADS + item.head * GROUP + column % GROUP;
}

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
  __device__ __forceinline__ void expand(int step, const uint32_t* pairs, uint32_t (&a)[4]) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      if constexpr (KEY_CODE == CODE_HALF) {
        a[upper] = word[upper][2 * step], a[upper + 2] = word[upper][2 * step + 1];
      } else if constexpr (KEY_CODE == CODE_FP8) {
        halves_from_e4m3x4(word[upper][step], a[upper], a[upper + 2]);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          constexpr int LOW = low_bits(KEY_CODE);
          const int pair = 2 * step + i;
          if constexpr (KEY_CODE == CODE_5) {   // the two low nibbles are a byte; the high bits, shifted, come to stand right above it
            const uint32_t high = word[upper][LOW_WORDS] >> (2 * (pair % 4));
            a[upper + 2 * i] = pairs[__byte_perm(word[upper][pair / 4], high, pair % 4 + 16 * (4 + pair / 4)) & 0x3ff];
          } else {
            const int at = pair * 2 * LOW;
            const uint32_t high = word[upper][LOW_WORDS] >> (2 * pair) & 3;
            a[upper + 2 * i] = pairs[(word[upper][at / 32] >> (at % 32) & ((1 << 2 * LOW) - 1)) | high << (2 * LOW)];
          }
        }
      }
    }
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
template <int SLICES, int DT, bool HALVED = false> __device__ __forceinline__ void value_tiles(const unsigned char* tile, int key, int slice, int g, int c, uint32_t (&a)[DT][4]) {
  key += c;
  if constexpr (HALVED) {
    static_assert(TURNED_VALUES && SLICES == 4 && DT == 4, "four dimensions of a thread in each half");
    const int low_at = 2 + slice * 8 + g, high_at = 34 + slice * 4 + (g >> 1), shift = 4 * (g & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned char* row = tile + (key + 4 * i) * V_ROW + half * turned_bytes(2);
        const uint32_t low = row[low_at] | (uint32_t)row[8 * V_ROW + low_at] << 8;
        const uint32_t high = (row[high_at] >> shift & 15) | (uint32_t)(row[8 * V_ROW + high_at] >> shift & 15) << 4;
        uint32_t pair[4];
        pair_halves(spread_indices(low, high), pair);
        a[2 * half][2 * i] = pair[0], a[2 * half][2 * i + 1] = pair[1], a[2 * half + 1][2 * i] = pair[2], a[2 * half + 1][2 * i + 1] = pair[3];
      }
  } else if constexpr (TURNED_VALUES && DT == 4) {
    uint32_t index[4], first[8], second[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned char* block = tile + (key + 8 * (i & 1) + 4 * (i >> 1)) * V_ROW + (slice >> 1) * turned_bytes(2);
      index[i] = spread_indices(*reinterpret_cast<const uint16_t*>(block + 2 + (slice & 1) * 16 + 2 * g), block[34 + (slice & 1) * 8 + g]);
    }
    pair_rows(index[0], index[1], first);
    pair_rows(index[2], index[3], second);
#pragma unroll
    for (int t = 0; t < DT; ++t) a[t][0] = first[2 * t], a[t][1] = first[2 * t + 1], a[t][2] = second[2 * t], a[t][3] = second[2 * t + 1];
  } else if constexpr (TURNED_VALUES) {
    static_assert(DT == 2, "four dimensions of a thread");
    const unsigned char* block = tile + key * V_ROW + (slice >> 2) * turned_bytes(2);
    const int low_at = 2 + (slice & 3) * 8 + g, high_at = 34 + (slice & 3) * 4 + (g >> 1), shift = 4 * (g & 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned char* row = block + 4 * i * V_ROW;
      const uint32_t low = row[low_at] | (uint32_t)row[8 * V_ROW + low_at] << 8;
      const uint32_t high = (row[high_at] >> shift & 15) | (uint32_t)(row[8 * V_ROW + high_at] >> shift & 15) << 4;
      uint32_t pair[4];
      pair_halves(spread_indices(low, high), pair);
      a[0][2 * i] = pair[0], a[0][2 * i + 1] = pair[1], a[1][2 * i] = pair[2], a[1][2 * i + 1] = pair[3];
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
