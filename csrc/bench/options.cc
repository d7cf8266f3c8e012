#include "options.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <functional>

#include "failure.h"
#include "placement.h"
#include "usage.h"

namespace mr::bench {
namespace {

template <typename E>
struct Name {
  E value;
  const char* text;
};
constexpr Name<Lane> kLanes[] = {{Lane::kMapped, "shm-mapped"},
                                 {Lane::kProcessVm, "shm-process_vm"},
                                 {Lane::kTcp, "tcp"},
                                 {Lane::kVerbs, "verbs"},
                                 {Lane::kLocal, "local"}};
constexpr Name<Op> kOps[] = {
    {Op::kRead, "read"}, {Op::kWrite, "write"}, {Op::kFetchAdd, "fetch_add"}, {Op::kMessage, "message"}};
constexpr Name<Figure> kFigures[] = {{Figure::kLatency, "latency"}, {Figure::kBandwidth, "bandwidth"}};

template <typename E, size_t N>
const char* text_of(const Name<E> (&names)[N], E value) {
  for (const auto& name : names)
    if (name.value == value) return name.text;
  return "?";
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t start = 0;;) {
    size_t comma = text.find(',', start);
    parts.push_back(text.substr(start, comma - start));
    if (comma == std::string::npos) return parts;
    start = comma + 1;
  }
}

[[noreturn]] void refuse(const std::string& flag, const std::string& value, const std::string& wanted) {
  throw UsageError(flag + " wants " + wanted + ", not '" + value + "'");
}

template <typename E, size_t N>
std::vector<E> parse_names(const std::string& flag, const std::string& text, const Name<E> (&names)[N]) {
  std::string wanted = "a comma list of";
  for (const auto& name : names) wanted += std::string(&name == names ? " " : ", ") + name.text;
  std::vector<E> values;
  for (const auto& part : split(text)) {
    const Name<E>* found = nullptr;
    for (const auto& name : names)
      if (part == name.text) found = &name;
    if (!found) refuse(flag, part, wanted);
    values.push_back(found->value);
  }
  return values;
}

uint64_t parse_integer(const std::string& flag, const std::string& text, uint64_t least, uint64_t most) {
  uint64_t value = 0;
  auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size() || value < least || value > most)
    refuse(flag, text, "an integer from " + std::to_string(least) + " to " + std::to_string(most));
  return value;
}

double parse_seconds(const std::string& flag, const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !std::isfinite(value) || value <= 0 || value > 86400)
    refuse(flag, text, "seconds, above 0 and at most 86400");
  return value;
}

uint64_t parse_size(const std::string& flag, const std::string& text) {
  uint64_t value = 0;
  auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit(end, text.data() + text.size());
  int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (failed != std::errc() || shift < 0 || value == 0 || value > (uint64_t{1} << 50 >> shift))
    refuse(flag, text, "a size above 0 like 8, 4K, 64M or 1G");
  return value << shift;
}

Strided parse_strided(const std::string& flag, const std::string& text) {
  size_t times = text.find('x');
  if (times == std::string::npos) refuse(flag, text, "PIECESxBYTES like 256x1K");
  return {parse_integer(flag, text.substr(0, times), 1, 1 << 20), parse_size(flag, text.substr(times + 1))};
}

void parse_listen(Options& options, const std::string& text) {
  size_t colon = text.rfind(':');
  bool bare_ipv6 = colon != std::string::npos && text.find(':') != colon && text.front() != '[';
  std::string host = text;
  if (colon != std::string::npos && !bare_ipv6 && text.back() != ']') {
    host = text.substr(0, colon);
    options.listen_port = static_cast<uint32_t>(parse_integer("--listen", text.substr(colon + 1), 0, 65535));
  }
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host.empty()) refuse("--listen", text, "HOST[:PORT]");
  options.listen_host = host;
}

void parse_cpus(Options& options, const std::string& text) {
  std::vector<std::string> parts = split(text);
  if (parts.size() != 2) refuse("--cpus", text, "two processors, like 0,1");
  int* cpus[] = {&options.client_cpu, &options.server_cpu};
  for (size_t i = 0; i < 2; ++i) {
    *cpus[i] = static_cast<int>(parse_integer("--cpus", parts[i], 0, 65535));
    if (!may_run_on(*cpus[i])) refuse("--cpus", text, "processors that this process may run on");
  }
}

void set_role(Options& options, Role role) {
  if (options.role != Role::kNone && options.role != role)
    throw UsageError("give one of --local, --listen and --connect");
  options.role = role;
}

struct Flag {
  const char* name;
  const char* metavar;  // nullptr: takes no value
  const char* help;
  std::function<void(Options&, const std::string&)> set;
};

uint32_t small(const std::string& flag, const std::string& text, uint64_t most) {
  return static_cast<uint32_t>(parse_integer(flag, text, 1, most));
}

