// What a small operation costs on the verbs lane, apart from the card: no memory is allocated and no thread is woken.
// For instructions: valgrind --tool=callgrind --toggle-collect='*submit_and_wait*' test_verbs_cost
#include <cstdlib>
#include <new>

#include "check.h"
#include "verbs_side.h"

using namespace mr;
using mr::test::FakeFabric;
using mr::test::VerbsPair;
using mr::test::VerbsSide;

namespace {

thread_local bool counting = false;
thread_local uint64_t allocations = 0;

// The fake's own allocations are not the lane's.
struct NotOurs {
  NotOurs() { counting = false; }
  ~NotOurs() { counting = before; }
  const bool before = counting;
};

const Verbs& uncounted() {
  static const Verbs table = [] {
    Verbs out = FakeFabric::verbs();
    out.post_send = [](ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
      NotOurs here;
      return FakeFabric::verbs().post_send(qp, wr, bad);
    };
    out.poll_cq = [](ibv_cq* cq, int entries, ibv_wc* wc) {
      NotOurs here;
      return FakeFabric::verbs().poll_cq(cq, entries, wc);
    };
    out.req_notify_cq = [](ibv_cq* cq, int solicited) {
      NotOurs here;
      return FakeFabric::verbs().req_notify_cq(cq, solicited);
    };
    return out;
  }();
  return table;
}

// One after the other, as a program does that waits for each.
__attribute__((noinline)) void submit_and_wait(VerbsSide& side, const std::shared_ptr<Peer>& peer,
                                               const std::vector<OpRef>& ops) {
  for (const OpRef& op : ops) {
    side.node->submit(peer, op);
    op->wait(60);
  }
}

}  // namespace

void* operator new(size_t size) {
  allocations += counting;
  void* const out = std::malloc(size == 0 ? 1 : size);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  allocations += counting;
  return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

TEST(a_small_operation_allocates_nothing) {
  VerbsPair pair(nullptr, "verbs", false, nullptr, true, uncounted());
  uint64_t owned[64] = {1, 2, 3}, here[64] = {};
  const auto remote = pair.owner->remote(pair.owner->share(owned, sizeof owned));
  pair.user->domain->keep(here, sizeof here);
  const auto peer = pair.user->node->peer_of(Address::parse(remote->address));
  for (int i = 0; i < 100; ++i) VerbsSide::expect_ok(pair.user->read(remote, 0, here, sizeof here));
  for (const Verb verb : {Verb::read, Verb::write}) {
    std::vector<OpRef> ops;
    for (int i = 0; i < 200; ++i) {
      ops.push_back(std::make_shared<Op>());
      Op& op = *ops.back();
      op.verb = verb;
      op.submitted = Clock::now();
      op.deadline = after(60);
      op.local = reinterpret_cast<uint8_t*>(here);
      op.remote = remote;
      op.remote_view = op.local_view = View::contiguous(0, i % 2 == 0 ? 8 : sizeof here);
    }
    allocations = 0;
    counting = true;
    submit_and_wait(*pair.user, peer, ops);
    counting = false;
    for (const OpRef& op : ops) VerbsSide::expect_ok(op);
    CHECK_EQ(allocations, 0u);
    CHECK(!ops[0]->admitted);  // it never came to the loop
  }
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
