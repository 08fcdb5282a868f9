// Schemas and CPU registration of attention among packed trees; the public functions are in rlkernels/prefix_cache.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_plan.h"
#include "attention_types.h"
#include "check.h"
#include "torch_threads.h"

RLK_DECLARE_KERNEL(void, attend_tree, const TreeAttention&, const TreeSpan&, int, float*)
RLK_DECLARE_KERNEL(void, tree_backward, const TreeAttention&, const TreeGradients&, const TreeSpan&, int,
                   const TreeAbove&, float*)

namespace {

using namespace rlk;

constexpr int64_t kMostSpans = 32, kLeastRows = 768;  // of a backward pass; rows of a span, on average at least

// nodes [N, 3]: start, stop and end of each, in preorder.
std::vector<TreeNode> read_nodes(const at::Tensor& nodes, int64_t tokens) {
  rlk::check_tensor(nodes, "nodes", at::kLong, 2);
  TORCH_CHECK(nodes.size(1) == 3, "nodes must be [N, 3], got ", nodes.sizes());
  std::vector<TreeNode> read(nodes.size(0));
  const int64_t* row = nodes.const_data_ptr<int64_t>();
  int64_t at = 0, parent = -1;
  for (int64_t i = 0; i < nodes.size(0); ++i, row += 3) {
    while (parent >= 0 && read[parent].end <= row[0]) parent = read[parent].parent;
    const TreeNode* p = parent < 0 ? nullptr : &read[parent];
    TORCH_CHECK(row[0] == at && row[0] < row[1] && row[1] <= row[2] && row[2] <= (p ? p->end : tokens),
                      "nodes must be in preorder, got ", row[0], ", ", row[1], ", ", row[2], " at [", i, "]");
    read[i] = {row[0], row[1], row[2], p ? p->depth + p->stop - p->start : 0, parent};
    parent = i;
    at = row[1];
  }
  TORCH_CHECK(at == tokens, "nodes must hold ", tokens, " tokens, got ", at);
  return read;
}

// Pairs of a query and a key that it sees.
int64_t count_pairs(const std::vector<TreeNode>& nodes, int64_t window) {
  int64_t pairs = 0;
  for (const TreeNode& n : nodes) {
    const int64_t tokens = n.stop - n.start, whole = std::clamp<int64_t>(window - n.depth, 0, tokens);
    pairs += whole * (2 * n.depth + whole + 1) / 2;
    if (whole < tokens) pairs += (tokens - whole) * window;
  }
  return pairs;
}

// Calls cut(token, node, depth) for every token; a span ends before those for which it is true.
template <class Cut>
std::vector<TreeSpan> cut_tokens(const std::vector<TreeNode>& nodes, const Cut& cut) {
  std::vector<TreeSpan> spans;
  for (const TreeNode& n : nodes)
    for (int64_t t = n.start; t < n.stop; ++t) {
      if (spans.empty() || cut(t, n, n.depth + t - n.start)) spans.push_back({t, t, &n});
      spans.back().end = t + 1;
    }
  return spans;
}

// Spans of about equal work for the backward pass, whatever the number of threads: it must not change a sum. The keys
// above all spans are at most four times the tokens. Preferred are cuts at roots, with nothing above, and at nodes.
std::vector<TreeSpan> cut_evenly(const std::vector<TreeNode>& nodes, int64_t heads_per_kv, int64_t window) {
  if (nodes.empty()) return {};
  const int64_t pairs = count_pairs(nodes, window), tokens = nodes.back().stop;
  int64_t longest = 0, work = 0;
  for (const TreeNode& n : nodes) longest = std::max(longest, n.depth + n.stop - n.start);
  const int64_t spans = std::min({4 * tokens / longest, tokens * heads_per_kv / kLeastRows, kMostSpans});
  const int64_t share = pairs / std::max<int64_t>(spans, 1) + 1;
  return cut_tokens(nodes, [&](int64_t t, const TreeNode& n, int64_t depth) {
    const bool cut = work >= share * (depth == 0 ? 2 : t == n.start ? 3 : 5) / 4;
    work = (cut ? 0 : work) + std::min(depth + 1, window);
    return cut;
  });
}

void* data(const at::Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

TreeAttention prepare(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
                      const at::Tensor& lse, const std::vector<TreeNode>& nodes, double scale,
                      const std::optional<int64_t>& window, const std::optional<double>& softcap) {
  const auto type = query.scalar_type();
  rlk::check_tensor(query, "query", type, 3);
  rlk::check_tensor(key, "key", type, 3);
  rlk::check_tensor(value, "value", type, 3);
  rlk::check_tensor(out, "out", type, 3);
  rlk::check_tensor(lse, "lse", at::kFloat, 2);
  const int64_t tokens = query.size(0), heads = query.size(1), kv_heads = key.size(1), dim = query.size(2);
  TORCH_CHECK(query.sizes() == out.sizes() && key.sizes() == value.sizes() && key.size(0) == tokens &&
                  key.size(2) == dim && kv_heads > 0 && heads % kv_heads == 0 && lse.size(0) == tokens &&
                  lse.size(1) == heads && dim >= 1 && dim <= kMaxDim && tokens < int64_t(1) << 31,
              "shapes do not fit together");
  return {query.const_data_ptr(), key.const_data_ptr(), value.const_data_ptr(), data(out),
          static_cast<float*>(data(lse)), float_type(query, "query"), int32_t(heads), int32_t(kv_heads), int32_t(dim),
          float(scale), window_of(window), softcap_of(softcap), nodes.data(),
          nodes.data() + nodes.size()};
}

std::tuple<at::Tensor, at::Tensor> tree_attention(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const at::Tensor& nodes, double scale,
                                                  const std::optional<int64_t>& window,
                                                  const std::optional<double>& softcap) {
  TORCH_CHECK(query.dim() == 3, "query must be [T, heads, dim]");
  const std::vector<TreeNode> tree = read_nodes(nodes, query.size(0));
  at::Tensor out = at::empty_like(query), lse = at::empty(query.sizes().slice(0, 2), query.options().dtype(at::kFloat));
  const TreeAttention a = prepare(query, key, value, out, lse, tree, scale, window, softcap);
  const int64_t per_kv = a.heads / a.kv_heads, step = std::max<int64_t>(1, kTreeRows / per_kv);
  const std::vector<TreeSpan> spans = cut_tokens(tree, [&](int64_t t, const TreeNode&, int64_t) { return t % step == 0; });
  int64_t floats = 0;
  for (const TreeSpan& s : spans) floats = std::max(floats, tree_scratch(s.end - s.begin, s.above(), per_kv, a.dim));
  const auto kernel = RLK_DISPATCH(attend_tree);
  with_scratch(torch_threads(), spans.size() * a.kv_heads, floats, count_pairs(tree, a.window) * a.heads * a.dim < 1 << 16,
               [&](int64_t i, float* scratch) { kernel(a, spans[i / a.kv_heads], int(i % a.kv_heads), scratch); });
  return {out, lse};
}

// Adds the gradients that spans have sent to keys above them, for each key in the order of the spans.
void add_above(const TreeAttention& a, const std::vector<TreeSpan>& spans, const std::vector<TreeAbove>& above,
               const TreeGradients& g) {
  int64_t deepest = 0;
  for (const TreeSpan& s : spans) deepest = std::max(deepest, s.above());
  const int64_t chunks = (deepest + kTileKeys - 1) / kTileKeys, stride = tree_stride(a.dim);
  hand_out(torch_threads(), chunks * a.kv_heads, [&](int64_t task) {  // a key has the same depth above all spans
    const int64_t first = task / a.kv_heads * kTileKeys, head = task % a.kv_heads;
    for (size_t i = 0; i < spans.size(); ++i) {
      const int64_t keys = spans[i].above();
      const TreeAbove& part = above[i * a.kv_heads + head];
      for (int64_t k = first; k < std::min(first + kTileKeys, keys); ++k) {
        const int64_t to = (int64_t(part.path[k]) * a.kv_heads + head) * a.dim;
        const float *key = part.grads + k * stride, *value = key + keys * stride;
        for (int64_t c = 0; c < a.dim; ++c) g.grad_key[to + c] += key[c], g.grad_value[to + c] += value[c];
      }
    }
  });
}

// Gradients of query, key and value. grad_lse may be missing.
std::tuple<at::Tensor, at::Tensor, at::Tensor> tree_attention_backward(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor& nodes, double scale, const std::optional<int64_t>& window, const std::optional<double>& softcap) {
  TORCH_CHECK(query.dim() == 3, "query must be [T, heads, dim]");
  const std::vector<TreeNode> tree = read_nodes(nodes, query.size(0));
  const TreeAttention a = prepare(query, key, value, out, lse, tree, scale, window, softcap);
  rlk::check_tensor(grad_out, "grad_out", query.scalar_type(), 3);
  TORCH_CHECK(grad_out.sizes() == query.sizes(), "shapes do not fit together");
  if (grad_lse) {
    rlk::check_tensor(*grad_lse, "grad_lse", at::kFloat, 2);
    TORCH_CHECK(grad_lse->sizes() == lse.sizes(), "shapes do not fit together");
  }
  const auto sums = key.options().dtype(at::kFloat);
  at::Tensor grad_query = at::empty_like(query), grad_key = at::empty(key.sizes(), sums), grad_value = at::empty(key.sizes(), sums);
  const TreeGradients g{grad_out.const_data_ptr(), grad_lse ? grad_lse->const_data_ptr<float>() : nullptr,
                        data(grad_query), static_cast<float*>(data(grad_key)), static_cast<float*>(data(grad_value))};
  const int64_t per_kv = a.heads / a.kv_heads, stride = tree_stride(a.dim);
  const std::vector<TreeSpan> spans = cut_evenly(tree, per_kv, a.window);
  int64_t keys = 0, longest = 0;
  for (const TreeSpan& s : spans) keys += s.above(), longest = std::max(longest, s.end - s.begin);
  const auto path = std::make_unique_for_overwrite<int32_t[]>(keys);
  const auto grads = std::make_unique_for_overwrite<float[]>(2 * keys * stride * a.kv_heads);
  std::vector<TreeAbove> above;  // [spans, kv_heads]
  keys = 0;
  for (const TreeSpan& s : spans) {
    tree_path(a, s, path.get() + keys);
    for (int64_t h = 0; h < a.kv_heads; ++h)
      above.push_back({path.get() + keys, grads.get() + 2 * (keys * a.kv_heads + s.above() * h) * stride});
    keys += s.above();
  }
  const auto kernel = RLK_DISPATCH(tree_backward);
  with_scratch(torch_threads(), above.size(), tree_backward_scratch(longest, per_kv, a.dim), above.size() < 2,
               [&](int64_t i, float* scratch) {
                 kernel(a, g, spans[i / a.kv_heads], int(i % a.kv_heads), above[i], scratch);
               });
  add_above(a, spans, above, g);
  return {grad_query, grad_key.to(key.scalar_type()), grad_value.to(key.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def(
      "tree_attention(Tensor query, Tensor key, Tensor value, Tensor nodes, float scale, int? window=None, "
      "float? softcap=None) -> (Tensor, Tensor)");
  m.def(
      "tree_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, Tensor nodes, float scale, int? window=None, float? softcap=None) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("tree_attention", &tree_attention);
  m.impl("tree_attention_backward", &tree_attention_backward);
}
