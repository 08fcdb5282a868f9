// Subsequence dynamic time warping on tiles of lanes: all of x against any stretch of y, with the place where the
// stretch starts carried along. Same walk over the cells as dtw_tile.h.
//
// Of equally cheap predecessors the one with the highest start wins, and that is always the first of (above, corner,
// left): within a table of predecessors, starts do not fall from left to right in a row, nor rise from top to bottom
// in a column. For two cells of a row (or column) the paths that end there would otherwise begin in the opposite
// order, so they would have to change sides; steps of at most one cell cannot do that without sharing a cell, and
// from a shared cell back both are the same path. So start(above) >= start(corner) >= start(left).
#include "dispatch.h"
#include "dtw_tile.h"

namespace RLK_KERNEL_NAMESPACE {

namespace {

template <int R, bool kOneFeature>
RLK_INLINE void start_block(const float* x, const DtwTile& tile, float* row, int32_t* row_start) {
  vfloat left[R][kGroups], corner[kGroups];
  vint left_start[R][kGroups], corner_start[kGroups];
  RLK_UNROLL for (int g = 0; g < kGroups; ++g) {
    corner[g] = splat(kInfinity), corner_start[g] = vint{} - 1;
    RLK_UNROLL for (int r = 0; r < R; ++r) left[r][g] = splat(kInfinity), left_start[r][g] = vint{} - 1;
  }
  const int64_t last = kOneFeature ? 0 : tile.dims - 1;
  for (int64_t j = 0; j < tile.columns; ++j) {
    const float* y = tile.values + j * tile.dims * kTileLanes;
    float* out = row + j * kTileLanes;
    int32_t* out_start = row_start + j * kTileLanes;
    vfloat cost[R][kGroups];
    if constexpr (!kOneFeature) partial_cost<R>(x, y, tile.dims, cost);
    RLK_UNROLL for (int g = 0; g < kGroups; ++g) {
      vfloat above = load<vfloat>(out + g * kLanes);
      vint above_start = load<vint>(out_start + g * kLanes);
      const vfloat value = load<vfloat>(y + last * kTileLanes + g * kLanes);
      const vfloat next_corner = above;
      const vint next_corner_start = above_start;
      RLK_UNROLL for (int r = 0; r < R; ++r) {
        const vfloat difference = value - x[kOneFeature ? r : r * tile.dims + last];
        vfloat best = minimum(corner[g], above);
        vint start = corner[g] < above ? corner_start[g] : above_start;
        start = left[r][g] < best ? left_start[r][g] : start;
        best = minimum(left[r][g], best);
        if constexpr (!kOneFeature) best += cost[r][g];
        corner[g] = left[r][g], corner_start[g] = left_start[r][g];
        above = left[r][g] = difference * difference + best;
        above_start = left_start[r][g] = start;
      }
      corner[g] = next_corner, corner_start[g] = next_corner_start;
      store(out + g * kLanes, above);
      store(out_start + g * kLanes, above_start);
    }
  }
}

template <bool kOneFeature>
RLK_INLINE void all_starts(const DtwRows& x, const DtwTile& tile, float* row, int32_t* row_start) {
  const float* values = x.values;
  int64_t i = x.begin;
  for (; i + kRows <= x.end; i += kRows)
    start_block<kRows, kOneFeature>(values + i * tile.dims, tile, row, row_start);
  for (; i < x.end; ++i) start_block<1, kOneFeature>(values + i * tile.dims, tile, row, row_start);
}

}  // namespace

// Cost, first and last column [lanes] of the best stretch for x of each lane whose length is not 0; the other lanes
// are left alone. row, row_start: [columns, lanes], the last row that is done.
void dtw_tile_subsequence(const DtwRows& x, const DtwTile& tile, float* row, int32_t* row_start, float* cost,
                          int32_t* start, int32_t* end) {
  for (int64_t j = 0; x.begin == 0 && j < tile.columns; ++j) {
    for (int g = 0; g < kTileLanes; g += kLanes) {
      store(row + j * kTileLanes + g, vfloat{});
      store(row_start + j * kTileLanes + g, vint{} + int32_t(j));
    }
  }
  tile.dims == 1 ? all_starts<true>(x, tile, row, row_start) : all_starts<false>(x, tile, row, row_start);
  if (x.end < x.length) return;
  for (int g = 0; g < kTileLanes; g += kLanes) {
    vfloat best = load<vfloat>(row + g);
    vint best_end = vint{};
    const vint length = load<vint>(tile.lengths + g);
    for (int64_t j = 1; j < tile.columns; ++j) {
      const vfloat value = load<vfloat>(row + j * kTileLanes + g);
      const vint column = vint{} + int32_t(j);
      const vint better = (value < best) & (column < length);
      best = better ? value : best;
      best_end = better ? column : best_end;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (tile.lengths[g + lane] == 0) continue;
      cost[g + lane] = best[lane], end[g + lane] = best_end[lane];
      start[g + lane] = row_start[int64_t(best_end[lane]) * kTileLanes + g + lane];
    }
  }
}

}  // namespace RLK_KERNEL_NAMESPACE
