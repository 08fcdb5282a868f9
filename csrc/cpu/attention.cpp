// Online-softmax attention (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135) over tiles of
// kTileKeys paged keys. A row is one query and head; rows that share a KV head are worked on together, kRows at a time.
#include "attention.h"

#include "attention_tiles.h"
#include "dispatch.h"

namespace RLK_KERNEL_NAMESPACE {

template <class T>
struct Tile {  // of one KV head
  TileRows<T> key, value;
  TileRows<float> value_packed;  // where a head is no whole number of vectors
  int keys;
  int64_t visible;  // keys from the start of the tile on that the first query sees
  int64_t hidden;   // those of them before its window
  float softcap;
  const float* kt;  // the keys transposed; null: scores come straight from the cache
};

struct Rows {  // of one KV head
  float *query, *out, *maximum, *sum;
};

// Rows first .. first + R - 1 of a KV head, in order of query and head, against one tile.
template <int R, class T>
static void attend_rows(const Tile<T>& tile, const Rows& rows, int first, int heads_per_kv, int step, int dim,
                        int padded, Ahead& ahead, float* s) {
  const float* q = rows.query + int64_t(first) * padded;
  float* out = rows.out + int64_t(first) * padded;
  if (tile.kt)
    score_packed<R>(q, padded, dim, tile.kt, tile.keys, s);
  else
    score_direct<R>(q, padded, dim, tile.key, tile.keys, ahead, s);
  for (int r = 0; r < R; ++r) {
    const int64_t query = (first + r) / heads_per_kv, hidden = tile.hidden + query;
    float* const scores = s + r * kTileKeys;
    if (tile.softcap) cap_scores(scores, tile.keys, tile.softcap);
    for (int k = 0; k < tile.keys && k < hidden; ++k) scores[k] = -kInfinity;
    online_softmax(scores, tile.visible + query * step, tile.keys, rows.maximum + first + r, rows.sum + first + r,
                   out + r * padded, padded);
  }
  if (padded == dim)
    add_values<R>(s, tile.value, tile.keys, padded, ahead, out, padded);
  else
    add_values<R>(s, tile.value_packed, tile.keys, padded, ahead, out, padded);
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
  const bool direct = padded == a.dim && count * 8 <= a.dim;  // few rows: cheaper than transposing the keys
  Tile<T> tile;
  tile.softcap = a.softcap;
  const float* packed_at[kTileKeys];
  for (TileWalk<T> walk(a, span); walk.keys; walk.advance()) {
    tile.keys = walk.keys;
    tile.visible = span.visible - walk.start;
    tile.hidden = span.hidden - walk.start;
    tile.kt = direct ? nullptr : kt;
    for (int head = span.first_kv_head; head < span.first_kv_head + span.kv_heads; ++head) {
      tile.key = walk.key(head);
      tile.value = walk.value(head);
      if (!direct) pack_keys(tile.key, tile.keys, a.dim, walk.ahead, kt);
      if (padded != a.dim) {
        for (int j = 0; j < tile.keys; ++j) {
          packed_at[j] = packed + int64_t(j) * padded;
          for (int c = 0; c < padded; c += kLanes)
            store(packed + int64_t(j) * padded + c, load_some(tile.value[j] + c, a.dim - c));
        }
        tile.value_packed = {packed_at};
      }
      for_row_blocks(count, [&]<int R>(int row) {
        attend_rows<R>(tile, rows_of(head), row, per_kv, span.step, a.dim, padded, walk.ahead, s);
      });
    }
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

#ifdef __AMX_BF16__
bool wide_fits(const Attention& a, const AttentionSpan& span);  // attention_wide.amx.cpp
void attend_wide(const Attention& a, const AttentionSpan& span, float* scratch);
#endif

void attend_span(const Attention& a, const AttentionSpan& span, float* scratch) {
#ifdef __AMX_BF16__
  if (wide_fits(a, span)) return attend_wide(a, span, scratch);
#endif
  if (a.query_type == Float::f32) return attend_as<float>(a, span, scratch);
  if (a.query_type == Float::bf16) return attend_as<bf16>(a, span, scratch);
  return attend_as<f16>(a, span, scratch);
}

}  // namespace RLK_KERNEL_NAMESPACE
