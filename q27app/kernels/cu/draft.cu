// draft_next: what a draft step drew becomes the input of the next one, without the host.
// Reference: reference_draft.DraftChain     Used by: Backend.draw_drafts
// Shapes:    drawn [rows], margins [rows] -> tokens, positions [rows] of the batch, positions of the draws [rows],
//            penalty lists, drafts [step, rows], draft margins [step, rows]
// Layout:    rows contiguous; a penalty list ends in places with id -1, one a step
// Launch:    grid (rows), block (256), one block per row
// Defines:   none     Limits: none
// Numbers:   integers. Bound: latency.
#include "common.cuh"

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
  int step, rows;
};

extern "C" __global__ void __launch_bounds__(256) draft_next(const __grid_constant__ DraftNext p) {
  __shared__ int found, spare;
  const int row = blockIdx.x, token = p.drawn[row];
  if (threadIdx.x == 0) found = spare = 0x7fffffff;
  __syncthreads();
  for (int i = p.penalty_starts[row] + threadIdx.x; i < p.penalty_starts[row + 1]; i += 256) {
    if (p.penalty_ids[i] == token) atomicMin(&found, i);
    if (p.penalty_ids[i] < 0) atomicMin(&spare, i);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int at = found != 0x7fffffff ? found : spare;
  if (at != 0x7fffffff) p.penalty_ids[at] = token, ++p.penalty_counts[at];
  p.drafts[p.step * p.rows + row] = token;
  p.draft_margins[p.step * p.rows + row] = p.margins[row];
  if (p.step + 1 >= p.limits[row]) return;   // the row has ended: it repeats its place, and nobody looks at what comes of it
  p.tokens[row] = token;
  ++p.positions[row];
  ++p.draw_positions[row];
}
