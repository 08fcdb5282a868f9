// The threads of torch, for the algorithms of csrc/include; an op asks for them once.
#pragma once
#include <ATen/Parallel.h>

#include "threads.h"

namespace rlk {

inline Threads torch_threads() {
  const auto split = [](int64_t size, int64_t grain, const Threads::Range& body) {
    at::parallel_for(0, size, grain, body);
  };
  return {at::get_num_threads(), split, std::make_shared<SignalWatch>(signal_check.load())};
}

}  // namespace rlk
