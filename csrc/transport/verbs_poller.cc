#include "verbs_poller.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <string_view>

#include "../base/thread.h"

namespace mr {
namespace {

constexpr int kLookEvery = 2;  // milliseconds
const char kNodes[] = "/dev/infiniband";

}  // namespace

VerbsPoller::VerbsPoller(VerbsContextRef context, OnCardEvent on_event, bool with_node)
    : context_(std::move(context)),
      on_event_(std::move(on_event)),
      channel_(std::make_shared<CompletionChannel>(context_)),
      pid_(this_pid()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_(make_eventfd()) {
  if (!epoll_.valid()) throw Error(MR_RESOURCE_EXHAUSTED, "can't make an epoll descriptor (raise `ulimit -n`)", errno);
  const int events = context_->get()->async_fd;
  if (const int flags = ::fcntl(events, F_GETFL); flags < 0 || ::fcntl(events, F_SETFL, flags | O_NONBLOCK) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't read the events of " + context_->name(), errno);
  watch(stop_.get());
  watch(channel_->fd());
  watch(events);
  if (with_node) watch_node();
  thread_ = start_without_signals("mr_" + context_->name(), [this] { thread_main(); });
}

// Where it can't be, nothing is amiss until somebody removes the device.
void VerbsPoller::watch_node() {
  Fd notes(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!notes.valid() || ::inotify_add_watch(notes.get(), kNodes, IN_DELETE) < 0) return;
  node_ = std::move(notes);
  watch(node_.get());
}

void VerbsPoller::take_node_events() {
  alignas(inotify_event) char room[4096];
  ssize_t size = 0;
  while ((size = ::read(node_.get(), room, sizeof room)) > 0)
    for (ssize_t at = 0; at < size;) {
      const auto& note = *reinterpret_cast<const inotify_event*>(room + at);
      if (note.len > 0 && std::string_view(note.name) == context_->get()->device->dev_name)
        return tell_gone(node_.get());
      at += static_cast<ssize_t>(sizeof note + note.len);
    }
}

void VerbsPoller::watch(int fd) {
  epoll_event event{EPOLLIN, {.fd = fd}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't watch a descriptor of " + context_->name(), errno);
}

uint64_t VerbsPoller::new_id() {
  std::lock_guard guard(lock_);
  return next_id_++;
}

void VerbsPoller::add(const QueuePairRef& pair) {
  std::lock_guard guard(lock_);
  pairs_[pair->id()] = pair;
}

void VerbsPoller::remove(uint64_t id) {
  std::lock_guard guard(lock_);
  pairs_.erase(id);
}

void VerbsPoller::close() {
  if (!thread_.joinable()) return;
  if (!is_this_process(pid_)) {
    thread_.detach();  // it stayed behind in the parent
    return;
  }
  const uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void VerbsPoller::thread_main() {
  epoll_event events[4];
  while (true) {
    const int count = ::epoll_wait(epoll_.get(), events, 4, watched_.empty() ? -1 : kLookEvery);
    if (!watched_.empty()) look_in();
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == stop_.get()) return;
      if (events[i].data.fd == channel_->fd())
        take_completion_events();
      else if (events[i].data.fd == node_.get())
        take_node_events();
      else
        take_card_events();
    }
  }
}

// An event is acknowledged at once: whoever destroys its completion queue waits for that.
void VerbsPoller::take_completion_events() {
  ibv_cq* cq = nullptr;
  void* id = nullptr;
  while (context_->verbs().get_cq_event(channel_->get(), &cq, &id) == 0) {
    context_->verbs().ack_cq_events(cq, 1);
    QueuePairRef pair;
    {
      std::lock_guard guard(lock_);
      if (auto found = pairs_.find(reinterpret_cast<uintptr_t>(id)); found != pairs_.end()) pair = found->second.lock();
    }
    if (pair && pair->on_event()) watched_.push_back(pair);
  }
  unwatch_if_gone(channel_->fd());
}

// The descriptors of a device that was removed are ready for ever, and not every driver tells of it first.
void VerbsPoller::unwatch_if_gone(int fd) {
  if (errno == EIO || errno == ENODEV) tell_gone(fd);
}

void VerbsPoller::tell_gone(int fd) {
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  ibv_async_event gone{};
  gone.event_type = IBV_EVENT_DEVICE_FATAL;
  on_event_(gone);
}

void VerbsPoller::look_in() {
  std::erase_if(watched_, [](const auto& watched) {
    const QueuePairRef pair = watched.lock();
    return !pair || !pair->look_in();
  });
}

void VerbsPoller::take_card_events() {
  ibv_async_event event{};
  while (context_->verbs().get_async_event(context_->get(), &event) == 0) {
    on_event_(event);
    context_->verbs().ack_async_event(&event);
  }
  unwatch_if_gone(context_->get()->async_fd);
}

}  // namespace mr
