// Hosts on one machine, and the wire between them; tests/hosts/network.py leads it. Needs root, and /dev/net/tun.
//
//   network COUNT MAKER      says "ready PID..", the hosts' first processes, or "cannot WHY"; ends with process MAKER
//   cable HOST PLUGGED DELAY LOSS RATE     of what host HOST (from 1) sends: 0 or 1, seconds, 0..1, bytes a second
//   power_off HOST           with everything that runs there
//   boot HOST                anew, as another boot of that host
// Each is answered by "done ..", the last by "done PID".
//
//   network become COMMAND...  by a process that was started under a host's process ids: runs COMMAND on that host
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

#include "host.h"
#include "wire.h"

namespace hosts {
namespace {

void say(const std::string& line) {
  const std::string whole = line + "\n";
  (void)!::write(1, whole.data(), whole.size());
}

class Network {
 public:
  explicit Network(int count) : hosts_(static_cast<size_t>(count)), wire_(hosts_.size()) {
    std::string pids;
    for (int number = 1; number <= count; ++number) pids += " " + std::to_string(boot_host(number));
    say("ready" + pids);
  }

  // Until the maker has ended, or its end of our input is closed.
  void run(int maker) {
    std::vector<pollfd> watched(hosts_.size() + 2);
    for (;;) {
      for (size_t i = 0; i < hosts_.size(); ++i) watched[i] = {hosts_[i].card, POLLIN, 0};
      watched[hosts_.size()] = {maker, POLLIN, 0};
      watched[hosts_.size() + 1] = {0, POLLIN, 0};
      wait_for(watched, wire_.deliver());
      if (watched[hosts_.size()].revents != 0) return;
      for (size_t i = 0; i < hosts_.size(); ++i)
        if (watched[i].revents != 0) wire_.take(i);
      if (watched[hosts_.size() + 1].revents != 0 && !take_orders()) return;
    }
  }

 private:
  static void wait_for(std::vector<pollfd>& watched, Clock::time_point until) {
    for (auto& each : watched) each.revents = 0;
    if (until == Clock::time_point::max()) {
      ::ppoll(watched.data(), watched.size(), nullptr, nullptr);
      return;
    }
    const auto left = std::max(until - Clock::now(), Clock::duration::zero()).count();
    const timespec time{left / 1000000000, left % 1000000000};
    ::ppoll(watched.data(), watched.size(), &time, nullptr);
  }

  pid_t boot_host(int number) {
    Host& host = hosts_[static_cast<size_t>(number - 1)];
    power_off(&host);
    host = boot(number, static_cast<int>(hosts_.size()));
    wire_.plug(static_cast<size_t>(number - 1), host.card);
    return host.first;
  }

  bool take_orders() {
    char text[4096];
    const ssize_t got = ::read(0, text, sizeof text);
    if (got <= 0) return false;
    orders_.append(text, static_cast<size_t>(got));
    for (size_t end; (end = orders_.find('\n')) != std::string::npos; orders_.erase(0, end + 1))
      obey(orders_.substr(0, end));
    return true;
  }

  void obey(const std::string& order) {
    std::istringstream words(order);
    std::string what;
    size_t number = 0;
    words >> what >> number;
    Host& host = hosts_.at(number - 1);
    if (what == "cable") {
      Cable cable;
      words >> cable.plugged >> cable.delay >> cable.loss >> cable.rate;
      wire_.set(number - 1, cable);
      // One loss of a piece of 64 KiB would be that of 45 packets.
      if (host.card >= 0) send_in_pieces(host, cable.loss == 0);
      say("done");
    } else if (what == "power_off") {
      wire_.plug(number - 1, -1);
      power_off(&host);
      say("done");
    } else if (what == "boot") {
      say("done " + std::to_string(boot_host(static_cast<int>(number))));
    } else {
      throw std::runtime_error("no order: " + order);
    }
  }

  std::vector<Host> hosts_;
  Wire wire_;
  std::string orders_;
};

}  // namespace
}  // namespace hosts

int main(int argc, char** argv) {
  try {
    if (argc > 2 && std::strcmp(argv[1], "become") == 0) hosts::become(argv + 2);
    if (argc != 3) throw std::runtime_error("usage: network COUNT MAKER | network become COMMAND...");
    const int count = std::atoi(argv[1]);
    if (count < 1 || count > hosts::kMaxHosts) throw std::runtime_error("a number of hosts from 1 to 200 is needed");
    const int maker = static_cast<int>(::syscall(SYS_pidfd_open, std::atoi(argv[2]), 0));
    if (maker < 0) return 1;  // it has ended already
    ::signal(SIGCHLD, SIG_IGN);
    ::prctl(PR_SET_TIMERSLACK, 1000);
    hosts::Network(count).run(maker);
  } catch (const std::exception& error) {
    hosts::say(std::string("cannot ") + error.what());
    return 1;
  }
}
