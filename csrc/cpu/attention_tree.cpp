// Attention among the packed tokens of trees, and its gradients: online softmax as in attention.cpp, and the backward
// pass of FlashAttention-2 (arXiv 2307.08691), over tiles of kTileKeys keys that follow one another on a path.
//
// A query's output does not depend on what its sequence is packed with: tiles begin at multiples of kTileKeys tokens of
// the path, and its sums take the same terms in the same order, whatever rows are worked on beside it.
#include "attention_tiles.h"
#include "dispatch.h"

namespace RLK_KERNEL_NAMESPACE {

// rows[t * per + j] = from[first + t][head + j], padded with zeros to `width`.
template <class T>
static void gather_rows(const void* from, int64_t first, int64_t tokens, int heads, int head, int per, int dim,
                        int64_t stride, int width, float* rows) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int j = 0; j < per; ++j, rows += stride) {
      const T* row = static_cast<const T*>(from) + ((first + t) * heads + head + j) * dim;
      for (int c = 0; c < dim; ++c) rows[c] = to_float(row[c]);
      for (int c = dim; c < width; ++c) rows[c] = 0;
    }
}

template <class T>
static void scatter_rows(const float* rows, int64_t first, int64_t tokens, int heads, int head, int per, int dim,
                         int64_t stride, T* to) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int j = 0; j < per; ++j, rows += stride) {
      T* row = to + ((first + t) * heads + head + j) * dim;
      for (int c = 0; c < dim; ++c) from_float(row + c, rows[c]);
    }
}

namespace {

struct Depths {
  int64_t least, most;
  // The first tile that a query at one of these depths sees.
  int64_t first_tile(int64_t window) const { return least < window ? 0 : (least + 1 - window) / kTileKeys * kTileKeys; }
};

// The keys of a tile that a query sees: from .. limit - 1.
struct SeenKeys {
  int from, limit;
  bool none() const { return from == limit; }
};

}  // namespace

// Of a tile of `keys` keys, the first at `depth`, a query at `position` sees those above depth `end` in its window.
RLK_INLINE SeenKeys seen_keys(int64_t position, int64_t end, int64_t depth, int keys, int64_t window) {
  const int64_t seen = end - depth, before = position + 1 - window - depth;
  const int limit = seen < keys ? int(seen) : keys;
  return {before < 0 ? 0 : before < limit ? int(before) : limit, limit};
}

// Writes for each token of a span its depth, `per` times.
static Depths find_positions(const TreeSpan& span, int per, int32_t* position) {
  int64_t t = span.begin;
  Depths depths{span.above(), 0};
  for (const TreeNode* n = span.node; t < span.end; ++n)
    for (; t < n->stop && t < span.end; ++t) {
      const int64_t depth = n->depth + t - n->start;
      depths.least = depth < depths.least ? depth : depths.least;
      depths.most = depth > depths.most ? depth : depths.most;
      for (int j = 0; j < per; ++j) *position++ = int32_t(depth);
    }
  return depths;
}

// acc[r] += sum over keys k < limit[r] of p[r][k] * values[k], of rows First .. R - 1 from key k on; limits ascend.
template <int First, int R, int NV>
RLK_INLINE void add_seen_keys(int k, const float* p, const int* limit, const float* values, int64_t stride,
                              vfloat (&acc)[R][NV]) {
  if constexpr (First < R) {
    for (; k < limit[First]; ++k) {
      vfloat x[NV];
      for (int v = 0; v < NV; ++v) x[v] = load<vfloat>(values + k * stride + v * kLanes);
      for (int r = First; r < R; ++r) {
        const vfloat weight = splat(p[r * kTileKeys + k]);
        for (int v = 0; v < NV; ++v) acc[r][v] += weight * x[v];
      }
    }
    add_seen_keys<First + 1>(k, p, limit, values, stride, acc);
  }
}

// The same for NV vectors of columns of out, from key `from` on. The keys come in order and one by one, so that R does
// not change a bit, and a row reads no value that it does not see.
template <int R, int NV>
static void add_seen_block(int from, const float* p, const int* limit, const float* values, int64_t stride, float* out) {
  vfloat acc[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = load<vfloat>(out + r * stride + v * kLanes);
  add_seen_keys<0>(from, p, limit, values, stride, acc);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(out + r * stride + v * kLanes, acc[r][v]);
}

template <int R>
static void add_seen(int from, const float* p, const int* limit, const float* values, int width, int64_t stride,
                     float* out) {
  constexpr int NV = kRows * kVectors / R >= 8 ? 8 : kRows * kVectors / R >= 4 ? 4 : kVectors;  // sums in registers
  int c = 0;
  for (; c + NV * kLanes <= width; c += NV * kLanes) add_seen_block<R, NV>(from, p, limit, values + c, stride, out + c);
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) add_seen_block<R, 2>(from, p, limit, values + c, stride, out + c);
  for (; c < width; c += kLanes) add_seen_block<R, 1>(from, p, limit, values + c, stride, out + c);
}

