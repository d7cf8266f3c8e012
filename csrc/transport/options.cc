#include "options.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <unistd.h>
#include "../base/fd.h"
#include "../base/list.h"
#include "../base/loop.h"

namespace mr {
namespace {

std::string text(const char* s) { return s == nullptr ? "" : s; }

void demand(bool ok, const char* option, const std::string& value, const char* wanted) {
  if (!ok) throw Error(MR_CONFIG, std::string("option ") + option + " = " + value + ": " + wanted);
}

void demand_positive(double seconds, const char* option) {
  demand(std::isfinite(seconds) && seconds > 0, option, std::to_string(seconds),
         "must be a positive number of seconds");
}

void demand_range(uint64_t value, uint64_t least, uint64_t most, const char* option) {
  demand(value >= least && value <= most, option, std::to_string(value),
         ("must be " + std::to_string(least) + " to " + std::to_string(most)).c_str());
}

void demand_spin(double value, const char* name) {
  demand(std::isfinite(value) && value >= 0 && value <= 1, name, std::to_string(value), "must be 0 to 1 s");
}

void check_verbs(const mr_options& raw) {
  demand_range(raw.verbs_queue_pairs, 1, 64, "verbs_queue_pairs");
  demand_range(raw.verbs_max_queue_pairs, 1, 1u << 20, "verbs_max_queue_pairs");
  demand_range(raw.verbs_depth, 2, 32768, "verbs_depth");
  demand_range(raw.verbs_chunk_bytes, 4096, 1u << 30, "verbs_chunk_bytes");
  demand_range(raw.verbs_min_run, 1, 1u << 30, "verbs_min_run");
  demand_range(raw.verbs_inline_bytes, 0, 4096, "verbs_inline_bytes");
  demand_range(raw.verbs_rd_atomic, 1, 255, "verbs_rd_atomic");
  demand(raw.verbs_mtu == 0 || (raw.verbs_mtu >= 256 && raw.verbs_mtu <= 4096 && std::has_single_bit(raw.verbs_mtu)),
         "verbs_mtu", std::to_string(raw.verbs_mtu), "must be 0 (the ports'), 256, 512, 1024, 2048 or 4096");
  demand_range(raw.verbs_timeout, 0, 31, "verbs_timeout");
  demand_range(raw.verbs_retries, 0, 7, "verbs_retries");
  demand_range(raw.verbs_rnr_retries, 0, 7, "verbs_rnr_retries");
  demand_range(raw.verbs_rnr_timer, 0, 31, "verbs_rnr_timer");
  demand_range(raw.verbs_traffic_class, 0, 255, "verbs_traffic_class");
  demand_range(raw.verbs_service_level, 0, 15, "verbs_service_level");
  demand_range(raw.verbs_hop_limit, 1, 255, "verbs_hop_limit");
  demand_range(raw.verbs_pkey_index, 0, 65535, "verbs_pkey_index");
  demand_spin(raw.verbs_spin, "verbs_spin");
}

std::string default_name() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return std::string(host) + ":" + std::to_string(this_pid());
}

}  // namespace

mr_options Options::defaults() {
  mr_options raw{};
  raw.name = "";
  raw.listen_host = "127.0.0.1";
  raw.advertise_host = raw.unix_socket_dir = "";
  raw.allow_ptrace = "no";
  raw.lanes = "shm,verbs,tcp";
  raw.same_host_unix = raw.shm_mapped = raw.shm_process_vm = 1;
  raw.tcp_sockets = 4;
  raw.tcp_sockets_far = 8;
  raw.verbs_devices = "";
  raw.verbs_gid_index = -1;
  raw.verbs_queue_pairs = 2;
  raw.verbs_max_queue_pairs = 4096;
  raw.verbs_depth = 128;
  raw.verbs_chunk_bytes = 1u << 20;
  raw.verbs_min_run = 512;
  raw.verbs_inline_bytes = 220;
  raw.verbs_rd_atomic = 16;
  raw.verbs_timeout = 14;
  raw.verbs_retries = 6;
  raw.verbs_rnr_retries = 7;
  raw.verbs_rnr_timer = 12;
  raw.verbs_hop_limit = 64;
  raw.verbs_spin = 50e-6;
  raw.verbs_cache_bytes = 16ull << 30;
  raw.max_frame_bytes = 16u << 20;
  raw.message_window_bytes = 64u << 20;
  raw.max_pending_ops = 1u << 20;
  raw.heartbeat_interval = 0.5;
  raw.heartbeat_timeout = 5.0;
  raw.connect_timeout = 10.0;
  raw.drop_timeout = 1.0;
  return raw;
}

