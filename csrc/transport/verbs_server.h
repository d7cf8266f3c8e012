// The owner's side of the verbs lane: makes the other ends of the peer's queue pairs, tells the keys of our regions,
// and destroys what the peer has given up. The cards do the rest without us.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "lane.h"
#include "verbs_domain.h"
#include "verbs_wire.h"

namespace mr {

class VerbsServer : public VerbsListener, public std::enable_shared_from_this<VerbsServer> {
 public:
  VerbsServer(LinkHost& host, std::shared_ptr<VerbsDomain> domain) : host_(host), domain_(std::move(domain)) {}

  // On the loop.
  void on_ask();
  void on_offer(const VerbsOffer& offer);
  void on_fence(uint64_t number);
  void on_want(const VerbsWant& want);
  void close();

 private:
  struct Pair {
    VerbsCardRef card;
    std::shared_ptr<void> permit, responders;
    QueuePairRef queue_pair;
  };

  // VerbsListener
  void on_card_lost(const VerbsCardRef& card) override;

  VerbsAccept make_pair(const VerbsOffer& offer, const VerbsCardRef& card);
  bool destroy_pair(uint64_t number);
  void answer(const VerbsAccept& accept);
  VerbsKeys make_keys(const VerbsCard& card, const RegionRef& region);
  void send(uint16_t type, Bytes payload);  // from a worker

  LinkHost& host_;
  const std::shared_ptr<VerbsDomain> domain_;
  bool closed_ = false;                             // on the loop
  std::set<uint64_t> told_;                         // regions whose keys the peer has; on the loop
  std::map<uint64_t, Workers::StrandRef> strands_;  // by the peer's number, from its offer to its fence; on the loop
  std::mutex lock_;
  std::map<uint64_t, Pair> pairs_;  // by the peer's number
};

}  // namespace mr