namespace {

// The tile's keys and values; filling it with the next node overwrites the last node's.
template <class T>
struct TreeTile {
  const TreeAttention& a;
  int64_t head;  // of keys
  int width;
  int64_t stride;
  float *kt, *values;  // [dim][kTileKeys], [kTileKeys][stride]
  const T* key[kTileKeys];

  // place(j): the token of key j.
  template <class Place>
  RLK_INLINE_MEMBER void fill(int from, int to, const Place& place) {
    for (int j = from; j < to; ++j) {
      const int64_t row = (int64_t(place(j)) * a.kv_heads + head) * a.dim;
      key[j] = static_cast<const T*>(a.key) + row;
      const T* value = static_cast<const T*>(a.value) + row;
      for (int c = 0; c < width; c += kLanes) store(values + j * stride + c, load_some(value + c, a.dim - c));
    }
    for (int j = to; j % kLanes; ++j) key[j] = key[from];
    const int first = from / kLanes * kLanes;
    Nothing nothing;
    pack_keys(TileRows<T>{key + first}, to - first, a.dim, nothing, kt + first);
  }
};

}  // namespace

template <class T>
static void attend_as(const TreeAttention& a, const TreeSpan& span, int kv_head, float* scratch) {
  const int per_kv = a.heads / a.kv_heads, width = (a.dim + kLanes - 1) / kLanes * kLanes, head = kv_head * per_kv;
  const int64_t tokens = span.end - span.begin, rows = tokens * per_kv, stride = tree_stride(a.dim);
  const int64_t above = span.above();
  const auto part = [&scratch](int64_t floats) { return (scratch += floats) - floats; };
  float *const query = part(rows * stride), *const out = part(rows * stride);
  float *const maximum = part(rows), *const sum = part(rows), *const s = part(kRows * kTileKeys);
  TreeTile<T> tile{a, kv_head, width, stride, part(kTileKeys * stride), part(kTileKeys * stride), {}};
  int32_t* const path = reinterpret_cast<int32_t*>(part(above));
  int32_t* const position = reinterpret_cast<int32_t*>(part(rows));
  tree_path(a, span, path);
  const Depths depths = find_positions(span, per_kv, position);
  gather_rows<T>(a.query, span.begin, tokens, a.heads, head, per_kv, a.dim, stride, width, query);
  for (int64_t i = 0; i < rows * stride; ++i) query[i] *= a.scale;
  std::memset(out, 0, rows * stride * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) maximum[r] = -kInfinity, sum[r] = 0;

  for (int64_t depth = depths.first_tile(a.window); depth <= depths.most; depth += kTileKeys) {
    // Attend tokens from .. to - 1 to what the tile holds.
    const auto attend = [&](int64_t from, int64_t to) {
      const int64_t first = (from - span.begin) * per_kv;
      for_row_blocks(int((to - from) * per_kv), [&]<int R>(int i) {
        const int64_t row = first + i;
        int first_key[R], limit[R];
        bool seen = false, cut = false;
        for (int r = 0; r < R; ++r) {
          const int64_t at = position[row + r];
          const SeenKeys keys = seen_keys(at, at + 1, depth, kTileKeys, a.window);
          first_key[r] = keys.from, limit[r] = keys.limit;
          seen |= !keys.none(), cut |= keys.from > 0;
        }
        if (!seen) return;
        score_packed<R>(query + row * stride, stride, a.dim, tile.kt, limit[R - 1], s);
        for (int r = 0; r < R; ++r) {
          float* const scores = s + r * kTileKeys;
          if (a.softcap) cap_scores(scores, limit[R - 1], a.softcap);
          for (int k = 0; k < first_key[r]; ++k) scores[k] = -kInfinity;
          online_softmax(scores, limit[r], limit[R - 1], maximum + row + r, sum + row + r, out + (row + r) * stride,
                         width);
        }
        if (!cut) return add_seen<R>(0, s, limit, tile.values, width, stride, out + row * stride);
        for (int r = 0; r < R; ++r)
          add_seen<1>(first_key[r], s + r * kTileKeys, limit + r, tile.values, width, stride, out + (row + r) * stride);
      });
    };
    const int64_t end = depth + kTileKeys;
    if (above > depth)
      tile.fill(0, above < end ? int(above - depth) : kTileKeys, [&](int j) { return path[depth + j]; });
    int64_t run = span.begin, at = span.begin;  // tokens from `run` on still have to attend
    for (const TreeNode* n = span.node; at < span.end; ++n) {
      const int64_t stop = n->stop < span.end ? n->stop : span.end, top = n->depth + at - n->start;
      const int64_t bottom = top + stop - at;
      if (top < end) {  // it ends before the tile, or has keys in it
        if (run < at) attend(run, at);
        run = bottom <= depth ? stop : top < depth ? at + depth - top : at;
        if (bottom > depth)
          tile.fill(top < depth ? 0 : int(top - depth), bottom < end ? int(bottom - depth) : kTileKeys,
                    [&](int j) { return at + depth + j - top; });
      }
      at = stop;
    }
    if (run < at) attend(run, at);
  }

  for (int64_t r = 0; r < rows; ++r) {
    const float inverse = sum[r] == 0 ? 0.0f : 1 / sum[r];
    for (int c = 0; c < width; ++c) out[r * stride + c] *= inverse;
    a.lse[(span.begin + r / per_kv) * a.heads + head + r % per_kv] =
        sum[r] == 0 ? -kInfinity : maximum[r] + __builtin_logf(sum[r]);
  }
  scatter_rows(out, span.begin, tokens, a.heads, head, per_kv, a.dim, stride, static_cast<T*>(a.out));
}

