// A sequence that is being generated (prompt, START, answer so far) and where each of its tokens occurred before.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace rlk {

constexpr int32_t kStart = -1;  // stands before the first token of an answer, as often as needed

// Chains by hash of the token, newest first, as in LZ77 matchers: a walk skips the tokens that share a bucket.
class OwnText {
 public:
  std::vector<int32_t> tokens;

  void append(std::span<const int32_t> ids) {
    reserve(ids.size());
    for (int32_t id : ids) append(id);
  }

  void append(int32_t id) {
    const size_t at = tokens.size();
    reserve(1);
    tokens.push_back(id);
    previous_.push_back(kEnd);
    link(uint32_t(at));
  }

  // Room for so many more: appending them cannot fail.
  void reserve(size_t more) {
    if (tokens.size() + more > heads_.size()) grow(std::bit_ceil(std::max<size_t>(64, tokens.size() + more)));
  }

  // The newest position whose token follows another occurrence of the last one; kEnd when there is none.
  uint32_t newest() const { return tokens.empty() ? kEnd : skip(heads_[bucket(tokens.back())]); }
  uint32_t older(uint32_t position) const { return skip(previous_[position]); }

  size_t bytes() const { return (tokens.capacity() + previous_.capacity() + heads_.capacity()) * 4; }

  static constexpr uint32_t kEnd = ~uint32_t(0);

 private:
  size_t bucket(int32_t id) const { return (uint32_t(id) * 0x9E3779B1u) >> shift_; }

  uint32_t skip(uint32_t position) const {
    while (position != kEnd && tokens[position - 1] != tokens.back()) position = previous_[position];
    return position;
  }

  // What follows a START, or is one, is no continuation of anything.
  void link(uint32_t at) {
    if (at == 0 || tokens[at] == kStart || tokens[at - 1] == kStart) return;
    uint32_t& head = heads_[bucket(tokens[at - 1])];
    previous_[at] = head;
    head = at;
  }

  void grow(size_t size) {
    tokens.reserve(size);
    previous_.reserve(size);
    heads_.assign(size, kEnd);
    shift_ = 32 - std::countr_zero(size);
    for (uint32_t at = 0; at < tokens.size(); ++at) link(at);
  }

  std::vector<uint32_t> previous_, heads_;
  int shift_ = 26;
};

}  // namespace rlk
