// The shm lane without shared memory: the kernel copies, by process id.
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <future>

#include "check.h"
#include "pattern.h"
#include "shm_side.h"
#include "transport/shm_process.h"

using namespace mr;
using namespace mr::test;

namespace {

// What an owner shows: here both words are this test's own.
struct Shown {
  std::atomic<uint64_t> link{77};
  std::atomic<uint32_t> life{9};
  OwnerSigns signs() const { return {&link, 77, &life, 9}; }
};

}  // namespace

TEST(process_vm_finds_out_by_itself_that_the_owner_is_gone) {
  const Shown shown;
  uint64_t word = 77, value = 5;  // in both processes
  const int pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  ProcessMemory memory;
  std::string reason;
  CHECK(memory.open({.pid = pid,
                     .told_pid = pid,
                     .word_address = reinterpret_cast<uint64_t>(&word),
                     .word = 77,
                     .signs = shown.signs()},
                    &reason));
  uint64_t local = 0;
  std::atomic<bool> changed{false};
  const View view = View::contiguous(0, 8);
  const auto base = reinterpret_cast<uint64_t>(&value);
  CHECK_EQ(memory.read(reinterpret_cast<uint8_t*>(&local), view, base, view, 0, 8).kind, MR_OK);
  CHECK_EQ(local, 5);
  CHECK_EQ(memory.write(reinterpret_cast<uint8_t*>(&local), view, base, view, 0, 8, changed).kind, MR_OK);
  CHECK(changed);
  changed = false;
  ::kill(pid, SIGKILL);
  siginfo_t ended;
  ::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT);  // a zombie first
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(memory.read(reinterpret_cast<uint8_t*>(&local), view, base, view, 0, 8).kind, MR_PEER_LOST);
    CHECK_EQ(memory.write(reinterpret_cast<uint8_t*>(&local), view, base, view, 0, 8, changed).kind, MR_PEER_LOST);
    ::waitpid(pid, nullptr, 0);
  }
  CHECK(!changed);
}

void drop_capabilities() {  // of this thread
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  ::syscall(SYS_capset, &header, none);
}

TEST(a_kernel_that_refuses_gives_the_reason_and_leaves_the_operation_to_another_lane) {
  const Shown shown;
  uint64_t word = 77, value = 5, local = 0;  // in both processes
  int to_child[2], from_child[2];
  CHECK_EQ(::pipe2(to_child, O_CLOEXEC) | ::pipe2(from_child, O_CLOEXEC), 0);
  const int pid = ::fork();
  if (pid == 0) {
    char byte = 0;
    ::close(to_child[1]);
    drop_capabilities();
    (void)!::write(from_child[1], &byte, 1);
    (void)!::read(to_child[0], &byte, 1);
    ::prctl(PR_SET_DUMPABLE, 0);  // as for another user's process
    (void)!::write(from_child[1], &byte, 1);
    (void)!::read(to_child[0], &byte, 1);
    ::_exit(0);
  }
  std::async(std::launch::async, [&] {
    drop_capabilities();
    char byte = 1;
    CHECK_EQ(::read(from_child[0], &byte, 1), 1);
    const ProcessMemory::Identity identity{.pid = pid,
                                           .told_pid = pid,
                                           .word_address = reinterpret_cast<uint64_t>(&word),
                                           .word = 77,
                                           .signs = shown.signs()};
    const View view = View::contiguous(0, 8);
    ProcessMemory memory, late;
    std::string reason;
    CHECK(memory.open(identity, &reason));
    CHECK_EQ(::write(to_child[1], &byte, 1) + ::read(from_child[0], &byte, 1), 2);
    CHECK(!late.open(identity, &reason));
    CHECK(reason.find("EPERM") != std::string::npos && reason.find("ptrace_scope") != std::string::npos);
    const Status status =
        memory.read(reinterpret_cast<uint8_t*>(&local), view, reinterpret_cast<uint64_t>(&value), view, 0, 8);
    CHECK_EQ(status.kind, kUnavailable);
    CHECK_EQ(status.sys_errno, EPERM);
  }).get();
  for (int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) ::close(fd);
  ::waitpid(pid, nullptr, 0);
}

