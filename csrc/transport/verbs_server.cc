#include "verbs_server.h"

#include <algorithm>
#include <cstring>

#include "verbs_devices.h"

namespace mr {
namespace {

constexpr size_t kMaxPairs = 1024;  // of one peer

}  // namespace

// The peer may be gone when the worker has finished.
void VerbsServer::send(uint16_t type, Bytes payload) {
  host_.loop().run([weak = weak_from_this(), type, payload = std::move(payload)]() mutable {
    const auto self = weak.lock();
    if (self && !self->closed_) self->host_.send_on_loop(type, std::move(payload));
  });
}

void VerbsServer::on_ask() {
  const auto& rails = domain_->rails();
  host_.send_on_loop(kVerbsRails, encode_rails(std::vector<RailFace>(rails.begin(), rails.end())));
}

void VerbsServer::on_offer(const VerbsOffer& offer) {
  if (strands_.count(offer.number) != 0)
    throw Error(MR_PROTOCOL, "a second offer of queue pair " + std::to_string(offer.number));
  const auto strand = strands_[offer.number] = Workers::new_strand();
  const auto make = [self = shared_from_this(), offer] {
    VerbsAccept accept;
    VerbsCardRef card;
    try {
      if (offer.rail >= self->domain_->rails().size())
        throw Error(MR_PROTOCOL, "an offer for rail " + std::to_string(offer.rail) + " of " +
                                     std::to_string(self->domain_->rails().size()));
      card = self->domain_->need_card(offer.rail);
      accept = self->make_pair(offer, card);
    } catch (const Error& error) {
      accept.status = error.status();
      self->domain_->on_failure(card, accept.status);
    }
    accept.number = offer.number;
    self->answer(accept);
  };
  if (domain_->workers().run(make, strand)) return;
  VerbsAccept refusal;
  refusal.number = offer.number;
  refusal.status = fail(MR_RESOURCE_EXHAUSTED, "there is no thread for queue pairs");
  answer(refusal);
}

void VerbsServer::answer(const VerbsAccept& accept) {
  host_.loop().run([weak = weak_from_this(), accept] {
    const auto self = weak.lock();
    if (!self || self->closed_) return;
    if (!accept.status.ok()) self->strands_.erase(accept.number);  // nothing follows
    self->host_.send_on_loop(kVerbsAccept, accept.encode());
  });
}

VerbsAccept VerbsServer::make_pair(const VerbsOffer& offer, const VerbsCardRef& card) {
  const VerbsRail& rail = domain_->rails()[offer.rail];
  const bool known = std::any_of(rail.gids.begin(), rail.gids.end(), [&](const Gid& gid) {
    return gid.index == offer.gid_index && gid.bytes == offer.server_gid;
  });
  if (offer.global != 0 && !known) throw Error(MR_PROTOCOL, "an offer for an address that " + rail.name() + " lacks");
  if (const std::string stale = why_stale(*card->context, rail); !stale.empty())
    throw Error(MR_CONFIG, rail.name() + ": " + stale);
  Pair pair;
  pair.card = card;
  pair.permit = domain_->take_pair();
  VerbsAccept accept;
  accept.rd_atomic = std::min({std::max(1u, offer.rd_atomic), domain_->options().raw.verbs_rd_atomic,
                               static_cast<uint32_t>(std::max(0, card->context->attributes().max_qp_rd_atom))});
  pair.responders = VerbsDomain::take_responders(card, &accept.rd_atomic);

  QueuePairLimits limits;
  limits.depth = limits.max_sge = 1;  // it only serves
  limits.rd_atomic = 1;
  limits.responder = accept.rd_atomic;
  QueuePairPath path = verbs_path(domain_->options(), rail);
  path.mtu = accept.mtu = std::min(path.mtu, std::max(256u, offer.mtu));
  path.global = offer.global != 0;
  path.gid_index = static_cast<uint8_t>(offer.gid_index);
  std::memcpy(path.gid.raw, offer.gid.data(), offer.gid.size());
  path.lid = offer.lid;
  const bool atomics =
      domain_->options().raw.verbs_atomics != 0 && card->context->attributes().atomic_cap != IBV_ATOMIC_NONE;
  const int access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | (atomics ? int{IBV_ACCESS_REMOTE_ATOMIC} : 0);
  pair.queue_pair = std::make_shared<QueuePair>(card->domain, card->poller.channel(), card->poller.new_id(),
                                                std::weak_ptr<QueuePair::Sink>{}, limits, path, access);
  pair.queue_pair->connect(path, offer.end);
  accept.end = pair.queue_pair->ours();
  std::lock_guard guard(lock_);
  if (pairs_.size() >= kMaxPairs)
    throw Error(MR_RESOURCE_EXHAUSTED, std::to_string(pairs_.size()) + " queue pairs of one peer");
  pairs_.emplace(offer.number, std::move(pair));
  return accept;
}

// Whether nothing is left of it. One that the kernel refused to destroy stays.
bool VerbsServer::destroy_pair(uint64_t number) {
  QueuePairRef there;
  {
    std::lock_guard guard(lock_);
    const auto found = pairs_.find(number);
    if (found == pairs_.end()) return true;
    there = found->second.queue_pair;
  }
  if (!there || !there->shut()) return false;
  std::map<uint64_t, Pair>::node_type gone;
  std::lock_guard guard(lock_);
  gone = pairs_.extract(number);
  return true;
}

// The peer will find out by itself, and ask for the fence.
void VerbsServer::on_card_lost(const VerbsCardRef& card) {
  host_.loop().run([weak = weak_from_this(), card] {
    const auto self = weak.lock();
    if (!self || self->closed_) return;
    for (const auto& [number, strand] : self->strands_) {
      const auto destroy = [self, card, number = number] {
        bool concerned = false;
        {
          std::lock_guard guard(self->lock_);
          const auto found = self->pairs_.find(number);
          concerned = found != self->pairs_.end() && found->second.card == card;
        }
        if (concerned) (void)self->destroy_pair(number);
      };
      (void)self->domain_->workers().run(destroy, strand);  // else the engine closes, and does it
    }
  });
}

// Behind an offer that is still being worked at. Once destroyed, a queue pair takes no packet any more; that it is in
// ERR would not do: a packet that it had taken before may still be on its way to the memory.
void VerbsServer::on_fence(uint64_t number) {
  const auto carry_out = [self = shared_from_this(), number] {
    if (self->destroy_pair(number)) self->send(kVerbsFenced, Writer().put(number).take());
  };
  const auto strand = strands_.extract(number);
  if (!domain_->workers().run(carry_out, strand.empty() ? nullptr : strand.mapped())) carry_out();
}

void VerbsServer::on_want(const VerbsWant& want) {
  VerbsKeys refusal;
  refusal.number = want.number;
  try {
    const RegionRef region = host_.regions().find(want.region, want.right);
    if (want.rail >= domain_->rails().size())
      throw Error(MR_PROTOCOL, "keys for rail " + std::to_string(want.rail) + " are asked for");
    const auto grant = domain_->grant(region);
    if (!grant) throw Error(MR_ACCESS_DENIED, "the region was dropped");
    if (told_.insert(region->id).second)
      grant->on_revoked([weak = weak_from_this(), &loop = host_.loop(), id = region->id] {
        loop.post([weak, id] {
          const auto self = weak.lock();
          if (!self || self->closed_ || self->told_.erase(id) == 0) return;
          self->host_.send_on_loop(kVerbsGone, Writer().put(id).take());
        });
      });
    const VerbsCardRef card = domain_->rails()[want.rail].card();
    if (!card) throw Error(Status{MR_REGISTRATION, ENODEV, "its card has failed"});
    const bool begun = card->memory_worker.enlist([self = shared_from_this(), want, region, card](bool last) {
      VerbsKeys keys;
      try {
        keys = self->make_keys(*card, region);
      } catch (const Error& error) {
        if (!last && error.status().kind == MR_REGISTRATION) return false;
        keys.status = error.status();
        self->domain_->on_failure(card, keys.status);
      }
      keys.number = want.number;
      self->send(kVerbsKeys, keys.encode());
      return true;
    });
    if (begun) return;
    throw Error(MR_REGISTRATION, "there is no thread to register memory");
  } catch (const Error& error) {
    refusal.status = error.status();
  }
  host_.send_on_loop(kVerbsKeys, refusal.encode());
}

VerbsKeys VerbsServer::make_keys(const VerbsCard& card, const RegionRef& region) {
  const auto grant = domain_->grant(region);
  if (!grant) throw Error(MR_ACCESS_DENIED, "the region was dropped");
  const RegistrationRef registration = grant->get(card.domain);
  if (card.lost) {  // meanwhile
    grant->lose(*card.domain);
    throw Error(Status{MR_REGISTRATION, ENODEV, "the card " + card.name() + " has failed"});
  }
  VerbsKeys keys;
  keys.base = registration->base();
  keys.size = registration->size();
  keys.piece_bytes = registration->piece_bytes();
  keys.rkeys = registration->rkeys();
  keys.atomics = grant->atomics() && card.context->attributes().atomic_cap != IBV_ATOMIC_NONE;
  return keys;
}

void VerbsServer::close() {
  if (std::exchange(closed_, true)) return;
  // Each behind its offer, and none behind another that the kernel holds.
  for (auto& [number, strand] : std::exchange(strands_, {})) {
    const auto clear = [self = shared_from_this(), number = number] { (void)self->destroy_pair(number); };
    if (!domain_->workers().run(clear, strand)) clear();
  }
}

}  // namespace mr
