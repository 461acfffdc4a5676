// attend_prefill by warpgroups (compute capability 9.0): two of them with 64 rows each, and one that turns the cache into fp16
// tiles ahead of them: two of its warps keys, two values. Queries stay in shared memory, what is attended in registers.
#pragma once
#include "kv_format.cuh"
#include "warpgroup.cuh"

constexpr int KEYS = 64, THREADS = 384, STAGES = 2, DIM_GROUPS = HEAD_DIM / 8, KEY_GROUPS = KEYS / 8;
constexpr int TILE = KEYS * HEAD_DIM * 2, ALIGNED = 1024;
constexpr bool FEED_TOGETHER = TURNED_KEYS && TURNED_VALUES;   // all four warps feed both, else two feed keys and two values
constexpr int FEEDERS = FEED_TOGETHER ? 128 : 64;
constexpr int FEED_REGISTERS = 88, ATTEND_REGISTERS = 208;   // of three times 168 at the launch
static_assert(FEED_REGISTERS + 2 * ATTEND_REGISTERS <= 3 * (65536 / THREADS / 8 * 8), "or they wait for ever");
static_assert(QUERIES == 128 && (!TURNED_VALUES || HEAD_DIM % BLOCK_DIMS == 0), "two warpgroups of 64 rows");

// Barriers, then queries [2], keys [STAGES], values [STAGES], each a tile.
struct AttendShared {
  unsigned char* base;
  __device__ __forceinline__ uint64_t* barrier(int kind, int stage) const { return reinterpret_cast<uint64_t*>(base) + kind * STAGES + stage; }
  __device__ __forceinline__ unsigned char* queries(int group) const { return base + ALIGNED + group * TILE; }
  __device__ __forceinline__ unsigned char* keys(int stage) const { return base + ALIGNED + (2 + stage) * TILE; }
  __device__ __forceinline__ unsigned char* values(int stage) const { return base + ALIGNED + (2 + STAGES + stage) * TILE; }
};
enum { KEYS_FULL = 0, KEYS_FREE = 1, VALUES_FULL = 2, VALUES_FREE = 3 };

// One half of the copying warpgroup, for keys or for values: the ring's next place, and what lies in the cache.
struct Feed {
  const Attend& p;
  const AttendShared& shared;
  int seq, first, keys, offset;   // keys from first on; offset: of the head in a layer's part of a block
  bool is_values;
  int stage, phase;

  __device__ __forceinline__ const unsigned char* source(int start) const { return kv_block(p, seq, start) + offset; }
  __device__ __forceinline__ SwizzledRows<KEYS> begin() const {
    arrival_wait(shared.barrier(is_values ? VALUES_FREE : KEYS_FREE, stage), phase ^ 1);
    return SwizzledRows<KEYS>{is_values ? shared.values(stage) : shared.keys(stage)};
  }
  __device__ __forceinline__ void end() {
    publish_shared();
    arrive(shared.barrier(is_values ? VALUES_FULL : KEYS_FULL, stage));
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Halves lie in the cache as they are wanted: a tile at once, past the registers.
__device__ __forceinline__ void feed_halves(Feed feed) {
  constexpr int PIECES = HEAD_DIM / 8, ROUNDS = KEYS * PIECES / FEEDERS;   // of 16 bytes in a row
  static_assert(KEYS * PIECES % FEEDERS == 0, "whole rounds");
  const int thread = threadIdx.x % FEEDERS;
#pragma unroll 1
  for (int start = feed.first; start < feed.keys; start += KEYS) {
    const unsigned char* source = feed.source(start);
    const SwizzledRows<KEYS> rows = feed.begin();
#pragma unroll 8
    for (int i = 0; i < ROUNDS; ++i) {
      const int piece = thread + i * FEEDERS, key = start + piece / PIECES;
      copy_async_16(rows.at(piece / PIECES, piece % PIECES * 8), source + piece * 16, key >= feed.p.first_position && key < feed.keys);
    }
    copy_async_commit();
    copy_async_wait<0>();
    feed.end();
  }
}

// Rows of e4m3: pieces of 16 bytes are loaded three rounds ahead.
__device__ __forceinline__ void feed_fp8(Feed feed) {
  constexpr int AT_ONCE = 4, ROW = HEAD_DIM, CHUNKS = KEYS * ROW / 16, ROUNDS = (CHUNKS + FEEDERS * AT_ONCE - 1) / (FEEDERS * AT_ONCE);
  const int thread = threadIdx.x % FEEDERS, rounds = (feed.keys - feed.first + KEYS - 1) / KEYS * ROUNDS;
  const auto load = [&](int round, uint4 (&raw)[AT_ONCE]) {
    const int start = feed.first + round / ROUNDS * KEYS, base = round % ROUNDS * FEEDERS * AT_ONCE + thread;
    const uint4* tile = reinterpret_cast<const uint4*>(round < rounds ? feed.source(start) : nullptr);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int chunk = base + i * FEEDERS, key = start + chunk / (ROW / 16);
      raw[i] = make_uint4(0, 0, 0, 0);
      if (chunk < CHUNKS && key >= feed.p.first_position && key < feed.keys) raw[i] = __ldcg(tile + chunk);
    }
  };
  const auto put = [&](int round, uint4 (&raw)[AT_ONCE]) {
    const int base = round % ROUNDS * FEEDERS * AT_ONCE + thread;
    const SwizzledRows<KEYS> rows = round % ROUNDS == 0 ? feed.begin() : SwizzledRows<KEYS>{feed.is_values ? feed.shared.values(feed.stage) : feed.shared.keys(feed.stage)};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int chunk = base + i * FEEDERS;
      if (chunk < CHUNKS) expand_fp8(raw[i], rows, chunk / (ROW / 16), chunk % (ROW / 16) * 16);
    }
    if (round % ROUNDS == ROUNDS - 1) feed.end();
    load(round + 3, raw);
  };
  uint4 first[AT_ONCE], second[AT_ONCE], third[AT_ONCE];
  load(0, first), load(1, second), load(2, third);
#pragma unroll 1
  for (int round = 0; round < rounds; round += 3) {
    put(round, first);
    if (round + 1 < rounds) put(round + 1, second);
    if (round + 2 < rounds) put(round + 2, third);
  }
}

