#include "engine_handle.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "failure.h"

namespace mr::bench {
namespace {

constexpr size_t kSecretBytes = 32;

struct File {
  ~File() {
    if (fd >= 0) close(fd);
  }
  int fd;
};

void create_secret(const std::string& path) {
  File file{open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
  if (file.fd < 0 && errno == EEXIST) return;
  if (file.fd < 0) throw_errno("creating " + path);
  Secret secret = random_secret();
  if (write(file.fd, secret.data(), secret.size()) != static_cast<ssize_t>(secret.size()))
    throw_errno("writing " + path);
}

}  // namespace

Secret random_secret() {
  Secret secret(kSecretBytes);
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) throw_errno("getrandom");
  return secret;
}

Secret secret_from_file(const std::string& path, bool create) {
  if (create) create_secret(path);
  File file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) throw_errno("opening " + path);
  struct stat facts{};
  if (fstat(file.fd, &facts) != 0) throw_errno("reading " + path);
  if (!S_ISREG(facts.st_mode) || (facts.st_mode & 077) != 0)
    throw Failure(path + " must be a regular file that only its owner may read (chmod 600)");
  Secret secret(4096);
  ssize_t got = read(file.fd, secret.data(), secret.size());
  if (got < 16) throw Failure(path + " holds fewer than the 16 bytes a secret needs");
  secret.resize(static_cast<size_t>(got));
  return secret;
}

EngineHandle::EngineHandle(const Options& options, const Secret& secret, const Lane* only) {
  mr_options wanted;
  mr_options_default(&wanted);
  wanted.secret = secret.data();
  wanted.secret_len = secret.size();
  wanted.same_host_unix = options.control_tcp ? 0 : 1;
  wanted.bulk_tls = options.bulk_tls;
  if (options.threads) wanted.copy_threads = options.threads;
  if (options.sockets) wanted.tcp_sockets = options.sockets;
  wanted.verbs_devices = options.devices.c_str();
  if (options.spin >= 0) wanted.verbs_spin = options.spin;
  if (options.role == Role::kListen) {
    wanted.listen_host = options.listen_host.c_str();
    wanted.port_min = wanted.port_max = options.listen_port;
  }
  if (only && *only != Lane::kLocal) {
    wanted.lanes = *only == Lane::kTcp ? "tcp" : *only == Lane::kVerbs ? "verbs" : "shm";
    wanted.shm_mapped = *only == Lane::kMapped;
    wanted.shm_process_vm = *only == Lane::kProcessVm;
  } else if (options.has(Lane::kVerbs)) {
    wanted.lanes = "shm,verbs,tcp";
  }
  uint64_t in_flight = options.depth * std::max<uint64_t>(options.peers, options.connect.size());
  in_flight *= std::max<uint64_t>(options.strided.pieces, 1);
  wanted.max_pending_ops = static_cast<uint32_t>(std::clamp<uint64_t>(in_flight + 64, wanted.max_pending_ops, 1 << 30));
  uint64_t largest = *std::max_element(options.sizes.begin(), options.sizes.end());
  if (options.has(Op::kMessage)) wanted.max_frame_bytes = std::max(wanted.max_frame_bytes, largest + 4096);
  mr_error error{};
  check(mr_engine_create(&wanted, &engine, &error), error, "creating an engine");
}

void EngineHandle::close() {
  if (engine) mr_engine_close(std::exchange(engine, nullptr));
}

}  // namespace mr::bench
