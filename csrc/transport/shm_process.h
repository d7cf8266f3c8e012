// Memory of another process of this host, by process id: process_vm_readv and process_vm_writev. Process ids are used
// again, and exec changes what is in the memory: so a look at the owner's signs goes with each call.
#pragma once

#include <sys/types.h>

#include <atomic>

#include "../memory/view.h"
#include "process_life.h"

namespace mr {

class ProcessMemory {
 public:
  struct Identity {
    int pid = 0;                          // in our pid namespace; 0: unknown
    int told_pid = 0;                     // in its own, for messages
    uint64_t word_address = 0, word = 0;  // in its memory, to try it
    OwnerSigns signs = {};
  };

  // Tries it. On failure `reason` says why it can't be used, and how that changes.
  bool open(const Identity& identity, std::string* reason);
  bool is_open() const { return open_; }

  // Bytes [begin, begin + length) of the views' common order; the remote view is relative to address `base`.
  // MR_PEER_LOST where the process is gone, MR_ACCESS_DENIED where the memory is, kUnavailable where the kernel
  // refuses.
  Status read(uint8_t* local, const View& local_view, uint64_t base, const View& remote_view, uint64_t begin,
              uint64_t length) const;
  // `changed` is set once bytes were.
  Status write(const uint8_t* local, const View& local_view, uint64_t base, const View& remote_view, uint64_t begin,
               uint64_t length, std::atomic<bool>& changed) const;

 private:
  ssize_t read_pieces(uint8_t* local, const View& local_view, uint64_t base, const View& remote_view, uint64_t begin,
                      uint64_t length, uint64_t* moved) const;
  Status try_owner() const;
  Status other_owner() const;
  Status failure(int error) const;
  std::string process() const;

  Identity identity_;
  bool open_ = false;
};

}  // namespace mr
