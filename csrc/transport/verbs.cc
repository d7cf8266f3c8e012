#include "verbs.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <mutex>

namespace mr {
namespace {

const char kLibrary[] = "libibverbs.so.1";

// The newest version of a call that the library has; the header's struct layouts belong to it.
template <typename Call>
bool find(void* library, const char* name, Call& call) {
  call = reinterpret_cast<Call>(::dlsym(library, name));
  return call != nullptr;
}

int query_device_ex(ibv_context* context, ibv_device_attr_ex* attr) {
  verbs_context* const extended = verbs_get_ctx_op(context, query_device_ex);
  if (extended == nullptr) return EOPNOTSUPP;
  std::memset(attr, 0, sizeof *attr);
  return extended->query_device_ex(context, nullptr, attr, sizeof *attr);
}

// The library's own call knows the fields up to `flags`, which is all we look at.
int (*query_port_basic)(ibv_context*, uint8_t, ibv_port_attr*);
int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) {
  std::memset(attr, 0, sizeof *attr);
  return query_port_basic(context, port, attr);
}

int (*query_gid_ex_sized)(ibv_context*, uint32_t, uint32_t, ibv_gid_entry*, uint32_t, size_t);
int query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry) {
  return query_gid_ex_sized(context, port, index, entry, 0, sizeof *entry);
}

int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) { return cq->context->ops.poll_cq(cq, entries, wc); }
int req_notify_cq(ibv_cq* cq, int solicited_only) { return cq->context->ops.req_notify_cq(cq, solicited_only); }
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr) { return qp->context->ops.post_send(qp, wr, bad_wr); }
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) { return qp->context->ops.post_recv(qp, wr, bad_wr); }

bool load(void* library, Verbs* out) {
  out->query_device_ex = query_device_ex;
  out->query_port = query_port;
  out->poll_cq = poll_cq;
  out->req_notify_cq = req_notify_cq;
  out->post_send = post_send;
  out->post_recv = post_recv;
  out->query_gid_ex = find(library, "_ibv_query_gid_ex", query_gid_ex_sized) ? query_gid_ex : nullptr;
  find(library, "ibv_reg_dmabuf_mr", out->reg_dmabuf_mr);
  find(library, "ibv_is_fork_initialized", out->is_fork_initialized);
  find(library, "ibv_fork_init", out->fork_init);
  return find(library, "ibv_get_device_list", out->get_device_list) &&
         find(library, "ibv_free_device_list", out->free_device_list) &&
         find(library, "ibv_get_device_name", out->get_device_name) &&
         find(library, "ibv_open_device", out->open_device) && find(library, "ibv_close_device", out->close_device) &&
         find(library, "ibv_query_device", out->query_device) && find(library, "ibv_query_port", query_port_basic) &&
         find(library, "ibv_query_gid", out->query_gid) && find(library, "ibv_query_pkey", out->query_pkey) &&
         find(library, "ibv_get_async_event", out->get_async_event) &&
         find(library, "ibv_ack_async_event", out->ack_async_event) && find(library, "ibv_alloc_pd", out->alloc_pd) &&
         find(library, "ibv_dealloc_pd", out->dealloc_pd) && find(library, "ibv_reg_mr", out->reg_mr) &&
         find(library, "ibv_dereg_mr", out->dereg_mr) &&
         find(library, "ibv_create_comp_channel", out->create_comp_channel) &&
         find(library, "ibv_destroy_comp_channel", out->destroy_comp_channel) &&
         find(library, "ibv_create_cq", out->create_cq) && find(library, "ibv_destroy_cq", out->destroy_cq) &&
         find(library, "ibv_get_cq_event", out->get_cq_event) &&
         find(library, "ibv_ack_cq_events", out->ack_cq_events) && find(library, "ibv_create_qp", out->create_qp) &&
         find(library, "ibv_modify_qp", out->modify_qp) && find(library, "ibv_query_qp", out->query_qp) &&
         find(library, "ibv_destroy_qp", out->destroy_qp);
}

// Kernels before 5.12 copy registered pages at a fork, also for the parent, unless the library is told to prevent it.
void make_fork_safe(const Verbs& verbs) {
  if (verbs.is_fork_initialized == nullptr || verbs.fork_init == nullptr) return;
  if (verbs.is_fork_initialized() == IBV_FORK_DISABLED) (void)verbs.fork_init();
}

std::string memlock_advice() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; at most " + std::to_string(limit.rlim_cur) +
         " bytes may be locked by this user (raise it with `ulimit -l unlimited`, or LimitMEMLOCK= of the service)";
}

}  // namespace

const Verbs* Verbs::installed(std::string* why) {
  static std::once_flag once;
  static Verbs verbs{};
  static std::string problem;
  std::call_once(once, [] {
    void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      problem = ::dlerror();
    else if (!load(library, &verbs))
      problem = std::string(kLibrary) + " lacks calls that are needed; it is too old";
    else
      make_fork_safe(verbs);
  });
  if (problem.empty()) return &verbs;
  if (why != nullptr) *why = problem;
  return nullptr;
}

Status verbs_failure(int kind, const char* call, const std::string& asked, int error) {
  Status status = fail(kind, std::string(call) + " of " + asked, error);
  if (kind == MR_REGISTRATION && (error == ENOMEM || error == EAGAIN)) status.text += memlock_advice();
  return status;
}

