// Types that the ops and the per-ISA kernels of dynamic time warping share.
#pragma once
#include <cstdint>

namespace rlk {

// A radius that no trajectory reaches.
constexpr int64_t kNoBand = int64_t(1) << 40;

// One trajectory, x.
struct DtwRow {
  const float* values;  // [length, dims]
  int64_t length;       // >= 1
};

// Some rows of it: those before have been done, so a long trajectory need not be done in one go. `begin` is a multiple
// of kDtwRows.
struct DtwRows : DtwRow {
  int64_t begin, end;
};
constexpr int64_t kDtwRows = 4;

// As many trajectories y as a tile has lanes, side by side; packed by dtw_pack.
struct DtwTile {
  const float* values;     // [columns, dims, lanes], 0 beyond a length
  const int32_t* lengths;  // [lanes], 0 for lanes without a trajectory
  int64_t columns;         // the longest length
  int64_t dims;
};

}  // namespace rlk
