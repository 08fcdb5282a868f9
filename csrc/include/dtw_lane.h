// One lane of the warp that computes dynamic time warping of one pair; csrc/cuda/dtw.cu has the shuffles.
//
// A lane owns K consecutive rows of x. At step t of a strip of 32 K rows lane l is at column t - l, one step behind
// lane l - 1, from whose last row it gets the cell above its first one. Columns out of reach are computed and never
// used, or infinite. So are rows past the last of x, but in subsequence mode: there they cost nothing, so that the last
// of the K holds the least cell that the last row of x has had so far.
#pragma once
#include <cstdint>

#define RLK_LANE __device__ __forceinline__

namespace rlk {

struct DtwPair {
  const float *x, *y;  // [rows, dims], [columns, dims]
  int rows, columns, dims;
  int radius;  // of the band, from |rows - columns| to rows + columns
};

// First and last column of a strip that starts at row `first`: one more on the left, whose cells are all out of the
// band, so that the corner of the first cell in the band is at hand.
RLK_LANE int strip_begin(const DtwPair& p, int first) { return first - 1 > p.radius ? first - 1 - p.radius : 0; }
RLK_LANE int strip_end(const DtwPair& p, int first, int strip_rows) {
  const int last = first + strip_rows < p.rows ? first + strip_rows : p.rows;
  return p.radius < p.columns - last ? last + p.radius : p.columns;
}

// The least of three costs. They are not negative, so their bits are ordered as they are: one instruction on sm_90.
RLK_LANE float least_of(float a, float b, float c) {
  return __int_as_float(__vimin3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
}

template <int K, bool kOneFeature, bool kBand, bool kSubsequence>
struct DtwLane {
  int row;           // first of the K
  float x[K];        // their values, with one feature
  float counts[K];   // 1, or 0 for a row past the last; in subsequence mode
  float left[K];     // cells of the column before
  float corner;      // cell above the first row, one column before
  int left_start[K], corner_start;

  RLK_LANE void begin(const DtwPair& p, int first_row, int first_column) {
    row = first_row;
    corner = !kSubsequence && row == 0 && first_column == 0 ? 0.0f : INFINITY;
    corner_start = -1;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      left[k] = INFINITY, left_start[k] = -1;
      if (kOneFeature) x[k] = row + k < p.rows ? p.x[row + k] : 0.0f;
      if (kSubsequence) counts[k] = row + k < p.rows;
    }
  }

  // above: the cell of the row before the first, in column j. y: its value, with one feature.
  RLK_LANE void column(const DtwPair& p, int j, float y, float above, int above_start) {
    const float next_corner = above;
    const int next_corner_start = above_start;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float best = least_of(corner, left[k], above);
      if (kSubsequence) {  // ties: the first of above, corner, left has the highest start (csrc/cpu/dtw_subsequence.cpp)
        const int other = best < corner ? left_start[k] : corner_start;
        above_start = best < above ? other : above_start;
      }
      if (kOneFeature) {
        const float difference = kSubsequence ? fmaf(y, counts[k], -x[k]) : y - x[k];
        best = fmaf(difference, difference, best);
      } else if (row + k < p.rows) {
        float cost = 0.0f;
        for (int d = 0; d < p.dims; ++d) {
          const float difference = p.y[int64_t(j) * p.dims + d] - p.x[int64_t(row + k) * p.dims + d];
          cost = fmaf(difference, difference, cost);
        }
        best += cost;
      }
      if (kBand) {
        best = unsigned(row + k - j + p.radius) <= 2u * unsigned(p.radius) ? best : INFINITY;
      }
      corner = left[k], corner_start = left_start[k];
      above = left[k] = best;
      if (kSubsequence) left_start[k] = above_start;
    }
    corner = next_corner, corner_start = next_corner_start;
  }

  // The cell of row i, which this lane owns, in the column just computed. Each k stands in the code by itself: an index
  // known only at run time would move all cells from registers to memory.
  template <int k = 0>
  RLK_LANE float cell(int i) const {
    if constexpr (k + 1 < K) return i - row == k ? left[k] : cell<k + 1>(i);
    return left[K - 1];
  }
};

}  // namespace rlk
