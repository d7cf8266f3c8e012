// Failures inside the core: a kind from the closed family of engine.h, errno where there is one, and a sentence.
#pragma once

#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "../engine.h"

namespace mr {

struct Status {
  int kind = MR_OK;
  int sys_errno = 0;
  std::string text;

  bool ok() const { return kind == MR_OK; }
};

inline Status fail(int kind, std::string text, int sys_errno = 0) {
  if (sys_errno != 0) text += std::string(": ") + std::strerror(sys_errno);
  return Status{kind, sys_errno, std::move(text)};
}

// Thrown where a value can't be returned; caught by the C face and by the event loop's owners, never lost.
class Error : public std::exception {
 public:
  explicit Error(Status status) : status_(std::move(status)) {}
  Error(int kind, std::string text, int sys_errno = 0) : status_(fail(kind, std::move(text), sys_errno)) {}
  const Status& status() const { return status_; }
  const char* what() const noexcept override { return status_.text.c_str(); }

 private:
  Status status_;
};

}  // namespace mr
