// A fake of libibverbs: cards, queue pairs and a wire in memory. It checks what a card checks (states, keys, rights,
// bounds, limits), moves the bytes, and can fail the n-th call or any work request in every way. Work requests are
// carried out by a thread of the fabric, or inside post_send where `immediate` is set. It is of one process, unless it
// is told how to reach others (fake_libibverbs.cc).
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "fake_gates.h"
#include "transport/verbs.h"

namespace mr::test {

class FakeFabric {
 public:
  struct Port {
    ibv_port_state state = IBV_PORT_ACTIVE;
    uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
    ibv_mtu mtu = IBV_MTU_4096;
    uint16_t lid = 0;
    std::vector<ibv_gid> gids;
  };
  struct Card {
    std::string name;
    ibv_device_attr attributes{};
    uint32_t max_inline = 64;
    bool on_demand_paging = false;
    Port port;
    bool dead = false;  // it can't be opened
  };

  // A work request as it was posted.
  struct Request {
    uint64_t number;  // counted over the fabric, from 1
    ibv_wr_opcode opcode;
    uint32_t queue_pair;
    std::string card;
    std::vector<ibv_sge> pieces;
    uint64_t remote;
    uint32_t rkey;
    bool inlined, signalled;
  };
  // What becomes of a work request.
  struct Fate {
    enum Kind { carry_out, fail_before, fail_after, lose, hold } kind = carry_out;
    ibv_wc_status status = IBV_WC_RETRY_EXC_ERR;
    uint32_t vendor_error = 0;
  };

  // A work request on its way to the other end.
  struct Packet {
    uint32_t to = 0;  // queue pair
    uint32_t psn = 0;
    ibv_mtu mtu{};
    bool global = false;
    ibv_gid gid{};
    ibv_wr_opcode opcode{};
    uint64_t remote = 0, length = 0, operand[2] = {0, 0};
    uint32_t rkey = 0;
  };
  // Has another process serve it: `data` goes there with a write, and comes back otherwise.
  using Beyond = std::function<ibv_wc_status(const Packet& packet, std::vector<uint8_t>& data)>;