TEST(process_vm_refuses_another_process_than_the_one_that_granted) {
  const View view = View::contiguous(0, 8);
  const mr_view two{0, 4, 1, {2}, {4}}, apart{0, 4, 1, {2}, {8}};
  for (int which = 0; which < 2; ++which) {  // another process has the id, or the owner has closed the link
    Shown shown;
    uint64_t word = 77, value = 5, values[2] = {5, 6}, local = 0;
    const ProcessMemory::Identity identity{.pid = ::getpid(),
                                           .told_pid = 1,
                                           .word_address = reinterpret_cast<uint64_t>(&word),
                                           .word = 77,
                                           .signs = shown.signs()};
    const auto base = reinterpret_cast<uint64_t>(&value);
    auto* const to = reinterpret_cast<uint8_t*>(&local);
    ProcessMemory memory;
    std::string reason;
    CHECK(memory.open(identity, &reason));
    CHECK_EQ(memory.read(to, view, base, view, 0, 8).kind, MR_OK);
    if (which == 0)
      shown.life = FUTEX_OWNER_DIED;
    else
      shown.link = 0;
    std::atomic<bool> changed{false};
    CHECK_EQ(memory.read(to, view, base, view, 0, 8).kind, MR_PEER_LOST);
    CHECK_EQ(memory.read(to, View::from(two), reinterpret_cast<uint64_t>(values), View::from(apart), 0, 8).kind,
             MR_PEER_LOST);
    CHECK_EQ(memory.write(to, view, base, view, 0, 8, changed).kind, MR_PEER_LOST);
    CHECK(!changed && value == 5);
    ProcessMemory late;
    CHECK(!late.open(identity, &reason));
    CHECK(reason.find("process 1") != std::string::npos);
  }
  const Shown shown;
  const uint64_t other = 78;
  std::string reason;
  ProcessMemory wrong;
  CHECK(!wrong.open({.pid = ::getpid(),
                     .told_pid = 1,
                     .word_address = reinterpret_cast<uint64_t>(&other),
                     .word = 77,
                     .signs = shown.signs()},
                    &reason));
  CHECK(reason.find("process 1") != std::string::npos);
  CHECK(!wrong.open({.pid = 0, .told_pid = 12}, &reason));
  CHECK(reason.find("namespace") != std::string::npos);
}

TEST(memory_that_is_gone_denies_access_and_says_how_far_a_write_came) {
  Pair pair(options(false, true));
  auto* const base =
      static_cast<uint8_t*>(::mmap(nullptr, 8 * kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const RemoteRegion remote = pair.region(base, 8 * kMiB);
  Bytes local(8 * kMiB, 3);
  CHECK_EQ(::mprotect(base + 6 * kMiB, 2 * kMiB, PROT_NONE), 0);
  CHECK_EQ(pair.reader.run(pair.reader.read(remote, 0, local.data(), 6 * kMiB)), MR_OK);
  CHECK_EQ(pair.reader.run(pair.reader.read(remote, 6 * kMiB - 4, local.data(), 8)), MR_ACCESS_DENIED);
  const OpRef none = pair.reader.submit(pair.reader.write(remote, 6 * kMiB, local.data(), 8));
  CHECK_EQ(Side::wait(none), MR_ACCESS_DENIED);
  CHECK_EQ(none->remote_state, MR_NOT_WRITTEN);
  const OpRef part = pair.reader.submit(pair.reader.write(remote, 0, local.data(), 8 * kMiB));
  CHECK_EQ(Side::wait(part), MR_ACCESS_DENIED);
  CHECK_EQ(part->remote_state, MR_UNKNOWN);
  ::munmap(base, 8 * kMiB);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
