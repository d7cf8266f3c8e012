// libibverbs, opened at run time: every call stands in one table of functions that a test can replace, and what the
// calls make is owned by handles that close children before parents.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <string>

#include "../base/error.h"
#include "../base/fd.h"
#include "../memory/device.h"

// Macros of the header that would put calls past the table.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace mr {

// The calls as libibverbs has them: 0 is the only success of those that return an int, and errno tells about those that
// return a pointer. Null where the installed library has no such call.
struct Verbs {
  // Devices.
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device** list);
  const char* (*get_device_name)(ibv_device* device);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attr);
  int (*query_device_ex)(ibv_context* context, ibv_device_attr_ex* attr);  // EOPNOTSUPP where the driver has none
  int (*query_port)(ibv_context* context, uint8_t port, ibv_port_attr* attr);
  int (*query_gid)(ibv_context* context, uint8_t port, int index, ibv_gid* gid);
  int (*query_gid_ex)(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry);  // may be null
  int (*query_pkey)(ibv_context* context, uint8_t port, int index, uint16_t* pkey);
  int (*get_async_event)(ibv_context* context, ibv_async_event* event);  // -1 and errno
  void (*ack_async_event)(ibv_async_event* event);

  // Memory.
  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* pd);
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t length, int access);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);  // or null
  int (*dereg_mr)(ibv_mr* mr);

  // Completions.
  ibv_comp_channel* (*create_comp_channel)(ibv_context* context);
  int (*destroy_comp_channel)(ibv_comp_channel* channel);
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel, int vector);
  int (*destroy_cq)(ibv_cq* cq);
  int (*poll_cq)(ibv_cq* cq, int entries, ibv_wc* wc);
  int (*req_notify_cq)(ibv_cq* cq, int solicited_only);
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context);  // -1 and errno
  void (*ack_cq_events)(ibv_cq* cq, unsigned count);

  // Queue pairs.
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr);
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask);
  int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init);
  int (*destroy_qp)(ibv_qp* qp);
  int (*post_send)(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
  int (*post_recv)(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);

  // Fork: what the library does about it, and asking for it. Either may be null.
  ibv_fork_status (*is_fork_initialized)();
  int (*fork_init)();

  // The installed library, fork-safe; null where it can't be used, and then *why says so in a sentence. Opened once per
  // process and never closed.
  static const Verbs* installed(std::string* why);
};

// MR_REGISTRATION or MR_RESOURCE_EXHAUSTED and the like: `call` failed with `error` when `asked` was asked for.
Status verbs_failure(int kind, const char* call, const std::string& asked, int error);
const char* completion_text(ibv_wc_status status);  // "remote access error"
// Of a call that destroys something: there is nothing left of it, be it because the device itself is gone.
inline bool has_ended(int error) { return error == 0 || error == EIO || error == ENODEV; }

// An open device. The table must outlive all handles.
class VerbsContext {
 public:
  // Throws MR_CONFIG.
  static std::shared_ptr<VerbsContext> open(const Verbs& verbs, const std::string& device_name);
  ~VerbsContext();
  VerbsContext(const VerbsContext&) = delete;
  VerbsContext& operator=(const VerbsContext&) = delete;

  const Verbs& verbs() const { return verbs_; }
  ibv_context* get() const { return context_; }
  const std::string& name() const { return name_; }
  const ibv_device_attr& attributes() const { return attributes_; }
  bool has_on_demand_paging() const { return on_demand_paging_; }  // of RC reads and writes
  // A forked child has the parent's descriptors: what it destroyed would be the parent's.
  bool is_ours() const { return is_this_process(pid_); }

 private:
  VerbsContext(const Verbs& verbs, ibv_context* context, std::string name);

  const Verbs& verbs_;
  ibv_context* const context_;
  const std::string name_;
  const int pid_;
  ibv_device_attr attributes_{};
  bool on_demand_paging_ = false;
};
using VerbsContextRef = std::shared_ptr<VerbsContext>;

// Everything that a context is parent of; it lives as long as its last child. Making one throws.
template <typename T, int (*Verbs::*Destroy)(T*)>
class VerbsChild {
 public:
  VerbsChild(VerbsContextRef context, T* raw) : context_(std::move(context)), raw_(raw) {}
  ~VerbsChild() { destroy(); }
  VerbsChild(const VerbsChild&) = delete;
  VerbsChild& operator=(const VerbsChild&) = delete;

  // 0, or the errno of the failure. Once.
  int destroy() {
    T* const raw = std::exchange(raw_, nullptr);
    return raw == nullptr || !context_->is_ours() ? 0 : (verbs().*Destroy)(raw);
  }
  T* get() const { return raw_; }
  const Verbs& verbs() const { return context_->verbs(); }
  const VerbsContextRef& context() const { return context_; }

 private:
  VerbsContextRef context_;
  T* raw_;
};

class ProtectionDomain : public VerbsChild<ibv_pd, &Verbs::dealloc_pd> {
 public:
  explicit ProtectionDomain(const VerbsContextRef& context);
};
using ProtectionDomainRef = std::shared_ptr<ProtectionDomain>;

class CompletionChannel : public VerbsChild<ibv_comp_channel, &Verbs::destroy_comp_channel> {
 public:
  explicit CompletionChannel(const VerbsContextRef& context);  // its descriptor does not block
  int fd() const { return get()->fd; }
};
using CompletionChannelRef = std::shared_ptr<CompletionChannel>;

class CompletionQueue : public VerbsChild<ibv_cq, &Verbs::destroy_cq> {
 public:
  CompletionQueue(CompletionChannelRef channel, int entries, void* cq_context);
  ~CompletionQueue() { destroy(); }

 private:
  const CompletionChannelRef channel_;
};

// One registered range. The address of remote requests is that of the memory.
class MemoryRegion : public VerbsChild<ibv_mr, &Verbs::dereg_mr> {
 public:
  MemoryRegion(ProtectionDomainRef domain, void* address, uint64_t length, int access);
  // Of a device's memory at `address`, by its dma-buf. Only where the library has reg_dmabuf_mr.
  MemoryRegion(ProtectionDomainRef domain, const DmaBuf& exported, void* address, uint64_t length, int access);
  ~MemoryRegion() { destroy(); }
  uint32_t lkey() const { return lkey_; }  // also once it is destroyed
  uint32_t rkey() const { return rkey_; }

 private:
  MemoryRegion(ProtectionDomainRef domain, ibv_mr* made, const char* call, const std::string& of);

  const ProtectionDomainRef domain_;
  uint32_t lkey_ = 0, rkey_ = 0;
};

}  // namespace mr
