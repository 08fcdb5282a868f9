// Gradients of grouped attention: the backward pass of FlashAttention-2 (arXiv 2307.08691) over pairs of a stretch of
// queries and a stretch of keys. Everything of one group and KV head is turned into float32 rows in scratch first.
#include "attention_tiles.h"
#include "dispatch.h"

namespace RLK_KERNEL_NAMESPACE {

namespace {

struct Group {  // rows of `padded` floats; queries in order of token and head
  float *query, *grad_out, *grad_query, *lse, *delta;
  float *key, *value, *grad_key, *grad_value;
  float *kt, *vt;                                        // [dim][kTileKeys] each
  float *weight, *grad_score, *weight_t, *grad_score_t;  // [kTileKeys][kTileKeys] each
  int per_kv, dim, padded;
  float scale;
};

}  // namespace

// out[i][j] = in[j][i] of a full tile.
static void transpose_tile(const float* in, float* out) {
  for (int i = 0; i < kTileKeys; i += kLanes)
    for (int j = 0; j < kTileKeys; j += kLanes) {
      vfloat square[kLanes];
      for (int k = 0; k < kLanes; ++k) square[k] = load<vfloat>(in + (i + k) * kTileKeys + j);
      transpose(square);
      for (int k = 0; k < kLanes; ++k) store(out + (j + k) * kTileKeys + i, square[k]);
    }
}

// Scores and their gradients of `count` rows from `row` on against `keys` keys in kt and vt. Row r sees the keys below
// visible + token of r - token of `row`.
static void score_gradients(const Group& g, int64_t row, int count, int keys, int64_t visible, int step) {
  const int padded_keys = (keys + kLanes - 1) / kLanes * kLanes;
  for_row_blocks(count, [&]<int R>(int first) {
    const int64_t at = (row + first) * g.padded;
    score_packed<R>(g.query + at, g.padded, g.dim, g.kt, keys, g.weight + first * kTileKeys);
    score_packed<R>(g.grad_out + at, g.padded, g.dim, g.vt, keys, g.grad_score + first * kTileKeys);
  });
  const vint lane = lane_numbers();
  for (int r = 0; r < count; ++r) {
    const int64_t seen = visible + ((row + r) / g.per_kv - row / g.per_kv) * step;
    const int limit = seen < 0 ? 0 : seen < keys ? int(seen) : keys;
    float *w = g.weight + r * kTileKeys, *d = g.grad_score + r * kTileKeys;
    for (int k = 0; k < padded_keys; k += kLanes) {
      vfloat p = vexp(load<vfloat>(w + k) * g.scale - g.lse[row + r]);
      vfloat s = p * (load<vfloat>(d + k) - g.delta[row + r]) * g.scale;
      if (k + kLanes > limit) {
        p = lane < limit - k ? p : vfloat{};
        s = lane < limit - k ? s : vfloat{};
      }
      store(w + k, p);
      store(d + k, s);
    }
  }
}

// Queries of tokens q0 .. q1 - 1 against the keys of tokens k0 .. k1 - 1; causal pairs are a stretch with itself.
static void backward_pair(const Group& g, int64_t q0, int64_t q1, int64_t k0, int64_t k1, bool causal) {
  const float *key[kTileKeys], *value[kTileKeys], *query[kTileKeys], *grad_out[kTileKeys];
  Nothing nothing;
  for (int64_t k = k0; k < k1; k += kTileKeys) {
    const int keys = k1 - k < kTileKeys ? int(k1 - k) : kTileKeys;
    for (int j = 0; j < kTileKeys; ++j) {
      key[j] = g.key + (k + (j < keys ? j : 0)) * g.padded;
      value[j] = g.value + (k + (j < keys ? j : 0)) * g.padded;
    }
    pack_keys(TileRows<float>{key}, keys, g.dim, nothing, g.kt);
    pack_keys(TileRows<float>{value}, keys, g.dim, nothing, g.vt);
    for (int64_t row = (causal ? k : q0) * g.per_kv; row < q1 * g.per_kv; row += kTileKeys) {
      const int count = q1 * g.per_kv - row < kTileKeys ? int(q1 * g.per_kv - row) : kTileKeys;
      const int64_t visible = causal ? row / g.per_kv + 1 - k : keys;
      score_gradients(g, row, count, keys, visible, causal);
      for (int r = 0; r < count; ++r) {
        query[r] = g.query + (row + r) * g.padded;
        grad_out[r] = g.grad_out + (row + r) * g.padded;
      }
      for_row_blocks(count, [&]<int R>(int r) {
        add_values<R>(g.grad_score + r * kTileKeys, TileRows<float>{key}, keys, g.padded, nothing,
                      g.grad_query + (row + r) * g.padded, g.padded);
      });
      transpose_tile(g.weight, g.weight_t);
      transpose_tile(g.grad_score, g.grad_score_t);
      for_row_blocks(keys, [&]<int R>(int j) {
        const int64_t at = (k + j) * g.padded;
        add_values<R>(g.weight_t + j * kTileKeys, TileRows<float>{grad_out}, count, g.padded, nothing,
                      g.grad_value + at, g.padded);
        add_values<R>(g.grad_score_t + j * kTileKeys, TileRows<float>{query}, count, g.padded, nothing,
                      g.grad_key + at, g.padded);
      });
    }
  }
}

// rows[t * per + j] = from[first + t][head + j], padded with zeros.
template <class T>
static void gather_rows(const void* from, int64_t first, int64_t tokens, int heads, int head, int per, int dim,
                        int padded, float* rows) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int j = 0; j < per; ++j, rows += padded) {
      const T* row = static_cast<const T*>(from) + ((first + t) * heads + head + j) * dim;
      for (int c = 0; c < dim; ++c) rows[c] = to_float(row[c]);
      for (int c = dim; c < padded; ++c) rows[c] = 0;
    }
}

