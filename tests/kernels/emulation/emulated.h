// Runs the CUDA sources on a CPU, block by block: every thread is a fiber, barriers and warp exchanges switch fibers.
// A barrier that not all live threads reach ends the process with a message. Shared memory starts as NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>
#include "races.h"
using std::max;
using std::min;

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static const
#define __shared__ static
#define __align__(n) alignas(n)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Dim { unsigned x = 1, y = 1, z = 1; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.text
.type emulated_switch,@function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulated {
struct Fiber { void* sp; Dim index; bool done, waited; };
// What lanes hand each other lies in one half of words until the next exchange but one: a barrier in front of the reading is enough.
using Words = uint64_t (*)[8];
struct Warp { uint64_t words[2][32][8]; int arrived, live; unsigned turn; };
constexpr size_t STACK = 64 * 1024;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<char> stacks;
static unsigned char* dynamic_shared = nullptr;
static void* main_sp;
static int current, block_arrived, block_live;
static unsigned block_turn;
static long long progress;
static void (*body)(void**);
static void** arguments;
static const unsigned char *late_at, *late_old;
static size_t late_bytes;

inline void yield() { emulated_switch(&fibers[current].sp, main_sp); asm volatile("" ::: "memory"); }   // others have run
inline Warp& warp() { return warps[current / 32]; }
inline Words words() { return warp().words[warp().turn % 2]; }
inline void warp_barrier() {
  Warp& w = warp();
  const unsigned turn = w.turn;
  if (++w.arrived == w.live) { w.arrived = 0; ++w.turn; ++progress; race_event(MET, &w, 0); return; }
  while (w.turn == turn) yield();
}
// What a thread finds at an address: of the bytes that are late, as long as it has not waited for earlier kernels, the old ones.
inline const void* found(const void* at) {
  const size_t offset = static_cast<const unsigned char*>(at) - late_at;
  return late_bytes && offset < late_bytes && !fibers[current].waited ? late_old + offset : at;
}
inline void block_barrier() {
  const unsigned turn = block_turn;
  if (++block_arrived == block_live) { block_arrived = 0; ++block_turn; ++progress; race_event(MET, &block_turn, 0); return; }
  while (block_turn == turn) yield();
}
struct Group { int arrived; unsigned turn; };
static Group groups[16];
inline void group_barrier(int id, int threads) {
  Group& g = groups[id];
  const unsigned turn = g.turn;
  if (++g.arrived == threads) { g.arrived = 0; ++g.turn; ++progress; race_event(MET, &g, 0); return; }
  while (g.turn == turn) yield();
}
inline void entry() {
  body(arguments);
  fibers[current].done = true;
  ++progress;
  Warp& w = warp();
  if (--w.live > 0 && w.arrived == w.live) { w.arrived = 0; ++w.turn; race_event(MET, &w, 0); }
  if (--block_live > 0 && block_arrived == block_live) { block_arrived = 0; ++block_turn; race_event(MET, &block_turn, 0); }
  yield();
  abort();
}
inline void run_block(int threads, size_t shared) {
  fibers.assign(threads, Fiber{});
  warps.assign((threads + 31) / 32, Warp{});
  stacks.resize(STACK * threads + 64);
  std::vector<unsigned char> memory(shared + 64);
  dynamic_shared = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  memset(dynamic_shared, 0xff, shared);
  race_begin(threads, &current, dynamic_shared, shared);
  block_arrived = 0, block_live = threads;
  char* base = stacks.data() + (64 - reinterpret_cast<uintptr_t>(stacks.data()) % 64);
  for (int i = 0; i < threads; ++i) {
    fibers[i].index = {unsigned(i) % blockDim.x, unsigned(i) / blockDim.x % blockDim.y, unsigned(i) / (blockDim.x * blockDim.y)};
    warps[i / 32].live++;
    void** top = reinterpret_cast<void**>(base + STACK * (i + 1)) - 3;
    *--top = reinterpret_cast<void*>(&entry);
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    fibers[i].sp = top;
  }
  int left = threads;
  while (left > 0) {
    const long long before = progress;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      current = i;
      threadIdx = fibers[i].index;
      emulated_switch(&main_sp, fibers[i].sp);
      if (fibers[i].done) --left;
    }
    if (progress == before && left > 0) { fprintf(stderr, "emulated: a barrier is not reached by all threads, or a word is not posted\n"); abort(); }
  }
  race_begin(0, &current, nullptr, 0);   // the memory may be anybody's next
}
template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(args[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** args) { call(kernel, args, std::index_sequence_for<A...>{}); }
inline void run_grid(void (*function)(void**), const unsigned* grid, const unsigned* block, unsigned shared, void** args) {
  body = function, arguments = args;
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) { blockIdx = {x, y, z}; run_block(block[0] * block[1] * block[2], shared); }
}
template <class T> T exchange(T value, int source) {
  const Words shown = words();
  memcpy(shown[current % 32], &value, sizeof(T));
  warp_barrier();
  T out;
  memcpy(&out, shown[source], sizeof(T));
  return out;
}
}  // namespace emulated

