// Random operations on the host structures, whose allocations fail, one after the other: what throws has changed
// nothing, and goes well when there is memory again. Built by tests/rlkernels/test_csrc.py.
//   allocation_failures SEEDS
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <string>

#include "block_pool.h"
#include "rollout_history.h"

namespace {

long allowed = -1;  // allocations until one fails; < 0: none fails
long failures = 0;

using Tokens = std::vector<int32_t>;

// Calls f with its first, second, ... allocation failing until none is left that could.
template <class F, class S>
void each_fails(F&& f, S&& state) {
  const auto before = state();
  for (long n = 0;; ++n) {
    allowed = n;
    try {
      f();
      allowed = -1;
      return;
    } catch (const std::bad_alloc&) {
      allowed = -1;
      ++failures;
    }
    if (state() != before) {
      std::printf("allocation %ld failed, and something has changed\n", n);
      std::exit(1);
    }
  }
}

struct Rng {
  std::mt19937 engine;
  int below(int n) { return int(engine() % unsigned(n)); }
  Tokens tokens(int most, int vocabulary) {
    Tokens out(below(most + 1));
    for (int32_t& token : out) token = below(vocabulary);
    return out;
  }
  Tokens alike(int most) {  // few different tokens, so that prompts have beginnings in common
    Tokens out(below(most + 1));
    for (int32_t& token : out) token = below(8) ? 1 : below(3);
    return out;
  }
};

void history(unsigned seed) {
  Rng rng{std::mt19937(seed)};
  rlk::RolloutHistory history(seed % 2 ? 900 : -1, 0.02, 24);
  std::vector<int64_t> handles;
  const auto state = [&] {
    const auto stats = history.stats();
    std::string all = history.to_bytes();
    for (int64_t count : {stats.handles, stats.prompts, stats.evicted}) all += ' ' + std::to_string(count);
    std::vector<int64_t> ids(handles.size() * 16), lengths(handles.size());
    history.draft_tracked(handles, 16, 0.001, ids.data(), lengths.data());
    for (int64_t id : ids) all += ' ' + std::to_string(id);
    return all;
  };
  for (int step = 0; step < 160; ++step) {
    const Tokens prompt(size_t(1 + rng.below(3)), rng.below(9)), more = rng.tokens(90, 6);
    handles.reserve(handles.size() + 1);
    switch (rng.below(5)) {
      case 0:
      case 1:
        each_fails([&] { history.add(prompt, more, rng.below(3), step / 20); }, state);
        break;
      case 2:
        each_fails([&] { handles.push_back(history.track(prompt)); }, state);
        break;
      case 3:
        if (step % 40 == 3) each_fails([&] { history.resize(step % 80 == 3 ? 300 : -1); }, state);
        if (!handles.empty()) history.release(handles.back()), handles.pop_back();
        break;
      default:
        std::vector<int64_t> lengths(handles.size());
        Tokens ids;
        for (int64_t& length : lengths) {
          const Tokens own = rng.tokens(30, 6);
          ids.insert(ids.end(), own.begin(), own.end());
          length = int64_t(own.size());
        }
        each_fails([&] { history.extend_tracked(handles, ids, lengths.data()); }, state);
    }
  }
}

long refused = 0, hits = 0, evictions = 0;

void pool(unsigned seed) {
  Rng rng{std::mt19937(seed)};
  const int size = 1 + rng.below(5);
  rlk::BlockPool pool(20 + rng.below(40), size);
  std::vector<rlk::BlockPool::Handle> open;
  const auto state = [&] {
    pool.check();
    std::vector<int64_t> all{pool.free_blocks(), pool.cached_blocks(), pool.hits(), pool.misses(), pool.evictions()};
    for (const auto handle : open) {
      const auto& sequence = pool.sequence(handle);
      all.insert(all.end(), sequence.tokens.begin(), sequence.tokens.end());
      all.insert(all.end(), sequence.table.begin(), sequence.table.end());
    }
    return all;
  };
  for (int step = 0; step < 3000; ++step) {
    open.reserve(open.size() + 8);
    const int what = open.empty() ? 0 : rng.below(8);
    const size_t pick = open.empty() ? 0 : size_t(rng.below(int(open.size())));
    const std::vector<Tokens> lists{rng.alike(8 * size), rng.alike(8 * size)};
    const std::vector<rlk::BlockPool::Tokens> spans(lists.begin(), lists.end());
    std::vector<rlk::BlockPool::Handle> made, some{open.empty() ? 0 : open[pick]};
    if (open.size() > 1) some.push_back(open[(pick + 1) % open.size()]);
    const auto before = state();
    try {
      if (what < 2) each_fails([&] { made = pool.open_many(spans); }, state);
      if (what == 2) each_fails([&] { pool.append(some, {spans.data(), some.size()}); }, state);
      if (what == 3) each_fails([&] { made = pool.fork(open[pick], rng.below(5)); }, state);
      if (what == 4) each_fails([&] { pool.commit(open[pick]); }, state);
      allowed = what < 5 ? -1 : 0;  // the others need none
      if (what == 5) pool.close(open[pick]), open.erase(open.begin() + long(pick));
      if (what == 6) pool.truncate(open[pick], rng.below(int(pool.sequence(open[pick]).tokens.size()) + 1));
      if (what == 7 && rng.below(4) == 0) pool.advance_version();
      allowed = -1;
    } catch (const rlk::OutOfBlocks&) {
      allowed = -1;
      ++refused;
      if (state() != before) std::puts("a refusal has changed something"), std::exit(1);
      for (const auto handle : open) pool.close(handle);
      open.clear();
    }
    open.insert(open.end(), made.begin(), made.end());
  }
  hits += long(pool.hits());
  evictions += long(pool.evictions());
}

}  // namespace

void* operator new(std::size_t size) {
  if (allowed >= 0 && allowed-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int, char** argv) {
  for (int seed = std::atoi(argv[1]); seed > 0; --seed) history(unsigned(seed)), pool(unsigned(seed));
  std::printf("%ld failures, %ld refused, %ld hits, %ld evictions\n", failures, refused, hits, evictions);
  return failures > 200 && refused && hits && evictions ? 0 : 2;
}
