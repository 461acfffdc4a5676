// linear_rows: out = norm(x) W^T | x W^T added | silu(g) * u, for 1 to 16 rows; the weights are read once.
// Reference: reference.project, reference.add_linear, reference.gate_up    Used by: layers.run_layer, Backend.head
// Shapes:    x [rows, cols] f32, W packed (quant.cuh) -> out [rows, out_stride] f32
// Layout:    x rows contiguous and 16-byte aligned; tiles of W one after the other, a unit list each
// Launch:    linear_rows_*: grid (blocks), block (512), shared as cuda_weights.rows_shared_bytes, at most one block a
//            multiprocessor and all at once: a block waits for the one before it, and for what others measure; stage_*: grid (rows), block (512)
// Defines:   none    Limits: cols % 4 == 0, rows <= 8 NB; Q4's units a multiple of 4, Q8's of 2
// Numbers:   activations scaled per row, its peak to 2^14 (or as they were left), then fp16; exact products; f32 sums in a fixed order: units of a
//            warp ascending, warps ascending, blocks ascending, whatever the rows. Bound: memory.
//
// The steps of all groups, one after the other, are shared out evenly (row_shares.cuh): a block takes an equal part of
// them, a warp an equal part of its block's. So every multiprocessor reads as many bytes as the others, and nobody waits for
// anybody before the end. Each lane reads its 16 bytes of a unit straight into registers; the next step's half takes the place of a half
// as soon as that is multiplied (ptxas has all of them on one scoreboard, so that a step waits for the load issued last). The first of
// them are issued before the kernel in front has ended. Sums go to shared memory where a warp leaves a group. A group that lies in two blocks
// is finished by the second: the first leaves its sums in `border`, word by word, and the second takes and empties them.
// The products of a gate and an up are left as the next stage reads them, if a scale is known that holds for all of them (ready.cuh), and
// what an addition makes of a row is left as the norm's stage behind it reads it (follow.cuh). Other rows, as the first of a pass, are converted: one
// or two by every block, side by side (staging.cuh), more once, by stage_*, before.
// What was converted or left comes through rings of each warp (row_ring.cuh), but for more than 8 rows on cards without room.
#include "row_ring.cuh"

enum { STORE = 0, ADD = 1, GATE_UP = 2 };

template <int SOURCE_, int EPILOGUE_, int NB_, int COLUMNS_> struct Shape {
  static constexpr int SOURCE = SOURCE_, EPILOGUE = EPILOGUE_, NB = NB_, COLUMNS = COLUMNS_;   // COLUMNS: rows of 8 whose sums are kept
  static constexpr bool FUSED = SOURCE < HALVES, LEFT = SOURCE >= READY, FEW = COLUMNS == 2;
  static constexpr bool STEPPED = FEW && LEFT, RINGED = !FEW && SOURCE >= HALVES && ROW_RING / NB > 1;   // by a FewRing; Q4's units by a RowRing
  static constexpr int SUMS = STEPPED ? 2 : 4;     // of a lane and tile
  static constexpr int TILE_SUMS = COLUMNS * 20;   // [columns][16 rows + 4]
  static constexpr int PLACE_SUMS = GROUP_TILES * NB * TILE_SUMS;
};

