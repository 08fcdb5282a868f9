// Loops that show what this processor can do: reading memory and float32 multiply-adds.
// Built by bench/_limits.py with -O3 -march=native -fopenmp.
#include <cstdint>

namespace {
typedef float Vec __attribute__((vector_size(64)));
constexpr int kLanes = 16;
#ifdef __AVX512F__
constexpr int kChains = 16;  // enough to hide the latency of two multiply-add ports, few enough for 32 registers
#else
constexpr int kChains = 5;  // a Vec is two registers or more here
#endif
}  // namespace

// Reads n floats (data aligned to 64 bytes); returns a number that depends on all of them.
extern "C" float read_all(const float* data, int64_t n, int threads) {
  float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
  for (int64_t part = 0; part < threads; ++part) {
    const int64_t blocks = n / (kLanes * 8);
    const auto* vec = reinterpret_cast<const Vec*>(data);
    Vec sums[8] = {};
    for (int64_t i = blocks * part / threads; i < blocks * (part + 1) / threads; ++i) {
      for (int k = 0; k < 8; ++k) {
        __builtin_prefetch(vec + i * 8 + k + 64);
        sums[k] += vec[i * 8 + k];
      }
    }
    for (const Vec& sum : sums)
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  }
  return total;
}

// `rounds` multiply-adds on kChains independent vectors in each thread; returns the operations done.
extern "C" int64_t multiply_add(int64_t rounds, int threads, float* sink) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int part = 0; part < threads; ++part) {
    Vec sums[kChains] = {};
    Vec a = {}, b = {};
    for (int i = 0; i < kLanes; ++i) a[i] = 0.999f, b[i] = 0.001f * float(part + i + 1);  // no denormal numbers
    for (int k = 0; k < kChains; ++k) sums[k][0] = float(k);  // equal chains would be merged by the compiler
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
      for (int k = 0; k < kChains; ++k) sums[k] = sums[k] * a + b;
    }
    Vec sum = {};
    for (int k = 0; k < kChains; ++k) sum = sum * a + sums[k];
    sink[part] = sum[0];
  }
  return 2 * rounds * kChains * kLanes * threads;
}
