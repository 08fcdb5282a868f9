// The k nearest by dynamic time warping, exactly: lower bounds decide which costs are worth computing.
//
// For each query: (1) the lower bound of every candidate; (2) the cost of the 2 k candidates with the lowest bounds,
// whose k-th lowest cost is a ceiling of the true k-th lowest; (3) the cost of every other candidate whose bound is
// not above the ceiling. A candidate left out costs more than k others, so the result is exact, ties included.
#pragma once
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "dtw_series.h"

namespace rlk::dtw_topk {

constexpr int64_t kQueryBlock = 64;  // queries that share one packing of the bank in step (1)

// Smallest and largest x_i with |i - j| <= radius for every column j: lower, upper [columns, dims]. Columns that no row
// reaches are left alone.
inline void envelope(const DtwRow& x, int64_t dims, int64_t radius, int64_t columns, float* lower, float* upper) {
  std::vector<int64_t> low(x.length), high(x.length);  // rows in the window that can still be an extreme
  for (int64_t d = 0; d < dims; ++d) {
    const auto value = [&](int64_t i) { return x.values[i * dims + d]; };
    int64_t low_begin = 0, low_end = 0, high_begin = 0, high_end = 0, next = 0;
    for (int64_t j = 0; j < columns && j - radius < x.length; ++j) {
      for (; next < x.length && next <= j + radius; ++next) {
        while (low_end > low_begin && value(low[low_end - 1]) >= value(next)) --low_end;
        while (high_end > high_begin && value(high[high_end - 1]) <= value(next)) --high_end;
        low[low_end++] = next, high[high_end++] = next;
      }
      while (low[low_begin] < j - radius) ++low_begin;
      while (high[high_begin] < j - radius) ++high_begin;
      lower[j * dims + d] = value(low[low_begin]), upper[j * dims + d] = value(high[high_begin]);
    }
  }
}

// Order of costs as unsigned integers, NaN last, ties by lower index.
inline uint64_t key(float cost, int64_t index) {
  return uint64_t(std::isnan(cost) ? UINT32_MAX : std::bit_cast<uint32_t>(cost)) << 32 | uint32_t(index);
}

// A value that at least `wanted` of the n values >= 0 do not exceed, and few others: the edge of a histogram bin
// of 1/32 of a power of two.
inline float rough_quantile(const float* values, int64_t n, int64_t wanted) {
  constexpr int kShift = 18;
  std::vector<int32_t> bins(1 << (31 - kShift));
  for (int64_t i = 0; i < n; ++i) ++bins[std::bit_cast<uint32_t>(values[i]) >> kShift];
  uint32_t bin = 0;
  for (int64_t seen = bins[0]; seen < wanted; seen += bins[bin]) ++bin;
  const float edge = std::bit_cast<float>(((bin + 1) << kShift) - 1);
  return std::isnan(edge) ? INFINITY : edge;
}

struct Query {
  int64_t index;                  // in x
  std::vector<uint64_t> found;    // keys of the candidates whose cost is known
  std::vector<int64_t> pending;   // candidates (indices into y) whose cost is wanted
  float rough;                    // candidates with bounds up to here were taken in step (2)
};

class Search {
 public:
  Search(const Series& x, const Series& y, int64_t k, int64_t radius, const Threads& threads)
      : x_(x), y_(y), threads_(threads), k_(k), radius_(radius), lanes_(RLK_DISPATCH(dtw_tile_lanes)()), size_(y.active.size()) {}

  // -> cost and index [x.count, k]
  void run(float* cost, int64_t* index) {
    for (int64_t first = 0; first < x_.count; first += kQueryBlock) {
      std::vector<Query> queries;
      for (int64_t i = first; i < std::min(first + kQueryBlock, x_.count); ++i) queries.push_back({i, {}, {}, 0});
      answer(queries);
      hand_out(threads_, queries.size(), [&](int64_t q) { finish(queries[q], cost, index); });
    }
  }