#define SHARED_BYTES(name) unsigned char* name = emulated::dynamic_shared
// A barrier that orders what its threads did; an exchange of a warp does not.
template <class F> void meet(const void* object, F barrier) { race_event(LEFT, object, 0), barrier(), race_event(SEEN, object, 0); }
inline void __syncthreads() { meet(&emulated::block_turn, emulated::block_barrier); }
template <int LAST = 2> inline void group_barrier(int id, int threads) { meet(&emulated::groups[id], [=] { emulated::group_barrier(id, threads); }); }
inline void __syncwarp() { meet(&emulated::warp(), emulated::warp_barrier); }
inline void __threadfence() {}
template <class T> T __shfl_xor_sync(unsigned, T value, int distance) { return emulated::exchange(value, (emulated::current % 32) ^ distance); }
template <class T> T __shfl_sync(unsigned, T value, int source) { return emulated::exchange(value, source & 31); }
inline bool __any_sync(unsigned, bool value) {
  const emulated::Words shown = emulated::words();
  shown[emulated::current % 32][0] = value;
  emulated::warp_barrier();
  bool any = false;
  for (int i = 0; i < emulated::warp().live; ++i) any |= shown[i][0] != 0;
  return any;
}
template <class T> T atomicAdd(T* at, T value) { T old = *at; *at += value; return old; }
template <class T> T atomicMin(T* at, T value) { T old = *at; if (value < old) *at = value; return old; }
inline void load_once_16(uint4& v, const void* at, bool wanted) { if (wanted) v = *reinterpret_cast<const uint4*>(at); }
inline void load_once_4(unsigned& v, const void* at, bool wanted) { if (wanted) v = *reinterpret_cast<const unsigned*>(at); }
inline void load_float(float& v, const float* at, bool wanted) { if (wanted) v = *at; }
template <class T> T __ldcg(const T* at) { return *at; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
#define __expf(x) expf(x)
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(unsigned v) { float u; memcpy(&u, &v, 4); return u; }
inline int block_anew() { return (int)blockIdx.x; }
// Blocks run one after the other: what a block waits for has been posted, or its own threads will.
inline void post_word(uint32_t* at, float value) { const unsigned bits = ~__float_as_uint(value); *at = bits ? bits : ~0x7fc00000u; }
inline float take_word(uint32_t* at) {
  while (*at == 0) emulated::yield();
  const unsigned bits = *at;
  *at = 0;
  return __uint_as_float(~bits);
}
inline float look_at_word(const uint32_t* at) {
  while (*at == 0) emulated::yield();
  return __uint_as_float(~*at);
}
// So each block does for itself what one does for all.
#define MEASURED_FROM(block) 0
#define MEASURED_BY(blocks) 1
inline float4 take_words(uint32_t* at) {
  float4 out;
  out.x = take_word(at), out.y = take_word(at + 1), out.z = take_word(at + 2), out.w = take_word(at + 3);
  return out;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= (unsigned)(both >> (8 * (select >> (4 * i) & 7)) & 255) << (8 * i);
  return out;
}
inline int thread_index() { return threadIdx.x; }
inline void allow_next() {}
inline void wait_for_earlier() { emulated::fibers[emulated::current].waited = true; }
// Until kernels have waited, their asynchronous copies find `old` in place of the bytes at `at`.
extern "C" void emulated_late(const void* at, const void* old, size_t bytes) {
  emulated::late_at = static_cast<const unsigned char*>(at), emulated::late_old = static_cast<const unsigned char*>(old), emulated::late_bytes = bytes;
}
UNSEEN inline void copy_async_16(void* shared, const void* global, bool wanted = true) {
  race_access(shared, 16, COPY_WRITE);
  wanted ? memcpy(shared, emulated::found(global), 16) : memset(shared, 0, 16);
}
UNSEEN inline void copy_async_near_16(void* shared, const void* global, bool wanted) {
  if (!wanted) return;
  race_access(shared, 16, COPY_WRITE);
  memcpy(shared, emulated::found(global), 16);
}
inline void copy_async_commit() { race_event(COPY_COMMITTED, nullptr, 0); }
template <int PENDING> void copy_async_wait() { race_event(COPY_DONE, nullptr, PENDING); }
inline uint16_t half_from_float(float value) { _Float16 h = (_Float16)value; uint16_t u; memcpy(&u, &h, 2); return u; }
inline float half_to_float(uint16_t bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
inline uint32_t half2_from_floats(float low, float high) { return half_from_float(low) | (uint32_t)half_from_float(high) << 16; }
template <class F> uint32_t each_half(uint32_t a, uint32_t b, uint32_t c, F f) {
  return half2_from_floats(f(half_to_float(a & 0xffff), half_to_float(b & 0xffff), half_to_float(c & 0xffff)),
                           f(half_to_float(a >> 16), half_to_float(b >> 16), half_to_float(c >> 16)));
}
inline uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) | bits; }
inline uint32_t half2_sub(uint32_t a, uint32_t b) { return each_half(a, b, 0, [](float x, float y, float) { return x - y; }); }
inline uint32_t half2_mul(uint32_t a, uint32_t b) { return each_half(a, b, 0, [](float x, float y, float) { return x * y; }); }
inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) { return each_half(a, b, c, [](float x, float y, float z) { return x * y + z; }); }

