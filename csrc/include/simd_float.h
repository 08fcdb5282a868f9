// Float arithmetic on the vectors of simd.h: 16-bit formats, exp, horizontal sums, transposition.
// For use in csrc/cpu only.
#pragma once
#include "simd.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define RLK_INLINE_MEMBER inline __attribute__((always_inline))
#define RLK_INLINE static RLK_INLINE_MEMBER

namespace rlk::RLK_ISA {

struct bf16 {
  uint16_t bits;
};
typedef _Float16 f16;
typedef uint16_t vushort __attribute__((vector_size(kVectorBytes / 2)));
typedef f16 vhalf __attribute__((vector_size(kVectorBytes / 2)));

RLK_INLINE vfloat splat(float x) { return x - vfloat{}; }

RLK_INLINE vfloat load_float(const float* p) { return load<vfloat>(p); }

RLK_INLINE vfloat load_float(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 makes two halves of the general form
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vfloat)((vuint)_mm512_maskz_cvtepu16_epi32(0xFFFF, half) << 16);
#endif
  vushort v;
  std::memcpy(&v, p, sizeof v);
  return (vfloat)(__builtin_convertvector(v, vuint) << 16);
}

RLK_INLINE vfloat load_float(const f16* p) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vhalf v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vfloat);
#endif
}

RLK_INLINE float to_float(float x) { return x; }
RLK_INLINE float to_float(f16 x) { return float(x); }
RLK_INLINE float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

RLK_INLINE void from_float(float* p, float x) { *p = x; }
RLK_INLINE void from_float(f16* p, float x) { *p = f16(x); }
RLK_INLINE void from_float(bf16* p, float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  p->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// kLanes numbers, rounded as from_float does.
RLK_INLINE void store_float(float* p, vfloat x) { store(p, x); }

RLK_INLINE void store_float(bf16* p, vfloat x) {
  const vuint bits = (vuint)x, odd = (bits >> 16) & 1, rounded = (bits + 0x7FFF + odd) >> 16;
  const vuint kept = x == x ? rounded : vuint{} + 0x7FC0;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)kept));
#else
  const vushort half = __builtin_convertvector(kept, vushort);
  std::memcpy(p, &half, sizeof half);
#endif
}

RLK_INLINE void store_float(f16* p, vfloat x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xFFFF, (__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const vhalf half = __builtin_convertvector(x, vhalf);
  std::memcpy(p, &half, sizeof half);
#endif
}

// Lanes 0 .. kLanes - 1.
RLK_INLINE vint lane_numbers() {
  vint v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// One stage of a transposition: of the 2 x 2 matrices of stretches of `width` lanes in (a, b), first and second row.
template <int width>
RLK_INLINE void exchange(vfloat& a, vfloat& b) {
  const vint lane = lane_numbers(), odd = (lane & width) != 0;
  const vint first = odd ? lane - width + kLanes : lane, second = odd ? lane + kLanes : lane + width;
  const vfloat low = __builtin_shuffle(a, b, first), high = __builtin_shuffle(a, b, second);
  a = low;
  b = high;
}

template <int width>
RLK_INLINE void transpose_stage(vfloat* rows) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & width)) exchange<width>(rows[i], rows[i + width]);
}

// kLanes x kLanes, in place.
RLK_INLINE void transpose(vfloat* rows) {
  transpose_stage<1>(rows);
  transpose_stage<2>(rows);
  if constexpr (kLanes > 4) transpose_stage<4>(rows);
  if constexpr (kLanes > 8) transpose_stage<8>(rows);
}

// Stages `from` to `to` (exclusive) of the sums of rows: rows[i] takes up rows[i + width].
template <int width, int to, int rows_left>
RLK_INLINE void sum_stages(vfloat* rows) {
  if constexpr (width < to) {
    for (int i = 0; i < rows_left; i += 2) {
      exchange<width>(rows[i], rows[i + 1]);
      rows[i / 2] = rows[i] + rows[i + 1];
    }
    sum_stages<2 * width, to, rows_left / 2>(rows);
  }
}

// Sums of the lanes of several rows in two steps, kRows rows at a time: lane i of
// sum_across<kRows>({sum_within<kRows>(rows 0 ..), sum_within<kRows>(rows kRows ..), ..}) is that of row i.
template <int kRows>
RLK_INLINE vfloat sum_within(vfloat* rows) {
  sum_stages<1, kRows, kRows>(rows);
  return rows[0];
}
template <int kRows>
RLK_INLINE vfloat sum_across(vfloat* parts) {
  sum_stages<kRows, kLanes, kLanes / kRows>(parts);
  return parts[0];
}

template <class Op>
RLK_INLINE float reduce(vfloat v, Op op) {
  for (int width = kLanes / 2; width; width /= 2) v = op(v, __builtin_shuffle(v, lane_numbers() ^ width));
  return v[0];
}

RLK_INLINE vfloat vmax(vfloat a, vfloat b) { return a > b ? a : b; }
RLK_INLINE float max_lane(vfloat v) { return reduce(v, [](vfloat a, vfloat b) { return vmax(a, b); }); }
RLK_INLINE float sum_lanes(vfloat v) { return reduce(v, [](vfloat a, vfloat b) { return a + b; }); }

// exp(x) for x <= 88, within 2 units in the last place (Cephes' polynomial); 0 below -87.3, NaN stays.
RLK_INLINE vfloat vexp(vfloat x) {
  // 1.5 * 2^23: adding it rounds to an integer; and the bias of exponents, so that its low bits are those of 2^n
  const vfloat magic = splat(12582912.0f + 127);
  const vfloat shifted = x * 1.44269504f + magic, n = shifted - magic;
  const vfloat r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vfloat power = (vfloat)((vint)shifted << 23);  // multiplied: adding to exponents would make numbers of some NaNs
  return x < -87.3f ? vfloat{} : p * power;
}

// tanh(x) within 2 units in the last place (Cephes); NaN stays.
RLK_INLINE vfloat vtanh(vfloat x) {
  const vfloat size = x < 0.0f ? -x : x, a = size > 10.0f ? splat(10.0f) : size, z = a * a;
  vfloat p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vfloat far = 1.0f - 2.0f / (vexp(a + a) + 1.0f), y = a < 0.625f ? p * z * a + a : far;
  return x < 0.0f ? -y : y;
}

// log(x) for 1 <= x <= 2, within 1e-7 (Cephes' polynomial); NaN stays.
RLK_INLINE vfloat vlog_of_1_to_2(vfloat x) {
  const vint high = x > 1.41421356f;
  const vfloat z = (high ? x * 0.5f : x) - 1.0f, z2 = z * z;
  vfloat p = z * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * z + 1.1676998740e-1f;
  p = p * z - 1.2420140846e-1f;
  p = p * z + 1.4249322787e-1f;
  p = p * z - 1.6668057665e-1f;
  p = p * z + 2.0000714765e-1f;
  p = p * z - 2.4999993993e-1f;
  p = p * z + 3.3333331174e-1f;
  const vfloat log = p * z * z2 - z2 * 0.5f + z;
  return high ? log + 0.69314718f : log;
}

}  // namespace rlk::RLK_ISA
