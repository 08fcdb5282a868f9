// CUDA registration of dynamic time warping.
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  // Costs and, in subsequence mode, starts and ends of all pairs without an empty trajectory; the rest, and what NaN
  // and infinity lead to, is up to the caller (rlkernels/similarity/gpu.py). band < 0: none.
  m.def(
      "dtw_warps(Tensor x, Tensor y, Tensor x_lengths, Tensor y_lengths, int band, bool subsequence)"
      " -> (Tensor, Tensor, Tensor)");
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

std::tuple<at::Tensor, at::Tensor, at::Tensor> dtw_warps(const at::Tensor& x, const at::Tensor& y,
                                                         const at::Tensor& x_lengths, const at::Tensor& y_lengths,
                                                         int64_t band, bool subsequence) {
  for (const at::Tensor* t : {&x, &y})
    TORCH_CHECK(t->is_cuda() && t->scalar_type() == at::kFloat && t->dim() == 3 && t->is_contiguous(),
                "x and y must be contiguous float32 CUDA tensors of rank 3, got ", t->scalar_type(), " ", t->sizes());
  for (const at::Tensor* t : {&x_lengths, &y_lengths})
    TORCH_CHECK(t->is_cuda() && t->scalar_type() == at::kLong && t->dim() == 1 && t->is_contiguous(),
                "lengths must be contiguous int64 CUDA tensors of rank 1, got ", t->scalar_type(), " ", t->sizes());
  TORCH_CHECK(x_lengths.numel() == x.size(0) && y_lengths.numel() == y.size(0), "one length for each trajectory");
  TORCH_CHECK(x.size(2) == y.size(2) && x.size(2) > 0, "x and y must have equally many features, at least one");
  TORCH_CHECK(x.size(1) < (1 << 30) && y.size(1) < (1 << 30), "trajectories must be shorter than 2^30");
  TORCH_CHECK(!(subsequence && band >= 0), "subsequence mode has no band");
  const c10::cuda::CUDAGuard guard(x.device());
  const auto indices = x.options().dtype(at::kLong);
  const int64_t n = x.size(0), m = y.size(0);
  at::Tensor cost = at::empty({n, m}, x.options());
  at::Tensor start = at::empty({subsequence ? n : 0, m}, indices), end = at::empty({subsequence ? n : 0, m}, indices);
  if (n == 0 || m == 0) return {cost, start, end};
  rlk::cuda::DtwProblem problem{};
  problem.x = x.const_data_ptr<float>(), problem.y = y.const_data_ptr<float>();
  problem.x_lengths = x_lengths.const_data_ptr<int64_t>(), problem.y_lengths = y_lengths.const_data_ptr<int64_t>();
  problem.n = n, problem.m = m, problem.rows = x.size(1), problem.columns = y.size(1), problem.dims = x.size(2);
  problem.radius = band < 0 ? rlk::kNoBand : band, problem.subsequence = subsequence;
  problem.cost = cost.mutable_data_ptr<float>();
  problem.start = start.mutable_data_ptr<int64_t>(), problem.end = end.mutable_data_ptr<int64_t>();
  int64_t warps = 0;
  C10_CUDA_CHECK(static_cast<cudaError_t>(rlk::cuda::dtw_warps(problem, x.get_device(), &warps)));
  TORCH_CHECK(warps > 0, "the dtw kernel does not fit on CUDA device ", x.get_device());
  const at::Tensor scratch =
      at::empty({rlk::cuda::dtw_scratch_bytes(problem, warps)}, x.options().dtype(at::kByte));
  problem.scratch = scratch.mutable_data_ptr();
  C10_CUDA_CHECK(static_cast<cudaError_t>(rlk::cuda::dtw(problem, warps, c10::cuda::getCurrentCUDAStream())));
  return {cost, start, end};
}

}  // namespace

TORCH_LIBRARY_IMPL(rlkernels, CUDA, m) { m.impl("dtw_warps", &dtw_warps); }
#endif
