// log softmax(logits / T) at given ids and the entropy, row by row, without temporaries of the size of the logits.
#include "dispatch.h"
#include "logits.h"
#include "token_weights.h"

namespace RLK_KERNEL_NAMESPACE {
namespace {

constexpr float kMinExponent = -88;  // exp of less counts as exp of this: about 0, and 0 times -inf would be NaN
constexpr int64_t kBlock = 4096;  // logits read twice in a row, the second time from the cache

inline __attribute__((always_inline)) vfloat at_least(vfloat x, float least) {
  return x > vfloat{} + least ? x : vfloat{} + least;
}

// exp(x) for x <= 88; 0 below -87.3.
inline __attribute__((always_inline)) vfloat exponential(vfloat x) {
  const vfloat bounded = at_least(x, kMinExponent);
  const vfloat y = bounded * kLog2E, n = (y + kRound) - kRound;
  const vfloat f = y - n;
  vfloat p = vfloat{} + kExp2Coefficients[6];
  for (int i = 5; i >= 0; --i) p = p * f + kExp2Coefficients[i];
  return p * (vfloat)((__builtin_convertvector(n, vint) + 127) << 23);
}

inline float sum_of(vfloat v) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += v[lane];
  return total;
}

template <class T>
inline __attribute__((always_inline)) vfloat load_upto(const T* p, int64_t n) {
  return n >= kLanes ? load_logits(p) : load_tail(p, n);
}

// Largest logit, -inf for none; NaN when there is one.
template <class T>
float largest_of(const T* row, int64_t n) {
  vfloat best[4];
  for (vfloat& v : best) v = vfloat{} - kInfinity;
  vint nan = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) {
      const vfloat x = load_logits(row + i + k * kLanes);
      nan |= x != x;
      best[k] = x > best[k] ? x : best[k];
    }
  for (; i < n; i += kLanes) {
    const vfloat x = load_upto(row + i, n - i);
    nan |= x != x;
    best[0] = x > best[0] ? x : best[0];
  }
  float largest = -kInfinity;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (nan[lane]) return __builtin_nanf("");
    for (const vfloat& v : best) largest = v[lane] > largest ? v[lane] : largest;
  }
  return largest;
}

struct Sums {
  double exp = 0;       // sum of exp(z), z = (x - largest) / T
  double weighted = 0;  // sum of exp(z) z
};

template <class T, bool kWithEntropy>
Sums sums_of(const T* row, int64_t n, float largest, float inverse_temperature) {
  vfloat exps[2] = {}, weighted[2] = {};
  const auto add = [&](vfloat x, int k) {
    const vfloat z = at_least((x - largest) * inverse_temperature, kMinExponent);
    const vfloat e = exponential(z);
    exps[k] += e;
    if (kWithEntropy) weighted[k] += e * z;
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    add(load_logits(row + i), 0);
    add(load_logits(row + i + kLanes), 1);
  }
  for (; i < n; i += kLanes) add(load_upto(row + i, n - i), 0);
  return {double(sum_of(exps[0] + exps[1])), double(sum_of(weighted[0] + weighted[1]))};
}

// One pass over memory: each block's sums are brought to the largest logit so far.
// stats: largest logit and log of the sum of exp((x - largest) / T), kept for the gradient; NaN without a distribution.
// The log-probability of an id outside 0 .. n - 1 is NaN.
template <class T, bool kWithEntropy>
void forward_row(const T* row, int64_t n, int64_t id, float inverse_temperature, float* logprob, float* entropy,
                 float* stats) {
  float largest = -kInfinity;
  Sums total;
  for (int64_t b = 0; b < n; b += kBlock) {
    const int64_t count = n - b < kBlock ? n - b : kBlock;
    const float block_largest = largest_of(row + b, count);
    if (!(block_largest <= largest)) {  // also when it is NaN
      if (total.exp > 0) {
        const double shift = (double(block_largest) - double(largest)) * inverse_temperature;
        const double scale = __builtin_exp(-shift);
        total.weighted = scale == 0 ? 0 : scale * (total.weighted - shift * total.exp);
        total.exp *= scale;
      }
      largest = block_largest;
    }
    if (!(largest > -kInfinity && largest < kInfinity)) {
      if (largest == -kInfinity) continue;
      break;
    }
    const Sums block = sums_of<T, kWithEntropy>(row + b, count, largest, inverse_temperature);
    total.exp += block.exp;
    total.weighted += block.weighted;
  }
  const bool valid = largest > -kInfinity && largest < kInfinity;
  const double log_sum = valid ? __builtin_log(total.exp) : __builtin_nan("");
  stats[0] = largest;
  stats[1] = float(log_sum);
  const double logit = id >= 0 && id < n ? double(load_logit(row + id)) : __builtin_nan("");
  *logprob = float((logit - double(largest)) * inverse_temperature - log_sum);
  if (kWithEntropy) *entropy = float(log_sum - total.weighted / total.exp);
}

