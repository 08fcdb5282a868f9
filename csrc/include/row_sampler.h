// Draws a token from one row of logits. See rlkernels.sample_tokens for the definition.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "token_weights.h"

// csrc/cpu/sample_tokens.cpp
RLK_DECLARE_KERNEL(bool, logit_maxima, const void*, bool, int64_t, float*)
RLK_DECLARE_KERNEL(void, logit_weights, const void*, bool, int64_t, float, float, int64_t*)
RLK_DECLARE_KERNEL(void, logit_weight_sums, const void*, bool, int64_t, float, float, int64_t*)
RLK_DECLARE_KERNEL(int64_t, collect_logits, const void*, bool, int64_t, float, int32_t*, float*)

namespace rlk {

struct SamplingSettings {
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  int64_t top_k;      // 0: off
};

struct Drawn {
  int64_t id;     // -1 when the row has no distribution, or wrong settings
  float logprob;  // NaN then
};

// Holds scratch memory for rows of one vocabulary; one per thread.
class RowSampler {
 public:
  RowSampler(int64_t vocabulary, bool bf16);
  Drawn draw(const void* row, float uniform, const SamplingSettings& settings);

 private:
  static constexpr int64_t kBlock = 1024;
  static constexpr int64_t kGroups = 16;  // groups of logits per block, see logit_maxima
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

  // Orders tokens by logit, then by lower id; -0 equals 0.
  static uint64_t rank_of(float logit, int32_t id) {
    const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);
    const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(ascending) << 32 | uint32_t(~id);
  }

