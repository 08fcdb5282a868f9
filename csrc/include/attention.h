// Attention over paged keys and values on the CPU: what is asked of the kernels in csrc/cpu.
#pragma once
#include <cstdint>

namespace rlk {

enum class Float : int { f32 = 0, bf16 = 1, f16 = 2 };

// [.., .., .., dim] with unit stride of the last dimension; strides in elements.
struct Pages {
  const void* data;
  int64_t block_stride, token_stride, head_stride;
};

// The tensors of one call.
struct Attention {
  Pages key, value;
  Float cache_type;
  const void* query;  // [T, heads, dim]
  Float query_type;   // also of out
  int64_t query_token_stride, query_head_stride;
  void* out;   // [T, heads, dim], contiguous
  float* lse;  // [T, heads]
  int32_t heads, kv_heads, dim, block_size;
  float scale;
};

// Some queries of one sequence (or of one group's prefix) against some of its keys.
struct AttentionSpan {
  const int32_t* table;  // blocks of the sequence
  int64_t first_query;   // in T
  int32_t queries;
  int32_t first_kv_head, kv_heads;
  int32_t first_key, last_key;  // the last one exclusive, at most the most that a query sees
  int64_t visible;              // keys that the first query sees; every further query sees `step` more
  int32_t step;                 // 1: causal; 0: every query sees all keys
  float* part_out;              // where the first query's first head goes, [.., heads, dim]; null: to out and lse
  float* part_lse;              // [.., heads]
  const AttentionSpan* next;    // what this thread is likely to work on afterwards, or null
};

// Results for one query over several stretches of keys, [heads, dim] and [heads] each.
struct AttentionParts {
  const float* out;
  const float* lse;
  int64_t out_stride, lse_stride;  // from one stretch to the next
  int32_t count;
};

constexpr int kTileKeys = 64;  // keys worked on at a time

// Floats of scratch that attend_span needs for this many queries and KV heads.
inline int64_t attention_scratch(int64_t queries, int64_t kv_heads, int64_t heads_per_kv, int64_t dim) {
  const int64_t padded = (dim + 15) / 16 * 16, rows = kv_heads * ((queries * heads_per_kv + 15) / 16 * 16);
  return rows * (2 * padded + 2) + 2 * kTileKeys * padded + 32 * kTileKeys;
}

// One group's gradients for one KV head, training on [prefix | suffix 1 | suffix 2 | ...].
struct GroupedBackward {
  const void *query, *key, *value, *out, *grad_out;  // [T, heads or kv_heads, dim], contiguous, all of one type
  const float* lse;                                  // [T, heads]
  void *grad_query, *grad_key, *grad_value;
  Float type;
  int32_t heads, kv_heads, dim;
  float scale;
};

// Floats of scratch that grouped_backward needs for a group of this many tokens.
inline int64_t grouped_scratch(int64_t tokens, int64_t heads_per_kv, int64_t dim) {
  const int64_t padded = (dim + 15) / 16 * 16;
  return tokens * (4 * padded + heads_per_kv * (3 * padded + 2)) + 2 * kTileKeys * padded + 4 * kTileKeys * kTileKeys;
}

}  // namespace rlk
