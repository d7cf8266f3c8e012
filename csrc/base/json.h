// Writing JSON documents: what describes this host to Python.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace mr::json {

using Json = std::string;
using Members = std::vector<std::pair<const char*, Json>>;

inline Json quoted(const std::string& text) {
  Json out = "\"";
  for (const char c : text) {
    char escaped[8];
    if (static_cast<unsigned char>(c) < ' ') {
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + '"';
}

inline Json truth(bool value) { return value ? "true" : "false"; }

inline Json figure(double value) {
  char out[32];
  std::snprintf(out, sizeof out, "%.10g", value);
  return out;
}

inline Json object(const Members& members) {
  Json out = "{";
  for (const auto& [name, value] : members) out += (out.size() > 1 ? ", " : "") + quoted(name) + ": " + value;
  return out + "}";
}

template <typename Things, typename Write>
Json array(const Things& things, Write&& write) {
  Json out = "[";
  for (const auto& thing : things) out += (out.size() > 1 ? ", " : "") + write(thing);
  return out + "]";
}

}  // namespace mr::json
