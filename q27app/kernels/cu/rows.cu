// rows: embedding rows, final norm, hidden rows kept in slots, rotary angles: everything that is one small pass over rows.
// Reference: reference.embed, reference.rms_norm, reference.previous_hidden     Used by: forward.Model, mtp.MtpPass
// Shapes:    see each struct
// Layout:    rows contiguous
// Launch:    grid (rows), block (256), one block per row; embed, final_norm block (512); mtp_rows grid (rows, 2), block (512)
// Defines:   none     Limits: hidden % 4 == 0
// Numbers:   f32, fixed order; angles in f64. Bound: latency.
#include "embed.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(JOIN_THREADS) embed(const __grid_constant__ Embed p) {
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x, token = min(max(p.tokens[row], 0), p.vocab - 1);
  float4* out = reinterpret_cast<float4*>(p.out + (long long)row * p.width);
  for (int k = threadIdx.x; k < p.width / 4; k += JOIN_THREADS) out[k] = embed_four(p, token, k);
}

// grid (rows, 2): a half of the draft layer's input
extern "C" __global__ void __launch_bounds__(JOIN_THREADS) mtp_rows(const __grid_constant__ Embed p) {
  __shared__ float shared[JOIN_THREADS / 32];
  allow_next();
  wait_for_earlier();
  if (blockIdx.y == 0) join_embedding(p, blockIdx.x, p.tokens[blockIdx.x], shared);
  else join_hidden(p, blockIdx.x, shared);
}

struct FinalNorm {
  const float* x;
  const float* norm;
  float* out;
  int width;
  float eps;
};

extern "C" __global__ void __launch_bounds__(JOIN_THREADS) final_norm(const __grid_constant__ FinalNorm p) {
  __shared__ float shared[JOIN_THREADS / 32];
  allow_next();
  wait_for_earlier();
  const float4* x = reinterpret_cast<const float4*>(p.x + (long long)blockIdx.x * p.width);
  put_normed(p.out + (long long)blockIdx.x * p.width, p.norm, p.width, p.eps, shared, [&](int k) { return x[k]; });
}

// A row from one place to another: all of a thread's part is under way before any of it is written.
__device__ __forceinline__ void copy_row(float* target, const float* source, int width) {
  constexpr int HELD = 5;
  const float4* from = reinterpret_cast<const float4*>(source);
  for (int base = threadIdx.x; base < width / 4; base += HELD * THREADS) {
    float4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (base + i * THREADS < width / 4) held[i] = from[base + i * THREADS];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (base + i * THREADS < width / 4) reinterpret_cast<float4*>(target)[base + i * THREADS] = held[i];
  }
}

struct CopyWords {
  const uint32_t* source;
  uint32_t* target;
  int words;
  int is_ready;                   // the source was written before this was launched
};

// grid (words / 256): few words between page-locked memory of the host, which the card reads and writes in place, and the card's own. A
// copy by the copy engine keeps the kernels around it apart, for ten microseconds and more.
extern "C" __global__ void __launch_bounds__(THREADS) copy_words(const __grid_constant__ CopyWords p) {
  allow_next();
  const int at = blockIdx.x * THREADS + threadIdx.x;
  const volatile uint32_t* source = p.source;
  uint32_t word = p.is_ready && at < p.words ? source[at] : 0;
  wait_for_earlier();
  if (at >= p.words) return;
  if (!p.is_ready) word = source[at];
  p.target[at] = word;
}

struct Hidden {
  const float* final_rows;        // [rows, width]
  float* out;                     // [rows, width]
  unsigned char* slots;           // slot states; the hidden row stands at `offset` of each
  const int* row_starts;
  const int* slot_ids;
  const int* accepted;            // keep_hidden: rows taken of each sequence, or null for all
  const int* keeps;               // keep_states: [keeps, 3] sequence, rows, slot
  long long slot_bytes, offset;
  int num_seqs, width;
};

