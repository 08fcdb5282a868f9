// Schemas and CPU registration of the decoder layer's small ops; the Python functions are in rlkernels/decoder.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "check.h"
#include "dispatch.h"

RLK_DECLARE_KERNEL(void, add_rms_norm, const float*, const float*, const float*, float, float*, float*, float*, int64_t,
                   int64_t)
RLK_DECLARE_KERNEL(void, rms_norm_backward, const float*, const float*, const float*, const float*, const float*,
                   float*, float*, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, rope, const float*, const int64_t*, const float*, const float*, const float*, const float*,
                   float, float*, int64_t, int64_t, int64_t, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, rope_backward, const float*, const float*, const int64_t*, const float*, const float*,
                   const float*, const float*, float, float*, float*, float*, int64_t, int64_t, int64_t, int64_t,
                   int64_t)
RLK_DECLARE_KERNEL(void, silu_mul, const float*, float*, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, silu_mul_backward, const float*, const float*, float*, int64_t, int64_t)

namespace {

constexpr int64_t kGrain = 16384;  // numbers per thread

template <class F>
void for_rows(int64_t rows, int64_t width, const F& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), work);
}

const float* data(const std::optional<at::Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

// Work on chunks of rows, each with a row of its own of `sums`, so that sums over rows do not depend on the threads.
constexpr int64_t kChunk = 64;

template <class F>
at::Tensor summed_over_rows(int64_t rows, int64_t width, const at::TensorOptions& options, const F& work) {
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  const at::Tensor sums = at::zeros({chunks, width}, options);
  float* data = sums.mutable_data_ptr<float>();
  for_rows(chunks, kChunk * width, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) work(c * kChunk, std::min(rows, (c + 1) * kChunk), data + c * width);
  });
  return sums.sum(0);
}

// -> residual + x ([0] without x), its norm, and one over the root mean square of each row
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& residual,
                                                            const std::optional<at::Tensor>& x,
                                                            const at::Tensor& weight, double eps) {
  RLK_CHECK_TENSOR(residual, at::kFloat, 2);
  RLK_CHECK_TENSOR(weight, at::kFloat, 1);
  const int64_t rows = residual.size(0), dim = residual.size(1);
  TORCH_CHECK_VALUE(weight.size(0) == dim, "weight must have ", dim, " numbers, got ", weight.size(0));
  if (x) {
    RLK_CHECK_TENSOR((*x), at::kFloat, 2);
    TORCH_CHECK_VALUE(x->sizes() == residual.sizes(), "x must have shape ", residual.sizes(), ", got ", x->sizes());
  }
  at::Tensor sum = x ? at::empty_like(residual) : at::empty({0, dim}, residual.options());
  at::Tensor out = at::empty_like(residual), factor = at::empty({rows}, residual.options());
  const auto kernel = RLK_DISPATCH(add_rms_norm);
  const float *r = residual.const_data_ptr<float>(), *added = data(x), *w = weight.const_data_ptr<float>();
  float *s = sum.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>(), *f = factor.mutable_data_ptr<float>();
  for_rows(rows, dim, [&](int64_t begin, int64_t end) {
    const int64_t at = begin * dim;
    kernel(r + at, added ? added + at : nullptr, w, float(eps), added ? s + at : nullptr, o + at, f + begin,
           end - begin, dim);
  });
  return {sum, out, factor};
}

// -> gradients of the sum (and so of both of its parts) and of the weight
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_out,
                                                     const std::optional<at::Tensor>& grad_sum, const at::Tensor& sum,
                                                     const at::Tensor& factor, const at::Tensor& weight) {
  RLK_CHECK_TENSOR(sum, at::kFloat, 2);
  RLK_CHECK_TENSOR(grad_out, at::kFloat, 2);
  RLK_CHECK_TENSOR(factor, at::kFloat, 1);
  RLK_CHECK_TENSOR(weight, at::kFloat, 1);
  const int64_t rows = sum.size(0), dim = sum.size(1);
  TORCH_CHECK(grad_out.sizes() == sum.sizes() && factor.size(0) == rows && weight.size(0) == dim &&
                  (!grad_sum || grad_sum->sizes() == sum.sizes()),
              "gradients must have the shape of the sum, with one factor per row and one weight per column");
  if (grad_sum) RLK_CHECK_TENSOR((*grad_sum), at::kFloat, 2);
  at::Tensor grad = at::empty_like(sum);
  const auto kernel = RLK_DISPATCH(rms_norm_backward);
  const float *g = grad_out.const_data_ptr<float>(), *other = data(grad_sum), *x = sum.const_data_ptr<float>();
  const float *f = factor.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* out = grad.mutable_data_ptr<float>();
  at::Tensor grad_weight = summed_over_rows(rows, dim, sum.options(), [&](int64_t begin, int64_t end, float* sums) {
    const int64_t at = begin * dim;
    kernel(g + at, other ? other + at : nullptr, x + at, f + begin, w, out + at, sums, end - begin, dim);
  });
  return {grad, grad_weight};
}

struct Rope {
  const int64_t* positions;
  const float *cos, *sin, *q_weight, *k_weight;
  int64_t rows, width, dim;

