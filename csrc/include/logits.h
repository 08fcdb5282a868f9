// Reading rows of logits of any supported dtype as float32 vectors. For use in csrc/cpu only.
#pragma once
#include "simd.h"

namespace rlk::RLK_ISA {

typedef uint16_t vushort __attribute__((vector_size(kVectorBytes / 2)));  // kLanes bfloat16

constexpr float kInfinity = __builtin_inff();

static inline __attribute__((always_inline)) vfloat load_logits(const float* p) { return load<vfloat>(p); }

static inline __attribute__((always_inline)) vfloat load_logits(const uint16_t* p) {
  vushort raw;
  __builtin_memcpy(&raw, p, sizeof raw);
  return (vfloat)(__builtin_convertvector(raw, vuint) << 16);
}

static inline __attribute__((always_inline)) float load_logit(const float* p) { return *p; }

static inline __attribute__((always_inline)) float load_logit(const uint16_t* p) {
  const uint32_t bits = uint32_t(*p) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// The last, incomplete vector of a row of n, filled up with -inf.
template <class T>
static inline vfloat load_tail(const T* p, int64_t n) {
  float padded[kLanes];
  for (int i = 0; i < kLanes; ++i) padded[i] = i < n ? load_logit(p + i) : -kInfinity;
  return load<vfloat>(padded);
}

}  // namespace rlk::RLK_ISA
