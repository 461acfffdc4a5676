// Tensor-core wrappers: the one place for matrix instructions.
//
// mma_f16: C[16 x 8] += A[16 x 16] B[16 x 8], fp16 in, f32 accumulation, one warp. With g = lane / 4, q = lane % 4:
//   a0 = A[g][2q, 2q+1]   a1 = A[g+8][2q, 2q+1]   a2 = A[g][2q+8, 2q+9]   a3 = A[g+8][2q+8, 2q+9]
//   b0 = B[2q, 2q+1][g]   b1 = B[2q+8, 2q+9][g]
//   c  = C[g][2q], C[g][2q+1], C[g+8][2q], C[g+8][2q+1]
// The order of k within a step is free as long as A and B agree.
#pragma once
#include "common.cuh"

#ifndef Q27_ON_HOST
__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// C[16 x 8] += A[16 x 8] B[8 x 8], the upper 19 bits of f32 in, f32 accumulation, one warp:
//   a = A[g][q], A[g+8][q], A[g][q+4], A[g+8][q+4]   b = B[q][g], B[q+4][g]   c as above
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D = A B + C with C elsewhere; zeros cost no register.
__device__ __forceinline__ void mma_f16_from(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                             uint32_t b1, float c0, float c1, float c2, float c3) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// D[16 x 8] = A[16 x 8] B[8 x 8], fp16 in, f32 accumulation, one warp: a0 = A[g][2q, 2q+1], a1 = A[g+8][2q, 2q+1], b = B[2q, 2q+1][g].
__device__ __forceinline__ void mma_f16_short(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

// Four 8 x 8 matrices of halves; lane l gives the address of row l % 8 of matrix l / 8. out[i] = {M_i[g][2q], M_i[g][2q+1]}.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void* row) {
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// Four 8 x 8 matrices of halves, each transposed; lane l gives the address of row l % 8 of matrix l / 8.
// out[i] = {M_i[2q][g], M_i[2q+1][g]}.
__device__ __forceinline__ void load_transposed(uint32_t (&out)[4], const void* row) {
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
#endif
