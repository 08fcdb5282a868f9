// Schemas and CPU registration of token_logprobs; the public function is in rlkernels/logprobs.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "check.h"
#include "dispatch.h"
#include "torch_threads.h"

RLK_DECLARE_KERNEL(void, token_logprobs, const void*, bool, const int64_t*, int64_t, int64_t, int64_t, float, float*,
                   float*, float*)
RLK_DECLARE_KERNEL(void, token_logprobs_backward, const void*, bool, const int64_t*, int64_t, int64_t, int64_t, float,
                   const float*, const float*, const float*, const float*, void*)

namespace {

struct Rows {  // of logits, of the whole vocabulary or, with a start, of its tokens from there on
  const char* data;
  const int64_t* ids;
  int64_t start, rows, vocabulary, row_bytes;
  bool bf16;

  Rows(const at::Tensor& logits, const at::Tensor& ids_, std::optional<int64_t> start_)
      : start(start_.value_or(0)), bf16(logits.scalar_type() == at::kBFloat16) {
    rlk::check_tensor(logits, "logits", bf16 ? at::kBFloat16 : at::kFloat, 2);
    rlk::check_tensor(ids_, "ids", at::kLong, 1);
    rows = logits.size(0);
    vocabulary = logits.size(1);
    TORCH_CHECK(ids_.numel() == rows && vocabulary > 0, "ids must have one entry per row, and a row one logit at least");
    data = static_cast<const char*>(logits.const_data_ptr());
    row_bytes = vocabulary * logits.element_size();
    ids = ids_.const_data_ptr<int64_t>();
    for (int64_t r = 0; r < rows && !start_; ++r)
      TORCH_CHECK_VALUE(0 <= ids[r] && ids[r] < vocabulary, "ids must be between 0 and ", vocabulary - 1, ", got ",
                        ids[r]);
  }
  int64_t grain() const { return std::max<int64_t>(1, 16384 / vocabulary); }
};

// -> logprobs [N], entropies [N] (or [0]), stats [N, 2] for the backward pass
std::tuple<at::Tensor, at::Tensor, at::Tensor> token_logprobs(const at::Tensor& logits, const at::Tensor& ids,
                                                              double temperature, bool with_entropy,
                                                              std::optional<int64_t> start) {
  const Rows in(logits, ids, start);
  const auto options = logits.options().dtype(at::kFloat);
  at::Tensor logprobs = at::empty({in.rows}, options), entropies = at::empty({with_entropy ? in.rows : 0}, options);
  at::Tensor stats = at::empty({in.rows, 2}, options);
  const auto kernel = RLK_DISPATCH(token_logprobs);
  float* logprob = logprobs.mutable_data_ptr<float>();
  float* entropy = with_entropy ? entropies.mutable_data_ptr<float>() : nullptr;
  float* stat = stats.mutable_data_ptr<float>();
  rlk::for_ranges(rlk::torch_threads(), in.rows, in.grain(), [&](int64_t begin, int64_t end) {
    kernel(in.data + begin * in.row_bytes, in.bf16, in.ids + begin, in.start, end - begin, in.vocabulary,
           float(1 / temperature), logprob + begin, entropy ? entropy + begin : nullptr, stat + 2 * begin);
  });
  return {logprobs, entropies, stats};
}

at::Tensor token_logprobs_backward(const at::Tensor& logits, const at::Tensor& ids, const at::Tensor& stats,
                                   const at::Tensor& entropies, const at::Tensor& grad_logprobs,
                                   const at::Tensor& grad_entropies, double temperature,
                                   std::optional<int64_t> start) {
  const Rows in(logits, ids, start);
  rlk::check_tensor(entropies, "entropies", at::kFloat, 1);
  rlk::check_tensor(grad_logprobs, "grad_logprobs", at::kFloat, 1);
  rlk::check_tensor(grad_entropies, "grad_entropies", at::kFloat, 1);
  rlk::check_tensor(stats, "stats", at::kFloat, 2);
  TORCH_CHECK(stats.numel() == 2 * in.rows && grad_logprobs.numel() == in.rows &&
                  entropies.numel() == grad_entropies.numel() &&
                  (entropies.numel() == 0 || entropies.numel() == in.rows),
              "stats, entropies and gradients must have one entry per row");
  at::Tensor grad = at::empty_like(logits);
  const bool with_entropy = entropies.numel() > 0;
  const float* entropy = with_entropy ? entropies.const_data_ptr<float>() : nullptr;
  const float* grad_entropy = with_entropy ? grad_entropies.const_data_ptr<float>() : nullptr;
  const float* grad_logprob = grad_logprobs.const_data_ptr<float>();
  const float* stat = stats.const_data_ptr<float>();
  char* out = static_cast<char*>(grad.mutable_data_ptr());
  const auto kernel = RLK_DISPATCH(token_logprobs_backward);
  rlk::for_ranges(rlk::torch_threads(), in.rows, in.grain(), [&](int64_t begin, int64_t end) {
    kernel(in.data + begin * in.row_bytes, in.bf16, in.ids + begin, in.start, end - begin, in.vocabulary,
           float(1 / temperature), stat + 2 * begin, entropy ? entropy + begin : nullptr, grad_logprob + begin,
           entropy ? grad_entropy + begin : nullptr, out + begin * in.row_bytes);
  });
  return grad;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def(
      "token_logprobs(Tensor logits, Tensor ids, float temperature, bool with_entropy, int? start=None) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "token_logprobs_backward(Tensor logits, Tensor ids, Tensor stats, Tensor entropies, Tensor grad_logprobs, "
      "Tensor grad_entropies, float temperature, int? start=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("token_logprobs", &token_logprobs);
  m.impl("token_logprobs_backward", &token_logprobs_backward);
}
