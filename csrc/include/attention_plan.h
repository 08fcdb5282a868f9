// Assigns stretches of keys to threads, for sequences in blocks that may share a prefix.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "aligned.h"
#include "attention.h"
#include "dispatch.h"
#include "threads.h"

RLK_DECLARE_KERNEL(void, attend_span, const Attention&, const AttentionSpan&, float*)
RLK_DECLARE_KERNEL(void, merge_parts, const Attention&, int64_t, const AttentionParts*, int)

namespace rlk {

// Long sequences are cut into stretches of this many keys whatever the batch and the number of threads, so that
// neither changes a result. Not for long prefills, which have enough work in their queries.
constexpr int64_t kStretchKeys = 1024, kStretchQueries = 64;
constexpr int64_t kSpanFloats = 32768;  // queries of all heads that are worked on together: they stay in the L2 cache
constexpr int64_t kSpanRows = 128;      // of one KV head, where they do not
constexpr int64_t kKeptFloats = 1 << 20;  // scratch up to this size is kept for the next call

// Runs work(i, scratch) for i < count on all threads, in small batches as threads come free. Scratch that is small, as
// in decoding, stays with its thread; large scratch, of a training step, is given back.
template <class F>
void with_scratch(const Threads& threads, int64_t count, int64_t floats, bool serial, const F& work) {
  const int64_t used = serial ? 1 : std::min(threads.count, count);
  const int64_t batch = std::max<int64_t>(1, count / (std::max<int64_t>(used, 1) * 16));
  std::atomic<int64_t> next{0};
  const auto worker = [&](int64_t, int64_t) {
    static thread_local std::vector<float> kept;
    std::vector<float> mine;
    mine.swap(kept);  // a handler of signals may come by here again
    std::unique_ptr<float[]> large;
    if (floats > kKeptFloats)
      large = std::make_unique_for_overwrite<float[]>(floats);
    else if (mine.size() < size_t(floats))
      mine.resize(floats);
    float* const scratch = large ? large.get() : mine.data();
    for (int64_t i = next.fetch_add(batch); i < count; i = next.fetch_add(batch))
      for (int64_t j = i; j < std::min(i + batch, count) && !threads.watch->stop(); ++j) work(j, scratch);
    kept.swap(mine);
  };
  split_watched(used > 1 ? threads : one_thread(threads.watch), used, 1, worker);
}

// One table of keys and the neighbouring queries that look at it.
struct KeySource {
  const int32_t* table;
  int64_t first_query, queries, keys;
  bool causal;
  int64_t stretches;
  int64_t part;  // first row [heads] of its partial results; -1: goes straight to the output
};

inline int64_t key_stretches(int64_t queries, int64_t keys) {
  if (queries == 0 || keys == 0) return 0;
  return queries > kStretchQueries ? 1 : (keys + kStretchKeys - 1) / kStretchKeys;
}

inline void add_spans(const Attention& a, const KeySource& s, float* part_out, float* part_lse,
                      std::vector<AttentionSpan>& spans) {
  const bool whole = s.queries * a.heads * a.dim <= kSpanFloats;
  const int64_t heads = whole ? a.kv_heads : 1;
  const int64_t block = whole ? s.queries : std::max<int64_t>(1, kSpanRows / (a.heads / a.kv_heads));
  for (int64_t i = 0; i < s.stretches; ++i)
    for (int64_t h = 0; h < a.kv_heads; h += heads)
      for (int64_t q = 0; q < s.queries; q += block) {
        AttentionSpan span;
        const int64_t queries = std::min(block, s.queries - q);
        span.table = s.table;
        span.first_query = s.first_query + q;
        span.queries = int32_t(queries);
        span.first_kv_head = int32_t(h);
        span.kv_heads = int32_t(heads);
        span.step = s.causal;
        span.visible = s.causal ? s.keys - s.queries + q + 1 : s.keys;
        const int64_t seen = s.causal ? span.visible + queries - 1 : s.keys;
        const int64_t begin = i * kStretchKeys, end = i + 1 == s.stretches ? seen : std::min(seen, begin + kStretchKeys);
        span.hidden = s.causal ? span.visible - a.window : -kNoWindow;
        const int64_t first = std::max(begin, std::max<int64_t>(span.hidden, 0) / kTileKeys * kTileKeys);
        span.first_key = int32_t(first);
        span.last_key = int32_t(std::max(first, end));
        const int64_t row = (s.part + i * s.queries + q) * a.heads;
        span.part_out = s.part < 0 ? nullptr : part_out + row * a.dim;
        span.part_lse = s.part < 0 ? nullptr : part_lse + row;
        span.next = nullptr;
        spans.push_back(span);
      }
}

// Attends to all keys of all sources -> a.out and a.lse. own_keys [B]: keys that a sequence does not share; prefixes
// [G] and group_of [B], the prefix of each sequence, may be empty.
inline void attend_sources(const Attention& a, std::vector<KeySource>& prefixes, std::vector<KeySource>& own_keys,
                           const std::vector<int32_t>& group_of, const Threads& threads) {
  int64_t parts = 0, work = 0, most = 0;
  const auto place = [&](KeySource& s, bool alone) {
    s.part = alone ? -1 : parts;
    if (!alone) parts += s.stretches * s.queries;
    work += s.queries * s.keys * a.heads * a.dim;
  };
  for (KeySource& s : prefixes) place(s, false);
  for (size_t b = 0; b < own_keys.size(); ++b)
    place(own_keys[b], own_keys[b].stretches == 1 && (prefixes.empty() || prefixes[group_of[b]].stretches == 0));
  Aligned part_out(parts * a.heads * a.dim), part_lse(parts * a.heads);
  float *out = part_out.data(), *lse = part_lse.data();
  std::vector<AttentionSpan> spans;
  for (auto* sources : {&prefixes, &own_keys})
    for (const KeySource& s : *sources) add_spans(a, s, out, lse, spans);
  for (size_t i = 1; i < spans.size(); ++i) spans[i - 1].next = &spans[i];
  for (const AttentionSpan& s : spans)
    most = std::max(most, attention_scratch(s.queries, s.kv_heads, a.heads / a.kv_heads, a.dim));
  const auto attend = RLK_DISPATCH(attend_span);
  const bool serial = work < (1 << 16);
  with_scratch(threads, spans.size(), most, serial, [&](int64_t i, float* scratch) { attend(a, spans[i], scratch); });
  if (parts == 0) return;
  const auto merge = RLK_DISPATCH(merge_parts);
  with_scratch(threads, own_keys.size(), 0, serial, [&](int64_t b, float*) {
    if (own_keys[b].part < 0) return;
    for (int64_t q = 0; q < own_keys[b].queries; ++q) {
      AttentionParts lists[2];
      int count = 0;
      for (const KeySource* s : {prefixes.empty() ? nullptr : &prefixes[group_of[b]], &own_keys[b]}) {
        if (!s || s->stretches == 0) continue;
        const int64_t row = (s->part + own_keys[b].first_query + q - s->first_query) * a.heads;
        const int64_t stride = s->queries * a.heads;
        lists[count++] = {out + row * a.dim, lse + row, stride * a.dim, stride, int32_t(s->stretches)};
      }
      merge(a, own_keys[b].first_query + q, lists, count);
    }
  });
}

}  // namespace rlk
