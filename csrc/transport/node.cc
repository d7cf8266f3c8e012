#include "node.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cstdio>
#include <future>

namespace mr {
namespace {

constexpr double kQuietPoll = 0.001, kLateQuietPoll = 0.05;
constexpr double kCloseTimeout = 5.0, kFlushTimeout = 1.0;

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : ",") + part;
  return out;
}

// Listening on all addresses says nothing about which one to tell others: the first that is not loopback.
std::string first_reachable_address(const std::string& host) {
  if (host != "0.0.0.0" && host != "::") return host;
  const int family = host == "::" ? 6 : 4;
  ifaddrs* list = nullptr;
  std::string found = family == 6 ? "::1" : "127.0.0.1";
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if ((at->ifa_flags & IFF_LOOPBACK) != 0 || (at->ifa_flags & IFF_UP) == 0) continue;
    if (const std::string address = interface_address(at->ifa_name, family); !address.empty()) {
      found = address;
      break;
    }
  }
  ::freeifaddrs(list);
  return found;
}

std::string key_of(const Address& address) {
  char hex[20];
  std::snprintf(hex, sizeof hex, "#%016lx", static_cast<unsigned long>(address.incarnation));
  return address.incarnation != 0 ? hex : address.tcp.text();
}

}  // namespace

std::shared_ptr<Node> Node::create(Options options, std::vector<LaneType> lanes) {
  auto node = std::shared_ptr<Node>(new Node(std::move(options), std::move(lanes)));
  node->start();
  return node;
}

Node::Node(Options options, std::vector<LaneType> lanes)
    : options_(std::move(options)),
      pid_(this_pid()),
      loop_(std::make_shared<Loop>("monarch_rdma", [this] { regions_.life().give(); }, options_.raw.loop_spin)) {
  for (const auto& name : options_.lanes)
    for (const auto& lane : lanes)
      if (name == lane.name) lanes_.push_back(lane);
  self_.name = options_.name;
  self_.incarnation = random_u64();
  self_.boot_id = boot_id();
  self_.lanes = join(options_.lanes);
  self_.bulk_tls = options_.raw.bulk_tls != 0;
  self_.message_window = options_.raw.message_window_bytes;
  self_.max_frame = options_.raw.max_frame_bytes;
  self_.pid = pid_;
  listener_ = std::make_unique<Listener>(*loop_, options_, self_, strangers_);
  if (options_.allow_ptrace == "any") may_trace_ = std::make_unique<MayTrace>(-1);
  HostPort control = listener_->control_at(), data = listener_->data_at();
  control.host = first_reachable_address(control.host);
  data.host = first_reachable_address(data.host);
  if (data.port != 0) self_.tcp.push_back(data);
  self_.address = Address{control, listener_->unix_name(), self_.name, self_.incarnation, self_.boot_id}.text();
}

Node::~Node() { close(); }

void Node::start() {
  auto self_peer = std::make_shared<Peer>(*this, Address::parse(self_.address));
  peers_.emplace(key_of(self_peer->address()), self_peer);
  loop_->run([this, self_peer] {
    self_peer->become_self_on_loop();
    listener_->start_on_loop([this](std::shared_ptr<ControlStream> stream) { arrived_on_loop(std::move(stream)); },
                             [this](uint64_t id) {
                               auto found = sessions_.find(id);
                               return found == sessions_.end() ? DataDoor::Session{}
                                                               : found->second->session_on_loop(id);
                             });
  });
  loop_->barrier();
}

void Node::check_usable() const {
  if (!is_this_process(pid_))
    throw Error(MR_CONFIG, "this engine belongs to the parent process (pid " + std::to_string(pid_) +
                               "): after a fork make a new one");
  if (closed_.load(std::memory_order_relaxed)) throw Error(MR_CONFIG, "the engine is closed");
}

