// One read of both matrices gives Y = D Q and Z = D^T Y. Rows are taken in blocks that fit in the second-level
// cache: their products with Q first, then, from the cache, their part of Z, while the next block is prefetched.
#include <cmath>

#include "rank1_load.h"

namespace RLK_KERNEL_NAMESPACE {

constexpr int kGroup = kVectorBytes == 64 ? 4 : 2;  // rows that share a load of Q; as many as registers allow
constexpr int kMaxRows = 16;                        // rows of a block
constexpr int kTile = 32;                           // panels whose part of Q or Z stays in the first-level cache
constexpr int kNear = 512;                          // bytes ahead in a row that are fetched into that cache
constexpr int64_t kBlockBytes = 1 << 18;
constexpr int kPanelFloats = kPanel * kBlock;

static inline bool is_split(const DeltaPair& p) {
  return p.weight_type == Storage::bfloat16 || p.base_type == Storage::bfloat16;
}

// Place within a panel of its column i, in the order of load_two.
static inline int place(int i, bool split) { return split ? (i & 1) * kLanes + i / 2 : i; }

int64_t rank1_panel_floats(int64_t n) { return (n + kPanel - 1) / kPanel * kPanelFloats; }

void rank1_to_panels(const DeltaPair& pair, const float* block, int columns, float scale, float* panels) {
  const bool split = is_split(pair);
  std::memset(panels, 0, size_t(rank1_panel_floats(pair.n)) * sizeof(float));
  for (int c = 0; c < columns; ++c)
    for (int64_t j = 0; j < pair.n; ++j)
      panels[j / kPanel * kPanelFloats + c * kPanel + place(j % kPanel, split)] = block[c * pair.n + j] * scale;
}

void rank1_from_panels(const DeltaPair& pair, const float* panels, int slots, int columns, float scale, float* image) {
  const bool split = is_split(pair);
  const int64_t size = rank1_panel_floats(pair.n);
  for (int64_t first = 0; first < pair.n; first += kPanel) {
    const float* panel = panels + first / kPanel * kPanelFloats;
    const int64_t width = pair.n - first < kPanel ? pair.n - first : kPanel;
    for (int c = 0; c < columns; ++c) {
      float total[kPanel] = {};
      for (int s = 0; s < slots; ++s)
        for (int i = 0; i < kPanel; ++i) total[i] += panel[s * size + c * kPanel + i];
      for (int i = 0; i < width; ++i) image[c * pair.n + first + i] = total[place(i, split)] * scale;
    }
  }
}

namespace {

struct Rows {  // where a block of rows starts, and how far the next one is
  const char* weight;
  const char* base;
  int64_t weight_stride, base_stride;  // bytes
  int64_t weight_ahead, base_ahead;    // bytes to what is prefetched
};

struct Moments {
  vfloat square = {};
  vint changed = {};
};

struct Columns {  // kPanel numbers of each column of the block
  vfloat a[kBlock], b[kBlock];
};

inline __attribute__((always_inline)) Columns load_columns(const float* panel) {
  Columns out;
#pragma GCC unroll 4
  for (int c = 0; c < kBlock; ++c) {
    out.a[c] = load<vfloat>(panel + c * kPanel);
    out.b[c] = load<vfloat>(panel + c * kPanel + kLanes);
  }
  return out;
}

// A panel of one row of the delta. Fetches ahead in the row, and the same stretch of one matrix of the next block:
// the weight while Y is computed, the base while Z is.
template <Storage W, Storage B, bool weight_next>
inline __attribute__((always_inline)) Two next_delta(const Rows& rows, const char* w, const char* b, int row) {
  w += row * rows.weight_stride;
  b += row * rows.base_stride;
  constexpr int bytes = kPanel * storage_bytes(weight_next ? W : B);
  const char* next = weight_next ? w + rows.weight_ahead : b + rows.base_ahead;
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(next + line, 0, 2);
  __builtin_prefetch(w + kNear);
  __builtin_prefetch(b + kNear);
  return load_delta<W, B>(w, b);
}

// acc[row][c] += D[row] Q_c over `count` panels, for G rows.
template <Storage W, Storage B, int G, bool stats>
__attribute__((noinline)) void times_block(const Rows& rows, const float* q, int64_t count, vfloat (*acc)[kBlock],
                                           Moments& total) {
  vfloat sum[G][kBlock];
  Moments moments;
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < kBlock; ++c) sum[g][c] = acc[g][c];
  const char *w = rows.weight, *b = rows.base;
  for (int64_t p = 0; p < count; ++p, w += kPanel * storage_bytes(W), b += kPanel * storage_bytes(B)) {
    const Columns columns = load_columns(q + p * kPanelFloats);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Two d = next_delta<W, B, true>(rows, w, b, g);
      if constexpr (stats) {
        moments.square += d.a * d.a + d.b * d.b;
        moments.changed -= (vint)(d.a != 0) + (vint)(d.b != 0);
      }
#pragma GCC unroll 4
      for (int c = 0; c < kBlock; ++c) {
        sum[g][c] += d.a * columns.a[c];
        sum[g][c] += d.b * columns.b[c];
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < kBlock; ++c) acc[g][c] = sum[g][c];
  if constexpr (stats) total = moments;
}

// z += D[rows]^T y over `count` panels, for G rows.
template <Storage W, Storage B, int G>
__attribute__((noinline)) void transpose_block(const Rows& rows, const float (*y)[kBlock], int64_t count, float* z) {
  const char *w = rows.weight, *b = rows.base;
  vfloat yv[G][kBlock];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < kBlock; ++c) yv[g][c] = vfloat{} + y[g][c];
  for (int64_t p = 0; p < count; ++p, w += kPanel * storage_bytes(W), b += kPanel * storage_bytes(B)) {
    float* panel = z + p * kPanelFloats;
    Columns sum = load_columns(panel);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Two d = next_delta<W, B, false>(rows, w, b, g);
#pragma GCC unroll 4
      for (int c = 0; c < kBlock; ++c) sum.a[c] += d.a * yv[g][c], sum.b[c] += d.b * yv[g][c];
    }
#pragma GCC unroll 4
    for (int c = 0; c < kBlock; ++c) store(panel + c * kPanel, sum.a[c]), store(panel + c * kPanel + kLanes, sum.b[c]);
  }
}

