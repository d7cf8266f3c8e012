// The calls of libibverbs on the fake fabric, as a table.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_fabric.h"

namespace mr::test {

namespace fake {

struct Calls {
  static FakeFabric& self() { return FakeFabric::self(); }

  static ibv_device** get_device_list(int* count) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    if ((errno = fabric.call("get_device_list")) != 0) return nullptr;
    auto** list = new ibv_device*[fabric.cards_.size() + 1]();
    for (size_t i = 0; i < fabric.cards_.size(); ++i) list[i] = fabric.cards_[i].get();
    *count = static_cast<int>(fabric.cards_.size());
    return list;
  }
  static void free_device_list(ibv_device** list) { delete[] list; }
  static const char* get_device_name(ibv_device* device) { return static_cast<FakeDevice*>(device)->name; }
  static ibv_context* open_device(ibv_device* device) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("open_device");
    std::lock_guard guard(fabric.lock_);
    if ((errno = fabric.call("open_device", static_cast<FakeDevice*>(device))) != 0) return nullptr;
    auto* context = new FakeContext{};
    context->device = device;
    context->card = static_cast<FakeDevice*>(device);
    context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    context->num_comp_vectors = 1;
    fabric.contexts_.insert(context);
    ++fabric.open_["context"];
    return context;
  }
  static int close_device(ibv_context* raw) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("close_device");
    std::lock_guard guard(fabric.lock_);
    auto* context = static_cast<FakeContext*>(raw);
    if (context->children != 0) fabric.violations_.push_back("a device was closed before what was made with it");
    ::close(context->async_fd);
    fabric.contexts_.erase(context);
    --fabric.open_["context"];
    delete context;
    return 0;
  }
  static int query_device(ibv_context* context, ibv_device_attr* attr) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    *attr = device_of(context)->facts.attributes;
    return fabric.call("query_device", context);
  }
  static int query_device_ex(ibv_context* context, ibv_device_attr_ex* attr) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    const Card& card = device_of(context)->facts;
    attr->orig_attr = card.attributes;
    if (card.on_demand_paging) {
      attr->odp_caps.general_caps = IBV_ODP_SUPPORT;
      attr->odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_WRITE;
    }
    return fabric.call("query_device_ex");
  }
  static int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    if (const int error = fabric.call("query_port", context); error != 0) return error;
    if (port != 1) return EINVAL;
    const Port& facts = device_of(context)->facts.port;
    std::memset(attr, 0, sizeof *attr);
    attr->state = facts.state;
    attr->max_mtu = attr->active_mtu = facts.mtu;
    attr->gid_tbl_len = static_cast<int>(facts.gids.size());
    attr->max_msg_sz = 1u << 31;
    attr->pkey_tbl_len = 1;
    attr->lid = facts.lid;
    attr->link_layer = facts.link_layer;
    attr->active_speed = 32;
    attr->active_width = 2;
    return 0;
  }
  static int query_gid(ibv_context* context, uint8_t, int index, ibv_gid* gid) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("query_gid");
    std::lock_guard guard(fabric.lock_);
    const Port& facts = device_of(context)->facts.port;
    if (index < 0 || static_cast<size_t>(index) >= facts.gids.size()) return EINVAL;
    *gid = facts.gids[static_cast<size_t>(index)];
    return fabric.call("query_gid", context);
  }
  static int query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    const Port& facts = device_of(context)->facts.port;
    if (index >= facts.gids.size()) return ENODATA;
    std::memset(entry, 0, sizeof *entry);
    entry->gid = facts.gids[index];
    entry->gid_index = index;
    entry->port_num = port;
    entry->gid_type = IBV_GID_TYPE_ROCE_V2;
    return fabric.call("query_gid_ex", context);
  }
  static int query_pkey(ibv_context*, uint8_t, int, uint16_t* pkey) {
    *pkey = 0xffff;
    return 0;
  }
  static int get_async_event(ibv_context* raw, ibv_async_event* event) {
    auto* context = static_cast<FakeContext*>(raw);
    FakeFabric& fabric = self();
    {
      std::lock_guard guard(fabric.lock_);
      if (context->lost && context->events.empty()) return errno = EIO, -1;
    }
    uint64_t value;
    if (::read(context->async_fd, &value, sizeof value) < 0) return -1;
    std::lock_guard guard(fabric.lock_);
    *event = context->events.front();
    context->events.pop_front();
    return 0;
  }
  static void ack_async_event(ibv_async_event*) {}

  static ibv_pd* alloc_pd(ibv_context* context) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("alloc_pd");
    std::lock_guard guard(fabric.lock_);
    if ((errno = fabric.call("alloc_pd", context)) != 0) return nullptr;
    auto* pd = new FakePd{};
    pd->context = context;
    ++static_cast<FakeContext*>(context)->children;
    ++fabric.open_["pd"];
    return pd;
  }
  static int dealloc_pd(ibv_pd* raw) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("dealloc_pd");
    std::lock_guard guard(fabric.lock_);
    auto* pd = static_cast<FakePd*>(raw);
    if (pd->children != 0) {
      fabric.violations_.push_back("a protection domain went before its children");
      return EBUSY;
    }
    --static_cast<FakeContext*>(pd->context)->children;
    --fabric.open_["pd"];
    delete pd;
    return 0;
  }
  static ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t length, int access) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("reg_mr");
    fabric.gates_.pass(("reg_mr " + device_of(pd->context)->facts.name).c_str());
    std::lock_guard guard(fabric.lock_);
    const Card& card = device_of(pd->context)->facts;
    errno = fabric.call("reg_mr", pd->context);
    if (errno == 0 && (length == 0 || length > card.attributes.max_mr_size)) errno = EINVAL;
    if (errno == 0 && (access & IBV_ACCESS_REMOTE_WRITE) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0) errno = EINVAL;
    if (errno == 0 && (access & IBV_ACCESS_ON_DEMAND) != 0 && !card.on_demand_paging) errno = EOPNOTSUPP;
    if (errno == 0 && (access & IBV_ACCESS_REMOTE_ATOMIC) != 0 && card.attributes.atomic_cap == IBV_ATOMIC_NONE)
      errno = EINVAL;
    if (errno == 0 && fabric.open_["mr"] >= card.attributes.max_mr) errno = ENOMEM;
    if (errno != 0) return nullptr;
    auto* mr = new FakeMr{};
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = address;
    mr->length = length;
    mr->access = access;
    mr->lkey = fabric.next_key_++;
    mr->rkey = fabric.next_key_++;
    fabric.by_lkey_[mr->lkey] = fabric.by_rkey_[mr->rkey] = mr;
    ++static_cast<FakePd*>(pd)->children;
    ++fabric.open_["mr"];
    return mr;
  }
  // The descriptor's position is where the dma-buf begins.
  static ibv_mr* reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    {
      std::lock_guard guard(self().lock_);
      if ((errno = self().call("reg_dmabuf_mr", pd->context)) != 0) return nullptr;
    }
    const auto begin = static_cast<uint64_t>(::lseek(fd, 0, SEEK_CUR)) + offset, skipped = begin % 4096;
    void* const at =
        ::mmap(nullptr, skipped + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin - skipped));
    if (at == MAP_FAILED) return nullptr;
    ibv_mr* const mr = reg_mr(pd, reinterpret_cast<void*>(iova), length, access);
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    if (mr == nullptr)
      ::munmap(at, skipped + length);
    else
      fabric.elsewhere_[mr] = {static_cast<uint8_t*>(at), skipped};
    return mr;
  }
  static int dereg_mr(ibv_mr* mr) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("dereg_mr");
    std::lock_guard guard(fabric.lock_);
    if (const auto found = fabric.elsewhere_.extract(mr); !found.empty())
      ::munmap(found.mapped().at, found.mapped().skipped + mr->length);
    (void)fabric.call("dereg_mr");
    fabric.by_lkey_.erase(mr->lkey);
    fabric.by_rkey_.erase(mr->rkey);
    --static_cast<FakePd*>(mr->pd)->children;
    --fabric.open_["mr"];
    delete static_cast<FakeMr*>(mr);
    return 0;
  }

  static ibv_comp_channel* create_comp_channel(ibv_context* context) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    if ((errno = fabric.call("create_comp_channel", context)) != 0) return nullptr;
    auto* channel = new FakeChannel{};
    channel->context = context;
    channel->fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    ++static_cast<FakeContext*>(context)->children;
    ++fabric.open_["channel"];
    return channel;
  }
  static int destroy_comp_channel(ibv_comp_channel* raw) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("destroy_comp_channel");
    std::lock_guard guard(fabric.lock_);
    auto* channel = static_cast<FakeChannel*>(raw);
    if (channel->children != 0) fabric.violations_.push_back("a completion channel went before its queues");
    ::close(channel->fd);
    --static_cast<FakeContext*>(channel->context)->children;
    --fabric.open_["channel"];
    delete channel;
    return 0;
  }
  static ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel, int) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("create_cq");
    std::lock_guard guard(fabric.lock_);
    errno = fabric.call("create_cq", context);
    if (errno == 0 && (entries < 1 || entries > device_of(context)->facts.attributes.max_cqe)) errno = EINVAL;
    if (errno != 0) return nullptr;
    auto* cq = new FakeCq{};
    cq->context = context;
    cq->channel = channel;
    cq->cq_context = cq_context;
    cq->capacity = static_cast<size_t>(entries);
    ++static_cast<FakeContext*>(context)->children;
    if (channel != nullptr) ++static_cast<FakeChannel*>(channel)->children;
    ++fabric.open_["cq"];
    return cq;
  }
  // Waits until all events of it are acknowledged, as libibverbs does.
  static int destroy_cq(ibv_cq* raw) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("destroy_cq");
    std::unique_lock guard(fabric.lock_);
    auto* cq = static_cast<FakeCq*>(raw);
    if (cq->users != 0) {
      fabric.violations_.push_back("a completion queue went before its queue pairs");
      return EBUSY;
    }
    if (auto* channel = static_cast<FakeChannel*>(cq->channel)) {
      const auto stale = std::erase(channel->events, cq);
      cq->unacknowledged -= static_cast<int>(stale);
      fabric.acknowledged_.wait(guard, [cq] { return cq->unacknowledged == 0; });
      --channel->children;
    }
    --static_cast<FakeContext*>(cq->context)->children;
    --fabric.open_["cq"];
    delete cq;
    return 0;
  }
  static int poll_cq(ibv_cq* raw, int entries, ibv_wc* wc) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    if (fabric.call("poll_cq") != 0) return -1;
    auto* cq = static_cast<FakeCq*>(raw);
    int taken = 0;
    for (; taken < entries && !cq->entries.empty(); ++taken) {
      wc[taken] = cq->entries.front();
      cq->entries.pop_front();
      auto found = fabric.pairs_.find(wc[taken].qp_num);
      if (found == fabric.pairs_.end()) continue;
      auto node = found->second->until.extract(wc[taken].wr_id);
      if (!node.empty()) found->second->retired = std::max(found->second->retired, node.mapped());
    }
    return taken;
  }
  static int req_notify_cq(ibv_cq* raw, int) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    if (const int error = fabric.call("req_notify_cq"); error != 0) return error;
    static_cast<FakeCq*>(raw)->armed = true;
    return 0;
  }
  // The descriptor may count events whose queue is gone: then this blocks or says EAGAIN, like the real one.
  static int get_cq_event(ibv_comp_channel* raw, ibv_cq** cq, void** cq_context) {
    auto* channel = static_cast<FakeChannel*>(raw);
    FakeFabric& fabric = self();
    while (true) {
      uint64_t value;
      if (::read(channel->fd, &value, sizeof value) < 0) return -1;
      std::lock_guard guard(fabric.lock_);
      if (channel->events.empty()) continue;
      FakeCq* const event = channel->events.front();
      channel->events.pop_front();
      *cq = event;
      *cq_context = event->cq_context;
      return 0;
    }
  }
  static void ack_cq_events(ibv_cq* cq, unsigned count) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    static_cast<FakeCq*>(cq)->unacknowledged -= static_cast<int>(count);
    fabric.acknowledged_.notify_all();
  }

  static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("create_qp");
    std::lock_guard guard(fabric.lock_);
    const Card& card = device_of(pd->context)->facts;
    errno = fabric.call("create_qp", pd->context);
    if (errno == 0 && (attr->qp_type != IBV_QPT_RC || attr->cap.max_inline_data > card.max_inline ||
                       attr->cap.max_send_sge > static_cast<uint32_t>(card.attributes.max_sge) ||
                       attr->cap.max_send_wr > static_cast<uint32_t>(card.attributes.max_qp_wr)))
      errno = EINVAL;
    if (errno == 0 && fabric.open_["qp"] >= card.attributes.max_qp) errno = ENOMEM;
    if (errno != 0) return nullptr;
    auto* pair = new FakeQp{};
    pair->context = pd->context;
    pair->pd = pd;
    pair->send_cq = attr->send_cq;
    pair->recv_cq = attr->recv_cq;
    pair->cap = attr->cap;
    pair->qp_num = fabric.next_pair_++;
    pair->state = IBV_QPS_RESET;
    ++static_cast<FakePd*>(pd)->children;
    ++static_cast<FakeCq*>(attr->send_cq)->users;
    ++fabric.open_["qp"];
    fabric.pairs_[pair->qp_num] = pair;
    return pair;
  }
  static int modify_qp(ibv_qp* raw, ibv_qp_attr* attr, int mask) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("modify_qp");
    std::lock_guard guard(fabric.lock_);
    auto* pair = static_cast<FakeQp*>(raw);
    if (const int error = fabric.call("modify_qp", pair->context); error != 0) return error;
    if ((mask & IBV_QP_STATE) == 0) return EINVAL;
    ibv_qp_attr& kept = pair->attributes;
    const auto demand = [mask](int wanted) { return (mask & wanted) == wanted; };
    switch (attr->qp_state) {
      case IBV_QPS_INIT:
        if (pair->state != IBV_QPS_RESET || !demand(IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
          return EINVAL;
        kept.port_num = attr->port_num;
        kept.qp_access_flags = attr->qp_access_flags;
        break;
      case IBV_QPS_RTR:
        if (pair->state != IBV_QPS_INIT || !demand(IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
          return EINVAL;
        if (attr->max_dest_rd_atomic > device_of(pair->context)->facts.attributes.max_qp_rd_atom) return EINVAL;
        kept.ah_attr = attr->ah_attr;
        kept.path_mtu = attr->path_mtu;
        kept.dest_qp_num = attr->dest_qp_num;
        kept.rq_psn = attr->rq_psn;
        kept.max_dest_rd_atomic = attr->max_dest_rd_atomic;
        break;
      case IBV_QPS_RTS:
        if (pair->state != IBV_QPS_RTR ||
            !demand(IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
          return EINVAL;
        kept.sq_psn = attr->sq_psn;
        kept.timeout = attr->timeout;
        kept.retry_cnt = attr->retry_cnt;
        break;
      case IBV_QPS_ERR:
        break;
      default:
        return EINVAL;
    }
    pair->state = attr->qp_state;
    if (pair->state == IBV_QPS_ERR) fabric.work(*pair);
    return 0;
  }
  static int query_qp(ibv_qp* raw, ibv_qp_attr* attr, int, ibv_qp_init_attr*) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    *attr = static_cast<FakeQp*>(raw)->attributes;
    attr->qp_state = raw->state;
    return fabric.call("query_qp");
  }
  static int destroy_qp(ibv_qp* raw) {
    FakeFabric& fabric = self();
    fabric.gates_.pass("destroy_qp");
    std::unique_lock guard(fabric.lock_);
    auto* pair = static_cast<FakeQp*>(raw);
    (void)fabric.call("destroy_qp");
    pair->state = IBV_QPS_ERR;
    fabric.returned_.wait(guard, [pair] { return !pair->away; });
    fabric.pairs_.erase(pair->qp_num);
    fabric.ready_.erase(pair->qp_num);
    --static_cast<FakePd*>(pair->pd)->children;
    --static_cast<FakeCq*>(pair->send_cq)->users;
    --fabric.open_["qp"];
    delete pair;
    return 0;
  }
  static int post_send(ibv_qp* raw, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
    FakeFabric& fabric = self();
    std::lock_guard guard(fabric.lock_);
    auto* pair = static_cast<FakeQp*>(raw);
    int error = 0;
    for (; wr != nullptr; wr = wr->next) {
      error = fabric.call("post_send", pair->context);
      if (error == 0) error = fabric.take_request(*pair, *wr);
      if (error != 0) {
        *bad_wr = wr;
        break;
      }
    }
    if (fabric.immediate_ || pair->state == IBV_QPS_ERR) {
      fabric.work(*pair);
    } else {
      fabric.ready_.insert(pair->qp_num);
      fabric.wake_.notify_one();
    }
    return error;
  }
  static int post_recv(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) { return EINVAL; }

  static Verbs make_table() {
    Verbs table{};
    table.get_device_list = get_device_list;
    table.free_device_list = free_device_list;
    table.get_device_name = get_device_name;
    table.open_device = open_device;
    table.close_device = close_device;
    table.query_device = query_device;
    table.query_device_ex = query_device_ex;
    table.query_port = query_port;
    table.query_gid = query_gid;
    table.query_gid_ex = query_gid_ex;
    table.query_pkey = query_pkey;
    table.get_async_event = get_async_event;
    table.ack_async_event = ack_async_event;
    table.alloc_pd = alloc_pd;
    table.dealloc_pd = dealloc_pd;
    table.reg_mr = reg_mr;
    table.reg_dmabuf_mr = reg_dmabuf_mr;
    table.dereg_mr = dereg_mr;
    table.create_comp_channel = create_comp_channel;
    table.destroy_comp_channel = destroy_comp_channel;
    table.create_cq = create_cq;
    table.destroy_cq = destroy_cq;
    table.poll_cq = poll_cq;
    table.req_notify_cq = req_notify_cq;
    table.get_cq_event = get_cq_event;
    table.ack_cq_events = ack_cq_events;
    table.create_qp = create_qp;
    table.modify_qp = modify_qp;
    table.query_qp = query_qp;
    table.destroy_qp = destroy_qp;
    table.post_send = post_send;
    table.post_recv = post_recv;
    return table;
  }
};

}  // namespace fake

inline const Verbs& FakeFabric::verbs() {
  static const Verbs table = fake::Calls::make_table();
  return table;
}

}  // namespace mr::test