void Node::close() {
  if (!is_this_process(pid_) || closed_.exchange(true)) return;
  inbox_.close();
  const Status why = fail(MR_CANCELLED, "the engine was closed");
  const Time deadline = after(options_.raw.drop_timeout);
  const auto ended = regions_.end_all();
  for (const auto& region : ended)
    while (!is_quiet(*region) && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // Our threads leave the peers' memory before the goodbye tells the peers that nobody is in it.
  run_and_wait([&] {
    listener_->close_on_loop();
    for (const auto& peer : all_peers()) peer->stop_all_on_loop(MR_CANCELLED);
  });
  for (const Time end = after(kCloseTimeout); ops_in_flight_.load() != 0 && Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  flush(after(kFlushTimeout));
  run_and_wait([&] {
    for (const auto& peer : all_peers()) peer->close_on_loop(why);
  });
  for (const auto& region : ended) regions_.release(region);
  loop_->barrier();
  loop_->stop();
  may_trace_.reset();
  sessions_.clear();
  lanes_.clear();  // and what the links of a lane share: its threads end
  regions_.close();
}

// The last messages go out, to peers that read.
void Node::flush(Time deadline) {
  for (bool unsent = true; unsent && Clock::now() < deadline;) {
    run_and_wait([&] {
      const auto peers = all_peers();
      unsent = std::any_of(peers.begin(), peers.end(), [](const auto& peer) { return peer->has_unsent_on_loop(); });
    });
    if (unsent) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Node::run_and_wait(const Task& task) {
  std::promise<void> ran;
  loop_->run([&] {
    task();
    ran.set_value();
  });
  ran.get_future().wait();
}

// Counted before the look: either close sees the operation, or it is refused here.
void Node::begin_op() {
  const uint64_t before = ops_in_flight_.fetch_add(1);
  if (!closed_.load() && before < options_.raw.max_pending_ops) return;
  ops_in_flight_.fetch_sub(1);
  check_usable();
  throw Error(MR_RESOURCE_EXHAUSTED,
              std::to_string(options_.raw.max_pending_ops) + " operations are in flight (option max_pending_ops)");
}

std::vector<std::shared_ptr<Peer>> Node::all_peers() {
  std::lock_guard guard(peers_lock_);
  std::vector<std::shared_ptr<Peer>> out;
  for (const auto& [key, peer] : peers_) out.push_back(peer);
  return out;
}

std::shared_ptr<Peer> Node::peer_of(const Address& address) {
  std::lock_guard guard(peers_lock_);
  if (peers_.size() >= sweep_at_) forget_ended_locked();
  auto& peer = peers_[key_of(address)];
  if (!peer) peer = std::make_shared<Peer>(*this, address);
  return peer;
}

void Node::put_fault(const Address& address, const Fault& fault) {
  std::shared_ptr<Peer> peer;
  {
    std::lock_guard guard(peers_lock_);
    const auto found = peers_.find(key_of(address));
    if (found != peers_.end()) peer = found->second;
  }
  bool is_connected = false;
  run_and_wait([&] { is_connected = peer && peer->put_fault_on_loop(fault); });
  if (!is_connected) throw Error(MR_PEER_LOST, "there is no connection to " + address.text());
}

// In a job that runs for months every restarted process is a new peer. Nobody but the table holds one that can go.
void Node::forget_ended_locked() {
  std::erase_if(peers_, [](const auto& entry) { return entry.second.use_count() == 1 && entry.second->resting(); });
  sweep_at_ = std::max<size_t>(64, 2 * peers_.size());
}

void Node::arrived_on_loop(std::shared_ptr<ControlStream> stream) {
  try {
    const Address address = Address::parse(stream->info().address);
    if (address.incarnation == self_.incarnation)
      throw Error(MR_PROTOCOL, "this address is of this very engine; use its own address()");
    if (address.incarnation != stream->info().incarnation)
      throw Error(MR_PROTOCOL, "a hello whose address is of another process");
    peer_of(address)->adopt_on_loop(stream);
  } catch (const Error& error) {
    stream->close_on_loop(error.status(), true);
  }
}

void Node::session_on_loop(uint64_t session_id, const std::shared_ptr<Peer>& peer, bool begin) {
  if (begin)
    sessions_[session_id] = peer;
  else
    sessions_.erase(session_id);
  streams_up_ = sessions_.size();
}

void Node::submit(const std::shared_ptr<Peer>& peer, const OpRef& op) {
  if (!is_ours()) check_usable();
  begin_op();
  op->meet(loop_, peer);
  peer->submit(op);
}

const char* Node::read_now(Peer& peer, const RemoteRegion& remote, uint8_t* local, uint64_t offset, uint64_t length,
                           uint32_t flags) {
  if (!is_ours()) check_usable();
  begin_op();
  const char* const lane = peer.read_now(remote, local, offset, length, flags);
  op_ended();
  return lane;
}

// ---- Regions ----

OpRef Node::drop(const RegionRef& region) {
  auto op = std::make_shared<Op>();
  op->verb = Verb::drop;
  op->peer_name = options_.name + " (region " + std::to_string(region->id) + ")";
  op->loop = loop_;
  op->submitted = Clock::now();
  begin_op();
  regions_.end_access(region->id);
  loop_->run([this, region, op] {
    await_quiet_on_loop(region, after(options_.raw.drop_timeout), [this, op](Status status) {
      op->finish(std::move(status));
      op_ended();
    });
  });
  return op;
}

void Node::drop_on_loop(uint64_t region_id, std::function<void(Status)> done) {
  if (const RegionRef region = regions_.end_access(region_id))
    await_quiet_on_loop(region, after(options_.raw.drop_timeout), std::move(done));
  else
    done({});
}

bool Node::anyone_in(uint64_t region_id) {
  const auto peers = all_peers();
  return std::any_of(peers.begin(), peers.end(), [&](const auto& peer) { return peer->touches(region_id); });
}

bool Node::is_quiet(Region& region) {
  const bool revoked = region.revoke_grants();
  return revoked && !anyone_in(region.id);
}

void Node::await_quiet_on_loop(const RegionRef& region, Time deadline, std::function<void(Status)> done) {
  if (region->quiet.load() || is_quiet(*region)) {
    regions_.release(region);
    if (done) done({});
    return;
  }
  const bool late = Clock::now() > deadline;
  if (late && done)
    std::exchange(done, nullptr)(
        fail(MR_TRANSFER_TIMEOUT, "a peer is still inside the region; its memory must stay until it has left"));
  loop_->at_on_loop(after(late ? kLateQuietPoll : kQuietPoll),
                    [this, region, deadline, done = std::move(done)] { await_quiet_on_loop(region, deadline, done); });
}

void Node::shared_free(void* address) {
  const uint64_t id = regions_.shared_free(address);
  loop_->run([this, id] {
    for (const auto& peer : all_peers()) peer->broadcast_on_loop(kShmGone, Writer().put(id).take());
  });
}

// ---- Names ----

void Node::publish(const std::string& name, Bytes data) {
  if (data.size() > options_.raw.max_frame_bytes / 2)
    throw Error(MR_RESOURCE_EXHAUSTED,
                "a published blob of " + std::to_string(data.size()) +
                    " bytes is over half of option max_frame_bytes = " + std::to_string(options_.raw.max_frame_bytes));
  if (name.empty() || name.size() > 1024)
    throw Error(MR_CONFIG, "a name of " + std::to_string(name.size()) + " bytes: 1 to 1024 are allowed");
  std::lock_guard guard(published_lock_);
  published_[name] = std::move(data);
}

void Node::unpublish(const std::string& name) {
  std::lock_guard guard(published_lock_);
  if (published_.erase(name) == 0) throw Error(MR_CONFIG, "nothing is published under the name \"" + name + "\"");
}

Bytes Node::lookup(const std::string& name) {
  std::lock_guard guard(published_lock_);
  auto found = published_.find(name);
  if (found == published_.end()) throw Error(MR_CONFIG, "nothing is published under the name \"" + name + "\"");
  return found->second;
}

// ---- Messages ----

void Node::watch(const std::shared_ptr<Peer>& peer, const std::string& address, bool heartbeats) {
  auto op = std::make_shared<Op>();
  op->verb = Verb::watch;
  op->for_inbox = true;
  op->is_quiet = !heartbeats;
  op->name = address;
  op->submitted = Clock::now();
  op->peer_name = peer->address().name;
  submit(peer, op);
}

void Node::watched_lost_on_loop(const std::string& address, const Status& why) {
  inbox_.add_notice_on_loop(address, why);
}

void Node::deliver_on_loop(Peer& from, const std::shared_ptr<Intake>& intake, ByteView head, ByteView body) {
  counters_.add("received_message_bytes", head.size() + body.size());
  if (handler_ == nullptr) return inbox_.add_on_loop(intake, from.info().address, head, body);
  Bytes whole;
  if (!body.empty()) {
    whole.assign(head.begin(), head.end());
    whole.insert(whole.end(), body.begin(), body.end());
    head = whole;
  }
  handle_on_loop(from, from.info().address, head);
  intake->read(message_cost(head.size()));
}

void Node::handle_on_loop(Peer& from, const std::string& sender, ByteView data) {
  handling_from_ = &from;
  handler_(handler_context_, sender.c_str(), data.data(), data.size());
  handling_from_ = nullptr;
}

void Node::set_message_handler(mr_message_handler handler, void* context) {
  loop_->run([this, handler, context] {
    handler_ = handler;
    handler_context_ = context;
    if (handler != nullptr) handle_early_on_loop();
  });
  if (!loop_->held()) loop_->barrier();
}

// What came before there was a handler. Notices are for those who take.
void Node::handle_early_on_loop() {
  for (const auto& batch : inbox_.empty()) {
    Reader in(batch->bytes);
    for (uint64_t left = batch->count; left > 0; --left) {
      mr_incoming entry;
      std::memcpy(&entry, in.raw(sizeof entry).data(), sizeof entry);
      const ByteView address = in.raw(entry.sender_length), data = in.raw(entry.data_length);
      const std::string sender(address.begin(), address.end());
      if (entry.kind == MR_OK) handle_on_loop(*peer_of(Address::parse(sender)), sender, data);
    }
    batch->settle();
  }
}

Status Node::reply_message(ByteView data) {
  if (!loop_->held() || handling_from_ == nullptr)
    return fail(MR_CONFIG, "mr_message_reply outside of a message handler");
  return handling_from_->reply_message_on_loop(data);
}

// ---- Mapped memory of peers ----

void Node::keep_mapping(std::shared_ptr<void> mapping, void* address) {
  std::lock_guard guard(mappings_lock_);
  auto& entry = mappings_[address];
  entry.first = std::move(mapping);
  ++entry.second;
}

void Node::release_mapping(void* address) {
  std::shared_ptr<void> last;  // closed when the lock is free again
  std::lock_guard guard(mappings_lock_);
  auto found = mappings_.find(address);
  if (found == mappings_.end()) throw Error(MR_CONFIG, "the address is not of memory mapped from a peer");
  if (--found->second.second > 0) return;
  last = std::move(found->second.first);
  mappings_.erase(found);
}

std::map<std::string, uint64_t> Node::counts() {
  auto out = counters_.read();
  out["loop_wakeups"] = loop_->wakeups();
  out["regions"] = regions_.count();
  out["ops_in_flight"] = ops_in_flight_.load();
  out["streams_up"] = streams_up_.load();
  out["peers_known"] = all_peers().size() - 1;  // without ourselves
  return out;
}

}  // namespace mr
