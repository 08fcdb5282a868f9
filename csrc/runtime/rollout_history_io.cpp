// A rollout history as bytes, little-endian: magic, version, CRC-32 and size of the payload, payload. The payload
// is a header, the prompts (length, tokens) and the rollouts, oldest first (prompt, length, reward, epoch, tokens).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "rollout_history.h"
#include "signals.h"

namespace rlk {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr char kMagic[8] = {'R', 'L', 'K', 'H', 'I', 'S', 'T', '\0'};
constexpr uint32_t kVersion = 1;
constexpr size_t kPreamble = 24;

// The polynomial of zlib and PNG. Looks for signals.
uint32_t crc32(const char* data, size_t size) {
  constexpr size_t kPart = 1 << 20;
  static const auto table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      t[i] = i;
      for (int bit = 0; bit < 8; ++bit) t[i] = t[i] >> 1 ^ (t[i] & 1 ? 0xEDB88320u : 0);
    }
    return t;
  }();
  SignalWatch watch(signal_check);
  uint32_t c = ~0u;
  for (size_t i = 0; i < size;) {
    if (watch.stop()) watch.rethrow();
    for (const size_t end = std::min(i + kPart, size); i < end; ++i) c = table[(c ^ uint8_t(data[i])) & 255] ^ c >> 8;
  }
  return ~c;
}

template <class T>
void append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_ids(std::string& out, Ids ids) { out.append(reinterpret_cast<const char*>(ids.data()), ids.size_bytes()); }

// Reads from a payload and never beyond its end.
struct Reader {
  const std::string& name;
  const char* at;
  const char* end;

  [[noreturn]] void damaged() const { throw std::invalid_argument(name + " is damaged: a record does not make sense"); }
  template <class T>
  T take() {
    if (size_t(end - at) < sizeof(T)) damaged();
    T value;
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
  }
  std::vector<int32_t> take_ids(uint32_t count) {
    if (size_t(end - at) / 4 < count) damaged();
    std::vector<int32_t> ids(count);
    if (count) std::memcpy(ids.data(), at, size_t(count) * 4);
    at += size_t(count) * 4;
    for (int32_t id : ids)
      if (id < 0) damaged();
    return ids;
  }
};

}  // namespace

std::string RolloutHistory::to_bytes() {
  std::string payload;
  {
    const std::lock_guard lock(mutex_);
    std::vector<uint32_t> number(prompts_.size()), order;  // prompts by first appearance
    std::vector<bool> seen(prompts_.size());
    for (const Rollout& r : rollouts_) {
      if (!r.alive || seen[r.prompt]) continue;
      seen[r.prompt] = true;
      number[r.prompt] = uint32_t(order.size());
      order.push_back(r.prompt);
    }
    append(payload, max_tokens_);
    append(payload, token_cost_);
    append(payload, int64_t(depth_));
    append(payload, newest_epoch_);
    append(payload, uint64_t(order.size()));
    append(payload, uint64_t(live_rollouts_));
    for (uint32_t prompt : order) {
      append(payload, uint32_t(prompts_[prompt].tokens.size()));
      append_ids(payload, prompts_[prompt].tokens);
    }
    for (const Rollout& r : rollouts_) {
      if (!r.alive) continue;
      append(payload, number[r.prompt]);
      append(payload, r.length);
      append(payload, r.reward);
      append(payload, r.epoch);
      append_ids(payload, {tokens_.data() + r.start, r.length});
    }
  }
  std::string data(kMagic, sizeof kMagic);
  append(data, kVersion);
  append(data, crc32(payload.data(), payload.size()));
  append(data, uint64_t(payload.size()));
  return data + payload;
}

RolloutHistory* RolloutHistory::from_bytes(const std::string& data, const std::string& name) {
  if (data.size() < kPreamble || std::memcmp(data.data(), kMagic, sizeof kMagic) != 0)
    throw std::invalid_argument(name + " is not a rollout history (bad magic)");
  Reader in{name, data.data() + sizeof kMagic, data.data() + data.size()};
  const auto version = in.take<uint32_t>(), checksum = in.take<uint32_t>();
  if (version != kVersion)
    throw std::invalid_argument(name + " has version " + std::to_string(version) + ", this program reads version " +
                                std::to_string(kVersion));
  const auto size = in.take<uint64_t>();
  if (size != data.size() - kPreamble || crc32(in.at, size) != checksum)
    throw std::invalid_argument(name + " is damaged: " + std::to_string(data.size() - kPreamble) + " bytes of " +
                                std::to_string(size) + ", or a wrong checksum");
  const auto max_tokens = in.take<int64_t>();
  const auto token_cost = in.take<double>();
  const auto depth = in.take<int64_t>(), newest_epoch = in.take<int64_t>();
  const auto num_prompts = in.take<uint64_t>(), num_rollouts = in.take<uint64_t>();
  if (depth < kMinDepth || depth > kMaxDepth || !(token_cost >= 0 && token_cost <= 1)) in.damaged();
  auto history = std::make_unique<RolloutHistory>(max_tokens < 0 ? -1 : max_tokens, token_cost, int(depth));
  SignalWatch watch(signal_check);
  std::vector<uint32_t> ids;
  for (uint64_t i = 0; i < num_prompts; ++i) {
    if (watch.stop()) watch.rethrow();
    ids.push_back(history->intern(in.take_ids(in.take<uint32_t>())));
    if (ids.back() + 1 != ids.size()) in.damaged();  // the same prompt twice
  }
  for (uint64_t i = 0; i < num_rollouts; ++i) {
    if (watch.stop()) watch.rethrow();
    const auto prompt = in.take<uint32_t>(), length = in.take<uint32_t>();
    const auto reward = in.take<double>();
    const auto epoch = in.take<int64_t>();
    if (prompt >= ids.size() || length == 0 || !std::isfinite(reward) || epoch > newest_epoch) in.damaged();
    history->store(prompt, in.take_ids(length), reward, epoch);
    ++history->prompts_[prompt].rollouts;
    ++history->live_rollouts_;
    history->live_tokens_ += length;
  }
  if (in.at != in.end || (max_tokens >= 0 && history->live_tokens_ > max_tokens)) in.damaged();
  if (max_tokens >= 0) history->make_heap();
  history->any_epoch_ = num_rollouts > 0;
  history->newest_epoch_ = num_rollouts ? newest_epoch : 0;
  return history.release();
}

}  // namespace rlk
