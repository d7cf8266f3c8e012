#include "wire.h"

#include <net/ethernet.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hosts {
namespace {

constexpr int kFramesPerTurn = 64;
constexpr std::chrono::milliseconds kLongestQueue{50};  // at a cable that is too slow; what comes then is lost
constexpr size_t kHead = 10;                            // struct virtio_net_hdr, whose header is no C++

ether_header ethernet(const uint8_t* frame) {
  ether_header out;
  std::memcpy(&out, frame + kHead, sizeof out);
  return out;
}

bool is_ip(const uint8_t* frame) {
  const uint16_t type = __builtin_bswap16(ethernet(frame).ether_type);
  return type == ETHERTYPE_IP || type == ETHERTYPE_IPV6;
}

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

}  // namespace

void Wire::plug(size_t host, int card) {
  ends_[host].card = card;
  ends_[host].sent.clear();
}

void Wire::set(size_t host, const Cable& cable) { ends_[host].cable = cable; }

void Wire::take(size_t host) {
  End& from = ends_[host];
  for (int i = 0; i < kFramesPerTurn; ++i) {
    const ssize_t got = ::read(from.card, buffer_.data(), buffer_.size());
    if (got < static_cast<ssize_t>(kHead + sizeof(ether_header))) return;
    send(&from, buffer_.data(), static_cast<size_t>(got));
  }
}

void Wire::send(End* from, const uint8_t* frame, size_t length) {
  const Cable& cable = from->cable;
  if (!cable.plugged) return;
  // Where addresses are asked for nothing is lost: that would cost whole seconds.
  if (cable.loss > 0 && is_ip(frame) && std::uniform_real_distribution<>()(random_) < cable.loss) return;
  const auto now = Clock::now();
  auto leaves = now;
  if (cable.rate > 0) {
    leaves = std::max(now, from->free_at);
    if (leaves - now > kLongestQueue) return;
    leaves += seconds(static_cast<double>(length) / cable.rate);
    from->free_at = leaves;
  }
  from->last_due = std::max(from->last_due, leaves + seconds(cable.delay));  // in order
  from->sent.push_back({from->last_due, Frame(frame, frame + length)});
}

Clock::time_point Wire::deliver() {
  auto next = Clock::time_point::max();
  for (size_t host = 0; host < ends_.size(); ++host) {
    auto& sent = ends_[host].sent;
    while (!sent.empty() && sent.front().due <= Clock::now()) {
      if (ends_[host].cable.plugged) arrive(sent.front().frame, host);
      sent.pop_front();
    }
    if (!sent.empty()) next = std::min(next, sent.front().due);
  }
  return next;
}

void Wire::arrive(const Frame& frame, size_t from) {
  const ether_header head = ethernet(frame.data());
  const bool to_all = (head.ether_dhost[0] & 1) != 0;
  const size_t number = head.ether_dhost[ETH_ALEN - 1];
  for (size_t host = 0; host < ends_.size(); ++host)
    if (host != from && (to_all || number == host + 1)) write_to(host, frame);
}

void Wire::write_to(size_t host, const Frame& frame) {
  const End& to = ends_[host];
  // A card that does not take it has lost it, as cards do.
  if (to.card >= 0 && to.cable.plugged) (void)!::write(to.card, frame.data(), frame.size());
}

}  // namespace hosts
