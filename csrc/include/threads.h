// How loops get threads: csrc/ops hands in those of torch, so that nothing below it needs torch.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "signals.h"

namespace rlk {

struct Threads {
  using Range = std::function<void(int64_t begin, int64_t end)>;
  int64_t count;  // that work at a time
  // Calls body on ranges that make up [0, size), of `grain` or more each but for the last.
  std::function<void(int64_t size, int64_t grain, const Range& body)> split;
  std::shared_ptr<SignalWatch> watch;  // of the op
};

// The calling thread alone. Without a watch of the op no signal ends the loop.
inline Threads one_thread(std::shared_ptr<SignalWatch> watch = std::make_shared<SignalWatch>(nullptr)) {
  const auto split = [](int64_t size, int64_t, const Threads::Range& body) {
    if (size > 0) body(0, size);
  };
  return {1, split, std::move(watch)};
}

// The ranges of a loop that are not done. The thread that began it waits for the others here, not where the pool does:
// it has signals to look for.
class Unfinished {
 public:
  Unfinished(int64_t size, SignalWatch& watch) : left_(size), watch_(watch) {}

  void finish(int64_t count) {
    if ((left_ -= count) > 0 || !waiting_) return;
    const std::lock_guard lock(mutex_);
    done_.notify_one();
  }

  void wait() {
    constexpr int kYields = 256;  // some 50 us: sleeping takes as long
    if (!watch_.is_mine()) return;
    for (int i = 0; i < kYields && left_ > 0; ++i) std::this_thread::yield();
    if (left_ <= 0) return;
    waiting_ = true;
    while (left_ > 0 && !watch_.stop()) {  // a handler runs without the lock
      std::unique_lock lock(mutex_);
      done_.wait_for(lock, std::chrono::seconds(1), [&] { return left_ <= 0; });
    }
  }

 private:
  std::atomic<int64_t> left_;
  std::atomic<bool> waiting_{false};
  SignalWatch& watch_;
  std::mutex mutex_;
  std::condition_variable done_;
};

// Calls body as threads.split does; it returns early when the watch says so. Throws what a handler of signals has thrown.
template <class Body>
void split_watched(const Threads& threads, int64_t size, int64_t grain, const Body& body) {
  Unfinished unfinished(size, *threads.watch);
  threads.split(size, grain, [&](int64_t begin, int64_t end) {
    struct Finish {  // also when the body throws
      Unfinished& unfinished;
      const int64_t count;
      ~Finish() { unfinished.finish(count); }
    };
    {
      const Finish finish{unfinished, end - begin};
      body(begin, end);
    }
    unfinished.wait();
  });
  threads.watch->rethrow();
}

// Calls work(task, scratch) for every task in [0, count); threads take the next one as they become free. make() builds
// the scratch of a thread. A long task asks the watch in between.
template <class Make, class Work>
void hand_out(const Threads& threads, int64_t count, const Make& make, const Work& work) {
  std::atomic<int64_t> next{0};
  split_watched(threads, std::min(threads.count, count), 1, [&](int64_t, int64_t) {
    int64_t task = next++;
    if (task >= count) return;
    auto scratch = make();
    for (; task < count && !threads.watch->stop(); task = next++) work(task, scratch);
  });
}

// The same without scratch: calls work(task).
template <class Work>
void hand_out(const Threads& threads, int64_t count, const Work& work) {
  hand_out(threads, count, [] { return 0; }, [&](int64_t task, int) { work(task); });
}

// Calls work(begin, end, scratch) on ranges that make up [0, size), of `grain` or more each but for the last of a thread.
template <class Make, class Work>
void for_ranges(const Threads& threads, int64_t size, int64_t grain, const Make& make, const Work& work) {
  constexpr int64_t kParts = 64;  // of a thread's share
  split_watched(threads, size, grain, [&](int64_t begin, int64_t end) {
    auto scratch = make();
    const int64_t step = std::max(grain, (end - begin) / kParts);
    for (; begin < end && !threads.watch->stop(); begin += step) work(begin, std::min(begin + step, end), scratch);
  });
}

// The same without scratch: calls work(begin, end).
template <class Work>
void for_ranges(const Threads& threads, int64_t size, int64_t grain, const Work& work) {
  for_ranges(threads, size, grain, [] { return 0; }, [&](int64_t begin, int64_t end, int) { work(begin, end); });
}

}  // namespace rlk
