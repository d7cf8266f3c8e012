// Measures the engine without Python: latency and bandwidth of one-sided operations and of control messages, beside
// the raw mechanism each lane is built on. See --help.
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <stdexcept>

#include "engine_handle.h"
#include "failure.h"
#include "figures.h"
#include "local_servers.h"
#include "options.h"
#include "owner.h"
#include "placement.h"
#include "raw_peer.h"
#include "report.h"
#include "session.h"

namespace mr::bench {
namespace {

void listen(const Options& options) {
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  sigprocmask(SIG_BLOCK, &ends, nullptr);  // before the engine's threads, which inherit it
  int stop = signalfd(-1, &ends, SFD_CLOEXEC);
  if (stop < 0) throw_errno("signalfd");
  Secret secret = secret_from_file(options.secret_file, true);
  EngineHandle handle(options, secret, nullptr);
  serve(handle, stop, [](const std::string& address) {
    std::printf("%s\n", address.c_str());
    std::fflush(stdout);
  });
  close(stop);
}

void measure_lane(const Options& options, Session& session, Lane lane, RawPeer* raw, Report& report) {
  std::vector<uint64_t> sizes = options.strided.pieces ? std::vector<uint64_t>{0} : options.sizes;
  for (Op op : options.ops) {
    if (op == Op::kMessage) continue;
    if (op == Op::kFetchAdd) sizes = {8};
    for (uint64_t size : sizes) {
      if (options.memory) {
        report.add(measure_memory(session, lane, op, size));
        continue;
      }
      for (const Row& row : measure_transfers(session, lane, op, size, options, raw)) report.add(row);
    }
  }
}

void measure(const Options& options, const Secret& secret, const std::vector<std::string>& addresses, RawPeer* raw,
             Report& report) {
  if (options.idle > 0 || options.has(Op::kMessage)) {
    Session session(options, secret, nullptr, addresses);
    if (options.idle > 0) {
      for (const IdleRow& row : measure_idle_engines(session, options.idle)) report.add(row);
      return;
    }
    for (uint64_t size : options.sizes)
      for (const Row& row : measure_messages(session, size, options, raw)) report.add(row);
  }
  if (options.ops == std::vector{Op::kMessage}) return;
  for (Lane lane : options.lanes) {
    Session session(options, secret, &lane, lane == Lane::kLocal ? std::vector<std::string>{} : addresses);
    measure_lane(options, session, lane, raw, report);
  }
}

void measure(const Options& options) {
  Report report(options.json);
  if (options.role == Role::kConnect) {
    measure(options, secret_from_file(options.secret_file, false), options.connect, nullptr, report);
  } else {
    Secret secret = random_secret();
    LocalServers servers(options, secret);
    std::unique_ptr<RawPeer> raw;
    if (options.baseline && (options.has(Lane::kTcp) || options.has(Op::kMessage)))
      raw = std::make_unique<RawPeer>(options.server_cpu);
    pin_to(options.client_cpu);
    measure(options, secret, servers.addresses(), raw.get(), report);
  }
  report.finish();
}

}  // namespace
}  // namespace mr::bench

int main(int argc, char** argv) {
  using namespace mr::bench;
  try {
    Options options = parse_options(argc, argv);
    if (options.help)
      std::fputs(help_text().c_str(), stdout);
    else if (options.role == Role::kListen)
      listen(options);
    else
      measure(options);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw std::runtime_error("the figures cannot be written");
    return 0;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "transport_bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "transport_bench: %s\n", error.what());
    return 1;
  }
}
