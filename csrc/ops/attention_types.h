// What the attention ops take.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "attention.h"

namespace rlk {

constexpr int64_t kMaxDim = 512;

inline Float float_type(const at::Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case at::kFloat: return Float::f32;
    case at::kBFloat16: return Float::bf16;
    case at::kHalf: return Float::f16;
    default: TORCH_CHECK_TYPE(false, name, " must be float32, bfloat16 or float16, got ", t.scalar_type());
  }
}

inline int64_t window_of(const std::optional<int64_t>& window) {
  TORCH_CHECK_VALUE(window.value_or(1) > 0, "window must be >= 1, got ", window.value_or(1));
  return std::min(window.value_or(kNoWindow), kNoWindow);
}

inline float softcap_of(const std::optional<double>& softcap) {
  TORCH_CHECK_VALUE(softcap.value_or(1) > 0, "softcap must be > 0, got ", softcap.value_or(1));
  return float(softcap.value_or(0));
}

}  // namespace rlk
