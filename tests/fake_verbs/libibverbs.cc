// The fake fabric in the place of libibverbs.so.1, so that whole programs run on it: the processes that are started
// with its folder first in LD_LIBRARY_PATH, and the same FAKE_VERBS_FABRIC, reach each other's memory through two
// cards. Calls named in FAKE_VERBS_HOLD ("destroy_qp,dereg_mr") never return. With FAKE_VERBS_NO_DMABUF the kernel has
// no dma-bufs; with FAKE_VERBS_PEER_MEMORY the driver of the fake GPU has a peer memory module.
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "base/list.h"

#include "../csrc/fake_wire.h"

namespace {

using mr::test::FakeFabric;
using mr::test::FakeWire;

const mr::Verbs& verbs() {
  static const mr::Verbs& table = [&]() -> const mr::Verbs& {
    auto* const fabric = new FakeFabric();  // threads use it until the process ends
    for (uint8_t i = 0; i < 2; ++i) fabric->add_card("fake" + std::to_string(i), i);
    if (const char* names = std::getenv("FAKE_VERBS_HOLD"); names != nullptr)
      for (const std::string& name : mr::split_list(names)) fabric->gates().hold(name);
    if (const char* name = std::getenv("FAKE_VERBS_FABRIC"); name != nullptr) new FakeWire(*fabric, name);
    return FakeFabric::verbs();
  }();
  return table;
}

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

// By its address, which the GPU's driver translates.
ibv_mr* reg_peer_memory(ibv_pd* domain, void* address, size_t length, int access) {
  void* const driver = ::dlopen("libfake_gpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  using Pages = int(const void*, size_t, int*, uint64_t*);
  auto* const pages = reinterpret_cast<Pages*>(::dlsym(driver, "fake_gpu_pages"));
  int fd = -1;
  uint64_t offset = 0;
  ibv_mr* made = nullptr;
  if (pages != nullptr && pages(address, length, &fd, &offset) == 0) {
    made = verbs().reg_dmabuf_mr(domain, offset, length, reinterpret_cast<uintptr_t>(address), fd, access);
    ::close(fd);
  }
  ::dlclose(driver);
  return made;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT ibv_device** ibv_get_device_list(int* count) { return verbs().get_device_list(count); }
EXPORT void ibv_free_device_list(ibv_device** list) { verbs().free_device_list(list); }
EXPORT const char* ibv_get_device_name(ibv_device* device) { return verbs().get_device_name(device); }
EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  ibv_context* const context = verbs().open_device(device);
  if (context == nullptr) return nullptr;
  context->ops.poll_cq = verbs().poll_cq;
  context->ops.req_notify_cq = verbs().req_notify_cq;
  context->ops.post_send = verbs().post_send;
  context->ops.post_recv = verbs().post_recv;
  return context;
}
EXPORT int ibv_close_device(ibv_context* context) { return verbs().close_device(context); }
EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attr) { return verbs().query_device(context, attr); }
EXPORT int ibv_query_port(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attr) {
  return verbs().query_port(context, port, reinterpret_cast<ibv_port_attr*>(attr));
}
EXPORT int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  return verbs().query_gid(context, port, index, gid);
}
EXPORT int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t,
                             size_t) {
  return verbs().query_gid_ex(context, port, index, entry);
}
EXPORT int ibv_query_pkey(ibv_context* context, uint8_t port, int index, __be16* pkey) {
  return verbs().query_pkey(context, port, index, pkey);
}
EXPORT int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  return verbs().get_async_event(context, event);
}
EXPORT void ibv_ack_async_event(ibv_async_event* event) { verbs().ack_async_event(event); }
EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) { return verbs().alloc_pd(context); }
EXPORT int ibv_dealloc_pd(ibv_pd* domain) { return verbs().dealloc_pd(domain); }
// The kernel pins what a processor can reach: not memory of a device.
EXPORT ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, size_t length, int access) {
  char first;
  const iovec to{&first, 1}, from{address, 1};
  if (length > 0 && ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) != 1) {
    ibv_mr* const made = is_set("FAKE_VERBS_PEER_MEMORY") ? reg_peer_memory(domain, address, length, access) : nullptr;
    if (made == nullptr) errno = EFAULT;
    return made;
  }
  return verbs().reg_mr(domain, address, length, access);
}
EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  if (is_set("FAKE_VERBS_NO_DMABUF")) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  return verbs().reg_dmabuf_mr(domain, offset, length, iova, fd, access);
}
EXPORT int ibv_dereg_mr(ibv_mr* region) { return verbs().dereg_mr(region); }
EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) { return verbs().create_comp_channel(context); }
EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) { return verbs().destroy_comp_channel(channel); }
EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* mine, ibv_comp_channel* channel, int vector) {
  return verbs().create_cq(context, entries, mine, channel, vector);
}
EXPORT int ibv_destroy_cq(ibv_cq* queue) { return verbs().destroy_cq(queue); }
EXPORT int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** mine) {
  return verbs().get_cq_event(channel, queue, mine);
}
EXPORT void ibv_ack_cq_events(ibv_cq* queue, unsigned count) { verbs().ack_cq_events(queue, count); }
EXPORT ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attr) { return verbs().create_qp(domain, attr); }
EXPORT int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attr, int mask) { return verbs().modify_qp(pair, attr, mask); }
EXPORT int ibv_query_qp(ibv_qp* pair, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  return verbs().query_qp(pair, attr, mask, init);
}
EXPORT int ibv_destroy_qp(ibv_qp* pair) { return verbs().destroy_qp(pair); }
