// The measuring side: one engine and the owners it talks to.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine_handle.h"
#include "options.h"
#include "owner.h"
#include "protocol.h"
#include "samples.h"

namespace mr::bench {

class Session {
 public:
  // Without addresses this process owns the memory itself (--lane local).
  Session(const Options& options, const Secret& secret, const Lane* only, const std::vector<std::string>& addresses);
  ~Session();
  Session(const Session&) = delete;

  mr_engine* engine() const { return handle_.engine; }
  size_t owners() const { return addresses_.empty() ? 1 : addresses_.size(); }
  // Throws Failure with the owner's sentence.
  Answer ask(size_t owner, Request request, const Bytes& tail = {}, Bytes* answer_tail = nullptr);

  // Sends messages of `size` bytes that owners send back, from loop thread to loop thread, `in_flight` at a time in
  // turns to all owners. Appends round-trip seconds where one is in flight: then the first owner gets them all.
  Moved ping_pong(uint64_t size, uint64_t in_flight, bool verify, const Turn& turn, std::vector<double>* samples);

 private:
  struct PingPong;
  static void on_message(void* context, const char* sender, const uint8_t* data, uint64_t length);
  void on_pong(const uint8_t* data, uint64_t length);
  void send(size_t owner, const Bytes& bytes);

  EngineHandle handle_;
  const std::vector<std::string> addresses_;
  std::vector<mr_peer*> peers_;  // at these addresses
  std::unique_ptr<Owner> own_;
  std::mutex lock_;
  std::condition_variable arrived_;
  std::vector<Bytes> answers_;
  PingPong* pings_ = nullptr;
  uint64_t serial_ = 0;
};

// An owner's memory, opened here.
class RemoteMemory {
 public:
  RemoteMemory(Session& session, size_t owner, const Request& allocate);
  ~RemoteMemory();
  RemoteMemory(RemoteMemory&& other) noexcept;
  RemoteMemory& operator=(RemoteMemory&&) = delete;

  mr_remote* remote() const { return remote_; }
  const Answer& where() const { return where_; }
  // Closes it here and frees it there.
  void release();

 private:
  Session* session_;
  size_t owner_;
  Answer where_;
  mr_remote* remote_ = nullptr;
};

}  // namespace mr::bench
