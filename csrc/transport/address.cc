#include "address.h"

#include <charconv>
#include <cstdio>
#include <fstream>

namespace mr {
namespace {

constexpr char kScheme[] = "mrdma://";

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw Error(MR_CONFIG, "address \"" + text + "\": " + why);
}

std::string escape(const std::string& in) {
  std::string out;
  for (const unsigned char c : in) {
    if (std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == ':' || c == '@') {
      out += static_cast<char>(c);
    } else {
      char buffer[4];
      std::snprintf(buffer, sizeof buffer, "%%%02x", c);
      out += buffer;
    }
  }
  return out;
}

template <typename T>
T parse_hex(const std::string& whole, std::string_view digits) {
  T value{};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc{} || end != digits.data() + digits.size())
    refuse(whole, "\"" + std::string(digits) + "\" is not a hexadecimal number");
  return value;
}

std::string unescape(const std::string& whole, std::string_view in) {
  std::string out;
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i] != '%') {
      out += in[i];
    } else {
      if (i + 2 >= in.size()) refuse(whole, "ends inside an escape");
      out += static_cast<char>(parse_hex<uint8_t>(whole, in.substr(i + 1, 2)));
      i += 2;
    }
  }
  return out;
}

}  // namespace

std::string Address::text() const {
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016lx", static_cast<unsigned long>(incarnation));
  return kScheme + tcp.text() + "/" + escape(name) + "?inc=" + hex + "&boot=" + escape(boot_id) +
         (unix_name.empty() ? "" : "&unix=" + escape(unix_name));
}

Address Address::parse(const std::string& text) {
  Address out;
  if (text.size() > 4096) refuse(text.substr(0, 40) + "...", "is longer than 4096 bytes");
  if (text.compare(0, sizeof kScheme - 1, kScheme) != 0) {
    out.tcp = HostPort::parse(text);
    if (out.tcp.port == 0) refuse(text, "has port 0");
    return out;
  }
  const std::string_view rest = std::string_view(text).substr(sizeof kScheme - 1);
  const size_t slash = rest.find('/'), question = rest.find('?');
  if (slash == rest.npos || question == rest.npos || question < slash)
    refuse(text, "is not mrdma://host:port/name?...");
  out.tcp = HostPort::parse(std::string(rest.substr(0, slash)));
  out.name = unescape(text, rest.substr(slash + 1, question - slash - 1));
  for (std::string_view list = rest.substr(question + 1); !list.empty();) {
    const std::string_view item = list.substr(0, list.find('&'));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    const size_t equals = item.find('=');
    if (equals == item.npos) refuse(text, "has a parameter without a value");
    const auto key = item.substr(0, equals), value = item.substr(equals + 1);
    if (key == "inc") out.incarnation = parse_hex<uint64_t>(text, value);
    if (key == "boot") out.boot_id = unescape(text, value);
    if (key == "unix") out.unix_name = unescape(text, value);
  }
  if (out.incarnation == 0) refuse(text, "has no incarnation");
  return out;
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace mr
