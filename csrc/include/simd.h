// Vectors of the widest width that the instruction set of this translation unit has, as compiler vector types:
// one source for AVX-512, AVX2 and anything else. For use in csrc/cpu only.
#pragma once
#include <cstdint>
#include <cstring>

namespace rlk::RLK_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;  // 32-bit lanes

typedef float vfloat __attribute__((vector_size(kVectorBytes)));
typedef int32_t vint __attribute__((vector_size(kVectorBytes)));
typedef uint32_t vuint __attribute__((vector_size(kVectorBytes)));

template <class V, class T>
static inline __attribute__((always_inline)) V load(const T* p) {
  static_assert(sizeof(T) == 4);
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
static inline __attribute__((always_inline)) void store(T* p, V v) {
  static_assert(sizeof(T) == 4);
  std::memcpy(p, &v, sizeof v);
}

}  // namespace rlk::RLK_ISA