Options Options::from(const mr_options& raw) {
  Options out;
  out.raw = raw;
  out.name = text(raw.name);
  if (out.name.empty()) out.name = default_name();
  demand(out.name.size() <= 255 &&
             std::all_of(out.name.begin(), out.name.end(), [](unsigned char c) { return c > ' ' && c < 127; }),
         "name", out.name, "must be 1 to 255 printable characters without spaces");
  out.listen_host = text(raw.listen_host);
  demand(!out.listen_host.empty(), "listen_host", "\"\"", "must be an address or an interface");
  out.advertise_host = text(raw.advertise_host);
  out.unix_socket_dir = text(raw.unix_socket_dir);
  demand(out.unix_socket_dir.empty() || out.unix_socket_dir.front() == '/', "unix_socket_dir", out.unix_socket_dir,
         "must be an absolute path");
  out.allow_ptrace = text(raw.allow_ptrace);
  demand(out.allow_ptrace == "no" || out.allow_ptrace == "job" || out.allow_ptrace == "any", "allow_ptrace",
         out.allow_ptrace, "must be no, job or any");
  if (raw.secret != nullptr) out.secret = Secret({raw.secret, raw.secret_len});
  out.lanes = split_list(text(raw.lanes));
  demand(!out.lanes.empty(), "lanes", text(raw.lanes), "must name at least one of shm, verbs, tcp");
  for (const auto& lane : out.lanes)
    demand(lane == "shm" || lane == "verbs" || lane == "tcp", "lanes", text(raw.lanes), "knows shm, verbs and tcp");
  demand(raw.port_min <= raw.port_max && raw.port_max <= 65535, "port_min..port_max",
         std::to_string(raw.port_min) + ".." + std::to_string(raw.port_max), "must be a range of TCP ports");
  demand(raw.ip_family == 0 || raw.ip_family == 4 || raw.ip_family == 6, "ip_family", std::to_string(raw.ip_family),
         "must be 0 (either), 4 or 6");
  demand(raw.tcp_sockets >= 1 && raw.tcp_sockets <= 64, "tcp_sockets", std::to_string(raw.tcp_sockets),
         "must be 1 to 64");
  demand(raw.tcp_sockets_far <= 64, "tcp_sockets_far", std::to_string(raw.tcp_sockets_far), "must be at most 64");
  demand(raw.copy_threads <= 256, "copy_threads", std::to_string(raw.copy_threads), "must be at most 256");
  out.verbs_devices = text(raw.verbs_devices);
  demand(raw.verbs_gid_index >= -1 && raw.verbs_gid_index <= 255, "verbs_gid_index",
         std::to_string(raw.verbs_gid_index), "must be -1 (chosen) or an index up to 255");
  check_verbs(raw);
  demand_spin(raw.loop_spin, "loop_spin");
  demand(raw.max_frame_bytes >= 4096 && raw.max_frame_bytes <= (1u << 30), "max_frame_bytes",
         std::to_string(raw.max_frame_bytes), "must be 4 KiB to 1 GiB");
  demand(raw.message_window_bytes >= 4096, "message_window_bytes", std::to_string(raw.message_window_bytes),
         "must be at least 4 KiB");
  demand(raw.max_pending_ops >= 1, "max_pending_ops", "0", "must be at least 1");
  demand_positive(raw.heartbeat_interval, "heartbeat_interval");
  demand_positive(raw.heartbeat_timeout, "heartbeat_timeout");
  demand(raw.heartbeat_timeout > raw.heartbeat_interval, "heartbeat_timeout", std::to_string(raw.heartbeat_timeout),
         "must be longer than heartbeat_interval");
  demand_positive(raw.connect_timeout, "connect_timeout");
  demand_positive(raw.drop_timeout, "drop_timeout");
  if (raw.protocol_version == 0) out.raw.protocol_version = mr_protocol_version();
  out.raw.name = out.raw.listen_host = out.raw.advertise_host = out.raw.lanes = nullptr;
  out.raw.unix_socket_dir = out.raw.allow_ptrace = out.raw.verbs_devices = nullptr;
  out.raw.secret = nullptr;
  return out;
}

bool Options::allows(const std::string& lane) const {
  return std::find(lanes.begin(), lanes.end(), lane) != lanes.end();
}

}  // namespace mr
