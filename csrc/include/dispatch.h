// Run-time choice between the copies of a CPU kernel that were compiled for different instruction sets.
//
// A kernel is a plain function on raw pointers in csrc/cpu, defined inside RLK_KERNEL_NAMESPACE and compiled
// once per instruction set. The caller declares it with RLK_DECLARE_KERNEL and calls it with RLK_DISPATCH.
#pragma once

namespace rlk {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best set that was compiled and that this processor has, or the one forced by RLKERNELS_CPU_ISA
// or set_cpu_isa. Never more than the processor has.
Isa cpu_isa();
const char* isa_name(Isa isa);
// Throws std::invalid_argument when the name is unknown or the set is not available here. "auto" undoes it.
void set_cpu_isa(const char* name);

}  // namespace rlk

// Inside csrc/cpu: `namespace RLK_KERNEL_NAMESPACE { void f(...) {...} }` becomes rlk::avx512, say. Keep
// everything else in these files static: containers and inline functions of the standard library would leave
// weak symbols compiled for one instruction set, and the linker may pick them for every caller.
#define RLK_KERNEL_NAMESPACE rlk::RLK_ISA

#ifdef RLK_HAVE_AVX512
#define RLK_DECLARE_KERNEL(result, name, ...) \
  namespace rlk::portable { result name(__VA_ARGS__); } \
  namespace rlk::avx2 { result name(__VA_ARGS__); } \
  namespace rlk::avx512 { result name(__VA_ARGS__); } \
  namespace rlk::amx { result name(__VA_ARGS__); }
// A pointer to the copy of `name` for this processor.
#define RLK_DISPATCH(name) \
  (rlk::cpu_isa() == rlk::Isa::amx      ? &rlk::amx::name \
   : rlk::cpu_isa() == rlk::Isa::avx512 ? &rlk::avx512::name \
   : rlk::cpu_isa() == rlk::Isa::avx2   ? &rlk::avx2::name \
                                        : &rlk::portable::name)
#else
#define RLK_DECLARE_KERNEL(result, name, ...) \
  namespace rlk::portable { result name(__VA_ARGS__); }
#define RLK_DISPATCH(name) (&rlk::portable::name)
#endif
