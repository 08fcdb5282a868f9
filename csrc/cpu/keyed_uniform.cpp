#include <cstdint>

#include "dispatch.h"
#include "philox.h"

namespace RLK_KERNEL_NAMESPACE {

// out[i] = uniform keyed by (seed, sample_ids[i], positions[i]), for n entries.
void keyed_uniform(uint64_t seed, const int64_t* sample_ids, const int64_t* positions, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = unit_interval(philox_word(seed, uint64_t(sample_ids[i]), uint64_t(positions[i])));
}

}  // namespace RLK_KERNEL_NAMESPACE
