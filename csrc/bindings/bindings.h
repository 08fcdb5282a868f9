// What Python sees beside the ops: host data structures and the signature of a call; module.cpp puts it together.
#pragma once
#include <pybind11/pybind11.h>

namespace rlk {

void bind_block_pool(pybind11::module_& m);
void bind_rollout_history(pybind11::module_& m);
void bind_signals();
void bind_signature(pybind11::module_& m);

}  // namespace rlk
