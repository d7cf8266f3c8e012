// The command line of transport_bench.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace mr::bench {

enum class Role { kNone, kLocal, kListen, kConnect };
enum class Lane { kMapped, kProcessVm, kTcp, kVerbs, kLocal };
enum class Op { kRead, kWrite, kFetchAdd, kMessage };
enum class Figure { kLatency, kBandwidth };

const char* name_of(Lane lane);  // as in mr_result.lane
const char* name_of(Op op);
const char* name_of(Figure figure);

// `pieces` runs of `run` bytes, every other one left out; pieces == 0 means contiguous.
struct Strided {
  uint64_t pieces = 0;
  uint64_t run = 0;
};

struct Options {
  Role role = Role::kNone;
  std::string listen_host = "127.0.0.1";
  uint32_t listen_port = 0;
  std::vector<std::string> connect;
  std::string secret_file;
  std::vector<Lane> lanes = {Lane::kMapped, Lane::kProcessVm, Lane::kTcp};
  std::vector<Op> ops = {Op::kRead};
  std::vector<Figure> figures = {Figure::kLatency, Figure::kBandwidth};
  std::vector<uint64_t> sizes;  // bytes
  Strided strided;
  uint32_t peers = 1;
  uint32_t depth = 1;
  uint64_t iters = 0;  // 0: as many as fit in `seconds`
  double seconds = 1.0;
  uint32_t rounds = 10;
  int client_cpu = -1, server_cpu = -1;  // -1: any
  uint32_t threads = 0;
  uint32_t sockets = 0;
  std::string devices;  // of the verbs lane
  double spin = -1;     // of the verbs lane, seconds; -1: engine's choice
  bool bidirectional = false;
  bool verify = false;
  bool baseline = false;
  bool mapped_view = false;
  bool bulk_tls = false;
  bool control_tcp = false;
  bool memory = false;
  double idle = 0;
  bool json = false;
  bool help = false;

  bool has(Lane lane) const { return std::find(lanes.begin(), lanes.end(), lane) != lanes.end(); }
  bool has(Op op) const { return std::find(ops.begin(), ops.end(), op) != ops.end(); }
};

// Throws UsageError with one sentence that names the argument and the value.
Options parse_options(int argc, char** argv);
std::string help_text();
std::string size_text(uint64_t bytes);  // 4096 -> "4K"

}  // namespace mr::bench
