// Online-softmax attention (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135) over tiles of
// kTileKeys paged keys. A row is one query and head; rows that share a KV head are worked on together, kRows at a time.
#include "attention.h"

#include "dispatch.h"
#include "simd_float.h"

namespace RLK_KERNEL_NAMESPACE {

constexpr int kRows = 6;                          // kRows * kVectors accumulators stay in registers
constexpr int kVectors = kLanes == 16 ? 4 : 2;
constexpr float kInfinity = __builtin_huge_valf();

// s[r][key] = q[r] . k[key] for NV vectors of keys; kt [dim][kTileKeys] holds the keys transposed.
template <int R, int NV>
static void score_block(const float* q, int64_t q_stride, int dim, const float* kt, float* s) {
  vfloat acc[R][NV] = {};
  for (int c = 0; c < dim; ++c) {
    vfloat k[NV];
    for (int v = 0; v < NV; ++v) k[v] = load<vfloat>(kt + int64_t(c) * kTileKeys + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const vfloat x = splat(q[r * q_stride + c]);
      for (int v = 0; v < NV; ++v) acc[r][v] += x * k[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(s + r * kTileKeys + v * kLanes, acc[r][v]);
}

template <int R>
static void score_packed(const float* q, int64_t q_stride, int dim, const float* kt, int keys, float* s) {
  int k = 0;
  for (; k + kVectors * kLanes <= keys; k += kVectors * kLanes)
    score_block<R, kVectors>(q, q_stride, dim, kt + k, s + k);
  for (; k < keys; k += kLanes) score_block<R, 1>(q, q_stride, dim, kt + k, s + k);
}

// Asks for the line that holds row[column], once per line.
template <class T>
RLK_INLINE void prefetch(const T* row, int column) {
  if (column * sizeof(T) % 64 == 0) __builtin_prefetch(row + column, 0, 2);
}

// The same for one row straight from the cache; dim is a multiple of kLanes, the lists of rows are padded to one.
template <class T>
static void score_direct(const float* q, int dim, const T* const* rows, const T* const* next, int keys, float* s) {
  for (int k = 0; k < keys; k += kLanes) {
    vfloat acc[kLanes] = {};
    for (int c = 0; c < dim; c += kLanes) {
      const vfloat x = load<vfloat>(q + c);
      for (int j = 0; j < kLanes; ++j) {
        prefetch(next[k + j], c);
        acc[j] += x * load_float(rows[k + j] + c);
      }
    }
    store(s + k, sum_rows(acc));
  }
}

template <class T>
RLK_INLINE vfloat load_some(const T* p, int count) {
  if (count >= kLanes) return load_float(p);
  T part[kLanes] = {};
  std::memcpy(part, p, count * sizeof(T));
  return load_float(part);
}

// kt[c][key] = rows[key][c], in float32; the lists of rows are padded to a multiple of kLanes.
template <class T>
static void pack_keys(const T* const* rows, const T* const* next, int keys, int dim, float* kt) {
  for (int k = 0; k < keys; k += kLanes)
    for (int c = 0; c < dim; c += kLanes) {
      vfloat square[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        prefetch(next[k + j], c);
        square[j] = load_some(rows[k + j] + c, dim - c);
      }
      transpose(square);
      for (int j = 0; j < kLanes && c + j < dim; ++j) store(kt + int64_t(c + j) * kTileKeys + k, square[j]);
    }
}

// Two neighbours of 16 bits travel as one lane of 32.
static void pack_keys(const bf16* const* rows, const bf16* const* next, int keys, int dim, float* kt) {
  if (dim % (2 * kLanes)) return pack_keys<bf16>(rows, next, keys, dim, kt);
  for (int k = 0; k < keys; k += kLanes)
    for (int c = 0; c < dim; c += 2 * kLanes) {
      vfloat square[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        prefetch(next[k + j], c);
        std::memcpy(&square[j], rows[k + j] + c, sizeof(vfloat));
      }
      transpose(square);
      for (int j = 0; j < kLanes; ++j) {
        const vuint pair = (vuint)square[j];
        store(kt + int64_t(c + 2 * j) * kTileKeys + k, (vfloat)(pair << 16));
        store(kt + int64_t(c + 2 * j + 1) * kTileKeys + k, (vfloat)(pair & 0xFFFF0000u));
      }
    }
}

// out[r][0 .. NV * kLanes) += sum over keys of p[r][key] * rows[key][column ..]
template <class T, int R, int NV>
static void value_block(const float* p, const T* const* rows, const T* const* next, int keys, int column, float* out,
                        int64_t stride) {
  constexpr int kChains = R * NV < 8 ? 2 : 1;  // independent sums, where few rows would wait for the adder
  vfloat acc[kChains][R][NV] = {};
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[0][r][v] = load<vfloat>(out + r * stride + column + v * kLanes);
  int k = 0;
  for (; k + kChains <= keys; k += kChains)
    for (int u = 0; u < kChains; ++u) {
      vfloat x[NV];
      for (int v = 0; v < NV; ++v) {
        prefetch(next[k + u], column + v * kLanes);
        x[v] = load_float(rows[k + u] + column + v * kLanes);
      }
      for (int r = 0; r < R; ++r) {
        const vfloat weight = splat(p[r * kTileKeys + k + u]);
        for (int v = 0; v < NV; ++v) acc[u][r][v] += weight * x[v];
      }
    }
  for (; k < keys; ++k)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v)
        acc[0][r][v] += p[r * kTileKeys + k] * load_float(rows[k] + column + v * kLanes);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) {
      for (int u = 1; u < kChains; ++u) acc[0][r][v] += acc[u][r][v];
      store(out + r * stride + column + v * kLanes, acc[0][r][v]);
    }
}

template <int R, class T>
static void add_values(const float* p, const T* const* rows, const T* const* next, int keys, int padded, float* out,
                       int64_t stride) {
  int c = 0;
  for (; c + kVectors * kLanes <= padded; c += kVectors * kLanes)
    value_block<T, R, kVectors>(p, rows, next, keys, c, out, stride);
  for (; c + 2 * kLanes <= padded; c += 2 * kLanes) value_block<T, R, 2>(p, rows, next, keys, c, out, stride);
  for (; c < padded; c += kLanes) value_block<T, R, 1>(p, rows, next, keys, c, out, stride);
}

// Turns the scores of one row into weights and brings its running maximum, sum and output up to date.
static void online_softmax(float* s, int64_t visible, int keys, float* maximum, float* sum, float* out, int padded) {
  const vint lane = lane_numbers();
  const int limit = visible < keys ? (visible < 0 ? 0 : int(visible)) : keys;
  vfloat top = splat(-kInfinity);
  for (int k = 0; k < keys; k += kLanes) {
    vfloat x = load<vfloat>(s + k);
    if (k + kLanes > limit) {
      x = lane < limit - k ? x : splat(-kInfinity);
      store(s + k, x);
    }
    top = vmax(x, top);  // a NaN is not kept here but comes back through exp
  }
  const float before = *maximum, now = __builtin_fmaxf(before, max_lane(top));
  if (now == -kInfinity && limit == 0) {
    for (int k = 0; k < keys; k += kLanes) store(s + k, vfloat{});
    return;
  }
  const vfloat shift = splat(now == -kInfinity ? 0.0f : now);
  vfloat total = {};
  for (int k = 0; k < keys; k += kLanes) {
    const vfloat weight = vexp(load<vfloat>(s + k) - shift);
    store(s + k, weight);
    total += weight;
  }
  const float shrink = before == -kInfinity ? 0.0f : vexp(splat(before) - shift)[0];
  *maximum = now;
  *sum = *sum * shrink + sum_lanes(total);
  if (shrink != 1.0f)
    for (int c = 0; c < padded; c += kLanes) store(out + c, load<vfloat>(out + c) * shrink);
}

template <class T>
struct Tile {  // rows of one KV head, padded to whole vectors
  const T *key[kTileKeys], *value[kTileKeys];
  const T *next_key[kTileKeys], *next_value[kTileKeys];  // what is worth asking for meanwhile
  const float* value_packed[kTileKeys];
  int keys;         // in the tile
  int64_t visible;  // keys from the start of the tile on that the first query sees
};

struct Rows {  // of one KV head
  float *query, *out, *maximum, *sum;
};

// Rows first .. first + R - 1 of a KV head, in order of query and head, against one tile.
template <int R, class T>
static void attend_rows(const Tile<T>& tile, const Rows& rows, int first, int heads_per_kv, int step, int dim,
                        int padded, const float* kt, float* s) {
  const float* q = rows.query + int64_t(first) * padded;
  float* out = rows.out + int64_t(first) * padded;
  if (kt) {
    score_packed<R>(q, padded, dim, kt, tile.keys, s);
  } else {
    for (int r = 0; r < R; ++r) score_direct(q + r * padded, dim, tile.key, tile.next_key, tile.keys, s + r * kTileKeys);
  }
  for (int r = 0; r < R; ++r) {
    const int64_t visible = tile.visible + int64_t((first + r) / heads_per_kv) * step;
    online_softmax(s + r * kTileKeys, visible, tile.keys, rows.maximum + first + r, rows.sum + first + r,
                   out + r * padded, padded);
  }
  if (padded == dim)
    add_values<R>(s, tile.value, tile.next_value, tile.keys, padded, out, padded);
  else
    add_values<R>(s, tile.value_packed, tile.value_packed, tile.keys, padded, out, padded);
}

template <class T>
static void attend_tile(const Tile<T>& tile, const Rows& rows, int count, int heads_per_kv, int step, int dim,
                        int padded, const float* kt, float* s) {
  int r = 0;
  for (; r + kRows <= count; r += kRows) attend_rows<kRows>(tile, rows, r, heads_per_kv, step, dim, padded, kt, s);
#define RLK_LAST_ROWS(R) \
  case R: return attend_rows<R>(tile, rows, r, heads_per_kv, step, dim, padded, kt, s);
  switch (count - r) {
    RLK_LAST_ROWS(1)
    RLK_LAST_ROWS(2)
    RLK_LAST_ROWS(3)
    RLK_LAST_ROWS(4)
    RLK_LAST_ROWS(5)
  }
#undef RLK_LAST_ROWS
}

// Pointers to the rows of `keys` keys from position `start` on, filled up to whole vectors with the first of them.
template <class T>
static void locate(const Pages& pages, const int32_t* table, int block_size, int64_t start, int keys, const T** rows) {
  int64_t block = start / block_size, offset = start % block_size;
  const T* base = static_cast<const T*>(pages.data);
  for (int j = 0; j < keys; ++j) {
    rows[j] = base + table[block] * pages.block_stride + offset * pages.token_stride;
    if (++offset == block_size) offset = 0, ++block;
  }
  for (int j = keys; j < (keys + kLanes - 1) / kLanes * kLanes; ++j) rows[j] = rows[0];
}

// Points a tile at one KV head. What it asks for ahead is its share of the next tile (if there is one) in the order
// of memory: all KV heads of a token lie side by side, and pages are scattered, so the processor does not foresee it.
template <class T>
static void point_at(Tile<T>& tile, const Attention& a, const AttentionSpan& span, int head, const T* const* keys,
                     const T* const* values, const T* const* next_keys, const T* const* next_values, int next_count) {
  const int count = (tile.keys + kLanes - 1) / kLanes * kLanes, ahead = (head - span.first_kv_head) * kTileKeys;
  for (int j = 0; j < count; ++j) {
    tile.key[j] = keys[j] + head * a.key.head_stride;
    tile.value[j] = values[j] + head * a.value.head_stride;
  }
  int row = ahead / span.kv_heads, beside = ahead % span.kv_heads;
  for (int j = 0; j < count; ++j) {
    tile.next_key[j] = row < next_count ? next_keys[row] + (span.first_kv_head + beside) * a.key.head_stride : tile.key[j];
    tile.next_value[j] =
        row < next_count ? next_values[row] + (span.first_kv_head + beside) * a.value.head_stride : tile.value[j];
    if (++beside == span.kv_heads) beside = 0, ++row;
  }
}

template <class Q>
static void load_queries(const Attention& a, const AttentionSpan& span, int head, Rows rows, int padded) {
  const int per_kv = a.heads / a.kv_heads;
  for (int r = 0; r < span.queries * per_kv; ++r) {
    const Q* from = static_cast<const Q*>(a.query) + (span.first_query + r / per_kv) * a.query_token_stride +
                    (head * per_kv + r % per_kv) * a.query_head_stride;
    float* to = rows.query + int64_t(r) * padded;
    for (int c = 0; c < a.dim; ++c) to[c] = to_float(from[c]) * a.scale;
    for (int c = a.dim; c < padded; ++c) to[c] = 0;
    rows.maximum[r] = -kInfinity;
    rows.sum[r] = 0;
    std::memset(rows.out + int64_t(r) * padded, 0, padded * sizeof(float));
  }
}

template <class Q>
static void store_outputs(const Attention& a, const AttentionSpan& span, int head, Rows rows, int padded) {
  const int per_kv = a.heads / a.kv_heads;
  for (int r = 0; r < span.queries * per_kv; ++r) {
    const int64_t row = int64_t(r / per_kv) * a.heads + head * per_kv + r % per_kv;  // from the first query on
    const float sum = rows.sum[r], inverse = sum == 0 ? 0.0f : 1 / sum;
    const float lse = sum == 0 ? -kInfinity : rows.maximum[r] + __builtin_logf(sum);
    const float* from = rows.out + int64_t(r) * padded;
    if (span.part_out) {
      for (int c = 0; c < a.dim; ++c) span.part_out[row * a.dim + c] = from[c] * inverse;
      span.part_lse[row] = lse;
    } else {
      const int64_t at = span.first_query * a.heads + row;
      Q* to = static_cast<Q*>(a.out) + at * a.dim;
      for (int c = 0; c < a.dim; ++c) from_float(to + c, from[c] * inverse);
      a.lse[at] = lse;
    }
  }
}

template <class T, class Q>
static void attend(const Attention& a, const AttentionSpan& span, float* scratch) {
  const int per_kv = a.heads / a.kv_heads, count = span.queries * per_kv;
  const int padded = (a.dim + kLanes - 1) / kLanes * kLanes;
  float* const s = scratch;
  float* const kt = s + 8 * kTileKeys;
  float* const packed = kt + int64_t(kTileKeys) * padded;
  float* const first = packed + int64_t(kTileKeys) * padded;
  const int64_t per_head = int64_t(count) * (2 * padded + 2);
  const auto rows_of = [&](int head) {
    float* p = first + per_head * (head - span.first_kv_head);
    return Rows{p, p + int64_t(count) * padded, p + int64_t(count) * 2 * padded, p + int64_t(count) * (2 * padded + 1)};
  };
  for (int h = 0; h < span.kv_heads; ++h)
    load_queries<Q>(a, span, span.first_kv_head + h, rows_of(span.first_kv_head + h), padded);
  const bool direct = count <= 2 && padded == a.dim;
  Tile<T> tile;
  const T *keys_at[2][kTileKeys], *values_at[2][kTileKeys];  // of KV head 0, this tile and the next
  const auto find = [&](int64_t start, int which) {
    const int64_t left = span.last_key - start;
    const int keys = left < kTileKeys ? int(left) : kTileKeys;
    locate(a.key, span.table, a.block_size, start, keys, keys_at[which]);
    locate(a.value, span.table, a.block_size, start, keys, values_at[which]);
    return keys;
  };
  int now = 0, keys = span.first_key < span.last_key ? find(span.first_key, now) : 0;
  for (int64_t start = span.first_key; start < span.last_key; start += kTileKeys) {
    const bool more = start + kTileKeys < span.last_key;
    const int next = more ? now ^ 1 : now, next_keys = more ? find(start + kTileKeys, next) : 0;
    tile.keys = keys;
    tile.visible = span.visible - start;
    for (int head = span.first_kv_head; head < span.first_kv_head + span.kv_heads; ++head) {
      point_at(tile, a, span, head, keys_at[now], values_at[now], keys_at[next], values_at[next], next_keys);
      if (!direct) pack_keys(tile.key, tile.next_key, keys, a.dim, kt);
      if (padded != a.dim)
        for (int j = 0; j < keys; ++j) {
          tile.value_packed[j] = packed + int64_t(j) * padded;
          for (int c = 0; c < padded; c += kLanes)
            store(packed + int64_t(j) * padded + c, load_some(tile.value[j] + c, a.dim - c));
        }
      attend_tile(tile, rows_of(head), count, per_kv, span.step, a.dim, padded, direct ? nullptr : kt, s);
    }
    now = next;
    keys = next_keys;
  }
  for (int h = 0; h < span.kv_heads; ++h)
    store_outputs<Q>(a, span, span.first_kv_head + h, rows_of(span.first_kv_head + h), padded);
}

template <class Q>
static void attend_as(const Attention& a, const AttentionSpan& span, float* scratch) {
  if (a.cache_type == Float::f32) return attend<float, Q>(a, span, scratch);
  if (a.cache_type == Float::bf16) return attend<bf16, Q>(a, span, scratch);
  return attend<f16, Q>(a, span, scratch);
}

void attend_span(const Attention& a, const AttentionSpan& span, float* scratch) {
  if (a.query_type == Float::f32) return attend_as<float>(a, span, scratch);
  if (a.query_type == Float::bf16) return attend_as<bf16>(a, span, scratch);
  return attend_as<f16>(a, span, scratch);
}

}  // namespace RLK_KERNEL_NAMESPACE
