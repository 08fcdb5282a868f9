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
  constexpr auto largest = std::numeric_limits<BlockPool::Token>::max();
  if (id < 0 || id > largest)
    throw py::value_error("token_ids must be between 0 and " + std::to_string(largest) + ", got " + std::to_string(id));
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
using Counts = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// The tokens of each of several sequences, whose tokens lie one after the other.
std::vector<BlockPool::Tokens> split(const Tokens& tokens, const Counts& counts, size_t sequences) {
  std::vector<BlockPool::Tokens> spans;
  spans.reserve(sequences);
  int64_t at = 0;
  for (py::ssize_t i = 0; i < counts.size(); ++i) {
    const int64_t count = counts.data()[i], left = int64_t(tokens.size()) - at;
    if (count < 0 || count > left) break;
    spans.emplace_back(tokens.data() + at, count);
    at += count;
  }
  if (spans.size() != sequences || at != int64_t(tokens.size()))
    throw py::value_error("counts must divide the " + std::to_string(tokens.size()) + " tokens among " +
                          std::to_string(sequences) + " sequences");
  return spans;
}

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

// Slots of the last tokens of each sequence, so many of each, one after the other, int64 [T].
py::array_t<int64_t> slots(const BlockPool& pool, const Handles& handles, const Counts& all_counts) {
  if (all_counts.size() != py::ssize_t(handles.size())) throw py::value_error("a sequence has no count");
  const int64_t* counts = all_counts.data();
  int64_t total = 0;
  for (size_t i = 0; i < handles.size(); ++i) {
    const int64_t length = int64_t(pool.sequence(handles[i]).tokens.size());
    if (counts[i] < 0 || counts[i] > length) throw py::value_error("a sequence has fewer tokens than asked for");
    total += counts[i];
  }
  py::array_t<int64_t> out(total);
  int64_t* to = out.mutable_data();
  const int64_t size = pool.block_size();
  for (size_t i = 0; i < handles.size(); ++i) {
    const auto& sequence = pool.sequence(handles[i]);
    const int64_t length = int64_t(sequence.tokens.size());
    for (int64_t t = length - counts[i]; t < length; ++t)
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
      .def("append", [](BlockPool& pool, const Handles& handles, const py::object& ids, const Counts& counts) {
        const Tokens tokens = to_tokens(ids);
        return pool.append(handles, split(tokens, counts, handles.size()));
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
