// Stands in for the header of this name where a test compiles csrc/cpu for AVX-512 and AMX on a machine with neither:
// the few instructions that the code calls by name, as Intel's manual describes them. Compilers split the vectors.
#pragma once
#include <cstdint>
#include <cstring>

typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef uint16_t words __attribute__((vector_size(64)));
typedef uint16_t half_words __attribute__((vector_size(32)));
typedef uint32_t lanes __attribute__((vector_size(64)));
typedef _Float16 halves __attribute__((vector_size(32)));
constexpr int _MM_FROUND_TO_NEAREST_INT = 0;

inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline __m256i _mm256_loadu_si256(const __m256i* p) {
  __m256i v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void _mm256_storeu_si256(__m256i* p, __m256i v) { std::memcpy(p, &v, sizeof v); }
inline uint16_t _mm512_movepi32_mask(__m512i v) {
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint16_t(((lanes)v)[i] >> 31 << i);
  return mask;
}

inline words unpack(__m512i a, __m512i b, int from) {  // within each 128 bits
  words out;
  for (int i = 0; i < 32; i += 8)
    for (int j = 0; j < 4; ++j) {
      out[i + 2 * j] = ((words)a)[i + from + j];
      out[i + 2 * j + 1] = ((words)b)[i + from + j];
    }
  return out;
}
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return (__m512i)unpack(a, b, 0); }
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return (__m512i)unpack(a, b, 4); }

inline __m512i _mm512_maskz_cvtepu16_epi32(uint16_t, __m256i v) {
  return (__m512i)__builtin_convertvector((half_words)v, lanes);
}
inline __m256i _mm512_maskz_cvtepi32_epi16(uint16_t, __m512i v) {
  return (__m256i)__builtin_convertvector((lanes)v, half_words);
}
inline __m512 _mm512_maskz_cvtph_ps(uint16_t, __m256i v) { return __builtin_convertvector((halves)v, __m512); }
inline __m256i _mm512_maskz_cvtps_ph(uint16_t, __m512 v, int) { return (__m256i)__builtin_convertvector(v, halves); }
inline __m256i _mm512_cvtneps_pbh(__m512 v) {  // to nearest, ties to even
  const lanes bits = (lanes)v, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (__m256i)__builtin_convertvector(v == v ? rounded : (bits >> 16 | 0x40), half_words);
}

struct Tile {
  uint32_t row[16][16];
};
inline Tile tiles[8];

inline float low_half(uint32_t pair) {
  pair <<= 16;
  float f;
  std::memcpy(&f, &pair, sizeof f);
  return f;
}
inline float high_half(uint32_t pair) { return low_half(pair >> 16); }

inline void _tile_loadconfig(const void*) {}
inline void _tile_release() {}
inline void _tile_zero(int t) { tiles[t] = {}; }
inline void _tile_loadd(int t, const void* from, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(tiles[t].row[r], static_cast<const char*>(from) + r * stride, 64);
}
inline void _tile_stored(int t, void* to, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].row[r], 64);
}
inline void _tile_dpbf16ps(int to, int a, int b) {  // even and odd elements of a row are added up apart
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < 16; ++k) {
        even += low_half(tiles[a].row[m][k]) * low_half(tiles[b].row[k][n]);
        odd += high_half(tiles[a].row[m][k]) * high_half(tiles[b].row[k][n]);
      }
      std::memcpy(&sum, &tiles[to].row[m][n], sizeof sum);
      sum += even + odd;
      std::memcpy(&tiles[to].row[m][n], &sum, sizeof sum);
    }
}