const std::vector<Flag>& flags() {
  using S = const std::string&;
  static const std::vector<Flag> table = {
      {"--local", nullptr, "serve from processes forked here, which end with this one",
       [](Options& o, S) { set_role(o, Role::kLocal); }},
      {"--listen", "HOST[:PORT]", "serve until interrupted; prints the address for --connect",
       [](Options& o, S v) { set_role(o, Role::kListen), parse_listen(o, v); }},
      {"--connect", "ADDRESS", "measure against a serving process (repeat it for several)",
       [](Options& o, S v) { set_role(o, Role::kConnect), o.connect.push_back(v); }},
      {"--secret-file", "FILE", "job secret, a file of mode 0600; --listen creates it where missing",
       [](Options& o, S v) { o.secret_file = v; }},
      {"--lane", "LIST", "shm-mapped, shm-process_vm, tcp, verbs, local [the first three]",
       [](Options& o, S v) { o.lanes = parse_names("--lane", v, kLanes); }},
      {"--op", "LIST", "read, write, fetch_add, message [read]",
       [](Options& o, S v) { o.ops = parse_names("--op", v, kOps); }},
      {"--sizes", "LIST", "bytes, with K, M or G [8,4K,1M,64M]",
       [](Options& o, S v) {
         o.sizes.clear();
         for (const auto& part : split(v)) o.sizes.push_back(parse_size("--sizes", part));
       }},
      {"--strided", "NxBYTES", "one operation on N pieces, every other one left out, instead of --sizes",
       [](Options& o, S v) { o.strided = parse_strided("--strided", v); }},
      {"--measure", "LIST", "latency, bandwidth [both]",
       [](Options& o, S v) { o.figures = parse_names("--measure", v, kFigures); }},
      {"--bidirectional", nullptr, "bandwidth with the peers doing the same towards this process",
       [](Options& o, S) { o.bidirectional = true; }},
      {"--peers", "N", "serving processes with --local [1]",
       [](Options& o, S v) { o.peers = small("--peers", v, 256); }},
      {"--depth", "N", "operations in flight per peer, for bandwidth [1]",
       [](Options& o, S v) { o.depth = small("--depth", v, 65536); }},
      {"--iters", "N", "operations per figure, instead of --seconds",
       [](Options& o, S v) { o.iters = parse_integer("--iters", v, 1, uint64_t{1} << 40); }},
      {"--seconds", "S", "time per figure and contender [1]",
       [](Options& o, S v) { o.seconds = parse_seconds("--seconds", v); }},
      {"--rounds", "N", "rounds in which contenders take turns [10]",
       [](Options& o, S v) { o.rounds = small("--rounds", v, 10000); }},
      {"--baseline", nullptr, "measure the raw mechanism in the same run and print the ratio",
       [](Options& o, S) { o.baseline = true; }},
      {"--mapped-view", nullptr,
       "also copy by memcpy out of the memory that the engine has mapped: no check of anything",
       [](Options& o, S) { o.mapped_view = true; }},
      {"--verify", nullptr, "compare every byte that was moved", [](Options& o, S) { o.verify = true; }},
      {"--cpus", "CLIENT,SERVER", "keep both sides on these processors; the raw mechanism too [any]",
       [](Options& o, S v) { parse_cpus(o, v); }},
      {"--threads", "N", "copy threads of the shm lane [engine's choice]",
       [](Options& o, S v) { o.threads = small("--threads", v, 256); }},
      {"--sockets", "N", "data sockets of the tcp lane [engine's choice]",
       [](Options& o, S v) { o.sockets = small("--sockets", v, 256); }},
      {"--devices", "LIST", "RDMA cards of the verbs lane, as in option verbs_devices [engine's choice]",
       [](Options& o, S v) { o.devices = v; }},
      {"--spin", "S", "how long a thread polls a card before it sleeps [engine's choice]",
       [](Options& o, S v) { o.spin = parse_seconds("--spin", v); }},
      {"--bulk-tls", nullptr, "encrypt the tcp lane's data sockets", [](Options& o, S) { o.bulk_tls = true; }},
      {"--control", "KIND", "control stream on one host: unix or tcp [unix]",
       [](Options& o, S v) {
         if (v != "unix" && v != "tcp") refuse("--control", v, "unix or tcp");
         o.control_tcp = v == "tcp";
       }},
      {"--idle", "S", "instead: CPU seconds and context switches of connected, idle engines",
       [](Options& o, S v) { o.idle = parse_seconds("--idle", v); }},
      {"--memory", nullptr, "instead: extra memory of both sides while one buffer moves [4G; --sizes]",
       [](Options& o, S) { o.memory = true; }},
      {"--json", nullptr, "print one JSON document", [](Options& o, S) { o.json = true; }},
      {"--help", nullptr, "print this", [](Options& o, S) { o.help = true; }},
  };
  return table;
}

