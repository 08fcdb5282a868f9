// The small operations between the matrix products of a decoder layer, float32.
#include "dispatch.h"
#include "simd_float.h"

namespace rlk::RLK_ISA {
namespace {

// x * rsqrt(mean(x^2) + eps) * weight, in place or not.
inline void rms_norm_row(const float* x, const float* weight, float eps, float* out, int64_t dim) {
  vfloat squares{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const vfloat v = load_float(x + i);
    squares += v * v;
  }
  float sum = sum_lanes(squares);
  for (; i < dim; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / float(dim) + eps);
  for (i = 0; i + kLanes <= dim; i += kLanes) store(out + i, load_float(x + i) * factor * load_float(weight + i));
  for (; i < dim; ++i) out[i] = x[i] * factor * weight[i];
}

}  // namespace

// residual [rows, dim] += x (when there is one), out = RMSNorm(residual).
void add_rms_norm(float* residual, const float* x, const float* weight, float eps, float* out, int64_t rows,
                  int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, residual += dim, out += dim) {
    if (x) {
      int64_t i = 0;
      for (; i + kLanes <= dim; i += kLanes) store(residual + i, load_float(residual + i) + load_float(x + i));
      for (; i < dim; ++i) residual[i] += x[i];
      x += dim;
    }
    rms_norm_row(residual, weight, eps, out, dim);
  }
}

// Turns the first `heads` heads of each row by the angles of its position; with weights they are normalised before,
// the first `q_heads` by q_weight, the others by k_weight. cos, sin [positions, dim].
void rope(float* x, int64_t stride, const int64_t* positions, const float* cos, const float* sin,
          const float* q_weight, const float* k_weight, float eps, int64_t rows, int64_t q_heads, int64_t heads,
          int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t r = 0; r < rows; ++r) {
    const float *c = cos + positions[r] * dim, *s = sin + positions[r] * dim;
    for (int64_t h = 0; h < heads; ++h) {
      float *low = x + r * stride + h * dim, *high = low + half;
      if (q_weight) rms_norm_row(low, h < q_heads ? q_weight : k_weight, eps, low, dim);
      int64_t i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        const vfloat a = load_float(low + i), b = load_float(high + i);
        store(low + i, a * load_float(c + i) - b * load_float(s + i));
        store(high + i, b * load_float(c + half + i) + a * load_float(s + half + i));
      }
      for (; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a * c[i] - b * s[i];
        high[i] = b * c[half + i] + a * s[half + i];
      }
    }
  }
}

// gate_up [rows, 2 * dim] -> silu(gate) * up [rows, dim].
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, out += dim) {
    const float *gate = gate_up + r * 2 * dim, *up = gate + dim;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const vfloat g = load_float(gate + i);
      // beyond -87 exp is out of the polynomial's range, and the result is 0 in float32 but for denormals
      const vfloat e = vexp(g < -87.0f ? splat(87.0f) : -g);
      store(out + i, g / (1.0f + e) * load_float(up + i));
    }
    for (; i < dim; ++i) out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
  }
}

}  // namespace rlk::RLK_ISA
