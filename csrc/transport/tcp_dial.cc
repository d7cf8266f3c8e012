#include "tcp_dial.h"

#include <algorithm>

#include "address.h"

namespace mr::tcp {

std::vector<HostPort> data_addresses(LinkHost& host) {
  const PeerInfo& peer = host.info();
  std::vector<HostPort> out;
  if (!peer.boot_id.empty() && peer.boot_id == boot_id())
    for (const auto& at : peer.tcp) out.push_back({host.options().raw.ip_family == 6 ? "::1" : "127.0.0.1", at.port});
  for (const auto& at : peer.tcp) {
    const auto same = [&](const HostPort& other) { return other.host == at.host && other.port == at.port; };
    if (std::none_of(out.begin(), out.end(), same)) out.push_back(at);
  }
  return out;
}

Dial::Dial(LinkHost& host, std::vector<HostPort> addresses, uint64_t* next_number, Done done)
    : host_(host), addresses_(std::move(addresses)), next_number_(next_number), done_(std::move(done)) {}

void Dial::start() {
  why_.kind = MR_PEER_LOST;
  next_address();
}

void Dial::note(const Status& why) {
  why_.kind = why.kind;
  why_.sys_errno = why.sys_errno;
  why_.text += (why_.text.empty() ? "" : "; ") + addresses_[address_ - 1].text() + ": " + why.text;
}

void Dial::stop() {
  leave();
  done_ = nullptr;
}

void Dial::leave() {
  if (!stream_) return;
  host_.loop().unwatch_on_loop(stream_->fd());
  host_.loop().cancel_on_loop(deadline_);
  stream_.reset();
}

void Dial::next_address() {
  const auto self = shared_from_this();
  while (address_ < addresses_.size()) {
    const HostPort& at = addresses_[address_++];
    try {
      Fd socket = tcp_connect_start(at, host_.options().raw.ip_family);
      const bool tls = host_.options().raw.bulk_tls != 0 || host_.info().bulk_tls;
      stream_.emplace(tls ? Stream(std::move(socket), false, host_.options().secret) : Stream(std::move(socket)));
      step_ = Step::connect;
      watched_ = EPOLLOUT;
      host_.loop().watch_on_loop(stream_->fd(), watched_, this);
      // All addresses together take connect_timeout.
      const double share = host_.options().raw.connect_timeout / static_cast<double>(addresses_.size());
      deadline_ = host_.loop().at_on_loop(after(share), [weak = weak_from_this()] {
        if (const auto dial = weak.lock()) dial->failed(fail(MR_PEER_LOST, "no answer in time"));
      });
      return;
    } catch (const Error& error) {
      stream_.reset();
      note(error.status());
    }
  }
  if (const Done done = std::exchange(done_, nullptr)) done(std::nullopt, why_);
}

void Dial::failed(const Status& why) {
  note(why);
  leave();
  next_address();
}

void Dial::on_event(uint32_t) {
  const auto self = shared_from_this();
  try {
    while (stream_ && step()) {
    }
  } catch (const Error& error) {
    failed(error.status());
  }
}

bool Dial::wait_for(Tls::Want want) {
  const uint32_t wanted = want == Tls::Want::write ? EPOLLOUT : EPOLLIN;
  if (wanted != watched_) host_.loop().change_on_loop(stream_->fd(), wanted);
  watched_ = wanted;
  return false;
}

bool Dial::step() {
  Stream::Io io;
  switch (step_) {
    case Step::connect: {
      if (const int error = socket_error(stream_->fd()); error != 0) throw Error(MR_PEER_LOST, "can't connect", error);
      tune_tcp(stream_->fd(), host_.options().raw.heartbeat_timeout);
      step_ = Step::secure;
      return true;
    }
    case Step::secure:
      io = stream_->handshake();
      if (!io.status.ok()) throw Error(io.status);
      if (io.want != Tls::Want::nothing) return wait_for(io.want);
      begin_greeting();
      return true;
    case Step::greet: {
      const iovec rest{reinterpret_cast<uint8_t*>(&hello_) + moved_, sizeof hello_ - moved_};
      io = stream_->write(&rest, 1);
      if (io.closed) throw Error(MR_PEER_LOST, io.status.text);
      if (io.bytes == 0) return wait_for(Tls::Want::write);
      moved_ += io.bytes;
      if (moved_ < sizeof hello_) return true;
      step_ = Step::listen;
      moved_ = 0;
      return true;
    }
    case Step::listen: {
      const iovec rest{reinterpret_cast<uint8_t*>(&welcome_) + moved_, sizeof welcome_ - moved_};
      io = stream_->read(&rest, 1);
      if (io.closed) throw Error(MR_PEER_LOST, "it closed the data socket during the greeting");
      if (io.bytes == 0) return wait_for(io.want);
      moved_ += io.bytes;
      if (moved_ == sizeof welcome_) check_welcome();
      return true;
    }
  }
  return false;
}

void Dial::begin_greeting() {
  hello_ = Hello{};
  hello_.session = host_.session_id();
  hello_.number = (*next_number_)++;
  random_bytes(hello_.nonce, sizeof hello_.nonce);
  hello_.proof = client_proof(host_.session_key(), hello_, stream_->binding(kBindingLabel));
  step_ = Step::greet;
  moved_ = 0;
}

void Dial::check_welcome() {
  const Digest proof = server_proof(host_.session_key(), hello_, welcome_, stream_->binding(kBindingLabel));
  if (welcome_.magic != kMagic || welcome_.version != kVersion || !equal_constant_time(welcome_.proof, proof))
    throw Error(MR_AUTHENTICATION, "who answers is not the peer");
  host_.loop().unwatch_on_loop(stream_->fd());
  host_.loop().cancel_on_loop(deadline_);
  Opened opened{std::move(*stream_), hello_.session, hello_.number, addresses_[address_ - 1]};
  stream_.reset();
  if (const Done done = std::exchange(done_, nullptr)) done(std::move(opened), {});
}

}  // namespace mr::tcp
