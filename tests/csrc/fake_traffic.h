// What cards do with work requests: check them as a card does (states, keys, rights, bounds, limits), move the bytes,
// and tell the ends. A thread does it, or whoever posts where `immediate` is set; tests say what is to fail.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "fake_gates.h"
#include "fake_objects.h"

namespace mr::test::fake {

class Traffic {
 protected:
  friend struct Calls;

  static constexpr uint8_t kForEver = 7;  // retries, to rxe: no answer is waited for until the pair is shut

  // Has another process serve it: `data` goes there with a write, and comes back otherwise.
  using Beyond = std::function<ibv_wc_status(const Packet& packet, std::vector<uint8_t>& data)>;

  explicit Traffic(bool immediate) : immediate_(immediate) {}
  ~Traffic() = default;

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
      const bool for_ever = pair.attributes.retry_cnt == kForEver && fate.kind == Fate::carry_out;
      if (status == IBV_WC_RETRY_EXC_ERR && for_ever) return;
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

  ibv_wc_status carry_out(FakeQp& pair, Posted& posted) {
    const Request& request = posted.request;
    if (!writes(request.opcode) && !is_atomic(request.opcode) && request.opcode != IBV_WR_RDMA_READ)
      return IBV_WC_LOC_QP_OP_ERR;
    if (device_of(pair.context)->facts.port.state != IBV_PORT_ACTIVE) return IBV_WC_RETRY_EXC_ERR;
    if (!knows_pieces(pair, request)) return IBV_WC_LOC_PROT_ERR;
    const Packet packet = packet_of(pair, posted);
    if (beyond_ && pairs_.count(packet.to) == 0) return send_beyond(pair, posted, packet);
    uint8_t* there = nullptr;
    const ibv_wc_status status = accept(packet, &there);
    if (status != IBV_WC_SUCCESS || packet.length == 0) return status;
    if (is_atomic(packet.opcode))
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
    const int right = writes(packet.opcode)      ? IBV_ACCESS_REMOTE_WRITE
                      : is_atomic(packet.opcode) ? IBV_ACCESS_REMOTE_ATOMIC
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
    const bool atomic = is_atomic(wr.opcode);
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
};

}  // namespace mr::test::fake
