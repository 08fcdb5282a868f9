// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): a counter-based
// generator. Works in scalar lanes and in any unsigned 32-bit vector type; also in CUDA.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define RLK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define RLK_HOST_DEVICE static inline __attribute__((always_inline))
#endif

namespace rlk {

// First output word of Philox4x32-10 for a 128-bit counter and a 64-bit key.
RLK_HOST_DEVICE uint32_t philox_word(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  uint32_t c0 = uint32_t(counter_low), c1 = uint32_t(counter_low >> 32);
  uint32_t c2 = uint32_t(counter_high), c3 = uint32_t(counter_high >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// Uniform float32 in (0, 1): 23 random bits and a half, so that neither 0 nor 1 can come out.
RLK_HOST_DEVICE float unit_interval(uint32_t word) { return (float(word >> 9) + 0.5f) * 0x1p-23f; }

}  // namespace rlk
