// rlkernels._C.signature(args, kwargs) -> bytes: what the rule of rlkernels/_contexts.py depends on, of torch's modes and
// of each argument, so that Python applies the rule once to a kind of call. A tenth of the time that Python takes to ask.
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "bindings.h"

namespace rlk {
namespace {

struct Facts {
  uint64_t keys = 0;  // of the device type, layout, subclass, transform, and of conjugated and negated views
  int8_t dtype = 0, device = 0;
  uint16_t kind = 0;  // of Kind
  uint32_t rank = 0;
};
static_assert(sizeof(Facts) == 16, "a key has no padding");

enum Kind : uint16_t { kNone = 1, kTensor = 2, kPlainType = 4, kEmptyParameter = 8, kRequiresGrad = 16, kTangent = 32 };

Facts facts_of(PyObject* value, bool with_grad) {
  Facts facts;
  if (value == Py_None) facts.kind = kNone;
  if (value == Py_None || PyFloat_CheckExact(value) || !THPVariable_Check(value)) return facts;
  const at::Tensor& t = THPVariable_Unpack(value);
  const bool nested = t.unsafeGetTensorImpl()->is_nested(), exact = THPVariable_CheckExact(value);
  facts.keys = t.key_set().raw_repr();
  facts.dtype = static_cast<int8_t>(t.scalar_type());
  facts.device = static_cast<int8_t>(t.device().index());
  facts.rank = nested ? 0 : static_cast<uint32_t>(t.dim());
  facts.kind = kTensor;
  if (exact) facts.kind |= kPlainType;
  if (exact && !nested && reinterpret_cast<PyObject*>(Py_TYPE(value)) == ParameterClass && t.numel() == 0)
    facts.kind |= kEmptyParameter;
  if (with_grad && t.requires_grad()) facts.kind |= kRequiresGrad;
  if (t._fw_grad(0).defined()) facts.kind |= kTangent;
  return facts;
}

PyObject* signature(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyTuple_CheckExact(values[0]) && PyDict_CheckExact(values[1]),
                   "signature takes a tuple and a dictionary");
  PyObject *const args = values[0], *const kwargs = values[1], *name, *value;
  Py_ssize_t size = 16 * (1 + PyTuple_GET_SIZE(args) + PyDict_GET_SIZE(kwargs)), length;
  for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value); size += length + 1)
    if (PyUnicode_AsUTF8AndSize(name, &length) == nullptr) return nullptr;
  PyObject* key = PyBytes_FromStringAndSize(nullptr, size);
  if (key == nullptr) return nullptr;
  char* to = PyBytes_AS_STRING(key);
  const auto add = [&to](const void* data, size_t bytes) {
    std::memcpy(to, data, bytes);
    to += bytes;
  };
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const uint64_t modes[2] = {local.included_.raw_repr(), local.excluded_.raw_repr()};
  add(modes, sizeof(modes));
  const bool with_grad = c10::GradMode::is_enabled();
  const auto add_facts = [&](PyObject* of) {
    const Facts facts = facts_of(of, with_grad);
    add(&facts, sizeof(facts));
  };
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) add_facts(PyTuple_GET_ITEM(args, i));
  for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value);) add_facts(value);
  for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value);) {
    const char* text = PyUnicode_AsUTF8AndSize(name, &length);
    add(text, length + 1);
  }
  return key;
  END_HANDLE_TH_ERRORS
}

PyMethodDef kMethods[] = {
    {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&signature)), METH_FASTCALL,
     "signature(args, kwargs) -> bytes"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_signature(pybind11::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), kMethods) != 0) throw pybind11::error_already_set();
}

}  // namespace rlk
