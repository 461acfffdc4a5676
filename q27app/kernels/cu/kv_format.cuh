// Keys and values in the cache: addresses, how a row is stored, how a tile of rows becomes fp16 for the tensor cores.
//
// A block holds 64 positions of every layer; layer_offset leads to [K: kv head][64][K_ROW], then V alike.
// KV_FORMAT 0: fp16, saturating. 1: fp8 e4m3, saturating (compute capability 8.9). 2: turbo3, keys and values of 3 bits.
// 3: turbo3v, fp16 keys and 3-bit values. 4: turbo5k, 5-bit keys and 3-bit values. Codes of bits: wht.cuh; rows of such keys
// and values stay turned, queries are turned once and what was attended is turned back once.
#pragma once
#include "ready.cuh"
#include "wht.cuh"

constexpr int CODE_HALF = 0, CODE_FP8 = 1, CODE_3 = 2, CODE_5 = 3;
constexpr int KEY_CODE = KV_FORMAT == 1 ? CODE_FP8 : KV_FORMAT == 2 ? CODE_3 : KV_FORMAT == 4 ? CODE_5 : CODE_HALF;
constexpr int VALUE_CODE = KV_FORMAT == 0 ? CODE_HALF : KV_FORMAT == 1 ? CODE_FP8 : CODE_3;
__host__ __device__ constexpr bool is_turned(int code) { return code >= CODE_3; }
__host__ __device__ constexpr int low_bits(int code) { return code == CODE_3 ? 2 : 4; }
__host__ __device__ constexpr int code_row_bytes(int code) {
  return is_turned(code) ? HEAD_DIM / BLOCK_DIMS * turned_bytes(low_bits(code)) : HEAD_DIM * (code == CODE_HALF ? 2 : 1);
}
constexpr bool TURNED_KEYS = is_turned(KEY_CODE), TURNED_VALUES = is_turned(VALUE_CODE);

constexpr int BLOCK_POSITIONS = 64;
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;   // query heads of a key head
constexpr int K_ROW = code_row_bytes(KEY_CODE), V_ROW = code_row_bytes(VALUE_CODE);
constexpr int K_HEAD = BLOCK_POSITIONS * K_ROW, V_HEAD = BLOCK_POSITIONS * V_ROW;
constexpr int KV_VALUES = NUM_KV_HEADS * K_HEAD;   // offset of the values in a layer's part
static_assert(HEAD_DIM % 64 == 0 && NUM_HEADS % NUM_KV_HEADS == 0 && ROTARY_DIM % 2 == 0, "head geometry");
static_assert(!TURNED_VALUES || HEAD_DIM == 256, "turned rows are two blocks of 128 numbers");
static_assert(K_HEAD % 16 == 0 && V_HEAD % 16 == 0, "a head's part of a block is whole pieces of 16 bytes");

struct Attend {
  const float* y;             // [rows, y_stride]: per head (query, gate), keys, values
  const float* q_norm;        // [HEAD_DIM]
  const float* k_norm;
  const float* rope;          // [rows, ROTARY_DIM / 2, 2]
  const int* positions;       // [rows]
  const int* row_starts;      // [seqs + 1]
  const int* block_tables;    // [seqs, max_blocks]
  unsigned char* blocks;
  float* part_ml;             // [rows, max_splits, heads, 2]
  float* part_o;              // [rows, max_splits, heads, HEAD_DIM]
  uint16_t* q_half;           // [rows, heads, HEAD_DIM] fp16; null: only keys and values are wanted
  float* q_factor;            // [rows, heads]
  float* out;                 // [rows, out_stride]
  int* counter;               // items of this launch of attend_decode that its blocks have taken; its attend_merge sets it back
  long long block_bytes, layer_offset;
  int num_seqs, rows, y_stride, out_stride, max_blocks, first_position, max_splits;
  float eps;
  Ready ready;                // where rows are left in place of out, and which of its rows is row 0
  int ready_row;
  int first_cut;              // of a launch of attend_prefill, whose cuts are max_splits
  float* totals;              // [rows, heads, 2]: of the cuts before
};

// A layer's part of the block that holds `position`: keys, and its values lie KV_VALUES bytes on.
__device__ __forceinline__ unsigned char* kv_block(const Attend& p, int seq, int position) {
  const int block = p.block_tables[seq * p.max_blocks + position / BLOCK_POSITIONS];
  return p.blocks + block * p.block_bytes + p.layer_offset;
}