template <class S> struct Memory {   // the block's shared memory
  float* inverse;       // FUSED, FOLLOWED: [16] 1 / scale of each row
  float* stats;         // FUSED: [2 rows][2 WARPS]
  int* lost;            // FOLLOWED: 1: a row was converted anew, 2: and all steps are gone through again
  Gather* gathers;      // [ROUND_GROUPS]
  Plan* plans;          // [warps]
  float4* starts;       // FUSED: [units]
  uint16_t* rows;       // FUSED: [rows][stride]
  float* sums;          // [warps][places][tiles][NB][TILE_SUMS]
  unsigned char* rings; // RINGED, STEPPED: [warps][RowRing::BYTES, FewRing::BYTES]
  int stride;
  __device__ __forceinline__ void open(unsigned char* shared, int units, int num_rows, int places) {
    inverse = reinterpret_cast<float*>(shared);
    stats = inverse + 16;
    lost = reinterpret_cast<int*>(stats);
    gathers = reinterpret_cast<Gather*>(stats + 2 * 2 * WARPS);
    plans = reinterpret_cast<Plan*>(gathers + ROUND_GROUPS);
    starts = reinterpret_cast<float4*>(plans + BLOCK_WARPS);
    stride = units * UNIT_COLS + 8;
    rows = reinterpret_cast<uint16_t*>(starts + (S::FUSED ? units : 0));
    sums = reinterpret_cast<float*>(rows + (S::FUSED ? num_rows * stride : 0));
    rings = reinterpret_cast<unsigned char*>(sums + BLOCK_WARPS * places * S::PLACE_SUMS);
  }
  __device__ __forceinline__ float* place(const LinearRows& p, int warp, int n) const { return sums + (warp * p.places + n) * S::PLACE_SUMS; }
};

// What of a step's loads is in flight: two halves.
struct Flight {
  uint4 words[2][4];
  uint32_t scales[2][4];
};
template <int KIND> struct Step {
  static constexpr int UNITS = KIND == KIND_Q4 ? 4 : KIND == KIND_Q8 ? 2 : 1, BYTES = UNITS * Unit<KIND>::BYTES;
  static constexpr int HALF = KIND == KIND_Q4 ? 2 : 1;   // units of half a step; of F16 a half is one of the two tiles
};

// A warp's way along its steps.
struct Way {
  const unsigned char* at;    // the lane's part of the step in flight, first tile
  int second, left;           // bytes from there to the second tile: none at an odd end; its sums are not used. Steps left
  int segment, group, step;   // of the step in flight
  int unit;                   // its first among the activations
  __device__ __forceinline__ void aim(const LinearRows& p, int lane) {
    const Segment& segment = p.segments[this->segment];
    const int step_bytes = segment.kind == KIND_Q4 ? Step<KIND_Q4>::BYTES : segment.kind == KIND_Q8 ? Step<KIND_Q8>::BYTES : Step<KIND_F16>::BYTES;
    at = p.weights + segment.offset + (long long)(group * GROUP_TILES) * segment.tile_bytes + (step * step_bytes + lane * 16);
    second = group * GROUP_TILES + 1 < segment.num_tiles ? segment.tile_bytes : 0;
    unit = step * (segment.kind == KIND_Q4 ? 4 : segment.kind == KIND_Q8 ? 2 : 1);
    if (p.rows_in.wrap && unit >= p.rows_in.wrap) unit -= p.rows_in.wrap;
  }
};

template <int KIND> __device__ __forceinline__ void fetch(Flight& flight, const unsigned char* at, int second, int half, int lane, bool wanted) {
  constexpr int BYTES = Unit<KIND>::BYTES;
  if constexpr (KIND == KIND_F16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_once_16(flight.words[half][i], at + (half ? second : 0) + i * 512, wanted);
  } else {
    const unsigned char* scales = at + Unit<KIND>::DATA + ((lane >> 2) * 4 - lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // Q4: unit i / 2, tile i % 2; Q8: tile i / 2, word i % 2
      const int unit = KIND == KIND_Q4 ? 2 * half + i / 2 : half, tile = KIND == KIND_Q4 ? i % 2 : i / 2, word = KIND == KIND_Q4 ? 0 : i % 2;
      load_once_16(flight.words[half][i], at + (tile ? second : 0) + unit * BYTES + word * 512, wanted);
      if (word == 0) load_once_4(flight.scales[half][i], scales + (tile ? second : 0) + unit * BYTES, wanted);
    }
  }
}

