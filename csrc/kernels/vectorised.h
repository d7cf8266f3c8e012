// One loop, compiled for several instruction sets; the processor at hand decides at run time which one is used. The
// compiler vectorises it: there is one source and, without contraction of a*b+c, one result bit for bit.
#pragma once

#include <cstdint>

namespace mr::kernels {

enum class Isa : uint8_t { portable, avx2, avx512 };

Isa best_isa();            // that this processor has
Isa isa();                 // in use: the best, unless use_isa said otherwise
void use_isa(Isa wanted);  // for tests; not above best_isa()

#if defined(__x86_64__)
#define MR_AVX2 __attribute__((target("avx2,f16c")))
#define MR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define MR_AVX2
#define MR_AVX512
#endif

template <typename Loop, typename... Args>
MR_AVX512 void run_avx512(Args... args) {
  Loop::run(args...);
}
template <typename Loop, typename... Args>
MR_AVX2 void run_avx2(Args... args) {
  Loop::run(args...);
}
template <typename Loop, typename... Args>
void run_portable(Args... args) {
  Loop::run(args...);
}

// Loop::run(args...), which must be always_inline together with all that it calls.
template <typename Loop, typename... Args>
void run_vectorised(Args... args) {
  switch (isa()) {
    case Isa::avx512:
      return run_avx512<Loop>(args...);
    case Isa::avx2:
      return run_avx2<Loop>(args...);
    case Isa::portable:
      return run_portable<Loop>(args...);
  }
}

}  // namespace mr::kernels