// A lane's share of the weights of a head's norm.
struct NormWeights {
  static constexpr int PER_LANE = HEAD_DIM / 32;
  float weight[PER_LANE];
  __device__ __forceinline__ explicit NormWeights(const float* norm) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) weight[i] = norm[threadIdx.x % 32 + 32 * i];
  }
};

// What a warp turns of a row: a lane's numbers, and its rotary angle.
struct Turning {
  static constexpr int PER_LANE = HEAD_DIM / 32, HALF = ROTARY_DIM / 2;
  float value[PER_LANE];
  float2 angle;
  __device__ __forceinline__ void load(const Attend& p, const float* source, int row) {
    const int lane = threadIdx.x % 32;
    angle = lane < HALF ? (reinterpret_cast<const float2*>(p.rope) + (long long)row * HALF)[lane] : make_float2(1.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) value[i] = source[lane + 32 * i];
  }
};

// One warp: norm over the head, rotary angles on the first ROTARY_DIM dimensions. Leaves [HEAD_DIM] in work.
__device__ __forceinline__ void norm_rope(const Attend& p, const Turning& from, const NormWeights& norm, int row, float* work) {
  const int lane = threadIdx.x % 32;
  constexpr int PER_LANE = Turning::PER_LANE, HALF = Turning::HALF;
  float squares = 0.0f;
  const float2* angles = reinterpret_cast<const float2*>(p.rope) + (long long)row * HALF;
  float2 turned = from.angle;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) squares = fmaf(from.value[i], from.value[i], squares);
  const float rms = rsqrtf(warp_sum(squares) / (float)HEAD_DIM + p.eps);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) work[lane + 32 * i] = from.value[i] * rms * norm.weight[i];
  __syncwarp();
  for (int d = lane; d < HALF; d += 32) {
    const float a = work[d], b = work[d + HALF];
    if (d != lane) turned = angles[d];
    work[d] = fmaf(a, turned.x, -__fmul_rn(b, turned.y));
    work[d + HALF] = fmaf(b, turned.x, __fmul_rn(a, turned.y));
  }
  __syncwarp();
}

__device__ __forceinline__ float to_half_range(float value) { return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value; }

// One warp: [HEAD_DIM] floats -> a plain row, four bytes a lane at a time, which lie where `at` says.
template <int CODE, class At> __device__ __forceinline__ void store_plain(const float* values, At at) {
  constexpr int EACH = CODE == CODE_HALF ? 2 : 4;
#pragma unroll
  for (int d = EACH * (threadIdx.x % 32); d < HEAD_DIM; d += 32 * EACH) {
    if constexpr (CODE == CODE_HALF) {
      *reinterpret_cast<uint32_t*>(at(2 * d)) = half2_from_floats(to_half_range(values[d]), to_half_range(values[d + 1]));
    } else {
      const float4 four = *reinterpret_cast<const float4*>(values + d);
      *reinterpret_cast<uint32_t*>(at(d)) = e4m3x2_from_floats(four.x, four.y) | e4m3x2_from_floats(four.z, four.w) << 16;
    }
  }
}
// One warp: [HEAD_DIM] floats -> a row of the cache.
template <int CODE> __device__ __forceinline__ void store_row(const float* values, unsigned char* target) {
  if constexpr (is_turned(CODE)) {
#pragma unroll
    for (int half = 0; half < HEAD_DIM / BLOCK_DIMS; ++half) {
      const float4 four = *reinterpret_cast<const float4*>(values + half * BLOCK_DIMS + 4 * (threadIdx.x % 32));
      float v[4] = {four.x, four.y, four.z, four.w};
      store_turned<low_bits(CODE)>(v, target + half * turned_bytes(low_bits(CODE)));
    }
  } else {
    store_plain<CODE>(values, [&](int byte) { return target + byte; });
  }
}

// Where a row enters the cache: the layer's part of a block, and which of its positions.
struct RowPlace {
  unsigned char* block;
  int slot;
  __device__ __forceinline__ RowPlace(const Attend& p, int seq, int row) : block(kv_block(p, seq, p.positions[row])), slot(p.positions[row] % BLOCK_POSITIONS) {}
  __device__ __forceinline__ unsigned char* key(int head) const { return block + head * K_HEAD + slot * K_ROW; }
  __device__ __forceinline__ unsigned char* value(int head) const { return block + KV_VALUES + head * V_HEAD + slot * V_ROW; }
};