// Activations of a unit.
template <class S> __device__ __forceinline__ void activations(const LinearRows& p, const Memory<S>& m, const uint16_t* row, int unit, int j, int lane,
                                                               uint32_t (&b)[S::NB][8], float4 (&start)[S::NB]) {
#pragma unroll
  for (int nb = 0; nb < S::NB; ++nb) {
    uint4 low, high;
    if constexpr (S::FUSED) {
      low = *reinterpret_cast<const uint4*>(row + unit * UNIT_COLS + j * UNIT_COLS), high = *reinterpret_cast<const uint4*>(row + unit * UNIT_COLS + j * UNIT_COLS + 8);
      start[nb] = m.starts[unit + j];
    } else if constexpr (S::LEFT) {
      const uint4* from = reinterpret_cast<const uint4*>(p.rows_in.ready.records) + unit * (READY_BYTES / 16) + (j * (READY_BYTES / 16) + nb * 64) + lane;
      low = from[0], high = from[32];
      start[nb] = ready_start(reinterpret_cast<const uint32_t*>(p.rows_in.ready.records)[unit * (READY_BYTES / 4) + (j * READY_BYTES + READY_SUMS) / 4 + nb * 32 + lane]);
    } else {
      const uint4* from = reinterpret_cast<const uint4*>(p.rows_in.halves) + unit * (S::NB * 64) + (j * S::NB + nb) * 64 + lane;
      low = from[0], high = from[32];
      start[nb] = *(reinterpret_cast<const float4*>(p.rows_in.starts) + unit * (S::NB * 4) + (j * S::NB + nb) * 4 + (lane & 3));
    }
    b[nb][0] = low.x, b[nb][1] = low.y, b[nb][2] = low.z, b[nb][3] = low.w;
    b[nb][4] = high.x, b[nb][5] = high.y, b[nb][6] = high.z, b[nb][7] = high.w;
  }
}

// The products of half a step. ring: of RINGED's Q4; from `next` on are the units after the step, if there are `more`. few, places: of STEPPED.
template <int KIND, class S> __device__ __forceinline__ void multiply_half(const LinearRows& p, const Memory<S>& m, const RowRing<S::NB, S::SOURCE>& ring, const FewRing& few, const FewRing::Places& places, const uint16_t* row, int unit, int next, bool more,
                                                                           const Flight& flight, int half, int lane, float (&acc)[GROUP_TILES][S::NB][S::SUMS]) {
#pragma unroll
  for (int j = 0; j < Step<KIND>::HALF; ++j) {
    uint32_t b[S::NB][8];
    float4 start[S::NB];
    const int n = KIND == KIND_F16 ? 0 : half * Step<KIND>::HALF + j;
    if constexpr (S::STEPPED) few.take(places, n, b, start);
    else if constexpr (KIND == KIND_Q4 && S::RINGED) ring.take(n % ring.UNITS, lane, b, start);
    else activations<S>(p, m, row, unit, n, lane, b, start);
    if constexpr (KIND == KIND_F16) {
      multiply_words<KIND, S::NB, S::SUMS>(flight.words[half], 0u, b, start, acc[half]);
    } else {
#pragma unroll
      for (int t = 0; t < GROUP_TILES; ++t) {
        const int i = KIND == KIND_Q4 ? 2 * j + t : 2 * t;
        multiply_words<KIND, S::NB, S::SUMS>(flight.words[half] + i, flight.scales[half][i], b, start, acc[t]);
      }
    }
    if constexpr (KIND == KIND_Q4 && S::RINGED) {
      const int ahead = n + ring.UNITS, units = Step<KIND>::UNITS;
      __syncwarp();
      ring.copy(p.rows_in, n % ring.UNITS, ahead < units ? unit + ahead : next + ahead - units, lane, ahead < units || more);
    }
  }
}

template <class S> __device__ __forceinline__ void leave(float* sums, float (&acc)[GROUP_TILES][S::NB][S::SUMS], int lane) {
  const int g = lane >> 2, q = lane & 3;
  float* base = sums + (S::STEPPED ? 20 : 40) * q + g;
#pragma unroll
  for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
    for (int nb = 0; nb < S::NB; ++nb) {
      float(&c)[S::SUMS] = acc[t][nb];
      float* target = base + (t * S::NB + nb) * S::TILE_SUMS;
      if constexpr (S::STEPPED) {
        if (q < 2) target[0] = c[0], target[8] = c[1];
      } else if (!S::FEW || q == 0) target[0] = c[0], target[20] = c[1], target[8] = c[2], target[28] = c[3];
#pragma unroll
      for (int i = 0; i < S::SUMS; ++i) c[i] = 0.0f;
    }
}

