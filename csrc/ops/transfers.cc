// torch.ops.monarch_rdma: transfers.
//
//   read_(Tensor(a!) dst, int remote, float timeout)    the whole remote region into dst
//   write(Tensor src, int remote, float timeout)        src into the whole remote region
//
// `remote` is an open mr_remote* as an integer. Tensors are of any shape and strides, and are read and written in
// logical (row-major) order. Calls block without the GIL.
#include <torch/csrc/stable/library.h>

#include "tensor_bytes.h"

namespace mr::ops {
namespace {

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
  const TensorBytes bytes = bytes_of(dst, "dst");
  check_writable(bytes, "dst");
  transfer(remote, MR_READ, bytes, "dst", timeout);
}

void write_from(const Tensor& src, int64_t remote, double timeout) {
  transfer(remote, MR_WRITE, bytes_of(src, "src"), "src", timeout);
}

}  // namespace
}  // namespace mr::ops

STABLE_TORCH_LIBRARY_FRAGMENT(monarch_rdma, m) {
  m.def("read_(Tensor(a!) dst, int remote, float timeout) -> ()");
  m.def("write(Tensor src, int remote, float timeout) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(monarch_rdma, CPU, m) {
  m.impl("read_", TORCH_BOX(&mr::ops::read_into));
  m.impl("write", TORCH_BOX(&mr::ops::write_from));
}