__device__ __forceinline__ const float* query_of(const Attend& p, int row, int head) { return p.y + (long long)row * p.y_stride + head * 2 * HEAD_DIM; }
__device__ __forceinline__ const float* key_of(const Attend& p, int row, int head) { return p.y + (long long)row * p.y_stride + (2 * NUM_HEADS + head) * HEAD_DIM; }
__device__ __forceinline__ const float* value_of(const Attend& p, int row, int head) { return key_of(p, row, NUM_KV_HEADS + head); }

// One warp: the key, or the value, of a row and key head into the cache. work: [HEAD_DIM] floats.
__device__ __forceinline__ void write_key(const Attend& p, const RowPlace& to, const NormWeights& norm, int row, int head, float* work) {
  Turning from;
  from.load(p, key_of(p, row, head), row);
  norm_rope(p, from, norm, row, work);
  store_row<KEY_CODE>(work, to.key(head));
}
__device__ __forceinline__ void write_value(const Attend& p, const RowPlace& to, int row, int head) { store_row<VALUE_CODE>(value_of(p, row, head), to.value(head)); }

// One warp: a query row as fp16 in the keys' frame, scaled by a power of two; returns what brings a product back and divides
// by sqrt(D).
__device__ __forceinline__ float write_query(const Attend& p, const Turning& from, const NormWeights& norm, int row, float* work, uint16_t* target) {
  const int lane = threadIdx.x % 32;
  norm_rope(p, from, norm, row, work);
  if constexpr (TURNED_KEYS) {
#pragma unroll
    for (int half = 0; half < HEAD_DIM / BLOCK_DIMS; ++half) {
      float4* four = reinterpret_cast<float4*>(work + half * BLOCK_DIMS + 4 * lane);
      float v[4] = {four->x, four->y, four->z, four->w};
      turn(v);
      *four = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncwarp();
  }
  float largest = 0.0f;
  for (int d = lane; d < HEAD_DIM; d += 32) largest = fmaxf(largest, fabsf(work[d]));
  const float scale = half_range_scale(warp_max(largest));
  for (int d = 2 * lane; d < HEAD_DIM; d += 64)
    *reinterpret_cast<uint32_t*>(target + d) = half2_from_floats(work[d] * scale, work[d + 1] * scale);
  return power_inverse(scale) * rsqrtf((float)HEAD_DIM);
}
__device__ __forceinline__ float write_query(const Attend& p, const NormWeights& norm, int row, int head, float* work, uint16_t* target) {
  Turning from;
  from.load(p, query_of(p, row, head), row);
  return write_query(p, from, norm, row, work, target);
}

// Where the numbers of KEYS keys go in shared memory as fp16, eight at a time: [number / 64][key][64], the 16-byte pieces of 128 bytes
// in the order piece ^ (key % 8), as warpgroup matrix instructions want it and ldmatrix likes it.
template <int KEYS> struct SwizzledRows {
  unsigned char* tile;
  __device__ __forceinline__ uint4* at(int key, int number) const {
    return reinterpret_cast<uint4*>(tile + (number / 64 * KEYS + key) * 128 + (number / 8 % 8 ^ key % 8) * 16);
  }
};

// 16 numbers of a row of e4m3 from number `number` on -> fp16.
template <class Layout> __device__ __forceinline__ void expand_fp8(const uint4& raw, Layout rows, int key, int number) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    *rows.at(key, number + 8 * i) = make_uint4(half2_from_e4m3x2(word[2 * i] & 0xffff), half2_from_e4m3x2(word[2 * i] >> 16),
                                               half2_from_e4m3x2(word[2 * i + 1] & 0xffff), half2_from_e4m3x2(word[2 * i + 1] >> 16));
}

