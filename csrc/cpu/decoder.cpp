// The small operations between the matrix products of a decoder layer, float32.
#include "dispatch.h"
#include "simd_float.h"

namespace rlk::RLK_ISA {
namespace {

// x * factor * weight, in place or not, with factor = rsqrt(mean(x^2) + eps), which is returned.
inline float rms_norm_row(const float* x, const float* weight, float eps, float* out, int64_t dim) {
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
  return factor;
}

// grad_x = the gradient that `grad_out` is for x, plus `other` where there is one; grad_weight is added to. grad_x may
// be grad_out or other.
inline void rms_norm_row_backward(const float* grad_out, const float* other, const float* x, float factor,
                                  const float* weight, float* grad_x, float* grad_weight, int64_t dim) {
  vfloat products{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    products += load_float(grad_out + i) * load_float(weight + i) * load_float(x + i);
  float dot = sum_lanes(products);
  for (; i < dim; ++i) dot += grad_out[i] * weight[i] * x[i];
  const float along = dot / float(dim) * factor * factor * factor;
  for (i = 0; i + kLanes <= dim; i += kLanes) {
    const vfloat g = load_float(grad_out + i), v = load_float(x + i);
    vfloat grad = g * factor * load_float(weight + i) - v * along;
    if (other) grad += load_float(other + i);
    store(grad_weight + i, load_float(grad_weight + i) + g * v * factor);
    store(grad_x + i, grad);
  }
  for (; i < dim; ++i) {
    const float g = grad_out[i];
    const float grad = g * factor * weight[i] - x[i] * along + (other ? other[i] : 0.0f);
    grad_weight[i] += g * x[i] * factor;
    grad_x[i] = grad;
  }
}

// The pairs (i, half + i) of a head turned by the angles of a position, or back; in place or not.
inline void turn(const float* x, const float* cos, const float* sin, float sign, float* out, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vfloat a = load_float(x + i), b = load_float(x + half + i);
    store(out + i, a * load_float(cos + i) - b * (load_float(sin + i) * sign));
    store(out + half + i, b * load_float(cos + half + i) + a * (load_float(sin + half + i) * sign));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    out[i] = a * cos[i] - b * (sin[i] * sign);
    out[half + i] = b * cos[half + i] + a * (sin[half + i] * sign);
  }
}

inline vfloat exp_of_minus(vfloat x) {
  // beyond -87 exp is out of the polynomial's range, and the result is 0 in float32 but for denormals
  return vexp(x < -87.0f ? splat(87.0f) : -x);
}

}  // namespace

// sum = residual + x (when there is one, otherwise the residual is it), out = RMSNorm(sum), factor [rows] of each row.
void add_rms_norm(const float* residual, const float* x, const float* weight, float eps, float* sum, float* out,
                  float* factor, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, residual += dim, out += dim) {
    const float* row = residual;
    if (x) {
      int64_t i = 0;
      for (; i + kLanes <= dim; i += kLanes) store(sum + i, load_float(residual + i) + load_float(x + i));
      for (; i < dim; ++i) sum[i] = residual[i] + x[i];
      row = sum;
      x += dim;
      sum += dim;
    }
    factor[r] = rms_norm_row(row, weight, eps, out, dim);
  }
}

// grad [rows, dim] of the sum: what comes through the norm, plus grad_sum where there is one. grad_weight [dim] is
// added to.
void rms_norm_backward(const float* grad_out, const float* grad_sum, const float* sum, const float* factor,
                       const float* weight, float* grad, float* grad_weight, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * dim;
    rms_norm_row_backward(grad_out + at, grad_sum ? grad_sum + at : nullptr, sum + at, factor[r], weight, grad + at,
                          grad_weight, dim);
  }
}

// Turns the first `heads` heads of each row [width] by the angles of its position and copies the rest; with weights
// the heads are normalised before, the first `q_heads` by q_weight, the others by k_weight. cos, sin [positions, dim].
void rope(const float* x, const int64_t* positions, const float* cos, const float* sin, const float* q_weight,
          const float* k_weight, float eps, float* out, int64_t rows, int64_t width, int64_t q_heads, int64_t heads,
          int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, x += width, out += width) {
    const float *c = cos + positions[r] * dim, *s = sin + positions[r] * dim;
    for (int64_t h = 0; h < heads; ++h) {
      const float* head = x + h * dim;
      float* to = out + h * dim;
      if (q_weight) {
        rms_norm_row(head, h < q_heads ? q_weight : k_weight, eps, to, dim);
        head = to;
      }
      turn(head, c, s, 1.0f, to, dim / 2);
    }
    const int64_t turned = heads * dim;
    if (turned < width) __builtin_memcpy(out + turned, x + turned, (width - turned) * sizeof(float));
  }
}

// grad [rows, width] of x from that of rope's output; with weights, grad_weights [2, dim] are added to; scratch [dim].
void rope_backward(const float* grad_out, const float* x, const int64_t* positions, const float* cos, const float* sin,
                   const float* q_weight, const float* k_weight, float eps, float* grad, float* grad_weights,
                   float* scratch, int64_t rows, int64_t width, int64_t q_heads, int64_t heads, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, x += width, grad_out += width, grad += width) {
    const float *c = cos + positions[r] * dim, *s = sin + positions[r] * dim;
    for (int64_t h = 0; h < heads; ++h) {
      float* back = grad + h * dim;
      turn(grad_out + h * dim, c, s, -1.0f, back, dim / 2);
      if (q_weight) {
        const bool query = h < q_heads;
        const float *weight = query ? q_weight : k_weight, *head = x + h * dim;
        const float factor = rms_norm_row(head, weight, eps, scratch, dim);
        rms_norm_row_backward(back, nullptr, head, factor, weight, back, grad_weights + (query ? 0 : dim), dim);
      }
    }
    const int64_t turned = heads * dim;
    if (turned < width) __builtin_memcpy(grad + turned, grad_out + turned, (width - turned) * sizeof(float));
  }
}

// gate_up [rows, 2 * dim] -> silu(gate) * up [rows, dim].
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, out += dim) {
    const float *gate = gate_up + r * 2 * dim, *up = gate + dim;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const vfloat g = load_float(gate + i);
      store(out + i, g / (1.0f + exp_of_minus(g)) * load_float(up + i));
    }
    for (; i < dim; ++i) out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
  }
}

// grad [rows, 2 * dim] of gate_up from grad_out [rows, dim].
void silu_mul_backward(const float* grad_out, const float* gate_up, float* grad, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, grad_out += dim) {
    const float *gate = gate_up + r * 2 * dim, *up = gate + dim;
    float *grad_gate = grad + r * 2 * dim, *grad_up = grad_gate + dim;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const vfloat g = load_float(gate + i), out = load_float(grad_out + i), s = 1.0f / (1.0f + exp_of_minus(g));
      store(grad_gate + i, out * load_float(up + i) * (s * (1.0f + g * (1.0f - s))));
      store(grad_up + i, out * (g * s));
    }
    for (; i < dim; ++i) {
      const float g = gate[i], s = 1.0f / (1.0f + __builtin_expf(-g));
      grad_gate[i] = grad_out[i] * up[i] * (s * (1.0f + g * (1.0f - s)));
      grad_up[i] = grad_out[i] * (g * s);
    }
  }
}

}  // namespace rlk::RLK_ISA
