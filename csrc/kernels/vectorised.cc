#include "vectorised.h"

#include <algorithm>
#include <atomic>

namespace mr::kernels {
namespace {

Isa ask_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::avx2;
#endif
  return Isa::portable;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{ask_processor()};
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa best = ask_processor();
  return best;
}

Isa isa() { return current().load(std::memory_order_relaxed); }

void use_isa(Isa wanted) { current().store(std::min(wanted, best_isa()), std::memory_order_relaxed); }

}  // namespace mr::kernels
