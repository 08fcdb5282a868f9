// Schemas and CPU registration of the similarity ops; the public functions are in rlkernels/similarity.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "dtw_pairs.h"
#include "dtw_topk.h"
#include "torch_threads.h"

namespace {

using rlk::Series;
using Lengths = std::optional<at::Tensor>;

Series read_series(const char* name, const at::Tensor& x, const Lengths& lengths, const rlk::Threads& threads) {
  rlk::check_tensor(x, name, at::kFloat, 3);
  const int64_t count = x.size(0), columns = x.size(1);
  TORCH_CHECK_VALUE(x.size(2) > 0, name, " must have at least one feature, got shape ", x.sizes());
  TORCH_CHECK_VALUE(columns < std::numeric_limits<int32_t>::max(), name, " is too long: ", columns);
  std::vector<int64_t> own(count, columns);
  if (lengths) {
    rlk::check_tensor(*lengths, "lengths of a series", at::kLong, 1);
    TORCH_CHECK_VALUE(lengths->numel() == count, name, "_lengths must have ", count, " values, got ", lengths->numel());
    const int64_t* from = lengths->const_data_ptr<int64_t>();
    for (int64_t i = 0; i < count; ++i)
      TORCH_CHECK_VALUE(from[i] >= 0 && from[i] <= columns, name, "_lengths must lie between 0 and ", columns, ", got ",
                        from[i]);
    own.assign(from, from + count);
  }
  return {x.const_data_ptr<float>(), count, columns, x.size(2), std::move(own), threads};
}

// Both sides of an op, and the threads to work on.
struct Sides {
  const rlk::Threads threads = rlk::torch_threads();
  const Series x, y;

  Sides(const at::Tensor& x_values, const at::Tensor& y_values, const Lengths& x_lengths, const Lengths& y_lengths)
      : x(read_series("x", x_values, x_lengths, threads)), y(read_series("y", y_values, y_lengths, threads)) {
    TORCH_CHECK_VALUE(x.dims == y.dims, "x and y must have equally many features, got ", x.dims, " and ", y.dims);
  }
};

at::Tensor dtw(const at::Tensor& x_values, const at::Tensor& y_values, const Lengths& x_lengths,
               const Lengths& y_lengths, std::optional<int64_t> band) {
  const Sides in(x_values, y_values, x_lengths, y_lengths);
  at::Tensor out = at::empty({in.x.count, in.y.count}, x_values.options());
  rlk::dtw_all_pairs(in.x, in.y, band.value_or(rlk::kNoBand), in.threads, out.mutable_data_ptr<float>());
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dtw_subsequence(const at::Tensor& x_values, const at::Tensor& y_values,
                                                               const Lengths& x_lengths, const Lengths& y_lengths) {
  const Sides in(x_values, y_values, x_lengths, y_lengths);
  at::Tensor cost = at::empty({in.x.count, in.y.count}, x_values.options());
  at::Tensor start = at::empty({in.x.count, in.y.count}, x_values.options().dtype(at::kLong));
  at::Tensor end = at::empty({in.x.count, in.y.count}, start.options());
  rlk::dtw_all_stretches(in.x, in.y, in.threads, cost.mutable_data_ptr<float>(), start.mutable_data_ptr<int64_t>(),
                         end.mutable_data_ptr<int64_t>());
  return {cost, start, end};
}

std::tuple<at::Tensor, at::Tensor> dtw_topk(const at::Tensor& x_values, const at::Tensor& y_values, int64_t k,
                                            const Lengths& x_lengths, const Lengths& y_lengths,
                                            std::optional<int64_t> band) {
  const Sides in(x_values, y_values, x_lengths, y_lengths);
  TORCH_CHECK_VALUE(k >= 0 && k <= in.y.count, "k must be between 0 and ", in.y.count, ", got ", k);
  TORCH_CHECK_VALUE(in.y.count <= UINT32_MAX, "y must hold at most ", UINT32_MAX, " trajectories, got ", in.y.count);
  at::Tensor cost = at::empty({in.x.count, k}, x_values.options());
  at::Tensor index = at::empty({in.x.count, k}, x_values.options().dtype(at::kLong));
  rlk::dtw_topk::Search(in.x, in.y, k, band.value_or(rlk::kNoBand), in.threads)
      .run(cost.mutable_data_ptr<float>(), index.mutable_data_ptr<int64_t>());
  return {cost, index};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("dtw(Tensor x, Tensor y, Tensor? x_lengths, Tensor? y_lengths, int? band) -> Tensor");
  m.def("dtw_subsequence(Tensor x, Tensor y, Tensor? x_lengths, Tensor? y_lengths) -> (Tensor, Tensor, Tensor)");
  m.def("dtw_topk(Tensor x, Tensor y, int k, Tensor? x_lengths, Tensor? y_lengths, int? band) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("dtw", &dtw);
  m.impl("dtw_subsequence", &dtw_subsequence);
  m.impl("dtw_topk", &dtw_topk);
}
