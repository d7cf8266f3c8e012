#include "life_sign.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mr {

static_assert(sizeof(pthread_mutex_t) <= LifeSign::kBytes);

void LifeSign::give() {
  auto* const lock = reinterpret_cast<pthread_mutex_t*>(place_);
  pthread_mutexattr_t kind;
  ::pthread_mutexattr_init(&kind);
  ::pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  ::pthread_mutex_init(lock, &kind);
  ::pthread_mutexattr_destroy(&kind);
  ::pthread_mutex_lock(lock);
  // What the kernel knows of this thread's locks tells where in the lock its word is, and that it will look.
  robust_list_head* locks = nullptr;
  size_t length = 0;
  if (::syscall(SYS_get_robust_list, 0, &locks, &length) != 0 || locks == nullptr) return;
  const uint8_t* const word = reinterpret_cast<const uint8_t*>(locks->list.next) + locks->futex_offset;
  if (word < place_ || word + sizeof(uint32_t) > place_ + sizeof(pthread_mutex_t)) return;
  offset_ = static_cast<uint32_t>(word - place_);
  const uint32_t seen = reinterpret_cast<const std::atomic<uint32_t>*>(word)->load();
  if ((seen & FUTEX_TID_MASK) == static_cast<uint32_t>(::syscall(SYS_gettid)))
    value_.store(seen, std::memory_order_release);
}

}  // namespace mr
