// What the verbs links of one engine share: its cards, opened, with their memory and pollers; the rails; the threads
// for calls that may take long; and the budget of queue pairs.
#pragma once

#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../base/published.h"
#include "lanes.h"
#include "near_rails.h"
#include "options.h"
#include "rails.h"
#include "verbs_memory.h"
#include "verbs_poller.h"

namespace mr {

// An open card.
class VerbsCard {
 public:
  VerbsCard(VerbsContextRef context, const KeptRanges& kept, std::shared_ptr<Workers> workers, const Options& options,
            VerbsPoller::OnCardEvent on_event, bool is_software);

  const std::string& name() const { return context->name(); }

  const VerbsContextRef context;
  const ProtectionDomainRef domain;
  const MemoryWorker memory_worker;
  LocalMemory memory;
  const std::shared_ptr<StagingBlocks> staging;
  VerbsPoller poller;
  std::atomic<bool> lost{false};        // for good; see VerbsDomain::need_card
  std::atomic<uint32_t> responders{0};  // of max_res_rd_atom, granted to peers
};
using VerbsCardRef = std::shared_ptr<VerbsCard>;

// Ours, or the peer's that tells it.
inline bool is_of_dead_card(const Status& failure) { return failure.sys_errno == EIO || failure.sys_errno == ENODEV; }

// Where a card is, or will be again.
struct CardPlace {
  CardPlace(std::string name, bool is_software) : name(std::move(name)), is_software(is_software) {}

  const std::string name;
  const bool is_software;
  Published<VerbsCard> card;  // null while there is none
  std::mutex opening;
  Time not_before{};  // under `opening`: the next try
};

struct VerbsRail : Rail {
  std::shared_ptr<CardPlace> place;
  uint64_t max_message = 0;  // bytes of one work request

  VerbsCardRef card() const { return place->card.get(); }  // null while it is gone
};

// The attributes of queue pairs on a rail that options give; the way to the other end is not in it.
QueuePairPath verbs_path(const Options& options, const VerbsRail& rail);

// Hears of what happens to cards and ports. Any thread.
class VerbsListener {
 public:
  virtual void on_port(size_t /*rail*/, bool /*up*/) {}
  // Nothing that was made with it is of use, and all of it is to be let go of: a device that was removed waits for
  // that.
  virtual void on_card_lost(const VerbsCardRef& card) = 0;
  // A queue pair of this card in trouble that no completion tells of.
  virtual void on_pair_event(uint32_t /*queue_pair*/, const char* /*what*/) {}

 protected:
  ~VerbsListener() = default;
};

class VerbsDomain : public MemoryKeeper, public std::enable_shared_from_this<VerbsDomain> {
 public:
  // Null where this host has nothing to offer, and then *why tells; throws where an option can't be honoured.
  static std::shared_ptr<VerbsDomain> open(const Verbs& verbs, const Options& options, std::string* why,
                                           const Topology& topology = Topology());
  // Ends its threads and closes its cards, after what has been begun. Where the kernel holds a call that returns after
  // a few seconds, and the rest is done when the kernel lets go.
  void close();

  const std::vector<VerbsRail>& rails() const { return rails_; }
  const NearRails& near_rails() const { return *near_rails_; }
  const Options& options() const { return options_; }
  // The card of a rail; where it was lost, the device of that name as it is now. May take long. Throws MR_CONFIG while
  // there is none.
  VerbsCardRef need_card(size_t rail);
  // A call on the card failed: where errno says that the device is gone, the card is lost.
  void on_failure(const VerbsCardRef& card, const Status& failure);
  // For calls that may take long. The kernel may hold any of them: none is made on the loop or a poller's thread.
  Workers& workers() { return *workers_; }

  // MemoryKeeper
  void keep(const void* address, uint64_t size) override;
  void forget(const void* address, uint64_t size) override;
  std::shared_ptr<RegionGrant> grant(const RegionRef& region);

  // Within option verbs_max_queue_pairs; throws MR_RESOURCE_EXHAUSTED.
  std::shared_ptr<void> take_pair();
  // Of the card's responder resources as many as wanted, or what is left, at least one; throws MR_RESOURCE_EXHAUSTED.
  static std::shared_ptr<void> take_responders(const VerbsCardRef& card, uint32_t* wanted);

  void listen(const std::weak_ptr<VerbsListener>& listener);
  std::vector<std::shared_ptr<VerbsListener>> listeners();

 private:
  VerbsDomain(const Verbs& verbs, const Options& options);
  VerbsCardRef open_card(const CardPlace& place);
  void lose_card(const VerbsCardRef& card);
  void on_card_event(const VerbsContext& context, const ibv_async_event& event);

  const Verbs& verbs_;
  const Options options_;
  const int pid_;
  const std::shared_ptr<Workers> workers_;
  KeptRanges kept_;
  std::vector<std::shared_ptr<CardPlace>> places_;  // these three stay as they are from is_open_ on
  std::vector<VerbsRail> rails_;
  std::unique_ptr<const NearRails> near_rails_;
  std::atomic<bool> is_open_{false};
  std::atomic<uint32_t> num_pairs_{0};
  std::mutex lock_;
  std::vector<std::weak_ptr<VerbsListener>> listeners_;
  std::vector<std::weak_ptr<RegionGrant>> grants_;
};

}  // namespace mr
