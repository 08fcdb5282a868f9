// Exercises csrc/include/threads.h without torch and Python. Built by tests/rlkernels/test_csrc.py.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "threads.h"

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);    \
      std::exit(1);                                                   \
    }                                                                 \
  } while (0)

using namespace rlk;

struct Interrupt : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::atomic<int> looks{0};
std::thread::id looked_in;

std::exception_ptr let_go_on() {
  ++looks;
  looked_in = std::this_thread::get_id();
  return nullptr;
}
std::exception_ptr interrupt() {
  let_go_on();
  return std::make_exception_ptr(Interrupt("signal"));
}

constexpr int64_t kThreads = 4;

// As torch's: the calling thread works too, an exception of any thread reaches it.
Threads pool(SignalCheck signals) {
  const auto split = [](int64_t size, int64_t grain, const Threads::Range& body) {
    const int64_t each = std::max(grain, (size + kThreads - 1) / kThreads);
    std::exception_ptr error;
    std::mutex mutex;
    const auto run = [&](int64_t begin) {
      try {
        body(begin, std::min(begin + each, size));
      } catch (...) {
        const std::lock_guard lock(mutex);
        error = std::current_exception();
      }
    };
    std::vector<std::thread> others;
    for (int64_t begin = each; begin < size; begin += each) others.emplace_back(run, begin);
    if (size > 0) run(0);
    for (std::thread& other : others) other.join();
    if (error) std::rethrow_exception(error);
  };
  return {kThreads, split, std::make_shared<SignalWatch>(signals)};
}

void rest(int ms = 5) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

template <class Loop>
bool is_interrupted(const Loop& loop) {
  try {
    loop();
  } catch (const Interrupt&) {
    return true;
  }
  return false;
}

int main() {
  const auto mine = std::this_thread::get_id();
  const auto never = [](int64_t) { CHECK(false); };
  for (const SignalCheck check : {SignalCheck(nullptr), &interrupt}) {  // too short to look
    const Threads threads = pool(check);
    for (int64_t size : {0, 1, 3, 4, 1000}) {
      std::vector<std::atomic<int>> seen(size);
      hand_out(threads, size, [&](int64_t i) { ++seen[i]; });
      for_ranges(threads, size, 3, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++seen[i];
      });
      for (const auto& count : seen) CHECK(count == 2);
    }
  }
  CHECK(looks == 0);

  std::atomic<int64_t> done{0};
  const int64_t many = 1 << 20;
  CHECK(is_interrupted([&] { hand_out(pool(&interrupt), many, [&](int64_t) { rest(), ++done; }); }));
  CHECK(looks == 1 && looked_in == mine && done > 0 && done < many);
  done = 0;
  CHECK(is_interrupted([&] { for_ranges(pool(&interrupt), 512, 1, [&](int64_t, int64_t) { rest(20), ++done; }); }));
  CHECK(looks == 2 && done > 0 && done < 256);
  // the calling thread has nothing left to do while the others are in long tasks
  const auto others_begin = [&](std::atomic<int>& begun) {
    if (std::this_thread::get_id() != mine) return ++begun, false;
    while (begun < kThreads - 1) rest();
    return true;
  };
  std::atomic<int> begun{0};
  CHECK(is_interrupted([&] {
    const Threads threads = pool(&interrupt);
    hand_out(threads, kThreads, [&](int64_t) {
      if (others_begin(begun)) return;
      while (!threads.watch->stop()) rest();
    });
  }));
  // loops of one op that are all short
  CHECK(is_interrupted([&] {
    const Threads threads = pool(&interrupt);
    while (true) hand_out(threads, kThreads, [&](int64_t) { rest(); });
  }));
  CHECK(looks == 4 && looked_in == mine);
  // handlers that throw nothing
  begun = 0, done = 0;
  hand_out(pool(&let_go_on), kThreads, [&](int64_t) {
    if (!others_begin(begun))
      while (looks < 6) rest();
    ++done;
  });
  CHECK(done == kThreads && looks >= 6 && looked_in == mine);
  // an exception of a task, in whichever thread
  for (int64_t bad : {0, 1, 999}) {
    bool caught = false;
    try {
      hand_out(pool(&interrupt), 1000, [&](int64_t i) {
        if (i == bad) throw std::out_of_range("task");
      });
    } catch (const std::out_of_range&) {
      caught = true;
    }
    CHECK(caught);
  }
  hand_out(one_thread(), 0, never);
  return 0;
}
