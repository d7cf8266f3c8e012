// What there is once a process. A forked child gets a fresh one: a lock that was held during the fork stays locked
// there.
#pragma once

#include <atomic>
#include <memory>

#include "fd.h"

namespace mr {

template <typename T>
T& of_this_process() {
  struct Current {
    const int pid = this_pid();
    T value;
  };
  static std::atomic<Current*> current{nullptr};  // never freed
  Current* mine = current.load();
  if (mine == nullptr || mine->pid != this_pid()) {
    auto fresh = std::make_unique<Current>();
    if (current.compare_exchange_strong(mine, fresh.get())) mine = fresh.release();
  }
  return mine->value;
}

}  // namespace mr