inline uint8_t e4m3_from_float(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f | sign;
  float magnitude = fabsf(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude < 0.015625f) return sign | (uint8_t)nearbyintf(magnitude * 512.0f);
  unsigned bits = __float_as_uint(magnitude);
  bits = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  return sign | (uint8_t)min(bits, 0x7eu);
}
inline float float_from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float value = exponent == 0 ? mantissa / 512.0f : ldexpf(1.0f + mantissa / 8.0f, exponent - 7);
  return code & 0x80 ? -value : value;
}
inline uint32_t half2_from_e4m3x2(uint32_t bytes) { return half2_from_floats(float_from_e4m3(bytes & 255), float_from_e4m3(bytes >> 8 & 255)); }
inline void halves_from_e4m3x4(uint32_t bytes, uint32_t& low, uint32_t& high) { low = half2_from_e4m3x2(bytes & 0xffff), high = half2_from_e4m3x2(bytes >> 16); }
inline float exp2_quick(float value) { return exp2f(value); }
inline uint32_t e4m3x2_from_floats(float low, float high) { return e4m3_from_float(low) | e4m3_from_float(high) << 8; }

// Lanes that came to a product with something in column k of its right side.
static long long filled_columns[8] = {};
extern "C" void emulated_columns(long long* counts) {
  for (int column = 0; column < 8; ++column) counts[column] += filled_columns[column];
}
UNSEEN inline void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const emulated::Words shown = emulated::words();
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  filled_columns[g] += ((b0 | b1) & 0x7fff7fffu) != 0;
  float values[12];
  for (int i = 0; i < 12; ++i) values[i] = half_to_float(i % 2 ? mine[i / 2] >> 16 : mine[i / 2] & 0xffff);
  memcpy(shown[lane], values, sizeof(values));
  emulated::warp_barrier();
  const auto value = [&](int from, int i) { return (double)reinterpret_cast<const float*>(shown[from])[i]; };
  for (int i = 0; i < 4; ++i) {
    const int upper = i / 2, column = 2 * q + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int kk = k % 8, part = k / 8;   // which register, which half
      sum += value(g * 4 + kk / 2, 2 * (upper + 2 * part) + kk % 2) * value(column * 4 + kk / 2, 8 + 2 * part + kk % 2);
    }
    c[i] = (float)sum;
  }
}
UNSEEN inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulated::Words shown = emulated::words();
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3;
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(shown[lane], mine, sizeof(mine));
  emulated::warp_barrier();
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 8; ++k) {
      uint32_t left[6], right[6];
      memcpy(left, shown[g * 4 + k % 4], sizeof(left));
      memcpy(right, shown[(2 * q + i % 2) * 4 + k % 4], sizeof(right));
      sum += (double)__uint_as_float(left[i / 2 + 2 * (k / 4)] & 0xffffe000u) * (double)__uint_as_float(right[4 + k / 4] & 0xffffe000u);
    }
    c[i] = (float)sum;
  }
}
inline void mma_f16_from(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0,
                         float c1, float c2, float c3) {
  d[0] = c0, d[1] = c1, d[2] = c2, d[3] = c3;
  mma_f16(d, a0, a1, a2, a3, b0, b1);
}
inline void mma_f16_short(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  mma_f16(d, a0, a1, 0, 0, b, 0);
}
inline void warpgroup_begin() {}
inline void warpgroup_commit() { race_event(MATRIX_COMMITTED, nullptr, 0); }
// An instruction of the whole warp: what its lanes read for the ones before has been read.
template <int PENDING> void warpgroup_wait() {
  race_event(MATRIX_DONE, nullptr, PENDING);
  if (FINDS_RACES) __syncwarp();
}
template <int GROUPS> void warpgroup_settle(float (&)[GROUPS][4]) {}
template <int COUNT> void warpgroup_hold(uint32_t (&)[COUNT][4]) {}
struct Arrival { uint8_t phase, count, left, unused; int32_t bytes; };   // in the 8 bytes of a barrier
UNSEEN inline void arrival_check(Arrival* a) {
  if (a->left == 0 && a->bytes == 0) a->phase ^= 1, a->left = a->count, ++emulated::progress, race_event(MET, a, 0);
}
inline Arrival* arrival_of(uint64_t* arrival) { return reinterpret_cast<Arrival*>(arrival); }
UNSEEN inline void arrival_init(uint64_t* arrival, int count) {
  race_access(arrival, 8, THREAD_WRITE);
  *arrival_of(arrival) = {0, (uint8_t)count, (uint8_t)count, 0, 0};
}
inline void arrival_publish() {}
UNSEEN inline void arrival_announce(uint64_t* arrival, int bytes) {
  race_access(arrival, 8, THREAD_READ), race_event(LEFT, arrival, 0);   // a read: what must be there is the barrier
  arrival_of(arrival)->bytes += bytes, --arrival_of(arrival)->left, ++emulated::progress;
  arrival_check(arrival_of(arrival));
}
inline void arrive(uint64_t* arrival) { arrival_announce(arrival, 0); }
UNSEEN inline void arrival_wait(uint64_t* arrival, int phase) {
  race_access(arrival, 8, THREAD_READ);
  while (arrival_of(arrival)->phase == (phase & 1)) emulated::yield();
  race_event(SEEN, arrival, 0);
}
UNSEEN inline void copy_whole(void* shared, const void* global, int bytes, uint64_t* arrival) {
  race_access(shared, bytes, BULK_WRITE), race_event(BULK_DONE, arrival, 0);
  for (int i = 0; i < bytes; i += 16) memcpy(static_cast<char*>(shared) + i, emulated::found(static_cast<const char*>(global) + i), 16);
  arrival_of(arrival)->bytes -= bytes;
  arrival_check(arrival_of(arrival));
}
// Bytes of shared memory for a matrix instruction.
UNSEEN inline void matrix_bytes(void* out, const void* at, size_t bytes) { race_access(at, bytes, MATRIX_READ), memcpy(out, at, bytes); }
template <int GROUPS> void warpgroup_mma(float (&c)[GROUPS][4], const uint32_t (&a)[4], const void* rows, int step) {
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3;
  for (int n = 0; n < GROUPS; ++n) {   // a warp needs only its own 16 rows of A
    uint32_t b[2];
    const int row = 8 * n + g;
    for (int high = 0; high < 2; ++high)
      matrix_bytes(&b[high], static_cast<const unsigned char*>(rows) + row * 128 + ((2 * step + high) ^ (row & 7)) * 16 + 4 * q, 4);
    mma_f16(c[n], a[0], a[1], a[2], a[3], b[0], b[1]);
  }
}
inline const unsigned char* tile_piece(const void* tile, int row, int column) {   // 16 bytes of [column / 64][64 rows][64], swizzled
  return static_cast<const unsigned char*>(tile) + (column / 64 * 64 + row) * 128 + (column / 8 % 8 ^ row % 8) * 16;
}
inline void warpgroup_mma_tiles(float (&c)[8][4], const void* a, const void* b, int step) {
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3, first = emulated::current / 32 % 4 * 16;
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) matrix_bytes(&left[i], tile_piece(a, first + g + i % 2 * 8, 16 * step + i / 2 * 8) + 4 * q, 4);
  for (int n = 0; n < 8; ++n) {
    for (int i = 0; i < 2; ++i) matrix_bytes(&right[i], tile_piece(b, 8 * n + g, 16 * step + 8 * i) + 4 * q, 4);
    mma_f16(c[n], left[0], left[1], left[2], left[3], right[0], right[1]);
  }
}
template <int GROUPS> void warpgroup_mma_across(float (&c)[GROUPS][4], const uint32_t (&a)[4], const void* b, int step) {
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3;
  for (int n = 0; n < GROUPS; ++n) {
    uint16_t right[4];
    for (int i = 0; i < 4; ++i) matrix_bytes(&right[i], tile_piece(b, 16 * step + i / 2 * 8 + 2 * q + i % 2, 8 * n) + 2 * g, 2);
    mma_f16(c[n], a[0], a[1], a[2], a[3], right[0] | (uint32_t)right[1] << 16, right[2] | (uint32_t)right[3] << 16);
  }
}
inline void publish_shared() { race_event(PUBLISHED, nullptr, 0); }
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}
inline void load_matrices(uint32_t (&out)[4], const void* row) {
  const emulated::Words shown = emulated::words();
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3;
  memcpy(shown[lane], row, 16);
  emulated::warp_barrier();
  for (int i = 0; i < 4; ++i) memcpy(&out[i], reinterpret_cast<char*>(shown[8 * i + g]) + 4 * q, 4);
}
inline void load_transposed(uint32_t (&out)[4], const void* row) {
  const emulated::Words shown = emulated::words();
  const int lane = emulated::current % 32, g = lane >> 2, q = lane & 3;
  memcpy(shown[lane], row, 16);
  emulated::warp_barrier();
  for (int i = 0; i < 4; ++i) {
    uint16_t low[8], high[8];
    memcpy(low, shown[8 * i + 2 * q], 16);
    memcpy(high, shown[8 * i + 2 * q + 1], 16);
    out[i] = low[g] | (uint32_t)high[g] << 16;
  }
}
inline void sincos(double angle, double* sine, double* cosine) { *sine = sin(angle), *cosine = cos(angle); }
