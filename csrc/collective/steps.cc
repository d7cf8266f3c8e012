#include "steps.h"

#include <algorithm>
#include <cstring>

#include "../memory/strided_copy.h"

namespace mr {
namespace {

const char* const kNames[] = {"barrier",    "broadcast", "all_reduce", "reduce",    "reduce_scatter",
                              "all_gather", "gather",    "scatter",    "all_to_all"};

const char* const kAlgorithms[] = {"direct", "doubling", "halving", "ring", "tree"};

std::string describe_call(uint64_t number, uint64_t total) {
  const uint64_t kind = number & 0xff, algorithm = number >> 24 & 0xff;
  if (kind >= std::size(kNames) || algorithm >= std::size(kAlgorithms)) return "something else";
  return std::string(kNames[kind]) + " of " + std::to_string(total) + " bytes (dtype " +
         std::to_string(number >> 8 & 0xff) + ", reduction " + std::to_string(number >> 16 & 0xff) + ", algorithm " +
         kAlgorithms[algorithm] + ", root " + std::to_string(number >> 32) + ")";
}

class Run {
 public:
  Run(Group& group, const Call& call, const Flow& flow)
      : group_(group), flow_(flow), call_(call), deadline_(call.deadline), first_(group.next_step) {
    group.head().turn.store(group.turn);
    for (uint32_t i = 1; i < group.size(); ++i) others_.push_back(&group.member((group.rank() + i) % group.size()));
    if (gives() && std::all_of(others_.begin(), others_.end(), [](const Member* each) { return each->direct.load(); }))
      exposure_ = group.expose(call.what);
  }
  ~Run() {
    for (Member* member : others_) member->exposed.reset();
  }

  void run() {
    const uint64_t steps = flow_.num_steps, lag = flow_.combine ? 2 : 1;
    for (uint64_t i = 0; i < steps + lag; ++i) {
      if (i < steps && gives()) stage(i);
      if (flow_.combine && i >= 1 && i - 1 < steps) combine(i - 1);
      if (i >= lag) take(i - lag);
    }
    if (exposure_) await_readers(first_ + steps);
    group_.next_step = first_ + steps;
  }

 private:
  uint64_t step(uint64_t i) const { return first_ + i; }
  uint64_t stride() const { return sizeof(PieceHead) + flow_.piece_bytes; }
  bool gives() const { return flow_.giver < 0 || flow_.giver == group_.rank(); }
  bool gives_to(const Member& to) const { return flow_.taker < 0 || flow_.taker == to.rank; }
  bool takes_from(const Member& from) const {
    return (flow_.giver < 0 || flow_.giver == from.rank) && (flow_.taker < 0 || flow_.taker == group_.rank());
  }

  PieceHead* piece(const Arena& arena, uint64_t i, uint64_t index) const {
    return reinterpret_cast<PieceHead*>(arena.slot(step(i)) + index * stride());
  }
  static uint8_t* data(PieceHead* head) { return reinterpret_cast<uint8_t*>(head + 1); }

  // Until all members that read our memory have done so, in all steps before `step`.
  void await_readers(uint64_t step) {
    for (Member* member : others_)
      if (member->direct)
        group_.await(*member, deadline_, [&] {
          if (member->taken >= step || group_.has_left(*member)) return true;
          member->taken = member->arena.head->taken.load();
          return member->taken >= step;
        });
  }

  void await_room(uint64_t i) {
    const uint64_t now = step(i);
    if (now >= kStagedSteps) await_readers(now - kStagedSteps + 1);
    auto& leaving = group_.leaving[now % kStagedSteps];
    for (const auto& [to, op] : leaving)
      group_.await(*to, deadline_, [&, to = to, op = op] { return op->done() || group_.has_left(*to); });
    leaving.clear();
  }

  void send(Member& to, Traffic traffic, uint64_t i, const PieceHead* head) {
    if (group_.has_left(to)) return;
    const uint64_t number = to.sent[traffic]++;
    if (number >= kChannelSlots)
      group_.await(to, deadline_,
                   [&] { return to.consumed[traffic].load() + kChannelSlots > number || group_.has_left(to); });
    const auto* bytes = reinterpret_cast<const uint8_t*>(head);
    group_.leaving[step(i) % kStagedSteps].emplace_back(
        &to, group_.write_piece(to, traffic, number, bytes, sizeof *head + head->bytes, group_.memory()));
  }

  // Into our slot: the bytes, or where they lie.
  PieceHead* put(uint64_t i, uint64_t index, const Piece& what) {
    PieceHead* const head = piece(group_.arena(), i, index);
    const uint64_t place = exposure_ ? exposure_->place_of(what.at, what.bytes) : 0;
    if (place == 0 && what.bytes != 0) std::memcpy(data(head), what.at, what.bytes);
    *head = {call_.number(), flow_.total, what.bytes, step(i), group_.turn, place};
    return head;
  }

  void stage(uint64_t i) {
    await_room(i);
    const PieceHead* const head = flow_.by_rank ? nullptr : put(i, 0, flow_.stage(i, 0));
    if (flow_.by_rank)
      for (Member* member : others_)
        if (gives_to(*member)) put(i, member->rank, flow_.stage(i, member->rank));
    group_.publish(group_.head().staged, step(i) + 1);
    for (Member* member : others_)
      if (!member->direct && gives_to(*member))
        send(*member, kStaged, i, flow_.by_rank ? piece(group_.arena(), i, member->rank) : head);
  }

