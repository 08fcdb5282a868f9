// Small matrix products on tiles of kTileKeys rows that lie anywhere in memory. For use in csrc/cpu only.
#pragma once
#include "attention.h"
#include "simd_float.h"

namespace rlk::RLK_ISA {

constexpr int kRows = 6;                          // kRows * kVectors accumulators stay in registers
constexpr int kVectors = kLanes == 16 ? 4 : 2;
constexpr float kInfinity = __builtin_huge_valf();

// Calls f<R>(first) for blocks of R <= kRows rows that cover 0 .. count - 1.
template <class F>
RLK_INLINE void for_row_blocks(int count, const F& f) {
  int first = 0;
  for (; first + kRows <= count; first += kRows) f.template operator()<kRows>(first);
  switch (count - first) {
    case 1: return f.template operator()<1>(first);
    case 2: return f.template operator()<2>(first);
    case 3: return f.template operator()<3>(first);
    case 4: return f.template operator()<4>(first);
    case 5: return f.template operator()<5>(first);
  }
}

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

// Memory that will be read soon, asked for little by little in the order of its addresses. The processor's own
// prefetcher then takes part: alone, one core has too few requests in flight to use the bandwidth.
class Ahead {
 public:
  void clear() { count = place = 0; }
  void add(const void* from, int64_t bytes) {
    const char* p = static_cast<const char*>(from);
    if (count && end[count - 1] == p) {
      end[count - 1] += bytes;
    } else if (count < kMost) {
      begin[count] = p;
      end[count++] = p + bytes;
      if (count == 1) at = p;
    }
  }
  RLK_INLINE_MEMBER void lines(int n) {
    if (place == count) return;
    for (int i = 0; i < n; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    at += n * 64;
    if (at >= end[place] && ++place < count) at = begin[place];
  }

 private:
  static constexpr int kMost = 2 * kTileKeys;
  const char *begin[kMost], *end[kMost], *at;
  int count = 0, place = 0;
};

struct Nothing {
  void lines(int) {}
};

// Keys or values of a tile: row j starts at rows[j] + offset. The list is padded to a multiple of kLanes.
template <class T>
struct TileRows {
  const T* const* rows;
  int64_t offset = 0;
  RLK_INLINE_MEMBER const T* operator[](int j) const { return rows[j] + offset; }
};

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

namespace {  // local, or what is not inlined would be shared between instruction sets

// The tiles of a span, one after the other; meanwhile `ahead` holds the memory of the tile that follows.
template <class T>
class TileWalk {
 public:
  TileWalk(const Attention& a, const AttentionSpan& span) : start(span.first_key), a_(a), span_(span) {
    keys = locate_tile(span, start, 0);
    if (keys) look_ahead();
  }
  void advance() {
    start += kTileKeys;
    now_ ^= 1;
    keys = next_keys_;
    if (keys) look_ahead();
  }
  TileRows<T> key(int head) const { return {key_[now_], head * a_.key.head_stride}; }
  TileRows<T> value(int head) const { return {value_[now_], head * a_.value.head_stride}; }

  int64_t start;
  int keys;  // 0: the end
  Ahead ahead;

 private:
  int locate_tile(const AttentionSpan& span, int64_t first, int which) {
    const int64_t left = span.last_key - first;
    const int count = left < 0 ? 0 : left < kTileKeys ? int(left) : kTileKeys;
    if (count == 0) return 0;
    locate(a_.key, span.table, a_.block_size, first, count, key_[which]);
    locate(a_.value, span.table, a_.block_size, first, count, value_[which]);
    return count;
  }
  void look_ahead() {
    ahead.clear();
    next_keys_ = locate_tile(span_, start + kTileKeys, now_ ^ 1);
    const AttentionSpan* span = next_keys_ ? &span_ : span_.next;
    const int count = next_keys_ || !span ? next_keys_ : locate_tile(*span, span->first_key, now_ ^ 1);
    if (count == 0) return;
    add(key_[now_ ^ 1], count, a_.key, *span);
    add(value_[now_ ^ 1], count, a_.value, *span);
  }
  void add(const T* const* rows, int count, const Pages& pages, const AttentionSpan& span) {
    const bool side_by_side = pages.head_stride == a_.dim;
    const int heads = side_by_side ? 1 : span.kv_heads, width = side_by_side ? span.kv_heads * a_.dim : a_.dim;
    for (int h = 0; h < heads; ++h)
      for (int j = 0; j < count; ++j)
        ahead.add(rows[j] + (span.first_kv_head + h) * pages.head_stride, width * sizeof(T));
  }

