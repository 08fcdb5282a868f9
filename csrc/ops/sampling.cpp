// Schemas and CPU registration of the sampling ops; the public functions are in rlkernels/sampling.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"
#include "dispatch.h"

RLK_DECLARE_KERNEL(void, keyed_uniform, uint64_t, const int64_t*, const int64_t*, float*, int64_t)

namespace {

at::Tensor keyed_uniform(int64_t seed, const at::Tensor& sample_ids, const at::Tensor& positions) {
  RLK_CHECK_TENSOR(sample_ids, at::kLong, 1);
  RLK_CHECK_TENSOR(positions, at::kLong, 1);
  TORCH_CHECK(sample_ids.numel() == positions.numel(), "sample_ids and positions must have the same length");
  at::Tensor out = at::empty(sample_ids.sizes(), sample_ids.options().dtype(at::kFloat));
  const auto kernel = RLK_DISPATCH(keyed_uniform);
  const int64_t* ids = sample_ids.const_data_ptr<int64_t>();
  const int64_t* pos = positions.const_data_ptr<int64_t>();
  float* result = out.mutable_data_ptr<float>();
  at::parallel_for(0, out.numel(), 16384, [&](int64_t begin, int64_t end) {
    kernel(static_cast<uint64_t>(seed), ids + begin, pos + begin, result + begin, end - begin);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("keyed_uniform(int seed, Tensor sample_ids, Tensor positions) -> Tensor");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) { m.impl("keyed_uniform", &keyed_uniform); }
