// CUDA registration of dynamic time warping.
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  // Costs and, in subsequence mode, starts and ends of all pairs without an empty trajectory; the rest, and what NaN
  // and infinity lead to, is up to the caller (rlkernels/similarity/gpu.py). band < 0: none.
  m.def(
      "dtw_warps(Tensor x, Tensor y, Tensor x_lengths, Tensor y_lengths, int band, bool subsequence)"
      " -> (Tensor, Tensor, Tensor)");
  // The same for some places n * M + m of cost [N, M]; negative ones, which are none, come last.
  m.def(
      "dtw_warps_(Tensor(a!) cost, Tensor pairs, Tensor x, Tensor y, Tensor x_lengths, Tensor y_lengths, int band)"
      " -> ()");
  // Lower bounds [N, M] of those costs.
  m.def("dtw_bounds(Tensor x, Tensor y, Tensor x_lengths, Tensor y_lengths, int band) -> Tensor");
}

#ifdef RLK_WITH_CUDA
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "dtw.h"
#include "dtw_cuda.h"

namespace {

rlk::cuda::DtwProblem problem_of(const at::Tensor& x, const at::Tensor& y, const at::Tensor& x_lengths,
                                 const at::Tensor& y_lengths, int64_t band) {
  for (const at::Tensor* t : {&x, &y})
    TORCH_CHECK(t->is_cuda() && t->scalar_type() == at::kFloat && t->dim() == 3 && t->is_contiguous(),
                "x and y must be contiguous float32 CUDA tensors of rank 3, got ", t->scalar_type(), " ", t->sizes());
  for (const at::Tensor* t : {&x_lengths, &y_lengths})
    TORCH_CHECK(t->is_cuda() && t->scalar_type() == at::kLong && t->dim() == 1 && t->is_contiguous(),
                "lengths must be contiguous int64 CUDA tensors of rank 1, got ", t->scalar_type(), " ", t->sizes());
  TORCH_CHECK(x_lengths.numel() == x.size(0) && y_lengths.numel() == y.size(0), "one length for each trajectory");
  TORCH_CHECK(x.size(2) == y.size(2) && x.size(2) > 0, "x and y must have equally many features, at least one");
  TORCH_CHECK(x.size(1) < (1 << 30) && y.size(1) < (1 << 30), "trajectories must be shorter than 2^30");
  TORCH_CHECK(x.size(2) < (1 << 30), "x and y must have less than 2^30 features");
  rlk::cuda::DtwProblem problem{};
  problem.x = x.const_data_ptr<float>(), problem.y = y.const_data_ptr<float>();
  problem.x_lengths = x_lengths.const_data_ptr<int64_t>(), problem.y_lengths = y_lengths.const_data_ptr<int64_t>();
  problem.n = x.size(0), problem.m = y.size(0), problem.rows = x.size(1), problem.columns = y.size(1);
  problem.dims = int(x.size(2)), problem.radius = band < 0 ? rlk::kNoBand : band, problem.count = problem.n * problem.m;
  return problem;
}

// On the current device.
void launch_dtw(rlk::cuda::DtwProblem& problem, const at::Tensor& x) {
  if (problem.count == 0) return;
  int64_t warps = 0;
  C10_CUDA_CHECK(static_cast<cudaError_t>(rlk::cuda::dtw_warps(problem, x.get_device(), &warps)));
  TORCH_CHECK(warps > 0, "the dtw kernel does not fit on CUDA device ", x.get_device());
  const at::Tensor scratch =
      at::empty({rlk::cuda::dtw_scratch_bytes(problem, warps)}, x.options().dtype(at::kByte));
  problem.scratch = scratch.mutable_data_ptr();
  C10_CUDA_CHECK(static_cast<cudaError_t>(rlk::cuda::dtw(problem, warps, c10::cuda::getCurrentCUDAStream())));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dtw_warps(const at::Tensor& x, const at::Tensor& y,
                                                         const at::Tensor& x_lengths, const at::Tensor& y_lengths,
                                                         int64_t band, bool subsequence) {
  rlk::cuda::DtwProblem problem = problem_of(x, y, x_lengths, y_lengths, band);
  TORCH_CHECK(!(subsequence && band >= 0), "subsequence mode has no band");
  const c10::cuda::CUDAGuard guard(x.device());
  const auto indices = x.options().dtype(at::kLong);
  const int64_t n = problem.n, m = problem.m;
  at::Tensor cost = at::empty({n, m}, x.options());
  at::Tensor start = at::empty({subsequence ? n : 0, m}, indices), end = at::empty({subsequence ? n : 0, m}, indices);
  problem.subsequence = subsequence, problem.cost = cost.mutable_data_ptr<float>();
  problem.start = start.mutable_data_ptr<int64_t>(), problem.end = end.mutable_data_ptr<int64_t>();
  launch_dtw(problem, x);
  return {cost, start, end};
}

void dtw_warps_(const at::Tensor& cost, const at::Tensor& pairs, const at::Tensor& x, const at::Tensor& y,
                const at::Tensor& x_lengths, const at::Tensor& y_lengths, int64_t band) {
  rlk::cuda::DtwProblem problem = problem_of(x, y, x_lengths, y_lengths, band);
  TORCH_CHECK(cost.is_cuda() && cost.scalar_type() == at::kFloat && cost.is_contiguous() &&
                  cost.numel() == problem.count,
              "cost must be a contiguous float32 CUDA tensor with a place for each pair, got ", cost.sizes());
  TORCH_CHECK(pairs.is_cuda() && pairs.scalar_type() == at::kLong && pairs.is_contiguous(),
              "pairs must be a contiguous int64 CUDA tensor, got ", pairs.scalar_type(), " ", pairs.sizes());
  const c10::cuda::CUDAGuard guard(x.device());
  problem.cost = cost.mutable_data_ptr<float>();
  problem.pairs = pairs.const_data_ptr<int64_t>(), problem.count = pairs.numel();
  launch_dtw(problem, x);
}

at::Tensor dtw_bounds(const at::Tensor& x, const at::Tensor& y, const at::Tensor& x_lengths,
                      const at::Tensor& y_lengths, int64_t band) {
  rlk::cuda::DtwProblem problem = problem_of(x, y, x_lengths, y_lengths, band);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor bounds = at::empty({problem.n, problem.m}, x.options());
  if (problem.count == 0) return bounds;
  const at::Tensor boxes = at::empty({rlk::cuda::dtw_boxes_bytes(problem)}, x.options().dtype(at::kByte));
  problem.cost = bounds.mutable_data_ptr<float>(), problem.scratch = boxes.mutable_data_ptr();
  C10_CUDA_CHECK(static_cast<cudaError_t>(rlk::cuda::dtw_bounds(problem, c10::cuda::getCurrentCUDAStream())));
  return bounds;
}

}  // namespace

TORCH_LIBRARY_IMPL(rlkernels, CUDA, m) {
  m.impl("dtw_warps", &dtw_warps);
  m.impl("dtw_warps_", &dtw_warps_);
  m.impl("dtw_bounds", &dtw_bounds);
}
#endif
