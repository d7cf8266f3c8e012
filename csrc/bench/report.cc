#include "report.h"

#include <cstdarg>
#include <cstdio>

namespace mr::bench {
namespace {

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

// One JSON object, member by member.
class Object {
 public:
  Object& text(const char* key, const std::string& value) { return raw(key, quoted(value)); }
  Object& number(const char* key, double value) { return raw(key, format("%.9g", value)); }
  Object& count(const char* key, uint64_t value) { return raw(key, std::to_string(value)); }
  Object& raw(const char* key, const std::string& value) {
    body_ += (body_.empty() ? "" : ", ") + quoted(key) + ": " + value;
    return *this;
  }
  std::string done() const { return "{" + body_ + "}"; }

 private:
  static std::string quoted(const std::string& value) {
    std::string out = "\"";
    for (char c : value) {
      if (c == '"' || c == '\\') out += '\\';
      out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    return out + '"';
  }
  std::string body_;
};

std::string array(const std::vector<std::string>& items, const char* separator) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : separator) + item;
  return "[" + text + "]";
}

std::string json_of(const Row& row) {
  bool latency = row.figure == "latency";
  std::vector<std::string> against;
  for (const Against& a : row.against) {
    const char* unit = latency ? "seconds" : "bytes_per_second";
    against.push_back(Object().text("name", a.name).number(unit, a.value).number("ratio", a.ratio).done());
  }
  Object object;
  object.text("figure", row.figure).text("lane", row.lane).text("op", row.op).count("bytes", row.bytes);
  if (row.strided.pieces) object.count("pieces", row.strided.pieces).count("piece_bytes", row.strided.run);
  object.count("depth", row.depth).count("peers", row.peers).count("rails", row.rails);
  object.raw("bidirectional", row.bidirectional ? "true" : "false");
  if (latency)
    object.number("p50", row.p50).number("p99", row.p99).number("p999", row.p999);
  else
    object.number("bytes_per_second", row.bandwidth)
        .number("operations_per_second", row.bandwidth / static_cast<double>(row.bytes));
  return object.raw("against", array(against, ", ")).done();
}

std::string size_of(const Row& row) {
  if (row.strided.pieces) return std::to_string(row.strided.pieces) + "x" + size_text(row.strided.run);
  return size_text(row.bytes);
}

std::string rate(double bytes_per_second) { return format("%.3f GB/s", bytes_per_second / 1e9); }
std::string microseconds(double seconds) { return format("%.3f us", seconds * 1e6); }

double mebibytes(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

void Report::headline(const std::string& line) {
  if (json_ || headline_ == line) return;
  std::printf("%s%s\n", headline_.empty() ? "" : "\n", line.c_str());
  headline_ = line;
}

void Report::add(const Row& row) {
  objects_.push_back(json_of(row));
  if (json_) return;
  bool latency = row.figure == "latency";
  std::string what = format("%-14s %-9s %8s ", row.lane.c_str(), row.op.c_str(), size_of(row).c_str());
  headline(
      format("%-14s %-9s %8s  %-40s %s", "lane", "op", "bytes", "p50 / p99 / p99.9, or bandwidth", "against (ratio)"));
  std::string ours;
  if (latency)
    ours = format("%.2f / %.2f / %.2f us", row.p50 * 1e6, row.p99 * 1e6, row.p999 * 1e6);
  else
    ours = format("%s %.0f/s depth %u%s%s", rate(row.bandwidth).c_str(), row.bandwidth / static_cast<double>(row.bytes),
                  row.depth, row.peers > 1 ? format(" peers %zu", row.peers).c_str() : "",
                  row.bidirectional ? " both ways" : "");
  std::string against;
  for (const Against& a : row.against)
    against += (against.empty() ? "" : ", ") + a.name + " " + (latency ? microseconds(a.value) : rate(a.value)) +
               format(" (%.2f)", a.ratio);
  std::printf("%s %-40s %s\n", what.c_str(), ours.c_str(), against.c_str());
  std::fflush(stdout);
}

void Report::add(const IdleRow& row) {
  objects_.push_back(Object()
                         .text("figure", "idle")
                         .text("side", row.side)
                         .number("seconds", row.seconds)
                         .number("cpu_seconds", row.cpu_seconds)
                         .count("context_switches", row.context_switches)
                         .done());
  if (json_) return;
  headline(format("%-10s %8s %12s %8s %16s", "idle", "seconds", "cpu seconds", "of core", "context switches"));
  std::printf("%-10s %8.1f %12.6f %7.3f%% %16lu\n", row.side.c_str(), row.seconds, row.cpu_seconds,
              100 * row.cpu_seconds / row.seconds, static_cast<unsigned long>(row.context_switches));
}

void Report::add(const MemoryRow& row) {
  objects_.push_back(Object()
                         .text("figure", "memory")
                         .text("lane", row.lane)
                         .text("op", row.op)
                         .count("bytes", row.bytes)
                         .count("client_extra", row.extra_here)
                         .count("client_peak", row.peak_here)
                         .count("server_extra", row.extra_owner)
                         .count("server_peak", row.peak_owner)
                         .number("bytes_per_second", static_cast<double>(row.bytes) / row.seconds)
                         .done());
  if (json_) return;
  headline("extra: growth of the peak of resident memory (VmHWM) without pages of the shared buffer itself");
  std::printf("%-14s %-6s %6s  client extra %.1f MiB (VmHWM +%.1f)  server extra %.1f MiB (VmHWM +%.1f)  %s\n",
              row.lane.c_str(), row.op.c_str(), size_text(row.bytes).c_str(), mebibytes(row.extra_here),
              mebibytes(row.peak_here), mebibytes(row.extra_owner), mebibytes(row.peak_owner),
              rate(static_cast<double>(row.bytes) / row.seconds).c_str());
}

void Report::finish() {
  if (!json_) return;
  std::string version = mr_version();
  Object object;
  object.text("program", "transport_bench").text("version", version);
  object.raw("figures", "[\n  " + array(objects_, ",\n  ").substr(1));
  std::printf("%s\n", object.done().c_str());
}

}  // namespace mr::bench
