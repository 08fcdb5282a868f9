#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(RLK_HAVE_AVX512) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rlk {
namespace {

#ifdef RLK_HAVE_AVX512
// Linux hands out the AMX tile state on request only (arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)).
bool enable_amx() {
#ifdef __linux__
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool amx_bf16 = (edx >> 22) & 1, amx_tile = (edx >> 24) & 1;
  return amx_bf16 && amx_tile && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

Isa best_available() {
#ifdef RLK_HAVE_AVX512
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool amx = avx512 && __builtin_cpu_supports("avx512bf16") && enable_amx();
  return amx ? Isa::amx : avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::portable;
#else
  return Isa::portable;
#endif
}

Isa parse(const std::string& name) {
  const Isa best = best_available();
  if (name == "auto" || name.empty()) return best;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (name != isa_name(isa)) continue;
    if (isa > best)
      throw std::invalid_argument("instruction set '" + name + "' is not available here; the best one is '" +
                                  isa_name(best) + "'");
    return isa;
  }
  throw std::invalid_argument("instruction set '" + name + "' is unknown; allowed: auto, portable, avx2, avx512, amx");
}

std::atomic<int> chosen{-1};

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* names[] = {"portable", "avx2", "avx512", "amx"};
  return names[static_cast<int>(isa)];
}

Isa cpu_isa() {
  int isa = chosen.load(std::memory_order_relaxed);
  if (isa < 0) {
    const char* forced = std::getenv("RLKERNELS_CPU_ISA");
    isa = static_cast<int>(parse(forced ? forced : "auto"));
    chosen.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

void set_cpu_isa(const char* name) { chosen.store(static_cast<int>(parse(name)), std::memory_order_relaxed); }

}  // namespace rlk
