#include "fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "error.h"

namespace mr {
namespace {

// One bit per descriptor below kMaxTracked; a bitmap, so that the fork handler needs no lock and no allocation.
constexpr int kMaxTracked = 1 << 20;
std::atomic<uint64_t> g_open[kMaxTracked / 64];
std::atomic<int> g_highest{-1};
std::atomic<int> g_pid{0};

void close_all_in_child() {
  const int highest = g_highest.load();
  for (int word = 0; word <= highest / 64; ++word) {
    uint64_t bits = g_open[word].exchange(0);
    while (bits != 0) {
      ::close(word * 64 + __builtin_ctzll(bits));
      bits &= bits - 1;
    }
  }
  g_pid.store(::getpid());
}

void install_fork_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_pid.store(::getpid());
    ::pthread_atfork(nullptr, nullptr, close_all_in_child);
  });
}

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  install_fork_handler();
  if (fd < 0 || fd >= kMaxTracked) return;
  g_open[fd / 64].fetch_or(1ull << (fd % 64));
  int seen = g_highest.load();
  while (seen < fd && !g_highest.compare_exchange_weak(seen, fd)) {
  }
}

void Fd::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  if (fd < kMaxTracked) {
    const uint64_t bit = 1ull << (fd % 64);
    // Already closed by the fork handler: the number may belong to someone else by now.
    if ((g_open[fd / 64].fetch_and(~bit) & bit) == 0) return;
  }
  ::close(fd);
}

int this_pid() {
  if (const int known = g_pid.load(std::memory_order_relaxed); known != 0) return known;
  install_fork_handler();
  return g_pid.load(std::memory_order_relaxed);
}

bool is_this_process(int owner_pid) { return this_pid() == owner_pid; }

void fill_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", O_RDWR);  // gets the lowest number that is free: this one
}

Fd make_eventfd() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) throw Error(MR_RESOURCE_EXHAUSTED, "can't make an eventfd (raise `ulimit -n`)", errno);
  return fd;
}

Fd make_memfd(const std::string& label, uint64_t size) {
  Fd fd(static_cast<int>(::syscall(SYS_memfd_create, label.c_str(), 1u /*CLOEXEC*/ | 2u /*ALLOW_SEALING*/)));
  if (!fd.valid())
    throw Error(MR_RESOURCE_EXHAUSTED, "can't make shared memory " + label + " (raise `ulimit -n`)", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't size shared memory " + label + " to " + std::to_string(size) + " bytes",
                errno);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't seal shared memory " + label, errno);
  return fd;
}

Fd reopen_read_only(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

Fd open_pidfd(int pid) { return pid > 0 ? Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0u))) : Fd(); }

}  // namespace mr
