#include "shm_process.h"

#include <sys/uio.h>

#include <climits>

#include "../base/fence.h"
#include "lane.h"

namespace mr {
namespace {

// A piece of remote memory costs the kernel 400 ns, as much as some KiB of copying. So runs of a strided read with less
// than this between them are read as one piece, and what lies between goes to a place where nobody looks.
constexpr uint64_t kMaxGap = 2048;

// The pieces of one system call, both sides in the same order.
struct Pieces {
  iovec local[IOV_MAX], remote[IOV_MAX];
  int num_local = 0, num_remote = 0;
  uint64_t bytes = 0;    // that the call moves, gaps included
  uint64_t payload = 0;  // without them
  char gaps[kMaxGap];

  void put_local(void* at, uint64_t length) { local[num_local++] = {at, length}; }
  void put_remote(uint64_t at, uint64_t length) { remote[num_remote++] = {reinterpret_cast<void*>(at), length}; }

  // Takes as much as fits from bytes [begin, begin + length) of the views.
  void fill(uint8_t* local_base, const View& local_view, uint64_t base, const View& remote_view, uint64_t begin,
            uint64_t length, bool over_gaps) {
    Cursor here(local_view, begin), there(remote_view, begin);
    uint64_t here_end = 0, there_end = 0;  // where the last pieces end
    while (payload < length && num_local + 2 <= IOV_MAX && num_remote + 1 <= IOV_MAX) {
      const auto target = here.peek(length - payload);
      const auto source = there.peek(target.length);
      const uint64_t from = base + source.offset, gap = from - there_end;  // a step back is a huge gap
      uint8_t* const to = local_base + target.offset;
      if (there_end == 0 || gap > (over_gaps ? kMaxGap : 0)) {
        put_remote(from, source.length);
      } else {
        remote[num_remote - 1].iov_len += gap + source.length;
        if (gap != 0) put_local(gaps, gap);
        bytes += gap;
        if (gap != 0) here_end = 0;
      }
      if (here_end == reinterpret_cast<uintptr_t>(to))
        local[num_local - 1].iov_len += source.length;
      else
        put_local(to, source.length);
      here_end = reinterpret_cast<uintptr_t>(to) + source.length;
      there_end = from + source.length;
      bytes += source.length;
      payload += source.length;
      here.advance(source.length);
      there.advance(source.length);
    }
  }

  // How much of the payload the first `moved` bytes are.
  uint64_t payload_within(uint64_t moved) const {
    uint64_t out = 0;
    for (int i = 0; i < num_local && moved > 0; ++i) {
      const uint64_t here = std::min<uint64_t>(moved, local[i].iov_len);
      if (local[i].iov_base != gaps) out += here;
      moved -= here;
    }
    return out;
  }
};

}  // namespace

std::string ProcessMemory::process() const { return "process " + std::to_string(identity_.told_pid); }

Status ProcessMemory::failure(int error) const {
  switch (error) {
    case ESRCH:
      return fail(MR_PEER_LOST, process() + " has ended");
    case EPERM:
      return Status{kUnavailable, EPERM,
                    "process_vm_readv is refused (EPERM: kernel.yama.ptrace_scope and the owner's option allow_ptrace, "
                    "another user, or a container's seccomp filter; see `monarch-rdma doctor`)"};
    case ENOSYS:
      return Status{kUnavailable, ENOSYS, "process_vm_readv is not in this kernel, or a seccomp filter hides it"};
    case ENOMEM:
      return fail(MR_RESOURCE_EXHAUSTED, "the kernel has no memory for process_vm_readv", ENOMEM);
    default:
      return fail(MR_ACCESS_DENIED, "process_vm_readv on " + process(), error);
  }
}

Status ProcessMemory::other_owner() const {
  return fail(MR_PEER_LOST, process() + " has ended, or is not the one that granted the region any more");
}

bool ProcessMemory::open(const Identity& identity, std::string* reason) {
  identity_ = identity;
  if (identity.pid <= 0) {
    *reason = process() + " has no id here (it runs in another pid namespace)";
    return false;
  }
  if (identity.signs.life_word == 0) {
    *reason = "the kernel does not tell of the end of " + process() + " (robust futexes are missing or filtered)";
    return false;
  }
  const Status status = try_owner();
  open_ = status.ok();
  if (!open_) *reason = status.text;
  return open_;
}

Status ProcessMemory::try_owner() const {
  uint64_t seen = 0;
  const iovec here{&seen, sizeof seen}, there{reinterpret_cast<void*>(identity_.word_address), sizeof seen};
  if (::process_vm_readv(identity_.pid, &here, 1, &there, 1, 0) < 0 && errno != EFAULT) return failure(errno);
  return seen == identity_.word && identity_.signs.are_up() ? Status{} : other_owner();
}

// The signs are looked at after the call: as long as they are up, the process had its id and its memory.
Status ProcessMemory::read(uint8_t* local, const View& local_view, uint64_t base, const View& remote_view,
                           uint64_t begin, uint64_t length) const {
  const bool one_piece = local_view.is_contiguous() && remote_view.is_contiguous();
  while (length > 0) {
    ssize_t got;
    uint64_t moved;
    if (one_piece) {
      const iovec here{local + local_view.offset() + begin, length};
      const iovec there{reinterpret_cast<void*>(base + remote_view.offset() + begin), length};
      got = ::process_vm_readv(identity_.pid, &here, 1, &there, 1, 0);
      moved = got < 0 ? 0 : static_cast<uint64_t>(got);
    } else {
      got = read_pieces(local, local_view, base, remote_view, begin, length, &moved);
    }
    const int error = got < 0 ? errno : 0;
    fence_reads();
    if (!identity_.signs.are_up()) return other_owner();
    if (error != 0 && error != EFAULT) return failure(error);
    if (moved == 0)
      return fail(MR_ACCESS_DENIED, "memory is not readable in " + process() + " or not writable here", EFAULT);
    begin += moved;
    length -= moved;
  }
  return {};
}

ssize_t ProcessMemory::read_pieces(uint8_t* local, const View& local_view, uint64_t base, const View& remote_view,
                                   uint64_t begin, uint64_t length, uint64_t* moved) const {
  Pieces pieces;
  pieces.fill(local, local_view, base, remote_view, begin, length, true);
  const ssize_t got =
      ::process_vm_readv(identity_.pid, pieces.local, pieces.num_local, pieces.remote, pieces.num_remote, 0);
  *moved = got < 0 ? 0 : pieces.payload_within(static_cast<uint64_t>(got));
  return got;
}

Status ProcessMemory::write(const uint8_t* local, const View& local_view, uint64_t base, const View& remote_view,
                            uint64_t begin, uint64_t length, std::atomic<bool>& changed) const {
  while (length > 0) {
    Pieces pieces;
    pieces.fill(const_cast<uint8_t*>(local), local_view, base, remote_view, begin, length, false);
    if (!identity_.signs.are_up()) return other_owner();
    const ssize_t put =
        ::process_vm_writev(identity_.pid, pieces.local, pieces.num_local, pieces.remote, pieces.num_remote, 0);
    const int error = put < 0 ? errno : 0;
    if (!identity_.signs.are_up()) return other_owner();
    if (error != 0 && error != EFAULT) return failure(error);
    if (put <= 0)
      return fail(MR_ACCESS_DENIED, "memory is not writable in " + process() + " or not readable here", EFAULT);
    changed.store(true, std::memory_order_relaxed);
    begin += put;
    length -= put;
  }
  return {};
}

}  // namespace mr
