// The serving side: owns the memory, answers what protocol.h asks, and sends pings back from its loop thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "buffer.h"
#include "engine_handle.h"
#include "options.h"
#include "protocol.h"
#include "transfers.h"
#include "usage.h"

#include "../engine.h"

namespace mr::bench {

// Memory that others may reach.
class Exposed {
 public:
  Exposed(mr_engine* engine, const Request& request);
  ~Exposed();
  Exposed(const Exposed&) = delete;

  Bytes descriptor() const;
  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  mr_engine* const engine_;
  const Memory kind_;
  const uint64_t size_;
  Buffer ordinary_;
  uint8_t* data_ = nullptr;
  mr_region* region_ = nullptr;
};

class Owner {
 public:
  explicit Owner(mr_engine* engine);
  ~Owner();
  Owner(const Owner&) = delete;

  // Answers one request; a failure is an answer too.
  Answer answer(const Request& request, const Bytes& tail, Bytes* answer_tail);

 private:
  class Mirror;
  Exposed& memory(uint64_t id);

  mr_engine* const engine_;
  std::map<uint64_t, std::unique_ptr<Exposed>> memory_;
  uint64_t next_id_ = 1;
  std::unique_ptr<Mirror> mirror_;
  PeakMemory peak_;
};

// Calls announce(address) once requests can come, serves until `stop_fd` becomes readable, then closes the engine.
void serve(EngineHandle& handle, int stop_fd, const std::function<void(const std::string&)>& announce);

}  // namespace mr::bench
