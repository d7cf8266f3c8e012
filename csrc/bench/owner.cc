#include "owner.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "failure.h"
#include "verify.h"

namespace mr::bench {

Exposed::Exposed(mr_engine* engine, const Request& request)
    : engine_(engine), kind_(request.memory), size_(request.size) {
  mr_error error{};
  if (kind_ == Memory::kShared) {
    data_ = static_cast<uint8_t*>(mr_shared_alloc(engine, size_, &error));
    if (!data_) throw Failure(std::string("allocating shared memory: ") + error.message);
  } else {
    ordinary_ = Buffer::sparse(size_);
    data_ = ordinary_.data();
  }
  constexpr uint64_t kEnd = 4096;
  if (request.sparse && size_ > 2 * kEnd) {
    fill_pattern(data_, 0, kEnd, request.seed);
    fill_pattern(data_ + size_ - kEnd, size_ - kEnd, kEnd, request.seed);
  } else {
    fill_pattern(data_, 0, size_, request.seed);
  }
  check(mr_region_create(engine, data_, size_, MR_READ | MR_WRITE, &region_, &error), error, "registering memory");
}

Exposed::~Exposed() {
  mr_op* op = nullptr;
  mr_error error{};
  if (mr_region_drop(region_, &op, &error) == MR_OK) {
    mr_op_wait(op, kOperationTimeout);
    mr_op_release(op);
  }
  mr_region_close(region_);
  if (kind_ == Memory::kShared) mr_shared_free(engine_, data_, &error);
}

Bytes Exposed::descriptor() const {
  Bytes bytes(mr_region_descriptor(region_, nullptr, 0));
  mr_region_descriptor(region_, bytes.data(), bytes.size());
  return bytes;
}

// Runs operations on the asking side's region until it is stopped.
class Owner::Mirror {
 public:
  Mirror(mr_engine* engine, const Request& request, const Bytes& descriptor) {
    mr_error error{};
    check(mr_remote_open(engine, descriptor.data(), descriptor.size(), &remote_, &error), error, "opening a region");
    TransferPlan plan{
        static_cast<Op>(request.op), request.size, {request.pieces, request.run}, false, request.depth, request.flags};
    transfers_ = std::make_unique<Transfers>(std::vector{remote_}, plan);
    transfers_->keep(engine);
    thread_ = std::thread([this, plan, verify = request.verify] {
      try {
        moved_ = transfers_->window({86400, UINT64_MAX}, &stop_);
        if (verify && plan.op == Op::kRead) verify_read(*transfers_, plan);
      } catch (const Failure& failure) {
        failure_ = failure.what();
      }
    });
  }
  ~Mirror() {
    join();
    transfers_.reset();
    mr_remote_close(remote_);
  }
  Moved stop() {
    join();
    if (!failure_.empty()) throw Failure(failure_);
    return moved_;
  }

