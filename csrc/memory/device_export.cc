// Memory of a device as a dma-buf, for RDMA cards. The kernel's unit is the page, the caller's is the byte: what is
// exported begins at the page, and the offset says where in it the memory begins.
#include <unistd.h>

#include "device.h"

namespace mr {
namespace {

constexpr int kDmaBufFd = 1;  // hipMemRangeHandleTypeDmaBufFd, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

struct Pages {
  uint64_t begin, size;
};
Pages pages_of(const void* address, uint64_t size) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t first = reinterpret_cast<uintptr_t>(address), begin = first / page * page;
  return {begin, (first + size - begin + page - 1) / page * page};
}

void note(std::string* tried, const std::string& what) { *tried += (tried->empty() ? "" : "; ") + what; }

}  // namespace

DmaBuf Gpu::export_by_runtime(const void* address, uint64_t size, std::string* tried) const {
  const char* const name = is_hip ? "hipMemGetHandleForAddressRange" : "cuMemGetHandleForAddressRange";
  if (calls.MemGetHandleForAddressRange == nullptr) {
    note(tried, std::string("no ") + name);
    return {};
  }
  const Pages pages = pages_of(address, size);
  int fd = -1;
  const int code =
      calls.MemGetHandleForAddressRange(&fd, reinterpret_cast<void*>(pages.begin), pages.size, kDmaBufFd, 0);
  if (code == 0) return {Fd(fd), reinterpret_cast<uintptr_t>(address) - pages.begin};
  note(tried, failure(MR_REGISTRATION, name, std::to_string(pages.size) + " bytes", code).text);
  return {};
}

DmaBuf Gpu::export_by_hsa(const void* address, uint64_t size, std::string* tried) const {
  if (calls.hsa_init == nullptr || (calls.hsa_export_dmabuf == nullptr && calls.hsa_export_dmabuf_v2 == nullptr)) {
    note(tried, "no hsa_amd_portable_export_dmabuf");
    return {};
  }
  static const int initialised = calls.hsa_init();  // counted; HIP holds one of its own
  DmaBuf out;
  int fd = -1, code = initialised;
  if (code == 0)
    code = calls.hsa_export_dmabuf_v2 != nullptr ? calls.hsa_export_dmabuf_v2(address, size, &fd, &out.offset, 0)
                                                 : calls.hsa_export_dmabuf(address, size, &fd, &out.offset);
  if (code != 0) {
    note(tried, "hsa_amd_portable_export_dmabuf: status " + std::to_string(code));
    return {};
  }
  out.fd = Fd(fd);
  return out;
}

DmaBuf Gpu::export_dmabuf(const void* address, uint64_t size) const {
  std::string tried;
  DmaBuf out = export_by_runtime(address, size, &tried);
  if (!out.fd.valid() && is_hip) out = export_by_hsa(address, size, &tried);
  if (!out.fd.valid())
    throw Error(MR_REGISTRATION, "no dma-buf of " + std::to_string(size) + " bytes of device memory: " + tried);
  return out;
}

}  // namespace mr
