// What a broken network does to a connection, put on it on purpose (mr_peer_fault).
#pragma once

#include <algorithm>
#include <functional>
#include <memory>

#include "../base/loop.h"
#include "../engine.h"

namespace mr {

struct Fault {
  uint32_t kind = 0;  // enum mr_fault
  Time until{};       // of a cut and of slowness
  double amount = 0;  // slowness: bytes a second. Corruption: which damage
};

// One socket under a cut or slowness. On the loop. `resume` is called when it may read or write again.
class FaultySocket : public std::enable_shared_from_this<FaultySocket> {
 public:
  FaultySocket(Loop& loop, std::function<void()> resume) : loop_(loop), resume_(std::move(resume)) {}

  void put(const Fault& fault) {
    if (fault.kind == MR_FAULT_CUT) wake_at(cut_until_ = std::max(cut_until_, fault.until));
    if (fault.kind == MR_FAULT_SLOW) {
      bytes_per_second_ = fault.amount;
      slow_until_ = fault.until;
    }
  }
  bool silent() const { return Clock::now() < std::max(cut_until_, pause_until_); }  // nothing is read
  bool mute() const { return Clock::now() < cut_until_; }                            // nothing is written
  void took(size_t bytes) {
    if (Clock::now() < slow_until_)
      wake_at(pause_until_ = std::min(slow_until_, after(static_cast<double>(bytes) / bytes_per_second_)));
  }

 private:
  void wake_at(Time when) {
    loop_.at_on_loop(when, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->resume_();
    });
  }

  Loop& loop_;
  const std::function<void()> resume_;
  Time cut_until_{}, slow_until_{}, pause_until_{};
  double bytes_per_second_ = 0;
};

}  // namespace mr
