// The small operations between the matrix products of a decoder layer, on float32 or bfloat16 with float32 arithmetic.
#include "dispatch.h"
#include "simd_float.h"

namespace rlk::RLK_ISA {
namespace {

// 1 / root mean square of a row.
template <class T>
RLK_INLINE float rms_factor(const T* x, float eps, int64_t dim) {
  vfloat squares{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const vfloat v = load_float(x + i);
    squares += v * v;
  }
  float sum = sum_lanes(squares);
  for (; i < dim; ++i) {
    const float v = to_float(x[i]);
    sum += v * v;
  }
  return 1.0f / __builtin_sqrtf(sum / float(dim) + eps);
}

// x * factor * weight, in place or not, with factor = rsqrt(mean(x^2) + eps), which is returned.
template <class T>
RLK_INLINE float rms_norm_row(const T* x, const float* weight, float eps, T* out, int64_t dim) {
  const float factor = rms_factor(x, eps, dim);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store_float(out + i, load_float(x + i) * factor * load_float(weight + i));
  for (; i < dim; ++i) from_float(out + i, to_float(x[i]) * factor * weight[i]);
  return factor;
}

// grad_x = the gradient that `grad_out` is for x, plus `other` where there is one; grad_weight is added to. grad_x may
// be grad_out or other.
template <class T>
RLK_INLINE void rms_norm_row_backward(const T* grad_out, const T* other, const T* x, float factor, const float* weight,
                                      T* grad_x, float* grad_weight, int64_t dim) {
  vfloat products{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    products += load_float(grad_out + i) * load_float(weight + i) * load_float(x + i);
  float dot = sum_lanes(products);
  for (; i < dim; ++i) dot += to_float(grad_out[i]) * weight[i] * to_float(x[i]);
  const float along = dot / float(dim) * factor * factor * factor;
  for (i = 0; i + kLanes <= dim; i += kLanes) {
    const vfloat g = load_float(grad_out + i), v = load_float(x + i);
    vfloat grad = g * factor * load_float(weight + i) - v * along;
    if (other) grad += load_float(other + i);
    store(grad_weight + i, load_float(grad_weight + i) + g * v * factor);
    store_float(grad_x + i, grad);
  }
  for (; i < dim; ++i) {
    const float g = to_float(grad_out[i]), v = to_float(x[i]);
    const float grad = g * factor * weight[i] - v * along + (other ? to_float(other[i]) : 0.0f);
    grad_weight[i] += g * v * factor;
    from_float(grad_x + i, grad);
  }
}

// The pairs (i, half + i) of a head turned by the angles of a position, or back; in place or not.
template <class T>
RLK_INLINE void turn(const T* x, const float* cos, const float* sin, float sign, T* out, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vfloat a = load_float(x + i), b = load_float(x + half + i);
    store_float(out + i, a * load_float(cos + i) - b * (load_float(sin + i) * sign));
    store_float(out + half + i, b * load_float(cos + half + i) + a * (load_float(sin + half + i) * sign));
  }
  for (; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    from_float(out + i, a * cos[i] - b * (sin[i] * sign));
    from_float(out + half + i, b * cos[half + i] + a * (sin[half + i] * sign));
  }
}

RLK_INLINE vfloat exp_of_minus(vfloat x) {
  return x < -88.0f ? splat(__builtin_inff()) : vexp(-x);  // beyond it is out of the polynomial's range
}

template <class T>
RLK_INLINE void add_rms_norm_rows(const T* residual, const T* x, const float* weight, float eps, T* sum, T* out,
                                  float* factor, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, residual += dim, out += dim) {
    const T* row = residual;
    if (x) {
      int64_t i = 0;
      for (; i + kLanes <= dim; i += kLanes) store_float(sum + i, load_float(residual + i) + load_float(x + i));
      for (; i < dim; ++i) from_float(sum + i, to_float(residual[i]) + to_float(x[i]));
      row = sum;
      x += dim;
      sum += dim;
    }
    factor[r] = rms_norm_row(row, weight, eps, out, dim);
  }
}

template <class T>
RLK_INLINE void rope_rows(const T* x, const int64_t* positions, const float* cos, const float* sin,
                          const float* q_weight, const float* k_weight, float eps, T* out, int64_t rows, int64_t width,
                          int64_t q_heads, int64_t heads, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, x += width, out += width) {
    const float *c = cos + positions[r] * dim, *s = sin + positions[r] * dim;
    for (int64_t h = 0; h < heads; ++h) {
      const T* head = x + h * dim;
      T* to = out + h * dim;
      if (q_weight) {
        rms_norm_row(head, h < q_heads ? q_weight : k_weight, eps, to, dim);
        head = to;
      }
      turn(head, c, s, 1.0f, to, dim / 2);
    }
    const int64_t turned = heads * dim;
    if (turned < width) __builtin_memcpy(out + turned, x + turned, (width - turned) * sizeof(T));
  }
}

template <class T>
RLK_INLINE void rope_rows_backward(const T* grad_out, const T* x, const int64_t* positions, const float* cos,
                                   const float* sin, const float* q_weight, const float* k_weight, float eps, T* grad,
                                   float* grad_weights, int64_t rows, int64_t width, int64_t q_heads, int64_t heads,
                                   int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, x += width, grad_out += width, grad += width) {
    const float *c = cos + positions[r] * dim, *s = sin + positions[r] * dim;
    for (int64_t h = 0; h < heads; ++h) {
      T* back = grad + h * dim;
      turn(grad_out + h * dim, c, s, -1.0f, back, dim / 2);
      if (q_weight) {
        const bool query = h < q_heads;
        const T *none = nullptr, *head = x + h * dim;
        rms_norm_row_backward(back, none, head, rms_factor(head, eps, dim), query ? q_weight : k_weight, back,
                              grad_weights + (query ? 0 : dim), dim);
      }
    }
    const int64_t turned = heads * dim;
    if (turned < width) __builtin_memcpy(grad + turned, grad_out + turned, (width - turned) * sizeof(T));
  }
}