// A warp's steps of one kind, up to the end of its part or of the segment. place: groups of the round that it has left.
template <int KIND, class S>
__device__ __forceinline__ void run(const LinearRows& p, const Memory<S>& m, Flight& flight, Way& way, int warp, int lane, int& place) {
  float acc[GROUP_TILES][S::NB][S::SUMS] = {};
  const int group_steps = p.group_steps[way.segment], staged = staged_units(p.rows_in), num_tiles = p.segments[way.segment].num_tiles, tile_bytes = p.segments[way.segment].tile_bytes;
  const int groups = (num_tiles + GROUP_TILES - 1) / GROUP_TILES;
  const uint16_t* row = m.rows + min(lane >> 2, p.rows - 1) * m.stride + (lane & 3) * 16;
  const FewRing few{m.rings + warp * FewRing::BYTES};
  FewRing::Places places = FewRing::places(p.rows, lane, way.left);   // a step's number is how many are left
  const RowRing<S::NB, S::SOURCE> ring{m.rings + warp * RowRing<S::NB, S::SOURCE>::BYTES};
  if constexpr (KIND == KIND_Q4 && S::RINGED) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < ring.UNITS; ++n) ring.copy(p.rows_in, n, way.unit + n, lane, true);
  }
  if constexpr (S::STEPPED) few.template copy<Step<KIND>::UNITS>(p.rows_in, way.left, way.unit, p.rows, lane, true);
  bool more;
#pragma unroll 1
  do {
    const int unit = way.unit, second = way.second;
    const bool crosses = ++way.step == group_steps;
    way.at += Step<KIND>::BYTES, way.unit += Step<KIND>::UNITS, --way.left;
    if (S::RINGED && KIND != KIND_F16 ? crosses : way.unit == staged) way.unit = 0;   // the same but for F16's wrap; 16 rows lack the register
    if (crosses) way.at += second, ++way.group, way.step = 0;
    if (crosses) way.second = way.group * GROUP_TILES + 1 < num_tiles ? tile_bytes : 0;
    more = way.left > 0 && way.group < groups;
    if constexpr (S::STEPPED) {
      copy_async_wait<0>();
      __syncwarp();   // the step is there, and nobody reads the one before
      few.template copy<Step<KIND>::UNITS>(p.rows_in, way.left, way.unit, p.rows, lane, more);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply_half<KIND, S>(p, m, ring, few, places, row, unit, way.unit, more, flight, half, lane, acc);
      fetch<KIND>(flight, way.at, way.second, half, lane, more);
    }
    if (S::STEPPED) places.turn();
    if (crosses || way.left == 0) {
      leave<S>(m.place(p, warp, place), acc, lane);
      ++place;
    }
  } while (more);
}

template <class S> __device__ __forceinline__ float inverse_of(const LinearRows& p, const Memory<S>& m, int row) {
  if constexpr (S::FUSED || S::SOURCE == FOLLOWED) return m.inverse[row];
  else if constexpr (S::SOURCE == READY) return p.rows_in.ready.unscale;
  else return p.rows_in.inverse[row];
}
template <class S> __device__ __forceinline__ float sum_of_warps(const LinearRows& p, const Memory<S>& m, int warps, int t, int i, int row) {
  const int low = warps & 255, last = warps >> 8 & 255, each = p.places * S::PLACE_SUMS;
  const float* from = m.sums + (t * S::NB + (row >> 3)) * S::TILE_SUMS + (row & 7) * 20 + i;
  float total = from[low * each + (warps >> 16) * S::PLACE_SUMS];
#pragma unroll 4
  for (int warp = low + 1; warp <= last; ++warp) total = __fadd_rn(total, from[warp * each]);
  return total;
}

