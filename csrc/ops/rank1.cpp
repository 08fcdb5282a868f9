// Schemas and CPU registration of the rank-1 ops; the public functions are in rlkernels/rank1.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "check.h"
#include "rank1_solve.h"
#include "torch_threads.h"

namespace {

using rlk::DeltaPair;
using rlk::Storage;

constexpr int64_t kSmall = 1 << 21;  // entries; smaller modules are solved side by side, one thread each

Storage storage_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Storage::float32;
    case at::kBFloat16: return Storage::bfloat16;
    case at::kHalf: return Storage::float16;
    default: TORCH_CHECK(false, "dtype must be float32, bfloat16 or float16, got ", t.scalar_type());
  }
}

void check_rows(const at::Tensor& t) {
  TORCH_CHECK(t.dim() == 2 && t.is_cpu() && t.numel() > 0 && (t.stride(1) == 1 || t.size(1) == 1),
              "matrices must be CPU tensors of rank 2 with contiguous rows, got ", t.sizes(), " with strides ",
              t.strides());
}

DeltaPair pair_of(const at::Tensor& weight, const at::Tensor& base) {
  check_rows(weight);
  check_rows(base);
  TORCH_CHECK(weight.sizes() == base.sizes(), "weight and base must have the same shape");
  return {weight.const_data_ptr(), base.const_data_ptr(), weight.stride(0), base.stride(0),
          weight.size(0), weight.size(1), storage_of(weight), storage_of(base)};
}

const float* vector_data(const at::Tensor& t, int64_t size) {
  rlk::check_tensor(t, "a vector", at::kFloat, 1);
  TORCH_CHECK(t.numel() == size, "a vector must have ", size, " entries, got ", t.numel());
  return t.const_data_ptr<float>();
}

// -> u [rank, m] and v [rank, n] of every pair, sigma [pairs, rank] float64, and [pairs, 7] float64: frobenius, gap,
// residual, angle bound, passes, changed, status
std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, at::Tensor, at::Tensor> top1_deltas(
    const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& bases,
    const c10::List<std::optional<at::Tensor>>& starts, double tol, int64_t max_passes, int64_t min_passes,
    int64_t rank, int64_t seed) {
  const int64_t count = int64_t(weights.size());
  TORCH_CHECK(bases.size() == weights.size() && starts.size() == weights.size(), "lists must have the same length");
  TORCH_CHECK(rank >= 1, "rank must be >= 1, got ", rank);
  const rlk::rank1::Settings settings{tol, max_passes, min_passes, rank, static_cast<uint64_t>(seed)};
  std::vector<DeltaPair> pairs;
  std::vector<const float*> start_data(count, nullptr);
  std::vector<at::Tensor> us, vs, held;
  at::Tensor sigmas = at::zeros({count, rank}, at::kDouble), facts = at::zeros({count, 7}, at::kDouble);
  for (int64_t i = 0; i < count; ++i) {
    pairs.push_back(pair_of(weights[i], bases[i]));
    us.push_back(at::zeros({rank, pairs[i].m}, at::kFloat));
    vs.push_back(at::zeros({rank, pairs[i].n}, at::kFloat));
    const std::optional<at::Tensor> start = starts.get(i);
    if (start.has_value()) {
      start_data[i] = vector_data(*start, pairs[i].n);
      held.push_back(*start);
    }
  }
  const auto solve = [&](int64_t i, const rlk::Threads& threads) {
    rlk::rank1::Solver solver(pairs[i], settings, threads);
    const auto r = solver.solve(start_data[i], us[i].mutable_data_ptr<float>(), vs[i].mutable_data_ptr<float>(),
                                sigmas.mutable_data_ptr<double>() + i * rank);
    const double row[] = {r.frobenius, r.gap, r.residual, r.angle_bound, double(r.passes), r.changed, double(r.status)};
    std::copy(std::begin(row), std::end(row), facts.mutable_data_ptr<double>() + i * std::size(row));
  };
  const rlk::Threads threads = rlk::torch_threads();
  std::vector<int64_t> small;
  for (int64_t i = 0; i < count; ++i) {
    if (count > 1 && pairs[i].m * pairs[i].n < kSmall) small.push_back(i);
    else solve(i, threads);
  }
  rlk::hand_out(threads, int64_t(small.size()), [&](int64_t i) { solve(small[i], rlk::one_thread()); });
  return {us, vs, sigmas, facts};
}

at::Tensor delta_matvec(const at::Tensor& weight, const at::Tensor& base, const at::Tensor& v) {
  const DeltaPair pair = pair_of(weight, base);
  const float* vector = vector_data(v, pair.n);
  std::vector<float> panels(RLK_DISPATCH(rank1_panel_floats)(pair.n));
  RLK_DISPATCH(rank1_to_panels)(pair, vector, 1, 1.0f, panels.data());
  at::Tensor out = at::empty({pair.m}, at::kFloat);
  const auto kernel = RLK_DISPATCH(rank1_matvec);
  float* result = out.mutable_data_ptr<float>();
  rlk::for_ranges(rlk::torch_threads(), pair.m, std::max<int64_t>(16, 32768 / pair.n), [&](int64_t begin, int64_t end) {
    kernel(pair, panels.data(), begin, end, result);
  });
  return out;
}

// u already holds the scale.
void add_rank1_(at::Tensor& weight, const at::Tensor& u, const at::Tensor& v, bool stochastic, int64_t seed) {
  check_rows(weight);
  const float *left = vector_data(u, weight.size(0)), *right = vector_data(v, weight.size(1));
  const auto kernel = RLK_DISPATCH(rank1_add);
  void* data = weight.mutable_data_ptr();
  const int64_t n = weight.size(1), stride = weight.stride(0);
  const Storage type = storage_of(weight);
  at::parallel_for(0, weight.size(0), std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
    kernel(data, type, stride, n, left, right, begin, end, stochastic, static_cast<uint64_t>(seed));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("top1_deltas(Tensor[] weights, Tensor[] bases, Tensor?[] starts, float tol, int max_passes, int min_passes,"
        " int rank, int seed) -> (Tensor[], Tensor[], Tensor, Tensor)");
  m.def("delta_matvec(Tensor weight, Tensor base, Tensor v) -> Tensor");
  m.def("add_rank1_(Tensor(a!) weight, Tensor u, Tensor v, bool stochastic, int seed) -> ()");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("top1_deltas", &top1_deltas);
  m.impl("delta_matvec", &delta_matvec);
  m.impl("add_rank1_", &add_rank1_);
}