inline void store_gradient(float* p, vfloat v) { store(p, v); }

inline void store_gradient(uint16_t* p, vfloat v) {  // rounds to nearest even; gradients of NaN stay NaN
  const vuint bits = (vuint)v, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const vuint kept = (vuint)(v != v) & (vuint{} + 0x7FC0);
  const vushort out = __builtin_convertvector((v != v) ? kept : rounded, vushort);
  __builtin_memcpy(p, &out, sizeof out);
}

struct Upstream {  // gradients of a row's results
  float logprob, entropy;
};

// d logprob / d x_j = (1[j = id] - p_j) / T;  d entropy / d x_j = -p_j (log p_j + H) / T. The id may lie outside.
template <class T>
void backward_row(const T* row, int64_t n, int64_t id, float inverse_temperature, const float* stats, float entropy,
                  Upstream upstream, T* grad) {
  const bool valid = stats[1] == stats[1];
  const auto gradient = [&](vfloat x) {
    const vfloat log_p = (x - stats[0]) * inverse_temperature - stats[1];
    const vfloat factor = upstream.logprob + upstream.entropy * (at_least(log_p, kMinExponent) + entropy);
    const vfloat g = -exponential(log_p) * factor * inverse_temperature;
    return valid ? g : vfloat{} + __builtin_nanf("");
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_gradient(grad + i, gradient(load_logits(row + i)));
  T last[kLanes];
  if (i < n) {
    store_gradient(last, gradient(load_tail(row + i, n - i)));
    __builtin_memcpy(grad + i, last, (n - i) * sizeof(T));
  }
  if (id < 0 || id >= n) return;
  store_gradient(last, gradient(vfloat{} + load_logit(row + id)) + upstream.logprob * inverse_temperature);
  grad[id] = last[0];
}

template <class T>
void forward(const T* logits, const int64_t* ids, int64_t start, int64_t rows, int64_t n, float inverse_temperature,
             float* logprobs, float* entropies, float* stats) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = logits + r * n;
    if (entropies)
      forward_row<T, true>(row, n, ids[r] - start, inverse_temperature, logprobs + r, entropies + r, stats + 2 * r);
    else
      forward_row<T, false>(row, n, ids[r] - start, inverse_temperature, logprobs + r, nullptr, stats + 2 * r);
  }
}

template <class T>
void backward(const T* logits, const int64_t* ids, int64_t start, int64_t rows, int64_t n, float inverse_temperature,
              const float* stats, const float* entropies, const float* grad_logprobs, const float* grad_entropies,
              T* grad) {
  for (int64_t r = 0; r < rows; ++r) {
    const Upstream upstream{grad_logprobs[r], entropies ? grad_entropies[r] : 0.0f};
    backward_row(logits + r * n, n, ids[r] - start, inverse_temperature, stats + 2 * r, entropies ? entropies[r] : 0.0f,
                 upstream, grad + r * n);
  }
}

}  // namespace

// logits [rows, n] of the tokens from `start` on, float32, or bfloat16 when `bf16`; entropies may be null: not wanted.
// stats [rows, 2].
void token_logprobs(const void* logits, bool bf16, const int64_t* ids, int64_t start, int64_t rows, int64_t n,
                    float inverse_temperature, float* logprobs, float* entropies, float* stats) {
  if (bf16)
    forward(static_cast<const uint16_t*>(logits), ids, start, rows, n, inverse_temperature, logprobs, entropies, stats);
  else
    forward(static_cast<const float*>(logits), ids, start, rows, n, inverse_temperature, logprobs, entropies, stats);
}

// grad [rows, n] in the dtype of the logits.
void token_logprobs_backward(const void* logits, bool bf16, const int64_t* ids, int64_t start, int64_t rows, int64_t n,
                             float inverse_temperature, const float* stats, const float* entropies,
                             const float* grad_logprobs, const float* grad_entropies, void* grad) {
  if (bf16)
    backward(static_cast<const uint16_t*>(logits), ids, start, rows, n, inverse_temperature, stats, entropies,
             grad_logprobs, grad_entropies, static_cast<uint16_t*>(grad));
  else
    backward(static_cast<const float*>(logits), ids, start, rows, n, inverse_temperature, stats, entropies,
             grad_logprobs, grad_entropies, static_cast<float*>(grad));
}

}  // namespace RLK_KERNEL_NAMESPACE
