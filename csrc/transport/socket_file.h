// The file of an engine's Unix socket: how processes on one host meet that do not share a network namespace, as in
// containers, but a directory. It goes with the engine; one that a killed engine left goes when the next is made there.
#pragma once

#include <string>

#include "../base/fd.h"

namespace mr {

class SocketFile {
 public:
  // Makes the file and listens on it. `unix_name`: of the same engine's abstract socket. Throws MR_CONFIG where the
  // directory is not of this user alone, MR_RESOURCE_EXHAUSTED where there can be no such file.
  SocketFile(const std::string& directory, const std::string& unix_name);
  ~SocketFile() { remove(); }
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

  Fd take_socket() { return std::move(socket_); }
  void remove();

 private:
  std::string path_;
  const int pid_;
  Fd socket_;
};

// Where the engine whose abstract socket has this name would have its file; "" where it can have none.
std::string socket_file_path(const std::string& directory, const std::string& unix_name);

std::string random_unix_name();

}  // namespace mr
