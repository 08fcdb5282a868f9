// What the attention ops take.
#pragma once
#include <ATen/core/Tensor.h>

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

}  // namespace rlk