const char* completion_text(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_LEN_ERR:
      return "local length error";
    case IBV_WC_LOC_QP_OP_ERR:
      return "local queue pair operation error";
    case IBV_WC_LOC_EEC_OP_ERR:
      return "local EE context operation error";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
      return "flushed";
    case IBV_WC_MW_BIND_ERR:
      return "memory window bind error";
    case IBV_WC_BAD_RESP_ERR:
      return "bad response";
    case IBV_WC_LOC_ACCESS_ERR:
      return "local access error";
    case IBV_WC_REM_INV_REQ_ERR:
      return "remote invalid request";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error";
    case IBV_WC_REM_OP_ERR:
      return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR:
      return "no acknowledgement after all retries";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "the other side was not ready to receive after all retries";
    case IBV_WC_LOC_RDD_VIOL_ERR:
      return "local RDD violation";
    case IBV_WC_REM_INV_RD_REQ_ERR:
      return "remote invalid RD request";
    case IBV_WC_REM_ABORT_ERR:
      return "aborted by the other side";
    case IBV_WC_INV_EECN_ERR:
      return "invalid EE context number";
    case IBV_WC_INV_EEC_STATE_ERR:
      return "invalid EE context state";
    case IBV_WC_FATAL_ERR:
      return "fatal error of the card";
    case IBV_WC_RESP_TIMEOUT_ERR:
      return "response timeout";
    case IBV_WC_GENERAL_ERR:
      return "general error";
    case IBV_WC_TM_ERR:
      return "tag matching error";
    case IBV_WC_TM_RNDV_INCOMPLETE:
      return "tag matching rendezvous incomplete";
  }
  return "unknown completion status";
}

std::shared_ptr<VerbsContext> VerbsContext::open(const Verbs& verbs, const std::string& device_name) {
  int count = 0;
  ibv_device** const list = verbs.get_device_list(&count);
  if (list == nullptr) throw Error(verbs_failure(MR_CONFIG, "ibv_get_device_list", "all devices", errno));
  ibv_context* raw = nullptr;
  bool found = false;
  for (int i = 0; i < count && !found; ++i) {
    found = verbs.get_device_name(list[i]) == device_name;
    if (found) raw = verbs.open_device(list[i]);
  }
  const int error = errno;
  verbs.free_device_list(list);
  if (!found) throw Error(MR_CONFIG, "there is no RDMA device " + device_name);
  if (raw == nullptr) throw Error(verbs_failure(MR_CONFIG, "ibv_open_device", device_name, error));
  return std::shared_ptr<VerbsContext>(new VerbsContext(verbs, raw, device_name));
}

VerbsContext::VerbsContext(const Verbs& verbs, ibv_context* context, std::string name)
    : verbs_(verbs), context_(context), name_(std::move(name)), pid_(this_pid()) {
  if (const int error = verbs.query_device(context, &attributes_); error != 0) {
    (void)verbs.close_device(context);
    throw Error(verbs_failure(MR_CONFIG, "ibv_query_device", name_, error));
  }
  ibv_device_attr_ex extended{};
  constexpr uint32_t kWanted = IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_WRITE;
  on_demand_paging_ = verbs.query_device_ex(context, &extended) == 0 &&
                      (extended.odp_caps.general_caps & IBV_ODP_SUPPORT) != 0 &&
                      (extended.odp_caps.per_transport_caps.rc_odp_caps & kWanted) == kWanted;
}

VerbsContext::~VerbsContext() {
  if (is_ours()) (void)verbs_.close_device(context_);
}

ProtectionDomain::ProtectionDomain(const VerbsContextRef& context)
    : VerbsChild(context, context->verbs().alloc_pd(context->get())) {
  if (get() == nullptr) throw Error(verbs_failure(MR_RESOURCE_EXHAUSTED, "ibv_alloc_pd", context->name(), errno));
}

CompletionChannel::CompletionChannel(const VerbsContextRef& context)
    : VerbsChild(context, context->verbs().create_comp_channel(context->get())) {
  if (get() == nullptr)
    throw Error(verbs_failure(MR_RESOURCE_EXHAUSTED, "ibv_create_comp_channel", context->name(), errno));
  if (const int flags = ::fcntl(fd(), F_GETFL); flags < 0 || ::fcntl(fd(), F_SETFL, flags | O_NONBLOCK) != 0)
    throw Error(verbs_failure(MR_RESOURCE_EXHAUSTED, "fcntl", "the completion channel of " + context->name(), errno));
}

CompletionQueue::CompletionQueue(CompletionChannelRef channel, int entries, void* cq_context)
    : VerbsChild(channel->context(),
                 channel->verbs().create_cq(channel->context()->get(), entries, cq_context, channel->get(), 0)),
      channel_(std::move(channel)) {
  if (get() == nullptr)
    throw Error(verbs_failure(MR_RESOURCE_EXHAUSTED, "ibv_create_cq",
                              std::to_string(entries) + " entries at " + context()->name(), errno));
}

MemoryRegion::MemoryRegion(ProtectionDomainRef domain, ibv_mr* made, const char* call, const std::string& of)
    : VerbsChild(domain->context(), made), domain_(std::move(domain)) {
  if (made == nullptr) throw Error(verbs_failure(MR_REGISTRATION, call, of + " at " + context()->name(), errno));
  lkey_ = made->lkey;
  rkey_ = made->rkey;
}

MemoryRegion::MemoryRegion(ProtectionDomainRef domain, void* address, uint64_t length, int access)
    : MemoryRegion(domain, domain->verbs().reg_mr(domain->get(), address, length, access), "ibv_reg_mr",
                   std::to_string(length) + " bytes with access " + std::to_string(access)) {}

MemoryRegion::MemoryRegion(ProtectionDomainRef domain, const DmaBuf& exported, void* address, uint64_t length,
                           int access)
    : MemoryRegion(domain,
                   domain->verbs().reg_dmabuf_mr(domain->get(), exported.offset, length,
                                                 reinterpret_cast<uintptr_t>(address), exported.fd.get(), access),
                   "ibv_reg_dmabuf_mr",
                   std::to_string(length) + " bytes of device memory with access " + std::to_string(access)) {}

}  // namespace mr
