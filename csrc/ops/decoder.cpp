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

RLK_DECLARE_KERNEL(void, add_rms_norm, bool, const void*, const void*, const float*, float, void*, void*, float*,
                   int64_t, int64_t)
RLK_DECLARE_KERNEL(void, rms_norm_backward, bool, const void*, const void*, const void*, const float*, const float*,
                   void*, float*, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, rope, bool, const void*, const int64_t*, const float*, const float*, const float*,
                   const float*, float, void*, int64_t, int64_t, int64_t, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, rope_backward, bool, const void*, const void*, const int64_t*, const float*, const float*,
                   const float*, const float*, float, void*, float*, int64_t, int64_t, int64_t, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, silu_mul, bool, const void*, void*, int64_t, int64_t)
RLK_DECLARE_KERNEL(void, silu_mul_backward, bool, const void*, const void*, void*, int64_t, int64_t)

namespace {

constexpr int64_t kGrain = 16384;  // numbers per thread

template <class F>
void for_rows(int64_t rows, int64_t width, const F& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), work);
}

// Rows [T, D] of float32 or bfloat16, which a kernel writes or reads from some row on.
struct Rows {
  char* data;
  bool is_bf16;
  int64_t row_bytes;

  explicit Rows(const at::Tensor& t)
      : data(t.numel() ? static_cast<char*>(const_cast<void*>(t.const_data_ptr())) : nullptr),
        is_bf16(t.scalar_type() == at::kBFloat16),
        row_bytes(t.size(1) * t.element_size()) {}
  explicit Rows(const std::optional<at::Tensor>& t) : data(nullptr), is_bf16(false), row_bytes(0) {
    if (t) *this = Rows(*t);
  }

  void* at(int64_t row) const { return data ? data + row * row_bytes : nullptr; }
};

// Of the tensor that says what the others must be.
at::ScalarType checked_type(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, name,
                    " must be float32 or bfloat16, got ", t.scalar_type());
  return t.scalar_type();
}

// Work on chunks of rows, each with a row of its own of `sums`, so that sums over rows do not depend on the threads.
constexpr int64_t kChunk = 64;

template <class F>
at::Tensor summed_over_rows(int64_t rows, int64_t width, const F& work) {
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  const at::Tensor sums = at::zeros({chunks, width}, at::kFloat);
  float* data = sums.mutable_data_ptr<float>();
  for_rows(chunks, kChunk * width, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) work(c * kChunk, std::min(rows, (c + 1) * kChunk), data + c * width);
  });
  return sums.sum(0);
}

// -> residual + x ([0] without x), its norm, and one over the root mean square of each row (float32)
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& residual,
                                                            const std::optional<at::Tensor>& x,
                                                            const at::Tensor& weight, double eps) {
  const at::ScalarType type = checked_type(residual, "residual");
  rlk::check_tensor(residual, "residual", type, 2);
  rlk::check_tensor(weight, "weight", type, 1);
  const int64_t rows = residual.size(0), dim = residual.size(1);
  TORCH_CHECK_VALUE(weight.size(0) == dim, "weight must have ", dim, " numbers, got ", weight.size(0));
  if (x) {
    rlk::check_tensor(*x, "x", type, 2);
    TORCH_CHECK_VALUE(x->sizes() == residual.sizes(), "x must have shape ", residual.sizes(), ", got ", x->sizes());
  }
  const at::Tensor sum = x ? at::empty_like(residual) : at::empty({0, dim}, residual.options());
  const at::Tensor out = at::empty_like(residual), factor = at::empty({rows}, at::kFloat);
  const at::Tensor exact = weight.to(at::kFloat);
  const auto kernel = RLK_DISPATCH(add_rms_norm);
  const Rows r(residual), added(x), s(sum), o(out);
  const float* w = exact.const_data_ptr<float>();
  float* f = factor.mutable_data_ptr<float>();
  for_rows(rows, dim, [&](int64_t begin, int64_t end) {
    kernel(r.is_bf16, r.at(begin), added.at(begin), w, float(eps), s.at(begin), o.at(begin), f + begin, end - begin,
           dim);
  });
  return {sum, out, factor};
}

