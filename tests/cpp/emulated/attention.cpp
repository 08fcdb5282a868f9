// Attention as csrc/cpu computes it by AMX, for tests on a processor without: see immintrin.h beside this file.
#include "attention_plan.h"

namespace rlk::RLK_ISA {

bool wide_fits(const Attention&, const AttentionSpan&);
void attend_wide(const Attention&, const AttentionSpan&, float*);

void attend_span(const Attention& a, const AttentionSpan& span, float* scratch) {
  if (!wide_fits(a, span)) __builtin_trap();  // other code would answer
  attend_wide(a, span, scratch);
}

}  // namespace rlk::RLK_ISA

using namespace rlk;

struct Ragged {  // tables [count, width], lens [count], starts [count + 1]
  int64_t count, width;
  const int32_t *tables, *lens, *starts;
};

// Attention of bfloat16 queries [T, heads, dim] over contiguous caches; groups.count 0: no shared prefixes.
extern "C" void attend(const void* query, const void* key, const void* value, const int64_t* sizes, float scale,
                       Ragged own, Ragged groups, void* out, float* lse) {
  const int64_t heads = sizes[0], kv_heads = sizes[1], dim = sizes[2], block = sizes[3];
  const auto pages = [&](const void* data) { return Pages{data, block * kv_heads * dim, kv_heads * dim, dim}; };
  const Attention a{pages(key), pages(value), Float::bf16, query, Float::bf16, heads * dim, dim, out, lse,
                    int32_t(heads), int32_t(kv_heads), int32_t(dim), int32_t(block), scale};
  std::vector<KeySource> sequences, prefixes;
  std::vector<int32_t> group_of(groups.count ? own.count : 0);
  const auto add = [&](std::vector<KeySource>& to, const Ragged& r, int64_t i, int64_t first, int64_t end, bool causal) {
    to.push_back({r.tables + i * r.width, first, end - first, r.lens[i], causal, key_stretches(end - first, r.lens[i]), -1});
  };
  for (int64_t b = 0; b < own.count; ++b) add(sequences, own, b, own.starts[b], own.starts[b + 1], true);
  for (int64_t g = 0; g < groups.count; ++g) {
    add(prefixes, groups, g, own.starts[groups.starts[g]], own.starts[groups.starts[g + 1]], false);
    for (int32_t b = groups.starts[g]; b < groups.starts[g + 1]; ++b) group_of[b] = int32_t(g);
  }
  attend_sources(a, prefixes, sequences, group_of, one_thread());
}
