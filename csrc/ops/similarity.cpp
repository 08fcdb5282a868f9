// Schemas and CPU registration of the similarity ops; the public functions are in rlkernels/similarity.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "check.h"
#include "dtw_kernels.h"

namespace rlk {

Series read_series(const char* name, const at::Tensor& x, const std::optional<at::Tensor>& lengths) {
  RLK_CHECK_TENSOR(x, at::kFloat, 3);
  Series s{x.const_data_ptr<float>(), x.size(0), x.size(1), x.size(2), {}, {}, {}};
  TORCH_CHECK_VALUE(s.dims > 0, name, " must have at least one feature, got shape ", x.sizes());
  TORCH_CHECK_VALUE(s.columns < std::numeric_limits<int32_t>::max(), name, " is too long: ", s.columns);
  s.lengths.assign(s.count, s.columns);
  if (lengths) {
    RLK_CHECK_TENSOR((*lengths), at::kLong, 1);
    TORCH_CHECK_VALUE(lengths->numel() == s.count, name, "_lengths must have ", s.count, " values, got ", lengths->numel());
    const int64_t* from = lengths->const_data_ptr<int64_t>();
    for (int64_t i = 0; i < s.count; ++i) {
      TORCH_CHECK_VALUE(from[i] >= 0 && from[i] <= s.columns, name, "_lengths must lie between 0 and ", s.columns,
                        ", got ", from[i]);
      s.lengths[i] = from[i];
    }
  }
  s.bad.resize(s.count);
  const auto not_finite = RLK_DISPATCH(dtw_not_finite);
  at::parallel_for(0, s.count, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) s.bad[i] = not_finite(s.values + i * s.stride(), s.lengths[i] * s.dims);
  });
  for (int64_t i = 0; i < s.count; ++i)
    if (s.is_active(i)) s.active.push_back(i);
  std::stable_sort(s.active.begin(), s.active.end(), [&](int64_t a, int64_t b) { return s.lengths[a] > s.lengths[b]; });
  return s;
}

float special_cost(const Series& x, int64_t i, const Series& y, int64_t j) {
  if (x.bad[i] || y.bad[j]) return std::numeric_limits<float>::quiet_NaN();
  return x.lengths[i] == y.lengths[j] ? 0.0f : std::numeric_limits<float>::infinity();  // one of them is empty
}

PackedTile::PackedTile(const Series& y, bool with_start, bool with_ends)
    : y_(y), lanes_(RLK_DISPATCH(dtw_tile_lanes)()), with_ends_(with_ends) {
  lengths_.resize(lanes_), index_.resize(lanes_), counts_.resize(lanes_);
  const int64_t columns = y.active.empty() ? 0 : y.lengths[y.active[0]];
  const int64_t rows[] = {columns * y.dims, columns, 3, 2 * y.dims, with_start ? columns : 0};
  memory_ = at::empty({std::accumulate(rows, rows + 5, int64_t(0)) * lanes_}, at::kFloat);
  float* p = memory_.mutable_data_ptr<float>();
  values_ = p, p += rows[0] * lanes_;
  row = p, p += rows[1] * lanes_;
  cost = p, start = reinterpret_cast<int32_t*>(p + lanes_), end = start + lanes_, p += rows[2] * lanes_;
  ends = p, p += rows[3] * lanes_;
  row_start = reinterpret_cast<int32_t*>(p);
}