// 32 columns of a row behind an addition, a lane each, as the norm's stage reads them, and what a warp of that stage has to know (follow.cuh).
// Sums of 16 columns and of all squares go together: lanes with 8 among their bits are left with squares, the others with columns.
__device__ __forceinline__ void leave_following(const LinearRows& p, int row, int first, int lane, float x, float weight, float scale) {
  const int column = first + lane;
  const bool is_second = column & 4, has_squares = lane & 8;
  const float v = __fmul_rn(x, weight), largest = warp_max_positive(fabsf(v));
  const uint16_t bits = half_from_float(__fmul_rn(v, is_second ? __fmul_rn(scale, 0.0625f) : scale));
  const float square = __fmul_rn(x, x), squares = __fadd_rn(square, __shfl_xor_sync(ALL_LANES, square, 16));
  const float part = __fmul_rn(half_to_float(bits), is_second ? 1.0f : 0.0625f);
  float sum = __fadd_rn(has_squares ? squares : part, __shfl_xor_sync(ALL_LANES, has_squares ? part : squares, 8));
#pragma unroll
  for (int distance = 4; distance > 0; distance >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
  *p.ready.half(row, column) = bits;
  p.ready.leave_sum(row, column, sum);
  if (lane == 8) p.rows_in.follow->stats[row][first / 32] = make_float2(sum, largest);
}

// What holds for a whole row that was left, once for all blocks. A row that its scale did not suit is converted anew, and says so.
__device__ __forceinline__ void measure_row(const Rows& p, int row, int lane) {
  Follow& follow = *p.follow;
  float2 stats[FOLLOW_GROUPS / 32];
#pragma unroll
  for (int i = 0; i < FOLLOW_GROUPS / 32; ++i) {
    stats[i] = make_float2(0.0f, 0.0f);
    if (32 * (lane + 32 * i) < p.cols) stats[i] = follow.stats[row][lane + 32 * i];
  }
  float sum = stats[0].x, top = stats[0].y;
#pragma unroll
  for (int i = 1; i < FOLLOW_GROUPS / 32; ++i) sum = __fadd_rn(sum, stats[i].x), top = fmaxf(top, stats[i].y);
  const float rms = rsqrtf(warp_sum(sum) / (float)p.cols + p.eps), scale = follow.scales[row];
  top = warp_max_positive(top);
  float inverse = __fmul_rn(rms, power_inverse(scale));
  if (!holds(scale, top)) {
    Ready anew = p.ready;
    anew.scale = 1.0f;   // zeros past the columns stay zeros whatever the row is: nobody else writes them
    const float factor = __fmul_rn(rms, peak_scale(__fmul_rn(top, rms), inverse));
    inverse = -inverse;
#pragma unroll 1
    for (int four = lane; four < p.ready.units * (READY_COLS / 4); four += 32) {
      float4 v = make_float4(0, 0, 0, 0);
      if (4 * four < p.cols) {
        const float4 w = reinterpret_cast<const float4*>(p.norm)[four];
        v = reinterpret_cast<const float4*>(p.x + (long long)row * p.x_stride)[four];
        v.x = __fmul_rn(__fmul_rn(v.x, w.x), factor), v.y = __fmul_rn(__fmul_rn(v.y, w.y), factor);
        v.z = __fmul_rn(__fmul_rn(v.z, w.z), factor), v.w = __fmul_rn(__fmul_rn(v.w, w.w), factor);
      }
      anew.leave_four(row, 4 * four, v);
    }
    __syncwarp();
    __threadfence();   // of the lane that posts: it stands for what all of them wrote
  }
  if (lane == 0) {
    p.next->scales[row] = following_scale(top);
    post_word(&follow.words[row], inverse);
  }
}

// What others measured, by one warp for its block.
__device__ __forceinline__ void look_at_rows(const uint32_t* words, int rows, float* inverses, int* lost) {
  const int lane = threadIdx.x % 32;
  const float inverse = look_at_word(words + min(lane, rows - 1));
  const bool is_lost = __any_sync(ALL_LANES, inverse < 0.0f);
  __syncwarp();   // all have read what was there
  if (lane < MAX_ROWS) inverses[lane] = fabsf(inverse);
  if (lane == 0) *lost = *lost ? 2 : is_lost;
}
// The same, called: within the kernel it costs the loop of 16 rows its registers.
__device__ __noinline__ void look_at_many(const uint32_t* words, int rows, float* inverses, int* lost) { look_at_rows(words, rows, inverses, lost); }

// Sums of a round's groups, to where they belong: out, or the border with the next block. A warp takes a group of a row at a time,
// the last first, as the next block waits for it.
template <class S> __device__ __forceinline__ void reduce_round(const LinearRows& p, const Memory<S>& m, int block, int warp, int lane) {
  const int groups = m.plans[warp].kinds >> 4, t = lane >> 4, i = lane & 15;
#pragma unroll 1
  for (int k = groups * p.rows - 1 - warp; k >= 0; k -= BLOCK_WARPS) {
    const int number = divided(k, p.per_row), row = k - number * p.rows, within = t * TILE_ROWS + i;
    const Gather gather = m.gathers[number];
    float* target = p.out + (long long)row * p.out_stride + (gather.row + within);
    const bool gives = gather.flags & GATHER_GIVES, is_there = S::EPILOGUE != GATE_UP && !gives && within < gather.left;
    constexpr bool CAN_LEAVE = S::EPILOGUE == ADD && S::SOURCE == READY;
    const bool leaves = CAN_LEAVE && p.ready.units && !gives;
    float before = 0.0f, weight = 0.0f, scale = 0.0f;
    if (S::EPILOGUE == ADD) load_float(before, target, is_there);   // on its way while the sums are made
    if constexpr (CAN_LEAVE) {
      load_float(weight, p.rows_in.norm + (gather.row + within), is_there && leaves);
      load_float(scale, p.rows_in.follow->scales + row, leaves);
    }
    const float factor = (gather.flags & GATHER_F16 ? 1.0f : CODE_UNSCALE) * inverse_of<S>(p, m, row);
    float value = __fmul_rn(sum_of_warps<S>(p, m, gather.warps, t, i, row), factor);
    const int word = (t * MAX_ROWS + row) * TILE_ROWS + i;
    if (gives) {
      post_word(p.border + (block + 1) * BORDER_WORDS + word, value);
      continue;
    }
    if (gather.flags & GATHER_TAKES) value = __fadd_rn(take_word(p.border + block * BORDER_WORDS + word), value);
    if constexpr (S::EPILOGUE == GATE_UP) {
      const float up = __shfl_sync(ALL_LANES, value, i + 16);
      const int column = (gather.flags >> 3) + i;
      const float product = __fmul_rn(silu(value), up);
      if (p.ready.units) {
        p.ready.leave(row, column, column < p.out_rows ? product : 0.0f, t == 0);
        if (column - i + TILE_ROWS >= p.out_rows)   // the last one, up to the end of a record
          for (int after = column + TILE_ROWS; after < p.ready.units * READY_COLS; after += TILE_ROWS) p.ready.leave(row, after, 0.0f, t == 0);
      } else if (t == 0 && column < p.out_rows) p.out[(long long)row * p.out_stride + column] = product;
    } else {
      if (S::EPILOGUE == ADD) value = is_there ? __fadd_rn(before, value) : 0.0f;
      if (is_there) *target = value;
      if constexpr (CAN_LEAVE)
        if (leaves) leave_following(p, row, gather.row, lane, value, weight, scale);
    }
  }
}

template <int SOURCE, int EPILOGUE, int NB, int COLUMNS> __device__ __forceinline__ void linear_rows(const LinearRows& p) {
  using S = Shape<SOURCE, EPILOGUE, NB, COLUMNS>;
  SHARED_BYTES(shared);
  allow_next();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Memory<S> m;
  m.open(shared, staged_units(p.rows_in), p.rows, p.places);
  if (SOURCE == FOLLOWED && threadIdx.x == 0) *m.lost = 0;
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round) {
    Flight flight;
    Way way;
    const Plan& plan = m.plans[warp];
    auto begin = [&](auto kind) {
      fetch<kind.value>(flight, way.at, way.second, 0, lane, true), fetch<kind.value>(flight, way.at, way.second, 1, lane, true);
    };
    auto by_kind = [&](int kind, auto call) {
      if (kind == KIND_Q4) call(Kind<KIND_Q4>());
      else if (kind == KIND_Q8) call(Kind<KIND_Q8>());
      else call(Kind<KIND_F16>());
    };
    {
      const int part = round * (int)gridDim.x + (int)blockIdx.x;
      const uint4* from = reinterpret_cast<const uint4*>(p.plans + part * BLOCK_WARPS + warp);
      const Gather gather = p.gathers[part * ROUND_GROUPS + min((int)threadIdx.x, ROUND_GROUPS - 1)];
      const uint4 first = from[0], piece = from[min(lane, (int)sizeof(Plan) / 16 - 1)];
      const int kind = (int)from[1].x >> 2 & 3;
      if (lane < (int)sizeof(Plan) / 16) reinterpret_cast<uint4*>(m.plans + warp)[lane] = piece;   // behind the weights it would wait for them
      if (threadIdx.x < ROUND_GROUPS) m.gathers[threadIdx.x] = gather;
      __syncwarp();
      way.at = p.weights + ((long long)first.y << 32 | first.x) + lane * 16, way.second = first.z, way.left = first.w;
      by_kind(kind, begin);
    }
    if (round == 0) {
      if constexpr (S::STEPPED) FewRing{m.rings + warp * FewRing::BYTES}.clear(lane);
      Norm<SOURCE> norm;
      norm.load(p.rows_in);
      wait_for_earlier();
      if constexpr (S::FUSED) {
        const auto row = [&](int r) { return RowMajor{m.rows + r * m.stride, reinterpret_cast<float*>(m.starts), r}; };
        if (SOURCE == NORMED && p.rows == 2) {
          const RowMajor both[2] = {row(0), row(1)};
          stage_rows<SOURCE, 2>(p.rows_in, norm, 0, m.stats, both, m.inverse);
        } else {
#pragma unroll 1
          for (int r = 0; r < p.rows; ++r) {
            const RowMajor one[1] = {row(r)};
            stage_rows<SOURCE, 1>(p.rows_in, norm, r, m.stats + 2 * WARPS * r, one, m.inverse + r);
          }
        }
        __syncthreads();
      }
      if constexpr (SOURCE == FOLLOWED)
        if (warp == 0 && *m.lost == 0)   // has no more steps than the others, and others have one more
          for (int row = MEASURED_FROM(blockIdx.x); row < p.rows; row += MEASURED_BY(gridDim.x)) measure_row(p.rows_in, row, lane);
      if constexpr (SOURCE == READY && EPILOGUE == ADD)
        if (p.ready.units && blockIdx.x == 0 && threadIdx.x < FOLLOW_ROWS) p.rows_in.follow->words[threadIdx.x] = 0;
    }
    way.segment = plan.kinds & 3, way.group = plan.group, way.step = plan.step, way.unit = plan.unit;
    int place = 0;
    if (way.left == 0) {   // counts as one among the others of a group
      float none[GROUP_TILES][NB][S::SUMS] = {};
      leave<S>(m.place(p, warp, 0), none, lane);
    }
    while (way.left > 0) {
      by_kind(p.segments[way.segment].kind, [&](auto kind) { run<kind.value, S>(p, m, flight, way, warp, lane, place); });
      if (way.left == 0) break;
      ++way.segment, way.group = 0, way.step = 0, way.aim(p, lane);
      by_kind(p.segments[way.segment].kind, begin);
    }
    if constexpr (SOURCE == FOLLOWED)
      if (warp == 0 && round == 0) {
        if constexpr (NB == 2) look_at_many(p.rows_in.follow->words, p.rows, m.inverse, m.lost);
        else look_at_rows(p.rows_in.follow->words, p.rows, m.inverse, m.lost);
      }
    __syncthreads();
    if constexpr (SOURCE == FOLLOWED)
      if (round == 0 && *m.lost == 1) {   // all of it again, with what is there now
        __threadfence();
        __syncthreads();
        --round;
        continue;
      }
    reduce_round<S>(p, m, block_anew(), warp, lane);
    if (round + 1 < p.rounds) __syncthreads();
  }
}