template <int CODE> __device__ __forceinline__ void feed_turned(Feed& feed, int start) {
  const unsigned char* source = feed.source(start);
  expand_tile<CODE, FEEDERS, 4>(source, start, feed.p.first_position, feed.keys, feed.begin(), threadIdx.x % FEEDERS);
  feed.end();
}
template <int CODE> __device__ __forceinline__ void feed_tiles(Feed feed) {
  if constexpr (CODE == CODE_HALF) {
    feed_halves(feed);
  } else if constexpr (is_turned(CODE)) {
#pragma unroll 1
    for (int start = feed.first; start < feed.keys; start += KEYS) feed_turned<CODE>(feed, start);
  } else {
    feed_fp8(feed);
  }
}

__device__ __forceinline__ void feed(const Attend& p, const AttendShared& shared, const Tile& tile) {
  const int key_head = tile.head / GROUP;
  Feed key_feed = {p, shared, tile.seq, tile.begin, tile.end, key_head * K_HEAD, false, 0, 0};
  Feed value_feed = {p, shared, tile.seq, tile.begin, tile.end, KV_VALUES + key_head * V_HEAD, true, 0, 0};
  if constexpr (FEED_TOGETHER) {
#pragma unroll 1
    for (int start = tile.begin; start < tile.end; start += KEYS) feed_turned<KEY_CODE>(key_feed, start), feed_turned<VALUE_CODE>(value_feed, start);
  } else if (threadIdx.x < FEEDERS) {
    feed_tiles<KEY_CODE>(key_feed);
  } else {
    feed_tiles<VALUE_CODE>(value_feed);
  }
}

__device__ __forceinline__ void weigh_values(float (&out)[DIM_BLOCKS][8][4], const uint32_t (&a)[4], const unsigned char* values, int step) {
  if constexpr (DIM_BLOCKS == 4) {
    warpgroup_mma_across(reinterpret_cast<float(&)[32][4]>(out), a, values, step);
  } else {
#pragma unroll
    for (int block = 0; block < DIM_BLOCKS; ++block) warpgroup_mma_across(out[block], a, values + block * BLOCK_OF_64, step);
  }
}

// A warpgroup's 64 lines.
__device__ __forceinline__ void attend_group(const Attend& p, const AttendShared& shared, int group, const Tile& tile, float2* joined) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane >> 2, thread = threadIdx.x % 128, first = 64 * group, own = first + warp * 16;
  unsigned char* queries = shared.queries(group);
  constexpr int PIECES = 64 * (HEAD_DIM / 8) / 128, AT_ONCE = 8;   // of 16 bytes, a thread
