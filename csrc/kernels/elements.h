// How kernels see the elements of each dtype: as they lie in memory (Storage), and as arithmetic takes them (Value).
// For CPU and GPU, as float_formats.h is.
#pragma once

#include "float_formats.h"

namespace mr {

template <typename T>
struct PlainElement {
  using Storage = T;
  using Value = T;
  MR_HOST_DEVICE static T load(T stored) { return stored; }
  MR_HOST_DEVICE static T store(T value) { return value; }
};

template <typename Of>
struct SmallElement {
  using Format = Of;
  using Storage = typename Format::Storage;
  using Value = float;
  MR_HOST_DEVICE static float load(Storage stored) { return Format::to_float(stored); }
  MR_HOST_DEVICE static Storage store(float value) { return Format::from_float(value); }
};

struct BoolElement {
  using Storage = uint8_t;
  using Value = bool;
  MR_HOST_DEVICE static bool load(uint8_t stored) { return stored != 0; }
  MR_HOST_DEVICE static uint8_t store(bool value) { return value; }
};

template <mr_dtype dtype>
struct ElementOf;
// clang-format off
template <> struct ElementOf<MR_U8> { using type = PlainElement<uint8_t>; };
template <> struct ElementOf<MR_I8> { using type = PlainElement<int8_t>; };
template <> struct ElementOf<MR_I16> { using type = PlainElement<int16_t>; };
template <> struct ElementOf<MR_I32> { using type = PlainElement<int32_t>; };
template <> struct ElementOf<MR_I64> { using type = PlainElement<int64_t>; };
template <> struct ElementOf<MR_F32> { using type = PlainElement<float>; };
template <> struct ElementOf<MR_F64> { using type = PlainElement<double>; };
template <> struct ElementOf<MR_F16> { using type = SmallElement<Float16>; };
template <> struct ElementOf<MR_BF16> { using type = SmallElement<BFloat16>; };
template <> struct ElementOf<MR_E4M3FN> { using type = SmallElement<E4M3FN>; };
template <> struct ElementOf<MR_E5M2> { using type = SmallElement<E5M2>; };
template <> struct ElementOf<MR_E4M3FNUZ> { using type = SmallElement<E4M3FNUZ>; };
template <> struct ElementOf<MR_E5M2FNUZ> { using type = SmallElement<E5M2FNUZ>; };
template <> struct ElementOf<MR_BOOL> { using type = BoolElement; };
// clang-format on
template <mr_dtype dtype>
using Element = typename ElementOf<dtype>::type;

// Calls `use` with the element type of a dtype that is only known at run time: use(Element<MR_F32>()).
template <typename Use>
void with_element(mr_dtype dtype, const Use& use) {
  // clang-format off
  switch (dtype) {
    case MR_U8: return use(Element<MR_U8>());
    case MR_I8: return use(Element<MR_I8>());
    case MR_I16: return use(Element<MR_I16>());
    case MR_I32: return use(Element<MR_I32>());
    case MR_I64: return use(Element<MR_I64>());
    case MR_F32: return use(Element<MR_F32>());
    case MR_F64: return use(Element<MR_F64>());
    case MR_F16: return use(Element<MR_F16>());
    case MR_BF16: return use(Element<MR_BF16>());
    case MR_E4M3FN: return use(Element<MR_E4M3FN>());
    case MR_E5M2: return use(Element<MR_E5M2>());
    case MR_E4M3FNUZ: return use(Element<MR_E4M3FNUZ>());
    case MR_E5M2FNUZ: return use(Element<MR_E5M2FNUZ>());
    case MR_BOOL: return use(Element<MR_BOOL>());
    case MR_NUM_DTYPES: return;
  }
  // clang-format on
}

// Whether an element is of an fp8 format.
template <typename Element>
constexpr bool kIsFp8 = false;
template <typename Format>
constexpr bool kIsFp8<SmallElement<Format>> = sizeof(typename Format::Storage) == 1;

// The same with the format of an fp8 dtype, use(E4M3FN()); nothing for others.
template <typename Use>
void with_fp8(mr_dtype dtype, const Use& use) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    if constexpr (kIsFp8<Element>) use(typename Element::Format());
  });
}

// Conversions go over one of three wide types: float (all floating types up to fp32), double, or int64_t.
// clang-format off
template <typename Value> struct WideOf { using type = int64_t; };
template <> struct WideOf<float> { using type = float; };
template <> struct WideOf<double> { using type = double; };
// clang-format on
template <typename Element>
using Wide = typename WideOf<typename Element::Value>::type;

// Towards zero. What int64_t can't hold becomes its nearest value, NaN becomes 0.
template <typename Float>
MR_HOST_DEVICE int64_t to_integer(Float value) {
  constexpr Float kLimit = Float(9223372036854775808.0);
  if (value != value) return 0;
  if (value >= kLimit) return INT64_MAX;
  if (value < -kLimit) return INT64_MIN;
  return int64_t(value);
}

MR_HOST_DEVICE int64_t to_integer(int64_t value) { return value; }

template <typename To, typename From>
struct Narrow {  // integers: the low bits
  MR_HOST_DEVICE static To of(From wide) { return To(to_integer(wide)); }
};
template <typename From>
struct Narrow<float, From> {
  MR_HOST_DEVICE static float of(From wide) { return float(wide); }
};
template <typename From>
struct Narrow<double, From> {
  MR_HOST_DEVICE static double of(From wide) { return double(wide); }
};
template <typename From>
struct Narrow<bool, From> {
  MR_HOST_DEVICE static bool of(From wide) { return wide != From(0); }
};

// One element as torch's .to() converts it. A float outside of an integer's range, which torch leaves undefined, is
// taken to int64_t by to_integer and from there by its low bits.
template <typename To, typename From>
MR_HOST_DEVICE typename To::Storage converted(typename From::Storage stored) {
  return To::store(Narrow<typename To::Value, Wide<From>>::of(Wide<From>(From::load(stored))));
}

}  // namespace mr
