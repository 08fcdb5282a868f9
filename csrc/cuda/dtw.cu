// Dynamic time warping of all pairs: a warp per pair, K rows of x in the registers of each lane.
//
// Lane l - 1 hands the last row of its cells to lane l by one shuffle per column, so K cells cost K x (sub, min, min,
// fma), one shuffle and one load of y. A strip of 32 K rows takes columns + 31 steps; longer x take several strips,
// with the last row of one in scratch memory for the next. Warps are persistent and take pairs with a fixed stride.
#include <cuda_runtime.h>

#include <cfloat>

#include "dtw.h"
#include "dtw_cuda.h"
#include "dtw_lane.h"

namespace rlk::cuda {
namespace {

constexpr int kWarp = 32, kWarpsPerBlock = 4;
constexpr unsigned kAll = 0xffffffffu;

// One feature and up to four rows a lane: one strip, without a border. Eight blocks fit: for more, ptxas makes a stack.
template <int K, bool kOneFeature>
constexpr bool kOneStrip = kOneFeature && K < 8;

template <int K, bool kOneFeature, bool kBand, bool kSubsequence>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock, kOneStrip<K, kOneFeature> ? 8 : 0)
    dtw_kernel(DtwProblem problem, int64_t warps) {
  constexpr bool kBorder = !kOneStrip<K, kOneFeature>;
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  if (warp >= warps) return;  // whole warps only
  float* border = static_cast<float*>(problem.scratch) + warp * problem.columns;
  int* border_start =
      reinterpret_cast<int*>(static_cast<float*>(problem.scratch) + warps * problem.columns) + warp * problem.columns;

  for (int64_t i = warp; i < problem.count; i += warps) {
    const int64_t pair = !kSubsequence && problem.pairs ? problem.pairs[i] : i;
    if (pair < 0) break;
    const int64_t n = pair / problem.m, m = pair % problem.m;
    DtwPair p{problem.x + n * problem.rows * problem.dims, problem.y + m * problem.columns * problem.dims,
              int(problem.x_lengths[n]), int(problem.y_lengths[m]), problem.dims, 0};
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
        if (kBorder && j < taken) {
          above = border[j];
          if (kSubsequence) above_start = border_start[j];
        }
        const bool there = unsigned(j) < unsigned(p.columns);  // else y is 0, and the cells are infinite or never used
        float y = 0.0f;
        if (kOneFeature && there) y = p.y[j];
        if (!kOneFeature && !there) continue;
        cells.column(p, j, y, above, above_start);
        below = cells.left[K - 1], below_start = cells.left_start[K - 1];
        if (kBorder && j >= stored) {  // lane 0 read this column 31 steps ago
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

// Least and largest value of each feature of every x, over the rows within the radius of a column, then over all rows:
// boxes [n, 2, window_columns + 1, dims]. A block for each x.
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) box_kernel(DtwProblem problem, int64_t window_columns) {
  const int64_t n = blockIdx.x, dims = problem.dims, rows = problem.x_lengths[n], windows = window_columns * dims;
  const float* x = problem.x + n * problem.rows * dims;
  float *lower = static_cast<float*>(problem.scratch) + 2 * n * (windows + dims), *upper = lower + windows + dims;
  for (int64_t at = threadIdx.x; at < windows; at += kWarp * kWarpsPerBlock) {
    const int64_t j = at / dims, d = at % dims;
    const int64_t first = j > problem.radius ? j - problem.radius : 0;
    const int64_t end = problem.radius < rows - j ? j + problem.radius + 1 : rows;
    float low = INFINITY, high = -INFINITY;
    for (int64_t i = first; i < end; ++i) low = fminf(low, x[i * dims + d]), high = fmaxf(high, x[i * dims + d]);
    lower[at] = low, upper[at] = high;
  }
  const int lane = threadIdx.x % kWarp;
  for (int64_t d = threadIdx.x / kWarp; d < dims; d += kWarpsPerBlock) {
    float low = INFINITY, high = -INFINITY;
    for (int64_t i = lane; i < rows; i += kWarp) low = fminf(low, x[i * dims + d]), high = fmaxf(high, x[i * dims + d]);
    for (int other = kWarp / 2; other > 0; other /= 2) {
      low = fminf(low, __shfl_xor_sync(kAll, low, other));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, other));
    }
    if (lane == 0) lower[windows + d] = low, upper[windows + d] = high;
  }
}

// The bound that csrc/cpu/dtw_bound.cpp proves, a warp per pair. A band that unequal lengths widen takes the box of all
// rows. n roundings change a sum of terms >= 0 by a factor within (1 +- 2^-24)^n or, next to 0, by n 2^-150. Bound and
// cost have at most half of `steps` roundings together, so what is subtracted makes up for them twice. A bound that
// left the range of float32 is at least its largest number.
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) bound_kernel(DtwProblem problem, int64_t window_columns) {
  const int lane = threadIdx.x % kWarp;
  const int64_t dims = problem.dims, windows = window_columns * dims;
  const int64_t warps = int64_t(gridDim.x) * kWarpsPerBlock;
  for (int64_t pair = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp; pair < problem.count; pair += warps) {
    const int64_t n = pair / problem.m, m = pair % problem.m;
    const int64_t rows = problem.x_lengths[n], columns = problem.y_lengths[m];
    if (rows == 0 || columns == 0) continue;
    const bool window = window_columns > 0 && (rows > columns ? rows - columns : columns - rows) <= problem.radius;
    const float *x = problem.x + n * problem.rows * dims, *y = problem.y + m * problem.columns * dims;
    const float* lower = static_cast<const float*>(problem.scratch) + 2 * n * (windows + dims) + (window ? 0 : windows);
    const float* upper = lower + windows + dims;
    float sum = 0.0f;
    for (int64_t d = lane; d < dims; d += kWarp) {
      const float first = x[d] - y[d], last = x[(rows - 1) * dims + d] - y[(columns - 1) * dims + d];
      sum = fmaf(first, first, sum);
      if (rows > 1 || columns > 1) sum = fmaf(last, last, sum);
    }
    for (int64_t j = 1 + lane; j < columns - 1; j += kWarp) {
      for (int64_t d = 0; d < dims; ++d) {
        const int64_t box = (window ? j * dims : 0) + d;
        const float value = y[j * dims + d], outside = value - fminf(fmaxf(value, lower[box]), upper[box]);
        sum = fmaf(outside, outside, sum);
      }
    }
    for (int other = kWarp / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kAll, sum, other);
    const float steps = float((rows + 2 * columns) * dims + 16);
    if (lane == 0)
      problem.cost[pair] = fmaxf(fmaf(fminf(sum, FLT_MAX), 1.0f - steps * 0x1p-23f, -steps * 0x1p-149f), 0.0f);
  }
}

