#include "rounds.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "patterns.h"

namespace mr {
namespace {

// A move goes in pieces, so that a member passes on what has come while the rest is coming; but not in smaller ones.
constexpr uint64_t kLeastPiece = 64 << 10;
static_assert(kStagedSteps == kChannelSlots);  // an operation for each slot of our own channel
constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// The next piece that a member sends, or gets.
class Cursor {
 public:
  using At = std::array<uint64_t, 3>;

  Cursor(const Rounds& rounds, const std::vector<Move>& moves, uint64_t room)
      : rounds_(rounds), moves_(moves), room_(room) {
    if (moves.empty()) window_ = rounds.num_windows;
    begin();
  }

  bool done() const { return window_ == rounds_.num_windows; }
  const Move& move() const { return moves_[index_]; }
  uint64_t window() const { return window_; }
  uint64_t index() const { return index_; }
  uint64_t piece() const { return piece_; }
  uint64_t at() const { return piece_ * piece_bytes_; }  // in the bytes of the move's blocks
  uint64_t bytes() const { return std::min(piece_bytes_, move_bytes_ - at()); }
  At place() const { return {window_, index_, piece_}; }       // among the member's moves
  At time() const { return {window_, move().round, piece_}; }  // among those of all members
  uint64_t number() const { return window_ * rounds_.plan.num_rounds + move().round; }

  void go_on() {
    if (++piece_ * piece_bytes_ < move_bytes_) return;
    piece_ = 0;
    if (++index_ == moves_.size()) index_ = 0, ++window_;
    begin();
  }

 private:
  void begin() {
    if (done()) return;
    move_bytes_ = 0;
    for (uint32_t block = move().blocks.first; block < move().blocks.end; ++block)
      move_bytes_ += rounds_.memory(window_, block).bytes;
    const uint64_t part = (move_bytes_ / kChannelSlots + 63) / 64 * 64;
    piece_bytes_ = std::min(room_, std::max(kLeastPiece, part));
  }

  const Rounds& rounds_;
  const std::vector<Move>& moves_;
  const uint64_t room_;
  uint64_t window_ = 0, index_ = 0, piece_ = 0, move_bytes_ = 0, piece_bytes_ = 0;
};

class Run {
 public:
  Run(Group& group, const Call& call, const Rounds& rounds)
      : group_(group),
        call_(call),
        rounds_(rounds),
        plan_(rounds.plan),
        sends_(rounds, plan_.sends, room_for_one(group)),
        receives_(rounds, plan_.receives, room_for_one(group)),
        first_round_(plan_.num_blocks, kNever) {
    for (const Move& move : plan_.receives)
      for (uint32_t block = move.blocks.first; block < move.blocks.end; ++block)
        first_round_[block] = std::min(first_round_[block], move.round);
    for (const Move& move : plan_.sends) needs_.push_back(last_before(move));
  }

  void run() {
    while (!sends_.done() || !receives_.done()) {
      if (can_send())
        send();
      else if (can_receive())
        receive();
      else
        group_.await(awaited(), call_.deadline, [&] { return can_go_on(); }, kAnyMember);
    }
  }

 private:
  Member& member(const Move& move) { return group_.member((move.peer + rounds_.root) % group_.size()); }

  // What a move sends has come when this one has: the last of earlier rounds that brings some of it. -1: it is ours.
  int64_t last_before(const Move& send) const {
    int64_t last = -1;
    for (size_t i = 0; i < plan_.receives.size() && plan_.receives[i].round < send.round; ++i)
      if (plan_.receives[i].blocks.meets(send.blocks)) last = static_cast<int64_t>(i);
    return last;
  }

  bool has_what_it_sends() const {
    const int64_t needed = needs_[sends_.index()];
    if (needed < 0) return true;
    const auto index = static_cast<uint64_t>(needed);
    const bool is_same = plan_.receives[index].blocks == sends_.move().blocks;  // then piece by piece
    const Cursor::At after =
        is_same ? Cursor::At{sends_.window(), index, sends_.piece() + 1} : Cursor::At{sends_.window(), index + 1, 0};
    return receives_.place() >= after;
  }

  bool has_room(Member& to) {
    if (group_.has_left(to)) return true;
    const auto& consumed = to.direct ? to.arena.channel(group_.rank(), kStaged).consumed : to.consumed[kStaged];
    return to.sent[kStaged] < consumed.load() + kChannelSlots && (to.direct || slot_user() == nullptr);
  }

  // Pieces for members that are not direct are made in our own channel, which nobody else writes into. Who still reads
  // what was in its next slot?
  Member* slot_user() {
    for (const auto& [to, op] : group_.leaving[group_.next_out % kStagedSteps])
      if (!op->done() && !group_.has_left(*to)) return to;
    return nullptr;
  }

  bool can_send() { return !sends_.done() && has_what_it_sends() && has_room(member(sends_.move())); }

  bool has_come(const Member& from) const {
    const uint64_t number = from.received[kStaged];
    return group_.arena().channel(from.rank, kStaged).arrived[number % kChannelSlots].load() == number + 1;
  }
  const PieceHead* next_from(const Member& from) const {
    return reinterpret_cast<const PieceHead*>(group_.arena().channel_slot(from.rank, kStaged, from.received[kStaged]));
  }

  bool can_receive() {
    if (receives_.done() || (!sends_.done() && sends_.time() <= receives_.time())) return false;
    return has_come(member(receives_.move()));
  }

