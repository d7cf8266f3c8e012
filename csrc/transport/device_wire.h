// Requests of the lanes of device memory: frames that go one way, each with a number that its answer repeats, since
// what is asked takes the owner's GPU thread some time.
#pragma once

#include <map>
#include <memory>

#include "lane.h"

namespace mr {

constexpr size_t kMaxDeviceText = 1024;

struct DeviceAnswer {
  Status status;
  Bytes payload;
  Fd fd;
};

// Of ours, that wait for their answers. On the loop.
class DeviceRequests {
 public:
  using Answered = std::function<void(DeviceAnswer)>;
  explicit DeviceRequests(LinkHost& host) : host_(host) {}

  void send_on_loop(uint16_t type, const Bytes& question, Answered answered) {
    if (!closed_.ok()) return answered({closed_, {}, {}});
    const uint64_t number = next_++;
    waiting_.emplace(number, std::move(answered));
    host_.send_on_loop(type, Writer().put(number).raw(question).take());
  }
  void on_answer_on_loop(Reader& in, std::vector<Fd>& fds) {
    auto found = waiting_.extract(in.get<uint64_t>());
    DeviceAnswer answer;
    const int kind = in.get<uint16_t>();
    std::string text(in.text(kMaxDeviceText));
    if (kind > MR_CONFIG && kind != kRefused) throw Error(MR_PROTOCOL, "an answer of unknown kind");
    answer.status = Status{kind == kRefused ? kUnavailable : kind, 0, std::move(text)};
    const ByteView rest = in.rest();
    answer.payload.assign(rest.begin(), rest.end());
    if (!fds.empty()) answer.fd = std::move(fds.front());
    if (found.empty()) throw Error(MR_PROTOCOL, "an answer to nothing");
    found.mapped()(std::move(answer));
  }
  void close_on_loop(const Status& why) {
    closed_ = why;
    for (auto& [number, answered] : std::exchange(waiting_, {})) answered({why, {}, {}});
  }

  static Bytes encode(uint64_t number, const Status& status, const Bytes& payload) {
    const auto kind = static_cast<uint16_t>(status.kind == kUnavailable ? kRefused : status.kind);
    return Writer().put(number).put(kind).text(status.text.substr(0, kMaxDeviceText)).raw(payload).take();
  }

 private:
  static constexpr int kRefused = 999;  // kUnavailable: another lane may do

  LinkHost& host_;
  Status closed_;
  uint64_t next_ = 1;
  std::map<uint64_t, Answered> waiting_;
};

}  // namespace mr
