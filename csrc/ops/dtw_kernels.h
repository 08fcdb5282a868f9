// What the dynamic time warping ops share: their per-ISA kernels, the inputs in a form for them, tiles of lanes.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>
#include <vector>

#include "dispatch.h"
#include "dtw.h"

RLK_DECLARE_KERNEL(int, dtw_tile_lanes, )
RLK_DECLARE_KERNEL(bool, dtw_not_finite, const float*, int64_t)
RLK_DECLARE_KERNEL(void, dtw_pack, const float*, int64_t, const int64_t*, const int64_t*, int64_t, float*)
RLK_DECLARE_KERNEL(void, dtw_tile, const DtwRow&, const DtwTile&, int64_t, float*, float*)
RLK_DECLARE_KERNEL(void, dtw_tile_subsequence, const DtwRow&, const DtwTile&, float*, int32_t*, float*, int32_t*, int32_t*)
RLK_DECLARE_KERNEL(void, dtw_bound, const DtwRow&, const DtwTile&, const float*, const float*, const float*, float*)

namespace rlk {

// A batch of trajectories [count, columns, dims] and which of them the kernels can take.
struct Series {
  const float* values;
  int64_t count, columns, dims;
  std::vector<int64_t> lengths;
  std::vector<char> bad;         // a value inside the length is NaN or infinite
  std::vector<int64_t> active;   // neither bad nor empty, longest first

  int64_t stride() const { return columns * dims; }
  bool is_active(int64_t i) const { return lengths[i] > 0 && !bad[i]; }
  DtwRow row(int64_t i) const { return {values + i * stride(), lengths[i]}; }
};

Series read_series(const char* name, const at::Tensor& x, const std::optional<at::Tensor>& lengths);

// The cost where at least one of the pair is not active.
float special_cost(const Series& x, int64_t i, const Series& y, int64_t j);

// Scratch of one thread, and the tile that it has packed last.
class PackedTile {
 public:
  PackedTile(const Series& y, bool with_start, bool with_ends);
  // Packs y[index[0 .. count - 1]], count <= lanes.
  void pack(const int64_t* index, int count);

  DtwTile tile{};
  float *row, *cost, *ends;                 // [columns, lanes], [lanes], [2, dims, lanes]
  int32_t *row_start, *start, *end;         // [columns, lanes], [lanes], [lanes]

 private:
  const Series& y_;
  int lanes_;
  bool with_ends_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> index_, counts_;
  at::Tensor memory_;
  float* values_;
};

// Calls work(task, scratch) for every task in [0, count), handed out one at a time in this order; make() builds the
// scratch of a thread.
template <class Make, class Work>
void parallel_tasks(int64_t count, Make make, Work work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t task = next++;
    if (task >= count) return;
    auto scratch = make();
    for (; task < count; task = next++) work(task, scratch);
  });
}

}  // namespace rlk
