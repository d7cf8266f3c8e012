// What hosts are plugged into: frames go from card to card, at the pace, with the delay and with the losses that the
// cables have. It sleeps while nothing is on its way.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

namespace hosts {

using Clock = std::chrono::steady_clock;
using Frame = std::vector<uint8_t>;  // with its virtio header

// From one host to the others.
struct Cable {
  bool plugged = true;
  double delay = 0;  // seconds
  double loss = 0;   // of IP packets, 0..1
  double rate = 0;   // bytes a second; 0: no limit
};

class Wire {
 public:
  explicit Wire(size_t count) : ends_(count) {}

  void plug(size_t host, int card);  // -1: none
  void set(size_t host, const Cable& cable);

  // What the host has sent, as far as it is there.
  void take(size_t host);
  // What is due. Returns when to come again, or Clock::time_point::max().
  Clock::time_point deliver();

 private:
  struct Sent {
    Clock::time_point due;
    Frame frame;
  };
  struct End {
    int card = -1;
    Cable cable;
    Clock::time_point free_at{}, last_due{};
    std::deque<Sent> sent;
  };

  void send(End* from, const uint8_t* frame, size_t length);
  void arrive(const Frame& frame, size_t from);
  void write_to(size_t host, const Frame& frame);

  std::vector<End> ends_;
  std::minstd_rand random_{1};
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(1 << 17);
};

}  // namespace hosts
