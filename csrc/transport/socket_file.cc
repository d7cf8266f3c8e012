#include "socket_file.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "../base/stream.h"

namespace mr {
namespace {

constexpr std::string_view kPrefix = "monarch_rdma/", kSuffix = ".sock", kUnfinished = ".sock-new";
constexpr size_t kDigits = 32;
constexpr time_t kPatience = 60;  // seconds until an unfinished one counts as left behind

void demand_private(const std::string& directory) {
  struct stat facts{};
  if (::lstat(directory.c_str(), &facts) != 0)
    throw Error(MR_CONFIG, "option unix_socket_dir = " + directory + ": there is no such directory", errno);
  if (!S_ISDIR(facts.st_mode) || facts.st_uid != ::geteuid() || (facts.st_mode & 077) != 0)
    throw Error(MR_CONFIG,
                "option unix_socket_dir = " + directory + ": must be a directory of this user, of mode 0700");
}

bool is_ours(std::string_view name, std::string_view suffix) {
  return name.size() == kDigits + suffix.size() && name.substr(kDigits) == suffix &&
         std::all_of(name.begin(), name.begin() + kDigits, [](unsigned char c) { return std::isxdigit(c) != 0; });
}

bool is_old(const std::string& path) {
  struct stat facts{};
  return ::lstat(path.c_str(), &facts) == 0 && ::time(nullptr) - facts.st_mtime > kPatience;
}

// Those of engines that were killed. Names are random: none is given out a second time.
void sweep(const std::string& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::opendir(directory.c_str()), ::closedir);
  while (const dirent* entry = list ? ::readdir(list.get()) : nullptr) {
    const std::string path = directory + "/" + entry->d_name;
    const bool finished = is_ours(entry->d_name, kSuffix);
    if (!finished && !(is_ours(entry->d_name, kUnfinished) && is_old(path))) continue;
    if (!unix_socket_lives(path)) ::unlink(path.c_str());
  }
}

}  // namespace

std::string random_unix_name() {
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof digits, "%016lx%016lx", static_cast<unsigned long>(random_u64()),
                static_cast<unsigned long>(random_u64()));
  return std::string(kPrefix) + digits;
}

std::string socket_file_path(const std::string& directory, const std::string& unix_name) {
  const std::string_view name = unix_name;
  if (directory.empty() || !name.starts_with(kPrefix) || !is_ours(name.substr(kPrefix.size()), "")) return "";
  return directory + "/" + std::string(name.substr(kPrefix.size())) + std::string(kSuffix);
}

SocketFile::SocketFile(const std::string& directory, const std::string& unix_name)
    : path_(socket_file_path(directory, unix_name)), pid_(this_pid()) {
  demand_private(directory);
  sweep(directory);
  // Under its name only once a process has it: others must not take it for one that was left behind.
  const std::string unfinished = directory + unix_name.substr(kPrefix.size() - 1) + std::string(kUnfinished);
  socket_ = unix_listen(unfinished);
  if (::rename(unfinished.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(unfinished.c_str());
    throw Error(MR_RESOURCE_EXHAUSTED, "can't name the Unix socket '" + path_ + "'", error);
  }
}

void SocketFile::remove() {
  if (!path_.empty() && is_this_process(pid_)) ::unlink(path_.c_str());
  path_.clear();
}

}  // namespace mr
