// A word that the kernel changes when the process that showed it ends.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <thread>

#include "base/life_sign.h"
#include "check.h"
#include "memory/region.h"

using namespace mr;

namespace {

struct Place {
  Place() : fd(make_memfd("sign", 4096)), mapping(fd.get(), 4096, true), sign(mapping.address()) {}
  uint32_t now() const {
    return reinterpret_cast<const std::atomic<uint32_t>*>(mapping.address() + sign.offset())->load();
  }

  Fd fd;
  Mapping mapping;
  LifeSign sign;
};

// A process that gives a sign of life in `place`, tells what others are to see, and then waits for `act`.
template <typename Act>
std::pair<pid_t, uint32_t> living(Place& place, int act_when, Act&& act) {
  int said[2];
  CHECK_EQ(::pipe2(said, O_CLOEXEC), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::thread([&] {  // not the one that goes on to end the process
      place.sign.give();
      const uint32_t told[2] = {place.sign.value(), place.sign.offset()};
      (void)!::write(said[1], told, sizeof told);
      for (;;) ::pause();
    })
        .detach();
    char byte;
    (void)!::read(act_when, &byte, 1);
    act();
    for (;;) ::pause();
  }
  ::close(said[1]);
  uint32_t told[2] = {};
  CHECK_EQ(::read(said[0], told, sizeof told), static_cast<ssize_t>(sizeof told));
  ::close(said[0]);
  CHECK_EQ(told[1], place.sign.offset());  // both are 0: where the lock begins
  return {pid, told[0]};
}

}  // namespace

TEST(a_thread_shows_it_while_it_lives) {
  Place place;
  CHECK_EQ(place.sign.value(), 0u);
  std::thread([&] {
    place.sign.give();
    CHECK(place.sign.value() != 0);
    CHECK_EQ(place.now(), place.sign.value());
  }).join();
  CHECK(place.now() != place.sign.value());
}

TEST(whatever_ends_the_process_ends_the_sign) {
  using Act = void (*)();
  const Act acts[] = {[] { ::kill(::getpid(), SIGKILL); },  // by itself, as the kernel would for want of memory
                      [] { ::_exit(0); }, [] { ::execl("/bin/sleep", "sleep", "100", nullptr); }, nullptr};
  for (const Act act : acts) {
    Place place;
    int go[2];
    CHECK_EQ(::pipe2(go, O_CLOEXEC), 0);
    const auto [pid, value] = living(place, go[0], [&] {
      if (act != nullptr) act();
    });
    CHECK(value != 0);
    CHECK_EQ(place.now(), value);
    (void)!::write(go[1], "", 1);
    if (act == nullptr) ::kill(pid, SIGKILL);
    const bool exec = act == acts[2];
    siginfo_t ended{};
    // A zombie still has its id: the sign has ended before another process could have it.
    if (!exec) CHECK_EQ(::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT), 0);
    while (exec && place.now() == value) std::this_thread::yield();  // the id goes on as another program
    CHECK(place.now() != value);
    if (exec) ::kill(pid, SIGKILL);
    CHECK_EQ(::waitpid(pid, nullptr, 0), pid);
    for (const int end : go) ::close(end);
  }
}

TEST(a_forked_child_that_lives_on_does_not_keep_it_up) {
  Place place;
  int go[2];
  CHECK_EQ(::pipe2(go, O_CLOEXEC), 0);
  int said[2];
  CHECK_EQ(::pipe2(said, O_CLOEXEC), 0);
  const auto [pid, value] = living(place, go[0], [&] {
    if (::fork() != 0) return;
    ::close(go[1]);
    char byte = 1;
    (void)!::write(said[1], &byte, 1);
    (void)!::read(go[0], &byte, 1);  // until the test has ended
    ::_exit(0);
  });
  (void)!::write(go[1], "", 1);
  char byte = 0;
  CHECK_EQ(::read(said[0], &byte, 1), 1);
  CHECK_EQ(place.now(), value);
  ::kill(pid, SIGKILL);
  CHECK_EQ(::waitpid(pid, nullptr, 0), pid);
  CHECK(place.now() != value);
  for (const int end : {go[0], go[1], said[0], said[1]}) ::close(end);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
