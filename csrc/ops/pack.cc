// torch.ops.monarch_rdma: strided tensors to and from one contiguous one.
//
//   pack(Tensor[] parts, Tensor(a!) out)                 the parts' bytes, one after the other
//   unpack(Tensor packed, Tensor(a!)[] outs)             the reverse
//   pack_cast(Tensor[] parts, Tensor(a!) out)            the parts' elements, each as .to(out.dtype) has it
//   unpack_cast(Tensor packed, Tensor(a!)[] outs)        the reverse
#include <torch/csrc/stable/library.h>

#include <string>

#include "run.h"

namespace mr::ops {
namespace {

// Both sides of a copy, checked: as large as each other, and apart. With `cast`, as many elements as each other.
Packing packing_of(const std::vector<Tensor>& tensors, const char* parts, const Tensor& tensor, const char* packed,
                   bool cast) {
  Packing packing;
  packing.packed = contiguous_bytes(tensor, packed);
  packing.cast = cast;
  if (cast) packing.packed_dtype = dtype_of(tensor, packed);
  uint64_t bytes = 0, elements = 0;
  for (const Tensor& part : tensors) {
    packing.parts.push_back(bytes_of(part, parts));
    if (cast) packing.dtypes.push_back(dtype_of(part, parts));
    check_apart(packing.packed, packed, packing.parts.back(), (std::string("an element of ") + parts).c_str());
    bytes += packing.parts.back().total;
    elements += uint64_t(part.numel());
  }
  if (cast) {
    STD_TORCH_CHECK(elements == uint64_t(tensor.numel()), packed, " has ", tensor.numel(), " elements, ", parts,
                    " have ", elements, " together");
  } else {
    STD_TORCH_CHECK(bytes == packing.packed.total, packed, " has ", packing.packed.total, " bytes, ", parts, " have ",
                    bytes, " together");
  }
  return packing;
}

void unpack_into(const Packing& packing) {
  for (const TensorBytes& part : packing.parts) check_writable(part, "outs");
  run_unpack(packing);
}

void pack(const std::vector<Tensor>& parts, const Tensor& out) {
  run_pack(packing_of(parts, "parts", out, "out", false));
}

void unpack(const Tensor& packed, const std::vector<Tensor>& outs) {
  unpack_into(packing_of(outs, "outs", packed, "packed", false));
}

void pack_cast(const std::vector<Tensor>& parts, const Tensor& out) {
  run_pack(packing_of(parts, "parts", out, "out", true));
}

void unpack_cast(const Tensor& packed, const std::vector<Tensor>& outs) {
  unpack_into(packing_of(outs, "outs", packed, "packed", true));
}

}  // namespace
}  // namespace mr::ops

#if defined(MR_OPS_SCHEMAS)
STABLE_TORCH_LIBRARY_FRAGMENT(MR_OPS_LIBRARY, m) {
  m.def("pack(Tensor[] parts, Tensor(a!) out) -> ()");
  m.def("unpack(Tensor packed, Tensor(a!)[] outs) -> ()");
  m.def("pack_cast(Tensor[] parts, Tensor(a!) out) -> ()");
  m.def("unpack_cast(Tensor packed, Tensor(a!)[] outs) -> ()");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(MR_OPS_LIBRARY, MR_OPS_KEY, m) {
  m.impl("pack", TORCH_BOX(&mr::ops::pack));
  m.impl("unpack", TORCH_BOX(&mr::ops::unpack));
  m.impl("pack_cast", TORCH_BOX(&mr::ops::pack_cast));
  m.impl("unpack_cast", TORCH_BOX(&mr::ops::unpack_cast));
}
