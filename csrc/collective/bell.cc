#include "bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace mr {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

void Bell::ring() {
  rung.fetch_add(1);
  ::syscall(SYS_futex, &rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Bell::sleep(uint32_t seen, Time until) {
  timespec left{}, *limit = nullptr;
  if (until != Time::max()) {
    const auto ns = std::max<int64_t>(0, std::chrono::nanoseconds(until - Clock::now()).count());
    left = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    limit = &left;
  }
  return ::syscall(SYS_futex, &rung, FUTEX_WAIT, seen, limit, nullptr, 0) == 0 || errno != EINTR;
}

}  // namespace mr
