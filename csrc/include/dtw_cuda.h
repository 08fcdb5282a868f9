// Launchers of csrc/cuda/dtw.cu.
#pragma once
#include <cstdint>

typedef struct CUstream_st* cudaStream_t;

namespace rlk::cuda {

struct DtwProblem {  // of 128 bytes: nvcc keeps larger arguments in memory
  const float *x, *y;                 // [n, rows, dims], [m, columns, dims]
  const int64_t *x_lengths, *y_lengths;  // [n], [m]
  int64_t n, m, rows, columns;
  int64_t radius;    // kNoBand for none
  int dims;
  bool subsequence;  // then radius is kNoBand
  float* cost;       // [n, m]; pairs with an empty trajectory are left alone
  int64_t *start, *end;  // [n, m], in subsequence mode
  void* scratch;     // dtw_scratch_bytes or dtw_boxes_bytes
  const int64_t* pairs;  // [count] places in cost, negative ones last; null for all
  int64_t count;         // n * m for all
};

// dtw_warps, dtw and dtw_bounds return a CUDA error code, 0 for success.
// How many warps run at a time on `device`, and the scratch that they need: O(columns) each, or none.
int dtw_warps(const DtwProblem& problem, int device, int64_t* warps);
int64_t dtw_scratch_bytes(const DtwProblem& problem, int64_t warps);
int dtw(const DtwProblem& problem, int64_t warps, cudaStream_t stream);

// Lower bounds of the costs of all pairs, in their place; dtw never computes less.
int64_t dtw_boxes_bytes(const DtwProblem& problem);
int dtw_bounds(const DtwProblem& problem, cudaStream_t stream);

}  // namespace rlk::cuda
