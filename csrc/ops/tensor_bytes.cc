#include "tensor_bytes.h"

#include <algorithm>

namespace mr::ops {
namespace {

struct Dim {
  uint64_t count, stride;
};

// Dimensions outer to inner in bytes, size 1 dropped, neighbours that step alike merged.
std::vector<Dim> merged_dims(const Tensor& tensor) {
  std::vector<Dim> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    Dim dim{uint64_t(tensor.size(d)), uint64_t(tensor.stride(d)) * tensor.element_size()};
    if (dim.count == 1) continue;
    if (!dims.empty() && dims.back().stride == dim.stride * dim.count) {
      dims.back() = {dims.back().count * dim.count, dim.stride};
    } else {
      dims.push_back(dim);
    }
  }
  return dims;
}

}  // namespace

TensorBytes bytes_of(const Tensor& tensor, const char* argument) {
  check_place(tensor, argument);
  TensorBytes bytes;
  if (!tensor.is_cpu()) bytes.device = tensor.get_device_index();
  bytes.base = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  bytes.total = uint64_t(tensor.numel()) * tensor.element_size();
  if (bytes.total == 0) return bytes;

  std::vector<Dim> dims = merged_dims(tensor);
  bytes.view.run = bytes.extent = tensor.element_size();
  for (const Dim& dim : dims) bytes.extent += (dim.count - 1) * dim.stride;
  if (!dims.empty() && dims.back().stride == bytes.view.run) {
    bytes.view.run *= dims.back().count;
    dims.pop_back();
  }
  STD_TORCH_CHECK(dims.size() <= MR_MAX_DIMS, argument, " has ", dims.size(),
                  " dimensions that cannot be merged; at most ", int(MR_MAX_DIMS),
                  " are supported: make it contiguous");
  bytes.view.ndim = uint32_t(dims.size());
  for (size_t d = 0; d < dims.size(); ++d) {
    bytes.view.count[d] = dims[d].count;
    bytes.view.stride[d] = dims[d].stride;
  }
  return bytes;
}

// A destination two of whose elements may share memory has no defined content.
void check_writable(const TensorBytes& bytes, const char* argument) {
  std::vector<Dim> dims;
  for (uint32_t d = 0; d < bytes.view.ndim; ++d) dims.push_back({bytes.view.count[d], bytes.view.stride[d]});
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  uint64_t inner = bytes.view.run;
  for (const Dim& dim : dims) {
    STD_TORCH_CHECK(dim.stride >= inner, argument, " has elements that share memory (expanded or overlapping strides)");
    inner += (dim.count - 1) * dim.stride;
  }
}

mr_dtype dtype_of(const Tensor& tensor, const char* argument) {
  using torch::headeronly::ScalarType;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  STD_TORCH_CHECK(address % tensor.element_size() == 0, argument, " has elements that are not aligned to their size");
  switch (tensor.scalar_type()) {
    case ScalarType::Byte:
      return MR_U8;
    case ScalarType::Char:
      return MR_I8;
    case ScalarType::Short:
      return MR_I16;
    case ScalarType::Int:
      return MR_I32;
    case ScalarType::Long:
      return MR_I64;
    case ScalarType::Float:
      return MR_F32;
    case ScalarType::Double:
      return MR_F64;
    case ScalarType::Half:
      return MR_F16;
    case ScalarType::BFloat16:
      return MR_BF16;
    case ScalarType::Float8_e4m3fn:
      return MR_E4M3FN;
    case ScalarType::Float8_e5m2:
      return MR_E5M2;
    case ScalarType::Float8_e4m3fnuz:
      return MR_E4M3FNUZ;
    case ScalarType::Float8_e5m2fnuz:
      return MR_E5M2FNUZ;
    case ScalarType::Bool:
      return MR_BOOL;
    default:
      STD_TORCH_CHECK(false, argument, " has a dtype that no kernel computes with: ", tensor.scalar_type());
  }
}

TensorBytes contiguous_bytes(const Tensor& tensor, const char* argument) {
  TensorBytes bytes = bytes_of(tensor, argument);
  STD_TORCH_CHECK(bytes.view.ndim == 0, argument, " must be contiguous");
  return bytes;
}

void check_apart(const TensorBytes& a, const char* a_argument, const TensorBytes& b, const char* b_argument) {
  STD_TORCH_CHECK(!a.overlaps(b), a_argument, " shares memory with ", b_argument);
}

}  // namespace mr::ops