  struct Ranked {
    uint64_t rank;  // larger logits first, then lower ids
    int64_t weight;
  };
  const void* at(const void* row, int64_t i) const;
  float logit(const void* row, int64_t i) const;
  int64_t first_of(const void* row, float value) const;
  void collect(const void* row, float cut);
  void collect_top_k(const void* row, int64_t k);
  void collect_nucleus(const void* row, float top_p);
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

inline RowSampler::RowSampler(int64_t vocabulary, bool bf16)
    : vocabulary_(vocabulary),
      bf16_(bf16),
      maxima_(2 * kGroups * blocks_of(vocabulary)),  // and a copy to select from
      sums_(blocks_of(vocabulary)),
      weights_(kBlock) {}

inline const void* RowSampler::at(const void* row, int64_t i) const {
  return static_cast<const char*>(row) + i * (bf16_ ? 2 : 4);
}

inline float RowSampler::logit(const void* row, int64_t i) const {
  if (!bf16_) return *static_cast<const float*>(at(row, i));
  return std::bit_cast<float>(uint32_t(*static_cast<const uint16_t*>(at(row, i))) << 16);
}

inline Drawn RowSampler::draw(const void* row, float uniform, const SamplingSettings& settings) {
  const bool nan = RLK_DISPATCH(logit_maxima)(row, bf16_, vocabulary_, maxima_.data());
  largest_ = *std::max_element(maxima_.begin(), maxima_.begin() + kGroups * sums_.size());
  if (nan || !std::isfinite(largest_) || !(uniform >= 0 && uniform < 1) || !(settings.temperature >= 0))
    return {-1, std::numeric_limits<float>::quiet_NaN()};
  if (settings.temperature == 0) return {first_of(row, largest_), 0.0f};
  inverse_ = std::min(1.0f / settings.temperature, std::numeric_limits<float>::max());
  const bool all = settings.top_p >= 1 && (settings.top_k == 0 || settings.top_k >= vocabulary_);
  return all ? draw_whole(row, uniform) : draw_filtered(row, uniform, settings);
}

// First id whose logit equals `value`, which the maxima hold.
inline int64_t RowSampler::first_of(const void* row, float value) const {
  for (size_t block = 0; block < sums_.size(); ++block) {
    const float* groups = maxima_.data() + block * kGroups;
    if (std::find(groups, groups + kGroups, value) == groups + kGroups) continue;
    int64_t i = block * kBlock;
    while (logit(row, i) != value) ++i;
    return i;
  }
  return -1;
}

inline Drawn RowSampler::finish(int64_t id, float logit, int64_t total) const {
  const float z = (logit - largest_) * inverse_;
  return {id, float(double(z) - std::log(std::ldexp(double(total), -kWeightBits)))};
}

inline Drawn RowSampler::draw_whole(const void* row, float uniform) {
  RLK_DISPATCH(logit_weight_sums)(row, bf16_, vocabulary_, largest_, inverse_, sums_.data());
  int64_t total = 0;
  for (int64_t sum : sums_) total += sum;
  int64_t left = scaled_share(uniform, total);  // the first token whose cumulative weight exceeds it
  size_t block = 0;
  while (left >= sums_[block]) left -= sums_[block++];
  const int64_t begin = block * kBlock, count = std::min(kBlock, vocabulary_ - begin);
  RLK_DISPATCH(logit_weights)(at(row, begin), bf16_, count, largest_, inverse_, weights_.data());
  int64_t i = 0;
  while (left >= weights_[i]) left -= weights_[i++];
  return finish(begin + i, logit(row, begin + i), total);
}

inline void RowSampler::collect(const void* row, float cut) {
  ids_.resize(vocabulary_ + 1);
  logits_.resize(vocabulary_ + 1);
  found_ = RLK_DISPATCH(collect_logits)(row, bf16_, vocabulary_, cut, ids_.data(), logits_.data());
  weights_.resize(std::max(found_, kBlock));
  RLK_DISPATCH(logit_weights)(logits_.data(), false, found_, largest_, inverse_, weights_.data());
}

// Candidates that hold the k largest: the k-th largest of the groups' maxima is a lower bound of the k-th largest.
inline void RowSampler::collect_top_k(const void* row, int64_t k) {
  const int64_t groups = kGroups * sums_.size();
  float cut = -kInfinity;
  if (k <= groups) {
    const auto copy = maxima_.begin() + groups;
    std::copy(maxima_.begin(), copy, copy);
    std::nth_element(copy, copy + (k - 1), maxima_.end(), std::greater<float>());
    cut = copy[k - 1];
  }
  collect(row, cut);
}

// Candidates that hold the nucleus. Tokens below (1 - top_p) total / V cannot belong to it: together they weigh less
// than what is left out. A 64 times higher cut is tried first, and is right when enough weight lies above it.
inline void RowSampler::collect_nucleus(const void* row, float top_p) {
  RLK_DISPATCH(logit_weight_sums)(row, bf16_, vocabulary_, largest_, inverse_, sums_.data());
  int64_t total = 0;
  for (int64_t sum : sums_) total += sum;
  const int64_t needed = std::max<int64_t>(scaled_share(top_p, total), 1);
  for (double tighter : {64.0, 1.0}) {
    const double weight = tighter * double(total - needed) / double(vocabulary_);
    // a hundredth lower in log-weight than needed, far more than rounding can move it
    const double z = std::log(std::ldexp(weight, -kWeightBits)) - 0.01 - 1e-5 * std::abs(double(largest_) * inverse_);
    if (!(z < 0)) continue;
    collect(row, float(double(largest_) + z / double(inverse_)));
    int64_t held = 0;
    for (int64_t i = 0; i < found_; ++i) held += weights_[i];
    if (held >= needed || tighter == 1.0) {
      sums_[0] = total;
      return;
    }
  }
  collect(row, -kInfinity);
  sums_[0] = total;
}

// Of ranked_, in any order: the weight and the lowest rank of the shortest descending run that weighs `needed`.
inline int64_t RowSampler::nucleus_weight_and_cut(int64_t needed, uint64_t& cut) {
  auto begin = ranked_.begin(), end = ranked_.end();
  int64_t before = 0;  // weight of what ranks above [begin, end)
  const auto higher = [](const Ranked& a, const Ranked& b) { return a.rank > b.rank; };
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, higher);
    int64_t upper = 0;
    for (auto it = begin; it != middle; ++it) upper += it->weight;
    if (before + upper >= needed) {
      end = middle;
    } else {
      before += upper;
      begin = middle;
    }
  }
  cut = begin->rank;
  return before + begin->weight;
}

inline Drawn RowSampler::draw_filtered(const void* row, float uniform, const SamplingSettings& settings) {
  const int64_t k = settings.top_k == 0 ? vocabulary_ : std::min(settings.top_k, vocabulary_);
  if (k < vocabulary_)
    collect_top_k(row, k);
  else
    collect_nucleus(row, settings.top_p);

  ranked_.resize(found_);
  for (int64_t i = 0; i < found_; ++i) ranked_[i] = {rank_of(logits_[i], ids_[i]), weights_[i]};
  const auto higher = [](const Ranked& a, const Ranked& b) { return a.rank > b.rank; };
  int64_t total = sums_[0];  // of the whole row, left there by collect_nucleus
  uint64_t cut = 0;
  if (k < vocabulary_) {
    std::nth_element(ranked_.begin(), ranked_.begin() + (k - 1), ranked_.end(), higher);
    cut = ranked_[k - 1].rank;
    ranked_.resize(k);
    total = 0;
    for (const Ranked& token : ranked_) total += token.weight;
  }
  if (settings.top_p < 1)
    total = nucleus_weight_and_cut(std::max<int64_t>(scaled_share(settings.top_p, total), 1), cut);

  int64_t left = scaled_share(uniform, total);
  int64_t i = 0;
  for (;; ++i) {
    if (rank_of(logits_[i], ids_[i]) < cut) continue;
    if (left < weights_[i]) break;
    left -= weights_[i];
  }
  return finish(ids_[i], logits_[i], total);
}

}  // namespace rlk
