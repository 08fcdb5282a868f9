// What the build can do, asked from Python by rlkernels.info().
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace {

// How many threads at::parallel_for really uses: 1 when the extension was built without OpenMP.
int64_t parallel_threads() {
  std::atomic<uint64_t> seen{0};
  at::parallel_for(0, 1024, 1, [&](int64_t, int64_t) { seen |= uint64_t(1) << (at::get_thread_num() & 63); });
  return __builtin_popcountll(seen);
}

// torch 2.15 makes a RuntimeError of every exception of an op that is not its own.
void set_cpu_isa(const std::string& name) {
  try {
    rlk::set_cpu_isa(name.c_str());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

bool built_with_cuda() {
#ifdef RLK_WITH_CUDA
  return true;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("parallel_threads() -> int", &parallel_threads);
  m.def("built_with_cuda() -> bool", &built_with_cuda);
  m.def("cpu_isa() -> str", []() { return std::string(rlk::isa_name(rlk::cpu_isa())); });
  m.def("set_cpu_isa(str name) -> ()", &set_cpu_isa);
}
