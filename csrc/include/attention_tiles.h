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
[[maybe_unused]] static void pack_keys(const bf16* const* rows, const bf16* const* next, int keys, int dim, float* kt) {
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

}  // namespace rlk::RLK_ISA
