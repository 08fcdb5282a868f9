// Passes over one row of logits; csrc/include/row_sampler.h puts them together.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")  // a fused multiply-add would round differently from the other backends
#else
#pragma STDC FP_CONTRACT OFF
#endif
#include "token_weights.h"

#include "dispatch.h"
#include "logits.h"

namespace RLK_KERNEL_NAMESPACE {

typedef float vfloat_half __attribute__((vector_size(kVectorBytes / 2)));
typedef int64_t vlong __attribute__((vector_size(kVectorBytes)));  // half as many lanes as vfloat

namespace {

constexpr int64_t kBlock = 1024;  // logits per block sum

union Halves {
  vfloat whole;
  vfloat_half half[2];
};

// exp((x - largest) * inverse) * 2**42, before it is cut to integers.
inline __attribute__((always_inline)) vfloat scaled_exp(vfloat x, float largest, float inverse) {
  const vfloat low = vfloat{} - 100.0f;
  vfloat y = (x - largest) * inverse * kLog2E;
  y = y > low ? y : low;
  const vfloat n = (y + kRound) - kRound, f = y - n;
  vfloat p = vfloat{} + kExp2Coefficients[6];
  for (int i = 5; i >= 0; --i) p = p * f + kExp2Coefficients[i];
  return p * (vfloat)((__builtin_convertvector(n, vint) + (kWeightBits + 127)) << 23);
}

template <class T>
int64_t block_sum(const T* row, int64_t n, float largest, float inverse) {
  vlong sum[2] = {};
  const auto add = [&](vfloat x) {
    const Halves w{scaled_exp(x, largest, inverse)};
    sum[0] += __builtin_convertvector(w.half[0], vlong);
    sum[1] += __builtin_convertvector(w.half[1], vlong);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(load_logits(row + i));
  if (i < n) add(load_tail(row + i, n - i));
  sum[0] += sum[1];
  int64_t total = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) total += sum[0][lane];
  return total;
}

// Largest logit of each of `groups` interleaved groups of the row: -> maxima; returns whether there is a NaN.
// Group 16 * b + l holds the logits 1024 * b + 16 * i + l.
template <class T>
bool maxima_of(const T* row, int64_t n, float* maxima) {
  vint nan = {};
  for (int64_t b = 0; b < n; b += kBlock) {
    vfloat best[16 / kLanes];
    for (vfloat& v : best) v = vfloat{} - kInfinity;
    const auto take = [&](vfloat x, vfloat& v) {
      nan |= x != x;
      v = x > v ? x : v;
    };
    const int64_t end = b + kBlock < n ? b + kBlock : n;
    int64_t i = b;
    for (; i + 16 <= end; i += 16)
      for (int v = 0; v < 16 / kLanes; ++v) take(load_logits(row + i + v * kLanes), best[v]);
    for (int v = 0; i < end; i += kLanes, ++v) {
      if (i + kLanes <= end)
        take(load_logits(row + i), best[v]);
      else
        take(load_tail(row + i, end - i), best[v]);
    }
    for (int v = 0; v < 16 / kLanes; ++v) store(maxima + b / kBlock * 16 + v * kLanes, best[v]);
  }
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= nan[lane];
  return any != 0;
}

template <class T>
int64_t collect_from(const T* row, int64_t n, float cut, int32_t* ids, float* logits) {
  int64_t found = 0;
  const vint one = vint{} + 1;
  for (int64_t b = 0; b < n; b += 4 * kLanes) {
    const int64_t end = b + 4 * kLanes < n ? b + 4 * kLanes : n;
    vint hits = {};
    int64_t i = b;
    for (; i + kLanes <= end; i += kLanes) hits |= (load_logits(row + i) >= cut) & one;
    if (i < end) hits |= (load_tail(row + i, end - i) >= cut) & one;
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= hits[lane];
    if (!any) continue;
    for (i = b; i < end; ++i) {  // hits are rare; without a branch, as they come at random
      const float x = load_logit(row + i);
      ids[found] = int32_t(i);
      logits[found] = x;
      found += x >= cut;
    }
  }
  return found;
}

template <class T>
void weigh_all(const T* row, int64_t n, float largest, float inverse, int64_t* weights) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const Halves w{scaled_exp(count < kLanes ? load_tail(row + i, count) : load_logits(row + i), largest, inverse)};
    vlong whole[2] = {__builtin_convertvector(w.half[0], vlong), __builtin_convertvector(w.half[1], vlong)};
    __builtin_memcpy(weights + i, whole, count * sizeof(int64_t));
  }
}

}  // namespace

// A row is float32, or bfloat16 when `bf16`. maxima: [16 * ceil(n / 1024)], filled up with -inf.
bool logit_maxima(const void* row, bool bf16, int64_t n, float* maxima) {
  return bf16 ? maxima_of(static_cast<const uint16_t*>(row), n, maxima)
              : maxima_of(static_cast<const float*>(row), n, maxima);
}

// Weights of n logits -> weights [n].
void logit_weights(const void* row, bool bf16, int64_t n, float largest, float inverse, int64_t* weights) {
  if (bf16)
    weigh_all(static_cast<const uint16_t*>(row), n, largest, inverse, weights);
  else
    weigh_all(static_cast<const float*>(row), n, largest, inverse, weights);
}

// Sums of weights -> sums [ceil(n / 1024)].
void logit_weight_sums(const void* row, bool bf16, int64_t n, float largest, float inverse, int64_t* sums) {
  for (int64_t b = 0; b < n; b += kBlock) {
    const int64_t count = n - b < kBlock ? n - b : kBlock;
    sums[b / kBlock] = bf16 ? block_sum(static_cast<const uint16_t*>(row) + b, count, largest, inverse)
                            : block_sum(static_cast<const float*>(row) + b, count, largest, inverse);
  }
}

// Tokens whose logit is at least `cut`, in order -> ids and logits, both with room for n + 1; returns how many.
int64_t collect_logits(const void* row, bool bf16, int64_t n, float cut, int32_t* ids, float* logits) {
  return bf16 ? collect_from(static_cast<const uint16_t*>(row), n, cut, ids, logits)
              : collect_from(static_cast<const float*>(row), n, cut, ids, logits);
}

}  // namespace RLK_KERNEL_NAMESPACE
