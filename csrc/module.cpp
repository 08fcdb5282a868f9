// The Python module rlkernels._C. Importing it registers the torch ops of csrc/ops under torch.ops.rlkernels;
// the host data structures of csrc/runtime are bound here.
#include <pybind11/pybind11.h>

void bind_block_pool(pybind11::module_& m);  // csrc/ops/block_pool.cpp
namespace rlk {
void bind_rollout_history(pybind11::module_& m);  // csrc/runtime/rollout_history_bind.cpp
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of rlkernels";
  bind_block_pool(m);
  rlk::bind_rollout_history(m);
}
