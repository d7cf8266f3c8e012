// The shm lane without shared memory: the kernel copies, by process id.
#include <sys/mman.h>

#include "check.h"
#include "pattern.h"
#include "shm_side.h"
#include "transport/shm_process.h"

using namespace mr;
using namespace mr::test;

TEST(process_vm_finds_out_by_itself_that_the_owner_is_gone) {
  uint64_t word = 77, value = 5;  // in both processes
  const int pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  ProcessMemory memory;
  std::string reason;
  CHECK(memory.open({.pid = pid, .told_pid = pid, .word_address = reinterpret_cast<uint64_t>(&word), .word = 77},
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

TEST(process_vm_refuses_another_process_than_the_one_that_granted) {
  uint64_t word = 77, value = 5, local = 0;
  const ProcessMemory::Identity identity{
      .pid = ::getpid(), .told_pid = 1, .word_address = reinterpret_cast<uint64_t>(&word), .word = 77};
  const View view = View::contiguous(0, 8);
  const auto base = reinterpret_cast<uint64_t>(&value);
  ProcessMemory memory;
  std::string reason;
  CHECK(memory.open(identity, &reason));
  std::atomic_ref(word).store(78);
  std::atomic<bool> changed{false};
  CHECK_EQ(memory.read(reinterpret_cast<uint8_t*>(&local), view, base, view, 0, 8).kind, MR_PEER_LOST);
  CHECK_EQ(memory.write(reinterpret_cast<uint8_t*>(&local), view, base, view, 0, 8, changed).kind, MR_PEER_LOST);
  CHECK(!changed && value == 5);

  ProcessMemory wrong;
  CHECK(!wrong.open(identity, &reason));
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
