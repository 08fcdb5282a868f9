// Earlier rollouts and the drafts they give; no torch, no Python. Semantics: rlkernels/history/reference.py.
//
// All responses lie in one array of tokens, each behind a START. Position p in it stands for "the token at p follows
// what comes before p". Three chains run through the positions, newest first: through those that the same two tokens
// under the same prompt lead up to, and through those that the same five, or three, lead up to under any prompt. A
// hash table without keys (they are read from the tokens) holds the head of each chain. That is 16 bytes per token
// and 4 bytes per table slot. An evicted response is skipped until a fifth of the array is such; then everything is
// packed and indexed again.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "own_text.h"

namespace rlk {

using Ids = std::span<const int32_t>;

enum Chain { kLocal, kLong, kShort, kChains };     // the same prompt; any prompt
constexpr int kGram[kChains] = {2, 5, 3};          // tokens that must match
constexpr int kMinDepth = kGram[kLong], kMaxDepth = 64;

class RolloutHistory {
 public:
  // max_tokens < 0: unbounded. kMinDepth <= depth <= kMaxDepth.
  RolloutHistory(int64_t max_tokens, double token_cost, int depth);

  void add(Ids prompt, Ids response, double reward, int64_t epoch);
  void resize(int64_t max_tokens);  // another bound, for what is there too; < 0: unbounded
  std::vector<int32_t> draft(Ids prompt, Ids generated, int64_t limit);
  int64_t track(Ids prompt);
  void extend(int64_t handle, Ids ids);
  void extend_tracked(std::span<const int64_t> handles, Ids ids, const int64_t* lengths);  // ids: side by side
  // -> ids [handles, limit], -1 beyond each length, and lengths [handles]
  void draft_tracked(std::span<const int64_t> handles, int64_t limit, double token_cost, int64_t* ids,
                     int64_t* lengths);
  void observe(std::span<const int64_t> handles, const int64_t* offered, const int64_t* accepted);
  void release(int64_t handle);
  int64_t longest_prompt(Ids ids);  // length of the longest prompt with answers that ids begin with; 0: none

  std::string to_bytes();  // the rollouts, not the handles
  // `name` stands in messages; std::invalid_argument when they are damaged
  static RolloutHistory* from_bytes(const std::string& bytes, const std::string& name);

  struct Stats {
    int64_t tokens, rollouts, prompts, handles, evicted, bytes;
    std::optional<int64_t> newest_epoch;
  };
  Stats stats();
  double token_cost() const { return token_cost_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t(0);
  struct Rollout {
    uint32_t start, length;  // of its tokens
    uint32_t prompt;
    bool alive;
    double reward;
    int64_t epoch;
  };
  struct Prompt {
    std::vector<int32_t> tokens;
    uint32_t rollouts = 0, handles = 0;  // that refer to it
  };
  struct Handle {
    uint32_t prompt;
    OwnText text;
    int64_t window;
    double accepted, offered;  // draft tokens per observed step, running means
    double token_cost;         // of its last draft
    int64_t cooldown = 0, next_cooldown;
  };
  struct Victim {  // ordered so that the heap's top goes first
    int64_t epoch;
    double reward;
    uint32_t rollout;
  };
  struct Place {
    const int32_t *at, *end;  // the token that may come next, and the end of what is known there
    double weight;
  };
  class Table {  // open addressing over chain heads; 0.47 to 0.7 full
   public:
    std::vector<uint32_t> slots;
    size_t used = 0;
  };
  Ids gram_at(uint32_t position, int size, int32_t* buffer) const;
  uint64_t hash_of(Chain chain, uint32_t prompt, Ids gram) const;
  uint32_t* slot_of(Chain chain, uint32_t prompt, Ids gram);
  void grow(Chain chain);
  void index(uint32_t rollout);
  void store(uint32_t prompt, Ids response, double reward, int64_t epoch);
  void put(uint32_t prompt, Ids response, double reward, int64_t epoch);
  void make_heap();
  void evict_surplus();
  void pack();
  uint32_t owner(uint32_t position) const;
  uint32_t intern(Ids prompt);
  uint32_t find(Ids prompt, uint64_t& key) const;
  void drop_if_unused(uint32_t prompt);
  int places(Chain chain, uint32_t prompt, const int32_t* context, Place* out, int& longest);
  int own_places(const OwnText& text, Place* out) const;
  int gather(uint32_t prompt, const OwnText& text, Place* out);
  void follow(uint32_t prompt, const OwnText& text, double token_cost, int64_t limit, std::vector<int32_t>& out);
  Handle& handle_of(int64_t handle);

  int64_t max_tokens_;
  const double token_cost_;
  const int depth_;
  std::mutex mutex_;
  std::vector<int32_t> tokens_;
  std::vector<uint32_t> previous_[kChains];  // position -> the next older position of its chain
  Table heads_[kChains];
  std::vector<Rollout> rollouts_;      // in the order of their starts
  std::vector<uint32_t> block_owner_;  // the rollout that holds position 64 * b
  std::vector<Victim> heap_;
  std::vector<Prompt> prompts_;
  std::vector<uint32_t> free_prompts_;
  std::unordered_map<uint64_t, uint32_t> prompt_ids_;
  std::map<size_t, int64_t> prompt_lengths_;  // length -> prompts of it
  std::unordered_map<int64_t, Handle> handles_;
  int64_t next_handle_ = 0;
  int64_t live_tokens_ = 0, live_rollouts_ = 0, dead_tokens_ = 0, evicted_ = 0;
  int64_t newest_epoch_ = 0;
  bool any_epoch_ = false;
};

}  // namespace rlk
