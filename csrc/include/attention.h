// Problems and results of the CPU kernels of attention to paged keys and values, and to packed tokens (csrc/cpu).
#pragma once
#include <cstdint>

namespace rlk {

constexpr int64_t kNoWindow = int64_t(1) << 40;  // more keys than any query sees

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
  int64_t window = kNoWindow;  // keys that a query sees at most, itself included; not for prefixes
  float softcap = 0;           // bounds scores: softcap * tanh(score / softcap); 0: no bound
};

// Some queries of one sequence (or of one group's prefix) against some of its keys.
struct AttentionSpan {
  const int32_t* table;  // blocks of the sequence
  int64_t first_query;   // in T
  int32_t queries;
  int32_t first_kv_head, kv_heads;
  int32_t first_key, last_key;  // the last one exclusive, at most the most that a query sees
  int64_t visible;              // keys that the first query sees; every further query sees `step` more
  int64_t hidden;               // keys before the first query's window, if positive; every further query hides one more
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

// A stretch of packed tokens without a fork. Nodes lie in preorder: what continues a node follows it up to `end`.
struct TreeNode {
  int64_t start, stop, end;
  int64_t depth;   // tokens on the path to it
  int64_t parent;  // -1: a root
};

// Training on packed tokens: each sees its ancestors and itself. Tensors are contiguous, all of one type but for lse.
struct TreeAttention {
  const void *query, *key, *value;  // [T, heads or kv_heads, dim]
  void* out;                        // [T, heads, dim]
  float* lse;                       // [T, heads]
  Float type;
  int32_t heads, kv_heads, dim;
  float scale;
  int64_t window;  // as of Attention
  float softcap;
  const TreeNode *nodes, *nodes_end;
};

// Neighbouring queries: tokens begin .. end - 1.
struct TreeSpan {
  int64_t begin, end;
  const TreeNode* node;  // that of the first token
  int64_t above() const { return node->depth + begin - node->start; }  // tokens on the path to the first token
};

struct TreeGradients {
  const void* grad_out;
  const float* grad_lse;  // may be null
  void* grad_query;
  float *grad_key, *grad_value;  // [T, kv_heads, dim], from the queries of the key's own span
};

// Gradients from the queries of a span to the keys above it, to which other spans send theirs too.
struct TreeAbove {
  const int32_t* path;  // the tokens above
  float* grads;         // [2, above, tree_stride(dim)], of keys and of values
};

constexpr int64_t kTreeRows = 192;  // of one KV head that the forward pass works on together

constexpr int64_t tree_stride(int64_t dim) { return (dim + 15) / 16 * 16; }

// Writes the places of the tokens on the path to the first token of a span, in the order of the path.
inline void tree_path(const TreeAttention& a, const TreeSpan& span, int32_t* path) {
  int64_t stop = span.begin;  // of the part of the node that is on the path
  for (const TreeNode* n = span.node;; stop = n->stop) {
    for (int64_t t = n->start; t < stop; ++t) path[n->depth + t - n->start] = int32_t(t);
    if (n->parent < 0) return;
    n = a.nodes + n->parent;
  }
}

// Floats of scratch that attend_tree and tree_backward need for a span.
inline int64_t tree_scratch(int64_t tokens, int64_t above, int64_t heads_per_kv, int64_t dim) {
  return tokens * heads_per_kv * (2 * tree_stride(dim) + 3) + 2 * kTileKeys * tree_stride(dim) + 8 * kTileKeys + above;
}

inline int64_t tree_backward_scratch(int64_t tokens, int64_t heads_per_kv, int64_t dim) {
  return tokens * (heads_per_kv * (3 * tree_stride(dim) + 3) + 2 * tree_stride(dim)) +
         4 * kTileKeys * tree_stride(dim) + 4 * kTileKeys * kTileKeys;
}

}  // namespace rlk