void PackedTile::pack(const int64_t* index, int count) {
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

namespace {

// A tile of y for some of the x: enough tasks to balance threads, enough rows a task to be worth a packing.
struct Plan {
  int64_t tiles, rows, chunks;
  int lanes;

  Plan(const Series& x, const Series& y) : lanes(RLK_DISPATCH(dtw_tile_lanes)()) {
    const int64_t all = x.active.size();
    tiles = (int64_t(y.active.size()) + lanes - 1) / lanes;
    rows = std::clamp<int64_t>(all * tiles / (16 * at::get_num_threads()), 8, std::max<int64_t>(all, 8));
    chunks = (all + rows - 1) / rows;
  }
};

// Calls pair_up(i, scratch, index, count) for every active x i with every tile, index: what is in the lanes.
template <class PairUp>
void for_each_tile(const Series& x, const Series& y, bool with_start, PairUp pair_up) {
  const Plan plan(x, y);
  const auto make = [&] { return PackedTile(y, with_start, false); };
  parallel_tasks(plan.tiles * plan.chunks, make, [&](int64_t task, PackedTile& scratch) {
    const int64_t first = task / plan.chunks * plan.lanes, from = task % plan.chunks * plan.rows;
    const int count = int(std::min<int64_t>(plan.lanes, int64_t(y.active.size()) - first));
    scratch.pack(y.active.data() + first, count);
    const int64_t to = std::min<int64_t>(from + plan.rows, x.active.size());
    for (int64_t i = from; i < to; ++i) pair_up(x.active[i], scratch, y.active.data() + first, count);
  });
}

template <class Fill>
void for_each_special(const Series& x, const Series& y, Fill fill) {
  if (int64_t(x.active.size()) == x.count && int64_t(y.active.size()) == y.count) return;
  for (int64_t i = 0; i < x.count; ++i)
    for (int64_t j = 0; j < y.count; ++j)
      if (!x.is_active(i) || !y.is_active(j)) fill(i, j, special_cost(x, i, y, j));
}

at::Tensor dtw(const at::Tensor& x_values, const at::Tensor& y_values, const std::optional<at::Tensor>& x_lengths,
               const std::optional<at::Tensor>& y_lengths, std::optional<int64_t> band) {
  Series x = read_series("x", x_values, x_lengths), y = read_series("y", y_values, y_lengths);
  TORCH_CHECK_VALUE(x.dims == y.dims, "x and y must have equally many features, got ", x.dims, " and ", y.dims);
  at::Tensor out = at::empty({x.count, y.count}, x_values.options());
  float* cost = out.mutable_data_ptr<float>();
  for_each_special(x, y, [&](int64_t i, int64_t j, float value) { cost[i * y.count + j] = value; });
  // the cost is symmetric: whichever fills the lanes better goes there
  const auto padded = [&](const Series& rows, const Series& lanes) { return rows.active.size() * Plan(rows, lanes).tiles; };
  const bool swap = padded(y, x) < padded(x, y);
  const int64_t row_stride = swap ? 1 : y.count, lane_stride = swap ? y.count : 1;
  if (swap) std::swap(x, y);
  const auto kernel = RLK_DISPATCH(dtw_tile);
  const int64_t radius = band.value_or(kNoBand);
  for_each_tile(x, y, false, [&](int64_t i, PackedTile& scratch, const int64_t* index, int count) {
    kernel(x.row(i), scratch.tile, radius, scratch.row, scratch.cost);
    for (int lane = 0; lane < count; ++lane) cost[i * row_stride + index[lane] * lane_stride] = scratch.cost[lane];
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dtw_subsequence(const at::Tensor& x_values, const at::Tensor& y_values,
                                                               const std::optional<at::Tensor>& x_lengths,
                                                               const std::optional<at::Tensor>& y_lengths) {
  const Series x = read_series("x", x_values, x_lengths), y = read_series("y", y_values, y_lengths);
  TORCH_CHECK_VALUE(x.dims == y.dims, "x and y must have equally many features, got ", x.dims, " and ", y.dims);
  at::Tensor out = at::empty({x.count, y.count}, x_values.options());
  at::Tensor out_start = at::empty({x.count, y.count}, x_values.options().dtype(at::kLong));
  at::Tensor out_end = at::empty({x.count, y.count}, out_start.options());
  float* cost = out.mutable_data_ptr<float>();
  int64_t *start = out_start.mutable_data_ptr<int64_t>(), *end = out_end.mutable_data_ptr<int64_t>();
  for_each_special(x, y, [&](int64_t i, int64_t j, float value) {
    cost[i * y.count + j] = value;
    start[i * y.count + j] = end[i * y.count + j] = -1;
  });
  const auto kernel = RLK_DISPATCH(dtw_tile_subsequence);
  for_each_tile(x, y, true, [&](int64_t i, PackedTile& s, const int64_t* index, int count) {
    kernel(x.row(i), s.tile, s.row, s.row_start, s.cost, s.start, s.end);
    for (int lane = 0; lane < count; ++lane) {
      const int64_t at = i * y.count + index[lane];
      cost[at] = s.cost[lane], start[at] = s.start[lane], end[at] = s.end[lane];
    }
  });
  return {out, out_start, out_end};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> dtw_topk(const at::Tensor& x_values, const at::Tensor& y_values, int64_t k,
                                            const std::optional<at::Tensor>& x_lengths,
                                            const std::optional<at::Tensor>& y_lengths, std::optional<int64_t> band);

}  // namespace rlk

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("dtw(Tensor x, Tensor y, Tensor? x_lengths, Tensor? y_lengths, int? band) -> Tensor");
  m.def("dtw_subsequence(Tensor x, Tensor y, Tensor? x_lengths, Tensor? y_lengths) -> (Tensor, Tensor, Tensor)");
  m.def("dtw_topk(Tensor x, Tensor y, int k, Tensor? x_lengths, Tensor? y_lengths, int? band) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("dtw", &rlk::dtw);
  m.impl("dtw_subsequence", &rlk::dtw_subsequence);
  m.impl("dtw_topk", &rlk::dtw_topk);
}
