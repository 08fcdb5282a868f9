// attend_span for bfloat16 on the matrix unit of Sapphire Rapids and later (AMX): up to 16 rows (query and head) that
// share a KV head are one tile. Scores are computed transposed, S^T = K Q^T, so that keys are loaded as they lie in
// the cache and the softmax runs along vectors of rows; only values and weights need repacking for P V.
#include <immintrin.h>

#include "attention.h"
#include "dispatch.h"
#include "simd_float.h"

namespace RLK_KERNEL_NAMESPACE {

constexpr int kWideRows = 16;  // rows, keys or columns of a tile
constexpr float kInfinity = __builtin_huge_valf();

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct WideRows {  // kWideRows rows of one KV head
  uint32_t* query;  // [dim / 32][16 pairs of elements][row]
  float *out;       // [row][dim]
  float *maximum, *sum;
};

bool wide_fits(const Attention& a, const AttentionSpan& span) {
  return a.cache_type == Float::bf16 && a.query_type == Float::bf16 && a.dim % 32 == 0 && a.dim <= 512 &&
         a.block_size % 16 == 0 && span.queries * (a.heads / a.kv_heads) > 1;
}

// values[g][c][pair][column]: two neighbouring keys side by side, 32 keys and 16 columns to a tile.
static void pack_values(const bf16* const* rows, int keys, int dim, uint32_t* packed) {
  alignas(64) static const bf16 zeros[512] = {};
  for (int j = 0; j < kTileKeys; j += 2) {
    const bf16 *a = j < keys ? rows[j] : zeros, *b = j + 1 < keys ? rows[j + 1] : zeros;
    uint32_t* to = packed + int64_t(j / 32) * dim * 16 + j % 32 / 2 * 16;
    for (int c = 0; c < dim; c += 16, to += 256) {
      const vuint low = (vuint)load_float(a + c) >> 16, high = (vuint)load_float(b + c);
      store(to, low | high);
    }
  }
}

// s[key][row] for the 64 keys that start at four places of 16.
static void wide_scores(const bf16* const* keys, int64_t stride, const uint32_t* query, int dim, float* s) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int c = 0; c < dim; c += 32, query += 256) {
    _tile_loadd(6, query, 64);
    _tile_loadd(4, keys[0] + c, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys[1] + c, stride * 2);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, keys[2] + c, stride * 2);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, keys[3] + c, stride * 2);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, s, 64);
  _tile_stored(1, s + 256, 64);
  _tile_stored(2, s + 512, 64);
  _tile_stored(3, s + 768, 64);
}

// out[row][..] += p[row][key] values[key][..]
static void wide_values(const uint32_t* p, const uint32_t* values, int dim, float* out) {
  _tile_loadd(4, p, 64);
  _tile_loadd(5, p + 256, 64);
  for (int c = 0; c < dim; c += 32, values += 512) {
    _tile_loadd(0, out + c, dim * 4);
    _tile_loadd(1, out + c + 16, dim * 4);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + 256, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, values + int64_t(dim) * 16, 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, values + int64_t(dim) * 16 + 256, 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, out + c, dim * 4);
    _tile_stored(1, out + c + 16, dim * 4);
  }
}

// Turns the scores s[key][row] into weights p[2][row][pair of keys], bfloat16; limit: keys that each row sees.
static void wide_softmax(const float* s, int keys, vint limit, float scale, const WideRows& rows, int dim, uint32_t* p) {
  const vfloat nothing = splat(-kInfinity), before = load<vfloat>(rows.maximum);
  vfloat top = before, score[kTileKeys];
  for (int k = 0; k < keys; ++k) {
    const vfloat x = load<vfloat>(s + k * 16) * scale;
    score[k] = k < limit ? x : nothing;
    top = vmax(score[k], top);
  }
  const vfloat shift = top == nothing ? vfloat{} : top;
  vfloat sum = {};
  for (int half = 0; half < 2; ++half) {
    vfloat pairs[16];
    for (int j = 0; j < 16; ++j) {
      const int k = half * 32 + 2 * j;
      const vfloat a = k < keys ? vexp(score[k] - shift) : vfloat{}, b = k + 1 < keys ? vexp(score[k + 1] - shift) : vfloat{};
      sum += a + b;
      const __m256i low = (__m256i)_mm512_cvtneps_pbh((__m512)a), high = (__m256i)_mm512_cvtneps_pbh((__m512)b);
      pairs[j] = (vfloat)((vuint)_mm512_maskz_cvtepu16_epi32(0xFFFF, low) |
                          ((vuint)_mm512_maskz_cvtepu16_epi32(0xFFFF, high) << 16));
    }
    transpose(pairs);
    for (int r = 0; r < 16; ++r) store(p + half * 256 + r * 16, (vuint)pairs[r]);
  }
  const vfloat shrink = vexp(before - shift);  // 0 where nothing was seen before
  store(rows.maximum, top);
  store(rows.sum, load<vfloat>(rows.sum) * shrink + sum);
  for (int r = 0; r < 16; ++r)
    if (shrink[r] != 1.0f)
      for (int c = 0; c < dim; c += kLanes) store(rows.out + r * dim + c, load<vfloat>(rows.out + r * dim + c) * shrink[r]);
}

