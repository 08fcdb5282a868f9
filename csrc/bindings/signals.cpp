// Lets the loops of this module look for signals, whose handlers are Python's.
#include "signals.h"

#include <pybind11/pybind11.h>

#include "bindings.h"

namespace py = pybind11;

namespace rlk {
namespace {

#if PY_VERSION_HEX >= 0x030D0000
bool is_finalizing() { return Py_IsFinalizing(); }
#else
bool is_finalizing() { return _Py_IsFinalizing(); }
#endif

// Handlers run in the main thread alone: in others this does nothing.
std::exception_ptr run_handlers() {
  if (is_finalizing()) return nullptr;  // it would never get the interpreter
  const py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() ? std::make_exception_ptr(py::error_already_set()) : nullptr;
}

}  // namespace

void bind_signals() { signal_check = &run_handlers; }

}  // namespace rlk