#pragma unroll 1
  for (int base = 0; base < PIECES; base += AT_ONCE) {
    uint4 value[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = thread + (base + i) * 128, r = at / (HEAD_DIM / 8), piece = at % (HEAD_DIM / 8);
      value[i] = make_uint4(0, 0, 0, 0);
      if (base + i < PIECES && first + r < tile.lines)
        value[i] = *reinterpret_cast<const uint4*>(p.q_half + ((long long)tile.row(first + r) * NUM_HEADS + tile.head_of(first + r)) * HEAD_DIM + piece * 8);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = thread + (base + i) * 128;
      if (base + i < PIECES) *SwizzledRows<KEYS>{queries}.at(at / (HEAD_DIM / 8), at % (HEAD_DIM / 8) * 8) = value[i];
    }
  }
  publish_shared();
  group_barrier(1 + group, 128);
  float factor[2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  int position[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = own + g + 8 * i, row = tile.row(line);
    position[i] = line < tile.lines ? p.positions[row] : -1;
    factor[i] = line < tile.lines ? __fmul_rn(p.q_factor[(long long)row * NUM_HEADS + tile.head_of(line)], 1.44269504f) : 0.0f;   // powers of two from here on
  }
  const int lowest = first < tile.lines ? p.positions[tile.row(first)] : -1, last = first < tile.lines ? p.positions[tile.row(min(first + 63, tile.lines - 1))] : -1;
  float out[DIM_BLOCKS][8][4];
#pragma unroll
  for (int n = 0; n < DIM_GROUPS; ++n) out[n / 8][n % 8][0] = out[n / 8][n % 8][1] = out[n / 8][n % 8][2] = out[n / 8][n % 8][3] = 0.0f;
  int stage = 0, phase = 0;
  const int end = tile.end;
  int start = tile.begin;
#pragma unroll 1
  while (true) {
    const int stop = min(end, cut_begin(cut_of(start) + 1));
#pragma unroll 1
    for (; start < stop; start += KEYS) {
      arrival_wait(shared.barrier(KEYS_FULL, stage), phase);
      if (start <= last) {
        float score[KEY_GROUPS][4], correction[2];
        uint32_t a[KEYS / 16][4];
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
        warpgroup_begin();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) warpgroup_mma_tiles(score, queries, shared.keys(stage), step);
        warpgroup_commit();
        warpgroup_wait<0>();
        warpgroup_settle(score);
        if (lane == 0) arrive(shared.barrier(KEYS_FREE, stage));
        soften(score, factor, position, start + KEYS - 1 > lowest || start < p.first_position, start, p.first_position, top, sum, correction, a);
        if (__any_sync(ALL_LANES, correction[0] != 1.0f || correction[1] != 1.0f))
#pragma unroll
          for (int n = 0; n < DIM_GROUPS; ++n) {
            float(&o)[4] = out[n / 8][n % 8];
            o[0] *= correction[0], o[1] *= correction[0], o[2] *= correction[1], o[3] *= correction[1];
          }
        arrival_wait(shared.barrier(VALUES_FULL, stage), phase);
        warpgroup_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) weigh_values(out, a[step], shared.values(stage), step);
        warpgroup_commit();
        warpgroup_wait<0>();
#pragma unroll
        for (int block = 0; block < DIM_BLOCKS; ++block) warpgroup_settle(out[block]);
      } else {
        arrival_wait(shared.barrier(VALUES_FULL, stage), phase);
        if (lane == 0) arrive(shared.barrier(KEYS_FREE, stage));
      }
      if (lane == 0) arrive(shared.barrier(VALUES_FREE, stage));
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    if (start >= end) break;
    join_cut(p, tile, joined, own, start == KEY_CUT, false, out, top, sum);
  }
  if (p.part_o) return put_part(p, tile, own, out, top, sum);
  if (end > KEY_CUT) join_cut(p, tile, joined, own, false, true, out, top, sum);
  if constexpr (TURNED_VALUES) group_barrier(1 + group, 128);   // the queries give their place to what was attended
  put_attended(p, tile, own, out, sum, reinterpret_cast<float*>(queries + warp * (16 * BLOCK_DIMS * 4)));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prefill(const __grid_constant__ Attend p) {
  SHARED_BYTES(dynamic);
  __shared__ float2 joined[QUERIES];
  __shared__ Tile tile;   // not in registers, of which there are few
  const AttendShared shared = {dynamic + (ALIGNED - reinterpret_cast<uintptr_t>(dynamic) % ALIGNED) % ALIGNED};
  if (threadIdx.x == 0) {
    if (!find_tile(p, tile)) tile.lines = 0;
    for (int stage = 0; stage < STAGES; ++stage) {
      arrival_init(shared.barrier(KEYS_FULL, stage), FEEDERS), arrival_init(shared.barrier(VALUES_FULL, stage), FEEDERS);
      arrival_init(shared.barrier(KEYS_FREE, stage), 8), arrival_init(shared.barrier(VALUES_FREE, stage), 8);
    }
    arrival_publish();
  }
  __syncthreads();
  if (!tile.lines) return;
  if (threadIdx.x < 128) {
    give_registers<FEED_REGISTERS>();
    feed(p, shared, tile);
  } else {
    take_registers<ATTEND_REGISTERS>();
    attend_group(p, shared, threadIdx.x / 128 - 1, tile, joined);
  }
}
