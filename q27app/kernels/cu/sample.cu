// sample: penalties, mask, temperature, top-k, top-p, min-p, then the highest of logit + Gumbel noise; or the argmax.
// Reference: reference_sample.sample       Used by: Backend.sample
// Shapes:    logits [n, vocab] f32 -> tokens [n] int32, margins [n] f32
// Layout:    rows contiguous
// Launch:    sample_adjust, sample_scan, sample_mass, sample_gather, sample_noise grid (CHUNKS, n), block (256); sample_penalize
//            grid (n), block (256); sample_pick, sample_take grid (n), block (CHUNKS); sample_floor, sample_logprobs grid (n), block (1024)
// Defines:   none     Limits: at most 32 logprobs a row
//            ids skip_from .. skip_from + skip - 1 have no logits and are not looked at; skip_from % 4 == skip % 4 == 0
// Numbers:   comparisons on order-preserving integers, masses in 40-bit fixed point: no sum depends on an order. Ties go to
//            the lowest id, -0 equals +0. Bound: memory (one row is one megabyte of the second-level cache).
#include "candidates.cuh"

constexpr int THREADS = 256, DRAW_THREADS = 1024, LIST = 4096;

struct Sample {
  const float* logits;          // [n, vocab] raw
  float* work;                  // [n, vocab] after penalties, mask, temperature; null: nothing to adjust and all greedy
  const float* temperature;     // [n]
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const float* presence;
  const float* frequency;
  const unsigned long long* seeds;
  const long long* positions;
  const int* penalty_starts;    // [n + 1]
  const int* penalty_ids;
  const int* penalty_counts;
  const uint32_t* masks;        // [n, mask_words] or null
  const int* num_logprobs;      // [n], -1 none
  unsigned long long* part_best;// [n, CHUNKS]
  float* part_top;              // [n, CHUNKS, 2]
  int* tokens;                  // [n]
  float* margins;               // [n]
  float* logprobs;              // [n, 1 + 32]: of the drawn id, then of the best
  int* logprob_ids;             // [n, 32]
  unsigned long long* part_mass;// [n, CHUNKS] masses of rows that top-p alone cuts
  float* list;                  // [n, LIST] values at or above a bound of the cut
  int* list_sizes;              // [n]
  uint32_t* floors;             // [n] lowest key that is kept
  int n, vocab, mask_words, skip_from, skip;
  int adjusts;                  // sample_scan fills work: nothing is penalised, and sample_adjust has not run
};

__device__ __forceinline__ unsigned long long warp_total(unsigned long long value) {
  for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

__device__ __forceinline__ bool allowed(const Sample& p, int row, int id) {
  return !p.masks || (p.masks[(long long)row * p.mask_words + id / 32] >> (id % 32) & 1);
}

// The ids that are looked at, one after the other.
__device__ __forceinline__ int id_count(const Sample& p) { return p.vocab - p.skip; }
__device__ __forceinline__ int id_at(const Sample& p, int i) { return i < p.skip_from ? i : i + p.skip; }

// A block's share of a row, four ids at a time with several loads under way, ids ascending: look(first id, values). vocab % 4 == 0.
template <class Look> __device__ __forceinline__ void for_fours(const Sample& p, const float* values, const Look& look) {
  constexpr int HELD = 4, STRIDE = CHUNKS * THREADS;
  const int count = id_count(p) / 4;
  for (int first = blockIdx.x * THREADS + threadIdx.x; first < count; first += HELD * STRIDE) {
    float4 held[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h)
      if (first + h * STRIDE < count) held[h] = *reinterpret_cast<const float4*>(values + id_at(p, 4 * (first + h * STRIDE)));
#pragma unroll
    for (int h = 0; h < HELD; ++h)
      if (first + h * STRIDE < count) look(id_at(p, 4 * (first + h * STRIDE)), held[h]);
  }
}

// work = (logit - penalty, masked) / temperature; a greedy row keeps its scale.
extern "C" __global__ void __launch_bounds__(THREADS) sample_adjust(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.y;
  const float temperature = p.temperature[row] > 0.0f ? p.temperature[row] : 1.0f;
  const long long base = (long long)row * p.vocab;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < id_count(p); i += CHUNKS * THREADS) {
    const int id = id_at(p, i);
    p.work[base + id] = allowed(p, row, id) ? defined(defined(p.logits[base + id]) / temperature) : -INFINITY;
  }
}

