// Schemas and CPU registration of the decoder layer's small ops; the Python functions are in rlkernels/decoder.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "check.h"
#include "dispatch.h"

RLK_DECLARE_KERNEL(void, add_rms_norm, float*, const float*, const float*, float, float*, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, rope, float*, int64_t, const int64_t*, const float*, const float*, const float*, const float*,
                   float, int64_t, int64_t, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, silu_mul, const float*, float*, int64_t, int64_t)

namespace {

constexpr int64_t kGrain = 16384;  // numbers per thread

template <class F>
void for_rows(int64_t rows, int64_t width, const F& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), work);
}

const float* data(const std::optional<at::Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

at::Tensor add_rms_norm_(at::Tensor residual, const std::optional<at::Tensor>& x, const at::Tensor& weight,
                         double eps) {
  RLK_CHECK_TENSOR(residual, at::kFloat, 2);
  RLK_CHECK_TENSOR(weight, at::kFloat, 1);
  const int64_t rows = residual.size(0), dim = residual.size(1);
  TORCH_CHECK_VALUE(weight.size(0) == dim, "weight must have ", dim, " numbers, got ", weight.size(0));
  if (x) {
    RLK_CHECK_TENSOR((*x), at::kFloat, 2);
    TORCH_CHECK_VALUE(x->sizes() == residual.sizes(), "x must have shape ", residual.sizes(), ", got ", x->sizes());
  }
  at::Tensor out = at::empty_like(residual);
  const auto kernel = RLK_DISPATCH(add_rms_norm);
  float *r = residual.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>();
  const float *added = data(x), *w = weight.const_data_ptr<float>();
  for_rows(rows, dim, [&](int64_t begin, int64_t end) {
    kernel(r + begin * dim, added ? added + begin * dim : nullptr, w, float(eps), o + begin * dim, end - begin, dim);
  });
  return out;
}

void rope_(at::Tensor x, const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin, int64_t q_heads,
           int64_t heads, const std::optional<at::Tensor>& q_weight, const std::optional<at::Tensor>& k_weight,
           double eps) {
  RLK_CHECK_TENSOR(x, at::kFloat, 2);
  RLK_CHECK_TENSOR(positions, at::kLong, 1);
  RLK_CHECK_TENSOR(cos, at::kFloat, 2);
  RLK_CHECK_TENSOR(sin, at::kFloat, 2);
  const int64_t rows = x.size(0), dim = cos.size(1), width = x.size(1);
  TORCH_CHECK_VALUE(positions.size(0) == rows && sin.sizes() == cos.sizes() && dim % 2 == 0,
                    "positions must have one number per row, cos and sin one shape of even width");
  TORCH_CHECK_VALUE(0 <= q_heads && q_heads <= heads && heads * dim <= width, heads, " heads of ", dim,
                    " numbers do not fit into rows of ", width);
  TORCH_CHECK_VALUE(q_weight.has_value() == k_weight.has_value(), "q_weight and k_weight come together");
  for (const auto& weight : {q_weight, k_weight})
    if (weight) {
      RLK_CHECK_TENSOR((*weight), at::kFloat, 1);
      TORCH_CHECK_VALUE(weight->size(0) == dim, "norm weights must have ", dim, " numbers, got ", weight->size(0));
    }
  const int64_t* p = positions.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i)
    TORCH_CHECK_VALUE(p[i] >= 0 && p[i] < cos.size(0), "positions must be between 0 and ", cos.size(0) - 1, ", got ",
                      p[i]);
  const auto kernel = RLK_DISPATCH(rope);
  float* data_x = x.mutable_data_ptr<float>();
  const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  for_rows(rows, heads * dim, [&](int64_t begin, int64_t end) {
    kernel(data_x + begin * width, width, p + begin, c, s, data(q_weight), data(k_weight), float(eps), end - begin,
           q_heads, heads, dim);
  });
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  RLK_CHECK_TENSOR(gate_up, at::kFloat, 2);
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up must have an even width, got ", gate_up.size(1));
  const int64_t rows = gate_up.size(0), dim = gate_up.size(1) / 2;
  at::Tensor out = at::empty({rows, dim}, gate_up.options());
  const auto kernel = RLK_DISPATCH(silu_mul);
  const float* in = gate_up.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  for_rows(rows, 4 * dim, [&](int64_t begin, int64_t end) {
    kernel(in + begin * 2 * dim, o + begin * dim, end - begin, dim);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("add_rms_norm_(Tensor(a!) residual, Tensor? x, Tensor weight, float eps) -> Tensor");
  m.def(
      "rope_(Tensor(a!) x, Tensor positions, Tensor cos, Tensor sin, int q_heads, int heads, Tensor? q_weight, "
      "Tensor? k_weight, float eps) -> ()");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("add_rms_norm_", &add_rms_norm_);
  m.impl("rope_", &rope_);
  m.impl("silu_mul", &silu_mul);
}
