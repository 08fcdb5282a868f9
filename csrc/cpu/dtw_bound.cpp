// A lower bound of the dynamic time warping cost for every lane of a tile. Declared in csrc/ops/dtw_kernels.h.
#include "dispatch.h"
#include "dtw_tile.h"

namespace RLK_KERNEL_NAMESPACE {

// bound[lane] <= cost of x and y = the lane's trajectory, in exact arithmetic, for lanes whose length is not 0:
//
//   |x_0 - y_0|^2 + |x_last - y_last|^2 + sum over columns 0 < j < last of the squared distance of y_j
//   from the box [lower_j, upper_j] that holds every x_i with |i - j| <= radius.
//
// Proof (LB_Kim's ends and LB_Keogh's columns, both squared as the cost is): a warping path visits cell (0, 0), cell
// (last, last) and at least one cell (i, j) of every column j, within the band. Those are different cells, all terms
// of the cost are >= 0, and |x_i - y_j|^2 is at least the squared distance of y_j from a box that holds x_i, feature
// by feature. With one row and one column both ends are the same cell, which is counted once.
//
// lower, upper: [columns, dims]; ends: [2, dims, lanes], first and last values of the lanes.
void dtw_bound(const DtwRow& x, const DtwTile& tile, const float* ends, const float* lower, const float* upper,
               float* bound) {
  const int64_t dims = tile.dims;
  int64_t shortest = tile.columns;
  for (int lane = 0; lane < kTileLanes; ++lane)
    shortest = tile.lengths[lane] < shortest ? tile.lengths[lane] : shortest;
  for (int g = 0; g < kTileLanes; g += kLanes) {
    const vint length = load<vint>(tile.lengths + g);
    vfloat first{}, last{};
    for (int64_t d = 0; d < dims; ++d) {
      const vfloat a = load<vfloat>(ends + d * kTileLanes + g) - x.values[d];
      const vfloat b = load<vfloat>(ends + (dims + d) * kTileLanes + g) - x.values[(x.length - 1) * dims + d];
      first = a * a + first, last = b * b + last;
    }
    if (x.length == 1) last = length > 1 ? last : vfloat{};
    vfloat sum = first + last, other{};  // two chains of additions
    const auto outside = [&](int64_t p) {
      const vfloat y = load<vfloat>(tile.values + p * kTileLanes + g);
      const vfloat low = splat(lower[p]), high = splat(upper[p]);
      const vfloat above = y < low ? low : y;
      return y - (above < high ? above : high);
    };
    int64_t p = dims;
    for (; p + 2 <= (shortest - 1) * dims; p += 2) {
      const vfloat a = outside(p), b = outside(p + 1);
      sum = a * a + sum, other = b * b + other;
    }
    for (; p < (tile.columns - 1) * dims; ++p) {
      const vfloat a = outside(p);
      sum = (vint{} + int32_t(p / dims + 1)) < length ? a * a + sum : sum;
    }
    store(bound + g, sum + other);
  }
}

}  // namespace RLK_KERNEL_NAMESPACE
