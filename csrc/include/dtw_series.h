// Trajectories for dynamic time warping on the CPU: which of them the kernels can take, and tiles of lanes of them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
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
RLK_DECLARE_KERNEL(void, dtw_tile, const DtwRows&, const DtwTile&, int64_t, float*, float*)
RLK_DECLARE_KERNEL(void, dtw_tile_subsequence, const DtwRows&, const DtwTile&, float*, int32_t*, float*, int32_t*, int32_t*)
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
      : lanes(RLK_DISPATCH(dtw_tile_lanes)()), y_(y), with_ends_(with_ends), lengths_(lanes), index_(lanes),
        counts_(lanes), memory_(floats(y, with_start) * lanes) {
    const int64_t columns = longest(y);
    float* p = memory_.data();
    values_ = p, p += columns * y.dims * lanes;
    row = p, p += columns * lanes;
    cost = p, start = reinterpret_cast<int32_t*>(p + lanes), end = start + lanes, p += 3 * lanes;
    ends = p, p += 2 * y.dims * lanes;
    row_start = reinterpret_cast<int32_t*>(p);
  }

  // Packs y[index[0 .. count - 1]], count <= lanes.
  void pack(const int64_t* index, int count) {
    int64_t columns = 0;
    for (int lane = 0; lane < lanes; ++lane) {
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
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t last = std::max(lengths_[lane] - 1, 0);
        ends[d * lanes + lane] = values_[d * lanes + lane];
        ends[(y_.dims + d) * lanes + lane] = values_[(last * y_.dims + d) * lanes + lane];
      }
    }
  }

  const int lanes;
  DtwTile tile{};
  float *row, *cost, *ends;          // [columns, lanes], [lanes], [2, dims, lanes]
  int32_t *row_start, *start, *end;  // [columns, lanes], [lanes], [lanes]

 private:
  static int64_t longest(const Series& y) { return y.active.empty() ? 0 : y.lengths[y.active[0]]; }
  static int64_t floats(const Series& y, bool with_start) {
    return longest(y) * (y.dims + 1 + with_start) + 3 + 2 * y.dims;
  }

  const Series& y_;
  const bool with_ends_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> index_, counts_;
  Aligned memory_;
  float* values_;
};

// How often a thread looks for signals: after so many cells of so many lanes, a few milliseconds' work.
class Pause {
 public:
  explicit Pause(SignalWatch& watch) : watch_(watch) {}

  // True when the work is to end. `work`: what comes next.
  bool stop(int64_t work) {
    done_ += work;
    if (done_ < kWork) return false;
    done_ = 0;
    return watch_.stop();
  }

  // Calls kernel(some rows of x) until all are done; false when it is to end.
  template <class Kernel>
  bool in_parts(const DtwRow& x, const DtwTile& tile, int lanes, int64_t radius, const Kernel& kernel) {
    int64_t row = tile.columns * tile.dims * lanes, step = x.length;
    if (step > kWork / row) {
      for (int lane = 0; lane < lanes; ++lane)
        if (tile.lengths[lane]) radius = std::max(radius, std::abs(x.length - tile.lengths[lane]));
      row = std::min(tile.columns, 2 * radius + 1) * tile.dims * lanes;
      step = (kWork / row / kDtwRows + 1) * kDtwRows;
    }
    for (int64_t begin = 0; begin < x.length; begin += step) {
      const int64_t end = std::min(begin + step, x.length);
      if (stop((end - begin) * row)) return false;
      kernel(DtwRows{x, begin, end});
    }
    return true;
  }

 private:
  static constexpr int64_t kWork = 1 << 25;
  SignalWatch& watch_;
  int64_t done_ = 0;
};

}  // namespace rlk