// Output and log-sum-exp of the queries of a span, for one KV head and its query heads.
void attend_tree(const TreeAttention& a, const TreeSpan& span, int kv_head, float* scratch) {
  if (a.type == Float::f32) return attend_as<float>(a, span, kv_head, scratch);
  if (a.type == Float::bf16) return attend_as<bf16>(a, span, kv_head, scratch);
  return attend_as<f16>(a, span, kv_head, scratch);
}

namespace {

struct Queries {  // of a span and KV head: rows of `stride` floats, in order of token and head
  float *query, *grad_out, *grad_query, *lse, *delta;
  float *key, *value, *kt, *vt;                          // of a tile: [kTileKeys][stride] and [dim][kTileKeys]
  float *weight, *grad_score, *weight_t, *grad_score_t;  // [kTileKeys][kTileKeys] each
  int32_t* position;                                     // of each row
  int per_kv, dim, width;
  int64_t stride, window;
  float scale, softcap;
};

}  // namespace

// out[i][j] = in[j][i] for the first rows and columns of `in`, rounded up to whole vectors.
static void transpose_tile(const float* in, int rows, int columns, float* out) {
  for (int i = 0; i < rows; i += kLanes)
    for (int j = 0; j < columns; j += kLanes) {
      vfloat square[kLanes];
      for (int k = 0; k < kLanes; ++k) square[k] = load<vfloat>(in + (i + k) * kTileKeys + j);
      transpose(square);
      for (int k = 0; k < kLanes; ++k) store(out + (j + k) * kTileKeys + i, square[k]);
    }
}

// Weights and gradients of the scores of `count` rows from `row` on, of which row r sees some of the first `keys` keys.
static void score_gradients(const Queries& q, int64_t row, int count, const SeenKeys* seen, int keys) {
  const int padded_keys = (keys + kLanes - 1) / kLanes * kLanes;
  for_row_blocks(count, [&]<int R>(int first) {
    const int64_t at = (row + first) * q.stride;
    score_packed<R>(q.query + at, q.stride, q.dim, q.kt, keys, q.weight + first * kTileKeys);
    score_packed<R>(q.grad_out + at, q.stride, q.dim, q.vt, keys, q.grad_score + first * kTileKeys);
  });
  const vint lane = lane_numbers();
  for (int r = 0; r < count; ++r) {
    float *w = q.weight + r * kTileKeys, *d = q.grad_score + r * kTileKeys;
    for (int k = 0; k < padded_keys; k += kLanes) {
      vfloat score = load<vfloat>(w + k) * q.scale, slope = splat(q.scale);
      if (q.softcap) {
        const vfloat share = vtanh(score / q.softcap);
        score = share * q.softcap;
        slope *= 1.0f - share * share;
      }
      vfloat p = vexp(score - q.lse[row + r]);
      vfloat s = p * (load<vfloat>(d + k) - q.delta[row + r]) * slope;
      if (k < seen[r].from || k + kLanes > seen[r].limit) {
        const vint is_seen = (lane >= seen[r].from - k) & (lane < seen[r].limit - k);
        p = is_seen ? p : vfloat{};
        s = is_seen ? s : vfloat{};
      }
      store(w + k, p);
      store(d + k, s);
    }
  }
}

