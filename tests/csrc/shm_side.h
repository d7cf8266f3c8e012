// One side of a pair of processes for tests of the same-host lanes: a loop, a region table, a link, and a control
// stream that is nothing but a SOCK_SEQPACKET socket (one frame a packet). Two sides may live in one process or in two.
#pragma once

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <thread>

#include "link_host.h"

namespace mr::test {

using Links = std::shared_ptr<Link> (*)(LinkHost&);

class Side final : public TestHost, private Loop::Watcher {
 public:
  using Serve = std::function<Reply(Side&, uint16_t type, Reader& in)>;

  // Takes over `socket`. `serve` answers frames that no lane knows.
  Side(Fd socket, int peer_pid, const mr_options& options = Options::defaults(), Links make = make_shm,
       Serve serve = {})
      : TestHost("test-side", options), socket_(std::move(socket)), serve_(std::move(serve)) {
    info_.name = "peer";
    info_.pid = peer_pid;
    info_.over_unix = true;
    on_loop([this, make] {
      link_ = make(*this);
      if (socket_.valid()) loop_.watch_on_loop(socket_.get(), EPOLLIN, this);
    });
  }
  ~Side() {
    on_loop([this] { close_on_loop(fail(MR_PEER_LOST, "this side ends")); });
    while (ends_ < begun_) std::this_thread::yield();  // a hang here is the failure of a test
    loop_.stop();
  }

  Link& link() { return *link_; }
  std::shared_ptr<Link> share_link() { return link_; }
  void close(const Status& why) {
    on_loop([&] { close_on_loop(why); });
  }
  bool closed() const { return closed_.load(); }

  OpRef op(Verb verb, const RemoteRegion& remote) {
    auto out = std::make_shared<Op>();
    out->verb = verb;
    out->remote = std::make_shared<const RemoteRegion>(remote);
    out->peer_name = "peer";
    out->submitted = Clock::now();
    return out;
  }
  OpRef transfer(Verb verb, const RemoteRegion& remote, const View& remote_view, void* local, const View& local_view) {
    auto out = op(verb, remote);
    out->remote_view = remote_view;
    out->local = static_cast<uint8_t*>(local);
    out->local_view = local_view;
    return out;
  }
  OpRef read(const RemoteRegion& remote, uint64_t offset, void* local, uint64_t length) {
    return transfer(Verb::read, remote, View::contiguous(offset, length), local, View::contiguous(0, length));
  }
  OpRef write(const RemoteRegion& remote, uint64_t offset, const void* local, uint64_t length) {
    return transfer(Verb::write, remote, View::contiguous(offset, length), const_cast<void*>(local),
                    View::contiguous(0, length));
  }
  OpRef atomic(Verb verb, const RemoteRegion& remote, uint64_t offset, uint64_t a, uint64_t b = 0) {
    auto out = op(verb, remote);
    out->remote_view = View::contiguous(offset, 8);
    out->operand[0] = a;
    out->operand[1] = b;
    return out;
  }

  // As a peer does it: at once if the link can, else on the loop.
  OpRef submit(const OpRef& op) {
    begun_ += 1;
    if (!link_->try_inline(op)) begin(op);
    return op;
  }
  OpRef start(const OpRef& op) {  // without the try
    begun_ += 1;
    begin(op);
    return op;
  }
  void stop(const OpRef& op, int kind) {
    op->stop_kind = kind;
    loop_.run([link = link_, op] { link->stop_on_loop(op); });
  }
  // Submits and waits; the kind of its end.
  int run(const OpRef& op) { return wait(submit(op)); }

  RemoteRegion describe(const Region& region) {
    RemoteRegion out = RemoteRegion::of(region);
    out.owner = "peer";
    return out;
  }
  // Ends access, waits for accesses in flight, releases. False at the timeout.
  bool drop(uint64_t region_id, double timeout = 60) {
    const RegionRef region = regions_.end_access(region_id);
    for (const Time until = after(timeout); link_->touches(region_id); std::this_thread::yield())
      if (Clock::now() > until) return false;
    regions_.release(region);
    return true;
  }
  Reply ask(uint16_t type, Bytes payload) {
    std::atomic<bool> done{false};
    Reply out;
    loop_.run([&] {
      request_on_loop(type, std::move(payload), [&](Reply reply) {
        out = std::move(reply);
        done.store(true, std::memory_order_release);
        done.notify_all();
      });
    });
    done.wait(false, std::memory_order_acquire);
    return out;
  }

