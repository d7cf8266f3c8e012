// Owned descriptors: closed once, and never left open in a forked child.
#include "base/fd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace mr;

namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// Runs `body` in a forked child; true where it returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(body() ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(closes_once) {
  int number;
  {
    Fd fd = make_eventfd();
    number = fd.get();
    CHECK(fd.valid() && is_open(number));
    fd.reset();
    CHECK(!fd.valid() && !is_open(number));
    // The number goes to someone else: neither another reset nor the end of the scope may close it.
    CHECK_EQ(::open("/dev/null", O_RDONLY | O_CLOEXEC), number);
    fd.reset();
  }
  CHECK(is_open(number));
  ::close(number);
}

TEST(standard_streams_are_filled_where_they_are_closed) {
  CHECK(in_child([] {
    ::close(0);
    ::close(2);
    struct stat before{}, after{};
    const bool known = ::fstat(1, &before) == 0;
    fill_standard_streams();
    const Fd next = make_eventfd();
    return is_open(0) && is_open(2) && next.get() > 2 && known && ::fstat(1, &after) == 0 &&
           before.st_ino == after.st_ino;  // the one that was open stays what it is
  }));
}

TEST(moves) {
  Fd a = make_eventfd();
  const int number = a.get();
  Fd b(std::move(a));
  CHECK(!a.valid());
  CHECK_EQ(b.get(), number);
  Fd c = make_eventfd();
  const int old = c.get();
  c = std::move(b);
  CHECK_EQ(c.get(), number);
  CHECK(!is_open(old) && is_open(number));
  Fd& same = c;
  c = std::move(same);
  CHECK(c.valid() && is_open(number));
}

TEST(everything_is_close_on_exec) {
  const Fd event = make_eventfd(), memory = make_memfd("test", 4096), process = open_pidfd(::getpid());
  const Fd reopened = reopen_read_only(memory.get());
  for (const Fd* fd : {&event, &memory, &reopened, &process})
    if (fd->valid()) CHECK((::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST(a_forked_child_has_none_of_them) {
  const Fd kept = make_eventfd();
  Fd closed = make_eventfd();
  const int other = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // not ours: stays open
  const int closed_number = closed.get();
  closed.reset();
  CHECK_EQ(::dup2(other, closed_number), closed_number);  // nor is this one any more
  CHECK(in_child([&] { return !is_open(kept.get()) && is_open(other) && is_open(closed_number); }));
  CHECK(is_open(kept.get()));
  ::close(other);
  ::close(closed_number);
}

TEST(a_forked_child_does_not_close_what_it_opens_on_old_numbers) {
  Fd fd = make_eventfd();
  CHECK(in_child([&] {
    const int number = fd.get();
    if (::open("/dev/null", O_RDONLY | O_CLOEXEC) != number) return ::fcntl(number, F_GETFD) < 0;
    fd.reset();
    return is_open(number);
  }));
}

TEST(a_forked_child_has_its_own_descriptors_and_its_child_none) {
  CHECK(in_child([] {
    const Fd own = make_eventfd();
    if (!is_open(own.get())) return false;
    return in_child([&] { return !is_open(own.get()); }) && is_open(own.get());
  }));
}

TEST(a_forked_child_is_another_process) {
  const int pid = this_pid();
  CHECK_EQ(pid, ::getpid());
  CHECK(is_this_process(pid));
  CHECK(in_child([&] { return !is_this_process(pid) && this_pid() == ::getpid(); }));
  CHECK(is_this_process(pid));
}

TEST(many_threads_open_and_close_while_another_forks) {
  std::vector<std::thread> threads;
  std::atomic<bool> quit{false};
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      while (!quit) {
        Fd a = make_eventfd();
        Fd b = std::move(a);
      }
    });
  const Fd stays = make_eventfd();
  bool all = true;
  for (int i = 0; i < 30; ++i) all &= in_child([&] { return !is_open(stays.get()); });
  quit = true;
  for (auto& thread : threads) thread.join();
  CHECK(all);
  CHECK(is_open(stays.get()));
}

TEST(shared_memory_has_its_size_for_good) {
  const Fd memory = make_memfd("test", 10000);
  CHECK_EQ(::lseek(memory.get(), 0, SEEK_END), 10000);
  CHECK_EQ(::ftruncate(memory.get(), 20000), -1);
  CHECK_EQ(errno, EPERM);
  CHECK_EQ(::ftruncate(memory.get(), 100), -1);
  CHECK_EQ(::lseek(memory.get(), 0, SEEK_END), 10000);
}

TEST(shared_memory_that_can_not_be_is_an_error) {
  try {
    make_memfd("test", UINT64_MAX);
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.status().kind, MR_RESOURCE_EXHAUSTED);
    CHECK(error.status().text.find("18446744073709551615") != std::string::npos);
  }
}

TEST(read_only_descriptors_map_no_writable_memory) {
  const Fd memory = make_memfd("test", 4096);
  const Fd read_only = reopen_read_only(memory.get());
  CHECK(read_only.valid());
  void* const writable = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  CHECK(writable != MAP_FAILED);
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, read_only.get(), 0) == MAP_FAILED);
  void* const readable = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, read_only.get(), 0);
  CHECK(readable != MAP_FAILED);
  static_cast<char*>(writable)[7] = 'x';
  CHECK(static_cast<volatile char*>(readable)[7] == 'x');
  ::munmap(writable, 4096);
  ::munmap(readable, 4096);
}

TEST(a_pidfd_tells_the_end_of_a_process) {
  CHECK(!open_pidfd(0).valid());
  CHECK(!open_pidfd(-1).valid());
  int hold[2];
  CHECK_EQ(::pipe2(hold, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(hold[1]);
    (void)!::read(hold[0], &byte, 1);
    ::_exit(0);
  }
  ::close(hold[0]);
  const Fd process = open_pidfd(child);
  CHECK(process.valid());
  pollfd ready{process.get(), POLLIN, 0};
  CHECK_EQ(::poll(&ready, 1, 0), 0);
  ::close(hold[1]);
  CHECK_EQ(::poll(&ready, 1, 20000), 1);
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
