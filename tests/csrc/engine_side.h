// Engines of one job in this process, through the C face, and what they send each other.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "engine.h"

namespace {

const uint8_t kSecret[] = "a secret of this test's two engines";

struct Engine {
  explicit Engine(const char* name, void (*change)(mr_options&) = nullptr) {
    mr_options options;
    mr_options_default(&options);
    options.name = name;
    options.secret = kSecret;
    options.secret_len = sizeof kSecret;
    if (change != nullptr) change(options);
    mr_error error{};
    if (mr_engine_create(&options, &handle, &error) != MR_OK) throw std::runtime_error(error.message);
  }
  ~Engine() { close(); }
  void close() { mr_engine_close(std::exchange(handle, nullptr)); }
  std::string address() const { return mr_engine_address(handle); }
  uint64_t counter(const std::string& name) const {
    std::string text(8192, 0);
    mr_engine_counters(handle, text.data(), text.size());
    const size_t at = text.find("\"" + name + "\": ");
    return at == text.npos ? 0 : std::stoull(text.substr(at + name.size() + 4));
  }

  mr_engine* handle = nullptr;
};

// The engine's inbox, as one thread takes from it.
struct Receiver {
  struct Entry {
    int kind;
    std::string sender;
    std::vector<uint8_t> data;
  };

  explicit Receiver(Engine& engine) {
    mr_error error{};
    if (mr_inbox_open(engine.handle, &inbox, &error) != MR_OK) throw std::runtime_error(error.message);
  }
  ~Receiver() { mr_inbox_close(inbox); }
  Receiver(const Receiver&) = delete;

  // What mr_inbox_take returns; the batch is in `entries`.
  int take(double timeout, mr_stop* stop = nullptr, bool background = false) {
    const char* at = nullptr;
    uint64_t length = 0;
    entries.clear();
    const int count = mr_inbox_take(inbox, timeout, stop, background, &at, &length, nullptr);
    for (int i = 0; i < count; ++i) {
      mr_incoming head;
      std::memcpy(&head, at, sizeof head);
      const char* const data = at + sizeof head + head.sender_length;
      entries.push_back({head.kind, std::string(at + sizeof head, data), {data, data + head.data_length}});
      at = data + head.data_length;
      length -= sizeof head + head.sender_length + head.data_length;
    }
    if (count > 0) CHECK_EQ(length, 0u);
    return count;
  }
  void done(bool put_back = false) { mr_inbox_done(inbox, put_back); }

  mr_inbox* inbox = nullptr;
  std::vector<Entry> entries;
};

struct Outbox {
  Outbox(Engine& from, const std::string& to) {
    mr_error error{};
    if (mr_peer_open(from.handle, to.c_str(), &peer, &error) != MR_OK) throw std::runtime_error(error.message);
  }
  ~Outbox() { mr_peer_close(peer); }
  Outbox(const Outbox&) = delete;

  int send(const std::vector<uint8_t>& data, double timeout, const std::vector<uint8_t>& body = {}) {
    return mr_peer_send(peer, data.data(), data.size(), body.data(), body.size(), timeout, &error);
  }

  mr_peer* peer = nullptr;
  mr_error error{};
};

}  // namespace
