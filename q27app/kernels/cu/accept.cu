// accept: rows of each sequence that become text, 1 + the longest run of drafts that equal what was drawn before them.
// Reference: reference_sample.accept       Used by: Backend.accept
// Shapes:    tokens [n] drawn, batch tokens [rows] -> accepted [seqs]
// Layout:    logit_rows ascending
// Launch:    grid (1), block (256), one thread a sequence
// Defines:   none     Limits: none
// Numbers:   integers. Bound: latency.
#include "common.cuh"

struct Accept {
  const int* drawn;        // [n]
  const int* tokens;       // [rows]
  const int* row_starts;   // [seqs + 1]
  const int* logit_rows;   // [n]
  int* accepted;           // [seqs]
  int num_seqs, n;
};

extern "C" __global__ void __launch_bounds__(256) accept(const __grid_constant__ Accept p) {
  allow_next();
  wait_for_earlier();
  for (int seq = threadIdx.x; seq < p.num_seqs; seq += blockDim.x) {
    const int first = p.row_starts[seq], end = p.row_starts[seq + 1];
    int at = 0, taken = 1;
    while (at < p.n && p.logit_rows[at] < first) ++at;
    while (first + taken < end && at < p.n && p.logit_rows[at] == first + taken - 1 && p.drawn[at] == p.tokens[first + taken]) ++taken, ++at;
    p.accepted[seq] = taken;
  }
}
