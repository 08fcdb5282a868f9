// Dynamic time warping of all pairs of two batches, tile by tile.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "dtw_series.h"

namespace rlk {

// A tile of y for some of the x: enough tasks to balance threads, enough rows a task to be worth a packing.
struct DtwPlan {
  int64_t tiles, rows, chunks;
  int lanes;

  DtwPlan(const Series& x, const Series& y, int64_t threads) : lanes(RLK_DISPATCH(dtw_tile_lanes)()) {
    const int64_t all = x.active.size();
    tiles = (int64_t(y.active.size()) + lanes - 1) / lanes;
    rows = std::clamp<int64_t>(all * tiles / (16 * threads), 8, std::max<int64_t>(all, 8));
    chunks = (all + rows - 1) / rows;
  }
};

// Calls pair_up(i, scratch, index, count, pause) for every active x i with every tile, index: what is in the lanes. It
// returns false when the work is to end.
template <class PairUp>
void for_each_tile(const Series& x, const Series& y, bool with_start, const Threads& threads, PairUp pair_up) {
  const DtwPlan plan(x, y, threads.count);
  const auto make = [&] { return PackedTile(y, with_start, false); };
  hand_out(threads, plan.tiles * plan.chunks, make, [&](int64_t task, PackedTile& scratch) {
    Pause pause(*threads.watch);
    const int64_t first = task / plan.chunks * plan.lanes, from = task % plan.chunks * plan.rows;
    const int count = int(std::min<int64_t>(plan.lanes, int64_t(y.active.size()) - first));
    scratch.pack(y.active.data() + first, count);
    const int64_t to = std::min<int64_t>(from + plan.rows, x.active.size());
    for (int64_t i = from; i < to; ++i)
      if (!pair_up(x.active[i], scratch, y.active.data() + first, count, pause)) return;
  });
}

template <class Fill>
void for_each_special(const Series& x, const Series& y, Fill fill) {
  if (int64_t(x.active.size()) == x.count && int64_t(y.active.size()) == y.count) return;
  for (int64_t i = 0; i < x.count; ++i)
    for (int64_t j = 0; j < y.count; ++j)
      if (!x.is_active(i) || !y.is_active(j)) fill(i, j, special_cost(x, i, y, j));
}

// -> cost [x.count, y.count]
inline void dtw_all_pairs(const Series& x, const Series& y, int64_t radius, const Threads& threads, float* cost) {
  for_each_special(x, y, [&](int64_t i, int64_t j, float value) { cost[i * y.count + j] = value; });
  // the cost is symmetric: whichever fills the lanes better goes there
  const auto padded = [&](const Series& rows, const Series& lanes) {
    return rows.active.size() * DtwPlan(rows, lanes, threads.count).tiles;
  };
  const bool swap = padded(y, x) < padded(x, y);
  const int64_t row_stride = swap ? 1 : y.count, lane_stride = swap ? y.count : 1;
  const Series &rows = swap ? y : x, &lanes = swap ? x : y;
  const auto kernel = RLK_DISPATCH(dtw_tile);
  for_each_tile(rows, lanes, false, threads, [&](int64_t i, PackedTile& s, const int64_t* index, int count, Pause& pause) {
    const auto some = [&](const DtwRows& x) { kernel(x, s.tile, radius, s.row, s.cost); };
    if (!pause.in_parts(rows.row(i), s.tile, s.lanes, radius, some)) return false;
    for (int lane = 0; lane < count; ++lane) cost[i * row_stride + index[lane] * lane_stride] = s.cost[lane];
    return true;
  });
}

// -> cost, start and end [x.count, y.count], the last two -1 where there is no stretch
inline void dtw_all_stretches(const Series& x, const Series& y, const Threads& threads, float* cost, int64_t* start,
                              int64_t* end) {
  for_each_special(x, y, [&](int64_t i, int64_t j, float value) {
    cost[i * y.count + j] = value;
    start[i * y.count + j] = end[i * y.count + j] = -1;
  });
  const auto kernel = RLK_DISPATCH(dtw_tile_subsequence);
  for_each_tile(x, y, true, threads, [&](int64_t i, PackedTile& s, const int64_t* index, int count, Pause& pause) {
    const auto some = [&](const DtwRows& rows) { kernel(rows, s.tile, s.row, s.row_start, s.cost, s.start, s.end); };
    if (!pause.in_parts(x.row(i), s.tile, s.lanes, kNoBand, some)) return false;
    for (int lane = 0; lane < count; ++lane) {
      const int64_t at = i * y.count + index[lane];
      cost[at] = s.cost[lane], start[at] = s.start[lane], end[at] = s.end[lane];
    }
    return true;
  });
}

}  // namespace rlk
