// Checks at the border between torch and the kernels. Python has already given the user-facing errors;
// these guard direct calls of torch.ops.rlkernels.
#pragma once
#include <ATen/core/Tensor.h>

namespace rlk {

inline void check_tensor(const at::Tensor& t, const char* name, at::ScalarType type, int64_t rank) {
  TORCH_CHECK(t.scalar_type() == type && t.dim() == rank && t.is_contiguous() && t.is_cpu(), name,
              " must be a contiguous ", type, " CPU tensor of rank ", rank, ", got ", t.scalar_type(), " ", t.sizes(),
              " on ", t.device());
}

}  // namespace rlk
