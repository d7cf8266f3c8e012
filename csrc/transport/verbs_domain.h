// What the verbs links of one engine share: its cards, opened, with their memory and pollers; the rails; the threads
// for calls that may take long; and the budget of queue pairs.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lanes.h"
#include "options.h"
#include "rails.h"
#include "verbs_memory.h"
#include "verbs_poller.h"

namespace mr {

// An open card.
class VerbsCard {
 public:
  VerbsCard(VerbsContextRef context, const KeptRanges& kept, std::shared_ptr<Workers> workers, const Options& options,
            VerbsPoller::OnCardEvent on_event);

  const std::string& name() const { return context->name(); }

  const VerbsContextRef context;
  const ProtectionDomainRef domain;
  const MemoryWorker memory_worker;
  LocalMemory memory;
  StagingBlocks staging;
  VerbsPoller poller;
  std::atomic<bool> dead{false};        // the card said so
  std::atomic<uint32_t> responders{0};  // of max_res_rd_atom, granted to peers
};
using VerbsCardRef = std::shared_ptr<VerbsCard>;

struct VerbsRail : Rail {
  VerbsCardRef card;
  uint64_t max_message = 0;  // bytes of one work request
};

// The attributes of queue pairs on a rail that options give; the way to the other end is not in it.
QueuePairPath verbs_path(const Options& options, const VerbsRail& rail);

// Hears of what happens to cards and ports. On a poller's thread.
class VerbsListener {
 public:
  virtual void on_port(size_t rail, bool up) = 0;
  virtual void on_card_dead(const VerbsCard& card) = 0;
  // A queue pair of this card in trouble that no completion tells of.
  virtual void on_pair_event(uint32_t queue_pair, const char* what) = 0;

 protected:
  ~VerbsListener() = default;
};

class VerbsDomain : public MemoryKeeper, public std::enable_shared_from_this<VerbsDomain> {
 public:
  // Null where this host has nothing to offer, and then *why tells; throws where an option can't be honoured.
  static std::shared_ptr<VerbsDomain> open(const Verbs& verbs, const Options& options, std::string* why);
  // Ends its threads and closes its cards, after what has been begun. Where the kernel holds a call that returns after
  // a few seconds, and the rest is done when the kernel lets go.
  void close();

  const std::vector<VerbsRail>& rails() const { return rails_; }
  const Options& options() const { return options_; }
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
  explicit VerbsDomain(const Options& options);
  void on_card_event(const std::string& card, const ibv_async_event& event);

  const Options options_;
  const int pid_;
  const std::shared_ptr<Workers> workers_;
  KeptRanges kept_;
  std::map<std::string, VerbsCardRef> cards_;
  std::vector<VerbsRail> rails_;
  std::atomic<uint32_t> num_pairs_{0};
  std::mutex lock_;
  std::vector<std::weak_ptr<VerbsListener>> listeners_;
};

}  // namespace mr
