// exp(z) as integers, step for step as rlkernels/sampling/reference.py does it (see `token_weights` there): every
// operation is one correctly rounded float32 operation, so all backends get the same weights, sums and tokens.
#pragma once
#include <cstdint>

namespace rlk {

constexpr int kWeightBits = 42;            // weight of the largest logit is 2**42
constexpr int64_t kMaxVocabulary = 1 << 20;  // so that a sum of weights fits 62 bits

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: adding and subtracting it rounds to an integer
constexpr float kExp2Coefficients[] = {1.0f,           0x1.62e43p-1f,  0x1.ebfbdcp-3f, 0x1.c6aee8p-5f,
                                       0x1.3b2d4cp-7f, 0x1.5f3e54p-10f, 0x1.41fbbcp-13f};

// floor(fraction * total) for fraction in [0, 1] in units of 2**-24 and total < 2**62, without rounding.
static inline int64_t scaled_share(float fraction, int64_t total) {
  const int64_t units = int64_t(double(fraction) * 0x1p24);
  return units * (total >> 24) + ((units * (total & 0xFFFFFF)) >> 24);
}

}  // namespace rlk