template <class T>
static void scatter_rows(const float* rows, int64_t first, int64_t tokens, int heads, int head, int per, int dim,
                         int padded, void* to) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int j = 0; j < per; ++j, rows += padded) {
      T* row = static_cast<T*>(to) + ((first + t) * heads + head + j) * dim;
      for (int c = 0; c < dim; ++c) from_float(row + c, rows[c]);
    }
}

template <class T>
static void backward_group(const GroupedBackward& a, int64_t first, int64_t prefix, const int64_t* suffixes,
                           int64_t count, int kv_head, float* scratch) {
  int64_t tokens = prefix;
  for (int64_t i = 0; i < count; ++i) tokens += suffixes[i];
  Group g;
  g.per_kv = a.heads / a.kv_heads;
  g.dim = a.dim;
  g.padded = (a.dim + kLanes - 1) / kLanes * kLanes;
  g.scale = a.scale;
  const int64_t rows = tokens * g.per_kv, tile = kTileKeys * kTileKeys;
  const auto part = [&scratch](int64_t floats) { return (scratch += floats) - floats; };
  float** const of_queries[] = {&g.query, &g.grad_out, &g.grad_query};
  float** const of_keys[] = {&g.key, &g.value, &g.grad_key, &g.grad_value};
  float** const of_tiles[] = {&g.weight, &g.grad_score, &g.weight_t, &g.grad_score_t};
  for (float** p : of_queries) *p = part(rows * g.padded);
  for (float** p : of_keys) *p = part(tokens * g.padded);
  for (float** p : of_tiles) *p = part(tile);
  g.kt = part(int64_t(kTileKeys) * g.padded);
  g.vt = part(int64_t(kTileKeys) * g.padded);
  g.lse = part(rows);
  g.delta = part(rows);
  const int head = kv_head * g.per_kv;
  gather_rows<T>(a.out, first, tokens, a.heads, head, g.per_kv, g.dim, g.padded, g.query);  // for delta only
  gather_rows<T>(a.grad_out, first, tokens, a.heads, head, g.per_kv, g.dim, g.padded, g.grad_out);
  for (int64_t r = 0; r < rows; ++r) {
    vfloat sum = {};
    for (int c = 0; c < g.padded; c += kLanes)
      sum += load<vfloat>(g.query + r * g.padded + c) * load<vfloat>(g.grad_out + r * g.padded + c);
    g.delta[r] = sum_lanes(sum);
    g.lse[r] = a.lse[(first + r / g.per_kv) * a.heads + head + r % g.per_kv];
  }
  gather_rows<T>(a.query, first, tokens, a.heads, head, g.per_kv, g.dim, g.padded, g.query);
  gather_rows<T>(a.key, first, tokens, a.kv_heads, kv_head, 1, g.dim, g.padded, g.key);
  gather_rows<T>(a.value, first, tokens, a.kv_heads, kv_head, 1, g.dim, g.padded, g.value);
  std::memset(g.grad_query, 0, rows * g.padded * sizeof(float));
  std::memset(g.grad_key, 0, tokens * g.padded * sizeof(float));
  std::memset(g.grad_value, 0, tokens * g.padded * sizeof(float));
  std::memset(g.weight, 0, 2 * tile * sizeof(float));  // transposed whole, whatever part is used
  backward_pair(g, 0, prefix, 0, prefix, true);
  backward_pair(g, prefix, tokens, 0, prefix, false);
  for (int64_t i = 0, start = prefix; i < count; start += suffixes[i++])
    backward_pair(g, start, start + suffixes[i], start, start + suffixes[i], true);
  scatter_rows<T>(g.grad_query, first, tokens, a.heads, head, g.per_kv, g.dim, g.padded, a.grad_query);
  scatter_rows<T>(g.grad_key, first, tokens, a.kv_heads, kv_head, 1, g.dim, g.padded, a.grad_key);
  scatter_rows<T>(g.grad_value, first, tokens, a.kv_heads, kv_head, 1, g.dim, g.padded, a.grad_value);
}

// Gradients of the tokens first .. of one group, for one KV head and its query heads.
void grouped_backward(const GroupedBackward& a, int64_t first, int64_t prefix, const int64_t* suffixes, int64_t count,
                      int kv_head, float* scratch) {
  if (a.type == Float::f32) return backward_group<float>(a, first, prefix, suffixes, count, kv_head, scratch);
  if (a.type == Float::bf16) return backward_group<bf16>(a, first, prefix, suffixes, count, kv_head, scratch);
  return backward_group<f16>(a, first, prefix, suffixes, count, kv_head, scratch);
}

}  // namespace RLK_KERNEL_NAMESPACE
