#include "messages.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace mr {
namespace {

std::string rank_text(uint32_t rank) { return "rank " + std::to_string(rank); }

Member& other_member(Group& group, int64_t rank, const char* argument) {
  if (!group.is_joined()) throw Error(MR_CONFIG, "the group has not been joined yet");
  if (rank < 0 || rank >= group.size() || rank == group.rank())
    throw Error(MR_CONFIG, std::string("argument ") + argument + " is " + std::to_string(rank) +
                               ", but must be another one of the group's " + std::to_string(group.size()) + " ranks");
  return group.member(static_cast<uint32_t>(rank));
}

// ---- Sending ----

class Sender {
 public:
  Sender(Group& group, Member& to, Time deadline) : group_(group), to_(to), deadline_(deadline) {}

  void send(int64_t tag, const uint8_t* data, uint64_t bytes) {
    const std::lock_guard guard(to_.writing);
    group_.check_over();
    const uint64_t part = group_.options().message_bytes;
    uint64_t at = 0;
    do {
      const uint64_t number = to_.sent[kMessages], length = std::min(part, bytes - at);
      await_room(number, at == 0);
      const PieceHead head{static_cast<uint64_t>(tag), bytes, length, number, 0, 0};
      to_.direct ? put(head, data + at) : write(head, data + at);
      to_.sent[kMessages] = number + 1;
      at += length;
    } while (at < bytes);
  }

 private:
  void await_room(uint64_t number, bool is_first) {
    if (group_.has_left(to_)) throw group_.left_error(to_);
    if (number < kChannelSlots) return;
    std::vector<std::atomic<uint32_t>*> asleep;
    std::atomic<uint64_t>* consumed = &to_.consumed[kMessages];
    if (to_.direct) {
      ChannelHead& channel = to_.arena.channel(group_.rank(), kMessages);
      consumed = &channel.consumed;
      asleep.push_back(&channel.writers_asleep);
    }
    const OpRef& before = to_.out_ops[number % kChannelSlots];  // may still read the slot
    const bool has_room = group_.await_message(group_.head().room, asleep, deadline_, [&] {
      return group_.has_left(to_) || (consumed->load() + kChannelSlots > number && (!before || before->done()));
    });
    if (group_.has_left(to_)) throw group_.left_error(to_);
    if (has_room) return;
    // Half a message can't be taken back.
    if (!is_first) group_.fail(to_.rank, MR_TRANSFER_TIMEOUT, "it took only a part of a message before the deadline");
    group_.check_over();
    throw Error(MR_TRANSFER_TIMEOUT, "send to " + rank_text(to_.rank) + ": it takes no messages");
  }

  void put(const PieceHead& head, const uint8_t* data) {
    uint8_t* const slot = to_.arena.channel_slot(group_.rank(), kMessages, head.number);
    std::memcpy(slot, &head, sizeof head);
    if (head.bytes != 0) std::memcpy(slot + sizeof head, data, head.bytes);
    ChannelHead& channel = to_.arena.channel(group_.rank(), kMessages);
    channel.arrived[head.number % kChannelSlots].store(head.number + 1);
    if (channel.readers_asleep.load() != 0) to_.arena.head->arrivals.ring();
  }

  void write(const PieceHead& head, const uint8_t* data) {
    const uint64_t slot_bytes = group_.arena().geometry.message_bytes;
    if (!to_.out) to_.out = std::make_shared<Bytes>(kChannelSlots * slot_bytes);
    uint8_t* const slot = to_.out->data() + head.number % kChannelSlots * slot_bytes;
    std::memcpy(slot, &head, sizeof head);
    if (head.bytes != 0) std::memcpy(slot + sizeof head, data, head.bytes);
    to_.out_ops[head.number % kChannelSlots] =
        group_.write_piece(to_, kMessages, head.number, slot, sizeof head + head.bytes, to_.out);
  }

  Group& group_;
  Member& to_;
  const Time deadline_;
};

// ---- Receiving ----

// What has come from one member; for who holds its `reading`.
class Receiver {
 public:
  Receiver(Group& group, Member& from)
      : group_(group), from_(from), channel_(group.arena().channel(from.rank, kMessages)) {}

  std::atomic<uint32_t>* asleep() const { return &channel_.readers_asleep; }

  // The head of the next message, once its first part is here.
  const PieceHead* next() const {
    const uint64_t number = from_.received[kMessages];
    if (channel_.arrived[number % kChannelSlots].load() != number + 1) return nullptr;
    return reinterpret_cast<const PieceHead*>(group_.arena().channel_slot(from_.rank, kMessages, number));
  }

  std::optional<Bytes> take_early(int64_t tag) {
    const auto found = std::find_if(from_.early.begin(), from_.early.end(),
                                    [&](const EarlyMessage& message) { return message.tag == tag; });
    if (found == from_.early.end()) return {};
    Bytes data = std::move(found->data);
    from_.early.erase(found);
    return data;
  }