bool has_band(const DtwProblem& p) { return p.radius < p.rows || p.radius < p.columns; }

using Kernel = void (*)(DtwProblem, int64_t);

template <int K, bool kOneFeature>
Kernel pick_mode(const DtwProblem& p) {
  if (p.subsequence) return dtw_kernel<K, kOneFeature, false, true>;
  return has_band(p) ? dtw_kernel<K, kOneFeature, true, false> : dtw_kernel<K, kOneFeature, false, false>;
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
  const int64_t resident = int64_t(blocks) * processors * kWarpsPerBlock;
  *warps = problem.count < resident ? problem.count : resident;
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

int64_t dtw_boxes_bytes(const DtwProblem& problem) {
  const int64_t boxes = has_band(problem) ? problem.columns + 1 : 1;
  return problem.n * 2 * boxes * problem.dims * int64_t(sizeof(float));
}

int dtw_bounds(const DtwProblem& problem, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 20;
  const int64_t window_columns = has_band(problem) ? problem.columns : 0;
  const int64_t blocks = (problem.count + kWarpsPerBlock - 1) / kWarpsPerBlock;
  box_kernel<<<unsigned(problem.n), kWarp * kWarpsPerBlock, 0, stream>>>(problem, window_columns);
  bound_kernel<<<unsigned(blocks < kMostBlocks ? blocks : kMostBlocks), kWarp * kWarpsPerBlock, 0, stream>>>(
      problem, window_columns);
  return int(cudaGetLastError());
}

}  // namespace rlk::cuda
