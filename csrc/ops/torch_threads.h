// The threads of torch, for the algorithms of csrc/include.
#pragma once
#include <ATen/Parallel.h>

#include "threads.h"

namespace rlk {

inline Threads torch_threads() {
  return {at::get_num_threads(), [](int64_t size, int64_t grain, const Threads::Range& body) {
            at::parallel_for(0, size, grain, body);
          }};
}

}  // namespace rlk