  // LinkHost
  void send_on_loop(uint16_t type, Bytes payload, const Fd* pass_fd = nullptr) override {
    send_packet(type, 0, std::move(payload), pass_fd);
  }
  void request_on_loop(uint16_t type, Bytes payload, std::function<void(Reply)> on_reply) override {
    const uint64_t id = next_request_++;
    requests_.emplace(id, std::move(on_reply));
    send_packet(type, id, std::move(payload), nullptr);
  }

 private:
  static constexpr size_t kMaxPacket = 64 << 10;

  void begin(const OpRef& op) {
    loop_.run([link = link_, op] { op->verb == Verb::map ? link->map_on_loop(op) : link->start_on_loop(op); });
  }

  void send_packet(uint16_t type, uint64_t id, Bytes payload, const Fd* pass_fd) {
    if (closed_) return;
    const Bytes packet = Writer().put(type).put(id).raw(payload).take();
    iovec part{const_cast<uint8_t*>(packet.data()), packet.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (pass_fd != nullptr) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = pass_fd->get();
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    (void)!::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);  // a lost peer is noticed by reading
  }

  void on_event(uint32_t) override {
    Bytes packet(kMaxPacket);
    iovec part{packet.data(), packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return close_on_loop(fail(MR_PEER_LOST, "the peer is gone"));
    std::vector<Fd> fds;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      fds.emplace_back(fd);
    }
    take_packet_on_loop(ByteView(packet).first(static_cast<size_t>(got)), fds);
  }

  void take_packet_on_loop(ByteView packet, std::vector<Fd>& fds) {
    Reader in(packet);
    const auto type = in.get<uint16_t>();
    const auto id = in.get<uint64_t>();
    if (type == kReply) return take_reply_on_loop(id, in, fds);
    Reply reply;
    try {
      if (serve_ && type >= 9000)
        reply = serve_(*this, type, in);
      else
        link_->on_frame_on_loop(type, in, fds, reply);
    } catch (const Error& error) {
      reply.status = error.status();
    }
    if (id == 0) return;
    Writer out;
    out.put(reply.status.kind).put(reply.status.sys_errno).text(reply.status.text).raw(reply.payload);
    send_packet(kReply, id, out.take(), reply.fd.valid() ? &reply.fd : nullptr);
  }

  void take_reply_on_loop(uint64_t id, Reader& in, std::vector<Fd>& fds) {
    Reply reply;
    reply.status.kind = in.get<int>();
    reply.status.sys_errno = in.get<int>();
    reply.status.text = in.text(4096);
    const ByteView rest = in.rest();
    reply.payload.assign(rest.begin(), rest.end());
    if (!fds.empty()) reply.fd = std::move(fds.front());
    auto node = requests_.extract(id);
    if (!node.empty()) node.mapped()(std::move(reply));
  }

  void close_on_loop(const Status& why) {
    if (closed_.exchange(true)) return;
    if (socket_.valid()) loop_.unwatch_on_loop(socket_.get());
    socket_.reset();
    link_->close_on_loop(why);
    for (auto& [id, on_reply] : std::exchange(requests_, {})) on_reply({why, {}, {}});
  }

  Fd socket_;
  const Serve serve_;
  std::shared_ptr<Link> link_;
  std::atomic<bool> closed_{false};
  uint64_t next_request_ = 1;
  std::map<uint64_t, std::function<void(Reply)>> requests_;
};

constexpr uint32_t kBoth = MR_READ | MR_WRITE;

inline mr_options options(bool mapped, bool process_vm, uint32_t threads = 2) {
  mr_options raw = Options::defaults();
  raw.shm_mapped = mapped;
  raw.shm_process_vm = process_vm;
  raw.copy_threads = threads;
  return raw;
}

// Memory of an owner: shared or not.
struct Memory {
  Memory(Side& owner, uint64_t size, bool shared) : owner(owner), shared(shared) {
    if (!shared) plain.resize(size);
    base = shared ? static_cast<uint8_t*>(owner.regions().shared_alloc(size)) : plain.data();
  }
  Side& owner;
  bool shared;
  Bytes plain;
  uint8_t* base;
};

inline std::pair<Fd, Fd> socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throw std::runtime_error("socketpair");
  return {Fd(ends[0]), Fd(ends[1])};
}

// Two sides in this process. `reader` works on regions of `owner`.
struct Pair {
  explicit Pair(const mr_options& raw = options(true, true), int pid = ::getpid()) : Pair(raw, pid, socket_pair()) {}
  Pair(const mr_options& raw, int pid, std::pair<Fd, Fd> sockets)
      : owner(std::move(sockets.first), ::getpid()), reader(std::move(sockets.second), pid, raw) {}

  RemoteRegion region(void* base, uint64_t size, uint32_t access = kBoth) {
    return owner.describe(*owner.regions().create(base, size, access));
  }

  Side owner, reader;
};

}  // namespace mr::test