// What one argument alone cannot tell.
void check_together(Options& options) {
  if (options.role == Role::kNone) throw UsageError("give one of --local, --listen and --connect (or --help)");
  if (options.role == Role::kLocal && !options.secret_file.empty())
    throw UsageError("--secret-file belongs to --listen and --connect; --local hands its own secret down in memory");
  if (options.role != Role::kLocal && options.secret_file.empty())
    throw UsageError("--listen and --connect need --secret-file");
  if (options.role != Role::kLocal && options.peers != 1)
    throw UsageError("--peers belongs to --local; repeat --connect for several peers");
  if (options.role != Role::kLocal && options.client_cpu >= 0)
    throw UsageError("--cpus belongs to --local; use taskset with --listen and --connect");
  bool sockets_needed = options.has(Lane::kTcp) || options.has(Op::kMessage);
  if (options.role == Role::kConnect && options.baseline && sockets_needed)
    throw UsageError("--baseline for the tcp lane and for messages needs --local");
  if (options.idle > 0 && options.memory) throw UsageError("give one of --idle and --memory");
  if (options.has(Lane::kLocal) && (options.memory || options.idle > 0 || options.has(Op::kMessage)))
    throw UsageError("--lane local has one process: --memory, --idle and --op message need two");
  if (options.has(Lane::kLocal) && (options.peers != 1 || options.bidirectional || options.role != Role::kLocal))
    throw UsageError("--lane local goes with --local, one peer and one direction");
  if (options.mapped_view && (options.lanes != std::vector{Lane::kMapped} || options.ops != std::vector{Op::kRead} ||
                              options.strided.pieces || options.memory || options.idle > 0))
    throw UsageError("--mapped-view goes with --lane shm-mapped, --op read and --sizes");
  if (options.strided.pieces && (options.has(Op::kFetchAdd) || options.has(Op::kMessage)))
    throw UsageError("--strided goes with --op read and write");
  if (options.bidirectional && options.has(Op::kMessage))
    throw UsageError("--op message already runs in both directions; leave out --bidirectional");
  if (options.memory && (options.has(Op::kFetchAdd) || options.has(Op::kMessage)))
    throw UsageError("--memory goes with --op read and write");
  if (options.sizes.empty()) options.sizes = {8, 4096, 1 << 20, 64 << 20};
  uint64_t peers = std::max<uint64_t>(options.peers, options.connect.size());
  // Of one figure at a time.
  uint64_t buffers = peers * (options.depth + 1) + (options.baseline ? 7 : 0) + (options.mapped_view ? 1 : 0);
  for (uint64_t size : options.sizes)
    if (!options.memory && size > available_memory() / 4 * 3 / buffers)
      throw UsageError("--sizes " + size_text(size) + " needs " + std::to_string(buffers) +
                       " buffers of that size, more than 3/4 of the available memory");
}

}  // namespace

const char* name_of(Lane lane) { return text_of(kLanes, lane); }
const char* name_of(Op op) { return text_of(kOps, op); }
const char* name_of(Figure figure) { return text_of(kFigures, figure); }

std::string size_text(uint64_t bytes) {
  for (auto [shift, unit] : {std::pair{30, 'G'}, {20, 'M'}, {10, 'K'}})
    if (bytes >> shift && (bytes >> shift << shift) == bytes) return std::to_string(bytes >> shift) + unit;
  return std::to_string(bytes);
}

Options parse_options(int argc, char** argv) {
  Options options;
  bool sizes_given = false;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i], value;
    size_t equals = argument.find('=');
    std::string name = argument.substr(0, equals);
    const Flag* flag = nullptr;
    for (const Flag& candidate : flags())
      if (name == candidate.name) flag = &candidate;
    if (!flag) throw UsageError("unknown argument '" + argument + "' (see --help)");
    if (!flag->metavar && equals != std::string::npos) throw UsageError(name + " takes no value");
    if (flag->metavar && equals != std::string::npos) value = argument.substr(equals + 1);
    if (flag->metavar && equals == std::string::npos) {
      if (i + 1 == argc) throw UsageError(name + " needs a value: " + flag->metavar);
      value = argv[++i];
    }
    flag->set(options, value);
    sizes_given |= name == "--sizes";
  }
  if (options.memory && !sizes_given) options.sizes = {uint64_t{4} << 30};
  if (!options.help) check_together(options);
  return options;
}

std::string help_text() {
  std::string text =
      "transport_bench: latency and bandwidth of one-sided transfers and control messages.\n\n"
      "  transport_bench --local --lane tcp --op read --sizes 8,4K,64M --baseline\n"
      "  transport_bench --listen 0.0.0.0 --secret-file FILE         on one host, then on another\n"
      "  transport_bench --connect ADDRESS --secret-file FILE --lane tcp\n\n";
  for (const Flag& flag : flags()) {
    std::string left = std::string("  ") + flag.name + (flag.metavar ? std::string(" ") + flag.metavar : "");
    left.resize(std::max<size_t>(left.size() + 1, 26), ' ');
    text += left + flag.help + "\n";
  }
  return text + "\nExit code: 0 done, 1 failed, 2 wrong arguments.\n";
}

}  // namespace mr::bench