  bool can_go_on() {
    if (can_send() || can_receive()) return true;
    if (group_.head().awaits.load() != 0) look_at_others();  // about to sleep
    return false;
  }

  // In another algorithm others give us what we do not ask for, and lack what we do not give.
  void look_at_others() {
    for (uint32_t rank = 0; rank < group_.size(); ++rank) {
      const Member& from = group_.member(rank);
      if (from.direct && from.arena.head->turn.load() == group_.turn)
        differ(group_, from, "it calls something else than " + call_.describe(rounds_.total));
      if (rank == group_.rank() || !has_come(from)) continue;
      const PieceHead& head = *next_from(from);
      if (head.turn == group_.turn && head.call != call_.number())
        check_same_call(group_, call_, from, head, rounds_.total, head.number);
    }
  }

  // Whose fault it is when nothing happens.
  Member& awaited() {
    if (!sends_.done() && has_what_it_sends()) {
      Member& to = member(sends_.move());
      if (Member* const user = to.direct ? nullptr : slot_user()) return *user;
      if (receives_.done() || sends_.time() <= receives_.time()) return to;
    }
    return member(receives_.move());
  }

  void send() {
    Member& to = member(sends_.move());
    if (!group_.has_left(to)) {
      const uint64_t number = to.sent[kStaged]++;
      const Arena& arena = to.direct ? to.arena : group_.arena();
      auto* const head = reinterpret_cast<PieceHead*>(
          arena.channel_slot(group_.rank(), kStaged, to.direct ? number : group_.next_out));
      *head = {call_.number(), rounds_.total, sends_.bytes(), sends_.number(), group_.turn, 0};
      make_piece(reinterpret_cast<uint8_t*>(head + 1));
      if (to.direct) {
        arena.channel(group_.rank(), kStaged).arrived[number % kChannelSlots].store(number + 1);
        group_.wake_waiter(to);
      } else {
        auto& leaving = group_.leaving[group_.next_out++ % kStagedSteps];
        leaving.clear();
        leaving.emplace_back(&to, group_.write_piece(to, kStaged, number, reinterpret_cast<const uint8_t*>(head),
                                                     sizeof *head + head->bytes, group_.memory()));
      }
    }
    sends_.go_on();
  }

  void receive() {
    Member& from = member(receives_.move());
    const PieceHead* const head = next_from(from);
    check_same_call(group_, call_, from, *head, rounds_.total, receives_.number());
    if (head->bytes != receives_.bytes())
      differ(group_, from,
             "it gives " + std::to_string(head->bytes) + " bytes where rank " + std::to_string(group_.rank()) +
                 " expects " + std::to_string(receives_.bytes()) + ", in round " + std::to_string(head->number) +
                 " of " + call_.describe(rounds_.total));
    take_piece(reinterpret_cast<const uint8_t*>(head + 1));
    const uint64_t count = ++from.received[kStaged];
    if (from.direct) {
      group_.arena().channel(from.rank, kStaged).consumed.store(count);
      group_.wake_waiter(from);
    } else if (count % (kChannelSlots / 2) == 0) {  // seldom, since it is a message
      group_.tell_consumed(from, kStaged, count);
    }
    receives_.go_on();
  }

  // The blocks of a cursor's piece, as (memory, whether nothing has come for it, offset in the piece, bytes).
  template <typename Part>
  void each_part(const Cursor& cursor, Part&& part) {
    uint64_t skipped = cursor.at(), done = 0;
    for (uint32_t block = cursor.move().blocks.first; done < cursor.bytes(); ++block) {
      BlockMemory memory = rounds_.memory(cursor.window(), block);
      const uint64_t begin = std::min(skipped, memory.bytes);
      skipped -= begin;
      if (memory.given != nullptr) memory.given += begin;
      if (memory.place != nullptr) memory.place += begin;
      memory.bytes = std::min(memory.bytes - begin, cursor.bytes() - done);
      if (memory.bytes != 0) part(memory, first_round_[block] >= cursor.move().round, done);
      done += memory.bytes;
    }
  }

  void make_piece(uint8_t* out) {
    each_part(sends_, [&](const BlockMemory& ours, bool is_given, uint64_t at) {
      if (is_given)
        give(group_, call_, out + at, ours.given, ours.bytes);
      else
        std::memcpy(out + at, ours.place, ours.bytes);
    });
  }

  void take_piece(const uint8_t* piece) {
    const Merge merge = receives_.move().merge;
    each_part(receives_, [&](const BlockMemory& ours, bool is_given, uint64_t at) {
      if (merge == Merge::replace) {
        std::memcpy(ours.place, piece + at, ours.bytes);
        return;
      }
      const uint8_t* of_ours = is_given ? ours.given : ours.place;
      if (is_given && averages(call_)) give(group_, call_, ours.place, ours.given, ours.bytes), of_ours = ours.place;
      const bool first = merge == Merge::ours_first;
      combine(call_, first ? of_ours : piece + at, first ? piece + at : of_ours, ours.place, ours.bytes);
    });
  }

  Group& group_;
  const Call& call_;
  const Rounds& rounds_;
  const Plan& plan_;
  Cursor sends_, receives_;
  std::vector<uint32_t> first_round_;  // in which something comes for a block
  std::vector<int64_t> needs_;         // by index of a send: see last_before
};

}  // namespace

void run_rounds(Group& group, const Call& call, const Rounds& rounds) { Run(group, call, rounds).run(); }

}  // namespace mr
