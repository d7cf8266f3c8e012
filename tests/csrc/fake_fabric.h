// The fake of libibverbs as tests see it: they add cards, look at what was asked of them, and say what is to fail.
// It is of one process, unless it is told how to reach others (fake_wire.h).
#pragma once

#include <cstdio>
#include <stdexcept>
#include <thread>

#include "fake_traffic.h"

namespace mr::test {

class FakeFabric : public fake::Traffic {
 public:
  using Port = fake::Port;
  using Card = fake::Card;
  using Request = fake::Request;
  using Fate = fake::Fate;
  using Packet = fake::Packet;
  using Beyond = fake::Traffic::Beyond;

  explicit FakeFabric(bool immediate = false) : Traffic(immediate) {
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
    auto& card = *cards_.emplace_back(std::make_unique<fake::FakeDevice>(fake::FakeDevice{}));
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
    } else if (fake::writes(packet.opcode)) {
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
    for (fake::FakeContext* context : contexts_) {
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
      for (fake::FakeContext* context : contexts_) context->lost |= context->card->facts.name == card_name;
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

  // The calls of libibverbs, on the fabric that there is: fake_calls.h.
  static const Verbs& verbs();
  static FakeFabric& self() { return *current(); }

 private:
  static FakeFabric*& current() {
    static FakeFabric* fabric = nullptr;
    return fabric;
  }
  static std::mutex& current_lock() {
    static std::mutex lock;
    return lock;
  }

  std::thread thread_;
};

}  // namespace mr::test
