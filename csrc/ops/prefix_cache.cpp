// Schemas and CPU registration of the paged attention ops; the public functions are in rlkernels/prefix_cache.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "attention_plan.h"
#include "attention_types.h"
#include "check.h"
#include "torch_threads.h"

RLK_DECLARE_KERNEL(void, merge_pairs, Float, const void*, const float*, const void*, const float*, void*, float*,
                   int64_t, int64_t)
RLK_DECLARE_KERNEL(void, copy_to_pages, const void*, Float, int64_t, int64_t, const Pages&, Float, int64_t,
                   const int64_t*, int64_t, int64_t, int64_t)

namespace {

using namespace rlk;

Pages pages(const at::Tensor& cache, const char* name) {
  TORCH_CHECK(cache.is_cpu() && cache.dim() == 4 && (cache.stride(3) == 1 || cache.size(3) == 1 || cache.numel() == 0),
              name, " must be a CPU tensor of rank 4 whose last dimension is contiguous");
  return {cache.data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

// What a batch of sequences, or of groups' prefixes, is described by: int32 tables [N, blocks], lens [N], starts [N + 1].
struct Ragged {
  const char *tables_name, *lens_name, *starts_name;
  const at::Tensor &tables, &lens, &starts;

  int64_t count() const { return lens.size(0); }
  const int32_t* table(int64_t i) const { return tables.const_data_ptr<int32_t>() + i * tables.size(1); }
  int64_t len(int64_t i) const { return lens.const_data_ptr<int32_t>()[i]; }
  int64_t start(int64_t i) const { return starts.const_data_ptr<int32_t>()[i]; }

  // Starts rise from 0 to total, tables name blocks of the cache as far as lens say.
  void check(int64_t total, const at::Tensor& cache) const {
    rlk::check_tensor(tables, tables_name, at::kInt, 2);
    rlk::check_tensor(lens, lens_name, at::kInt, 1);
    rlk::check_tensor(starts, starts_name, at::kInt, 1);
    TORCH_CHECK(tables.size(0) == count() && starts.size(0) == count() + 1, tables_name, " and ", starts_name,
                " must have ", count(), " and ", count() + 1, " rows, got ", tables.size(0), " and ", starts.size(0));
    const int32_t* begin = starts.const_data_ptr<int32_t>();
    bool good = start(0) == 0 && start(count()) == total;
    for (int64_t i = 0; i < count() && good; ++i) good = start(i) <= start(i + 1);
    TORCH_CHECK_VALUE(good, starts_name, " must rise from 0 to ", total, ", got ",
                      at::IntArrayRef(std::vector<int64_t>(begin, begin + count() + 1)));
    const int64_t num_blocks = cache.size(0), block_size = cache.size(1), limit = tables.size(1) * block_size;
    for (int64_t i = 0; i < count(); ++i) {
      TORCH_CHECK_VALUE(len(i) >= 0 && len(i) <= limit, lens_name, " must be between 0 and ", limit, " (", tables_name,
                        " x block size), got ", len(i), " at [", i, "]");
      const int32_t* blocks = table(i);
      for (int64_t b = 0; b * block_size < len(i); ++b)
        TORCH_CHECK_VALUE(blocks[b] >= 0 && blocks[b] < num_blocks, tables_name, " must hold blocks between 0 and ",
                          num_blocks - 1, ", got ", blocks[b], " at [", i, ", ", b, "]");
    }
  }
};

struct Call {
  Attention a;
  at::Tensor query, out, lse;
};

Call prepare(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, double scale,
             const std::optional<int64_t>& window = {}, const std::optional<double>& softcap = {}) {
  Call c;
  c.query = query.stride(2) == 1 ? query : query.contiguous();
  c.out = at::empty(query.sizes(), query.options());
  c.lse = at::empty({query.size(0), query.size(1)}, query.options().dtype(at::kFloat));
  Attention& a = c.a;
  a.key = pages(key_cache, "key_cache");
  a.value = pages(value_cache, "value_cache");
  a.cache_type = float_type(key_cache, "key_cache");
  TORCH_CHECK(key_cache.sizes() == value_cache.sizes() && key_cache.scalar_type() == value_cache.scalar_type(),
              "value_cache must be like key_cache");
  TORCH_CHECK(query.is_cpu() && query.dim() == 3 && query.size(2) == key_cache.size(3), "query must be [T, heads, dim]");
  TORCH_CHECK_VALUE(query.size(2) >= 1 && query.size(2) <= kMaxDim, "query must have at most ", kMaxDim,
                    " elements per head, got ", query.size(2));
  a.query = c.query.const_data_ptr();
  a.query_type = float_type(query, "query");
  a.query_token_stride = c.query.stride(0);
  a.query_head_stride = c.query.stride(1);
  a.out = c.out.mutable_data_ptr();
  a.lse = c.lse.mutable_data_ptr<float>();
  a.heads = int32_t(query.size(1));
  a.kv_heads = int32_t(key_cache.size(2));
  TORCH_CHECK(a.kv_heads > 0 && a.heads % a.kv_heads == 0, "query heads must be a multiple of the key heads");
  a.dim = int32_t(query.size(2));
  a.block_size = int32_t(key_cache.size(1));
  a.scale = float(scale);
  a.window = window_of(window);
  a.softcap = softcap_of(softcap);
  return c;
}

std::vector<KeySource> own_sources(const at::Tensor& query, const at::Tensor& key_cache, const Ragged& sequences) {
  sequences.check(query.size(0), key_cache);
  std::vector<KeySource> sources(sequences.count());
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int64_t first = sequences.start(b), queries = sequences.start(b + 1) - first, keys = sequences.len(b);
    TORCH_CHECK_VALUE(queries <= keys, "seq_lens must count the queries too, got ", keys, " keys for ", queries,
                      " queries of sequence ", b);
    sources[b] = {sequences.table(b), first, queries, keys, true, key_stretches(queries, keys), -1};
  }
  return sources;
}

std::tuple<at::Tensor, at::Tensor> paged_attention(const at::Tensor& query, const at::Tensor& key_cache,
                                                   const at::Tensor& value_cache, const at::Tensor& block_tables,
                                                   const at::Tensor& seq_lens, const at::Tensor& query_starts,
                                                   double scale, const std::optional<int64_t>& window,
                                                   const std::optional<double>& softcap) {
  Call c = prepare(query, key_cache, value_cache, scale, window, softcap);
  const Ragged sequences{"block_tables", "seq_lens", "query_starts", block_tables, seq_lens, query_starts};
  std::vector<KeySource> own = own_sources(query, key_cache, sequences), none;
  attend_sources(c.a, none, own, {}, torch_threads());
  return {c.out, c.lse};
}

std::tuple<at::Tensor, at::Tensor> shared_prefix_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& group_tables, const at::Tensor& group_lens, const at::Tensor& group_starts,
    const at::Tensor& block_tables, const at::Tensor& seq_lens, const at::Tensor& query_starts, double scale) {
  Call c = prepare(query, key_cache, value_cache, scale);
  const Ragged sequences{"block_tables", "seq_lens", "query_starts", block_tables, seq_lens, query_starts};
  const Ragged groups{"group_tables", "group_lens", "group_starts", group_tables, group_lens, group_starts};
  std::vector<KeySource> own = own_sources(query, key_cache, sequences);
  groups.check(int64_t(own.size()), key_cache);
  std::vector<KeySource> prefixes(groups.count());
  std::vector<int32_t> group_of(own.size());
  for (int64_t g = 0; g < groups.count(); ++g) {
    const int64_t keys = groups.len(g), first = sequences.start(groups.start(g));
    const int64_t queries = sequences.start(groups.start(g + 1)) - first;
    prefixes[g] = {groups.table(g), first, queries, keys, false, key_stretches(queries, keys), -1};
    std::fill(group_of.begin() + groups.start(g), group_of.begin() + groups.start(g + 1), int32_t(g));
  }
  attend_sources(c.a, prefixes, own, group_of, torch_threads());
  return {c.out, c.lse};
}

// Pages of 2 MiB where the system gives them on request: blocks are scattered over more pages of 4 KiB than the
// processor can remember the addresses of, and a large fresh output costs more in page faults than in arithmetic.
void advise_huge_pages(const at::Tensor& memory) {
#ifdef __linux__
  constexpr uintptr_t page = 1 << 21;
  const uintptr_t data = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const uintptr_t begin = (data + page - 1) / page * page, end = (data + memory.nbytes()) / page * page;
  if (memory.is_cpu() && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

std::tuple<at::Tensor, at::Tensor> merge_attention(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                   const at::Tensor& out_b, const at::Tensor& lse_b) {
  rlk::check_tensor(lse_a, "lse_a", at::kFloat, 2);
  rlk::check_tensor(lse_b, "lse_b", at::kFloat, 2);
  rlk::check_tensor(out_a, "out_a", out_a.scalar_type(), 3);
  rlk::check_tensor(out_b, "out_b", out_a.scalar_type(), 3);
  TORCH_CHECK(out_a.sizes() == out_b.sizes() && lse_a.sizes() == lse_b.sizes() && lse_a.numel() * out_a.size(2) == out_a.numel(),
              "both sides must have the same shape");
  const Float type = float_type(out_a, "out_a");
  at::Tensor out = at::empty_like(out_a), lse = at::empty_like(lse_a);
  advise_huge_pages(out);
  const auto kernel = RLK_DISPATCH(merge_pairs);
  const int64_t dim = out_a.size(2), row_bytes = dim * out_a.element_size();
  const auto at_row = [&](const at::Tensor& t, int64_t r) { return static_cast<char*>(t.data_ptr()) + r * row_bytes; };
  at::parallel_for(0, lse.numel(), std::max<int64_t>(1, 8192 / std::max<int64_t>(dim, 1)), [&](int64_t begin, int64_t end) {
    kernel(type, at_row(out_a, begin), lse_a.const_data_ptr<float>() + begin, at_row(out_b, begin),
           lse_b.const_data_ptr<float>() + begin, at_row(out, begin), lse.mutable_data_ptr<float>() + begin,
           end - begin, dim);
  });
  return {out, lse};
}

void write_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slots) {
  rlk::check_tensor(slots, "slots", at::kLong, 1);
  TORCH_CHECK(key_cache.dim() == 4 && key_cache.sizes() == value_cache.sizes(), "value_cache must be like key_cache");
  const int64_t total = key_cache.size(0) * key_cache.size(1), tokens = slots.size(0);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_VALUE(slot[t] >= 0 && slot[t] < total, "slots must be between 0 and ", total - 1, ", got ", slot[t]);
  const auto kernel = RLK_DISPATCH(copy_to_pages);
  // Rows that lie in a cache are copied before anything is written
  const auto apart = [&](const at::Tensor& t) {
    return t.is_alias_of(key_cache) || t.is_alias_of(value_cache) ? t.clone() : t;
  };
  const at::Tensor keys = apart(key), values = apart(value);
  for (const auto& [rows, cache] : {std::pair{&keys, &key_cache}, std::pair{&values, &value_cache}}) {
    TORCH_CHECK(rows->is_cpu() && rows->dim() == 3 && rows->size(0) == tokens && rows->size(1) == cache->size(2) &&
                    rows->size(2) == cache->size(3), "key and value must be [T, heads, dim]");
    const at::Tensor from = rows->stride(2) == 1 ? *rows : rows->contiguous();
    const Pages to = pages(*cache, "cache");
    const Float from_type = float_type(from, "key and value"), to_type = float_type(*cache, "cache");
    const int64_t heads = from.size(1), dim = from.size(2), width = from.element_size();
    const char* data = static_cast<const char*>(from.const_data_ptr());
    at::parallel_for(0, tokens, std::max<int64_t>(1, 65536 / std::max<int64_t>(heads * dim, 1)), [&](int64_t begin, int64_t end) {
      kernel(data + begin * from.stride(0) * width, from_type, from.stride(0), from.stride(1), to, to_type,
             cache->size(1), slot + begin, end - begin, heads, dim);
    });
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlkernels, m) {
  m.def("write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
      "Tensor query_starts, float scale, int? window=None, float? softcap=None) -> (Tensor, Tensor)");
  m.def(
      "shared_prefix_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor group_tables, "
      "Tensor group_lens, Tensor group_starts, Tensor block_tables, Tensor seq_lens, Tensor query_starts, "
      "float scale) -> (Tensor, Tensor)");
  m.def("advise_huge_pages(Tensor(a!) memory) -> ()");
  m.def("merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rlkernels, CPU, m) {
  m.impl("write_kv", &write_kv);
  m.impl("paged_attention", &paged_attention);
  m.impl("shared_prefix_attention", &shared_prefix_attention);
  m.impl("merge_attention", &merge_attention);
  m.impl("advise_huge_pages", &advise_huge_pages);
}
