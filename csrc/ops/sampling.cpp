// Schemas and CPU registration of the sampling ops; the public functions are in rlkernels/sampling.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "check.h"
#include "row_sampler.h"
#include "torch_threads.h"

RLK_DECLARE_KERNEL(void, keyed_uniform, uint64_t, const int64_t*, const int64_t*, float*, int64_t)

namespace {

at::Tensor keyed_uniform(int64_t seed, const at::Tensor& sample_ids, const at::Tensor& positions) {
  rlk::check_tensor(sample_ids, "sample_ids", at::kLong, 1);
  rlk::check_tensor(positions, "positions", at::kLong, 1);
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

// The integer weights of z <= 0, for tests.
at::Tensor token_weights(const at::Tensor& z) {
  rlk::check_tensor(z, "z", at::kFloat, 1);
  at::Tensor out = at::empty(z.sizes(), z.options().dtype(at::kLong));
  RLK_DISPATCH(logit_weights)(z.const_data_ptr(), false, z.numel(), 0.0f, 1.0f, out.mutable_data_ptr<int64_t>());
  return out;
}

// Raw views of what both sampling ops take; settings are per row or per sequence.
struct Rows {
  const char* data;
  int64_t vocabulary, row_bytes;
  bool bf16;
  const float *uniforms, *temperature, *top_p;
  const int64_t* top_k;

  Rows(const at::Tensor& logits, const at::Tensor& uniforms_, const at::Tensor& temperature_,
       const at::Tensor& top_p_, const at::Tensor& top_k_, int64_t settings)
      : data(static_cast<const char*>(logits.const_data_ptr())),
        vocabulary(logits.dim() == 2 ? logits.size(1) : 0),
        row_bytes(vocabulary * logits.element_size()),
        bf16(logits.scalar_type() == at::kBFloat16) {
    rlk::check_tensor(logits, "logits", bf16 ? at::kBFloat16 : at::kFloat, 2);
    rlk::check_tensor(uniforms_, "uniforms", at::kFloat, 1);
    rlk::check_tensor(temperature_, "temperature", at::kFloat, 1);
    rlk::check_tensor(top_p_, "top_p", at::kFloat, 1);
    rlk::check_tensor(top_k_, "top_k", at::kLong, 1);
    TORCH_CHECK(0 < vocabulary && vocabulary <= rlk::kMaxVocabulary, "the vocabulary must be between 1 and ",
                rlk::kMaxVocabulary, ", got ", vocabulary);
    TORCH_CHECK(uniforms_.numel() == logits.size(0), "uniforms must have one number per row");
    for (const at::Tensor* t : {&temperature_, &top_p_, &top_k_})
      TORCH_CHECK(t->numel() == settings, "temperature, top_p and top_k must have ", settings, " entries");
    uniforms = uniforms_.const_data_ptr<float>();
    temperature = temperature_.const_data_ptr<float>();
    top_p = top_p_.const_data_ptr<float>();
    top_k = top_k_.const_data_ptr<int64_t>();
  }

  rlk::Drawn draw(rlk::RowSampler& sampler, int64_t row, int64_t setting) const {
    return sampler.draw(data + row * row_bytes, uniforms[row],
                        {temperature[setting], std::max(top_p[setting], 0.0f), std::max<int64_t>(top_k[setting], 0)});
  }

  // Rows per task: enough work to pay for a thread.
  int64_t grain() const { return std::max<int64_t>(1, 16384 / vocabulary); }
};

std::tuple<at::Tensor, at::Tensor> sample_tokens(const at::Tensor& logits, const at::Tensor& uniforms,
                                                 const at::Tensor& temperature, const at::Tensor& top_p,
                                                 const at::Tensor& top_k) {
  const Rows rows(logits, uniforms, temperature, top_p, top_k, uniforms.numel());
  at::Tensor ids = at::empty(uniforms.sizes(), uniforms.options().dtype(at::kLong));
  at::Tensor logprobs = at::empty(uniforms.sizes(), uniforms.options());
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float* logprob = logprobs.mutable_data_ptr<float>();
  const auto sampler_of = [&] { return rlk::RowSampler(rows.vocabulary, rows.bf16); };
  rlk::for_ranges(rlk::torch_threads(), ids.numel(), rows.grain(), sampler_of, [&](int64_t begin, int64_t end, auto& sampler) {
    for (int64_t i = begin; i < end; ++i) {
      const rlk::Drawn drawn = rows.draw(sampler, i, i);
      id[i] = drawn.id;
      logprob[i] = drawn.logprob;
    }
  });
  return {ids, logprobs};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> verify_drafts(const at::Tensor& logits, const at::Tensor& drafts,
                                                             const at::Tensor& starts, const at::Tensor& uniforms,
                                                             const at::Tensor& temperature, const at::Tensor& top_p,
                                                             const at::Tensor& top_k) {
  rlk::check_tensor(drafts, "drafts", at::kLong, 1);
  rlk::check_tensor(starts, "starts", at::kLong, 1);
  TORCH_CHECK(starts.numel() >= 1, "starts must not be empty");
  const int64_t sequences = starts.numel() - 1;
  const Rows rows(logits, uniforms, temperature, top_p, top_k, sequences);
  const int64_t* start = starts.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < sequences; ++b)
    TORCH_CHECK(start[b] < start[b + 1], "starts must ascend: each sequence has at least one row");
  TORCH_CHECK(start[0] == 0 && start[sequences] == uniforms.numel(), "starts must run from 0 to the number of rows");
  TORCH_CHECK(drafts.numel() == uniforms.numel() - sequences, "drafts must have one token less per sequence than rows");

  at::Tensor accepted = at::empty({sequences}, starts.options());
  at::Tensor ids = at::empty(uniforms.sizes(), starts.options());
  at::Tensor logprobs = at::empty(uniforms.sizes(), uniforms.options());
  const int64_t* draft = drafts.const_data_ptr<int64_t>();
  int64_t* taken = accepted.mutable_data_ptr<int64_t>();
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float* logprob = logprobs.mutable_data_ptr<float>();
  std::fill_n(id, ids.numel(), -1);
  std::fill_n(logprob, ids.numel(), 0.0f);
  const auto sampler_of = [&] { return rlk::RowSampler(rows.vocabulary, rows.bf16); };
  rlk::for_ranges(rlk::torch_threads(), sequences, rows.grain(), sampler_of, [&](int64_t begin, int64_t end, auto& sampler) {
    for (int64_t b = begin; b < end; ++b) {
      int64_t row = start[b];
      for (;; ++row) {  // rows after the first miss are never read
        const rlk::Drawn drawn = rows.draw(sampler, row, b);
        id[row] = drawn.id;
        logprob[row] = drawn.logprob;
        if (row + 1 == start[b + 1] || drawn.id != draft[row - b]) break;
      }
      taken[b] = row - start[b];
    }
  });
  return {accepted, ids, logprobs};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("keyed_uniform(int seed, Tensor sample_ids, Tensor positions) -> Tensor");
  m.def("token_weights(Tensor z) -> Tensor");
  m.def("sample_tokens(Tensor logits, Tensor uniforms, Tensor temperature, Tensor top_p, Tensor top_k) -> (Tensor, Tensor)");
  m.def(
      "verify_drafts(Tensor logits, Tensor drafts, Tensor starts, Tensor uniforms, Tensor temperature, Tensor top_p, "
      "Tensor top_k) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("keyed_uniform", &keyed_uniform);
  m.impl("token_weights", &token_weights);
  m.impl("sample_tokens", &sample_tokens);
  m.impl("verify_drafts", &verify_drafts);
}
