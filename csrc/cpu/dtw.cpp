// Dynamic time warping on tiles of lanes; see dtw_tile.h. Declared in csrc/ops/dtw_kernels.h.
#include "dtw_tile.h"

#include "dispatch.h"

namespace RLK_KERNEL_NAMESPACE {

namespace {

#if defined(__AVX512F__)
RLK_INLINE vfloat zip_low(vfloat a, vfloat b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
RLK_INLINE vfloat zip_high(vfloat a, vfloat b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(__AVX2__)
RLK_INLINE vfloat zip_low(vfloat a, vfloat b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
RLK_INLINE vfloat zip_high(vfloat a, vfloat b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
RLK_INLINE vfloat zip_low(vfloat a, vfloat b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
RLK_INLINE vfloat zip_high(vfloat a, vfloat b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

// Transposes kLanes x kLanes values: log2(kLanes) perfect shuffles of the rows.
RLK_INLINE void transpose(vfloat (&v)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    vfloat next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip_low(v[i], v[i + kLanes / 2]);
      next[2 * i + 1] = zip_high(v[i], v[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) v[i] = next[i];
  }
}

}  // namespace

int dtw_tile_lanes() { return kTileLanes; }

// True when a value among `count` is NaN or infinite.
bool dtw_not_finite(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest >= 0x7f800000u;
}

// Packs trajectory index[lane] of y [*, stride] into each lane: tile [positions, lanes], positions = columns * dims.
// The first counts[lane] values of a lane are copied, the rest is 0.
void dtw_pack(const float* y, int64_t stride, const int64_t* index, const int64_t* counts, int64_t positions,
              float* tile) {
  for (int first = 0; first < kTileLanes; first += kLanes) {
    for (int64_t p = 0; p < positions; p += kLanes) {
      vfloat v[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t left = counts[first + lane] - p;
        const float* from = y + index[first + lane] * stride + p;
        if (left >= kLanes) {
          v[lane] = load<vfloat>(from);
        } else {
          float part[kLanes] = {};
          if (left > 0) std::memcpy(part, from, size_t(left) * sizeof(float));
          v[lane] = load<vfloat>(part);
        }
      }
      transpose(v);
      const int64_t rows = positions - p < kLanes ? positions - p : kLanes;
      for (int64_t i = 0; i < rows; ++i) store(tile + (p + i) * kTileLanes + first, v[i]);
    }
  }
}

// Cost [lanes] of x against each lane of the tile whose length is not 0; the other lanes are left alone.
// row: [columns, lanes], the last row that is done.
void dtw_tile(const DtwRows& x, const DtwTile& tile, int64_t radius, float* row, float* cost) {
  Band band{0, kNoBand, {}};
  for (int lane = 0; lane < kTileLanes; ++lane) {
    // widened to the difference of the lengths; lanes without a trajectory are as wide as any
    if (tile.lengths[lane] == 0) continue;
    const int64_t difference = x.length - tile.lengths[lane], least = difference < 0 ? -difference : difference;
    const int64_t own = radius > least ? radius : least;
    band.widest = own > band.widest ? own : band.widest;
    band.narrowest = own < band.narrowest ? own : band.narrowest;
    band.radius[lane / kLanes][lane % kLanes] = int32_t(own < INT32_MAX ? own : INT32_MAX);
  }
  for (int64_t i = 0; x.begin == 0 && i < tile.columns * kTileLanes; i += kLanes) store(row + i, splat(kInfinity));
  tile.dims == 1 ? all_rows<true>(x, tile, band, row) : all_rows<false>(x, tile, band, row);
  for (int lane = 0; x.end == x.length && lane < kTileLanes; ++lane)
    if (tile.lengths[lane]) cost[lane] = row[(tile.lengths[lane] - 1) * kTileLanes + lane];
}

}  // namespace RLK_KERNEL_NAMESPACE