template <Storage W, Storage B>
inline __attribute__((always_inline)) void add_transpose(const Rows& rows, int height, const float (*y)[kBlock],
                                                         int64_t count, float* z) {
  for (int64_t tile = 0; tile < count; tile += kTile) {
    Rows part = rows;
    part.weight += tile * kPanel * storage_bytes(W);
    part.base += tile * kPanel * storage_bytes(B);
    const int64_t panels = count - tile < kTile ? count - tile : kTile;
    for (int r = 0; r < height;) {
      const int step = height - r >= kGroup ? kGroup : 1;
      if (step == kGroup) transpose_block<W, B, kGroup>(part, y + r, panels, z + tile * kPanelFloats);
      else transpose_block<W, B, 1>(part, y + r, panels, z + tile * kPanelFloats);
      r += step;
      part.weight += step * rows.weight_stride;
      part.base += step * rows.base_stride;
    }
  }
}

template <Storage W, Storage B, bool stats>
inline __attribute__((always_inline)) void times_rows(Rows rows, int height, const float* q, int64_t count,
                                                      vfloat (*acc)[kBlock], DeltaStats* out) {
  for (int r = 0; r < height;) {
    Moments moments;
    const int step = height - r >= kGroup ? kGroup : 1;
    if (step == kGroup) times_block<W, B, kGroup, stats>(rows, q, count, acc + r, moments);
    else times_block<W, B, 1, stats>(rows, q, count, acc + r, moments);
    if constexpr (stats) {
      for (int i = 0; i < kLanes; ++i) out->square += moments.square[i], out->changed += moments.changed[i];
    }
    r += step;
    rows.weight += step * rows.weight_stride;
    rows.base += step * rows.base_stride;
  }
}

// Copies the last, incomplete panel of every row to padded buffers and returns their rows.
template <Storage W, Storage B>
inline Rows padded_tail(const Rows& rows, int height, int64_t panels, int tail, char* weight, char* base) {
  constexpr int wide = kPanel * storage_bytes(W), base_wide = kPanel * storage_bytes(B);
  for (int r = 0; r < height; ++r) {
    std::memcpy(weight + r * wide, rows.weight + r * rows.weight_stride + panels * wide, tail * storage_bytes(W));
    std::memcpy(base + r * base_wide, rows.base + r * rows.base_stride + panels * base_wide, tail * storage_bytes(B));
  }
  return {weight, base, wide, base_wide, 0, 0};
}