// -> gradients of the sum (and so of both of its parts) and of the weight
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_out,
                                                     const std::optional<at::Tensor>& grad_sum, const at::Tensor& sum,
                                                     const at::Tensor& factor, const at::Tensor& weight) {
  const at::ScalarType type = checked_type(sum, "sum");
  rlk::check_tensor(sum, "sum", type, 2);
  rlk::check_tensor(grad_out, "grad_out", type, 2);
  rlk::check_tensor(factor, "factor", at::kFloat, 1);
  rlk::check_tensor(weight, "weight", type, 1);
  const int64_t rows = sum.size(0), dim = sum.size(1);
  TORCH_CHECK(grad_out.sizes() == sum.sizes() && factor.size(0) == rows && weight.size(0) == dim &&
                  (!grad_sum || grad_sum->sizes() == sum.sizes()),
              "gradients must have the shape of the sum, with one factor per row and one weight per column");
  if (grad_sum) rlk::check_tensor(*grad_sum, "grad_sum", type, 2);
  const at::Tensor grad = at::empty_like(sum), exact = weight.to(at::kFloat);
  const auto kernel = RLK_DISPATCH(rms_norm_backward);
  const Rows g(grad_out), other(grad_sum), x(sum), out(grad);
  const float *f = factor.const_data_ptr<float>(), *w = exact.const_data_ptr<float>();
  const at::Tensor grad_weight = summed_over_rows(rows, dim, [&](int64_t begin, int64_t end, float* sums) {
    kernel(x.is_bf16, g.at(begin), other.at(begin), x.at(begin), f + begin, w, out.at(begin), sums, end - begin, dim);
  });
  return {grad, grad_weight.to(type)};
}

// A vector or table of the type of x, or of float32, as float32.
at::Tensor exact(const at::Tensor& t, at::ScalarType type, int64_t rank, const char* name) {
  TORCH_CHECK((t.scalar_type() == type || t.scalar_type() == at::kFloat) && t.dim() == rank && t.is_contiguous() &&
                  t.is_cpu(),
              name, " must be a contiguous ", type, " or Float CPU tensor of rank ", rank, ", got ", t.scalar_type(),
              " ", t.sizes(), " on ", t.device());
  return t.to(at::kFloat);
}

struct Rope {
  const int64_t* positions;
  at::Tensor tables[4];  // float32: what the next pointers are into
  const float *cos, *sin, *q_weight, *k_weight;
  at::ScalarType type;
  int64_t rows, width, dim;

  Rope(const at::Tensor& x, const at::Tensor& positions_, const at::Tensor& cos_, const at::Tensor& sin_,
       int64_t q_heads, int64_t heads, const std::optional<at::Tensor>& q_norm,
       const std::optional<at::Tensor>& k_norm) {
    type = checked_type(x, "x");
    rlk::check_tensor(x, "x", type, 2);
    rlk::check_tensor(positions_, "positions", at::kLong, 1);
    tables[0] = exact(cos_, type, 2, "cos");
    tables[1] = exact(sin_, type, 2, "sin");
    rows = x.size(0);
    width = x.size(1);
    dim = cos_.size(1);
    TORCH_CHECK_VALUE(positions_.size(0) == rows && sin_.sizes() == cos_.sizes() && dim > 0 && dim % 2 == 0,
                      "positions must have one number per row, cos and sin one shape of even width above 0");
    TORCH_CHECK_VALUE(0 <= q_heads && q_heads <= heads && heads <= width / dim, heads, " heads of ", dim,
                      " numbers do not fit into rows of ", width);
    TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value(), "q_weight and k_weight come together");
    if (q_norm) {
      tables[2] = exact(*q_norm, type, 1, "q_weight");
      tables[3] = exact(*k_norm, type, 1, "k_weight");
      for (const auto& weight : {q_norm, k_norm})
        TORCH_CHECK_VALUE(weight->size(0) == dim, "norm weights must have ", dim, " numbers, got ", weight->size(0));
    }
    positions = positions_.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i)
      TORCH_CHECK_VALUE(positions[i] >= 0 && positions[i] < cos_.size(0), "positions must be between 0 and ",
                        cos_.size(0) - 1, ", got ", positions[i]);
    const auto data = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
    cos = data(tables[0]);
    sin = data(tables[1]);
    q_weight = data(tables[2]);
    k_weight = data(tables[3]);
  }
};

