// Tall and thin linear algebra in float64 between the reads, and the rank-1 update of a weight matrix.
#include <cmath>

#include "philox.h"
#include "rank1_load.h"

namespace RLK_KERNEL_NAMESPACE {

constexpr int kDoubles = kVectorBytes / 8;
typedef double vdouble __attribute__((vector_size(kVectorBytes)));
typedef float vthin __attribute__((vector_size(kVectorBytes / 2)));  // as many floats as vdouble has doubles

namespace {

inline __attribute__((always_inline)) vdouble load_double(const double* p) {
  vdouble v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline __attribute__((always_inline)) vdouble load_double(const float* p) {
  vthin v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vdouble);
}

inline double sum_lanes(vdouble v) {
  double total = 0;
  for (int i = 0; i < kDoubles; ++i) total += v[i];
  return total;
}

// out[b] = sum_i x[i] y[b][i] for KB columns of y.
template <int KB, class X, class Y>
inline __attribute__((always_inline)) void dots_of(const X* x, const Y* y, int64_t n, double* out) {
  vdouble sum[KB] = {};
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
    const vdouble xi = load_double(x + i);
#pragma GCC unroll 4
    for (int b = 0; b < KB; ++b) sum[b] += xi * load_double(y + b * n + i);
  }
  for (int b = 0; b < KB; ++b) {
    double rest = 0;
    for (int64_t j = i; j < n; ++j) rest += double(x[j]) * double(y[b * n + j]);
    out[b] = sum_lanes(sum[b]) + rest;
  }
}

template <class X, class Y>
inline void all_dots(const X* x, int ka, const Y* y, int kb, int64_t n, double* out) {
  for (int a = 0; a < ka; ++a) {
    if (kb == kBlock) {
      dots_of<kBlock>(x + a * n, y, n, out + a * kb);
    } else {
      for (int b = 0; b < kb; ++b) dots_of<1>(x + a * n, y + b * n, n, out + a * kb + b);
    }
  }
}

template <Storage T>
inline void store_number(void* row, int64_t j, float value) {
  if constexpr (T == Storage::float32) {
    static_cast<float*>(row)[j] = value;
  } else if constexpr (T == Storage::bfloat16) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    static_cast<uint16_t*>(row)[j] = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    uint32_t half;
    if (bits >= 0x47800000) {  // 65536 and up, infinity, NaN
      half = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (bits < 0x38800000) {  // below the smallest normal number: an addition aligns and rounds
      float f;
      std::memcpy(&f, &bits, 4);
      f += 0.5f;
      std::memcpy(&bits, &f, 4);
      half = bits - 0x3f000000;
    } else {
      half = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    }
    static_cast<uint16_t*>(row)[j] = uint16_t(sign | half);
  }
}

template <Storage T>
inline __attribute__((always_inline)) float load_number(const void* row, int64_t j) {
  if constexpr (T == Storage::float32) return static_cast<const float*>(row)[j];
  const uint32_t x = static_cast<const uint16_t*>(row)[j];
  uint32_t bits;
  float f;
  if constexpr (T == Storage::bfloat16) {
    bits = x << 16;
  } else {
    bits = (x & 0x7fff) << 13;
    std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    std::memcpy(&bits, &f, 4);
    bits |= ((x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u) | ((x & 0x8000) << 16);
  }
  std::memcpy(&f, &bits, 4);
  return f;
}

// Rounds to a neighbour in T, up with the probability that makes it unbiased; `random` has 16 bits.
template <Storage T>
inline __attribute__((always_inline)) float round_at_random(float value, uint32_t random) {
  constexpr int bits = T == Storage::bfloat16 ? 7 : 10, drop = 23 - bits;
  constexpr uint32_t smallest = T == Storage::bfloat16 ? 1 : 127 - 14;
  uint32_t x;
  std::memcpy(&x, &value, 4);
  uint32_t exponent = (x >> 23) & 0xff;
  if (exponent == 0xff) return value;
  exponent = exponent < smallest ? smallest : exponent;
  // spacing of T around value is 2^(exponent - 127 - bits); its inverse and itself, without denormal numbers
  const double unit = std::ldexp(1.0, int(exponent) - 127 - bits);
  const double t = double(float(value / unit)) + double(random >> (16 - drop)) * std::ldexp(1.0, -drop);
  return float(std::floor(t) * unit);
}

template <Storage T>
void add_rows(char* weight, int64_t stride, int64_t n, const float* u, const float* v, int64_t begin, int64_t end,
              bool stochastic, uint64_t seed) {
  for (int64_t i = begin; i < end; ++i) {
    void* row = weight + i * stride * storage_bytes(T);
    if (T != Storage::float32 && stochastic) {
      for (int64_t j = 0; j < n; j += 2) {
        const uint32_t word = philox_word(seed, uint64_t(i), uint64_t(j / 2));
        for (int64_t k = j; k < j + 2 && k < n; ++k) {
          const float value = load_number<T>(row, k) + u[i] * v[k];
          store_number<T>(row, k, round_at_random<T>(value, k == j ? word & 0xffff : word >> 16));
        }
      }
    } else {
      for (int64_t j = 0; j < n; ++j) store_number<T>(row, j, load_number<T>(row, j) + u[i] * v[j]);
    }
  }
}

}  // namespace

void rank1_dots(const float* x, int ka, const float* y, int kb, int64_t n, double* out) {
  all_dots(x, ka, y, kb, n, out);
}

void rank1_dots_mixed(const float* x, int ka, const double* y, int kb, int64_t n, double* out) {
  all_dots(x, ka, y, kb, n, out);
}

void rank1_gram(const double* x, int k, int64_t n, double* out) { all_dots(x, k, x, k, n, out); }

void rank1_project(double* r, int kb, const float* x, int ka, const double* coef, int64_t n) {
  constexpr int64_t stretch = 512;  // stays in the first-level cache for all columns of x
  for (int64_t first = 0; first < n; first += stretch) {
    const int64_t last = first + stretch < n ? first + stretch : n;
    for (int b = 0; b < kb; ++b) {
      for (int a = 0; a < ka; ++a) {
        const double c = coef[a * kb + b];
        for (int64_t i = first; i < last; ++i) r[b * n + i] -= double(x[a * n + i]) * c;
      }
    }
  }
}

void rank1_mix(double* r, int k, const double* t, int64_t n) {
  const auto mix = [&](int64_t i, auto value) __attribute__((always_inline)) {
    decltype(value) mixed[kBlock] = {};
    for (int a = 0; a < k; ++a) {
      std::memcpy(&value, r + a * n + i, sizeof value);
      for (int b = 0; b < k; ++b) mixed[b] += value * t[a * k + b];
    }
    for (int b = 0; b < k; ++b) std::memcpy(r + b * n + i, &mixed[b], sizeof value);
  };
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) mix(i, vdouble{});
  for (; i < n; ++i) mix(i, 0.0);
}

void rank1_combine(const float* x, int ka, const double* coef, int64_t n, double* out) {
  constexpr int64_t stretch = 1024;
  for (int64_t first = 0; first < n; first += stretch) {
    const int64_t last = first + stretch < n ? first + stretch : n;
    for (int64_t i = first; i < last; ++i) out[i] = 0;
    for (int a = 0; a < ka; ++a)
      for (int64_t i = first; i < last; ++i) out[i] += double(x[a * n + i]) * coef[a];
  }
}

void rank1_add(void* weight, Storage type, int64_t stride, int64_t n, const float* u, const float* v, int64_t begin,
               int64_t end, bool stochastic, uint64_t seed) {
  char* w = static_cast<char*>(weight);
  switch (type) {
    case Storage::float32: return add_rows<Storage::float32>(w, stride, n, u, v, begin, end, stochastic, seed);
    case Storage::bfloat16: return add_rows<Storage::bfloat16>(w, stride, n, u, v, begin, end, stochastic, seed);
    case Storage::float16: return add_rows<Storage::float16>(w, stride, n, u, v, begin, end, stochastic, seed);
  }
}

}  // namespace RLK_KERNEL_NAMESPACE
