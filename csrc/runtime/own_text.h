// A sequence that is being generated (prompt, START, answer so far) and where each of its tokens occurred before.
#pragma once
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
    for (int32_t id : ids) append(id);
  }

  void append(int32_t id) {
    const size_t at = tokens.size();
    if (at >= heads_.size()) grow();
    tokens.push_back(id);
    previous_.push_back(kEnd);
    link(uint32_t(at));
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

  void grow() {
    heads_.assign(heads_.empty() ? 64 : 2 * heads_.size(), kEnd);
    for (shift_ = 32; (size_t(1) << (32 - shift_)) < heads_.size();) --shift_;
    for (uint32_t at = 0; at < tokens.size(); ++at) link(at);
  }

  std::vector<uint32_t> previous_, heads_;
  int shift_ = 26;
};

}  // namespace rlk