// The tile's keys, the first of them at `depth`, against the queries of tokens from .. span.end - 1, up to the first
// that sees none. Those that nodes before `next` hold see all keys up to themselves; what follows has left the path at
// the least depth at which a node began.
static void backward_tile(const Queries& q, const TreeAttention& a, const TreeSpan& span, int keys, int64_t depth,
                          int64_t from, const TreeNode* next, float* grad_key, float* grad_value) {
  const float* key[kTileKeys];
  Nothing nothing;
  for (int j = 0; j < kTileKeys; ++j) key[j] = q.key + j * q.stride;
  const int64_t rows = (span.end - span.begin) * q.per_kv;
  int64_t row = (from - span.begin) * q.per_kv, shared = depth + keys;
  const auto add_gradients = [&](int64_t row, int count, const SeenKeys* seen, int most) {
    const float *query[kTileKeys], *grad_out[kTileKeys];
    score_gradients(q, row, count, seen, most);
    for (int r = 0; r < count; ++r) {
      query[r] = q.query + (row + r) * q.stride;
      grad_out[r] = q.grad_out + (row + r) * q.stride;
    }
    for_row_blocks(count, [&]<int R>(int r) {
      add_values<R>(q.grad_score + r * kTileKeys, TileRows<float>{key}, most, q.width, nothing,
                    q.grad_query + (row + r) * q.stride, q.stride);
    });
    transpose_tile(q.weight, count, most, q.weight_t);
    transpose_tile(q.grad_score, count, most, q.grad_score_t);
    for_row_blocks(most, [&]<int R>(int j) {
      add_values<R>(q.weight_t + j * kTileKeys, TileRows<float>{grad_out}, count, q.width, nothing,
                    grad_value + j * q.stride, q.stride);
      add_values<R>(q.grad_score_t + j * kTileKeys, TileRows<float>{query}, count, q.width, nothing,
                    grad_key + j * q.stride, q.stride);
    });
  };
  while (row < rows) {
    SeenKeys seen[kTileKeys];
    int count = 0, most = 0;
    bool left = false;
    for (; count < kTileKeys && row + count < rows; ++count) {
      const int64_t token = span.begin + (row + count) / q.per_kv, position = q.position[row + count];
      for (; next < a.nodes_end && next->start <= token; ++next)
        shared = next->depth < shared ? next->depth : shared;
      const int64_t end = position < shared ? position + 1 : shared;
      if ((left = end <= depth)) break;
      seen[count] = seen_keys(position, end, depth, keys, q.window);
      if (!seen[count].none() && seen[count].limit > most) most = seen[count].limit;
    }
    if (most > 0) add_gradients(row, count, seen, most);
    if (left) return;
    row += count;
  }
}

