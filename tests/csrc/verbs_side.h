// Two engines in one process whose only lane is verbs (or verbs and tcp), on the fake fabric: the owner has the cards
// own0 and own1, the user use0 and use1.
#pragma once

#include "check.h"
#include "fake_verbs.h"
#include "transport/node.h"
#include "transport/verbs_domain.h"
#include "transport/verbs_lane.h"

namespace mr::test {

inline const Bytes& job_secret() {
  static const Bytes secret(32, 9);
  return secret;
}

class VerbsSide {
 public:
  using Change = std::function<void(mr_options&)>;

  VerbsSide(const std::string& name, const std::string& devices, const std::string& lanes, const Change& change,
            const Verbs& verbs = FakeFabric::verbs(), const Topology& topology = Topology()) {
    mr_options raw = Options::defaults();
    raw.name = name.c_str();
    raw.secret = job_secret().data();
    raw.secret_len = job_secret().size();
    raw.lanes = "tcp";
    raw.verbs_devices = devices.c_str();
    if (change) change(raw);
    Options options = Options::from(raw);
    options.lanes.clear();
    if (lanes.find("verbs") != std::string::npos) options.lanes.push_back("verbs");
    if (lanes.find("tcp") != std::string::npos) options.lanes.push_back("tcp");
    std::string why;
    domain = VerbsDomain::open(verbs, options, &why, topology);
    if (!domain) throw std::runtime_error("no rails: " + why);
    node = Node::create(options, {{"verbs", kVerbsAsk, MR_LANE_VERBS,
                                   [domain = domain](LinkHost& host) { return make_verbs(host, domain); }},
                                  {"tcp", kTcpFence, MR_LANE_TCP, make_tcp}});
  }
  ~VerbsSide() { close(); }
  void close() {
    if (!domain) return;
    node->close();
    domain->close();
    node.reset();
    domain.reset();
  }

  RegionRef share(void* base, uint64_t size, uint32_t access = MR_READ | MR_WRITE) {
    return node->regions().create(base, size, access);
  }
  std::shared_ptr<RemoteRegion> remote(const RegionRef& region) {
    auto out = std::make_shared<RemoteRegion>();
    out->owner = node->self().name;
    out->incarnation = node->self().incarnation;
    out->address = node->address();
    out->name = {region->id, region->key};
    out->size = region->size;
    out->access = region->access;
    out->base = reinterpret_cast<uintptr_t>(region->base);
    out->slot = region->slot;
    return out;
  }
  OpRef drop(const RegionRef& region) { return node->drop(region); }

  OpRef begin(Verb verb, const std::shared_ptr<RemoteRegion>& remote, View there, void* local, View here,
              double timeout = 30, uint32_t flags = 0, uint64_t a = 0, uint64_t b = 0) {
    auto op = std::make_shared<Op>();
    op->verb = verb;
    op->submitted = Clock::now();
    if (timeout >= 0) op->deadline = after(timeout);
    op->local = static_cast<uint8_t*>(local);
    op->remote_view = std::move(there);
    op->local_view = std::move(here);
    op->remote = remote;
    op->flags = flags;
    op->operand[0] = a;
    op->operand[1] = b;
    node->submit(node->peer_of(Address::parse(remote->address)), op);
    return op;
  }
  OpRef read(const std::shared_ptr<RemoteRegion>& remote, uint64_t offset, void* local, uint64_t length,
             double timeout = 30, uint32_t flags = 0) {
    return begin(Verb::read, remote, View::contiguous(offset, length), local, View::contiguous(0, length), timeout,
                 flags);
  }
  OpRef write(const std::shared_ptr<RemoteRegion>& remote, uint64_t offset, const void* local, uint64_t length,
              double timeout = 30, uint32_t flags = 0) {
    return begin(Verb::write, remote, View::contiguous(offset, length), const_cast<void*>(local),
                 View::contiguous(0, length), timeout, flags);
  }
  OpRef write_and_notify(const std::shared_ptr<RemoteRegion>& remote, uint64_t offset, const Bytes& source,
                         uint64_t value) {
    auto op = std::make_shared<Op>();
    op->verb = Verb::write;
    op->submitted = Clock::now();
    op->deadline = after(30);
    op->local = const_cast<uint8_t*>(source.data());
    op->remote_view = View::contiguous(offset, source.size());
    op->local_view = View::contiguous(0, source.size());
    op->remote = remote;
    op->has_notify = true;
    op->notify = value;
    node->submit(node->peer_of(Address::parse(remote->address)), op);
    return op;
  }
  static int wait(const OpRef& op) {
    if (!op->wait(60)) throw std::runtime_error("an operation did not end: " + op->describe());
    return op->status().kind;
  }
  // Waits, and demands success.
  static void expect_ok(const OpRef& op, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (wait(op) != MR_OK) check_failed(file, line, op->status().text);
  }
  uint64_t counter(const std::string& name) { return node->counts()[name]; }

  std::shared_ptr<VerbsDomain> domain;
  std::shared_ptr<Node> node;
};

struct VerbsPair {
  explicit VerbsPair(const VerbsSide::Change& change = nullptr, const std::string& lanes = "verbs", bool rails = false,
                     const std::function<void(FakeFabric&)>& prepare = nullptr, bool immediate = false,
                     const Verbs& verbs = FakeFabric::verbs(), const Topology& topology = Topology())
      : fabric(immediate) {
    for (const char* side : {"own", "use"})
      for (uint8_t i = 0; i < 2; ++i)
        fabric.add_card(side + std::to_string(i), static_cast<uint8_t>(i + 10 * (*side == 'u')));
    if (prepare) prepare(fabric);
    owner = std::make_unique<VerbsSide>("owner", rails ? "own0,own1" : "own0", lanes, change);
    user = std::make_unique<VerbsSide>("user", rails ? "use0,use1" : "use0", lanes, change, verbs, topology);
  }
  ~VerbsPair() { end(); }
  // Of what the lane opened nothing is left. The kernel may have held calls until now.
  void finish() {
    for (const std::string& left : end()) check_failed(__FILE__, __LINE__, left);
    if (!fabric.violations().empty()) check_failed(__FILE__, __LINE__, fabric.violations().front());
  }
  std::vector<std::string> end() {
    fabric.gates().let_go();
    user.reset();
    owner.reset();
    std::vector<std::string> left;
    for (const char* what : {"qp", "cq", "mr", "pd", "channel", "context"}) {
      for (const Time limit = after(20); fabric.open(what) != 0 && Clock::now() < limit;) std::this_thread::yield();
      if (const int open = fabric.open(what); open != 0)
        left.push_back(std::to_string(open) + " " + what + " were left open");
    }
    return left;
  }

  FakeFabric fabric;
  std::unique_ptr<VerbsSide> owner, user;
};

}  // namespace mr::test