__device__ __forceinline__ float* slot_row(const Hidden& p, int seq) {
  return reinterpret_cast<float*>(p.slots + p.slot_ids[seq] * p.slot_bytes + p.offset);
}
__device__ __forceinline__ int sequence_of(const Hidden& p, int row) {
  int seq = 0;
  while (seq + 1 < p.num_seqs && row >= p.row_starts[seq + 1]) ++seq;
  return seq;
}

// out[row] = final[row - 1], the slot's row for the first row of a sequence.
extern "C" __global__ void __launch_bounds__(THREADS) previous_hidden(const __grid_constant__ Hidden p) {
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x, seq = sequence_of(p, row);
  const float* source = row == p.row_starts[seq] ? slot_row(p, seq) : p.final_rows + (long long)(row - 1) * p.width;
  copy_row(p.out + (long long)row * p.width, source, p.width);
}

extern "C" __global__ void __launch_bounds__(THREADS) slot_hidden(const __grid_constant__ Hidden p) {
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x;
  const float* source = slot_row(p, sequence_of(p, row));
  copy_row(p.out + (long long)row * p.width, source, p.width);
}

// The slot's row becomes the last accepted row of the sequence. grid (seqs)
extern "C" __global__ void __launch_bounds__(THREADS) keep_hidden(const __grid_constant__ Hidden p) {
  allow_next();
  wait_for_earlier();
  const int seq = blockIdx.x, first = p.row_starts[seq], rows = p.row_starts[seq + 1] - first;
  const int taken = p.accepted ? min(max(p.accepted[seq], 0), rows) : rows;
  if (taken == 0) return;
  copy_row(slot_row(p, seq), p.final_rows + (long long)(first + taken - 1) * p.width, p.width);
}

// Other slots' rows become that after the first rows of a sequence. grid (keeps)
extern "C" __global__ void __launch_bounds__(THREADS) keep_states(const __grid_constant__ Hidden p) {
  allow_next();
  wait_for_earlier();
  const int* keep = p.keeps + 3 * blockIdx.x;
  float* target = reinterpret_cast<float*>(p.slots + keep[2] * p.slot_bytes + p.offset);
  copy_row(target, p.final_rows + (long long)(p.row_starts[keep[0]] + keep[1] - 1) * p.width, p.width);
}

struct Rope {
  const int* positions;
  const double* frequencies;      // [half]
  float* table;                   // [rows, half, 2] cos, sin
  int half;
};

extern "C" __global__ void __launch_bounds__(THREADS) rope_angles(const __grid_constant__ Rope p) {
  allow_next();
  wait_for_earlier();
  rope_row(p.positions[blockIdx.x], p.frequencies, p.table, blockIdx.x, p.half, THREADS);
}

struct Halves {
  const float* x;
  const float* norm;              // or null
  const int* row_map;             // or null
  uint16_t* out;                  // in blocks of 64 rows (linear_tiles.cu), padded columns
  float* inverse;                 // [rows] 1 / scale
  int width, padded, x_stride;
  float eps;
  int remainder;                  // write what rounding to fp16 lost instead, 2,048 times as large
};

__device__ __forceinline__ float halved(const Halves& p, float value) {
  return p.remainder ? __fmul_rn(__fsub_rn(value, half_to_float(half_from_float(value))), 2048.0f) : value;
}

// Four neighbouring columns of a row as fp16 to their place: columns 16 q + 4 s .. + 3 of a unit are halves 2 q, 2 q + 1
// of pieces 4 (s / 2) + 2 (s % 2) and the next: lanes 4 apart swap, so that each writes 8 bytes of one piece. All lanes of a warp.
__device__ __forceinline__ void put_halves(const Halves& p, int row, int four, const float4& value) {
  uint32_t low = half2_from_floats(value.x, value.y), high = half2_from_floats(value.z, value.w);
  const int unit = four / 16, q = four / 4 % 4, s = four % 4, odd = q & 1, piece = s / 2 * 4 + s % 2 * 2 + odd;
  const uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 4);
  const long long place = ((long long)(row / 64) * (p.padded / UNIT_COLS) + unit) * 64 + row % 64;
  if (4 * four < p.padded)
    *reinterpret_cast<uint2*>(p.out + place * UNIT_COLS + (piece ^ row % 8) * 8 + (q & 2) * 2) = odd ? make_uint2(other, high) : make_uint2(low, other);
}