// 32 numbers of a turned row, from number 32 * piece on: codes and norm.
template <int CODE> struct TurnedPiece {
  uint32_t low[low_bits(CODE)], high[1];
  float norm;

  __device__ __forceinline__ void load(const unsigned char* row, int piece) {
    constexpr int LOW = low_bits(CODE);
    const int half = piece / 4, part = piece % 4;
    const unsigned char* block = row + half * turned_bytes(LOW);
    read_words(block + 2 + 4 * LOW * part, half == 0, low);
    read_words(block + 2 + 16 * LOW + 4 * part, half == 0, high);
    norm = half_to_float(*reinterpret_cast<const uint16_t*>(block));
  }
};

// Codes times norm -> fp16, or zeros. level: that of index lane % 2^bits; all lanes of a warp.
template <int CODE, class Layout>
__device__ __forceinline__ void expand_turned(const TurnedPiece<CODE>& from, int piece, bool wanted, float level, Layout rows, int key) {
  constexpr int LOW = low_bits(CODE);
  uint32_t low_minus, low_plus, high_minus, high_plus;   // bytes of the eight products of 3-bit numbers: PRMT finds them by index
  if constexpr (LOW == 2) {
    const uint32_t first = half2_from_floats(LEVELS_3[0] * from.norm, LEVELS_3[1] * from.norm);
    const uint32_t second = half2_from_floats(LEVELS_3[2] * from.norm, LEVELS_3[3] * from.norm);
    low_plus = __byte_perm(first, second, 0x6420), high_plus = __byte_perm(first, second, 0x7531);
    low_minus = __byte_perm(low_plus, 0, 0x0123), high_minus = __byte_perm(high_plus, 0, 0x0123) ^ 0x80808080u;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t word[4];
    if constexpr (LOW == 2) {
      const uint32_t index = spread_indices(from.low[i / 2] >> 16 * (i % 2) & 0xffffu, from.high[0] >> 8 * i & 0xffu);
      const uint32_t even_low = __byte_perm(low_minus, low_plus, index), even_high = __byte_perm(high_minus, high_plus, index);
      const uint32_t odd_low = __byte_perm(low_minus, low_plus, index >> 16), odd_high = __byte_perm(high_minus, high_plus, index >> 16);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t even = __byte_perm(even_low, even_high, pair ? 0x7362 : 0x5140), odd = __byte_perm(odd_low, odd_high, pair ? 0x7362 : 0x5140);
        word[2 * pair] = __byte_perm(even, odd, 0x5410), word[2 * pair + 1] = __byte_perm(even, odd, 0x7632);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float value[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int number = 8 * i + 2 * j + k, at = number * LOW;
          value[k] = __shfl_sync(ALL_LANES, level, (from.low[at / 32] >> (at % 32) & ((1 << LOW) - 1)) | (from.high[0] >> number & 1) << LOW) * from.norm;
        }
        word[j] = half2_from_floats(value[0], value[1]);
      }
    }
    *rows.at(key, 32 * piece + 8 * i) = wanted ? make_uint4(word[0], word[1], word[2], word[3]) : make_uint4(0, 0, 0, 0);
  }
}

// A tile of 64 consecutive turned rows of a head -> fp16 rows in shared memory, by TILE_THREADS threads of which this is `thread`, each
// with AT_ONCE loads in flight; keys outside [first, end) become zeros. tile: the head's part of the block of `position`, a multiple of 64.
template <int CODE, int TILE_THREADS, int AT_ONCE = 2, class Layout>
__device__ __forceinline__ void expand_tile(const unsigned char* tile, int position, int first, int end, Layout rows, int thread) {
  constexpr int PIECES = HEAD_DIM / 32, ROUNDS = BLOCK_POSITIONS * PIECES / TILE_THREADS;
  static_assert(BLOCK_POSITIONS * PIECES % TILE_THREADS == 0, "whole warps");
  constexpr int TOGETHER = ROUNDS % AT_ONCE == 0 ? AT_ONCE : 1;   // pieces that are loaded at once
  const float level = level_of<low_bits(CODE)>(thread);
#pragma unroll 1
  for (int first_round = 0; first_round < ROUNDS; first_round += TOGETHER) {
    TurnedPiece<CODE> piece[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int at = thread + (first_round + i) * TILE_THREADS;
      piece[i].load(tile + at / PIECES * code_row_bytes(CODE), at % PIECES);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int at = thread + (first_round + i) * TILE_THREADS, key = at / PIECES;
      expand_turned<CODE>(piece[i], at % PIECES, position + key >= first && position + key < end, level, rows, key);
    }
  }
}