at::Tensor rope(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin,
                int64_t q_heads, int64_t heads, const std::optional<at::Tensor>& q_weight,
                const std::optional<at::Tensor>& k_weight, double eps) {
  const Rope in(x, positions, cos, sin, q_heads, heads, q_weight, k_weight);
  const at::Tensor out = at::empty_like(x);
  const auto kernel = RLK_DISPATCH(rope);
  const Rows from(x), to(out);
  for_rows(in.rows, in.width, [&](int64_t begin, int64_t end) {
    kernel(from.is_bf16, from.at(begin), in.positions + begin, in.cos, in.sin, in.q_weight, in.k_weight, float(eps),
           to.at(begin), end - begin, in.width, q_heads, heads, in.dim);
  });
  return out;
}

// -> gradients of x, and of q_weight and k_weight [2, d] (float32, zeros without them)
std::tuple<at::Tensor, at::Tensor> rope_backward(const at::Tensor& grad_out, const at::Tensor& x,
                                                 const at::Tensor& positions, const at::Tensor& cos,
                                                 const at::Tensor& sin, int64_t q_heads, int64_t heads,
                                                 const std::optional<at::Tensor>& q_weight,
                                                 const std::optional<at::Tensor>& k_weight, double eps) {
  const Rope in(x, positions, cos, sin, q_heads, heads, q_weight, k_weight);
  rlk::check_tensor(grad_out, "grad_out", in.type, 2);
  TORCH_CHECK(grad_out.sizes() == x.sizes(), "the gradient must have the shape of x");
  const at::Tensor grad = at::empty_like(x);
  const auto kernel = RLK_DISPATCH(rope_backward);
  const Rows g(grad_out), from(x), to(grad);
  const at::Tensor sums = summed_over_rows(in.rows, 2 * in.dim, [&](int64_t begin, int64_t end, float* sums) {
    kernel(from.is_bf16, g.at(begin), from.at(begin), in.positions + begin, in.cos, in.sin, in.q_weight, in.k_weight,
           float(eps), to.at(begin), sums, end - begin, in.width, q_heads, heads, in.dim);
  });
  return {grad, sums.view({2, in.dim})};
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  rlk::check_tensor(gate_up, "gate_up", checked_type(gate_up, "gate_up"), 2);
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up must have an even width, got ", gate_up.size(1));
  const int64_t rows = gate_up.size(0), dim = gate_up.size(1) / 2;
  const at::Tensor out = at::empty({rows, dim}, gate_up.options());
  const auto kernel = RLK_DISPATCH(silu_mul);
  const Rows in(gate_up), o(out);
  for_rows(rows, 4 * dim, [&](int64_t begin, int64_t end) {
    kernel(in.is_bf16, in.at(begin), o.at(begin), end - begin, dim);
  });
  return out;
}

at::Tensor silu_mul_backward(const at::Tensor& grad_out, const at::Tensor& gate_up) {
  const at::ScalarType type = checked_type(gate_up, "gate_up");
  rlk::check_tensor(grad_out, "grad_out", type, 2);
  rlk::check_tensor(gate_up, "gate_up", type, 2);
  const int64_t rows = grad_out.size(0), dim = grad_out.size(1);
  TORCH_CHECK(gate_up.size(0) == rows && gate_up.size(1) == 2 * dim, "gate_up must be twice as wide as the gradient");
  const at::Tensor grad = at::empty_like(gate_up);
  const auto kernel = RLK_DISPATCH(silu_mul_backward);
  const Rows g(grad_out), in(gate_up), out(grad);
  for_rows(rows, 8 * dim, [&](int64_t begin, int64_t end) {
    kernel(in.is_bf16, g.at(begin), in.at(begin), out.at(begin), end - begin, dim);
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
