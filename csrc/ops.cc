// torch.ops.monarch_rdma.*: the only file that sees torch, through its stable ABI (one binary for every torch >= 2.10).
//
//   read_(Tensor(a!) dst, int remote, float timeout)    the whole remote region into dst
//   write(Tensor src, int remote, float timeout)        src into the whole remote region
//   pack(Tensor[] parts, Tensor(a!) out)                the parts' bytes, one after the other
//   unpack(Tensor packed, Tensor(a!)[] outs)            the reverse
//   engine_version() -> str
//
// `remote` is an open mr_remote* as an integer. Tensors are on the CPU, of any shape and strides, and are read and
// written in logical (row-major) order. Calls block without the GIL.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "engine.h"

namespace {

using torch::stable::Tensor;

// A tensor's bytes as the engine sees them: `view` is relative to `base`.
struct TensorBytes {
  char* base = nullptr;
  mr_view view = {};
  uint64_t total = 0;   // bytes in the tensor
  uint64_t extent = 0;  // bytes from base to the end of the last element

  bool overlaps(const TensorBytes& other) const {
    return total && other.total && base < other.base + other.extent && other.base < base + extent;
  }
};

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

TensorBytes bytes_of(const Tensor& tensor, const char* argument) {
  STD_TORCH_CHECK(tensor.is_cpu(), argument, " must be a CPU tensor");
  TensorBytes bytes;
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

// Copies between a strided tensor and packed bytes; returns the first packed byte after it.
template <typename CopyRun>
char* for_each_run(const TensorBytes& bytes, char* packed, CopyRun copy_run) {
  if (bytes.total == 0) return packed;
  const mr_view& view = bytes.view;
  uint64_t index[MR_MAX_DIMS] = {};
  char* at = bytes.base;
  for (;;) {
    copy_run(at, packed, view.run);
    packed += view.run;
    uint32_t d = view.ndim;
    while (d > 0) {
      --d;
      at += view.stride[d];
      if (++index[d] < view.count[d]) break;
      at -= view.stride[d] * view.count[d];
      index[d] = 0;
      if (d == 0) return packed;
    }
    if (view.ndim == 0) return packed;
  }
}

void transfer(int64_t handle, uint32_t verb, const TensorBytes& local, const char* argument, double timeout) {
  STD_TORCH_CHECK(handle != 0, "remote must be an open handle, got 0");
  auto* remote = reinterpret_cast<mr_remote*>(handle);
  STD_TORCH_CHECK(local.total == mr_remote_size(remote), argument, " has ", local.total, " bytes, the remote region ",
                  mr_remote_size(remote));
  mr_view whole = {};
  whole.run = local.total;
  mr_error error = {};
  mr_op* op = nullptr;
  int kind = mr_transfer(remote, verb, local.base, &local.view, &whole, timeout, 0, 0, 0, &op, &error);
  STD_TORCH_CHECK(kind == MR_OK, static_cast<const char*>(error.message));
  mr_op_wait(op, -1);  // ends by itself: the operation has the deadline
  mr_result result = {};
  kind = mr_op_result(op, &result);
  mr_op_release(op);
  STD_TORCH_CHECK(kind == MR_OK, static_cast<const char*>(result.message));
}

void read_into(const Tensor& dst, int64_t remote, double timeout) {
  TensorBytes bytes = bytes_of(dst, "dst");
  check_writable(bytes, "dst");
  transfer(remote, MR_READ, bytes, "dst", timeout);
}

void write_from(const Tensor& src, int64_t remote, double timeout) {
  transfer(remote, MR_WRITE, bytes_of(src, "src"), "src", timeout);
}

// Checks that `packed` is contiguous, as large as the parts together, and in other memory.
std::vector<TensorBytes> matching_parts(const std::vector<Tensor>& tensors, const char* parts_argument,
                                        const TensorBytes& packed, const char* packed_argument) {
  STD_TORCH_CHECK(packed.view.ndim == 0, packed_argument, " must be contiguous");
  std::vector<TensorBytes> parts;
  uint64_t total = 0;
  for (const Tensor& tensor : tensors) {
    parts.push_back(bytes_of(tensor, parts_argument));
    total += parts.back().total;
    STD_TORCH_CHECK(!parts.back().overlaps(packed), packed_argument, " shares memory with an element of ",
                    parts_argument);
  }
  STD_TORCH_CHECK(total == packed.total, packed_argument, " has ", packed.total, " bytes, ", parts_argument, " have ",
                  total, " together");
  return parts;
}

void pack(const std::vector<Tensor>& parts, const Tensor& out) {
  TensorBytes packed = bytes_of(out, "out");
  char* at = packed.base;
  for (const TensorBytes& part : matching_parts(parts, "parts", packed, "out")) {
    at = for_each_run(part, at, [](char* run, char* bytes, uint64_t size) { std::memcpy(bytes, run, size); });
  }
}

void unpack(const Tensor& source, const std::vector<Tensor>& outs) {
  TensorBytes packed = bytes_of(source, "packed");
  std::vector<TensorBytes> parts = matching_parts(outs, "outs", packed, "packed");
  for (const TensorBytes& part : parts) check_writable(part, "outs");
  char* at = packed.base;
  for (const TensorBytes& part : parts) {
    at = for_each_run(part, at, [](char* run, char* bytes, uint64_t size) { std::memcpy(run, bytes, size); });
  }
}

std::string engine_version() { return mr_version(); }

}  // namespace

STABLE_TORCH_LIBRARY(monarch_rdma, m) {
  m.def("read_(Tensor(a!) dst, int remote, float timeout) -> ()");
  m.def("write(Tensor src, int remote, float timeout) -> ()");
  m.def("pack(Tensor[] parts, Tensor(a!) out) -> ()");
  m.def("unpack(Tensor packed, Tensor(a!)[] outs) -> ()");
  m.def("engine_version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(monarch_rdma, CPU, m) {
  m.impl("read_", TORCH_BOX(&read_into));
  m.impl("write", TORCH_BOX(&write_from));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("unpack", TORCH_BOX(&unpack));
}

STABLE_TORCH_LIBRARY_IMPL(monarch_rdma, CompositeExplicitAutograd, m) {
  m.impl("engine_version", TORCH_BOX(&engine_version));
}

// Importing the module registers the ops; it has nothing else in it.
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
