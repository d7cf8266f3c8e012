// The whole C++ test framework. One program a file:
//
//   #include "check.h"
//   TEST(span_refuses_overflow) { CHECK_EQ(span.size(), 8u); CHECK_THROWS(mr::Failure, region.span(9, 1)); }
//   int main(int argc, char** argv) { return mr::test::run(argc, argv); }
//
// A failed check ends its test, the others go on. `program NAME...` runs only tests whose name contains NAME.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mr::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

struct CheckFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "(" << sizeof(T) << " byte value)";
  }
  return out.str();
}

[[noreturn]] inline void check_failed(const char* file, int line, const std::string& what) {
  throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

inline int run(int argc, char** argv) {
  int failed = 0, ran = 0;
  for (const Case& test : cases()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted |= std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    ++ran;
    auto start = std::chrono::steady_clock::now();
    std::string why;
    try {
      test.body();
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
      why = "threw something that is not a std::exception";
    }
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %s (%.3f s)%s%s\n", why.empty() ? "ok  " : "FAIL", test.name, seconds, why.empty() ? "" : "\n     ",
                why.c_str());
    std::fflush(stdout);
    failed += !why.empty();
  }
  const char* program = std::strrchr(argv[0], '/');
  std::printf("%s: %d passed, %d failed\n", program ? program + 1 : argv[0], ran - failed, failed);
  return failed || ran == 0;
}

}  // namespace mr::test

#define TEST(name)                                                      \
  static void test_##name();                                            \
  static const mr::test::Register register_##name(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                            \
  do {                                                                                              \
    if (!(condition)) mr::test::check_failed(__FILE__, __LINE__, "CHECK(" #condition ") is false"); \
  } while (false)

#define CHECK_EQ(left, right)                                                                                \
  do {                                                                                                       \
    const auto& check_left = (left);                                                                         \
    const auto& check_right = (right);                                                                       \
    if (!mr::test::equal(check_left, check_right)) {                                                         \
      mr::test::check_failed(__FILE__, __LINE__,                                                             \
                             "CHECK_EQ(" #left ", " #right "): " + mr::test::show(check_left) + " is not " + \
                                 mr::test::show(check_right));                                               \
    }                                                                                                        \
  } while (false)

#define CHECK_THROWS(type, ...)                                                                         \
  do {                                                                                                  \
    bool check_threw = false;                                                                           \
    try {                                                                                               \
      __VA_ARGS__;                                                                                      \
    } catch (const type&) {                                                                             \
      check_threw = true;                                                                               \
    }                                                                                                   \
    if (!check_threw) mr::test::check_failed(__FILE__, __LINE__, #__VA_ARGS__ " did not throw " #type); \
  } while (false)
