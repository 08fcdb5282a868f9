// Launchers of csrc/cuda/dtw.cu.
#pragma once
#include <cstdint>

typedef struct CUstream_st* cudaStream_t;

namespace rlk::cuda {

struct DtwProblem {
  const float *x, *y;                 // [n, rows, dims], [m, columns, dims]
  const int64_t *x_lengths, *y_lengths;  // [n], [m]
  int64_t n, m, rows, columns, dims;
  int64_t radius;    // kNoBand for none
  bool subsequence;  // then radius is kNoBand
  float* cost;       // [n, m]; pairs with an empty trajectory are left alone
  int64_t *start, *end;  // [n, m], in subsequence mode
  void* scratch;     // dtw_scratch_bytes
};

// dtw_warps and dtw return a CUDA error code, 0 for success.
// How many warps run at a time on `device`, and the scratch that they need: O(columns) each, or none.
int dtw_warps(const DtwProblem& problem, int device, int64_t* warps);
int64_t dtw_scratch_bytes(const DtwProblem& problem, int64_t warps);
int dtw(const DtwProblem& problem, int64_t warps, cudaStream_t stream);

}  // namespace rlk::cuda
