#include "rollout_history.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "make_room.h"

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

constexpr size_t kGrowth = 8;  // by an eighth: vectors that double would waste up to half of the memory

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
  std::vector<uint32_t>& slots = heads_[chain].slots;
  std::vector<uint32_t> old(slots.size() + slots.size() / 2, kNone);
  old.swap(slots);
  int32_t buffer[kMinDepth];
  for (uint32_t head : old) {
    if (head == kNone) continue;
    const uint32_t prompt = chain == kLocal ? rollouts_[owner(head)].prompt : 0;
    *slot_of(chain, prompt, gram_at(head, kGram[chain], buffer)) = head;
  }
}

// Puts the positions of a rollout at the heads of their chains, whose tables have room for them.
void RolloutHistory::index(uint32_t rollout) {
  const Rollout& r = rollouts_[rollout];
  int32_t buffer[kMinDepth];
  for (Chain chain : {kLocal, kLong, kShort}) {
    Table& table = heads_[chain];
    for (uint32_t p = r.start; p < r.start + r.length; ++p) {
      uint32_t* slot = slot_of(chain, r.prompt, gram_at(p, kGram[chain], buffer));
      table.used += *slot == kNone;
      previous_[chain][p] = *slot;
      *slot = p;
    }
  }
}

// Appends a rollout, without counting and without evicting. What may fail comes first and changes nothing.
void RolloutHistory::store(uint32_t prompt, Ids response, double reward, int64_t epoch) {
  if (tokens_.size() + 1 + response.size() >= kNone)
    throw std::length_error("a rollout history holds at most 2**32 - 2 tokens");
  make_room(tokens_, response.size() + 1, kGrowth);
  for (auto& chain : previous_) make_room(chain, response.size() + 1, kGrowth);
  make_room(rollouts_, 1, kGrowth);
  make_room(block_owner_, response.size() / kOwnerBlock + 2, kGrowth);
  for (Chain chain : {kLocal, kLong, kShort})
    while (10 * (heads_[chain].used + response.size()) > 7 * heads_[chain].slots.size()) grow(chain);
  put(prompt, response, reward, epoch);
}

// As store, where there is room.
void RolloutHistory::put(uint32_t prompt, Ids response, double reward, int64_t epoch) {
  const size_t start = tokens_.size() + 1, size = start + response.size();
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
  if (max_tokens_ >= 0) make_room(heap_, 1, kGrowth);
  const uint32_t id = intern(prompt);
  try {
    store(id, response, reward, epoch);
  } catch (...) {
    drop_if_unused(id);
    throw;
  }
  newest_epoch_ = any_epoch_ ? std::max(newest_epoch_, epoch) : epoch;
  any_epoch_ = true;
  ++prompts_[id].rollouts;
  ++live_rollouts_;
  live_tokens_ += response.size();
  if (max_tokens_ < 0) return;
  heap_.push_back({epoch, reward, uint32_t(rollouts_.size() - 1)});
  std::push_heap(heap_.begin(), heap_.end(), stays_longer);
  evict_surplus();
}

void RolloutHistory::resize(int64_t max_tokens) {
  const std::lock_guard lock(mutex_);
  if (max_tokens >= 0 && max_tokens_ < 0) make_heap();
  max_tokens_ = max_tokens;
  if (max_tokens >= 0) evict_surplus();
}

// The heap of all that is alive, which an unbounded history does without.
void RolloutHistory::make_heap() {
  heap_.clear();
  heap_.reserve(size_t(live_rollouts_));
  for (uint32_t r = 0; r < rollouts_.size(); ++r)
    if (rollouts_[r].alive) heap_.push_back({rollouts_[r].epoch, rollouts_[r].reward, r});
  std::make_heap(heap_.begin(), heap_.end(), stays_longer);
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
  if (live_rollouts_ == 0) newest_epoch_ = 0, any_epoch_ = false;  // as in what is saved
  if (dead_tokens_ <= live_tokens_ / 4) return;
  try {
    pack();
  } catch (const std::bad_alloc&) {  // nothing is lost: the next eviction tries again
  }
}

// Stores and indexes again what is alive. What may fail comes first and changes nothing.
void RolloutHistory::pack() {
  const size_t size = size_t(live_tokens_ + live_rollouts_);
  std::vector<int32_t> tokens;
  std::vector<Rollout> rollouts;
  tokens.reserve(size);
  rollouts.reserve(size_t(live_rollouts_));
  std::vector<uint32_t> slots[kChains];  // smaller ones where all that is alive, being different, would fit
  for (int chain = 0; chain < kChains; ++chain) {
    size_t fits = heads_[chain].slots.size();
    while (fits >= 128 && 10 * uint64_t(live_tokens_) <= 7 * (fits / 2)) fits /= 2;
    if (fits < heads_[chain].slots.size()) slots[chain].resize(fits);
  }
  tokens.swap(tokens_);
  rollouts.swap(rollouts_);
  block_owner_.clear();
  for (int chain = 0; chain < kChains; ++chain) {
    previous_[chain].clear();
    Table& table = heads_[chain];
    if (!slots[chain].empty()) table.slots.swap(slots[chain]);
    std::fill(table.slots.begin(), table.slots.end(), kNone);
    table.used = 0;
  }
  for (const Rollout& r : rollouts)
    if (r.alive) put(r.prompt, {tokens.data() + r.start, r.length}, r.reward, r.epoch);
  make_heap();  // no larger than it was
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
  std::vector<int32_t> tokens(prompt.begin(), prompt.end());
  if (free_prompts_.empty()) {
    make_room(free_prompts_, prompts_.size() + 1, kGrowth);  // so that none is ever dropped in vain
    prompts_.emplace_back();
    free_prompts_.push_back(uint32_t(prompts_.size() - 1));
  }
  id = free_prompts_.back();
  int64_t& count = prompt_lengths_[prompt.size()];
  prompt_ids_.emplace(key, id);
  ++count;
  free_prompts_.pop_back();
  prompts_[id].tokens = std::move(tokens);
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
    auto moved = prompt_ids_.extract(found);
    find(prompts_[moved.mapped()].tokens, moved.key());
    prompt_ids_.insert(std::move(moved));
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
  return {live_tokens_, live_rollouts_, prompts, int64_t(handles_.size()), evicted_, bytes,
          any_epoch_ ? std::optional(newest_epoch_) : std::nullopt};
}

}  // namespace rlk
