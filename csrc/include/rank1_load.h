// Loading stretches of a delta as float32 vectors, for any pair of storage types. For use in csrc/cpu only.
#pragma once
#include <cstdint>
#include <cstring>

#include "rank1.h"
#include "simd.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace rlk::RLK_ISA {

constexpr int kPanel = 2 * kLanes;  // columns that are loaded together

struct Two {
  vfloat a, b;
};

typedef uint16_t vshort __attribute__((vector_size(kVectorBytes / 2)));

// kLanes float16 numbers as float32.
static inline __attribute__((always_inline)) vfloat load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vshort h;
  std::memcpy(&h, p, sizeof h);
  const vuint x = __builtin_convertvector(h, vuint);
  const vfloat finite = (vfloat)((x & 0x7fff) << 13) * 0x1p112f;  // also right for denormal numbers
  const vuint special = (vuint)((x & 0x7c00) == 0x7c00) & 0x7f800000;
  return (vfloat)((vuint)finite | special | ((x & 0x8000) << 16));
#endif
}

// kPanel numbers at p. Bfloat16 comes out as even and odd places, by one shift and one mask; where one of the
// matrices is bfloat16 the other follows that order (`split`).
template <Storage T, bool split>
static inline __attribute__((always_inline)) Two load_two(const char* p) {
  if constexpr (T == Storage::bfloat16) {
    vuint x = load<vuint>(reinterpret_cast<const uint32_t*>(p));
#ifdef __AVX512F__
    __asm__("" : "+v"(x));  // one load: the compiler would fold it into the shift and into the mask
#endif
    return {(vfloat)(x << 16), (vfloat)(x & 0xffff0000u)};
  } else {
    Two t;
    if constexpr (T == Storage::float32) {
      t = {load<vfloat>(reinterpret_cast<const float*>(p)), load<vfloat>(reinterpret_cast<const float*>(p) + kLanes)};
    } else {
      const auto* h = reinterpret_cast<const uint16_t*>(p);
      t = {load_half(h), load_half(h + kLanes)};
    }
    if constexpr (split) {
      vint even, odd;
      for (int i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
      t = {__builtin_shuffle(t.a, t.b, even), __builtin_shuffle(t.a, t.b, odd)};
    }
    return t;
  }
}

template <Storage W, Storage B>
static inline __attribute__((always_inline)) Two load_delta(const char* weight, const char* base) {
  constexpr bool split = W == Storage::bfloat16 || B == Storage::bfloat16;
  const Two w = load_two<W, split>(weight), b = load_two<B, split>(base);
  return {w.a - b.a, w.b - b.b};
}

// Calls f.template operator()<W, B>() for the storage types of the pair.
template <class F>
static inline __attribute__((always_inline)) void with_types(const DeltaPair& p, F f) {
  using S = Storage;
  const auto by_base = [&]<S W>() __attribute__((always_inline)) {
    switch (p.base_type) {
      case S::float32: return f.template operator()<W, S::float32>();
      case S::bfloat16: return f.template operator()<W, S::bfloat16>();
      case S::float16: return f.template operator()<W, S::float16>();
    }
  };
  switch (p.weight_type) {
    case S::float32: return by_base.template operator()<S::float32>();
    case S::bfloat16: return by_base.template operator()<S::bfloat16>();
    case S::float16: return by_base.template operator()<S::float16>();
  }
}

static inline float sum_lanes(vfloat v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

}  // namespace rlk::RLK_ISA
