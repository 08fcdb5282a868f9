#include "rollout_history.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace rlk {
namespace {

constexpr uint32_t kNone = ~uint32_t(0);
constexpr int kCandidates = 24;     // occurrences looked at per chain, newest first
constexpr int kOwnCandidates = 16;  // ... in the sequence's own text
constexpr int kMaxPlaces = 2 * kCandidates + kOwnCandidates;
constexpr int kLongMatch = 5;  // one as long as this under the same prompt makes other prompts needless
constexpr int kElsewhere = 3;  // the same prompt is worth as much as this many tokens of context
constexpr double kUnknown = 1;  // weight of "none of these"
constexpr int64_t kFirstWindow = 16, kMinWindow = 6, kMaxWindow = 1 << 16;
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

// The newest live places of a chain with their weights -> how many; longest: at least the longest match among them.
int RolloutHistory::places(Chain chain, uint32_t prompt, const int32_t* context, Place* out, int& longest) {
  const size_t size = kGram[chain];
  const uint32_t head = *slot_of(chain, prompt, {context + depth_ - size, size});
  double low = INFINITY, high = -INFINITY, rewards[kCandidates];
  int found = 0;
  for (uint32_t p = head; p != kNone && found < kCandidates; p = previous_[chain][p]) {
    const Rollout& r = rollouts_[owner(p)];
    if (!r.alive) continue;
    int match = 0;
    for (uint32_t at = p; match < depth_; ++match) {
      const int32_t token = tokens_[--at];
      if (token != context[depth_ - 1 - match]) break;
      if (token == kStart) {  // the whole answer so far; says little under another prompt
        match = chain == kLocal ? depth_ : match + 1;
        break;
      }
    }
    longest = std::max(longest, match);
    const int age = int(std::min<uint64_t>(uint64_t(newest_epoch_) - uint64_t(r.epoch), 64));  // never negative
    const double weight = std::ldexp(1.0, match - age - (chain == kLocal ? 0 : kElsewhere));
    out[found] = {&tokens_[p], tokens_.data() + r.start + r.length, weight};
    rewards[found++] = r.reward;
    low = std::min(low, r.reward);
    high = std::max(high, r.reward);
  }
  for (int i = 0; i < found; ++i) out[i].weight *= 1.0 + (high > low ? (rewards[i] - low) / (high - low) : 0.0);
  return found;
}

// The newest places in the sequence itself that its last token leads up to.
int RolloutHistory::own_places(const OwnText& text, Place* out) const {
  const std::vector<int32_t>& tokens = text.tokens;
  int found = 0;
  for (uint32_t p = text.newest(); p != OwnText::kEnd && found < kOwnCandidates; p = text.older(p)) {
    int match = 1;
    const int most = int(std::min<size_t>(depth_, p));
    while (match < most && tokens[p - 1 - match] == tokens[tokens.size() - 1 - match] &&
           tokens[p - 1 - match] != kStart)
      ++match;
    out[found++] = {&tokens[p], tokens.data() + tokens.size(), std::ldexp(1.0, match - kElsewhere)};
  }
  return found;
}

// All places that vote on how a sequence goes on: under its prompt, under others unless that is clear, in itself.
int RolloutHistory::gather(uint32_t prompt, const OwnText& text, Place* out) {
  int32_t context[kMaxDepth];  // the last tokens of the answer
  int known = 0;
  for (size_t i = text.tokens.size(); known < depth_ && i > 0 && text.tokens[i - 1] != kStart; --i)
    context[depth_ - ++known] = text.tokens[i - 1];
  std::fill_n(context, depth_ - known, kStart);
  int count = 0, longest = 0;
  if (prompt != kNone) count = places(kLocal, prompt, context, out, longest);
  if (longest < kLongMatch) {
    int others = places(kLong, kNone, context, out + count, longest);
    if (others == 0) others = places(kShort, kNone, context, out + count, longest);
    count += others;
  }
  return count + own_places(text, out + count);
}

// Follows the heaviest continuation while the next token is likely enough to pay for its verification.
int64_t RolloutHistory::follow(uint32_t prompt, const OwnText& text, double token_cost, int64_t limit, int32_t* out) {
  if (limit <= 0) return 0;
  Place active[kMaxPlaces];
  int count = gather(prompt, text, active);
  double trust = 1;
  int64_t length = 0;
  int32_t voted[kMaxPlaces] = {};
  double votes[kMaxPlaces] = {};
  while (count > 0 && length < limit) {
    int distinct = 0;
    for (int i = 0; i < count; ++i) {
      const int32_t token = *active[i].at;
      int v = 0;
      while (v < distinct && voted[v] != token) ++v;
      if (v == distinct) voted[distinct] = token, votes[distinct++] = 0;
      votes[v] += active[i].weight;
    }
    int best = 0;
    double total = kUnknown;
    for (int v = 0; v < distinct; ++v) {
      total += votes[v];
      if (votes[v] > votes[best]) best = v;
    }
    trust *= 0.95 * votes[best] / total;
    if (trust < token_cost) break;
    out[length++] = voted[best];
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const Place next{active[i].at + 1, active[i].end, active[i].weight};
      if (*active[i].at == voted[best] && next.at < next.end && *next.at != kStart) active[kept++] = next;
    }
    count = kept;
  }
  return length;
}

