// The Python module rlkernels._C. Importing it registers the torch ops of csrc/ops under torch.ops.rlkernels;
// the host data structures of csrc/runtime are bound here.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, m) { m.doc() = "Compiled part of rlkernels"; }