template <class T>
RLK_INLINE void silu_mul_rows(const T* gate_up, T* out, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, out += dim) {
    const T *gate = gate_up + r * 2 * dim, *up = gate + dim;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const vfloat g = load_float(gate + i);
      store_float(out + i, g / (1.0f + exp_of_minus(g)) * load_float(up + i));
    }
    for (; i < dim; ++i) {
      const float g = to_float(gate[i]);
      from_float(out + i, g / (1.0f + __builtin_expf(-g)) * to_float(up[i]));
    }
  }
}

template <class T>
RLK_INLINE void silu_mul_rows_backward(const T* grad_out, const T* gate_up, T* grad, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, grad_out += dim) {
    const T *gate = gate_up + r * 2 * dim, *up = gate + dim;
    T *grad_gate = grad + r * 2 * dim, *grad_up = grad_gate + dim;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const vfloat g = load_float(gate + i), out = load_float(grad_out + i), s = 1.0f / (1.0f + exp_of_minus(g));
      store_float(grad_gate + i, out * load_float(up + i) * (s * (1.0f + g * (1.0f - s))));
      store_float(grad_up + i, out * (g * s));
    }
    for (; i < dim; ++i) {
      const float g = to_float(gate[i]), out = to_float(grad_out[i]), s = 1.0f / (1.0f + __builtin_expf(-g));
      from_float(grad_gate + i, out * to_float(up[i]) * (s * (1.0f + g * (1.0f - s))));
      from_float(grad_up + i, out * (g * s));
    }
  }
}

// Pointers to rows of the type that the last argument has.
template <class T>
RLK_INLINE const T* in(const void* p, T) { return static_cast<const T*>(p); }
template <class T>
RLK_INLINE T* to(void* p, T) { return static_cast<T*>(p); }

// work(0.0f), or with a bfloat16
template <class F>
RLK_INLINE void with_type(bool is_bf16, const F& work) {
  if (is_bf16)
    work(bf16{});
  else
    work(0.0f);
}

}  // namespace

// What follows is on rows of float32 or, with `is_bf16`, of bfloat16; weights, tables and sums are float32.

// sum = residual + x (when there is one, otherwise the residual is it), out = RMSNorm(sum), factor [rows] of each row.
void add_rms_norm(bool is_bf16, const void* residual, const void* x, const float* weight, float eps, void* sum,
                  void* out, float* factor, int64_t rows, int64_t dim) {
  with_type(is_bf16, [&](auto t) {
    add_rms_norm_rows(in(residual, t), in(x, t), weight, eps, to(sum, t), to(out, t), factor, rows, dim);
  });
}

// grad [rows, dim] of the sum: what comes through the norm, plus grad_sum where there is one. grad_weight [dim] is
// added to.
void rms_norm_backward(bool is_bf16, const void* grad_out, const void* grad_sum, const void* sum, const float* factor,
                       const float* weight, void* grad, float* grad_weight, int64_t rows, int64_t dim) {
  with_type(is_bf16, [&](auto t) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * dim;
      rms_norm_row_backward(in(grad_out, t) + at, grad_sum ? in(grad_sum, t) + at : nullptr, in(sum, t) + at, factor[r],
                            weight, to(grad, t) + at, grad_weight, dim);
    }
  });
}

// Turns the first `heads` heads of each row [width] by the angles of its position and copies the rest; with weights
// the heads are normalised before, the first `q_heads` by q_weight, the others by k_weight. cos, sin [positions, dim].
void rope(bool is_bf16, const void* x, const int64_t* positions, const float* cos, const float* sin,
          const float* q_weight, const float* k_weight, float eps, void* out, int64_t rows, int64_t width,
          int64_t q_heads, int64_t heads, int64_t dim) {
  with_type(is_bf16, [&](auto t) {
    rope_rows(in(x, t), positions, cos, sin, q_weight, k_weight, eps, to(out, t), rows, width, q_heads, heads, dim);
  });
}

// grad [rows, width] of x from that of rope's output; with weights, grad_weights [2, dim] are added to.
void rope_backward(bool is_bf16, const void* grad_out, const void* x, const int64_t* positions, const float* cos,
                   const float* sin, const float* q_weight, const float* k_weight, float eps, void* grad,
                   float* grad_weights, int64_t rows, int64_t width, int64_t q_heads, int64_t heads, int64_t dim) {
  with_type(is_bf16, [&](auto t) {
    rope_rows_backward(in(grad_out, t), in(x, t), positions, cos, sin, q_weight, k_weight, eps, to(grad, t),
                       grad_weights, rows, width, q_heads, heads, dim);
  });
}

// gate_up [rows, 2 * dim] -> silu(gate) * up [rows, dim].
void silu_mul(bool is_bf16, const void* gate_up, void* out, int64_t rows, int64_t dim) {
  with_type(is_bf16, [&](auto t) { silu_mul_rows(in(gate_up, t), to(out, t), rows, dim); });
}

// grad [rows, 2 * dim] of gate_up from grad_out [rows, dim].
void silu_mul_backward(bool is_bf16, const void* grad_out, const void* gate_up, void* grad, int64_t rows,
                       int64_t dim) {
  with_type(is_bf16, [&](auto t) { silu_mul_rows_backward(in(grad_out, t), in(gate_up, t), to(grad, t), rows, dim); });
}

}  // namespace rlk::RLK_ISA
