// What a rollout history drafts: places where the text occurred before, their votes, and feedback on the drafts.
#include "rollout_history.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace rlk {
namespace {

constexpr int kCandidates = 24;     // occurrences looked at per chain, newest first
constexpr int kOwnCandidates = 16;  // ... in the sequence's own text
constexpr int kMaxPlaces = 2 * kCandidates + kOwnCandidates;
constexpr int kLongMatch = 5;  // one as long as this under the same prompt makes other prompts needless
constexpr int kElsewhere = 3;  // the same prompt is worth as much as this many tokens of context
constexpr double kUnknown = 1;  // weight of "none of these"
constexpr int64_t kFirstWindow = 16, kMinWindow = 6, kMaxWindow = 1 << 16;
constexpr int64_t kFirstCooldown = 8, kMaxCooldown = 1024;

}  // namespace

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

// Follows the heaviest continuation while the next token is likely enough to pay for its verification -> out.
void RolloutHistory::follow(uint32_t prompt, const OwnText& text, double token_cost, int64_t limit,
                            std::vector<int32_t>& out) {
  out.clear();
  if (limit <= 0) return;
  Place active[kMaxPlaces];
  int count = gather(prompt, text, active);
  double trust = 1;
  int32_t voted[kMaxPlaces] = {};
  double votes[kMaxPlaces] = {};
  while (count > 0 && int64_t(out.size()) < limit) {
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
    out.push_back(voted[best]);
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const Place next{active[i].at + 1, active[i].end, active[i].weight};
      if (*active[i].at == voted[best] && next.at < next.end && *next.at != kStart) active[kept++] = next;
    }
    count = kept;
  }
}

std::vector<int32_t> RolloutHistory::draft(Ids prompt, Ids generated, int64_t limit) {
  const std::lock_guard lock(mutex_);
  OwnText text;
  text.append(prompt);
  text.append(kStart);
  text.append(generated);
  std::vector<int32_t> out;
  uint64_t key;
  follow(find(prompt, key), text, token_cost_, limit, out);
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
  state.text.append(prompt);
  state.text.append(kStart);
  state.window = kFirstWindow;
  state.accepted = 1;  // it takes about ten useless drafts to switch drafting off
  state.offered = 0;
  state.token_cost = token_cost_;
  state.next_cooldown = kFirstCooldown;
  const uint32_t id = state.prompt = intern(prompt);
  try {
    handles_.emplace(next_handle_, std::move(state));
  } catch (...) {
    drop_if_unused(id);
    throw;
  }
  ++prompts_[id].handles;
  return next_handle_++;
}

void RolloutHistory::extend(int64_t handle, Ids ids) {
  const std::lock_guard lock(mutex_);
  handle_of(handle).text.append(ids);
}

void RolloutHistory::extend_tracked(std::span<const int64_t> handles, Ids ids, const int64_t* lengths) {
  const std::lock_guard lock(mutex_);
  for (size_t b = 0; b < handles.size(); ++b) handle_of(handles[b]).text.reserve(lengths[b]);  // all or nothing
  for (size_t b = 0, at = 0; b < handles.size(); at += lengths[b++])
    handle_of(handles[b]).text.append(ids.subspan(at, lengths[b]));
}

void RolloutHistory::draft_tracked(std::span<const int64_t> handles, int64_t limit, double token_cost, int64_t* ids,
                                   int64_t* lengths) {
  const std::lock_guard lock(mutex_);
  for (int64_t handle : handles) handle_of(handle);  // all or nothing
  std::vector<int32_t> draft;
  draft.reserve(std::min(limit, kMaxWindow));  // no window is longer: nothing below can fail
  for (size_t b = 0; b < handles.size(); ++b, ids += limit) {
    Handle& state = handle_of(handles[b]);
    draft.clear();
    state.token_cost = token_cost;
    if (state.cooldown > 0 && state.accepted <= token_cost * state.offered)
      --state.cooldown;
    else
      follow(state.prompt, state.text, token_cost, std::min(limit, state.window), draft);
    lengths[b] = int64_t(draft.size());
    std::fill(std::copy(draft.begin(), draft.end(), ids), ids + limit, -1);
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

}  // namespace rlk