 private:
  void join() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  mr_remote* remote_ = nullptr;
  std::unique_ptr<Transfers> transfers_;
  std::atomic<bool> stop_{false};
  Moved moved_;
  std::string failure_;
  std::thread thread_;
};

Owner::Owner(mr_engine* engine) : engine_(engine) {}
Owner::~Owner() = default;

Exposed& Owner::memory(uint64_t id) {
  auto found = memory_.find(id);
  if (found == memory_.end()) throw Failure("there is no memory " + std::to_string(id) + " here");
  return *found->second;
}

Answer Owner::answer(const Request& request, const Bytes& tail, Bytes* answer_tail) try {
  Answer answer;
  switch (request.ask) {
    case Ask::kAllocate: {
      auto exposed = std::make_unique<Exposed>(engine_, request);
      *answer_tail = exposed->descriptor();
      answer.id = next_id_++;
      answer.address = reinterpret_cast<uint64_t>(exposed->data());
      answer.pid = getpid();
      memory_.emplace(answer.id, std::move(exposed));
      break;
    }
    case Ask::kFree:
      memory(request.id);
      memory_.erase(request.id);
      break;
    case Ask::kCheck: {
      Exposed& exposed = memory(request.id);
      verify_written(exposed.data(), exposed.size(), {Op::kWrite, request.size, {request.pieces, request.run}});
      break;
    }
    case Ask::kWord:
      std::memcpy(&answer.value, memory(request.id).data(), sizeof answer.value);
      break;
    case Ask::kMirrorStart:
      mirror_ = std::make_unique<Mirror>(engine_, request, tail);
      break;
    case Ask::kMirrorStop: {
      if (!mirror_) throw Failure("nothing is being mirrored");
      Moved moved = mirror_->stop();
      mirror_.reset();
      answer.bytes = moved.bytes;
      answer.seconds = moved.seconds;
      break;
    }
    case Ask::kIdle: {
      IdleUsage usage = measure_idle(request.seconds);
      answer.seconds = usage.cpu_seconds;
      answer.value = usage.context_switches;
      break;
    }
    case Ask::kPeakStart:
      peak_.start();
      break;
    case Ask::kPeakStop: {
      PeakMemory::Growth growth = peak_.stop();
      answer.bytes = growth.extra;
      answer.value = growth.peak;
      break;
    }
    default:
      throw Failure("unknown request " + std::to_string(static_cast<uint32_t>(request.ask)));
  }
  answer.serial = request.serial;
  return answer;
} catch (const Failure& failure) {
  Answer answer;
  answer.failed = 1;
  answer.serial = request.serial;
  answer_tail->assign(failure.what(), failure.what() + std::strlen(failure.what()));
  return answer;
}

namespace {

// Messages that the loop thread leaves for the serving thread.
struct Inbox {
  mr_engine* engine;
  int ready;  // eventfd
  std::mutex lock;
  std::deque<std::pair<std::string, Bytes>> requests;
};

void on_message(void* context, const char* sender, const uint8_t* data, uint64_t length) {
  auto* inbox = static_cast<Inbox*>(context);
  if (length > 0 && data[0] == kPing) {
    mr_message_reply(inbox->engine, data, length, nullptr);  // a lost peer needs no answer
    return;
  }
  std::lock_guard guard(inbox->lock);
  inbox->requests.emplace_back(sender, Bytes(data, data + length));
  eventfd_write(inbox->ready, 1);
}

void send(mr_engine* engine, const std::string& address, const Bytes& bytes) {
  mr_peer* peer = nullptr;
  mr_error error{};
  check(mr_peer_open(engine, address.c_str(), &peer, &error), error, "answering " + address);
  const int kind = mr_peer_send(peer, bytes.data(), bytes.size(), nullptr, 0, kOperationTimeout, &error);
  mr_peer_close(peer);
  check(kind, error, "answering " + address);
}

void answer_all(Inbox& inbox, Owner& owner) {
  for (;;) {
    std::pair<std::string, Bytes> next;
    {
      std::lock_guard guard(inbox.lock);
      if (inbox.requests.empty()) return;
      next = std::move(inbox.requests.front());
      inbox.requests.pop_front();
    }
    try {
      Request request;
      Bytes tail = decode(next.second, &request), answer_tail;
      Answer answer = owner.answer(request, tail, &answer_tail);
      Bytes bytes = encode(kAnswer, answer, answer_tail);
      send(inbox.engine, next.first, bytes);
    } catch (const Failure& failure) {
      std::fprintf(stderr, "transport_bench: %s\n", failure.what());
    }
  }
}

}  // namespace

void serve(EngineHandle& handle, int stop_fd, const std::function<void(const std::string&)>& announce) {
  Inbox inbox{handle.engine, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), {}, {}};
  if (inbox.ready < 0) throw_errno("eventfd");
  {
    Owner owner(handle.engine);
    mr_message_set_handler(handle.engine, on_message, &inbox);
    announce(mr_engine_address(handle.engine));
    pollfd wait[] = {{inbox.ready, POLLIN, 0}, {stop_fd, POLLIN, 0}};
    while (poll(wait, 2, -1) >= 0 || errno == EINTR) {
      if (wait[1].revents) break;
      eventfd_t count;
      if (wait[0].revents) eventfd_read(inbox.ready, &count), answer_all(inbox, owner);
    }
  }
  handle.close();  // no handler runs after this, so that the inbox may go
  close(inbox.ready);
}

}  // namespace mr::bench