// grid (n), block (256): the ids that were generated before.
extern "C" __global__ void __launch_bounds__(THREADS) sample_penalize(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x;
  const float temperature = p.temperature[row] > 0.0f ? p.temperature[row] : 1.0f;
  const long long base = (long long)row * p.vocab;
  for (int i = p.penalty_starts[row] + threadIdx.x; i < p.penalty_starts[row + 1]; i += THREADS) {
    const int id = p.penalty_ids[i];
    if (id < 0 || id >= p.vocab || !allowed(p, row, id)) continue;
    const float penalty = __fadd_rn(p.presence[row], __fmul_rn(p.frequency[row], (float)p.penalty_counts[i]));
    p.work[base + id] = defined(defined(__fsub_rn(defined(p.logits[base + id]), penalty)) / temperature);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_scan(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ unsigned long long best_of[THREADS / 32];
  __shared__ float top_of[THREADS / 32][2];
  const int row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long base = (long long)row * p.vocab;
  unsigned long long best = 0;
  float top = -INFINITY, second = -INFINITY;
  const float temperature = p.adjusts && p.temperature[row] > 0.0f ? p.temperature[row] : 1.0f;
  const auto rank = [&](float raw) {
    second = fmaxf(second, fminf(top, raw));
    top = fmaxf(top, raw);
  };
  const auto adjusted = [&](float raw, int id) { return allowed(p, row, id) ? defined(raw / temperature) : -INFINITY; };
  if ((p.work && !p.adjusts) || p.vocab % 4) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < id_count(p); i += CHUNKS * THREADS) {
      const int id = id_at(p, i);
      const float raw = defined(p.logits[base + id]);
      float value = raw;
      if (p.adjusts) p.work[base + id] = value = adjusted(raw, id);
      else if (p.work) value = p.work[base + id];
      best = larger(best, candidate(value, id));
      rank(raw);
    }
  } else {
    float best_value = -INFINITY;
    int best_id = -1;
    for_fours(p, p.logits + base, [&](int id, float4 four) {
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float raw = defined(get(four, i));
        value[i] = p.adjusts ? adjusted(raw, id + i) : raw;
        if (best_id < 0 || value[i] > best_value) best_value = value[i], best_id = id + i;
        rank(raw);
      }
      if (p.adjusts) *reinterpret_cast<float4*>(p.work + base + id) = make_float4(value[0], value[1], value[2], value[3]);
    });
    if (best_id >= 0) best = candidate(best_value, best_id);
  }
  best = warp_best(best);
  for (int distance = 16; distance > 0; distance >>= 1) {
    const float other = __shfl_xor_sync(ALL_LANES, top, distance), other_second = __shfl_xor_sync(ALL_LANES, second, distance);
    second = fmaxf(fminf(top, other), fmaxf(second, other_second));
    top = fmaxf(top, other);
  }
  if (lane == 0) best_of[warp] = best, top_of[warp][0] = top, top_of[warp][1] = second;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < THREADS / 32; ++w) {
    best = larger(best, best_of[w]);
    second = fmaxf(fminf(top, top_of[w][0]), fmaxf(second, top_of[w][1]));
    top = fmaxf(top, top_of[w][0]);
  }
  const int at = row * CHUNKS + blockIdx.x;
  p.part_best[at] = best;
  p.part_top[2 * at] = top, p.part_top[2 * at + 1] = second;
}

extern "C" __global__ void __launch_bounds__(CHUNKS) sample_pick(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ unsigned long long best_of[CHUNKS / 32];
  __shared__ float top_of[CHUNKS / 32][2];
  const int row = blockIdx.x;
  float top, second;
  const unsigned long long best = best_of_chunks(p.part_best + row * CHUNKS, best_of);
  top_of_chunks(p.part_top + 2 * row * CHUNKS, top_of, top, second);
  if (threadIdx.x != 0) return;
  p.tokens[row] = candidate_id(best);
  p.margins[row] = top > -INFINITY && id_count(p) > 1 ? top - second : 0.0f;
  p.list_sizes[row] = 0;
}

