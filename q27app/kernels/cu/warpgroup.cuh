// Warpgroup matrix instructions (compute capability 9.0): D[64 x N] += A[64 x 16] B[16 x N], A in registers as mma_f16 has it,
// 16 rows a warp; B in shared memory, N rows of 64 halves, 128 bytes each, with the 16-byte pieces of row n in the order
// piece ^ (n % 8), 1024-byte aligned. c[n8] is laid out as mma_f16's. The instructions run on by themselves: registers of A and
// c may not be touched, nor B overwritten, before warpgroup_wait says so.
#pragma once
#include "mma.cuh"

// A tile of 64 rows of halves for these instructions: [column / 64][64 rows][64], swizzled as above.
constexpr int BLOCK_OF_64 = 64 * 64 * 2;

#ifndef Q27_ON_HOST
__device__ __forceinline__ void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The sums are there: nothing that reads them moves before the wait.
template <int GROUPS> __device__ __forceinline__ void warpgroup_settle(float (&c)[GROUPS][4]) {
#pragma unroll
  for (int n = 0; n < GROUPS; ++n) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
// Nothing takes the place of operands before this point.
template <int COUNT> __device__ __forceinline__ void warpgroup_hold(uint32_t (&a)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
// Barriers in shared memory: a phase ends when `count` threads have arrived and the bytes that were announced are there.
// Sizes and addresses of copies are multiples of 16.
__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void arrival_init(uint64_t* arrival, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(arrival)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* arrival) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(arrival)) : "memory");
}
__device__ __forceinline__ void arrival_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrival_announce(uint64_t* arrival, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrival_wait(uint64_t* arrival, int phase) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(arrival)), "r"(phase & 1)
        : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy_whole(void* shared, const void* global, int bytes, uint64_t* arrival) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(arrival))
               : "memory");
}

// What threads wrote to shared memory, for matrix instructions that start later.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers of a thread from here on; all warps of a warpgroup.
template <int COUNT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

__device__ __forceinline__ uint64_t rows_descriptor(const void* rows) {
  const uint64_t address = __cvta_generic_to_shared(rows);
  return (address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;   // 1024 bytes from 8 rows to the next; 128-byte swizzle
}

// The same tile read across: k goes down its rows, 1024 bytes for 8; 64 columns are a block of 64 rows.
__device__ __forceinline__ uint64_t across_descriptor(const void* rows) {
  const uint64_t address = __cvta_generic_to_shared(rows);
  return (address >> 4 & 0x3fff) | (uint64_t)(64 * 128 >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Operands of a multiplication: the sums of 8 columns each, and their names in the text.
#define SUMS_1(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_4(n) SUMS_1(n), SUMS_1(n + 1), SUMS_1(n + 2), SUMS_1(n + 3)
#define SUMS_2(n) SUMS_1(n), SUMS_1(n + 1)
#define SUMS_3(n) SUMS_2(n), SUMS_1(n + 2)
#define SUMS_6(n) SUMS_4(n), SUMS_2(n + 4)
#define SUMS_8(n) SUMS_4(n), SUMS_4(n + 4)
#define SUMS_16(n) SUMS_8(n), SUMS_8(n + 8)
#define SUMS_32(n) SUMS_16(n), SUMS_16(n + 16)
#define NAMES_4 "%0,%1,%2,%3"
#define NAMES_8 NAMES_4 ",%4,%5,%6,%7"
#define NAMES_12 NAMES_8 ",%8,%9,%10,%11"
#define NAMES_16 NAMES_12 ",%12,%13,%14,%15"
#define NAMES_24 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_32 NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_128 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// c += A B^T with N rows of B; step: which 16 of the 64 columns.
#define WARPGROUP_MMA(GROUPS, N, NAMES, SUMS, A, B) \
  __device__ __forceinline__ void warpgroup_mma(float (&c)[GROUPS][4], const uint32_t (&a)[4], const void* rows, int step) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, {" A "}, " B ", 1, 1, 1, 0;" \
                 : SUMS(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows_descriptor(rows) + 2 * step)); \
  }
WARPGROUP_MMA(1, 8, NAMES_4, SUMS_1, "%4,%5,%6,%7", "%8")
WARPGROUP_MMA(2, 16, NAMES_8, SUMS_2, "%8,%9,%10,%11", "%12")
WARPGROUP_MMA(3, 24, NAMES_12, SUMS_3, "%12,%13,%14,%15", "%16")
WARPGROUP_MMA(4, 32, NAMES_16, SUMS_4, "%16,%17,%18,%19", "%20")
WARPGROUP_MMA(6, 48, NAMES_24, SUMS_6, "%24,%25,%26,%27", "%28")
__device__ __forceinline__ void warpgroup_mma(float (&c)[8][4], const uint32_t (&a)[4], const void* rows, int step) {
  const uint64_t b = rows_descriptor(rows) + 2 * step;
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : SUMS_8(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void warpgroup_mma(float (&c)[16][4], const uint32_t (&a)[4], const void* rows, int step) {
  const uint64_t b = rows_descriptor(rows) + 2 * step;
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NAMES_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : SUMS_16(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void warpgroup_mma(float (&c)[32][4], const uint32_t (&a)[4], const void* rows, int step) {
  const uint64_t b = rows_descriptor(rows) + 2 * step;
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" NAMES_128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;"
      : SUMS_32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// c[64 x 64] += A B^T over columns 16 step .. + 15 of two tiles.
__device__ __forceinline__ void warpgroup_mma_tiles(float (&c)[8][4], const void* a, const void* b, int step) {
  const int skip = step / 4 * BLOCK_OF_64;
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES_32 "}, %32, %33, 1, 1, 1, 0, 0;"
      : SUMS_8(0)
      : "l"(rows_descriptor(static_cast<const unsigned char*>(a) + skip) + 2 * (step % 4)),
        "l"(rows_descriptor(static_cast<const unsigned char*>(b) + skip) + 2 * (step % 4)));
}
// c[64 x columns] += A B over rows 16 step .. + 15 of the tile B, A in registers.
__device__ __forceinline__ void warpgroup_mma_across(float (&c)[8][4], const uint32_t (&a)[4], const void* b, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
      : SUMS_8(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(across_descriptor(static_cast<const unsigned char*>(b) + step * 2048)));
}
__device__ __forceinline__ void warpgroup_mma_across(float (&c)[32][4], const uint32_t (&a)[4], const void* b, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" NAMES_128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
      : SUMS_32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(across_descriptor(static_cast<const unsigned char*>(b) + step * 2048)));
}
#endif
