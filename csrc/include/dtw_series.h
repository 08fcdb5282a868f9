// Trajectories for dynamic time warping on the CPU: which of them the kernels can take, and tiles of lanes of them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "aligned.h"
#include "dispatch.h"
#include "dtw.h"
#include "threads.h"

RLK_DECLARE_KERNEL(int, dtw_tile_lanes, )
RLK_DECLARE_KERNEL(bool, dtw_not_finite, const float*, int64_t)
RLK_DECLARE_KERNEL(void, dtw_pack, const float*, int64_t, const int64_t*, const int64_t*, int64_t, float*)
RLK_DECLARE_KERNEL(void, dtw_tile, const DtwRow&, const DtwTile&, int64_t, float*, float*)
RLK_DECLARE_KERNEL(void, dtw_tile_subsequence, const DtwRow&, const DtwTile&, float*, int32_t*, float*, int32_t*, int32_t*)
RLK_DECLARE_KERNEL(void, dtw_bound, const DtwRow&, const DtwTile&, const float*, const float*, const float*, float*)

namespace rlk {

// A batch of trajectories [count, columns, dims] and which of them the kernels can take.
struct Series {
  const float* values;
  int64_t count, columns, dims;
  std::vector<int64_t> lengths;
  std::vector<char> bad;         // a value inside the length is NaN or infinite
  std::vector<int64_t> active;   // neither bad nor empty, longest first

  // values [count, columns, dims]; what lies beyond a length is never read
  Series(const float* values_, int64_t count_, int64_t columns_, int64_t dims_, std::vector<int64_t> lengths_,
         const Threads& threads)
      : values(values_), count(count_), columns(columns_), dims(dims_), lengths(std::move(lengths_)), bad(count_) {
    const auto not_finite = RLK_DISPATCH(dtw_not_finite);
    threads.split(count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) bad[i] = not_finite(values + i * stride(), lengths[i] * dims);
    });
    for (int64_t i = 0; i < count; ++i)
      if (is_active(i)) active.push_back(i);
    std::stable_sort(active.begin(), active.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  }

  int64_t stride() const { return columns * dims; }
  bool is_active(int64_t i) const { return lengths[i] > 0 && !bad[i]; }
  DtwRow row(int64_t i) const { return {values + i * stride(), lengths[i]}; }
};

// The cost where at least one of the pair is not active.
inline float special_cost(const Series& x, int64_t i, const Series& y, int64_t j) {
  if (x.bad[i] || y.bad[j]) return std::numeric_limits<float>::quiet_NaN();
  return x.lengths[i] == y.lengths[j] ? 0.0f : std::numeric_limits<float>::infinity();  // one of them is empty
}

// Scratch of one thread, and the tile that it has packed last.
class PackedTile {
 public:
  PackedTile(const Series& y, bool with_start, bool with_ends)
      : y_(y), lanes_(RLK_DISPATCH(dtw_tile_lanes)()), with_ends_(with_ends), lengths_(lanes_), index_(lanes_),
        counts_(lanes_), memory_(floats(y, with_start) * lanes_) {
    const int64_t columns = longest(y);
    float* p = memory_.data();
    values_ = p, p += columns * y.dims * lanes_;
    row = p, p += columns * lanes_;
    cost = p, start = reinterpret_cast<int32_t*>(p + lanes_), end = start + lanes_, p += 3 * lanes_;
    ends = p, p += 2 * y.dims * lanes_;
    row_start = reinterpret_cast<int32_t*>(p);
  }

  // Packs y[index[0 .. count - 1]], count <= lanes.
  void pack(const int64_t* index, int count) {
    int64_t columns = 0;
    for (int lane = 0; lane < lanes_; ++lane) {
      const bool used = lane < count;
      index_[lane] = used ? index[lane] : 0;
      lengths_[lane] = used ? int32_t(y_.lengths[index[lane]]) : 0;
      counts_[lane] = lengths_[lane] * y_.dims;
      columns = std::max<int64_t>(columns, lengths_[lane]);
    }
    tile = {values_, lengths_.data(), columns, y_.dims};
    RLK_DISPATCH(dtw_pack)(y_.values, y_.stride(), index_.data(), counts_.data(), columns * y_.dims, values_);
    if (!with_ends_) return;
    for (int64_t d = 0; d < y_.dims; ++d) {
      for (int lane = 0; lane < lanes_; ++lane) {
        const int64_t last = std::max(lengths_[lane] - 1, 0);
        ends[d * lanes_ + lane] = values_[d * lanes_ + lane];
        ends[(y_.dims + d) * lanes_ + lane] = values_[(last * y_.dims + d) * lanes_ + lane];
      }
    }
  }

  DtwTile tile{};
  float *row, *cost, *ends;          // [columns, lanes], [lanes], [2, dims, lanes]
  int32_t *row_start, *start, *end;  // [columns, lanes], [lanes], [lanes]

 private:
  static int64_t longest(const Series& y) { return y.active.empty() ? 0 : y.lengths[y.active[0]]; }
  static int64_t floats(const Series& y, bool with_start) {
    return longest(y) * (y.dims + 1 + with_start) + 3 + 2 * y.dims;
  }

  const Series& y_;
  const int lanes_;
  const bool with_ends_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> index_, counts_;
  Aligned memory_;
  float* values_;
};

}  // namespace rlk