__device__ __forceinline__ void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const unsigned long long a = (unsigned long long)0xD2511F53u * counter[0], b = (unsigned long long)0xCD9E8D57u * counter[2];
    const uint32_t next[4] = {(uint32_t)(b >> 32) ^ counter[1] ^ key0, (uint32_t)b, (uint32_t)(a >> 32) ^ counter[3] ^ key1, (uint32_t)a};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
}

__device__ __forceinline__ float gumbel(uint32_t word) {
  const float v = fminf((float)(((double)word + 0.5) * 2.3283064365386963e-10), 0.999999940395355224609375f);
  return -logf(-log1pf(-v));
}

struct DrawShared {
  unsigned long long bins[256];
  unsigned long long parts[DRAW_THREADS / 32];
  unsigned long long total;
  uint32_t prefix;
};

__device__ __forceinline__ unsigned long long block_reduce(DrawShared& s, unsigned long long value, bool sum) {
  value = sum ? warp_total(value) : warp_best(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.parts[threadIdx.x / 32] = value;
  __syncthreads();
  unsigned long long out = 0;
  for (int w = 0; w < DRAW_THREADS / 32; ++w) out = sum ? out + s.parts[w] : larger(out, s.parts[w]);
  return out;
}

// 2^40 times the probability relative to the best; 1 where only ids are counted.
__device__ __forceinline__ unsigned long long mass_of(float value, float top, bool count) {
  return count ? 1ull : (unsigned long long)(expf(value - top) * 1099511627776.0f);
}

// By a warp, the highest bins first: in which one the mass reaches target, into s.prefix, and what it lacks before that, into s.total; 0 if
// all of it is less.
__device__ __forceinline__ void pick_bin(DrawShared& s, uint32_t prefix, int shift, unsigned long long target) {
  constexpr int EACH = 8;
  const int lane = threadIdx.x % 32, highest = 255 - lane * EACH;
  unsigned long long own = 0;
  for (int i = 0; i < EACH; ++i) own += s.bins[highest - i];
  unsigned long long through = own;
  for (int distance = 1; distance < 32; distance <<= 1) {
    const unsigned long long other = __shfl_sync(ALL_LANES, through, max(lane - distance, 0));
    if (lane >= distance) through += other;
  }
  const unsigned long long before = through - own;
  if (lane == 31 && through < target) s.total = 0, s.prefix = prefix;
  if (before >= target || through < target) return;
  unsigned long long rest = target - before;
  int bin = highest;
  while (s.bins[bin] < rest) rest -= s.bins[bin--];
  s.total = rest, s.prefix = prefix | (uint32_t)bin << shift;
}

// Largest key v >= floor such that the mass of {key >= v} reaches target; floor if it never does. Values `gap` .. `gap` + skip - 1 are
// passed over.
__device__ uint32_t threshold_key(DrawShared& s, const float* work, int vocab, int gap, int skip, float top, uint32_t floor, unsigned long long target, bool count) {
  uint32_t prefix = 0, known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += DRAW_THREADS) s.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += DRAW_THREADS) {
      const float value = work[i < gap ? i : i + skip];
      const uint32_t key = order(value);
      if (key < floor || (key & known) != prefix) continue;
      const unsigned long long mass = mass_of(value, top, count);
      if (mass) atomicAdd(&s.bins[key >> shift & 255], mass);
    }
    __syncthreads();
    if (threadIdx.x < 32) pick_bin(s, prefix, shift, target);
    __syncthreads();
    prefix = s.prefix, target = s.total, known |= 255u << shift;
    __syncthreads();
    if (target == 0) return floor;
  }
  return prefix > floor ? prefix : floor;
}

__device__ __forceinline__ bool cuts_k(const Sample& p, int row) { return p.top_k[row] > 0 && p.top_k[row] < p.vocab; }
__device__ __forceinline__ bool cuts_p(const Sample& p, int row) { return p.top_p[row] > 0.0f && p.top_p[row] < 1.0f; }
__device__ __forceinline__ float top_value(const Sample& p, int row) { return p.work[(long long)row * p.vocab + p.tokens[row]]; }

