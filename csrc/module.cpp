// The Python module rlkernels._C. Importing it registers the torch ops of csrc/ops under torch.ops.rlkernels.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of rlkernels";
  rlk::bind_block_pool(m);
  rlk::bind_rollout_history(m);
  rlk::bind_signals();
  rlk::bind_signature(m);
}
