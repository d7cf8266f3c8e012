#include <algorithm>

#include "elements.h"
#include "floats.h"
#include "kernels.h"
#include "vectorised.h"

namespace mr::kernels {
namespace {

template <typename Element>
struct WidenLoop {
  MR_HOST_DEVICE static void run(const void* src, void* dst, size_t count) {
    const auto* in = static_cast<const typename Element::Storage*>(src);
    auto* out = static_cast<Wide<Element>*>(dst);
    for (size_t i = 0; i < count; ++i) out[i] = Wide<Element>(Element::load(in[i]));
  }
};

template <typename Element, typename From>
struct NarrowLoop {
  MR_HOST_DEVICE static void run(const void* src, void* dst, size_t count) {
    const auto* in = static_cast<const From*>(src);
    auto* out = static_cast<typename Element::Storage*>(dst);
    for (size_t i = 0; i < count; ++i) out[i] = Element::store(Narrow<typename Element::Value, From>::of(in[i]));
  }
};

bool is_small_float(mr_dtype dtype) { return dtype >= MR_F16 && dtype <= MR_E5M2FNUZ; }

template <typename From>
void narrow(const From* wide, mr_dtype to, void* dst, size_t count) {
  if constexpr (__is_same(From, float))
    if (is_small_float(to)) return from_floats(to, wide, dst, count);
  with_element(to, [&](auto element) {
    run_vectorised<NarrowLoop<decltype(element), From>>(static_cast<const void*>(wide), dst, count);
  });
}

template <typename Source>
void widen(mr_dtype from, const void* src, Wide<Source>* wide, size_t count) {
  if constexpr (__is_same(Wide<Source>, float))
    to_floats(from, src, wide, count);
  else
    run_vectorised<WidenLoop<Source>>(src, static_cast<void*>(wide), count);
}

}  // namespace

// Two short loops instead of one for each pair of types: what lies between them stays in the innermost cache.
void convert(mr_dtype from, const void* src, mr_dtype to, void* dst, size_t count) {
  with_element(from, [&](auto element) {
    using Source = decltype(element);
    using From = Wide<Source>;
    const auto* in = static_cast<const uint8_t*>(src);
    auto* out = static_cast<uint8_t*>(dst);
    if constexpr (__is_same(typename Source::Storage, From))
      return narrow(static_cast<const From*>(src), to, dst, count);
    if constexpr (__is_same(From, float))
      if (to == MR_F32) return to_floats(from, src, static_cast<float*>(dst), count);
    constexpr size_t kPiece = 1024;
    alignas(64) From wide[kPiece];
    for (size_t begin = 0; begin < count; begin += kPiece) {
      const size_t size = std::min(kPiece, count - begin);
      widen<Source>(from, in + begin * sizeof(typename Source::Storage), wide, size);
      narrow(wide, to, out + begin * dtype_size(to), size);
    }
  });
}

}  // namespace mr::kernels
