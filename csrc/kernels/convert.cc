#include <algorithm>

#include "elements.h"
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

template <typename From>
void narrow(const void* wide, mr_dtype to, void* dst, size_t count) {
  with_element(to, [&](auto element) { run_vectorised<NarrowLoop<decltype(element), From>>(wide, dst, count); });
}

template <typename Element, typename From>
constexpr bool kIsWide = sizeof(typename Element::Storage) == sizeof(From) && __is_same(typename Element::Value, From);

}  // namespace

// Two short loops instead of one for each pair of types: what lies between them stays in the innermost cache.
void convert(mr_dtype from, const void* src, mr_dtype to, void* dst, size_t count) {
  with_element(from, [&](auto source) {
    using Source = decltype(source);
    using From = Wide<Source>;
    const auto* in = static_cast<const uint8_t*>(src);
    auto* out = static_cast<uint8_t*>(dst);
    if constexpr (kIsWide<Source, From>) {
      narrow<From>(in, to, out, count);
    } else {
      constexpr size_t kPiece = 1024;
      alignas(64) From wide[kPiece];
      for (size_t begin = 0; begin < count; begin += kPiece) {
        const size_t size = std::min(kPiece, count - begin);
        run_vectorised<WidenLoop<Source>>(static_cast<const void*>(in + begin * sizeof(typename Source::Storage)),
                                          static_cast<void*>(wide), size);
        narrow<From>(wide, to, out + begin * dtype_size(to), size);
      }
    }
  });
}

}  // namespace mr::kernels
