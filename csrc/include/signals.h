// Signals in ops that can take seconds: the thread that called an op looks for them about once a second, so that Ctrl-C
// ends it. Not for an op that writes to its inputs, which goes on to its end.
#pragma once
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

namespace rlk {

// Runs the handlers of signals that have come -> what one of them has thrown, or null.
using SignalCheck = std::exception_ptr (*)();
inline std::atomic<SignalCheck> signal_check{nullptr};  // csrc/bindings sets it

// Of one op. Handlers may run other ops: no lock may be held while `stop` is called.
class SignalWatch {
 public:
  explicit SignalWatch(SignalCheck check) : check_(check) {}

  // True when the op is to end. Any thread may ask.
  bool stop() {
    if (check_ && is_mine()) {
      const auto now = Clock::now();
      if (now >= next_) {
        if (!thrown_) thrown_ = check_();
        stopped_ = thrown_ != nullptr;
        next_ = Clock::now() + std::chrono::seconds(1);
      }
    }
    return stopped_.load(std::memory_order_relaxed);
  }

  // Throws what a handler has thrown; in the thread that made this.
  void rethrow() const {
    if (thrown_) std::rethrow_exception(thrown_);
  }

  bool is_mine() const { return std::this_thread::get_id() == owner_; }

 private:
  using Clock = std::chrono::steady_clock;
  const SignalCheck check_;
  const std::thread::id owner_ = std::this_thread::get_id();
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(1);
  std::exception_ptr thrown_;
  std::atomic<bool> stopped_{false};
};

}  // namespace rlk
