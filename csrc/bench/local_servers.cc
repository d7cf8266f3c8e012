#include "local_servers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "failure.h"
#include "owner.h"
#include "placement.h"

namespace mr::bench {
namespace {

constexpr int kEndMilliseconds = 10'000;  // for a server to close its engine

[[noreturn]] void be_a_server(const Options& options, const Secret& secret, int stop, int address, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  try {
    pin_to(options.server_cpu);
    EngineHandle handle(options, secret, nullptr);
    serve(handle, stop, [address](const std::string& text) {
      if (write(address, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
        throw_errno("telling the address");
      close(address);
    });
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "transport_bench: server: %s\n", failure.what());
    _exit(1);
  }
  _exit(0);
}

std::string read_to_end(int fd) {
  std::string text;
  char part[4096];
  for (ssize_t got; (got = read(fd, part, sizeof part)) > 0;) text.append(part, static_cast<size_t>(got));
  return text;
}

// Waits for the end of a child; kills it when it takes too long.
void reap(pid_t pid) {
  int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  pollfd wait{pidfd, POLLIN, 0};
  if (pidfd < 0 || poll(&wait, 1, kEndMilliseconds) != 1) kill(pid, SIGKILL);
  if (pidfd >= 0) close(pidfd);
  waitpid(pid, nullptr, 0);
}

}  // namespace

LocalServers::LocalServers(const Options& options, const Secret& secret) {
  pid_t parent = getpid();
  std::fflush(nullptr);
  for (uint32_t i = 0; i < options.peers; ++i) {
    int stop[2], address[2];
    if (pipe2(stop, O_CLOEXEC) != 0 || pipe2(address, O_CLOEXEC) != 0) throw_errno("pipe");
    pid_t pid = fork();
    if (pid < 0) throw_errno("fork");
    if (pid == 0) {
      close(address[0]);
      be_a_server(options, secret, stop[0], address[1], parent);
    }
    close(stop[0]);
    close(address[1]);
    servers_.push_back({pid, stop[1]});
    addresses_.push_back(read_to_end(address[0]));
    close(address[0]);
    if (addresses_.back().empty()) throw Failure("a server did not start");
  }
}

LocalServers::~LocalServers() {
  for (const Server& server : servers_)
    if (write(server.stop, "", 1) != 1) kill(server.pid, SIGKILL);
  for (const Server& server : servers_) {
    reap(server.pid);
    close(server.stop);
  }
}

}  // namespace mr::bench
