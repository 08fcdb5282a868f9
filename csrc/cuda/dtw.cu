// Dynamic time warping of all pairs: a warp per pair, K rows of x in the registers of each lane.
//
// Lane l - 1 hands the last row of its cells to lane l by one shuffle per column, so K cells cost K x (sub, min, min,
// fma), one shuffle and one load of y. A strip of 32 K rows takes columns + 31 steps; longer x take several strips,
// with the last row of one in scratch memory for the next. Warps are persistent and take pairs with a fixed stride.
#include <cuda_runtime.h>

#include "dtw.h"
#include "dtw_cuda.h"
#include "dtw_lane.h"

namespace rlk::cuda {
namespace {

constexpr int kWarp = 32, kWarpsPerBlock = 4;
constexpr unsigned kAll = 0xffffffffu;

template <int K, bool kOneFeature, bool kBand, bool kSubsequence>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) dtw_kernel(DtwProblem problem, int64_t warps) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  if (warp >= warps) return;  // whole warps only
  float* border = static_cast<float*>(problem.scratch) + warp * problem.columns;
  int* border_start =
      reinterpret_cast<int*>(static_cast<float*>(problem.scratch) + warps * problem.columns) + warp * problem.columns;

  for (int64_t pair = warp; pair < problem.n * problem.m; pair += warps) {
    const int64_t n = pair / problem.m, m = pair % problem.m;
    DtwPair p{problem.x + n * problem.rows * problem.dims, problem.y + m * problem.columns * problem.dims,
              int(problem.x_lengths[n]), int(problem.y_lengths[m]), int(problem.dims), 0};
    if (p.rows == 0 || p.columns == 0) continue;
    const int64_t least = p.rows > p.columns ? p.rows - p.columns : p.columns - p.rows;
    const int64_t radius = problem.radius > least ? problem.radius : least;
    p.radius = int(radius < p.rows + p.columns ? radius : p.rows + p.columns);

    const int last = p.rows - 1, owner = last / K % kWarp;  // of the last row
    float best = INFINITY;  // of the last row, in subsequence mode
    int best_start = -1, best_end = -1;
    int known = 0;  // columns of the border that the strip before has filled
    for (int first = 0; first < p.rows; first += kWarp * K) {
      const int begin = strip_begin(p, first), end = strip_end(p, first, kWarp * K);
      const bool last_strip = first + kWarp * K >= p.rows;
      const int steps = end - begin + (last_strip ? owner : kWarp - 1);
      const int taken = lane == 0 ? known : INT32_MIN;  // columns up to here come from the border,
      const int stored = last_strip || lane != kWarp - 1 ? INT32_MAX : begin;  // and from here go to it
      const float top = kSubsequence && first == 0 ? 0.0f : INFINITY;          // above the first row of this strip
      DtwLane<K, kOneFeature, kBand, kSubsequence> cells;
      cells.begin(p, first + lane * K, begin);
      float below = INFINITY;  // last row of this lane, for the next one
      int below_start = -1;
#pragma unroll(kSubsequence ? 1 : 4)
      for (int step = 0; step < steps; ++step) {
        float above = __shfl_up_sync(kAll, below, 1);
        int above_start = kSubsequence ? __shfl_up_sync(kAll, below_start, 1) : -1;
        const int j = begin + step - lane;
        above = lane == 0 ? top : above, above_start = lane == 0 ? j : above_start;
        if (j < taken) {
          above = border[j];
          if (kSubsequence) above_start = border_start[j];
        }
        const bool there = unsigned(j) < unsigned(p.columns);  // else y is 0, and the cells are infinite or never used
        float y = 0.0f;
        if (kOneFeature && there) y = p.y[j];
        if (!kOneFeature && !there) continue;
        cells.column(p, j, y, above, above_start);
        below = cells.left[K - 1], below_start = cells.left_start[K - 1];
        if (j >= stored) {  // lane 0 read this column 31 steps ago
          border[j] = below;
          if (kSubsequence) border_start[j] = below_start;
        }
        if (kSubsequence && last_strip && lane == owner && (below < best || j == 0))
          best = below, best_start = below_start, best_end = j;
      }
      if (last_strip && lane == owner) {
        if (kSubsequence) {
          problem.cost[pair] = best, problem.start[pair] = best_start, problem.end[pair] = best_end;
        } else {
          problem.cost[pair] = cells.cell(last);
        }
      }
      known = end;
      __syncwarp();  // the border is written before lane 0 reads it
    }
  }
}

using Kernel = void (*)(DtwProblem, int64_t);

template <int K, bool kOneFeature>
Kernel pick_mode(const DtwProblem& p) {
  if (p.subsequence) return dtw_kernel<K, kOneFeature, false, true>;
  return p.radius < p.rows || p.radius < p.columns ? dtw_kernel<K, kOneFeature, true, false>
                                                   : dtw_kernel<K, kOneFeature, false, false>;
}

// Few enough that short trajectories still fill the warp.
int rows_per_lane(const DtwProblem& p) {
  if (p.dims > 1) return 4;
  return p.rows <= 2 * kWarp ? 2 : p.rows <= 4 * kWarp ? 4 : 8;
}

Kernel pick(const DtwProblem& p) {
  if (p.dims > 1) return pick_mode<4, false>(p);
  const int rows = rows_per_lane(p);
  return rows == 2 ? pick_mode<2, true>(p) : rows == 4 ? pick_mode<4, true>(p) : pick_mode<8, true>(p);
}

}  // namespace

int dtw_warps(const DtwProblem& problem, int device, int64_t* warps) {
  int blocks = 0, processors = 0;
  cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, pick(problem), kWarp * kWarpsPerBlock, 0);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) cudaGetLastError();  // nobody else is to find it
  const int64_t resident = int64_t(blocks) * processors * kWarpsPerBlock, pairs = problem.n * problem.m;
  *warps = pairs < resident ? pairs : resident;
  return int(error);
}

int64_t dtw_scratch_bytes(const DtwProblem& problem, int64_t warps) {
  if (problem.rows <= kWarp * rows_per_lane(problem)) return 0;  // one strip has no border
  return warps * problem.columns * int64_t(sizeof(float) + (problem.subsequence ? sizeof(int) : 0));
}

int dtw(const DtwProblem& problem, int64_t warps, cudaStream_t stream) {
  const unsigned blocks = unsigned((warps + kWarpsPerBlock - 1) / kWarpsPerBlock);
  pick(problem)<<<blocks, kWarp * kWarpsPerBlock, 0, stream>>>(problem, warps);
  return int(cudaGetLastError());
}

}  // namespace rlk::cuda
