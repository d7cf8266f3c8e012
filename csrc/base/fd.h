// Owning file descriptors. Each is known to a registry, so that a forked child can close the engine's descriptors:
// a socket that lives on in a child would hide the death of its parent from the peers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace mr {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// True in the process that called it first for `owner_pid`; false in a forked child of it. No system call.
bool is_this_process(int owner_pid);
int this_pid();

// Opens /dev/null in place of the standard streams that are closed. What is opened next would get their numbers, and
// whatever prints to standard error would write into it: into a peer's data, say.
void fill_standard_streams();

Fd make_eventfd();
Fd make_memfd(const std::string& label, uint64_t size);  // sealed against shrinking and growing
Fd reopen_read_only(int fd);                             // invalid Fd where /proc forbids it
Fd open_pidfd(int pid);                                  // invalid Fd where there is none

}  // namespace mr
