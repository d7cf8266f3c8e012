// torch.ops.monarch_rdma: strided tensors to and from one contiguous one.
//
//   pack(Tensor[] parts, Tensor(a!) out)                 the parts' bytes, one after the other
//   unpack(Tensor packed, Tensor(a!)[] outs)             the reverse
//   pack_cast(Tensor[] parts, Tensor(a!) out)            the parts' elements, each as .to(out.dtype) has it
//   unpack_cast(Tensor packed, Tensor(a!)[] outs)        the reverse
#include <torch/csrc/stable/library.h>

#include "../kernels/kernels.h"
#include "tensor_bytes.h"

namespace mr::ops {
namespace {

// Both sides of a copy, checked: as large as each other, and apart.
class Packing {
 public:
  Packing(const std::vector<Tensor>& tensors, const char* parts, const Tensor& packed, const char* packed_name)
      : packed_(contiguous_bytes(packed, packed_name)) {
    for (const Tensor& tensor : tensors) {
      const TensorBytes bytes = bytes_of(tensor, parts);
      STD_TORCH_CHECK(!bytes.overlaps(packed_), packed_name, " shares memory with an element of ", parts);
      parts_.push_back(bytes);
    }
  }

  void check_writable_parts(const char* argument) const {
    for (const TensorBytes& part : parts_) check_writable(part, argument);
  }

  // Bytes, or elements of these dtypes.
  void fill(kernels::Boxes& boxes, const std::vector<mr_dtype>& dtypes = {}) const {
    for (size_t i = 0; i < parts_.size(); ++i)
      boxes.add(parts_[i].base, parts_[i].view, dtypes.empty() ? MR_U8 : dtypes[i]);
  }

  char* packed() const { return packed_.base; }
  uint64_t packed_bytes() const { return packed_.total; }

 private:
  TensorBytes packed_;
  std::vector<TensorBytes> parts_;
};

void check_bytes(const Packing& packing, const char* packed, const kernels::Boxes& boxes, const char* parts) {
  STD_TORCH_CHECK(boxes.bytes() == packing.packed_bytes(), packed, " has ", packing.packed_bytes(), " bytes, ", parts,
                  " have ", boxes.bytes(), " together");
}

void check_elements(const Tensor& tensor, const char* packed, const kernels::Boxes& boxes, const char* parts) {
  STD_TORCH_CHECK(boxes.elements() == uint64_t(tensor.numel()), packed, " has ", tensor.numel(), " elements, ", parts,
                  " have ", boxes.elements(), " together");
}

std::vector<mr_dtype> dtypes_of(const std::vector<Tensor>& tensors, const char* argument) {
  std::vector<mr_dtype> dtypes;
  for (const Tensor& tensor : tensors) dtypes.push_back(dtype_of(tensor, argument));
  return dtypes;
}

void pack(const std::vector<Tensor>& parts, const Tensor& out) {
  const Packing packing(parts, "parts", out, "out");
  kernels::Boxes boxes;
  packing.fill(boxes);
  check_bytes(packing, "out", boxes, "parts");
  in_ranges(boxes.bytes(), 1, [&](uint64_t begin, uint64_t end) { boxes.pack(packing.packed(), begin, end); });
}

void unpack(const Tensor& packed, const std::vector<Tensor>& outs) {
  const Packing packing(outs, "outs", packed, "packed");
  packing.check_writable_parts("outs");
  kernels::Boxes boxes;
  packing.fill(boxes);
  check_bytes(packing, "packed", boxes, "outs");
  in_ranges(boxes.bytes(), 1, [&](uint64_t begin, uint64_t end) { boxes.unpack(packing.packed(), begin, end); });
}

void pack_cast(const std::vector<Tensor>& parts, const Tensor& out) {
  const Packing packing(parts, "parts", out, "out");
  const mr_dtype dtype = dtype_of(out, "out");
  kernels::Boxes boxes;
  packing.fill(boxes, dtypes_of(parts, "parts"));
  check_elements(out, "out", boxes, "parts");
  in_ranges(boxes.elements(), dtype_size(dtype),
            [&](uint64_t begin, uint64_t end) { boxes.pack_cast(dtype, packing.packed(), begin, end); });
}

void unpack_cast(const Tensor& packed, const std::vector<Tensor>& outs) {
  const Packing packing(outs, "outs", packed, "packed");
  packing.check_writable_parts("outs");
  const mr_dtype dtype = dtype_of(packed, "packed");
  kernels::Boxes boxes;
  packing.fill(boxes, dtypes_of(outs, "outs"));
  check_elements(packed, "packed", boxes, "outs");
  in_ranges(boxes.elements(), dtype_size(dtype),
            [&](uint64_t begin, uint64_t end) { boxes.unpack_cast(dtype, packing.packed(), begin, end); });
}

}  // namespace
}  // namespace mr::ops

STABLE_TORCH_LIBRARY_FRAGMENT(monarch_rdma, m) {
  m.def("pack(Tensor[] parts, Tensor(a!) out) -> ()");
  m.def("unpack(Tensor packed, Tensor(a!)[] outs) -> ()");
  m.def("pack_cast(Tensor[] parts, Tensor(a!) out) -> ()");
  m.def("unpack_cast(Tensor packed, Tensor(a!)[] outs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(monarch_rdma, CPU, m) {
  m.impl("pack", TORCH_BOX(&mr::ops::pack));
  m.impl("unpack", TORCH_BOX(&mr::ops::unpack));
  m.impl("pack_cast", TORCH_BOX(&mr::ops::pack_cast));
  m.impl("unpack_cast", TORCH_BOX(&mr::ops::unpack_cast));
}
