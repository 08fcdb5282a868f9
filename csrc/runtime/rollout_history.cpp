#include "rollout_history.h"

#include <algorithm>
#include <stdexcept>

namespace rlk {
namespace {

constexpr uint32_t kOwnerBlock = 64;

uint64_t mix(uint64_t h) {  // finaliser of SplitMix64 (Steele et al., OOPSLA'14)
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

uint64_t hash_ids(uint64_t h, Ids ids) {
  for (int32_t id : ids) h = (h ^ uint32_t(id)) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
  return mix(h);
}

// A vector that doubles would waste up to half of the memory.
template <class T>
void make_room(std::vector<T>& v, size_t more) {
  if (v.size() + more > v.capacity()) v.reserve(std::max(v.size() + more, v.capacity() + v.capacity() / 8 + 64));
}

// Orders victims for a heap whose top goes first.
constexpr auto stays_longer = [](const auto& a, const auto& b) {
  if (a.epoch != b.epoch) return a.epoch > b.epoch;
  if (a.reward != b.reward) return a.reward > b.reward;
  return a.rollout > b.rollout;
};

}  // namespace

RolloutHistory::RolloutHistory(int64_t max_tokens, double token_cost, int depth)
    : max_tokens_(max_tokens), token_cost_(token_cost), depth_(depth) {
  if (depth < kMinDepth || depth > kMaxDepth) throw std::invalid_argument("depth is out of range");
  for (Table& table : heads_) table.slots.assign(64, kNone);
}

// The `size` tokens before `position`.
Ids RolloutHistory::gram_at(uint32_t position, int size, int32_t* buffer) const {
  bool before = false;
  for (int i = size - 1; i >= 0; --i) {
    if (!before) before = tokens_[--position] == kStart;
    buffer[i] = before ? kStart : tokens_[position];
  }
  return {buffer, size_t(size)};
}

uint64_t RolloutHistory::hash_of(Chain chain, uint32_t prompt, Ids gram) const {
  return hash_ids(chain == kLocal ? mix(prompt + 1) : 0, gram);
}

// Where the head of this chain is, or would be put (then it holds kNone).
uint32_t* RolloutHistory::slot_of(Chain chain, uint32_t prompt, Ids gram) {
  std::vector<uint32_t>& slots = heads_[chain].slots;
  size_t at = size_t((unsigned __int128)hash_of(chain, prompt, gram) * slots.size() >> 64);
  int32_t buffer[kMinDepth];
  for (;; at = at + 1 == slots.size() ? 0 : at + 1) {
    const uint32_t head = slots[at];
    if (head == kNone) return &slots[at];
    const Ids held = gram_at(head, int(gram.size()), buffer);
    if (std::equal(held.begin(), held.end(), gram.begin()) &&
        (chain != kLocal || rollouts_[owner(head)].prompt == prompt))
      return &slots[at];
  }
}

void RolloutHistory::grow(Chain chain) {
  Table& table = heads_[chain];
  const std::vector<uint32_t> old = std::move(table.slots);
  table.slots.assign(old.size() + old.size() / 2, kNone);
  int32_t buffer[kMinDepth];
  for (uint32_t head : old) {
    if (head == kNone) continue;
    const uint32_t prompt = chain == kLocal ? rollouts_[owner(head)].prompt : 0;
    *slot_of(chain, prompt, gram_at(head, kGram[chain], buffer)) = head;
  }
}

// Puts the positions of a rollout at the heads of their chains.
void RolloutHistory::index(uint32_t rollout) {
  const Rollout& r = rollouts_[rollout];
  int32_t buffer[kMinDepth];
  for (Chain chain : {kLocal, kLong, kShort}) {
    Table& table = heads_[chain];
    for (uint32_t p = r.start; p < r.start + r.length; ++p) {
      if (10 * (table.used + 1) > 7 * table.slots.size()) grow(chain);
      uint32_t* slot = slot_of(chain, r.prompt, gram_at(p, kGram[chain], buffer));
      table.used += *slot == kNone;
      previous_[chain][p] = *slot;
      *slot = p;
    }
  }
}

// Appends a rollout, without counting and without evicting.
void RolloutHistory::store(uint32_t prompt, Ids response, double reward, int64_t epoch) {
  const size_t start = tokens_.size() + 1, size = start + response.size();
  if (size >= kNone) throw std::length_error("a rollout history holds at most 2**32 - 2 tokens");
  make_room(tokens_, response.size() + 1);
  for (auto& chain : previous_) make_room(chain, response.size() + 1);
  make_room(rollouts_, 1);
  make_room(block_owner_, response.size() / kOwnerBlock + 2);
  tokens_.push_back(kStart);
  tokens_.insert(tokens_.end(), response.begin(), response.end());
  for (auto& chain : previous_) chain.resize(size, kNone);
  rollouts_.push_back({uint32_t(start), uint32_t(response.size()), prompt, true, reward, epoch});
  while (block_owner_.size() * kOwnerBlock < size) block_owner_.push_back(uint32_t(rollouts_.size() - 1));
  index(uint32_t(rollouts_.size() - 1));
}

// The rollout that position p belongs to (the START before a rollout counts as the end of the one before it).
uint32_t RolloutHistory::owner(uint32_t p) const {
  uint32_t r = block_owner_[p / kOwnerBlock];
  while (r + 1 < rollouts_.size() && rollouts_[r + 1].start <= p) ++r;
  return r;
}

void RolloutHistory::add(Ids prompt, Ids response, double reward, int64_t epoch) {
  const std::lock_guard lock(mutex_);
  if (max_tokens_ >= 0) response = response.first(std::min(response.size(), size_t(max_tokens_)));
  if (response.empty()) return;
  const uint32_t id = intern(prompt);
  newest_epoch_ = any_epoch_ ? std::max(newest_epoch_, epoch) : epoch;
  any_epoch_ = true;
  store(id, response, reward, epoch);
  ++prompts_[id].rollouts;
  ++live_rollouts_;
  live_tokens_ += response.size();
  if (max_tokens_ < 0) return;
  make_room(heap_, 1);
  heap_.push_back({epoch, reward, uint32_t(rollouts_.size() - 1)});
  std::push_heap(heap_.begin(), heap_.end(), stays_longer);
  evict_surplus();
}

void RolloutHistory::resize(int64_t max_tokens) {
  const std::lock_guard lock(mutex_);
  if (max_tokens == max_tokens_) return;
  max_tokens_ = max_tokens;
  if (max_tokens < 0) return;
  pack();  // makes the heap, which an unbounded history does without
  evict_surplus();
}

// Drops rollouts, those at the top of the heap first, until what is left fits.
void RolloutHistory::evict_surplus() {
  while (live_tokens_ > max_tokens_) {
    std::pop_heap(heap_.begin(), heap_.end(), stays_longer);
    Rollout& victim = rollouts_[heap_.back().rollout];
    heap_.pop_back();
    victim.alive = false;
    live_tokens_ -= victim.length;
    dead_tokens_ += victim.length;
    --live_rollouts_;
    ++evicted_;
    --prompts_[victim.prompt].rollouts;
    drop_if_unused(victim.prompt);
  }
  if (dead_tokens_ > live_tokens_ / 4) pack();
}

// Stores and indexes again what is alive.
void RolloutHistory::pack() {
  const std::vector<Rollout> old = std::move(rollouts_);
  const std::vector<int32_t> tokens = std::move(tokens_);
  rollouts_.clear();
  tokens_.clear();
  block_owner_.clear();
  heap_.clear();
  for (auto& chain : previous_) chain.clear();
  for (Table& table : heads_) {
    table.slots.assign(std::max<size_t>(64, table.slots.size() / 2), kNone);
    table.used = 0;
  }
  for (const Rollout& r : old) {
    if (!r.alive) continue;
    store(r.prompt, {tokens.data() + r.start, r.length}, r.reward, r.epoch);
    heap_.push_back({r.epoch, r.reward, uint32_t(rollouts_.size() - 1)});
  }
  std::make_heap(heap_.begin(), heap_.end(), stays_longer);
  dead_tokens_ = 0;
}

// The number of a prompt, kNone when it is unknown; key: where it is, or would be, in prompt_ids_.
uint32_t RolloutHistory::find(Ids prompt, uint64_t& key) const {
  for (key = hash_ids(prompt.size(), prompt);; ++key) {
    const auto found = prompt_ids_.find(key);
    if (found == prompt_ids_.end()) return kNone;
    const std::vector<int32_t>& held = prompts_[found->second].tokens;
    if (std::equal(held.begin(), held.end(), prompt.begin(), prompt.end())) return found->second;
  }
}

uint32_t RolloutHistory::intern(Ids prompt) {
  uint64_t key;
  uint32_t id = find(prompt, key);
  if (id != kNone) return id;
  if (free_prompts_.empty()) {
    free_prompts_.push_back(uint32_t(prompts_.size()));
    prompts_.emplace_back();
  }
  id = free_prompts_.back();
  free_prompts_.pop_back();
  prompts_[id].tokens.assign(prompt.begin(), prompt.end());
  prompts_[id].tokens.shrink_to_fit();
  prompt_ids_.emplace(key, id);
  ++prompt_lengths_[prompt.size()];
  return id;
}

void RolloutHistory::drop_if_unused(uint32_t id) {
  if (prompts_[id].rollouts || prompts_[id].handles) return;
  const auto length = prompt_lengths_.find(prompts_[id].tokens.size());
  if (!--length->second) prompt_lengths_.erase(length);
  uint64_t key;
  find(prompts_[id].tokens, key);
  // Keys of colliding prompts run upwards from their hash: close the gap.
  prompt_ids_.erase(key);
  for (uint64_t next = key + 1;; ++next) {
    const auto found = prompt_ids_.find(next);
    if (found == prompt_ids_.end()) break;
    const uint32_t moved = found->second;
    prompt_ids_.erase(found);
    uint64_t home;
    find(prompts_[moved].tokens, home);
    prompt_ids_.emplace(home, moved);
  }
  prompts_[id].tokens = {};
  free_prompts_.push_back(id);
}

int64_t RolloutHistory::longest_prompt(Ids ids) {
  const std::lock_guard lock(mutex_);
  // a hash reads all its tokens, so only lengths that occur are tried
  for (auto it = prompt_lengths_.upper_bound(ids.size()); it != prompt_lengths_.begin();) {
    --it;
    uint64_t key;
    const uint32_t id = find(ids.first(it->first), key);
    if (id != kNone && prompts_[id].rollouts) return int64_t(it->first);
  }
  return 0;
}

RolloutHistory::Stats RolloutHistory::stats() {
  const std::lock_guard lock(mutex_);
  int64_t bytes = sizeof(*this) + tokens_.capacity() * 4 + block_owner_.capacity() * 4;
  for (int chain = 0; chain < kChains; ++chain) bytes += previous_[chain].capacity() * 4 + heads_[chain].slots.size() * 4;
  bytes += rollouts_.capacity() * sizeof(Rollout) + heap_.capacity() * sizeof(Victim);
  bytes += prompts_.capacity() * sizeof(Prompt) + free_prompts_.capacity() * 4;
  for (const Prompt& prompt : prompts_) bytes += prompt.tokens.capacity() * 4;
  // nodes of the maps: the pair, the link and the bucket
  bytes += prompt_ids_.size() * (16 + 16) + prompt_lengths_.size() * (16 + 32) + handles_.size() * (sizeof(Handle) + 8 + 16);
  for (const auto& [number, handle] : handles_) bytes += handle.text.bytes();
  const int64_t prompts = int64_t(std::count_if(prompts_.begin(), prompts_.end(), [](auto& p) { return p.rollouts; }));
  return {live_tokens_, live_rollouts_, prompts, int64_t(handles_.size()), evicted_, bytes};
}

}  // namespace rlk
