// attend_span for bfloat16 on the matrix unit of Sapphire Rapids and later (AMX): up to 16 rows (query and head) that
// share a KV head are one tile. Scores are computed transposed, S^T = K Q^T, so that keys are loaded as they lie in
// the cache and the softmax runs along vectors of rows; only values and weights need repacking for P V.
#include <immintrin.h>

#include "attention_tiles.h"
#include "dispatch.h"

namespace RLK_KERNEL_NAMESPACE {

constexpr int kWideRows = 16;  // rows, keys or columns of a tile
RLK_INLINE bool any_lane(vint mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }

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
         a.block_size % 16 == 0 && span.queries * (a.heads / a.kv_heads) * a.dim >= 256 &&
         span.queries * (a.heads / a.kv_heads) > 1 && a.softcap == 0 && span.hidden + span.queries <= 1;
}

// values[g][c][pair][column]: two neighbouring keys side by side, 32 keys and 16 columns to a tile. Of every 32 columns
// the tiles hold those that one unpacking instruction leaves together: 0-3, 8-11, 16-19, 24-27 and the others.
static void pack_values(TileRows<bf16> rows, int keys, int dim, Ahead& ahead, uint32_t* packed) {
  alignas(64) static const bf16 zeros[512] = {};
  for (int j = 0; j < kTileKeys; j += 2) {
    const bf16 *a = j < keys ? rows[j] : zeros, *b = j + 1 < keys ? rows[j + 1] : zeros;
    uint32_t* to = packed + int64_t(j / 32) * dim * 16 + j % 32 / 2 * 16;
    for (int c = 0; c < dim; c += 32, to += 512) {
      const __m512i x = _mm512_loadu_si512(a + c), y = _mm512_loadu_si512(b + c);
      ahead.lines(2);
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x, y));
      _mm512_storeu_si512(to + 256, _mm512_unpackhi_epi16(x, y));
    }
  }
}