 private:
  void answer(std::vector<Query>& queries) {
    std::vector<Query*> active;
    for (Query& q : queries)
      if (x_.is_active(q.index)) active.push_back(&q);
    if (2 * k_ >= size_) {  // most candidates are wanted: bounds would not pay
      for (Query* q : active) q->pending = y_.active;
      return compute(active);
    }
    Aligned all_bounds = lower_bounds(active);  // [queries, active y]
    const float* bounds = all_bounds.data();
    each(active, [&](Query& q, int64_t row) {
      const float* bound = bounds + row * size_;
      q.rough = rough_quantile(bound, size_, 2 * k_);
      select(q, bound, -1, q.rough);
    });
    compute(active);
    each(active, [&](Query& q, int64_t row) {
      const float* bound = bounds + row * size_;
      select(q, bound, q.rough, largest_useful_bound(q));
    });
    compute(active);
  }

  // Makes the candidates with above < bound <= limit pending; no branches.
  void select(Query& q, const float* bound, float above, float limit) const {
    const std::unique_ptr<int64_t[]> chosen(new int64_t[size_ + 1]);
    int64_t count = 0;
    for (int64_t c = 0; c < size_; ++c) chosen[count] = y_.active[c], count += (bound[c] > above) & (bound[c] <= limit);
    q.pending.assign(chosen.get(), chosen.get() + count);
  }

  template <class F>
  void each(const std::vector<Query*>& queries, F f) const {
    hand_out(threads_, queries.size(), [&](int64_t q) { f(*queries[q], q); });
  }

  // Candidates with higher bounds cannot be among the k nearest. Bound and cost are float32 sums of terms >= 0: with
  // u = 2^-24 each of n operations changes a result by a factor within 1 +- u (a squared difference by 1 +- 3 u), or,
  // next to 0, by 2^-149. n is at most columns * dims + 4 for the bound and (rows + columns) * dims + 4 for the cost;
  // twice their sum is allowed for. An infinite bound means no more than that it left the range of float32.
  float largest_useful_bound(const Query& q) const {
    const double steps = double(x_.lengths[q.index] + 2 * y_.lengths[y_.active[0]]) * y_.dims + 16;
    const double slack = steps * 0x1p-23, limit = (double(kth(q)) + steps * 0x1p-149) / (1 - slack);
    return slack > 0.5 || limit >= FLT_MAX ? INFINITY : std::nextafter(float(limit), INFINITY);
  }

  float kth(const Query& q) const {  // of the costs found; there are at least 2 k, k may be 0
    if (k_ == 0) return -1;
    std::vector<uint64_t> keys = q.found;
    std::nth_element(keys.begin(), keys.begin() + k_ - 1, keys.end());
    return std::bit_cast<float>(uint32_t(keys[k_ - 1] >> 32));
  }

  // [queries, active y] in the order of y_.active.
  Aligned lower_bounds(const std::vector<Query*>& queries) const {
    Aligned result(queries.size() * size_);
    float* bounds = result.data();
    const int64_t columns = y_.lengths[y_.active[0]], width = columns * y_.dims;
    struct Scratch {
      PackedTile packed;
      std::vector<float> boxes;      // [queries, 2, columns, dims]
      std::vector<int64_t> radii;    // of the boxes
    };
    const auto make = [&] {
      return Scratch{{y_, false, true}, std::vector<float>(queries.size() * 2 * width), std::vector<int64_t>(queries.size(), -1)};
    };
    const auto kernel = RLK_DISPATCH(dtw_bound);
    hand_out(threads_, (size_ + lanes_ - 1) / lanes_, make, [&](int64_t tile, Scratch& s) {
      Pause pause(*threads_.watch);
      const int64_t first = tile * lanes_, count = std::min<int64_t>(lanes_, size_ - first);
      s.packed.pack(y_.active.data() + first, int(count));
      const int64_t shortest = y_.lengths[y_.active[first + count - 1]];
      for (size_t q = 0; q < queries.size(); ++q) {
        const DtwRow x = x_.row(queries[q]->index);
        if (pause.stop((columns + x.length) * y_.dims * lanes_)) return;
        // wide enough for every lane
        const int64_t radius = std::min(std::max({radius_, s.packed.tile.columns - x.length, x.length - shortest}), kNoBand);
        float *lower = s.boxes.data() + q * 2 * width, *upper = lower + width;
        if (radius != s.radii[q]) envelope(x, y_.dims, s.radii[q] = radius, columns, lower, upper);
        kernel(x, s.packed.tile, s.packed.ends, lower, upper, s.packed.cost);
        std::copy_n(s.packed.cost, count, bounds + q * size_ + first);
      }
    });
    return result;
  }

