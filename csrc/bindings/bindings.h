// The host data structures of csrc/runtime as Python sees them; module.cpp puts them together.
#pragma once
#include <pybind11/pybind11.h>

namespace rlk {

void bind_block_pool(pybind11::module_& m);
void bind_rollout_history(pybind11::module_& m);
void bind_signals();

}  // namespace rlk