  explicit FakeFabric(bool immediate = false) : immediate_(immediate) {
    std::lock_guard guard(current_lock());
    if (current() != nullptr) throw std::logic_error("two fake fabrics at a time");
    current() = this;
    if (!immediate_) thread_ = std::thread([this] { run(); });
  }
  ~FakeFabric() {
    {
      std::lock_guard guard(lock_);
      ending_ = true;
      wake_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    std::lock_guard guard(current_lock());
    current() = nullptr;
  }

  // A RoCE card with the address 10.9.<number>.1.
  Card& add_card(const std::string& name, uint8_t number = 0) {
    auto& card = *cards_.emplace_back(std::make_unique<FakeDevice>(FakeDevice{}));
    Card& facts = card.facts;
    facts.name = name;
    ibv_device_attr& attr = facts.attributes;
    attr.max_mr_size = ~0ull;
    attr.max_qp = 1024;
    attr.max_qp_wr = 1024;
    attr.max_cqe = 4096;
    attr.max_sge = 30;
    attr.max_mr = 4096;
    attr.max_qp_rd_atom = attr.max_qp_init_rd_atom = 16;
    attr.max_res_rd_atom = 4096;
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.phys_port_cnt = 1;
    std::snprintf(card.name, sizeof card.name, "%s", name.c_str());
    ibv_gid gid{};
    const uint8_t bytes[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, number, 1};
    std::memcpy(gid.raw, bytes, sizeof bytes);
    facts.port.gids.push_back(gid);
    return facts;
  }
  Card& card(const std::string& name) {
    for (auto& device : cards_)
      if (device->facts.name == name) return device->facts;
    throw std::logic_error("no card " + name);
  }

  // Queue pairs are numbered from here on, and those of others are reached by `beyond`.
  void join(uint32_t first_pair, Beyond beyond) {
    std::lock_guard guard(lock_);
    next_pair_ = first_pair;
    beyond_ = std::move(beyond);
  }
  // What another process sends to one of our queue pairs.
  ibv_wc_status serve(const Packet& packet, std::vector<uint8_t>& data) {
    std::lock_guard guard(lock_);
    uint8_t* there = nullptr;
    ibv_wc_status status = accept(packet, &there);
    if (status != IBV_WC_SUCCESS || packet.length == 0) {
      data.clear();
    } else if (writes(packet.opcode)) {
      std::memcpy(there, data.data(), data.size());
    } else if (packet.opcode == IBV_WR_RDMA_READ) {
      data.assign(there, there + packet.length);
    } else {
      data.resize(sizeof(uint64_t));
      status = carry_out_atomic(packet, there, data.data());
    }
    return status;
  }

  // The call fails with `error` so many times, `skip` calls from now.
  void fail_call(const std::string& name, int error, uint64_t skip = 0, uint64_t times = 1) {
    std::lock_guard guard(lock_);
    failures_[name] = {skip, times, error};
  }
  // Asked for each work request when it is carried out, on the fabric's thread (or in post_send).
  void decide(std::function<Fate(const Request&)> fate) {
    std::lock_guard guard(lock_);
    fate_ = std::move(fate);
  }
  void fail_request(uint64_t number, Fate fate) {
    decide([number, fate](const Request& request) { return request.number == number ? fate : Fate{}; });
  }
  // Held requests are asked about again.
  void kick() {
    std::lock_guard guard(lock_);
    for (auto& [number, pair] : pairs_) ready_.insert(number);
    wake_.notify_all();
  }
  void raise(const std::string& card_name, ibv_event_type type, bool silent = false) {
    std::lock_guard guard(lock_);
    for (FakeContext* context : contexts_) {
      if (context->card->facts.name != card_name) continue;
      ibv_async_event event{};
      event.event_type = type;
      event.element.port_num = 1;
      if (!silent) context->events.push_back(event);
      signal(context->async_fd);
    }
  }
  // The card is gone: what is asked of it fails, and its work stays undone. silent: no event tells of it, but the
  // descriptor of events is ready from then on.
  void kill(const std::string& card_name, bool silent = false) {
    {
      std::lock_guard guard(lock_);
      card(card_name).dead = true;
      for (FakeContext* context : contexts_) context->lost |= context->card->facts.name == card_name;
    }
    raise(card_name, IBV_EVENT_DEVICE_FATAL, silent);
  }
  // There is such a card again, for who opens it anew.
  void revive(const std::string& card_name) {
    std::lock_guard guard(lock_);
    card(card_name).dead = false;
  }
  void set_port(const std::string& card_name, bool up) {
    {
      std::lock_guard guard(lock_);
      card(card_name).port.state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    }
    raise(card_name, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
  }

  FakeGates& gates() { return gates_; }

  std::vector<Request> requests() {
    std::lock_guard guard(lock_);
    return log_;
  }
  void keep_log(bool keep) {
    std::lock_guard guard(lock_);
    keep_log_ = keep;
    log_.clear();
  }
  uint64_t calls(const std::string& name) {
    std::lock_guard guard(lock_);
    return calls_[name];
  }
  // No card touches memory meanwhile.
  template <typename Look>
  auto at_rest(Look look) {
    std::lock_guard guard(lock_);
    return look();
  }
  // Things that are open: "qp", "cq", "mr", "pd", "channel", "context".
  int open(const std::string& what) {
    std::lock_guard guard(lock_);
    return open_[what];
  }
  // What a correct program never does: a completion queue that overflows, children that outlive their parents.
  std::vector<std::string> violations() {
    std::lock_guard guard(lock_);
    return violations_;
  }

  static const Verbs& verbs() {
    static const Verbs table = make_table();
    return table;
  }

 private:
  struct FakeDevice : ibv_device {
    Card facts;
  };
  struct FakeContext : ibv_context {
    FakeDevice* card;
    std::deque<ibv_async_event> events;
    int children = 0;
    bool lost = false;  // for good, also when there is such a card again
  };
  struct FakePd : ibv_pd {
    int children = 0;
  };
  struct FakeMr : ibv_mr {
    int access;
  };
  struct FakeCq;
  struct FakeChannel : ibv_comp_channel {
    std::deque<FakeCq*> events;
    int children = 0;
  };
  struct FakeCq : ibv_cq {
    std::deque<ibv_wc> entries;
    size_t capacity;
    bool armed = false;
    int unacknowledged = 0, users = 0;
  };
  struct Posted {
    Request request;
    ibv_send_wr wr;
    std::vector<uint8_t> data;  // of an inlined request
    uint64_t sequence;
  };
  struct FakeQp : ibv_qp {
    ibv_qp_attr attributes{};
    ibv_qp_cap cap{};
    std::deque<Posted> queue;
    uint64_t posted = 0, retired = 0;    // retired: known to the program through polled completions
    std::map<uint64_t, uint64_t> until;  // wr_id of a completion: what it retires
    bool away = false;                   // its first request is being served by another process
  };

  static FakeFabric*& current() {
    static FakeFabric* fabric = nullptr;
    return fabric;
  }
  static std::mutex& current_lock() {
    static std::mutex lock;
    return lock;
  }
  static FakeFabric& self() { return *current(); }
  static void signal(int fd) {
    const uint64_t one = 1;
    (void)!::write(fd, &one, sizeof one);
  }

  // 0, or the error that was asked for. The lock is held.
  int call(const char* name, const FakeDevice* card = nullptr) {
    ++calls_[name];
    if (card != nullptr && card->facts.dead) return EIO;
    auto found = failures_.find(name);
    if (found == failures_.end()) return 0;
    Failure& failure = found->second;
    if (failure.skip > 0) return --failure.skip, 0;
    const int error = failure.error;
    if (--failure.times == 0) failures_.erase(found);
    return error;
  }
  int call(const char* name, const ibv_context* context) {
    const bool lost = static_cast<const FakeContext*>(context)->lost;
    const int error = call(name);
    return lost ? EIO : error;
  }
  static bool is_lost(const ibv_context* context) { return static_cast<const FakeContext*>(context)->lost; }
  static FakeDevice* device_of(const ibv_context* context) { return static_cast<const FakeContext*>(context)->card; }

  // ---- The wire ----

  void run() {
    std::unique_lock guard(lock_);
    while (true) {
      wake_.wait(guard, [this] { return ending_ || !ready_.empty(); });
      if (ending_) return;
      const uint32_t number = *ready_.begin();
      ready_.erase(ready_.begin());
      if (auto found = pairs_.find(number); found != pairs_.end()) work(*found->second);
    }
  }

  void work(FakeQp& pair) {
    while (!pair.queue.empty() && !pair.away) {
      Posted& posted = pair.queue.front();
      if (pair.state == IBV_QPS_ERR) {
        complete(pair, posted, IBV_WC_WR_FLUSH_ERR, 0);
        pair.queue.pop_front();
        continue;
      }
      if (is_lost(pair.context)) return;
      const Fate fate = fate_ ? fate_(posted.request) : Fate{};
      if (fate.kind == Fate::hold) return;
      if (fate.kind == Fate::lose) {
        pair.queue.pop_front();
        continue;
      }
      ibv_wc_status status = fate.kind == Fate::fail_before ? fate.status : carry_out(pair, posted);
      if (fate.kind == Fate::fail_after) status = fate.status;
      if (status != IBV_WC_SUCCESS) pair.state = IBV_QPS_ERR;
      complete(pair, posted, status, fate.vendor_error);
      pair.queue.pop_front();
    }
  }

  void complete(FakeQp& pair, const Posted& posted, ibv_wc_status status, uint32_t vendor_error) {
    if (status == IBV_WC_SUCCESS && !posted.request.signalled) return;
    auto& cq = *static_cast<FakeCq*>(pair.send_cq);
    ibv_wc wc{};
    std::memset(static_cast<void*>(&wc), 0x5a, sizeof wc);  // a failed completion tells only these four
    wc.wr_id = posted.wr.wr_id;
    wc.status = status;
    wc.vendor_err = vendor_error;
    wc.qp_num = pair.qp_num;
    pair.until[wc.wr_id] = posted.sequence + 1;
    if (cq.entries.size() == cq.capacity) violations_.push_back("a completion queue overflowed");
    cq.entries.push_back(wc);
    if (!std::exchange(cq.armed, false) || cq.channel == nullptr) return;
    auto& channel = *static_cast<FakeChannel*>(cq.channel);
    channel.events.push_back(&cq);
    ++cq.unacknowledged;
    signal(channel.fd);
  }

  const FakeMr* region(const std::map<uint32_t, FakeMr*>& by_key, uint32_t key, const ibv_pd* pd, uint64_t address,
                       uint64_t length, int access) {
    auto found = by_key.find(key);
    if (found == by_key.end() || found->second->pd != pd || (found->second->access & access) != access) return nullptr;
    const uint64_t base = reinterpret_cast<uintptr_t>(found->second->addr), size = found->second->length;
    const bool inside = address >= base && address - base <= size && length <= size - (address - base);
    return inside ? found->second : nullptr;
  }

  // Where the bytes of a registered address are.
  uint8_t* reached(uint64_t address) {
    for (const auto& [mr, elsewhere] : elsewhere_) {
      const uint64_t base = reinterpret_cast<uintptr_t>(mr->addr);
      if (address >= base && address - base < mr->length) return elsewhere.at + elsewhere.skipped + (address - base);
    }
    return reinterpret_cast<uint8_t*>(address);
  }

  static bool writes(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  }
  static bool atomic(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
  }

  ibv_wc_status carry_out(FakeQp& pair, Posted& posted) {
    const Request& request = posted.request;
    if (!writes(request.opcode) && !atomic(request.opcode) && request.opcode != IBV_WR_RDMA_READ)
      return IBV_WC_LOC_QP_OP_ERR;
    if (device_of(pair.context)->facts.port.state != IBV_PORT_ACTIVE) return IBV_WC_RETRY_EXC_ERR;
    if (!knows_pieces(pair, request)) return IBV_WC_LOC_PROT_ERR;
    const Packet packet = packet_of(pair, posted);
    if (beyond_ && pairs_.count(packet.to) == 0) return send_beyond(pair, posted, packet);
    uint8_t* there = nullptr;
    const ibv_wc_status status = accept(packet, &there);
    if (status != IBV_WC_SUCCESS || packet.length == 0) return status;
    if (atomic(packet.opcode))
      return carry_out_atomic(packet, there, reinterpret_cast<uint8_t*>(request.pieces[0].addr));
    const uint8_t* inlined = posted.data.data();
    for (const ibv_sge& piece : request.pieces) {
      uint8_t* const here = reached(piece.addr);
      if (request.inlined)
        std::memcpy(there, std::exchange(inlined, inlined + piece.length), piece.length);
      else if (writes(packet.opcode))
        std::memcpy(there, here, piece.length);
      else
        std::memcpy(here, there, piece.length);
      there += piece.length;
    }
    return IBV_WC_SUCCESS;
  }

  bool knows_pieces(const FakeQp& pair, const Request& request) {
    const int access = writes(request.opcode) ? 0 : IBV_ACCESS_LOCAL_WRITE;
    return request.inlined || std::all_of(request.pieces.begin(), request.pieces.end(), [&](const ibv_sge& piece) {
             return region(by_lkey_, piece.lkey, pair.pd, piece.addr, piece.length, access) != nullptr;
           });
  }

  static Packet packet_of(const FakeQp& pair, const Posted& posted) {
    Packet out;
    out.to = pair.attributes.dest_qp_num;
    out.psn = pair.attributes.sq_psn;
    out.mtu = pair.attributes.path_mtu;
    out.global = pair.attributes.ah_attr.is_global;
    out.gid = pair.attributes.ah_attr.grh.dgid;
    out.opcode = posted.request.opcode;
    out.remote = posted.request.remote;
    out.rkey = posted.request.rkey;
    for (const ibv_sge& piece : posted.request.pieces) out.length += piece.length;
    out.operand[0] = posted.wr.wr.atomic.compare_add;
    out.operand[1] = posted.wr.wr.atomic.swap;
    return out;
  }

  // The other end's card: does it take the packet, and where do its bytes go?
  ibv_wc_status accept(const Packet& packet, uint8_t** there) {
    auto found = pairs_.find(packet.to);
    if (found == pairs_.end()) return IBV_WC_RETRY_EXC_ERR;
    FakeQp& pair = *found->second;
    const FakeDevice& card = *device_of(pair.context);
    const auto& gids = card.facts.port.gids;
    const bool ready = pair.state == IBV_QPS_RTR || pair.state == IBV_QPS_RTS;
    const bool wired = card.facts.port.state == IBV_PORT_ACTIVE && !is_lost(pair.context);
    const bool found_it = !packet.global || std::any_of(gids.begin(), gids.end(), [&](const ibv_gid& gid) {
      return std::memcmp(&gid, &packet.gid, sizeof gid) == 0;
    });
    if (!ready || !wired || !found_it || pair.attributes.rq_psn != packet.psn || pair.attributes.path_mtu != packet.mtu)
      return IBV_WC_RETRY_EXC_ERR;
    if (packet.length == 0) return IBV_WC_SUCCESS;  // no key is looked at
    if (!writes(packet.opcode) && pair.attributes.max_dest_rd_atomic == 0) return IBV_WC_REM_INV_REQ_ERR;
    const int right = writes(packet.opcode)   ? IBV_ACCESS_REMOTE_WRITE
                      : atomic(packet.opcode) ? IBV_ACCESS_REMOTE_ATOMIC
                                              : IBV_ACCESS_REMOTE_READ;
    if ((pair.attributes.qp_access_flags & static_cast<unsigned>(right)) == 0 ||
        region(by_rkey_, packet.rkey, pair.pd, packet.remote, packet.length, right) == nullptr) {
      pair.state = IBV_QPS_ERR;
      return IBV_WC_REM_ACCESS_ERR;
    }
    *there = reached(packet.remote);
    return IBV_WC_SUCCESS;
  }

  static ibv_wc_status carry_out_atomic(const Packet& packet, uint8_t* there, uint8_t* result) {
    if (packet.length != 8 || reinterpret_cast<uintptr_t>(there) % 8 != 0) return IBV_WC_REM_INV_REQ_ERR;
    std::atomic_ref<uint64_t> cell(*reinterpret_cast<uint64_t*>(there));
    uint64_t old = packet.operand[0];
    if (packet.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
      old = cell.fetch_add(packet.operand[0]);
    else
      cell.compare_exchange_strong(old, packet.operand[1]);
    std::memcpy(result, &old, sizeof old);
    return IBV_WC_SUCCESS;
  }

  // Without the lock, because the other process may be sending to us. Meanwhile the pair may have gone to ERR, and its
  // memory may be known no more.
  ibv_wc_status send_beyond(FakeQp& pair, Posted& posted, const Packet& packet) {
    const Request& request = posted.request;
    std::vector<uint8_t> data = posted.data;
    for (const ibv_sge& piece : request.pieces) {
      const uint8_t* const here = reached(piece.addr);
      if (writes(packet.opcode) && !request.inlined) data.insert(data.end(), here, here + piece.length);
    }
    pair.away = true;
    lock_.unlock();
    const ibv_wc_status status = beyond_(packet, data);
    lock_.lock();
    pair.away = false;
    returned_.notify_all();
    if (pair.state == IBV_QPS_ERR) return IBV_WC_WR_FLUSH_ERR;
    if (status != IBV_WC_SUCCESS || writes(packet.opcode)) return status;
    if (!knows_pieces(pair, request)) return IBV_WC_LOC_PROT_ERR;
    const uint8_t* from = data.data();
    for (const ibv_sge& piece : request.pieces)
      std::memcpy(reached(piece.addr), std::exchange(from, from + piece.length), piece.length);
    return status;
  }

  // ---- The calls ----

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
  int take_request(FakeQp& pair, const ibv_send_wr& wr) {
    if (pair.state != IBV_QPS_RTS && pair.state != IBV_QPS_ERR) return EINVAL;
    if (pair.posted - pair.retired >= pair.cap.max_send_wr) return ENOMEM;
    if (wr.num_sge < 0 || static_cast<uint32_t>(wr.num_sge) > pair.cap.max_send_sge) return EINVAL;
    Posted posted{{}, wr, {}, pair.posted};
    Request& request = posted.request;
    request.number = ++num_requests_;
    request.opcode = wr.opcode;
    request.queue_pair = pair.qp_num;
    request.card = device_of(pair.context)->facts.name;
    request.pieces.assign(wr.sg_list, wr.sg_list + wr.num_sge);
    const bool atomic = wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    request.remote = atomic ? wr.wr.atomic.remote_addr : wr.wr.rdma.remote_addr;
    request.rkey = atomic ? wr.wr.atomic.rkey : wr.wr.rdma.rkey;
    request.inlined = (wr.send_flags & IBV_SEND_INLINE) != 0;
    request.signalled = (wr.send_flags & IBV_SEND_SIGNALED) != 0;
    if (request.inlined) {
      for (const ibv_sge& piece : request.pieces) {
        const auto* from = reinterpret_cast<const uint8_t*>(piece.addr);
        posted.data.insert(posted.data.end(), from, from + piece.length);
      }
      if (posted.data.size() > pair.cap.max_inline_data) return EINVAL;
    }
    if (keep_log_) log_.push_back(request);
    ++pair.posted;
    pair.queue.push_back(std::move(posted));
    return 0;
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

  const bool immediate_;
  FakeGates gates_;
  std::mutex lock_;
  std::condition_variable wake_, acknowledged_, returned_;
  bool ending_ = false, keep_log_ = false;
  std::vector<std::unique_ptr<FakeDevice>> cards_;
  std::set<FakeContext*> contexts_;
  std::map<uint32_t, FakeQp*> pairs_;
  std::set<uint32_t> ready_;
  std::map<uint32_t, FakeMr*> by_lkey_, by_rkey_;
  // Memory of dma-bufs, which nobody may touch at its own address.
  struct Elsewhere {
    uint8_t* at;
    uint64_t skipped;
  };
  std::map<ibv_mr*, Elsewhere> elsewhere_;
  uint32_t next_key_ = 0x1001, next_pair_ = 0x201;
  uint64_t num_requests_ = 0;
  struct Failure {
    uint64_t skip, times;
    int error;
  };
  std::map<std::string, Failure> failures_;
  std::map<std::string, uint64_t> calls_;
  std::map<std::string, int> open_;
  std::vector<std::string> violations_;
  std::vector<Request> log_;
  std::function<Fate(const Request&)> fate_;
  Beyond beyond_;
  std::thread thread_;
};

}  // namespace mr::test
