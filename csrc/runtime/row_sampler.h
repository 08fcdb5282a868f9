// Draws a token from one row of logits; no torch. See rlkernels.sample_tokens for the definition.
#pragma once
#include <cstdint>
#include <vector>

namespace rlk {

struct SamplingSettings {
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  int64_t top_k;      // 0: off
};

struct Drawn {
  int64_t id;     // -1 when the row has no distribution
  float logprob;  // NaN then
};

// Holds scratch memory for rows of one vocabulary; one per thread.
class RowSampler {
 public:
  RowSampler(int64_t vocabulary, bool bf16);
  Drawn draw(const void* row, float uniform, const SamplingSettings& settings);

 private:
  struct Ranked {
    uint64_t rank;  // larger logits first, then lower ids
    int64_t weight;
  };
  const void* at(const void* row, int64_t i) const;
  float logit(const void* row, int64_t i) const;
  int64_t first_of(const void* row, float value) const;
  void collect(const void* row, float cut);
  void collect_top_k(const void* row, int64_t k);
  void collect_nucleus(const void* row, float top_p, float temperature);
  int64_t nucleus_weight_and_cut(int64_t needed, uint64_t& cut);
  Drawn draw_whole(const void* row, float uniform);
  Drawn draw_filtered(const void* row, float uniform, const SamplingSettings& settings);
  Drawn finish(int64_t id, float logit, int64_t total) const;

  const int64_t vocabulary_;
  const bool bf16_;
  float largest_ = 0, inverse_ = 1;
  int64_t found_ = 0;               // candidates
  std::vector<float> maxima_;       // of groups of logits
  std::vector<int64_t> sums_;       // weights of blocks of 1024
  std::vector<int64_t> weights_;    // of one block, or of the candidates
  std::vector<int32_t> ids_;        // of the candidates, ascending
  std::vector<float> logits_;       // of the candidates
  std::vector<Ranked> ranked_;
};

}  // namespace rlk