__device__ __forceinline__ float block_most(float value, float* shared) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < THREADS / 32; ++w) value = fmaxf(value, shared[w]);
  return value;
}

// Prefill: (norm,) scale per row, fp16. A row is read once and kept in registers, the part past HELD fours a thread is read again.
template <int HELD> __device__ __forceinline__ void halve_row(const Halves& p) {
  __shared__ float shared[THREADS / 32];
  constexpr int AHEAD = HELD % 4 == 0 ? 2 : 3;
  const int row = blockIdx.x, source = p.row_map ? p.row_map[row] : row, fours = p.width / 4;
  const float4* x = reinterpret_cast<const float4*>(p.x + (long long)source * p.x_stride);
  const float4* norm = reinterpret_cast<const float4*>(p.norm);
  const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 held[HELD];
  float squares = 0.0f, largest = 0.0f;
  const auto weighed = [&](float4 value, const float4& n) {
    squares = fmaf(value.x, value.x, fmaf(value.y, value.y, fmaf(value.z, value.z, fmaf(value.w, value.w, squares))));
    if (norm) value = make_float4(__fmul_rn(value.x, n.x), __fmul_rn(value.y, n.y), __fmul_rn(value.z, n.z), __fmul_rn(value.w, n.w));
    largest = fmaxf(largest, fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w))));
    return value;
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = threadIdx.x + i * THREADS < fours ? x[threadIdx.x + i * THREADS] : zero;
#pragma unroll
  for (int first = 0; first < HELD; first += AHEAD) {
    float4 n[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int four = threadIdx.x + (first + i) * THREADS;
      n[i] = norm && four < fours ? norm[four] : zero;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) held[first + i] = weighed(held[first + i], n[i]);
  }
  for (int four = threadIdx.x + HELD * THREADS; four < fours; four += THREADS) weighed(x[four], norm ? norm[four] : zero);
  float rms = 1.0f;
  if (norm) {
    const float sum = warp_sum(squares);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < THREADS / 32; ++w) total = __fadd_rn(total, shared[w]);
    rms = rsqrtf(total / (float)p.width + p.eps);
  }
  largest = block_most(largest, shared);
  float inverse;
  const float factor = __fmul_rn(rms, peak_scale(__fmul_rn(largest, rms), inverse));
  if (threadIdx.x == 0) p.inverse[row] = p.remainder ? __fmul_rn(inverse, 1.0f / 2048.0f) : inverse;
  const auto scaled = [&](const float4& v) {
    return make_float4(halved(p, __fmul_rn(v.x, factor)), halved(p, __fmul_rn(v.y, factor)), halved(p, __fmul_rn(v.z, factor)),
                       halved(p, __fmul_rn(v.w, factor)));
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i)
    if (i * THREADS < p.padded / 4) put_halves(p, row, threadIdx.x + i * THREADS, scaled(held[i]));
  for (int base = HELD * THREADS; base < p.padded / 4; base += THREADS) {
    const int four = base + threadIdx.x;
    put_halves(p, row, four, four < fours ? scaled(weighed(x[four], norm ? norm[four] : zero)) : zero);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) halve_rows(const __grid_constant__ Halves p) { halve_row<20>(p); }
// For rows of up to 6,144 numbers: more blocks at once.
extern "C" __global__ void __launch_bounds__(THREADS) halve_short_rows(const __grid_constant__ Halves p) { halve_row<6>(p); }

struct SiluMul {
  const float* gate_up;           // [rows, 2 * width]
  float* out;                     // [rows, width]
  int width;
};

// h = silu(gate) * up, where the two halves of stage D have different number types.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const __grid_constant__ SiluMul p) {
  allow_next();
  wait_for_earlier();
  const float* row = p.gate_up + (long long)blockIdx.x * 2 * p.width;
  for (int k = threadIdx.x; k < p.width; k += THREADS)
    p.out[(long long)blockIdx.x * p.width + k] = __fmul_rn(silu(row[k]), row[p.width + k]);
}
