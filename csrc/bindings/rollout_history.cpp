// rlkernels._C.RolloutHistory: arrays in, arrays out; the interpreter lock is released while the index works.
#include "../runtime/rollout_history.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"

namespace py = pybind11;

namespace rlk {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
using IdArray = Array<int32_t>;
using LongArray = Array<int64_t>;

template <class T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), size_t(array.size())};
}

// Runs f without the interpreter lock.
template <class F>
auto unlocked(F&& f) {
  const py::gil_scoped_release release;
  return f();
}

void check_length(const LongArray& array, py::ssize_t length, const char* name) {
  if (array.size() != length) throw std::invalid_argument(std::string(name) + " must have one entry per handle");
}

}  // namespace

void bind_rollout_history(py::module_& m) {
  using History = RolloutHistory;
  py::class_<History>(m, "RolloutHistory")
      .def(py::init([](std::optional<int64_t> max_tokens, double token_cost, int depth) {
        return std::make_unique<History>(max_tokens.value_or(-1), token_cost, depth);
      }))
      .def("add",
           [](History& h, const IdArray& prompt, const IdArray& response, double reward, int64_t epoch) {
             unlocked([&] { h.add(view(prompt), view(response), reward, epoch); });
           })
      .def("resize",
           [](History& h, std::optional<int64_t> max_tokens) { unlocked([&] { h.resize(max_tokens.value_or(-1)); }); })
      .def("draft",
           [](History& h, const IdArray& prompt, const IdArray& generated, int64_t limit) {
             return unlocked([&] { return h.draft(view(prompt), view(generated), limit); });
           })
      .def("track", [](History& h, const IdArray& prompt) { return unlocked([&] { return h.track(view(prompt)); }); })
      .def("extend",
           [](History& h, int64_t handle, const IdArray& ids) { unlocked([&] { h.extend(handle, view(ids)); }); })
      .def("extend_tracked",
           [](History& h, const LongArray& handles, const IdArray& ids, const LongArray& lengths) {
             check_length(lengths, handles.size(), "lengths");
             int64_t total = 0;
             for (py::ssize_t i = 0; i < lengths.size(); ++i) total += lengths.data()[i];
             if (total != ids.size()) throw std::invalid_argument("lengths must add up to the number of ids");
             unlocked([&] { h.extend_tracked(view(handles), view(ids), lengths.data()); });
           })
      .def("draft_tracked",
           [](History& h, const LongArray& handles, int64_t limit, std::optional<double> token_cost) {
             py::array_t<int64_t> ids({handles.size(), py::ssize_t(limit)}), lengths(handles.size());
             const double cost = token_cost.value_or(h.token_cost());
             int64_t *id = ids.mutable_data(), *length = lengths.mutable_data();
             unlocked([&] { h.draft_tracked(view(handles), limit, cost, id, length); });
             return py::make_tuple(ids, lengths);
           })
      .def("observe",
           [](History& h, const LongArray& handles, const LongArray& offered, const LongArray& accepted) {
             check_length(offered, handles.size(), "offered");
             check_length(accepted, handles.size(), "accepted");
             unlocked([&] { h.observe(view(handles), offered.data(), accepted.data()); });
           })
      .def("release", [](History& h, int64_t handle) { unlocked([&] { h.release(handle); }); })
      .def("longest_prompt",
           [](History& h, const IdArray& ids) { return unlocked([&] { return h.longest_prompt(view(ids)); }); })
      .def("to_bytes",
           [](History& h) {
             const std::string bytes = unlocked([&] { return h.to_bytes(); });
             py::array_t<uint8_t> out(py::ssize_t(bytes.size()));
             std::copy(bytes.begin(), bytes.end(), out.mutable_data());
             return out;
           })
      .def_static("from_bytes",
                  [](const std::string& bytes, const std::string& name) {
                    return unlocked([&] { return std::unique_ptr<History>(History::from_bytes(bytes, name)); });
                  })
      .def("stats", [](History& h) {
        const History::Stats s = unlocked([&] { return h.stats(); });
        py::dict out;
        out["tokens"] = s.tokens;
        out["rollouts"] = s.rollouts;
        out["prompts"] = s.prompts;
        out["handles"] = s.handles;
        out["evicted"] = s.evicted;
        out["newest_epoch"] = s.newest_epoch;
        out["bytes"] = s.bytes;
        return out;
      });
}

}  // namespace rlk