static const bf16* query_row(const Attention& a, const AttentionSpan& span, int head, int row) {
  const int per_kv = a.heads / a.kv_heads;
  return static_cast<const bf16*>(a.query) + (span.first_query + row / per_kv) * a.query_token_stride +
         (head * per_kv + row % per_kv) * a.query_head_stride;
}

static void wide_load(const Attention& a, const AttentionSpan& span, int head, int first, int count,
                      const WideRows& rows) {
  std::memset(rows.query, 0, a.dim * 32);
  std::memset(rows.out, 0, a.dim * 64);
  for (int r = 0; r < 16; ++r) {
    rows.maximum[r] = -kInfinity;
    rows.sum[r] = 0;
    if (first + r >= count) continue;
    const bf16* from = query_row(a, span, head, first + r);
    for (int pair = 0; pair < a.dim / 2; ++pair) std::memcpy(rows.query + pair * 16 + r, from + 2 * pair, 4);
  }
}

static void wide_store(const Attention& a, const AttentionSpan& span, int head, int first, int count,
                       const WideRows& rows) {
  const int per_kv = a.heads / a.kv_heads;
  for (int r = 0; r < 16 && first + r < count; ++r) {
    const int64_t row = int64_t((first + r) / per_kv) * a.heads + head * per_kv + (first + r) % per_kv;
    const float sum = rows.sum[r], inverse = sum == 0 ? 0.0f : 1 / sum;
    const float lse = sum == 0 ? -kInfinity : rows.maximum[r] + __builtin_logf(sum);
    const float* from = rows.out + r * a.dim;
    if (span.part_out) {
      for (int c = 0; c < a.dim; ++c) span.part_out[row * a.dim + c] = from[c] * inverse;
      span.part_lse[row] = lse;
    } else {
      const int64_t at = span.first_query * a.heads + row;
      for (int c = 0; c < a.dim; ++c) from_float(static_cast<bf16*>(a.out) + at * a.dim + c, from[c] * inverse);
      a.lse[at] = lse;
    }
  }
}

static const bf16* cell(const Pages& pages, const AttentionSpan& span, int block_size, int64_t position, int head) {
  return static_cast<const bf16*>(pages.data) + span.table[position / block_size] * pages.block_stride +
         position % block_size * pages.token_stride + head * pages.head_stride;
}

void attend_wide(const Attention& a, const AttentionSpan& span, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int per_kv = a.heads / a.kv_heads, count = span.queries * per_kv, blocks = (count + 15) / 16;
  float* const s = scratch;
  uint32_t* const p = reinterpret_cast<uint32_t*>(s + kTileKeys * 16);
  uint32_t* const values = p + 512;
  float* const first = reinterpret_cast<float*>(values + a.dim * 32);
  const int64_t per_block = a.dim * 24 + 32;
  const auto rows_of = [&](int head, int block) {
    float* at = first + ((head - span.first_kv_head) * blocks + block) * per_block;
    return WideRows{reinterpret_cast<uint32_t*>(at), at + a.dim * 8, at + a.dim * 24, at + a.dim * 24 + 16};
  };
  const int last_head = span.first_kv_head + span.kv_heads;
  for (int head = span.first_kv_head; head < last_head; ++head)
    for (int b = 0; b < blocks; ++b) wide_load(a, span, head, b * 16, count, rows_of(head, b));
  for (int64_t start = span.first_key; start < span.last_key; start += kTileKeys) {
    const int keys = span.last_key - start < kTileKeys ? int(span.last_key - start) : kTileKeys;
    const int64_t left = span.last_key - start - kTileKeys, next = left < 0 ? 0 : left < kTileKeys ? left : kTileKeys;
    for (int head = span.first_kv_head; head < last_head; ++head) {
      const bf16 *key[4], *value[kTileKeys];
      for (int j = 0; j < 4; ++j) key[j] = cell(a.key, span, a.block_size, start + (j * 16 < keys ? j * 16 : 0), head);
      for (int j = 0; j < keys; ++j) value[j] = cell(a.value, span, a.block_size, start + j, head);
      for (int64_t j = 0; j < next; ++j)
        for (int c = 0; c < a.dim; c += 32) {
          __builtin_prefetch(cell(a.key, span, a.block_size, start + kTileKeys + j, head) + c, 0, 2);
          __builtin_prefetch(cell(a.value, span, a.block_size, start + kTileKeys + j, head) + c, 0, 2);
        }
      pack_values(value, keys, a.dim, values);
      for (int b = 0; b < blocks; ++b) {
        const WideRows rows = rows_of(head, b);
        vint limit;
        for (int r = 0; r < 16; ++r) {
          const int64_t visible = span.visible - start + int64_t((b * 16 + r) / per_kv) * span.step;
          limit[r] = visible < 0 ? 0 : visible < keys ? int(visible) : keys;
        }
        wide_scores(key, a.key.token_stride, rows.query, a.dim, s);
        wide_softmax(s, keys, limit, a.scale, rows, a.dim, p);
        wide_values(p, values, a.dim, rows.out);
      }
    }
  }
  for (int head = span.first_kv_head; head < last_head; ++head)
    for (int b = 0; b < blocks; ++b) wide_store(a, span, head, b * 16, count, rows_of(head, b));
  _tile_release();
}

}  // namespace RLK_KERNEL_NAMESPACE
