// accept: rows of each sequence that become text, 1 + the longest run of drafts that equal what was drawn before them.
// Reference: reference_sample.accept       Used by: Backend.accept
// Shapes:    tokens [n] drawn, batch tokens [rows] -> accepted [seqs]
// Layout:    logit_rows ascending
// Launch:    grid (1), block (256), a warp a sequence
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
  const int lane = threadIdx.x % 32;
  for (int seq = threadIdx.x / 32; seq < p.num_seqs; seq += 8) {
    const int first = p.row_starts[seq], end = p.row_starts[seq + 1];
    float before = 0.0f;   // logit rows of the sequences in front
    for (int i = lane; i < p.n; i += 32) before += p.logit_rows[i] < first;
    const int at = (int)warp_sum(before);
    int taken = 1;
    for (bool goes_on = true; goes_on; ) {   // 32 drafts at a time
      const int draft = first + taken + lane, i = at + taken - 1 + lane;
      const bool right = draft < end && i < p.n && p.logit_rows[i] == draft - 1 && p.drawn[i] == p.tokens[draft];
      int run = 0;
      while (run < 32 && __shfl_sync(ALL_LANES, (int)right, run)) ++run;
      taken += run;
      goes_on = run == 32;
    }
    if (lane == 0) p.accepted[seq] = taken;
  }
}
