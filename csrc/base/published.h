// A value that is replaced as a whole, seldom, and read by any thread without ever waiting.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

namespace mr {

template <typename T>
class Published {
 public:
  explicit Published(std::shared_ptr<T> first = nullptr) : current_(new std::shared_ptr<T>(std::move(first))) {}
  ~Published() { delete current_.load(); }
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  std::shared_ptr<T> get() const {
    readers_.fetch_add(1);
    std::shared_ptr<T> out = *current_.load();
    readers_.fetch_sub(1);
    return out;
  }
  // One thread at a time. Waits for those inside of get(): who comes later finds the new value.
  void set(std::shared_ptr<T> fresh) {
    const std::unique_ptr<const std::shared_ptr<T>> old(current_.exchange(new std::shared_ptr<T>(std::move(fresh))));
    while (readers_.load() != 0) std::this_thread::yield();
  }

 private:
  std::atomic<const std::shared_ptr<T>*> current_;
  mutable std::atomic<uint32_t> readers_{0};
};

}  // namespace mr