// A bound of the cut is known: the k-th of the chunks' best for top-k, the masses for top-p alone.
__device__ __forceinline__ bool is_bounded(const Sample& p, int row) {
  return p.temperature[row] > 0.0f && (cuts_k(p, row) ? p.top_k[row] <= CHUNKS : cuts_p(p, row));
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_mass(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ unsigned long long parts[THREADS / 32];
  const int row = blockIdx.y;
  if (!is_bounded(p, row) || cuts_k(p, row)) return;
  const float* work = p.work + (long long)row * p.vocab;
  const float top = top_value(p, row);
  unsigned long long mass = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < id_count(p); i += CHUNKS * THREADS) mass += mass_of(work[id_at(p, i)], top, false);
  mass = warp_total(mass);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mass;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < THREADS / 32; ++w) mass += parts[w];
  p.part_mass[row * CHUNKS + blockIdx.x] = mass;
}

__device__ __forceinline__ unsigned long long mass_of_all(const Sample& p, int row) {
  unsigned long long mass = 0;
  for (int chunk = 0; chunk < CHUNKS; ++chunk) mass += p.part_mass[row * CHUNKS + chunk];
  return mass;
}

// The values that the cut may keep, in any order. Ids below the bound of top-p weigh less than 1 - top_p all together.
extern "C" __global__ void __launch_bounds__(THREADS) sample_gather(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ uint32_t bound;
  const int row = blockIdx.y;
  if (!is_bounded(p, row)) return;
  const float* work = p.work + (long long)row * p.vocab;
  if (cuts_k(p, row)) {
    const unsigned long long* best = p.part_best + row * CHUNKS;
    if (threadIdx.x < CHUNKS) {
      int rank = 0;
      for (int other = 0; other < CHUNKS; ++other)
        rank += best[other] > best[threadIdx.x] || (best[other] == best[threadIdx.x] && other < (int)threadIdx.x);
      if (rank == p.top_k[row] - 1) bound = (uint32_t)(best[threadIdx.x] >> 32);
    }
  } else if (threadIdx.x == 0) {
    const float share = (1.0f - p.top_p[row]) * (float)mass_of_all(p, row) / ((float)p.vocab * 1099511627776.0f);
    bound = share > 0.0f ? order(top_value(p, row) + logf(share) - 0.01f) : 0u;
  }
  __syncthreads();
  const auto gather = [&](float value) {
    if (order(value) < bound || !(value > -INFINITY)) return;
    const int at = atomicAdd(&p.list_sizes[row], 1);
    if (at < LIST) p.list[(long long)row * LIST + at] = value;
  };
  if (p.vocab % 4) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < id_count(p); i += CHUNKS * THREADS) gather(work[id_at(p, i)]);
    return;
  }
  for_fours(p, work, [&](int, const float4& four) {
#pragma unroll
    for (int i = 0; i < 4; ++i) gather(get(four, i));
  });
}

// The lowest key that top-k, top-p and min-p keep, from the gathered values where they are all there, else from all.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS) sample_floor(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ DrawShared s;
  __shared__ float list[LIST];
  const int row = blockIdx.x;
  if (!(p.temperature[row] > 0.0f)) return;
  const bool few = is_bounded(p, row) && p.list_sizes[row] <= LIST;
  const float* values = few ? list : p.work + (long long)row * p.vocab;
  const int count = few ? p.list_sizes[row] : id_count(p), skip = few ? 0 : p.skip;
  const float top = top_value(p, row);
  if (few) for (int i = threadIdx.x; i < count; i += DRAW_THREADS) list[i] = p.list[(long long)row * LIST + i];
  __syncthreads();
  uint32_t floor = order(-INFINITY) + 1;
  if (cuts_k(p, row)) floor = threshold_key(s, values, count, p.skip_from, skip, top, floor, p.top_k[row], true);
  if (cuts_p(p, row)) {
    unsigned long long mass = 0;
    if (cuts_k(p, row)) {
      for (int i = threadIdx.x; i < count; i += DRAW_THREADS)
        if (const float value = values[i < p.skip_from ? i : i + skip]; order(value) >= floor) mass += mass_of(value, top, false);
      mass = block_reduce(s, mass, true);
    } else mass = mass_of_all(p, row);
    const double wanted = ceil((double)p.top_p[row] * (double)mass);
    floor = threshold_key(s, values, count, p.skip_from, skip, top, floor, wanted < 1.0 ? 1ull : (unsigned long long)wanted, false);
  }
  if (p.min_p[row] > 0.0f && p.min_p[row] <= 1.0f) floor = max(floor, order(top + logf(p.min_p[row])));
  if (threadIdx.x == 0) p.floors[row] = floor;
}