  const Attention& a_;
  const AttentionSpan& span_;
  const T *key_[2][kTileKeys], *value_[2][kTileKeys];  // rows of KV head 0, of this tile and the next
  int now_ = 0, next_keys_ = 0;
};

}  // namespace

// s[r][key] = q[r] . rows[key], straight from the cache, kLanes keys at a time; dim is a multiple of kLanes.
template <int R, class T>
static void score_direct(const float* q, int64_t q_stride, int dim, TileRows<T> rows, int keys, Ahead& ahead, float* s) {
  constexpr int kKeys = R == 1 ? kLanes : R == 2 ? kLanes / 2 : kLanes == 16 ? 4 : 2;  // as many sums as registers
  for (int k = 0; k < keys; k += kLanes) {
    vfloat part[R][kLanes / kKeys];
    for (int g = 0; g < kLanes / kKeys; ++g) {
      vfloat acc[R][kKeys] = {};
      const T* key[kKeys];
      for (int j = 0; j < kKeys; ++j) key[j] = rows[k + g * kKeys + j];
      for (int c = 0; c < dim; c += kLanes) {
        if (kKeys * kLanes * sizeof(T) >= 64 || c % (2 * kLanes) == 0) ahead.lines(kKeys * kLanes * sizeof(T) / 64);
        vfloat x[kKeys];
        for (int j = 0; j < kKeys; ++j) x[j] = load_float(key[j] + c);
        for (int r = 0; r < R; ++r) {
          const vfloat y = load<vfloat>(q + r * q_stride + c);
          for (int j = 0; j < kKeys; ++j) acc[r][j] += x[j] * y;
        }
      }
      for (int r = 0; r < R; ++r) part[r][g] = sum_within<kKeys>(acc[r]);
    }
    for (int r = 0; r < R; ++r) store(s + r * kTileKeys + k, sum_across<kKeys>(part[r]));
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
template <class T, class A>
static void pack_keys(TileRows<T> rows, int keys, int dim, A& ahead, float* kt) {
  for (int k = 0; k < keys; k += kLanes)
    for (int c = 0; c < dim; c += kLanes) {
      vfloat square[kLanes];
      ahead.lines(kLanes * kLanes * sizeof(T) / 64);
      for (int j = 0; j < kLanes; ++j) square[j] = load_some(rows[k + j] + c, dim - c);
      transpose(square);
      for (int j = 0; j < kLanes && c + j < dim; ++j) store(kt + int64_t(c + j) * kTileKeys + k, square[j]);
    }
}

// Two neighbours of 16 bits travel as one lane of 32.
template <class A>
static void pack_keys(TileRows<bf16> rows, int keys, int dim, A& ahead, float* kt) {
  if (dim % (2 * kLanes)) return pack_keys<bf16, A>(rows, keys, dim, ahead, kt);
  for (int k = 0; k < keys; k += kLanes)
    for (int c = 0; c < dim; c += 2 * kLanes) {
      vfloat square[kLanes];
      ahead.lines(kLanes * kLanes / 16);
      for (int j = 0; j < kLanes; ++j) std::memcpy(&square[j], rows[k + j] + c, sizeof(vfloat));
      transpose(square);
      for (int j = 0; j < kLanes; ++j) {
        const vuint pair = (vuint)square[j];
        store(kt + int64_t(c + 2 * j) * kTileKeys + k, (vfloat)(pair << 16));
        store(kt + int64_t(c + 2 * j + 1) * kTileKeys + k, (vfloat)(pair & 0xFFFF0000u));
      }
    }
}

// out[r][0 .. NV * kLanes) += sum over keys of p[r][key] * rows[key][column ..]
template <int R, int NV, class T, class A>
static void value_block(const float* p, TileRows<T> rows, int keys, int column, A& ahead, float* out, int64_t stride) {
  constexpr int kChains = R * NV < 8 ? 2 : 1;  // independent sums, where few rows would wait for the adder
  vfloat acc[kChains][R][NV] = {};
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[0][r][v] = load<vfloat>(out + r * stride + column + v * kLanes);
  int k = 0;
  for (; k + kChains <= keys; k += kChains) {
    ahead.lines(kChains * NV * kLanes * sizeof(T) / 64);
    for (int u = 0; u < kChains; ++u) {
      vfloat x[NV];
      for (int v = 0; v < NV; ++v) x[v] = load_float(rows[k + u] + column + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const vfloat weight = splat(p[r * kTileKeys + k + u]);
        for (int v = 0; v < NV; ++v) acc[u][r][v] += weight * x[v];
      }
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

template <int R, class T, class A>
static void add_values(const float* p, TileRows<T> rows, int keys, int padded, A& ahead, float* out, int64_t stride) {
  int c = 0;
  for (; c + kVectors * kLanes <= padded; c += kVectors * kLanes)
    value_block<R, kVectors>(p, rows, keys, c, ahead, out, stride);
  for (; c + 2 * kLanes <= padded; c += 2 * kLanes) value_block<R, 2>(p, rows, keys, c, ahead, out, stride);
  for (; c < padded; c += kLanes) value_block<R, 1>(p, rows, keys, c, ahead, out, stride);
}

static inline void cap_scores(float* s, int keys, float softcap) {
  for (int k = 0; k < keys; k += kLanes) store(s + k, vtanh(load<vfloat>(s + k) / softcap) * softcap);
}

// Turns the scores of one row into weights and brings its running maximum, sum and output up to date.
static inline void online_softmax(float* s, int64_t visible, int keys, float* maximum, float* sum, float* out, int padded) {
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

}  // namespace rlk::RLK_ISA