  Rope(const at::Tensor& x, const at::Tensor& positions_, const at::Tensor& cos_, const at::Tensor& sin_,
       int64_t q_heads, int64_t heads, const std::optional<at::Tensor>& q_norm,
       const std::optional<at::Tensor>& k_norm) {
    RLK_CHECK_TENSOR(x, at::kFloat, 2);
    RLK_CHECK_TENSOR(positions_, at::kLong, 1);
    RLK_CHECK_TENSOR(cos_, at::kFloat, 2);
    RLK_CHECK_TENSOR(sin_, at::kFloat, 2);
    rows = x.size(0);
    width = x.size(1);
    dim = cos_.size(1);
    TORCH_CHECK_VALUE(positions_.size(0) == rows && sin_.sizes() == cos_.sizes() && dim % 2 == 0,
                      "positions must have one number per row, cos and sin one shape of even width");
    TORCH_CHECK_VALUE(0 <= q_heads && q_heads <= heads && heads * dim <= width, heads, " heads of ", dim,
                      " numbers do not fit into rows of ", width);
    TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value(), "q_weight and k_weight come together");
    for (const auto& weight : {q_norm, k_norm})
      if (weight) {
        RLK_CHECK_TENSOR((*weight), at::kFloat, 1);
        TORCH_CHECK_VALUE(weight->size(0) == dim, "norm weights must have ", dim, " numbers, got ", weight->size(0));
      }
    positions = positions_.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i)
      TORCH_CHECK_VALUE(positions[i] >= 0 && positions[i] < cos_.size(0), "positions must be between 0 and ",
                        cos_.size(0) - 1, ", got ", positions[i]);
    cos = cos_.const_data_ptr<float>();
    sin = sin_.const_data_ptr<float>();
    q_weight = data(q_norm);
    k_weight = data(k_norm);
  }
};

at::Tensor rope(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin,
                int64_t q_heads, int64_t heads, const std::optional<at::Tensor>& q_weight,
                const std::optional<at::Tensor>& k_weight, double eps) {
  const Rope in(x, positions, cos, sin, q_heads, heads, q_weight, k_weight);
  at::Tensor out = at::empty_like(x);
  const auto kernel = RLK_DISPATCH(rope);
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(in.rows, in.width, [&](int64_t begin, int64_t end) {
    kernel(from + begin * in.width, in.positions + begin, in.cos, in.sin, in.q_weight, in.k_weight, float(eps),
           to + begin * in.width, end - begin, in.width, q_heads, heads, in.dim);
  });
  return out;
}

// -> gradients of x, and of q_weight and k_weight [2, d] (zeros without them)
std::tuple<at::Tensor, at::Tensor> rope_backward(const at::Tensor& grad_out, const at::Tensor& x,
                                                 const at::Tensor& positions, const at::Tensor& cos,
                                                 const at::Tensor& sin, int64_t q_heads, int64_t heads,
                                                 const std::optional<at::Tensor>& q_weight,
                                                 const std::optional<at::Tensor>& k_weight, double eps) {
  RLK_CHECK_TENSOR(grad_out, at::kFloat, 2);
  const Rope in(x, positions, cos, sin, q_heads, heads, q_weight, k_weight);
  TORCH_CHECK(grad_out.sizes() == x.sizes(), "the gradient must have the shape of x");
  at::Tensor grad = at::empty_like(x);
  const auto kernel = RLK_DISPATCH(rope_backward);
  const float *g = grad_out.const_data_ptr<float>(), *from = x.const_data_ptr<float>();
  float* to = grad.mutable_data_ptr<float>();
  // the third row of the sums is the kernel's scratch
  const auto work = [&](int64_t begin, int64_t end, float* sums) {
    const int64_t at = begin * in.width;
    kernel(g + at, from + at, in.positions + begin, in.cos, in.sin, in.q_weight, in.k_weight, float(eps), to + at,
           sums, sums + 2 * in.dim, end - begin, in.width, q_heads, heads, in.dim);
  };
  const at::Tensor sums = summed_over_rows(in.rows, 3 * in.dim, x.options(), work);
  return {grad, sums.view({3, in.dim}).narrow(0, 0, 2)};
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

at::Tensor silu_mul_backward(const at::Tensor& grad_out, const at::Tensor& gate_up) {
  RLK_CHECK_TENSOR(grad_out, at::kFloat, 2);
  RLK_CHECK_TENSOR(gate_up, at::kFloat, 2);
  const int64_t rows = grad_out.size(0), dim = grad_out.size(1);
  TORCH_CHECK(gate_up.size(0) == rows && gate_up.size(1) == 2 * dim, "gate_up must be twice as wide as the gradient");
  at::Tensor grad = at::empty_like(gate_up);
  const auto kernel = RLK_DISPATCH(silu_mul_backward);
  const float *g = grad_out.const_data_ptr<float>(), *in = gate_up.const_data_ptr<float>();
  float* out = grad.mutable_data_ptr<float>();
  for_rows(rows, 8 * dim, [&](int64_t begin, int64_t end) {
    kernel(g + begin * dim, in + begin * 2 * dim, out + begin * 2 * dim, end - begin, dim);
  });
  return grad;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("add_rms_norm(Tensor residual, Tensor? x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, Tensor factor, Tensor weight) -> "
      "(Tensor, Tensor)");
  m.def(
      "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, int q_heads, int heads, Tensor? q_weight, "
      "Tensor? k_weight, float eps) -> Tensor");
  m.def(
      "rope_backward(Tensor grad_out, Tensor x, Tensor positions, Tensor cos, Tensor sin, int q_heads, int heads, "
      "Tensor? q_weight, Tensor? k_weight, float eps) -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("silu_mul_backward(Tensor grad_out, Tensor gate_up) -> Tensor");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("add_rms_norm", &add_rms_norm);
  m.impl("rms_norm_backward", &rms_norm_backward);
  m.impl("rope", &rope);
  m.impl("rope_backward", &rope_backward);
  m.impl("silu_mul", &silu_mul);
  m.impl("silu_mul_backward", &silu_mul_backward);
}
