// Exercises csrc/runtime/rollout_history.cpp without Python. Built by tests/rlkernels/test_csrc.py.
//   rollout_history_check [STEPS_OF_A_THREAD [SEED]]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "rollout_history.h"

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);    \
      std::exit(1);                                                   \
    }                                                                 \
  } while (0)

using rlk::RolloutHistory;
using Tokens = std::vector<int32_t>;

Tokens random_tokens(std::mt19937& rng, int longest, int vocabulary) {
  Tokens out(rng() % (longest + 1));
  for (int32_t& t : out) t = int32_t(rng() % vocabulary);
  return out;
}

RolloutHistory* copy(RolloutHistory& history) { return RolloutHistory::from_bytes(history.to_bytes(), "a copy"); }

// Random use by one thread; several run at once on the same history.
void use(RolloutHistory& history, long steps, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<int64_t> handles;
  for (long step = 0; step < steps; ++step) {
    const Tokens prompt{int32_t(rng() % 5)};
    if (step % 500 == 499) CHECK(std::unique_ptr<RolloutHistory>(copy(history))->stats().tokens > 0);
    switch (rng() % 6) {
      case 0:
        history.add(prompt, random_tokens(rng, 60, 4), double(rng() % 3), step / 500);
        break;
      case 1:
        CHECK(history.draft(prompt, random_tokens(rng, 30, 4), 16).size() <= 16);
        CHECK(history.longest_prompt(prompt) <= int64_t(prompt.size()));
        break;
      case 2:
        handles.push_back(history.track(prompt));
        break;
      case 3:
        if (!handles.empty()) history.extend(handles[rng() % handles.size()], random_tokens(rng, 30, 4));
        break;
      case 4: {
        std::vector<int64_t> ids(handles.size() * 8), lengths(handles.size()), taken;
        history.draft_tracked(handles, 8, 0.1, ids.data(), lengths.data());
        for (int64_t length : lengths) taken.push_back(length ? rng() % (length + 1) : 0);
        history.observe(handles, lengths.data(), taken.data());
        break;
      }
      default:
        if (handles.size() > 3) history.release(handles.back()), handles.pop_back();
    }
  }
  for (int64_t handle : handles) history.release(handle);
}

int main(int argc, char** argv) {
  const long steps = argc > 1 ? std::atol(argv[1]) : 3000;
  const unsigned first = argc > 2 ? unsigned(std::atol(argv[2])) : 0;
  std::string data;
  for (int64_t limit : {int64_t(-1), int64_t(500)}) {
    RolloutHistory history(limit, 0.02, 24);
    std::vector<std::thread> threads;
    for (unsigned seed = first; seed < first + 4; ++seed)
      threads.emplace_back(use, std::ref(history), steps, seed);
    for (std::thread& thread : threads) thread.join();
    const auto stats = history.stats();
    CHECK(stats.handles == 0 && stats.tokens > 0 && (limit < 0 || stats.tokens <= limit));
    data = history.to_bytes();
    const std::unique_ptr<RolloutHistory> again(copy(history));
    CHECK(again->stats().tokens == stats.tokens && again->stats().rollouts == stats.rollouts);
    std::mt19937 rng(9);
    for (int i = 0; i < 300; ++i) {
      const Tokens prompt{int32_t(rng() % 6)}, generated = random_tokens(rng, 30, 4);
      CHECK(history.draft(prompt, generated, 8) == again->draft(prompt, generated, 8));
    }
  }
  RolloutHistory ages(-1, 0.02, 24);  // as far apart as epochs can be
  for (int64_t epoch : {INT64_MIN, INT64_MAX}) ages.add(Tokens{1}, Tokens{5, 6, epoch < 0 ? 7 : 8}, 0, epoch);
  CHECK(ages.draft(Tokens{1}, Tokens{5, 6}, 1) == Tokens{8});
  // whatever byte is wrong: an error, never a crash
  std::mt19937 rng(1);
  for (int i = 0; i < 400; ++i) {
    std::string bad = data;
    if (i % 2)
      bad.resize(rng() % data.size());
    else
      bad[rng() % data.size()] ^= char(1 + rng() % 255);
    try {
      delete RolloutHistory::from_bytes(bad, "bytes");
      CHECK(!"refused");
    } catch (const std::invalid_argument&) {
    }
  }
  std::puts("ok");
}
