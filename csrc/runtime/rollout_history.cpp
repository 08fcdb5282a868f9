#include "rollout_history.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace rlk {
namespace {

constexpr int32_t kStart = -1;  // stands before the first token of a response, as often as needed
constexpr uint32_t kNone = ~uint32_t(0);
constexpr int kCandidates = 32;  // occurrences looked at, newest first
constexpr int64_t kFirstWindow = 8, kMaxWindow = 1 << 16;
constexpr int64_t kFirstCooldown = 8, kMaxCooldown = 1024;
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

bool goes_later(int64_t epoch_a, double reward_a, uint32_t a, int64_t epoch_b, double reward_b, uint32_t b) {
  if (epoch_a != epoch_b) return epoch_a > epoch_b;
  if (reward_a != reward_b) return reward_a > reward_b;
  return a > b;
}

}  // namespace

RolloutHistory::RolloutHistory(int64_t max_tokens, double token_cost, int depth)
    : max_tokens_(max_tokens), token_cost_(token_cost), depth_(depth) {
  if (depth < kSharedGram || depth > kMaxDepth) throw std::invalid_argument("depth is out of range");
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
  return hash_ids(chain == Chain::local ? mix(prompt + 1) : 0, gram);
}

// Where the head of this chain is, or would be put (then it holds kNone).
uint32_t* RolloutHistory::slot_of(Chain chain, uint32_t prompt, Ids gram) {
  std::vector<uint32_t>& slots = heads_[int(chain)].slots;
  size_t at = size_t((unsigned __int128)hash_of(chain, prompt, gram) * slots.size() >> 64);
  int32_t buffer[kSharedGram];
  for (;; at = at + 1 == slots.size() ? 0 : at + 1) {
    const uint32_t head = slots[at];
    if (head == kNone) return &slots[at];
    const Ids held = gram_at(head, int(gram.size()), buffer);
    if (std::equal(held.begin(), held.end(), gram.begin()) &&
        (chain == Chain::shared || rollouts_[owner(head)].prompt == prompt))
      return &slots[at];
  }
}

void RolloutHistory::grow(Chain chain) {
  Table& table = heads_[int(chain)];
  const std::vector<uint32_t> old = std::move(table.slots);
  table.slots.assign(old.size() + old.size() / 2, kNone);
  int32_t buffer[kSharedGram];
  for (uint32_t head : old) {
    if (head == kNone) continue;
    const uint32_t prompt = chain == Chain::local ? rollouts_[owner(head)].prompt : 0;
    *slot_of(chain, prompt, gram_at(head, chain == Chain::local ? kLocalGram : kSharedGram, buffer)) = head;
  }
}

