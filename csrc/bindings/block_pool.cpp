// Python's view of the block pool: rlkernels._C.BlockPool, the same calls as rlkernels.prefix_cache.block_pool.
#include "../runtime/block_pool.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>

#include "bindings.h"

namespace py = pybind11;

namespace rlk {
namespace {

using Tokens = std::vector<BlockPool::Token>;

BlockPool::Token token(long long id) {
  if (id < std::numeric_limits<BlockPool::Token>::min() || id > std::numeric_limits<BlockPool::Token>::max())
    throw py::value_error("token_ids must fit into 32 bits, got " + std::to_string(id));
  return static_cast<BlockPool::Token>(id);
}

Tokens to_tokens(const py::handle& ids) {
  Tokens out;
  if (PyList_Check(ids.ptr()) || PyTuple_Check(ids.ptr())) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(ids.ptr());
    PyObject** items = PySequence_Fast_ITEMS(ids.ptr());
    out.resize(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const long long id = PyLong_AsLongLong(items[i]);
      if (id == -1 && PyErr_Occurred()) throw py::error_already_set();
      out[i] = token(id);
    }
    return out;
  }
  const auto array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>::ensure(ids);
  if (!array || array.ndim() != 1) throw py::type_error("token_ids must be a list or a 1-dimensional array of integers");
  out.resize(array.size());
  std::transform(array.data(), array.data() + array.size(), out.begin(), [](int64_t id) { return token(id); });
  return out;
}

struct TokenLists {
  std::vector<Tokens> lists;
  std::vector<BlockPool::Tokens> spans;
  explicit TokenLists(const py::sequence& all) {
    lists.reserve(py::len(all));
    for (const auto& ids : all) lists.push_back(to_tokens(ids));
    spans.assign(lists.begin(), lists.end());
  }
};

using Handles = std::vector<BlockPool::Handle>;

// Block tables int32 [B, most blocks], filled up with -1, and lengths int32 [B].
std::pair<py::array_t<int32_t>, py::array_t<int32_t>> tables(const BlockPool& pool, const Handles& handles) {
  size_t width = 0;
  for (const auto handle : handles) width = std::max(width, pool.sequence(handle).table.size());
  py::array_t<int32_t> out({handles.size(), width}), lengths(handles.size());
  int32_t* row = out.mutable_data();
  for (size_t i = 0; i < handles.size(); ++i, row += width) {
    const auto& sequence = pool.sequence(handles[i]);
    std::fill(std::copy(sequence.table.begin(), sequence.table.end(), row), row + width, -1);
    lengths.mutable_data()[i] = int32_t(sequence.tokens.size());
  }
  return {out, lengths};
}

// Slots of the tokens of each sequence from its start on, one after the other, int64 [T].
py::array_t<int64_t> slots(const BlockPool& pool, const Handles& handles, const std::vector<int64_t>& starts) {
  int64_t total = 0;
  for (size_t i = 0; i < handles.size(); ++i)
    total += std::max<int64_t>(0, int64_t(pool.sequence(handles[i]).tokens.size()) - starts.at(i));
  py::array_t<int64_t> out(total);
  int64_t* to = out.mutable_data();
  const int64_t size = pool.block_size();
  for (size_t i = 0; i < handles.size(); ++i) {
    const auto& sequence = pool.sequence(handles[i]);
    for (int64_t t = starts[i]; t < int64_t(sequence.tokens.size()); ++t)
      *to++ = sequence.table[t / size] * size + t % size;
  }
  return out;
}

}  // namespace

// Python puts its own exception in the place of the module's OutOfBlocks.
void bind_block_pool(py::module_& m) {
  static const py::handle module = m;
  m.attr("OutOfBlocks") = py::handle(PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const OutOfBlocks& e) {
      PyErr_SetString(py::object(module.attr("OutOfBlocks")).ptr(), e.what());
    }
  });
  py::class_<BlockPool>(m, "BlockPool")
      .def(py::init<int64_t, int64_t>(), py::arg("num_blocks"), py::arg("block_size"))
      .def("open_many", [](BlockPool& pool, const py::sequence& prompts) {
        return pool.open_many(TokenLists(prompts).spans);
      })
      .def("append", [](BlockPool& pool, const Handles& handles, const py::sequence& tokens) {
        return pool.append(handles, TokenLists(tokens).spans);
      })
      .def("truncate", &BlockPool::truncate)
      .def("fork", &BlockPool::fork)
      .def("commit", &BlockPool::commit)
      .def("close", &BlockPool::close)
      .def("advance_version", &BlockPool::advance_version)
      .def("length", [](const BlockPool& pool, int64_t handle) { return pool.sequence(handle).tokens.size(); })
      .def("num_cached", [](const BlockPool& pool, int64_t handle) { return pool.sequence(handle).num_cached; })
      .def("computed", [](const BlockPool& pool, int64_t handle) { return pool.sequence(handle).computed; })
      .def("token_ids", [](const BlockPool& pool, int64_t handle) { return pool.sequence(handle).tokens; })
      .def("tables", &tables)
      .def("slots", &slots)
      .def("counts", [](const BlockPool& pool) {
        const int64_t free = pool.free_blocks(), cached = pool.cached_blocks();
        return std::tuple(free, cached, pool.num_blocks() - free - cached);
      })
      .def("check", &BlockPool::check)
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("block_size", &BlockPool::block_size)
      .def_property_readonly("version", &BlockPool::version)
      .def_property_readonly("hits", &BlockPool::hits)
      .def_property_readonly("misses", &BlockPool::misses)
      .def_property_readonly("evictions", &BlockPool::evictions);
}

}  // namespace rlk