std::vector<int32_t> RolloutHistory::draft(Ids prompt, Ids generated, int64_t limit) {
  const std::lock_guard lock(mutex_);
  OwnText text;
  text.append(prompt);
  text.append(kStart);
  text.append(generated);
  std::vector<int32_t> out(std::min(limit, kMaxWindow));
  uint64_t key;
  out.resize(follow(find(prompt, key), text, token_cost_, int64_t(out.size()), out.data()));
  return out;
}

RolloutHistory::Handle& RolloutHistory::handle_of(int64_t handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end())
    throw std::invalid_argument("handle " + std::to_string(handle) +
                                " is not tracked; it was released, or never returned by track()");
  return found->second;
}

int64_t RolloutHistory::track(Ids prompt) {
  const std::lock_guard lock(mutex_);
  Handle state;
  state.prompt = intern(prompt);
  state.text.append(prompt);
  state.text.append(kStart);
  state.window = kFirstWindow;
  state.accepted = 1;  // it takes about ten useless drafts to switch drafting off
  state.offered = 0;
  state.token_cost = token_cost_;
  state.next_cooldown = kFirstCooldown;
  ++prompts_[state.prompt].handles;
  handles_.emplace(next_handle_, std::move(state));
  return next_handle_++;
}

void RolloutHistory::extend(int64_t handle, Ids ids) {
  const std::lock_guard lock(mutex_);
  handle_of(handle).text.append(ids);
}

void RolloutHistory::extend_tracked(std::span<const int64_t> handles, Ids ids, const int64_t* lengths) {
  const std::lock_guard lock(mutex_);
  for (int64_t handle : handles) handle_of(handle);  // all or nothing
  for (size_t b = 0, at = 0; b < handles.size(); at += lengths[b++])
    handle_of(handles[b]).text.append(ids.subspan(at, lengths[b]));
}

void RolloutHistory::draft_tracked(std::span<const int64_t> handles, int64_t limit, double token_cost, int64_t* ids,
                                   int64_t* lengths) {
  const std::lock_guard lock(mutex_);
  for (int64_t handle : handles) handle_of(handle);  // all or nothing
  std::vector<int32_t> draft(std::min(limit, kMaxWindow));
  for (size_t b = 0; b < handles.size(); ++b, ids += limit) {
    Handle& state = handle_of(handles[b]);
    lengths[b] = 0;
    state.token_cost = token_cost;
    if (state.cooldown > 0 && state.accepted <= token_cost * state.offered)
      --state.cooldown;
    else
      lengths[b] =
          follow(state.prompt, state.text, token_cost, std::min<int64_t>(draft.size(), state.window), draft.data());
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
      state.window = std::max(kMinWindow, std::min(state.window - 1, 2 * accepted[b]));
    state.accepted = 0.75 * state.accepted + 0.25 * double(accepted[b]);
    state.offered = 0.75 * state.offered + 0.25 * double(offered[b]);
    const double gain = state.accepted - state.token_cost * state.offered;
    if (gain > 0) {
      state.cooldown = 0;
      state.next_cooldown = kFirstCooldown;
    } else if (gain < 0) {
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
