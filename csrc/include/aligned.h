// Memory for kernels that read whole vectors.
#pragma once
#include <cstddef>
#include <memory>
#include <new>

namespace rlk {

// Floats that start on a cache line, with any contents.
class Aligned {
 public:
  explicit Aligned(size_t size)
      : memory_(static_cast<float*>(::operator new(size * sizeof(float) + kLine, std::align_val_t(kLine)))) {}
  float* data() { return memory_.get(); }

 private:
  static constexpr size_t kLine = 64;
  struct Free {
    void operator()(float* memory) const { ::operator delete(memory, std::align_val_t(kLine)); }
  };
  std::unique_ptr<float, Free> memory_;
};

}  // namespace rlk
