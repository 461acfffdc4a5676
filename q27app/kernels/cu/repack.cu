// repack: a tensor's rows as the container stores them -> packed tiles (quant.cuh); what packed gates and ups can give; what is
// ready for the tensor cores as floats again.
// Reference: weights.codecs.decode     Used by: cuda_backend.CudaBackend.load
// Shapes:    data uint8 [rows, row_bytes], scales fp16 [rows, groups] -> tiles [num_tiles, tile_bytes]
// Layout:    rows contiguous; rows and columns past the end become zeros
// Launch:    grid (units, tiles of this piece), block (32), no shared memory
// Defines:   none     Limits: a piece starts at a multiple of 16 rows
// Numbers:   exact. Bound: memory.
#include "quant.cuh"
#include "ready.cuh"

struct Repack {
  const unsigned char* data;
  const uint16_t* scales;
  unsigned char* tiles;        // first tile of this piece
  long long tile_stride;       // bytes from one tile of the piece to the next
  int kind, rows, cols, units, row_bytes, groups, group_cols, part;   // part: 0 fp16, 1 high and 2 low half of f32
};

__device__ __forceinline__ int code_q4(const Repack& p, int row, int column) {
  if (row >= p.rows || column >= p.cols) return 8;
  return (p.data[(long long)row * p.row_bytes + column / 2] >> (4 * (column & 1))) & 15;
}
__device__ __forceinline__ uint32_t code_q8(const Repack& p, int row, int column) {
  if (row >= p.rows || column >= p.cols) return 128;
  return (p.data[(long long)row * p.row_bytes + column] + 128) & 255;
}
__device__ __forceinline__ uint32_t code_f16(const Repack& p, int row, int column) {
  if (row >= p.rows || column >= p.cols) return 0;
  const unsigned char* source = p.data + (long long)row * p.row_bytes;
  if (p.part == 0) return reinterpret_cast<const uint16_t*>(source)[column];
  const float value = reinterpret_cast<const float*>(source)[column];
  const uint16_t high = half_from_float(value);
  return p.part == 1 ? high : half_from_float(__fsub_rn(value, half_to_float(high)));
}

extern "C" __global__ void __launch_bounds__(32) repack(const __grid_constant__ Repack p) {
  const int unit = blockIdx.x, lane = threadIdx.x, g = lane >> 2, q = lane & 3;
  const int row = blockIdx.y * TILE_ROWS, column = unit * UNIT_COLS + q * 16;
  unsigned char* tile = p.tiles + blockIdx.y * p.tile_stride;
  if (p.kind == KIND_F16) {
    uint4* target = reinterpret_cast<uint4*>(tile + (long long)unit * Unit<KIND_F16>::BYTES);
    for (int s = 0; s < 4; ++s) {
      uint32_t word[4];
      for (int i = 0; i < 4; ++i) {
        const int r = row + g + (i & 1) * 8, c = column + 4 * s + (i >> 1) * 2;
        word[i] = code_f16(p, r, c) | code_f16(p, r, c + 1) << 16;
      }
      target[s * 32 + lane] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return;
  }
  const int data_bytes = p.kind == KIND_Q4 ? Unit<KIND_Q4>::DATA : Unit<KIND_Q8>::DATA;
  unsigned char* base = tile + (long long)unit * (data_bytes + 32);
  if (p.kind == KIND_Q4) {
    uint32_t word[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < 8; ++c) {
        const int nibble = (c & 1) * 4 + (c & 2) + (c >> 2);
        word[i] |= (uint32_t)code_q4(p, row + g + (i & 1) * 8, column + (i >> 1) * 8 + c) << (4 * nibble);
      }
    *reinterpret_cast<uint4*>(base + lane * 16) = make_uint4(word[0], word[1], word[2], word[3]);
  } else {
    for (int h = 0; h < 2; ++h) {
      uint32_t word[4] = {0, 0, 0, 0};
      for (int i = 0; i < 4; ++i)
        for (int c = 0; c < 4; ++c)
          word[i] |= code_q8(p, row + g + (i & 1) * 8, column + 8 * h + (i >> 1) * 4 + c) << (8 * c);
      *reinterpret_cast<uint4*>(base + h * 512 + lane * 16) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  if (lane < TILE_ROWS) {
    const int r = row + lane / 2 + (lane & 1) * 8, group = unit * UNIT_COLS / p.group_cols;
    const bool inside = r < p.rows && unit * UNIT_COLS < p.cols;
    reinterpret_cast<uint16_t*>(base + data_bytes)[lane] = inside ? p.scales[(long long)r * p.groups + group] : 0;
  }
}

struct PairSizes {
  const unsigned char* weights;   // tiles of a gate and an up in turns
  const float* norm;              // [cols]
  float* out;                     // [rows]
  int kind, rows, cols, tile_bytes, wrap;
};

// Length of a tile's row times the norm. One warp.
__device__ __forceinline__ float row_size(int kind, const unsigned char* tile, int row, const float* norm, int cols, int wrap) {
  float sum = 0.0f;
  for (int column = threadIdx.x % 32; column < cols; column += 32) {
    float value = packed_value(kind, tile, row, column);
    if (wrap) value = __fadd_rn(value, packed_value(kind, tile, row, column + wrap * UNIT_COLS));
    value = __fmul_rn(value, norm[column]);
    sum = fmaf(value, value, sum);
  }
  return sqrtf(warp_sum(sum));
}

// Lengths of a gate's row times the norm and of its up's, multiplied: [rows]. grid (rows / 8), block (256), a warp a row.
extern "C" __global__ void __launch_bounds__(256) pair_sizes(const __grid_constant__ PairSizes p) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  float size[2];
  for (int half = 0; half < 2; ++half)
    size[half] = row_size(p.kind, p.weights + (long long)(row / TILE_ROWS * 2 + half) * p.tile_bytes, row % TILE_ROWS, p.norm, p.cols, p.wrap);
  if (lane == 0) p.out[row] = __fmul_rn(size[0], size[1]);
}

struct RowSizes {
  const unsigned char* weights;   // tiles of a segment
  const float* norm;              // [cols]
  const float* gain;              // [gain_rows], or null
  float* out;                     // [rows]
  int kind, rows, cols, tile_bytes, wrap, gain_rows;
};

// Length of a row times the norm, and times its gain, if any: [rows]. grid (rows / 8), block (256), a warp a row.
extern "C" __global__ void __launch_bounds__(256) row_sizes(const __grid_constant__ RowSizes p) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const float size = row_size(p.kind, p.weights + (long long)(row / TILE_ROWS) * p.tile_bytes, row % TILE_ROWS, p.norm, p.cols, p.wrap);
  if (lane == 0) p.out[row] = p.gain ? __fmul_rn(size, fabsf(p.gain[row % p.gain_rows])) : size;
}

struct ReadyFloats {
  Ready ready;
  float* out;                     // [rows, cols]
  int cols;
};

// Rows that were left ready as floats. grid (rows), block (256)
extern "C" __global__ void __launch_bounds__(256) ready_floats(const __grid_constant__ ReadyFloats p) {
  for (int column = threadIdx.x; column < p.cols; column += 256) p.out[(long long)blockIdx.x * p.cols + column] = p.ready.value(blockIdx.x, column);
}
