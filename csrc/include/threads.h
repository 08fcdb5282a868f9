// How loops get threads: csrc/ops hands in those of torch, so that nothing below it needs torch.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace rlk {

struct Threads {
  using Range = std::function<void(int64_t begin, int64_t end)>;
  int64_t count;  // that work at a time
  // Calls body on ranges that make up [0, size), of `grain` or more each but for the last.
  std::function<void(int64_t size, int64_t grain, const Range& body)> split;
};

// The calling thread alone.
inline Threads one_thread() {
  return {1, [](int64_t size, int64_t, const Threads::Range& body) {
            if (size > 0) body(0, size);
          }};
}

// Calls work(task, scratch) for every task in [0, count); threads take the next one as they become free. make() builds
// the scratch of a thread.
template <class Make, class Work>
void hand_out(const Threads& threads, int64_t count, const Make& make, const Work& work) {
  std::atomic<int64_t> next{0};
  threads.split(std::min(threads.count, count), 1, [&](int64_t, int64_t) {
    int64_t task = next++;
    if (task >= count) return;
    auto scratch = make();
    for (; task < count; task = next++) work(task, scratch);
  });
}

// The same without scratch: calls work(task).
template <class Work>
void hand_out(const Threads& threads, int64_t count, const Work& work) {
  hand_out(threads, count, [] { return 0; }, [&](int64_t task, int) { work(task); });
}

}  // namespace rlk