  // What a member has staged for us, or combined, once it is there.
  const PieceHead* await_piece(Member& from, Traffic traffic, uint64_t i) {
    if (!from.direct) {
      const uint64_t number = from.received[traffic]++;
      const auto& arrived = group_.arena().channel(from.rank, traffic).arrived[number % kChannelSlots];
      group_.await(from, deadline_, [&] { return arrived.load() == number + 1; });
      return checked(from, reinterpret_cast<PieceHead*>(group_.arena().channel_slot(from.rank, traffic, number)), i);
    }
    uint64_t& seen = traffic == kStaged ? from.staged : from.combined;
    group_.await(from, deadline_, [&] {
      if (seen > step(i)) return true;
      seen = (traffic == kStaged ? from.arena.head->staged : from.arena.head->combined).load();
      return seen > step(i);
    });
    const uint64_t index = traffic == kCombined ? from.rank : flow_.by_rank ? group_.rank() : 0;
    return checked(from, piece(from.arena, i, index), i);
  }

  const PieceHead* checked(const Member& from, const PieceHead* head, uint64_t i) {
    check_same_call(group_, call_, from, *head, flow_.total, step(i));
    const uint64_t most = flow_.length ? flow_.length(i, from.rank) : flow_.piece_bytes;
    if (head->bytes > most || (flow_.length && head->bytes != most))
      differ(group_, from,
             "it gives " + std::to_string(head->bytes) + " bytes where rank " + std::to_string(group_.rank()) +
                 " expects " + std::to_string(most) + ", in step " + std::to_string(i) + " of " +
                 call_.describe(flow_.total));
    return head;
  }

  Pieces await_all(uint64_t i) {
    Pieces pieces(group_.size(), nullptr);
    for (Member* member : others_)
      if (takes_from(*member)) pieces[member->rank] = bytes_of(*member, await_piece(*member, kStaged, i));
    return pieces;
  }

  const uint8_t* bytes_of(Member& from, const PieceHead* head) {
    if (head->place == 0) return reinterpret_cast<const uint8_t*>(head + 1);
    return group_.exposed_by(from, head->place, head->bytes, deadline_);
  }

  void copy(uint8_t* to, Member& from, const PieceHead* head) {
    const uint8_t* const bytes = bytes_of(from, head);
    if (head->bytes == 0) return;
    // Memory that nobody has touched yet need not be read to be overwritten; where all combine, others have just read
    // it.
    if (head->place != 0 && !flow_.combine && flow_.total >= kStreamingBytes)
      streaming_copy(to, bytes, head->bytes), finish_streaming();
    else
      std::memcpy(to, bytes, head->bytes);
  }

  void combine(uint64_t i) {
    Pieces pieces = await_all(i);
    const PieceHead* const head = put(i, group_.rank(), flow_.combine(i, pieces));
    check_exposed();
    group_.publish(group_.head().combined, step(i) + 1);
    for (Member* member : others_)
      if (!member->direct) send(*member, kCombined, i, head);
  }

  // A member whose memory we have read in place may have given up meanwhile, and changed it.
  void check_exposed() {
    for (Member* member : others_) group_.check_exposed_by(*member);
  }

  void take(uint64_t i) {
    if (flow_.take_all) {
      if (flow_.taker < 0 || flow_.taker == group_.rank()) {
        Pieces pieces = await_all(i);
        flow_.take_all(i, pieces);
      }
    } else {
      for (Member* member : others_) {
        if (!takes_from(*member)) continue;
        const PieceHead* const head = await_piece(*member, flow_.combine ? kCombined : kStaged, i);
        copy(flow_.take(i, member->rank, head->bytes), *member, head);
      }
    }
    check_exposed();
    for (Member* member : others_)
      if (!member->direct && takes_from(*member))
        for (const Traffic traffic : {kStaged, kCombined})
          if (traffic == kStaged || flow_.combine) group_.tell_consumed(*member, traffic, member->received[traffic]);
    group_.publish(group_.head().taken, step(i) + 1);
  }

  Group& group_;
  const Flow& flow_;
  const Call& call_;
  const Time deadline_;
  const uint64_t first_;
  std::vector<Member*> others_;
  std::unique_ptr<Exposure> exposure_;
};

}  // namespace

uint64_t Call::number() const {
  return what.kind | uint64_t{what.dtype} << 8 | uint64_t{what.reduction} << 16 | uint64_t{what.algorithm} << 24 |
         uint64_t{what.root} << 32;
}

std::string Call::text() const { return kNames[what.kind]; }

std::string Call::describe(uint64_t total) const { return describe_call(number(), total); }

void differ(Group& group, const Member& from, const std::string& how) {
  group.fail(from.rank, MR_CONFIG, how);
  throw Error(group.failure());
}

void check_same_call(Group& group, const Call& call, const Member& from, const PieceHead& head, uint64_t total,
                     uint64_t number) {
  if (head.call == call.number() && head.total == total && head.number == number) return;
  differ(group, from,
         "it calls " + describe_call(head.call, head.total) + ", rank " + std::to_string(group.rank()) + " calls " +
             call.describe(total));
}

uint64_t room_for_one(const Group& group) { return (group.arena().geometry.slot_bytes - sizeof(PieceHead)) / 64 * 64; }

uint64_t room_by_rank(const Group& group) {
  return (group.arena().geometry.slot_bytes / group.size() - sizeof(PieceHead)) / 64 * 64;
}

void run_flow(Group& group, const Call& call, const Flow& flow) { Run(group, call, flow).run(); }

}  // namespace mr