// Puts the positions of a rollout at the heads of their chains.
void RolloutHistory::index(uint32_t rollout) {
  const Rollout& r = rollouts_[rollout];
  int32_t buffer[kSharedGram];
  for (Chain chain : {Chain::local, Chain::shared}) {
    Table& table = heads_[int(chain)];
    for (uint32_t p = r.start; p < r.start + r.length; ++p) {
      if (10 * (table.used + 1) > 7 * table.slots.size()) grow(chain);
      uint32_t* slot = slot_of(chain, r.prompt, gram_at(p, chain == Chain::local ? kLocalGram : kSharedGram, buffer));
      table.used += *slot == kNone;
      previous_[int(chain)][p] = *slot;
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
  const auto later = [](const Victim& a, const Victim& b) {
    return goes_later(a.epoch, a.reward, a.rollout, b.epoch, b.reward, b.rollout);
  };
  std::push_heap(heap_.begin(), heap_.end(), later);
  while (live_tokens_ > max_tokens_) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    evict();
  }
  if (dead_tokens_ > live_tokens_ / 4) pack();
}

// Drops the rollout at the end of the heap.
void RolloutHistory::evict() {
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
  std::make_heap(heap_.begin(), heap_.end(), [](const Victim& a, const Victim& b) {
    return goes_later(a.epoch, a.reward, a.rollout, b.epoch, b.reward, b.rollout);
  });
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
  return id;
}

void RolloutHistory::drop_if_unused(uint32_t id) {
  if (prompts_[id].rollouts || prompts_[id].handles) return;
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

// The newest live places of a chain with their weights -> how many.
int RolloutHistory::places(Chain chain, uint32_t prompt, const int32_t* context, Place* out) {
  const int size = chain == Chain::local ? kLocalGram : kSharedGram;
  const uint32_t head = *slot_of(chain, prompt, {context + depth_ - size, size_t(size)});
  double low = INFINITY, high = -INFINITY, rewards[kCandidates];
  int found = 0;
  for (uint32_t p = head; p != kNone && found < kCandidates; p = previous_[int(chain)][p]) {
    const Rollout& r = rollouts_[owner(p)];
    if (!r.alive) continue;
    int match = 0;
    for (uint32_t at = p; match < depth_; ++match) {
      const int32_t token = tokens_[--at];
      if (token != context[depth_ - 1 - match]) break;
      if (token == kStart) match = depth_ - 1;  // nothing but START before it, on both sides
    }
    const int64_t age = std::min<int64_t>(newest_epoch_ - r.epoch, 64);
    out[found] = {p, r.start + r.length, std::ldexp(1.0, match - depth_ - int(age))};
    rewards[found++] = r.reward;
    low = std::min(low, r.reward);
    high = std::max(high, r.reward);
  }
  for (int i = 0; i < found; ++i) out[i].weight *= 1.0 + (high > low ? (rewards[i] - low) / (high - low) : 0.0);
  return found;
}

// Follows the heaviest continuation while the next token is likely enough to pay for its verification.
int64_t RolloutHistory::follow(uint32_t prompt, const int32_t* context, int64_t limit, int32_t* out) {
  Place active[kCandidates];
  int count = prompt == kNone || limit <= 0 ? 0 : places(Chain::local, prompt, context, active);
  if (count == 0 && limit > 0) count = places(Chain::shared, kNone, context, active);
  double trust = 1;
  int64_t length = 0;
  while (count > 0 && length < limit) {
    int32_t voted[kCandidates];
    double votes[kCandidates];
    int distinct = 0;
    for (int i = 0; i < count; ++i) {
      const int32_t token = tokens_[active[i].position];
      int v = 0;
      while (v < distinct && voted[v] != token) ++v;
      if (v == distinct) voted[distinct] = token, votes[distinct++] = 0;
      votes[v] += active[i].weight;
    }
    int best = 0;
    double total = 0;
    for (int v = 0; v < distinct; ++v) {
      total += votes[v];
      if (votes[v] > votes[best]) best = v;
    }
    trust *= 0.95 * votes[best] / total;
    if (trust < token_cost_) break;
    out[length++] = voted[best];
    int kept = 0;
    for (int i = 0; i < count; ++i)
      if (tokens_[active[i].position] == voted[best] && active[i].position + 1 < active[i].end)
        active[kept++] = {active[i].position + 1, active[i].end, active[i].weight};
    count = kept;
  }
  return length;
}

std::vector<int32_t> RolloutHistory::draft(Ids prompt, Ids generated, int64_t limit) {
  const std::lock_guard lock(mutex_);
  Handle state;
  std::fill_n(state.context, depth_, kStart);
  push(state, generated);
  std::vector<int32_t> out(std::clamp<int64_t>(limit, 0, kMaxWindow));
  uint64_t key;
  out.resize(follow(find(prompt, key), state.context, int64_t(out.size()), out.data()));
  return out;
}

RolloutHistory::Handle& RolloutHistory::handle_of(int64_t handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end())
    throw std::invalid_argument("handle " + std::to_string(handle) +
                                " is not tracked; it was released, or never returned by track()");
  return found->second;
}

void RolloutHistory::push(Handle& handle, Ids ids) const {
  const int fresh = int(std::min<size_t>(ids.size(), depth_));
  std::copy(handle.context + fresh, handle.context + depth_, handle.context);
  std::copy(ids.end() - fresh, ids.end(), handle.context + depth_ - fresh);
}

int64_t RolloutHistory::track(Ids prompt) {
  const std::lock_guard lock(mutex_);
  Handle state;
  state.prompt = intern(prompt);
  state.window = kFirstWindow;
  state.gain = 1;  // it takes about ten useless drafts to switch drafting off
  state.next_cooldown = kFirstCooldown;
  std::fill_n(state.context, depth_, kStart);
  handles_.emplace(next_handle_, state);
  ++prompts_[state.prompt].handles;
  return next_handle_++;
}

void RolloutHistory::extend(int64_t handle, Ids ids) {
  const std::lock_guard lock(mutex_);
  push(handle_of(handle), ids);
}

void RolloutHistory::draft_tracked(std::span<const int64_t> handles, int64_t limit, int64_t* ids, int64_t* lengths) {
  const std::lock_guard lock(mutex_);
  for (int64_t handle : handles) handle_of(handle);  // all or nothing
  std::vector<int32_t> draft(std::min(limit, kMaxWindow));
  for (size_t b = 0; b < handles.size(); ++b, ids += limit) {
    Handle& state = handle_of(handles[b]);
    lengths[b] = 0;
    if (state.cooldown > 0)
      --state.cooldown;
    else
      lengths[b] = follow(state.prompt, state.context, std::min<int64_t>(draft.size(), state.window), draft.data());
    std::copy_n(draft.begin(), lengths[b], ids);
    std::fill(ids + lengths[b], ids + limit, -1);
  }
}

void RolloutHistory::observe(std::span<const int64_t> handles, const int64_t* offered, const int64_t* accepted) {
  const std::lock_guard lock(mutex_);
  for (int64_t handle : handles) handle_of(handle);
  for (size_t b = 0; b < handles.size(); ++b) {
    Handle& state = handle_of(handles[b]);
    if (offered[b] == 0) continue;
    if (accepted[b] == offered[b])  // the draft that was offered, however short, not the window
      state.window = std::min(2 * state.window, kMaxWindow);
    else
      state.window = std::max<int64_t>(2, std::min(state.window - 1, 2 * accepted[b]));
    state.gain = 0.75 * state.gain + 0.25 * (double(accepted[b]) - token_cost_ * double(offered[b]));
    if (state.gain > 0) {
      state.next_cooldown = kFirstCooldown;
    } else if (state.gain < 0) {
      state.cooldown = state.next_cooldown;
      state.next_cooldown = std::min(2 * state.next_cooldown, kMaxCooldown);
    }
  }
}

void RolloutHistory::release(int64_t handle) {
  const std::lock_guard lock(mutex_);
  const uint32_t prompt = handle_of(handle).prompt;
  handles_.erase(handle);
  --prompts_[prompt].handles;
  drop_if_unused(prompt);
}

RolloutHistory::Stats RolloutHistory::stats() {
  const std::lock_guard lock(mutex_);
  int64_t bytes = sizeof(*this) + tokens_.capacity() * 4 + block_owner_.capacity() * 4;
  for (int chain = 0; chain < 2; ++chain) bytes += previous_[chain].capacity() * 4 + heads_[chain].slots.size() * 4;
  bytes += rollouts_.capacity() * sizeof(Rollout) + heap_.capacity() * sizeof(Victim);
  bytes += prompts_.capacity() * sizeof(Prompt) + free_prompts_.capacity() * 4;
  for (const Prompt& prompt : prompts_) bytes += prompt.tokens.capacity() * 4;
  // nodes of the maps: the pair, the link and the bucket
  bytes += prompt_ids_.size() * (16 + 16) + handles_.size() * (sizeof(Handle) + 8 + 16);
  const int64_t prompts = int64_t(std::count_if(prompts_.begin(), prompts_.end(), [](auto& p) { return p.rollouts; }));
  return {live_tokens_, live_rollouts_, prompts, int64_t(handles_.size()), evicted_, bytes};
}

}  // namespace rlk