template <Storage W, Storage B, bool stats>
void read_rows(const DeltaPair& pair, const float* q, int columns, int64_t begin, int64_t end, float* y, float* z,
               DeltaStats* out) {
  const int64_t panels = pair.n / kPanel;
  const int tail = int(pair.n % kPanel);
  const int64_t row_bytes = pair.n * (storage_bytes(W) + storage_bytes(B));
  const int64_t fit = kBlockBytes / row_bytes / kGroup * kGroup;
  const int block = int(fit < kGroup ? kGroup : fit > kMaxRows ? kMaxRows : fit);
  char tail_weight[kMaxRows * kPanel * 4] = {}, tail_base[kMaxRows * kPanel * 4] = {};
  Rows rows = {nullptr, nullptr, pair.weight_stride * storage_bytes(W), pair.base_stride * storage_bytes(B), 0, 0};
  for (int64_t first = begin; first < end; first += block) {
    const int height = int(end - first < block ? end - first : block);
    rows.weight = static_cast<const char*>(pair.weight) + first * rows.weight_stride;
    rows.base = static_cast<const char*>(pair.base) + first * rows.base_stride;
    const bool more = first + height + block <= pair.m;  // the next slot is likely this thread's too
    rows.weight_ahead = more ? height * rows.weight_stride : 0;
    rows.base_ahead = more ? height * rows.base_stride : 0;
    vfloat acc[kMaxRows][kBlock] = {};
    for (int64_t tile = 0; tile < panels; tile += kTile) {
      Rows part = rows;
      part.weight += tile * kPanel * storage_bytes(W);
      part.base += tile * kPanel * storage_bytes(B);
      const int64_t count = panels - tile < kTile ? panels - tile : kTile;
      times_rows<W, B, stats>(part, height, q + tile * kPanelFloats, count, acc, out);
    }
    Rows last = rows;
    if (tail) {
      last = padded_tail<W, B>(rows, height, panels, tail, tail_weight, tail_base);
      times_rows<W, B, stats>(last, height, q + panels * kPanelFloats, 1, acc, out);
    }
    float image[kMaxRows][kBlock];
    for (int r = 0; r < height; ++r)
      for (int c = 0; c < kBlock; ++c) image[r][c] = sum_lanes(acc[r][c]);
    for (int c = 0; c < columns; ++c)
      for (int r = 0; r < height; ++r) y[c * pair.m + first + r] = image[r][c];
    if (!z) continue;
    add_transpose<W, B>(rows, height, image, panels, z);
    if (tail) add_transpose<W, B>(last, height, image, 1, z + panels * kPanelFloats);
  }
}

template <Storage T>
inline double scalar(const void* data, int64_t i) {
  if constexpr (T == Storage::float32) return static_cast<const float*>(data)[i];
  const uint16_t x = static_cast<const uint16_t*>(data)[i];
  if constexpr (T == Storage::bfloat16) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  uint16_t lanes[kLanes] = {x};
  return load_half(lanes)[0];
}

}  // namespace

void rank1_read(const DeltaPair& pair, const float* q, int columns, int64_t begin, int64_t end, float* y, float* z,
                DeltaStats* stats) {
  std::memset(z, 0, size_t(rank1_panel_floats(pair.n)) * sizeof(float));
  with_types(pair, [&]<Storage W, Storage B>() {
    if (stats) read_rows<W, B, true>(pair, q, columns, begin, end, y, z, stats);
    else read_rows<W, B, false>(pair, q, columns, begin, end, y, z, nullptr);
  });
}

void rank1_matvec(const DeltaPair& pair, const float* v, int64_t begin, int64_t end, float* out) {
  with_types(pair, [&]<Storage W, Storage B>() {
    read_rows<W, B, false>(pair, v, 1, begin, end, out, nullptr, nullptr);
  });
}

double rank1_largest(const DeltaPair& pair, double* square) {
  double largest = 0, sum = 0;
  with_types(pair, [&]<Storage W, Storage B>() {
    for (int64_t i = 0; i < pair.m; ++i) {
      for (int64_t j = 0; j < pair.n; ++j) {
        const double w = scalar<W>(pair.weight, i * pair.weight_stride + j);
        const double d = w - scalar<B>(pair.base, i * pair.base_stride + j);
        sum += d * d;
        if (!(std::fabs(d) <= largest)) largest = std::fabs(d);
        if (d != d) return;
      }
    }
  });
  *square = sum;
  return largest;
}

}  // namespace RLK_KERNEL_NAMESPACE
