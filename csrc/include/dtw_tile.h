// The dynamic time warping recurrence of one trajectory x against a tile of trajectories y, one y per SIMD lane.
//
// A tile is kGroups registers wide. Cells are visited in blocks of R rows, column by column: the R x kGroups cells of
// a column live in registers, and only the last row of a block goes through memory (`row`). So a cell costs sub, min,
// min, fma and a share of 2 / R loads and 1 / R stores, and R x kGroups independent chains of min + fma (8 cycles)
// hide each other's latency. Out-of-band cells are infinite; a lane's own result stands in `row` at its length - 1.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <limits>

#include "dtw.h"
#include "simd.h"

namespace rlk::RLK_ISA {

#define RLK_INLINE static inline __attribute__((always_inline))
#define RLK_UNROLL _Pragma("GCC unroll 8")

constexpr int kGroups = 2;
constexpr int kTileLanes = kGroups * kLanes;
#if defined(__AVX512F__)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;  // 16 registers
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One instruction. Drops NaN in the first argument, which is why packing leaves none.
RLK_INLINE vfloat minimum(vfloat a, vfloat b) { return a < b ? a : b; }
// a * b + c. The compiler may fuse a product or not, by the code around it: the cost of a pair would depend on its
// neighbours in the tile.
RLK_INLINE vfloat fused(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
RLK_INLINE vfloat splat(float value) { return vfloat{} + value; }

// Squared distances of R rows of x from one column of y, without the last feature: that one is fused into the
// recurrence. Returns zeros when there is one feature only.
template <int R>
RLK_INLINE void partial_cost(const float* x, const float* y, int64_t dims, vfloat (&cost)[R][kGroups]) {
  RLK_UNROLL for (int r = 0; r < R; ++r) RLK_UNROLL for (int g = 0; g < kGroups; ++g) cost[r][g] = vfloat{};
  for (int64_t d = 0; d + 1 < dims; ++d) {
    RLK_UNROLL for (int g = 0; g < kGroups; ++g) {
      const vfloat value = load<vfloat>(y + d * kTileLanes + g * kLanes);
      RLK_UNROLL for (int r = 0; r < R; ++r) {
        const vfloat difference = value - x[r * dims + d];
        cost[r][g] = fused(difference, difference, cost[r][g]);
      }
    }
  }
}

struct Band {
  int64_t widest, narrowest;  // radius over the lanes of the tile
  vint radius[kGroups];
};

// One column of a block of R rows whose first row is i.
template <int R, bool kOneFeature>
struct Block {
  const float* x;
  int64_t dims, i;
  vfloat left[R][kGroups], corner[kGroups];

  RLK_INLINE void start(Block& b, const float* x, int64_t dims, int64_t i, int64_t column, const float* row) {
    b.x = x, b.dims = dims, b.i = i;
    RLK_UNROLL for (int g = 0; g < kGroups; ++g) {
      b.corner[g] = column > 0 ? load<vfloat>(row + (column - 1) * kTileLanes + g * kLanes)
                               : splat(i == 0 ? 0.0f : kInfinity);
      RLK_UNROLL for (int r = 0; r < R; ++r) b.left[r][g] = splat(kInfinity);
    }
  }

  // kEdge: some cell of the column may lie outside of some lane's band.
  template <bool kEdge>
  RLK_INLINE void column(Block& b, int64_t j, const float* tile, float* row, const Band& band) {
    const float* y = tile + j * b.dims * kTileLanes;
    float* out = row + j * kTileLanes;
    vfloat cost[R][kGroups];
    if constexpr (!kOneFeature) partial_cost<R>(b.x, y, b.dims, cost);
    const int64_t last = kOneFeature ? 0 : b.dims - 1;
    vfloat above[kGroups], corner[kGroups], value[kGroups];
    RLK_UNROLL for (int g = 0; g < kGroups; ++g) {
      above[g] = load<vfloat>(out + g * kLanes);
      value[g] = load<vfloat>(y + last * kTileLanes + g * kLanes);
      corner[g] = b.corner[g], b.corner[g] = above[g];
    }
    RLK_UNROLL for (int r = 0; r < R; ++r) {
      const int64_t gap = b.i + r - j;
      if (kEdge && gap > band.widest) return;  // this row starts further right, and so do those below
      const bool ended = kEdge && -gap > band.widest;
      const float xr = b.x[kOneFeature ? r : r * b.dims + last];
      RLK_UNROLL for (int g = 0; g < kGroups; ++g) {
        if (ended) {
          above[g] = splat(kInfinity), corner[g] = b.left[r][g];
          continue;
        }
        const vfloat difference = value[g] - xr;
        vfloat best = minimum(minimum(corner[g], above[g]), b.left[r][g]);
        if constexpr (!kOneFeature) best += cost[r][g];
        vfloat cell = fused(difference, difference, best);
        if (kEdge && band.narrowest != band.widest)
          cell = band.radius[g] >= int32_t(gap < 0 ? -gap : gap) ? cell : splat(kInfinity);
        corner[g] = b.left[r][g], above[g] = b.left[r][g] = cell;
      }
    }
    RLK_UNROLL for (int g = 0; g < kGroups; ++g) store(out + g * kLanes, above[g]);
  }
};

template <int R, bool kOneFeature>
RLK_INLINE void row_block(const float* x, int64_t i, const DtwTile& tile, const Band& band, float* row) {
  const int64_t first = i > band.widest ? i - band.widest : 0;
  const auto clip = [&](int64_t j) { return j < tile.columns ? j : tile.columns; };
  const int64_t inside = clip(i + R - 1 - band.narrowest), outside = clip(i + band.narrowest + 1);
  const int64_t end = clip(i + R + band.widest);
  using B = Block<R, kOneFeature>;
  B b;
  B::start(b, x, tile.dims, i, first, row);
  int64_t j = first;
  for (; j < inside; ++j) B::template column<true>(b, j, tile.values, row, band);
  for (; j < outside; ++j) B::template column<false>(b, j, tile.values, row, band);
  for (; j < end; ++j) B::template column<true>(b, j, tile.values, row, band);
}

template <bool kOneFeature>
RLK_INLINE void all_rows(const DtwRows& x, const DtwTile& tile, const Band& band, float* row) {
  const float* values = x.values;
  int64_t i = x.begin;
  for (; i + kRows <= x.end; i += kRows) row_block<kRows, kOneFeature>(values + i * tile.dims, i, tile, band, row);
  for (; i + 2 <= x.end; i += 2) row_block<2, kOneFeature>(values + i * tile.dims, i, tile, band, row);
  for (; i < x.end; ++i) row_block<1, kOneFeature>(values + i * tile.dims, i, tile, band, row);
}

}  // namespace rlk::RLK_ISA
