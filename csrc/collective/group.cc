#include "group.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "../base/fence.h"

namespace mr {
namespace {

constexpr uint64_t kArenaMagic = 0x70756f7267726dULL;  // "mrgroup"
constexpr uint32_t kArenaVersion = 2;

// What a notification says: 4 bits what, 4 bits traffic, 16 bits rank of the sender, 40 bits number.
enum class Notice : uint64_t { hello = 1, arrived, consumed, failed, left };

struct Note {
  Notice what;
  uint32_t traffic, rank;
  uint64_t number;

  uint64_t word() const {
    return static_cast<uint64_t>(what) << 60 | uint64_t{traffic} << 56 | uint64_t{rank} << 40 | number;
  }
  static Note from(uint64_t word) {
    return {static_cast<Notice>(word >> 60), static_cast<uint32_t>(word >> 56 & 15),
            static_cast<uint32_t>(word >> 40 & 0xffff), word & ((uint64_t{1} << 40) - 1)};
  }
};

// A failure as one word: its kind, whose fault it is, who says so, and whether it is only that collectives need a
// member that has left.
struct FailureWord {
  int kind;
  uint32_t rank, reporter;
  bool left = false;

  uint64_t word() const {
    return uint64_t{1} << 38 | uint64_t{left} << 37 | static_cast<uint64_t>(kind) << 32 | rank << 16 | reporter;
  }
  static FailureWord from(uint64_t word) {
    return {static_cast<int>(word >> 32 & 31), static_cast<uint32_t>(word >> 16 & 0xffff),
            static_cast<uint32_t>(word & 0xffff), (word >> 37 & 1) != 0};
  }
};

std::string rank_text(uint32_t rank, const std::string& name) {
  return "rank " + std::to_string(rank) + (name.empty() ? "" : " (" + name + ")");
}

// Of what all members must have alike, in 30 bits.
uint32_t digest(const GroupOptions& options) {
  uint64_t out = options.size;
  for (const uint64_t each : {options.step_bytes, options.message_bytes, options.choices})
    out = (out ^ each) * 0x9e3779b97f4a7c15ULL;
  return static_cast<uint32_t>(out >> 34);
}

Error has_other_options(uint32_t rank, const std::string& name) {
  return Error(MR_CONFIG, rank_text(rank, name) +
                              " has another rank, size, step_bytes, message_bytes or algorithm than is " +
                              "expected here: options and the table of collectives must be the same on all members");
}

// Counters only grow, whichever thread is first.
void raise(std::atomic<uint64_t>& counter, uint64_t value) {
  uint64_t now = counter.load();
  while (now < value && !counter.compare_exchange_weak(now, value)) continue;
}

void wake(const Arena& arena) {
  for (Bell* bell : {&arena.head->steps, &arena.head->arrivals, &arena.head->room}) bell->ring();
}

// The first one counts; but that a member has left may become worse. False: it has failed already.
bool tell_failure(const Arena& arena, uint64_t word) {
  uint64_t now = 0;
  while (!arena.head->failure.compare_exchange_weak(now, word))
    if (now != 0 && (!FailureWord::from(now).left || FailureWord::from(word).left)) return false;
  wake(arena);
  return true;
}

}  // namespace

GroupOptions Group::checked(const mr_group_options& raw) {
  GroupOptions options{raw.rank,    raw.size, raw.step_bytes / 64 * 64, raw.message_bytes / 64 * 64,
                       raw.choices, raw.spin, raw.interrupted};
  if (raw.size == 0 || raw.size > kMaxMembers)
    throw Error(MR_CONFIG, "argument size is " + std::to_string(raw.size) + ", but a group has 1 to " +
                               std::to_string(kMaxMembers) + " members");
  if (raw.rank >= raw.size)
    throw Error(MR_CONFIG, "argument rank is " + std::to_string(raw.rank) + " in a group of " +
                               std::to_string(raw.size) + " members");
  for (const auto& [bytes, name] : {std::pair{raw.step_bytes, "step_bytes"}, {raw.message_bytes, "message_bytes"}})
    if (bytes < 64 || bytes > uint64_t{1} << 30)
      throw Error(MR_CONFIG, std::string("argument ") + name + " is " + std::to_string(bytes) +
                                 ", but must be from 64 bytes to 1 GiB");
  return options;
}

Geometry Group::geometry_of(const GroupOptions& options) {
  // A slot holds a piece of at least 64 bytes for each member.
  const uint64_t step = std::max<uint64_t>(options.step_bytes, 64 * uint64_t{options.size});
  return {options.size, step + sizeof(PieceHead) * options.size, options.message_bytes + sizeof(PieceHead)};
}

std::shared_ptr<Group> Group::create(std::shared_ptr<Node> node, const GroupOptions& options, RegionRef region) {
  const std::shared_ptr<Group> group(new Group(std::move(node), options, region));
  region->set_on_notify([weak = std::weak_ptr(group)](uint64_t value) {
    if (const auto self = weak.lock()) self->on_notify(value);
  });
  return group;
}

Group::Group(std::shared_ptr<Node> node, const GroupOptions& options, RegionRef region)
    : node_(std::move(node)), options_(options), region_(std::move(region)), spinning_(options.spin) {
  arena_ = {new (region_->base) ArenaHead{}, geometry_of(options)};
  arena_.head->magic = kArenaMagic;
  arena_.head->version = kArenaVersion;
  arena_.head->rank = options.rank;
  arena_.head->size = options.size;
  arena_.head->slot_bytes = arena_.geometry.slot_bytes;
  arena_.head->message_bytes = arena_.geometry.message_bytes;
  for (uint32_t rank = 0; rank < options.size; ++rank) {
    members_.push_back(std::make_unique<Member>());
    members_.back()->rank = rank;
  }
}

Group::~Group() { close(); }

// ---- Joining ----

void Group::join(const std::vector<RemoteRegion>& regions, Time deadline) {
  if (is_joined()) throw Error(MR_CONFIG, "the group has been joined already");
  for (uint32_t rank = 0; rank < size(); ++rank) {
    Member& member = *members_[rank];
    member.name = regions[rank].owner;
    member.region = std::make_shared<const RemoteRegion>(regions[rank]);
    if (rank == this->rank() && member.region->name.id != region_->id)
      throw Error(MR_CONFIG, "the handle of " + rank_text(rank, "") + ", which is ours, is not of this group");
    if ((member.region->access & MR_WRITE) == 0)
      throw Error(MR_PROTOCOL, "the handle of " + rank_text(rank, member.name) + " is not of a group");
    if (member.region->size != arena_.geometry.bytes()) throw has_other_options(rank, member.name);
  }
  for (const auto& member : members_)
    if (member->rank != rank()) find(*member, deadline);
  for (const auto& member : members_)
    if (member->rank != rank()) greet(*member, deadline);
  joined_ = true;
}

// Maps its arena where it can be, and watches it.
void Group::find(Member& member, Time deadline) {
  member.peer = node_->peer_of(Address::parse(member.region->address));
  const auto watch = std::make_shared<Op>();
  watch->verb = Verb::watch;
  watch->peer_name = member.name;
  watch->submitted = Clock::now();
  watch->on_end = [weak = weak_from_this(), rank = member.rank](const Status& why) {
    if (const auto self = weak.lock()) self->on_lost(rank, why);
  };
  member.watch = watch;
  node_->submit(member.peer, watch);

  const OpRef map = start(member, Verb::map, deadline);
  node_->submit(member.peer, map);
  while (!map->wait(-1)) continue;
  const Status& status = map->status();
  if (status.kind == MR_CONFIG || status.kind == MR_REGISTRATION) return;  // no shared memory with this one
  if (!status.ok())
    throw Error(status.kind, rank_text(member.rank, member.name) + " cannot be reached: " + status.text);
  member.mapping = map->mapping;
  const Arena arena{reinterpret_cast<ArenaHead*>(member.mapping->address() + member.region->shared_offset),
                    arena_.geometry};
  if (!member.mapping->writable() || arena.head->magic != kArenaMagic || arena.head->version != kArenaVersion ||
      arena.head->rank != member.rank || arena.head->size != size() ||
      arena.head->slot_bytes != arena_.geometry.slot_bytes ||
      arena.head->message_bytes != arena_.geometry.message_bytes)
    throw has_other_options(member.rank, member.name);
  member.arena = arena;
}

// Both say whether they map the other's arena, which also says that they are there.
void Group::greet(Member& member, Time deadline) {
  const uint32_t ours = digest(options_);
  notify(member, Note{Notice::hello, 0, rank(), ours << 2 | (member.arena.head != nullptr ? 1u : 2u)}.word());
  await(member, deadline, [&] { return member.hello.load() != 0; });
  const uint32_t hello = member.hello.load();
  if (hello >> 2 != ours) throw has_other_options(member.rank, member.name);
  member.direct = member.arena.head != nullptr && (hello & 3) == 1;
}

void Group::close() {
  if (closed_.exchange(true)) return;
  const bool was_over = is_over();
  for (const auto& member : members_)
    if (member->watch && !member->watch->done()) member->peer->stop(member->watch, MR_CANCELLED);
  tell_failure(arena_, FailureWord{MR_CANCELLED, rank(), rank()}.word());  // threads of ours
  try {
    if (joined_ && !was_over) leave();
    const OpRef drop = node_->drop(region_);
    region_->set_on_notify(nullptr);
    while (!drop->wait(-1)) continue;
    if (drop->status().ok()) node_->shared_free(region_->base);
  } catch (const Error&) {  // the engine is closed: the memory goes with it
    return;
  }
}

// The others learn it when they have all that we gave: members on this host find that in our arena, which they have
// mapped, and those elsewhere are told how many pieces it is. What is on its way from our arena arrives first.
void Group::leave() {
  const std::unique_lock collectives(running, std::try_to_lock);  // not while a call is being ended
  arena_.head->left.store(1);
  std::vector<OpRef> told;
  for (const auto& member : members_) {
    if (member->rank == rank() || member->lost || has_left(*member)) continue;
    if (member->arena.head != nullptr) wake(member->arena);
    if (member->direct) continue;
    const std::unique_lock messages(member->writing, std::try_to_lock);
    uint64_t sent = 0;
    if (collectives.owns_lock()) sent += member->sent[kStaged] + member->sent[kCombined];
    if (messages.owns_lock()) sent += member->sent[kMessages];
    told.push_back(notify(*member, Note{Notice::left, 0, rank(), sent + 1}.word()));
    if (messages.owns_lock())
      for (const OpRef& op : member->out_ops)
        if (op) told.push_back(op);
  }
  if (collectives.owns_lock())
    for (const auto& ops : leaving)
      for (const auto& [to, op] : ops) told.push_back(op);
  for (const OpRef& op : told)
    while (!op->wait(-1)) continue;
}

// ---- What members tell each other ----

OpRef Group::start(Member& to, Verb verb, Time deadline) {
  const auto op = std::make_shared<Op>();
  op->verb = verb;
  op->remote = to.region;
  op->peer_name = to.name;
  op->submitted = Clock::now();
  op->deadline = deadline;
  return op;
}

OpRef Group::write_piece(Member& to, Traffic traffic, uint64_t number, const uint8_t* piece, uint64_t bytes,
                         std::shared_ptr<void> keep) {
  const OpRef op = start(to, Verb::write, Time::max());  // ends with the peer at the latest
  op->local = const_cast<uint8_t*>(piece);
  op->local_view = View::contiguous(0, bytes);
  op->remote_view = View::contiguous(arena_.channel_slot_offset(rank(), traffic, number), bytes);
  op->has_notify = true;
  op->notify = Note{Notice::arrived, traffic, rank(), number}.word();
  op->on_end = [weak = weak_from_this(), rank = to.rank, keep = std::move(keep)](const Status& status) {
    const auto self = weak.lock();
    if (!self) return;
    if (!status.ok()) self->on_lost(rank, status);
    self->head().steps.ring();  // someone may wait for the end of the operation
    self->head().room.ring();
  };
  node_->submit(to.peer, op);
  if (traffic != kMessages) node_->count("collective_pieces", 1), node_->count("collective_piece_bytes", bytes);
  return op;
}

OpRef Group::notify(Member& to, uint64_t value) {
  const OpRef op = start(to, Verb::write, Time::max());
  op->local = region_->base;  // of no bytes
  op->local_view = op->remote_view = View::contiguous(0, 0);
  op->has_notify = true;
  op->notify = value;
  op->on_end = [weak = weak_from_this(), rank = to.rank](const Status& status) {
    if (const auto self = weak.lock(); self && !status.ok()) self->on_lost(rank, status);
  };
  node_->submit(to.peer, op);
  return op;
}

void Group::tell_consumed(Member& from, Traffic traffic, uint64_t count) {
  notify(from, Note{Notice::consumed, traffic, rank(), count}.word());
}

// On the loop. What a member may send is checked: it may be of another version, or mistaken about the group.
void Group::on_notify(uint64_t value) {
  const Note note = Note::from(value);
  if (note.rank >= size() || note.traffic >= kNumTraffic)
    throw Error(MR_PROTOCOL, "a notification of no member or kind of traffic of the group");
  Member& from = *members_[note.rank];
  const auto traffic = static_cast<Traffic>(note.traffic);
  switch (note.what) {
    case Notice::hello:
      from.hello.store(static_cast<uint32_t>(note.number));
      return head().steps.ring();
    case Notice::arrived: {
      ChannelHead& channel = arena_.channel(note.rank, traffic);
      channel.arrived[note.number % kChannelSlots].store(note.number + 1);
      if (from.arrived.fetch_add(1) + 2 == from.left.load()) wake(arena_);
      if (traffic != kMessages) return head().steps.ring();
      if (channel.readers_asleep.load() != 0) head().arrivals.ring();
      return;
    }
    case Notice::consumed:
      raise(from.consumed[traffic], note.number);
      return (traffic == kMessages ? head().room : head().steps).ring();
    case Notice::failed:
      tell_failure(arena_, uint64_t{1} << 38 | note.number);
      return;
    case Notice::left:
      from.left.store(note.number);
      return wake(arena_);
  }
  throw Error(MR_PROTOCOL, "a notification that no member sends");
}

void Group::publish(std::atomic<uint64_t>& counter, uint64_t value) {
  counter.store(value);  // before anybody's `awaits` is read
  for (const auto& member : members_)
    if (member->direct) wake_waiter(*member);
}

void Group::wake_waiter(const Member& member) const {
  const uint32_t awaits = member.arena.head->awaits.load();
  if (awaits == rank() + 1 || awaits == kAnyMember) member.arena.head->steps.ring();
}

// ---- Memory that is read in place ----

std::unique_ptr<Exposure> Group::expose(const mr_collective& call) {
  if (size() == 1 || call.num_inputs == 0 || exchanges_in_place(call)) return nullptr;
  const uint64_t* const largest = std::max_element(call.input_bytes, call.input_bytes + call.num_inputs);
  auto exposure = std::make_unique<Exposure>(*node_, head(), call.inputs[largest - call.input_bytes], *largest);
  if (!exposure->is_on()) return nullptr;
  node_->count("collectives_in_place", 1);
  return exposure;
}

const uint8_t* Group::exposed_by(Member& from, uint64_t place, uint64_t bytes, Time deadline) {
  const ExposedMemory now = from.arena.head->exposed;
  if (!from.exposed.is(now)) {
    auto mapping = from.exposed.known(now.shared_id);
    if (!mapping) {
      const OpRef map = start(from, Verb::map, deadline);
      map->remote = std::make_shared<const RemoteRegion>(Exposed::handle(*from.region, now));
      node_->submit(from.peer, map);
      while (!map->wait(-1)) continue;
      check();
      if (!map->status().ok()) {
        fail(from.rank, map->status().kind, map->status().text);
        throw Error(failure());
      }
      mapping = map->mapping;
    }
    from.exposed.set(now, std::move(mapping));
  }
  const uint8_t* const at = from.exposed.find(place, bytes);
  if (at == nullptr) throw Error(MR_PROTOCOL, rank_text(from.rank, from.name) + " speaks of memory it does not expose");
  return at;
}

void Group::check_exposed_by(const Member& from) {
  if (!from.exposed.is_on()) return;
  fence_reads();
  check();  // closed meanwhile: its owner does not wait for us any more
  const uint64_t word = from.arena.head->failure.load();
  if (word == 0) return;
  tell_failure(arena_, word);
  check();
}

// ---- Failure ----

void Group::on_lost(uint32_t rank, const Status& why) {
  if (closed_) return;
  // Our own engine ends: nobody else is at fault, and others see that we go.
  if (why.kind == MR_CANCELLED || why.kind == MR_CONFIG) {
    tell_failure(arena_, FailureWord{MR_CANCELLED, this->rank(), this->rank()}.word());
    return;
  }
  members_[rank]->lost = true;
  if (has_left(*members_[rank])) return wake(arena_);  // as it said
  fail(rank, why.kind == MR_ACCESS_DENIED ? MR_PEER_LOST : why.kind, why.text);
}

void Group::fail(uint32_t rank, int kind, const std::string& why) {
  {
    std::lock_guard guard(failure_lock_);
    if (told_rank_ < 0) {
      told_rank_ = rank;
      told_ = why;
    }
  }
  tell_all(FailureWord{kind, rank, this->rank()}.word());
}

void Group::lack(const Member& member) { tell_all(FailureWord{MR_PEER_LOST, member.rank, rank(), true}.word()); }

bool Group::has_left(const Member& member) const {
  if (member.direct) return member.arena.head->left.load() != 0;
  const uint64_t left = member.left.load();
  return left != 0 && member.arrived.load() + 1 >= left;
}

bool Group::is_over() const {
  const uint64_t word = head().failure.load(std::memory_order_relaxed);
  return word != 0 && !FailureWord::from(word).left;
}

Error Group::left_error(const Member& member) const {
  return Error(MR_PEER_LOST, rank_text(member.rank, member.name) + " has left the group");
}

void Group::tell_all(uint64_t word) {
  if (!tell_failure(arena_, word)) return;  // everybody has been told
  // Others hear of it at once, and all name the same member.
  for (const auto& member : members_) {
    if (member->rank == this->rank() || member->lost) continue;
    if (member->arena.head != nullptr) {
      tell_failure(member->arena, word);
    } else if (member->peer != nullptr) {
      try {
        notify(*member, Note{Notice::failed, 0, this->rank(), word & ((uint64_t{1} << 38) - 1)}.word());
      } catch (const Error&) {  // our engine is closed: they hear of that
        return;
      }
    }
  }
}

int64_t Group::failed_rank() const {
  const uint64_t word = head().failure.load();
  return word == 0 ? -1 : int64_t{FailureWord::from(word).rank};
}

Status Group::failure() const {
  const uint64_t word = head().failure.load();
  if (word == 0) return {};
  const FailureWord what = FailureWord::from(word);
  if (what.rank >= size() || what.reporter >= size()) return mr::fail(MR_PROTOCOL, "the group's memory is damaged");
  if (closed_) return mr::fail(MR_CANCELLED, "the group was closed");
  if (what.left) return left_error(*members_[what.rank]).status();
  const std::string name = rank_text(what.rank, members_[what.rank]->name);
  std::string told;
  {
    std::lock_guard guard(failure_lock_);
    if (told_rank_ == what.rank) told = told_;
  }
  if (told.empty()) told = "says " + rank_text(what.reporter, members_[what.reporter]->name);
  switch (what.kind) {
    case MR_PEER_LOST:
      return mr::fail(what.kind, name + " is lost: " + told);
    case MR_TRANSFER_TIMEOUT:
      return mr::fail(what.kind, name + " was waited for in vain: " + told);
    case MR_CANCELLED:
      return mr::fail(what.kind, name + " has aborted the group: " + told);
    default:
      return mr::fail(what.kind, name + ": " + told);
  }
}

void Group::on_signal() {
  if (options_.interrupted == nullptr || options_.interrupted() == 0) return;
  fail(rank(), MR_CANCELLED, "a signal interrupted its wait");
  throw Error(failure());
}

void Group::time_out(Member& whom) {
  fail(whom.rank, MR_TRANSFER_TIMEOUT, "the deadline passed");
  throw Error(failure());
}

}  // namespace mr