  // Costs of all pending candidates.
  void compute(const std::vector<Query*>& queries) {
    constexpr size_t kTiles = 8;  // of a task
    struct Task {
      Query* query;
      size_t first, at;  // in query->pending and query->found
    };
    std::vector<Task> tasks;
    for (Query* q : queries) {
      const size_t known = q->found.size();
      q->found.resize(known + q->pending.size());
      for (size_t i = 0; i < q->pending.size(); i += kTiles * lanes_) tasks.push_back({q, i, known + i});
    }
    const auto kernel = RLK_DISPATCH(dtw_tile);
    const auto make = [&] { return PackedTile(y_, false, false); };
    hand_out(threads_, tasks.size(), make, [&](int64_t t, PackedTile& packed) {
      Pause pause(*threads_.watch);
      const Task& task = tasks[t];
      const std::vector<int64_t>& pending = task.query->pending;
      const size_t end = std::min(pending.size(), task.first + kTiles * lanes_);
      for (size_t first = task.first; first < end; first += lanes_) {
        const int count = int(std::min<size_t>(lanes_, end - first));
        packed.pack(pending.data() + first, count);
        for (size_t i = first + count; i < std::min(first + count + lanes_, end); ++i) prefetch(pending[i]);
        const auto some = [&](const DtwRows& x) { kernel(x, packed.tile, radius_, packed.row, packed.cost); };
        if (!pause.in_parts(x_.row(task.query->index), packed.tile, lanes_, radius_, some)) return;
        uint64_t* found = task.query->found.data() + task.at + (first - task.first);
        for (int lane = 0; lane < count; ++lane) found[lane] = key(packed.cost[lane], pending[first + lane]);
      }
    });
  }

  // Candidates lie anywhere in the bank: fetch the first kilobyte of a trajectory while its predecessors are computed.
  void prefetch(int64_t candidate) const {
    const int64_t count = std::min<int64_t>(y_.lengths[candidate] * y_.dims, 256);
    for (int64_t p = 0; p < count; p += 16) __builtin_prefetch(y_.values + candidate * y_.stride() + p);
  }

  void finish(Query& q, float* cost, int64_t* index) const {
    const bool active = x_.is_active(q.index);
    for (int64_t j = 0; j < y_.count && (!active || size_ < y_.count); ++j)
      if (!active || !y_.is_active(j)) q.found.push_back(key(special_cost(x_, q.index, y_, j), j));
    const auto middle = q.found.begin() + k_;
    std::nth_element(q.found.begin(), middle, q.found.end());
    std::sort(q.found.begin(), middle);
    for (int64_t i = 0; i < k_; ++i) {
      cost[q.index * k_ + i] = std::bit_cast<float>(uint32_t(q.found[i] >> 32));  // the key of NaN is a NaN
      index[q.index * k_ + i] = int64_t(uint32_t(q.found[i]));
    }
    q = {};
  }

  const Series &x_, &y_;
  const Threads& threads_;
  const int64_t k_, radius_;
  const int lanes_;
  const int64_t size_;  // active y
};

}  // namespace rlk::dtw_topk
