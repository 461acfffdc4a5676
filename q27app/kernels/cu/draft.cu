// draft_next: what a draft step drew becomes the input of the next one, without the host; draft_turn: with the last step of the draw
// before it and the first step of the layer behind it. follow: what a pass drew becomes the
// input of a chain. take_drafts: what a chain or the pass before drew becomes tokens of a pass.
// Reference: reference_draft     Used by: Backend.draw_drafts, Backend.begin_ahead, Backend.begin
// Shapes:    drawn [rows], margins [rows] -> tokens, positions [rows] of the batch, positions of the draws [rows],
//            penalty lists, drafts [step, rows], draft margins [step, rows], rotary angles
// Layout:    rows contiguous; a penalty list ends in places with id -1, one a step
// Launch:    draft_next grid (rows), block (256), one block per row; draft_turn grid (rows, 3), block (512); follow, take_drafts grid (1), block (64), a thread per sequence or row
// Defines:   none     Limits: none
// Numbers:   integers. Bound: latency.
#include "candidates.cuh"
#include "embed.cuh"

struct DraftNext {
  const int* drawn;           // [rows]
  const float* margins;       // [rows]
  const int* limits;          // [rows] steps that the row may take
  int* tokens;                // [rows] of the batch
  int* positions;             // [rows] of the batch
  long long* draw_positions;  // [rows]
  const int* penalty_starts;  // [rows + 1]
  int* penalty_ids;
  int* penalty_counts;
  int* drafts;                // [steps, rows]
  float* draft_margins;       // [steps, rows]
  const double* frequencies;  // [half]
  float* table;               // [rows, half, 2] cos, sin of the batch's positions
  int step, rows, half;
};

// By a block of `threads`, shared: two integers. token: what the row drew.
__device__ __forceinline__ void go_on(const DraftNext& p, int row, int token, float margin, int threads, int* shared) {
  int &found = shared[0], &spare = shared[1];
  if (threadIdx.x == 0) found = spare = 0x7fffffff;
  __syncthreads();
  for (int i = p.penalty_starts[row] + threadIdx.x; i < p.penalty_starts[row + 1]; i += threads) {
    if (p.penalty_ids[i] == token) atomicMin(&found, i);
    if (p.penalty_ids[i] < 0) atomicMin(&spare, i);
  }
  __syncthreads();
  const bool goes_on = p.step + 1 < p.limits[row];   // else it repeats its place, and nobody looks at what comes of it
  if (goes_on) rope_row(p.positions[row] + 1, p.frequencies, p.table, row, p.half, threads);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int at = found != 0x7fffffff ? found : spare;
  if (at != 0x7fffffff) p.penalty_ids[at] = token, ++p.penalty_counts[at];
  p.drafts[p.step * p.rows + row] = token;
  p.draft_margins[p.step * p.rows + row] = margin;
  if (!goes_on) return;
  p.tokens[row] = token;
  ++p.positions[row];
  ++p.draw_positions[row];
}

extern "C" __global__ void __launch_bounds__(256) draft_next(const __grid_constant__ DraftNext p) {
  __shared__ int shared[2];
  allow_next();
  wait_for_earlier();
  go_on(p, blockIdx.x, p.drawn[blockIdx.x], p.margins[blockIdx.x], 256, shared);
}

struct DraftTurn {
  DraftNext next;                       // drawn: of rows none of whose chunks has a candidate; margins: not read
  Embed embed;                          // tokens: not read where the row goes on
  const unsigned long long* part_best;  // [rows, CHUNKS] of the draw
  const float* part_top;                // [rows, CHUNKS, 2] of the raw logits
};

// shared: [CHUNKS / 32]
__device__ __forceinline__ int drawn_token(const DraftTurn& p, int row, unsigned long long* shared) {
  const unsigned long long best = best_of_chunks(p.part_best + row * CHUNKS, shared);
  return best ? candidate_id(best) : p.next.drawn[row];
}

// A block for the embedding, one for the hidden row, one for the rest.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS) draft_turn(const __grid_constant__ DraftTurn p) {
  __shared__ unsigned long long best_of[CHUNKS / 32];
  __shared__ float top_of[CHUNKS / 32][2], sums[JOIN_THREADS / 32];
  __shared__ int places[2];
  allow_next();
  wait_for_earlier();
  const int row = blockIdx.x;
  if (blockIdx.y == 2) {
    const int token = drawn_token(p, row, best_of);
    float top, second;
    top_of_chunks(p.part_top + 2 * row * CHUNKS, top_of, top, second);
    go_on(p.next, row, token, top > -INFINITY ? top - second : 0.0f, JOIN_THREADS, places);
  } else if (blockIdx.y == 1) {
    join_hidden(p.embed, row, sums);
  } else {
    const int token = drawn_token(p, row, best_of);
    join_embedding(p.embed, row, p.next.step + 1 < p.next.limits[row] ? token : p.embed.tokens[row], sums);
  }
}

struct Follow {
  const int* drawn;           // [rows] of the pass, a token after each row
  const int* accepted;        // [seqs] rows that became text, or null where each sequence has one row
  const int* positions;       // of the pass
  const int* row_starts;      // of the pass
  int* tokens;                // [seqs] of the chain's batch
  int* out_positions;         // [seqs] of the chain's batch
  long long* draw_positions;  // [seqs] of the chain
  int num_seqs;
};

// The first draft step after a pass: a row a sequence, its last drawn token where it will stand.
extern "C" __global__ void __launch_bounds__(64) follow(const __grid_constant__ Follow p) {
  allow_next();
  wait_for_earlier();
  const int seq = threadIdx.x;
  if (seq >= p.num_seqs) return;
  const int first = p.row_starts[seq], taken = p.accepted ? p.accepted[seq] : 1, position = p.positions[first] + taken;
  p.tokens[seq] = p.drawn[first + taken - 1], p.out_positions[seq] = position, p.draw_positions[seq] = position + 1;
}

struct TakeDrafts {
  int* tokens;            // of the batch; -1 - row: what this row of the pass before drew, or the draft of this row of the chain
  const int* drawn;       // [rows of the pass before]
  const int* row_starts;  // of the batch
  const int* drafts;      // [steps, chain_rows]
  int rows, num_seqs, chain_rows;
};

extern "C" __global__ void __launch_bounds__(64) take_drafts(const __grid_constant__ TakeDrafts p) {
  allow_next();
  wait_for_earlier();
  const int row = threadIdx.x;
  if (row >= p.rows || p.tokens[row] >= 0) return;
  int seq = 0;
  while (seq + 1 < p.num_seqs && row >= p.row_starts[seq + 1]) ++seq;
  const int depth = row - p.row_starts[seq], source = -1 - p.tokens[row];
  p.tokens[row] = depth ? p.drafts[(depth - 1) * p.chain_rows + source] : p.drawn[source];
}