template <class T>
static void backward_as(const TreeAttention& a, const TreeGradients& g, const TreeSpan& span, int kv_head,
                        const TreeAbove& above, float* scratch) {
  const int64_t tokens = span.end - span.begin, depth = span.above(), tile = kTileKeys * kTileKeys;
  Queries q;
  q.per_kv = a.heads / a.kv_heads;
  q.dim = a.dim;
  q.width = (a.dim + kLanes - 1) / kLanes * kLanes;
  q.stride = tree_stride(a.dim);
  q.window = a.window;
  q.scale = a.scale;
  q.softcap = a.softcap;
  const int64_t rows = tokens * q.per_kv;
  const auto part = [&scratch](int64_t floats) { return (scratch += floats) - floats; };
  float** const of_queries[] = {&q.query, &q.grad_out, &q.grad_query};
  float** const of_keys[] = {&q.key, &q.value, &q.kt, &q.vt};
  float** const of_pairs[] = {&q.weight, &q.grad_score, &q.weight_t, &q.grad_score_t};
  for (float** p : of_queries) *p = part(rows * q.stride);
  for (float** p : of_keys) *p = part(kTileKeys * q.stride);
  for (float** p : of_pairs) *p = part(tile);
  q.lse = part(rows);
  q.delta = part(rows);
  float *const grad_key = part(tokens * q.stride), *const grad_value = part(tokens * q.stride);
  q.position = reinterpret_cast<int32_t*>(part(rows));
  const Depths depths = find_positions(span, q.per_kv, q.position);
  const int head = kv_head * q.per_kv;
  const auto gather = [&](const void* from, float* to) {
    gather_rows<T>(from, span.begin, tokens, a.heads, head, q.per_kv, a.dim, q.stride, q.width, to);
  };
  float* const output = q.query;  // the query overwrites it below
  gather(a.out, output);
  gather(g.grad_out, q.grad_out);
  for (int64_t r = 0; r < rows; ++r) {
    vfloat sum = {};
    for (int c = 0; c < q.width; c += kLanes)
      sum += load<vfloat>(output + r * q.stride + c) * load<vfloat>(q.grad_out + r * q.stride + c);
    const int64_t at = (span.begin + r / q.per_kv) * a.heads + head + r % q.per_kv;
    q.delta[r] = sum_lanes(sum) - (g.grad_lse ? g.grad_lse[at] : 0);
    q.lse[r] = a.lse[at];
  }
  gather(a.query, q.query);
  std::memset(q.grad_query, 0, rows * q.stride * sizeof(float));
  std::memset(grad_key, 0, 2 * tokens * q.stride * sizeof(float));
  std::memset(above.grads, 0, 2 * depth * q.stride * sizeof(float));
  std::memset(q.weight, 0, 2 * tile * sizeof(float));  // transposed in whole vectors, whatever part is used

  const auto load_tile = [&](int keys, const auto& place) {
    const float *key[kTileKeys], *value[kTileKeys];
    Nothing nothing;
    for (int j = 0; j < kTileKeys; ++j) {
      key[j] = q.key + (j < keys ? j : 0) * q.stride;
      value[j] = q.value + (j < keys ? j : 0) * q.stride;
    }
    for (int j = 0; j < keys; ++j) {
      gather_rows<T>(a.key, place(j), 1, a.kv_heads, kv_head, 1, a.dim, q.stride, q.width, q.key + j * q.stride);
      gather_rows<T>(a.value, place(j), 1, a.kv_heads, kv_head, 1, a.dim, q.stride, q.width, q.value + j * q.stride);
    }
    pack_keys(TileRows<float>{key}, keys, a.dim, nothing, q.kt);
    pack_keys(TileRows<float>{value}, keys, a.dim, nothing, q.vt);
  };
  for (int64_t d = depths.first_tile(a.window); d < depth; d += kTileKeys) {
    const int keys = depth - d < kTileKeys ? int(depth - d) : kTileKeys;
    load_tile(keys, [&](int j) { return above.path[d + j]; });
    float* const grads = above.grads + d * q.stride;
    backward_tile(q, a, span, keys, d, span.begin, span.node + 1, grads, grads + depth * q.stride);
  }
  const TreeNode* node = span.node;
  for (int64_t k = span.begin, keys; k < span.end; k += keys) {
    while (node->stop <= k) ++node;
    const TreeNode* last = node;  // a tile goes on into the first child
    while (last->stop < k + kTileKeys && last + 1 < a.nodes_end && last[1].depth > last->depth) ++last;
    keys = (last->stop < span.end ? last->stop : span.end) - k;
    keys = keys < kTileKeys ? keys : kTileKeys;
    load_tile(int(keys), [&](int j) { return k + j; });
    const int64_t offset = (k - span.begin) * q.stride;
    backward_tile(q, a, span, int(keys), q.position[(k - span.begin) * q.per_kv], k, last + 1, grad_key + offset,
                  grad_value + offset);
  }
  scatter_rows(q.grad_query, span.begin, tokens, a.heads, head, q.per_kv, a.dim, q.stride, static_cast<T*>(g.grad_query));
  scatter_rows(grad_key, span.begin, tokens, a.kv_heads, kv_head, 1, a.dim, q.stride, g.grad_key);
  scatter_rows(grad_value, span.begin, tokens, a.kv_heads, kv_head, 1, a.dim, q.stride, g.grad_value);
}

// Gradients from the queries of a span, for one KV head and its query heads.
void tree_backward(const TreeAttention& a, const TreeGradients& g, const TreeSpan& span, int kv_head,
                   const TreeAbove& above, float* scratch) {
  if (a.type == Float::f32) return backward_as<float>(a, g, span, kv_head, above, scratch);
  if (a.type == Float::bf16) return backward_as<bf16>(a, g, span, kv_head, above, scratch);
  return backward_as<f16>(a, g, span, kv_head, above, scratch);
}

}  // namespace RLK_KERNEL_NAMESPACE
