// What a small operation costs on the verbs lane, apart from the card: no memory is allocated, no mutex is so much as
// tried, the kernel is not called and no thread is woken.
// For instructions: valgrind --tool=callgrind --collect-atstart=no test_verbs_cost a_small, which runs 8,000 of them.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdlib>
#include <mutex>
#include <new>
#include <shared_mutex>
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_TOGGLE_COLLECT
#endif

#include "check.h"
#include "verbs_side.h"

using namespace mr;
using mr::test::FakeFabric;
using mr::test::VerbsPair;
using mr::test::VerbsSide;

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // those have a malloc of their own
extern "C" void* __libc_malloc(size_t size);
extern "C" void* __libc_calloc(size_t count, size_t size);
extern "C" void* __libc_realloc(void* memory, size_t size);
#endif

namespace {

struct Counts {
  uint64_t allocations = 0, mutexes = 0, kernel_calls = 0;
};
thread_local bool counting = false;
thread_local Counts counts;

// The library's function that ours stands before.
template <typename Call>
Call* next(std::atomic<void*>& known, const char* name) {
  void* found = known.load();
  if (found == nullptr) known.store(found = ::dlsym(RTLD_NEXT, name));
  return reinterpret_cast<Call*>(found);
}

// What the fake does is not the lane's.
struct NotOurs {
  NotOurs() { toggle(false); }
  ~NotOurs() { toggle(before); }
  void toggle(bool on) const {
    if (before) CALLGRIND_TOGGLE_COLLECT;
    counting = on;
  }
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
void submit_and_wait(VerbsSide& side, const std::shared_ptr<Peer>& peer, const std::vector<OpRef>& ops) {
  for (const OpRef& op : ops) {
    side.node->submit(peer, op);
    op->wait(60);
  }
}

}  // namespace

// ---- What is counted: these take the place of the libraries' ----

#define COUNTED_MUTEX_CALL(name, Lock)           \
  extern "C" int name(Lock* lock) noexcept {     \
    static std::atomic<void*> known{nullptr};    \
    counts.mutexes += counting;                  \
    return next<int(Lock*)>(known, #name)(lock); \
  }
COUNTED_MUTEX_CALL(pthread_mutex_lock, pthread_mutex_t)
COUNTED_MUTEX_CALL(pthread_mutex_trylock, pthread_mutex_t)
COUNTED_MUTEX_CALL(pthread_rwlock_rdlock, pthread_rwlock_t)
COUNTED_MUTEX_CALL(pthread_rwlock_tryrdlock, pthread_rwlock_t)
COUNTED_MUTEX_CALL(pthread_rwlock_wrlock, pthread_rwlock_t)

extern "C" long syscall(long number, ...) noexcept {
  static std::atomic<void*> known{nullptr};
  counts.kernel_calls += counting;
  va_list list;
  va_start(list, number);
  long given[6];
  for (long& one : given) one = va_arg(list, long);
  va_end(list);
  return next<long(long, ...)>(known, "syscall")(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
extern "C" ssize_t write(int fd, const void* data, size_t size) {
  static std::atomic<void*> known{nullptr};
  counts.kernel_calls += counting;
  return next<ssize_t(int, const void*, size_t)>(known, "write")(fd, data, size);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
void* operator new(size_t size) {
  counts.allocations += counting;
  void* const out = std::malloc(size == 0 ? 1 : size);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  counts.allocations += counting;
  return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#else
extern "C" void* malloc(size_t size) {
  counts.allocations += counting;
  return __libc_malloc(size);
}
extern "C" void* calloc(size_t count, size_t size) {
  counts.allocations += counting;
  return __libc_calloc(count, size);
}
extern "C" void* realloc(void* memory, size_t size) {
  counts.allocations += counting;
  return __libc_realloc(memory, size);
}
#endif

TEST(what_is_counted_is_noticed) {
  std::mutex lock;
  std::shared_mutex shared;
  counts = {};
  counting = true;
  void* volatile memory = ::operator new(8);  // one that the compiler can't do without
  ::operator delete(memory);
  {
    std::lock_guard guard(lock);
  }
  if (lock.try_lock()) lock.unlock();
  {
    std::shared_lock guard(shared, std::try_to_lock);
  }
  (void)!::write(-1, "", 0);
  ::syscall(SYS_getpid, 0, 0, 0, 0, 0, 0);
  counting = false;
  CHECK_EQ(counts.allocations, 1u);
  CHECK_EQ(counts.mutexes, 3u);
  CHECK_EQ(counts.kernel_calls, 2u);
}

TEST(a_small_operation_allocates_nothing_takes_no_mutex_and_wakes_nobody) {
  VerbsPair pair(nullptr, "verbs", false, nullptr, true, uncounted());
  uint64_t owned[1024] = {1, 2, 3}, here[1024] = {};
  constexpr uint64_t kMost = 512;
  const auto remote = pair.owner->remote(pair.owner->share(owned, sizeof owned));
  const auto peer = pair.user->node->peer_of(Address::parse(remote->address));
  for (const bool keep : {false, true}) {  // through a block of ours, then by a registration of the memory
    if (keep) {
      pair.user->domain->keep(here, sizeof here);
      VerbsSide::expect_ok(pair.user->read(remote, 0, here, sizeof here));  // too long for a block
    }
    for (int i = 0; i < 100; ++i) VerbsSide::expect_ok(pair.user->read(remote, 0, here, kMost));
    const uint64_t staged_before = pair.user->counter("verbs_staged_bytes");
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
        op.remote_view = op.local_view = View::contiguous(0, i % 2 == 0 ? 8 : kMost);
      }
      uint64_t least_kernel_calls = UINT64_MAX;
      for (int round = 0; round < 10; ++round) {  // of the same operations, as a program does that repeats an action
        counts = {};
        counting = true;
        CALLGRIND_TOGGLE_COLLECT;
        submit_and_wait(*pair.user, peer, ops);
        CALLGRIND_TOGGLE_COLLECT;
        counting = false;
        CHECK_EQ(counts.allocations, 0u);
        CHECK_EQ(counts.mutexes, 0u);
        least_kernel_calls = std::min(least_kernel_calls, counts.kernel_calls);
        for (const OpRef& op : ops) {
          VerbsSide::expect_ok(op);
          CHECK(!op->admitted);  // it never came to the loop
          op->rearm(Clock::now(), after(60));
        }
      }
      // The card's thread, which looks in now and then, may have waited for a lock of ours in some of the rounds.
      CHECK_EQ(least_kernel_calls, 0u);
    }
    CHECK_EQ(pair.user->counter("verbs_staged_bytes") == staged_before, keep);
  }
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