// The highest value plus noise of each chunk's kept ids; four ids share a block of random words.
extern "C" __global__ void __launch_bounds__(THREADS) sample_noise(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ unsigned long long parts[THREADS / 32];
  const int row = blockIdx.y;
  if (!(p.temperature[row] > 0.0f)) return;
  const float* work = p.work + (long long)row * p.vocab;
  const uint32_t floor = p.floors[row], key0 = (uint32_t)p.seeds[row], key1 = (uint32_t)(p.seeds[row] >> 32);
  unsigned long long best = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i * 4 < id_count(p); i += CHUNKS * THREADS) {
    const int group = id_at(p, i * 4) / 4;
    bool any = false;
    for (int i = 0; i < 4; ++i) any |= group * 4 + i < p.vocab && order(work[group * 4 + i]) >= floor;
    if (!any) continue;
    uint32_t noise[4] = {(uint32_t)group, (uint32_t)p.positions[row], (uint32_t)((unsigned long long)p.positions[row] >> 32), 0};
    philox(noise, key0, key1);
    for (int i = 0; i < 4; ++i) {
      const int id = group * 4 + i;
      if (id < p.vocab && order(work[id]) >= floor) best = larger(best, candidate(__fadd_rn(work[id], gumbel(noise[i])), id));
    }
  }
  best = warp_best(best);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < THREADS / 32; ++w) best = larger(best, parts[w]);
  p.part_best[row * CHUNKS + blockIdx.x] = best;
}

extern "C" __global__ void __launch_bounds__(CHUNKS) sample_take(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ unsigned long long parts[CHUNKS / 32];
  const int row = blockIdx.x;
  if (!(p.temperature[row] > 0.0f)) return;
  const unsigned long long best = best_of_chunks(p.part_best + row * CHUNKS, parts);
  if (threadIdx.x == 0 && best != 0) p.tokens[row] = candidate_id(best);
}

// log softmax of the raw logits: the drawn id, then the best ids in order.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS) sample_logprobs(const __grid_constant__ Sample p) {
  allow_next();
  wait_for_earlier();
  __shared__ DrawShared s;
  __shared__ float sums[DRAW_THREADS / 32];
  const int row = blockIdx.x, wanted = p.num_logprobs[row];
  if (wanted < 0) return;
  const float* raw = p.logits + (long long)row * p.vocab;
  unsigned long long best = 0;
  for (int id = threadIdx.x; id < p.vocab; id += DRAW_THREADS) best = larger(best, candidate(defined(raw[id]), id));
  best = block_reduce(s, best, false);
  const float top = defined(raw[candidate_id(best)]);
  float sum = 0.0f;
  for (int id = threadIdx.x; id < p.vocab; id += DRAW_THREADS) sum = __fadd_rn(sum, expf(defined(raw[id]) - top));
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < DRAW_THREADS / 32; ++w) total = __fadd_rn(total, sums[w]);
  const float base = top + logf(total);
  if (threadIdx.x == 0) p.logprobs[row * 33] = raw[p.tokens[row]] - base;
  for (int i = 0; i < min(wanted, 32); ++i) {
    if (threadIdx.x == 0) p.logprobs[row * 33 + 1 + i] = raw[candidate_id(best)] - base, p.logprob_ids[row * 32 + i] = candidate_id(best);
    const unsigned long long limit = best;
    best = 0;
    for (int id = threadIdx.x; id < p.vocab; id += DRAW_THREADS) {
      const unsigned long long c = candidate(defined(raw[id]), id);
      if (c < limit) best = larger(best, c);
    }
    best = block_reduce(s, best, false);
    if (best == 0) break;
  }
}