  // A message with another tag is next: out of the way, for who asks for it.
  void put_aside(Time deadline) {
    const PieceHead head = *next();
    if (head.total > uint64_t{1} << 40) damaged();
    EarlyMessage message{static_cast<int64_t>(head.call), Bytes(head.total)};
    read(message.data.data(), head.total, deadline);
    from_.early.push_back(std::move(message));
    group_.head().arrivals.ring();  // a thread of ours may wait for just this one
  }

  // All parts of the next message. Without `out` they are thrown away.
  void read(uint8_t* out, uint64_t bytes, Time deadline) {
    uint64_t at = 0;
    do {
      bool left = false;
      const auto ready = [&] {
        left = group_.has_left(from_);
        return next() != nullptr || left;
      };
      if (!group_.await_message(group_.head().arrivals, {asleep()}, deadline, ready)) {
        group_.fail(from_.rank, MR_TRANSFER_TIMEOUT, "only a part of its message came before the deadline");
        group_.check_over();
      }
      if (next() == nullptr) throw group_.left_error(from_);
      const PieceHead head = *next();
      if (head.total != bytes || head.bytes > bytes - at || head.bytes > group_.options().message_bytes ||
          (head.bytes == 0 && bytes != 0))
        damaged();
      if (out != nullptr && head.bytes != 0)
        std::memcpy(out + at, reinterpret_cast<const uint8_t*>(next() + 1), head.bytes);
      at += head.bytes;
      consume();
    } while (at < bytes);
  }

 private:
  void consume() {
    const uint64_t count = ++from_.received[kMessages];
    if (!from_.direct) return group_.tell_consumed(from_, kMessages, count);
    channel_.consumed.store(count);
    if (channel_.writers_asleep.load() != 0) from_.arena.head->room.ring();
  }

  [[noreturn]] void damaged() {
    group_.fail(from_.rank, MR_PROTOCOL, "what it sends makes no message");
    throw Error(group_.failure());
  }

  Group& group_;
  Member& from_;
  ChannelHead& channel_;
};

// Looks at what has come from one member; false: not the message that is wanted.
bool receive_if_there(Group& group, Member& from, int64_t tag, uint8_t* out, uint64_t bytes, Time deadline) {
  Receiver receiver(group, from);
  const auto demand_size = [&](uint64_t has) {
    if (has != bytes)
      throw Error(MR_OUT_OF_BOUNDS, "the message from " + rank_text(from.rank) + " has " + std::to_string(has) +
                                        " bytes, the memory for it " + std::to_string(bytes));
  };
  if (const auto early = receiver.take_early(tag)) {
    demand_size(early->size());
    if (bytes != 0) std::memcpy(out, early->data(), bytes);
    return true;
  }
  while (const PieceHead* head = receiver.next()) {
    if (static_cast<int64_t>(head->call) != tag) {
      receiver.put_aside(deadline);
      continue;
    }
    const uint64_t total = head->total;
    receiver.read(total == bytes ? out : nullptr, total, deadline);
    demand_size(total);
    return true;
  }
  return false;
}

}  // namespace

void send_message(Group& group, uint32_t to, int64_t tag, const uint8_t* data, uint64_t bytes, Time deadline) {
  Sender(group, other_member(group, to, "to"), deadline).send(tag, data, bytes);
}

uint32_t receive_message(Group& group, int64_t from, int64_t tag, uint8_t* out, uint64_t bytes, Time deadline) {
  std::vector<Member*> members;
  if (from != kAnybody) members.push_back(&other_member(group, from, "from"));
  for (uint32_t rank = 0; from == kAnybody && rank < group.size(); ++rank)
    if (rank != group.rank()) members.push_back(&other_member(group, rank, "from"));
  std::vector<std::atomic<uint32_t>*> asleep;
  for (Member* member : members) asleep.push_back(Receiver(group, *member).asleep());
  uint32_t sender = 0;
  // Whoever waits for the same member, while we read from it, looks again when we are done.
  struct WakeOthers {
    Group& group;
    const std::vector<std::atomic<uint32_t>*>& asleep;
    ~WakeOthers() {
      if (std::any_of(asleep.begin(), asleep.end(), [](const auto* flag) { return flag->load() != 0; }))
        group.head().arrivals.ring();
    }
  } wake{group, asleep};
  // What another thread is just reading is looked at when it has put it aside.
  bool all_left = false;
  const bool came = group.await_message(group.head().arrivals, asleep, deadline, [&] {
    all_left = true;
    for (Member* member : members) {
      const std::unique_lock guard(member->reading, std::try_to_lock);
      const bool left = group.has_left(*member);  // before we look at what has come
      all_left = all_left && left && guard.owns_lock();
      if (!guard.owns_lock() || !receive_if_there(group, *member, tag, out, bytes, deadline)) continue;
      all_left = false;
      sender = member->rank;
      return true;
    }
    return all_left;
  });
  if (all_left) throw group.left_error(*members.back());
  if (came) return sender;
  group.check_over();
  throw Error(MR_TRANSFER_TIMEOUT,
              "receive of a message with tag " + std::to_string(tag) + " from " +
                  (from == kAnybody ? "anybody" : rank_text(sender = static_cast<uint32_t>(from))) +
                  ": none came before the deadline");
}

}  // namespace mr