#define LINEAR_ROWS(NAME, SOURCE, EPILOGUE, NB, COLUMNS)                                                    \
  extern "C" __global__ void __launch_bounds__(BLOCK, 1) NAME(const __grid_constant__ LinearRows p) {     \
    linear_rows<SOURCE, EPILOGUE, NB, COLUMNS>(p);                                                          \
  }
LINEAR_ROWS(linear_rows_norm_store, NORMED, STORE, 1, 2)
LINEAR_ROWS(linear_rows_norm_gate_up, NORMED, GATE_UP, 1, 2)
LINEAR_ROWS(linear_rows_plain_store, PLAIN, STORE, 1, 2)
LINEAR_ROWS(linear_rows_plain_add, PLAIN, ADD, 1, 2)
LINEAR_ROWS(linear_rows_gated_add, GATED, ADD, 1, 2)
LINEAR_ROWS(linear_rows_halves_store, HALVES, STORE, 1, 8)
LINEAR_ROWS(linear_rows_halves_add, HALVES, ADD, 1, 8)
LINEAR_ROWS(linear_rows_halves_gate_up, HALVES, GATE_UP, 1, 8)
LINEAR_ROWS(linear_rows_wide_store, HALVES, STORE, 2, 8)
LINEAR_ROWS(linear_rows_wide_add, HALVES, ADD, 2, 8)
LINEAR_ROWS(linear_rows_wide_gate_up, HALVES, GATE_UP, 2, 8)
LINEAR_ROWS(linear_rows_followed_few_store, FOLLOWED, STORE, 1, 2)
LINEAR_ROWS(linear_rows_followed_few_gate_up, FOLLOWED, GATE_UP, 1, 2)
LINEAR_ROWS(linear_rows_followed_store, FOLLOWED, STORE, 1, 8)
LINEAR_ROWS(linear_rows_followed_gate_up, FOLLOWED, GATE_UP, 1, 8)
LINEAR_ROWS(linear_rows_followed_wide_store, FOLLOWED, STORE, 2, 8)
LINEAR_ROWS(linear_rows_followed_wide_gate_up, FOLLOWED, GATE_UP, 2, 8)
LINEAR_ROWS(linear_rows_ready_few_add, READY, ADD, 1, 2)
LINEAR_ROWS(linear_rows_ready_halves_add, READY, ADD, 1, 8)
LINEAR_ROWS(linear_rows_ready_wide_add, READY, ADD, 2, 8)

// Convert a row once for all blocks, into fragment order. grid (rows)
//
// The first run is one without a row, while the kernel in front still runs: since the last layer so many weights have gone by that the
// instructions come from far, and those who wait for the row would wait for them.
template <int SOURCE> __device__ __forceinline__ void stage_all(const Rows& p) {
  alignas(16) __shared__ float stats[2 * WARPS];
  allow_next();
  Norm<SOURCE> norm;
  norm.load(p);
#pragma unroll 1
  for (int run = once(0); run < 2; ++run) {
    if (run) wait_for_earlier();
    const FragmentOrder target[1] = {{p.halves, p.starts, (int)blockIdx.x, p.row_groups}};
    stage_rows<SOURCE, 1>(p, norm, blockIdx.x, stats, target, p.inverse + blockIdx.x, run);
    __syncthreads();
  }
}
// One block: with a share of the registers for three, ptxas asks for some of a row only when other pieces have come.
extern "C" __global__ void __launch_bounds__(THREADS, 1) stage_norm(const __grid_constant__ Rows p) { stage_all<NORMED>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) stage_plain(const __grid_constant__ Rows p) { stage_all<PLAIN>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) stage_gated(const __grid_constant__ Rows p) { stage_all<GATED>(p); }