// The columns of a row of outputs in their order again.
static void sort_columns(float* row, int dim) {
  const vint low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, high = low + 8;
  for (int c = 0; c < dim; c += 32) {
    const vfloat a = load<vfloat>(row + c), b = load<vfloat>(row + c + 16);
    store(row + c, __builtin_shuffle(a, b, low));
    store(row + c + 16, __builtin_shuffle(a, b, high));
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

// out[row][..] += p[row][key] values[key][..] for 64 columns; the products of one column lie far apart.
static void wide_values_64(const uint32_t* values, int dim, float* out) {
  const uint32_t* const later = values + int64_t(dim) * 16;  // of the keys from 32 on
  _tile_loadd(0, out, dim * 4);
  _tile_loadd(6, values, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(1, out + 16, dim * 4);
  _tile_loadd(7, values + 256, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(2, out + 32, dim * 4);
  _tile_loadd(6, values + 512, 64);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(3, out + 48, dim * 4);
  _tile_loadd(7, values + 768, 64);
  _tile_dpbf16ps(3, 4, 7);
  _tile_loadd(6, later, 64);
  _tile_dpbf16ps(0, 5, 6);
  _tile_loadd(7, later + 256, 64);
  _tile_dpbf16ps(1, 5, 7);
  _tile_loadd(6, later + 512, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, later + 768, 64);
  _tile_dpbf16ps(3, 5, 7);
  _tile_stored(0, out, dim * 4);
  _tile_stored(1, out + 16, dim * 4);
  _tile_stored(2, out + 32, dim * 4);
  _tile_stored(3, out + 48, dim * 4);
}

static void wide_values_32(const uint32_t* values, int dim, float* out) {
  const uint32_t* const later = values + int64_t(dim) * 16;
  _tile_loadd(0, out, dim * 4);
  _tile_loadd(1, out + 16, dim * 4);
  _tile_loadd(6, values, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, values + 256, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(6, later, 64);
  _tile_dpbf16ps(0, 5, 6);
  _tile_loadd(7, later + 256, 64);
  _tile_dpbf16ps(1, 5, 7);
  _tile_stored(0, out, dim * 4);
  _tile_stored(1, out + 16, dim * 4);
}

static void wide_values(const uint32_t* p, const uint32_t* values, int dim, float* out) {
  _tile_loadd(4, p, 64);
  _tile_loadd(5, p + 256, 64);
  int c = 0;
  for (; c + 64 <= dim; c += 64) wide_values_64(values + c * 16, dim, out + c);
  if (c < dim) wide_values_32(values + c * 16, dim, out + c);
}

// 2^x for x <= 8, within 2 units in the last place (Cephes' polynomial); 0 below -126, NaN stays. The weights are rounded
// to bfloat16 later, but their sum is not: its relative error is the error of the log-sum-exp.
RLK_INLINE vfloat power_of_two(vfloat x) {
  const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vfloat shifted = x + magic, r = x - (shifted - magic);
  vfloat p = r * 1.535336188e-4f + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332471e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472029e-1f;
  p = p * r + 1.0f;
  return x < -126.0f ? vfloat{} : (vfloat)((vint)p + ((vint)shifted << 23));
}

// Turns the scores s[key][row] into weights p[2][row][pair of keys], bfloat16; limit: keys that each row sees, if it
// does not see all. Scores count in powers of two. A row's maximum follows only steps of more than kSlack, so that its
// outputs rarely need scaling.
static void wide_softmax(float* s, int keys, const vint* limit, float scale, const WideRows& rows, int dim, Ahead& ahead,
                         uint32_t* p) {
  constexpr float kSlack = 8;
  const vfloat nothing = splat(-kInfinity), before = load<vfloat>(rows.maximum);
  vfloat top = nothing;
  for (int k = 0; k < keys; ++k) {
    vfloat x = load<vfloat>(s + k * 16) * (scale * 1.44269504f);
    if (limit) x = k < *limit ? x : nothing;
    store(s + k * 16, x);
    top = vmax(x, top);
  }
  for (int k = keys; k < kTileKeys; ++k) store(s + k * 16, nothing);
  top = top > before + kSlack || before == nothing ? top : before;
  const vfloat shift = top == nothing ? vfloat{} : top;
  vfloat sum[2] = {};
  for (int half = 0; half < 2; ++half) {
    vfloat pairs[16];
    for (int j = 0; j < 16; ++j) {
      const float* at = s + (half * 32 + 2 * j) * 16;
      const vfloat a = power_of_two(load<vfloat>(at) - shift), b = power_of_two(load<vfloat>(at + 16) - shift);
      sum[0] += a;
      sum[1] += b;
      ahead.lines(4);
      pairs[j] = (vfloat)((((vuint)a + 0x8000u) >> 16) | (((vuint)b + 0x8000u) & 0xFFFF0000u));
    }
    transpose(pairs);
    for (int r = 0; r < 16; ++r) store(p + half * 256 + r * 16, (vuint)pairs[r]);
  }
  const vfloat total = load<vfloat>(rows.sum), gain = sum[0] + sum[1];
  if (!any_lane(top != before)) return store(rows.sum, total + gain);
  const vfloat shrink = before == nothing ? vfloat{} : power_of_two(before - shift);
  store(rows.maximum, top);
  store(rows.sum, total * shrink + gain);
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
  const bf16* from[16];
  const int there = count - first < 16 ? count - first : 16;
  for (int r = 0; r < there; ++r) from[r] = query_row(a, span, head, first + r);
  for (int c = 0; c < a.dim; c += 32) {
    vfloat square[16] = {};
    for (int r = 0; r < there; ++r) std::memcpy(&square[r], from[r] + c, sizeof(vfloat));
    transpose(square);
    for (int pair = 0; pair < 16; ++pair) store(rows.query + (c / 2 + pair) * 16, (vuint)square[pair]);
  }
  std::memset(rows.out, 0, a.dim * 64);
  store(rows.maximum, splat(-kInfinity));
  store(rows.sum, vfloat{});
}

static void wide_store(const Attention& a, const AttentionSpan& span, int head, int first, int count,
                       const WideRows& rows) {
  const int per_kv = a.heads / a.kv_heads;
  for (int r = 0; r < 16 && first + r < count; ++r) {
    const int64_t row = int64_t((first + r) / per_kv) * a.heads + head * per_kv + (first + r) % per_kv;
    const float sum = rows.sum[r], inverse = sum == 0 ? 0.0f : 1 / sum;
    const float lse = sum == 0 ? -kInfinity : rows.maximum[r] * 0.69314718f + __builtin_logf(sum);
    float* const from = rows.out + r * a.dim;
    sort_columns(from, a.dim);
    if (span.part_out) {
      for (int c = 0; c < a.dim; ++c) span.part_out[row * a.dim + c] = from[c] * inverse;
      span.part_lse[row] = lse;
    } else {
      const int64_t at = span.first_query * a.heads + row;
      bf16* to = static_cast<bf16*>(a.out) + at * a.dim;
      for (int c = 0; c < a.dim; c += 16) {
        const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)(load<vfloat>(from + c) * inverse));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + c), half);
      }
      a.lse[at] = lse;
    }
  }
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
  for (TileWalk<bf16> walk(a, span); walk.keys; walk.advance()) {
    const int keys = walk.keys;
    for (int head = span.first_kv_head; head < last_head; ++head) {
      const bf16* key[4];
      for (int j = 0; j < 4; ++j) key[j] = walk.key(head)[j * 16 < keys ? j * 16 : 0];
      pack_values(walk.value(head), keys, a.dim, walk.ahead, values);
      for (int b = 0; b < blocks; ++b) {
        const WideRows rows = rows_of(head, b);
        vint limit;
        bool all = true;
        for (int r = 0; r < 16; ++r) {
          const int64_t visible = span.visible - walk.start + int64_t((b * 16 + r) / per_kv) * span.step;
          limit[r] = visible < 0 ? 0 : visible < keys ? int(visible) : keys;
          all = all && visible >= keys;
        }
        wide_scores(key, a.key.token_stride, rows.query, a.dim, s);
        wide_softmax(s, keys, all ? nullptr : &limit, a.scale, rows, a.dim, walk.ahead, p);
        wide_values(p, values, a.dim, rows.out);
      }
    }
  }
  for (int head = span.first_kv_head; head < last_head; ++head)
    for (int b = 0; b < blocks; ++b) wide_store(a, span, head, b * 16, count, rows_of(head, b));
  _tile_release();
}

}  // namespace RLK_KERNEL_NAMESPACE
