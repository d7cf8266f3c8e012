// Memory that cards know: registrations of local memory, kept in a cache where somebody promised that the memory stays,
// and grants of our regions to peers.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "../base/published.h"
#include "../base/workers.h"
#include "../memory/region.h"
#include "verbs.h"

namespace mr {

// One range as memory regions of one card: more than one where the range is longer than the card's max_mr_size.
class Registration {
 public:
  // All pieces or none: throws MR_REGISTRATION. `access` is of enum ibv_access_flags.
  // on_device: by its dma-buf, or where there is none as if it were the host's, which needs a driver's help (peermem).
  Registration(const ProtectionDomainRef& domain, uint8_t* base, uint64_t size, int access, bool on_device = false);

  const ProtectionDomain* domain() const { return domain_; }
  uint64_t base() const { return base_; }
  uint64_t size() const { return size_; }
  bool covers(uint64_t address, uint64_t length) const {
    return address >= base_ && address - base_ <= size_ && length <= size_ - (address - base_);
  }
  uint64_t piece_bytes() const { return piece_bytes_; }  // of all pieces but the last
  // Of an address inside: the bytes up to the next seam, or to the end; and the local key.
  uint64_t until_seam(uint64_t address) const { return piece_bytes_ - (address - base_) % piece_bytes_; }
  uint32_t lkey(uint64_t address) const { return pieces_[(address - base_) / piece_bytes_]->lkey(); }
  std::vector<uint32_t> rkeys() const;

  // Takes the memory from the card, whoever uses the registration: once this has returned true the card can't reach it,
  // and requests that name it fail. May take long.
  bool revoke() const;
  bool is_revoked() const { return revoked_.load(); }  // or about to be

 private:
  const ProtectionDomain* const domain_;
  const uint64_t base_, size_;
  uint64_t piece_bytes_;
  std::vector<std::unique_ptr<MemoryRegion>> pieces_;
  mutable std::mutex revoking_;
  mutable bool refused_ = false;  // by the kernel
  mutable std::atomic<bool> revoked_{false};
};
using RegistrationRef = std::shared_ptr<const Registration>;

// Registering at one card, one range after the other, and deregistering, beside it: a call for one that the kernel
// holds does not hold up the other.
struct MemoryWorker {
  std::shared_ptr<Workers> workers;
  Workers::StrandRef registering = Workers::new_strand(), deregistering = Workers::new_strand();

  // `attempt` tells whether it succeeded. If not it comes once more, as the last, behind what is being deregistered:
  // the card may know as many ranges as it can. False: there is no thread.
  bool enlist(std::function<bool(bool last)> attempt) const;
  bool delist(std::function<void()> task) const { return workers->run(std::move(task), deregistering); }
};

// Ranges that stay mapped to the same pages until they are forgotten: only there may a registration outlive the
// operation that needed it. Thread safe.
class KeptRanges {
 public:
  struct Range {
    uint64_t begin = 0, end = 0;
  };
  void keep(uint64_t begin, uint64_t size);
  void forget(uint64_t begin, uint64_t size);  // as often as it was kept
  // A range that covers [begin, begin + size), else an empty one.
  Range covering(uint64_t begin, uint64_t size) const;

 private:
  mutable std::mutex lock_;
  std::map<std::pair<uint64_t, uint64_t>, uint32_t> ranges_;  // (begin, end): how often
};

// Registrations of local memory at one card, for our own reads and writes. Thread safe.
class LocalMemory {
 public:
  // budget: bytes of idle registrations that are kept. `worker` carries out what deregisters.
  LocalMemory(ProtectionDomainRef domain, const KeptRanges& kept, MemoryWorker worker, uint64_t budget, bool on_demand);

  // From the cache, or null. Takes no lock.
  RegistrationRef find(uint64_t address, uint64_t length) const;
  // From the cache, or new; may take long. Throws MR_REGISTRATION.
  RegistrationRef get(uint8_t* address, uint64_t length, bool on_device = false);
  // What is not promised any more leaves the cache.
  void forget(uint64_t address, uint64_t length);
  void remove(const RegistrationRef& registration);  // if it is there
  void clear();
  uint64_t bytes() const { return bytes_.load(); }  // of registrations in the cache

 private:
  struct Entry {
    RegistrationRef registration;
    mutable std::atomic<uint64_t> used;
    Entry(RegistrationRef registration, uint64_t now) : registration(std::move(registration)), used(now) {}
  };
  using Entries = std::vector<std::shared_ptr<const Entry>>;  // by base

  static bool begins_later(uint64_t address, const std::shared_ptr<const Entry>& entry);
  static uint64_t size_of(const Entries& entries);
  RegistrationRef make(uint8_t* base, uint64_t size, bool on_device);
  // What takes the place of the entries; null: they stay. What leaves is let go of without the lock.
  using Change = std::function<std::shared_ptr<Entries>(const Entries& before)>;
  void replace(const Change& change);
  void erase(const std::function<bool(const RegistrationRef&)>& goes);
  void evict(Entries& entries) const;

  const ProtectionDomainRef domain_;
  const KeptRanges& kept_;
  const MemoryWorker worker_;
  const uint64_t budget_;
  const bool on_demand_;
  std::mutex changing_;
  Published<const Entries> entries_{std::make_shared<const Entries>()};
  mutable std::atomic<uint64_t> tick_{0};
  std::atomic<uint64_t> bytes_{0};
};

// A few small blocks of memory that a card knows, for bytes whose own memory is not worth a registration. Lock-free.
class StagingBlocks {
 public:
  static constexpr uint64_t kBlock = 4096;
  explicit StagingBlocks(const ProtectionDomainRef& domain);  // throws MR_REGISTRATION

  uint8_t* take();  // null where all are in use
  void give_back(uint8_t* block);
  uint32_t lkey() const { return lkey_; }
  const RegistrationRef& registration() const { return registration_; }

 private:
  static constexpr uint32_t kBlocks = 256, kNone = ~0u;
  std::unique_ptr<uint8_t[]> bytes_;
  RegistrationRef registration_;
  uint32_t lkey_ = 0;
  std::atomic<uint32_t> next_[kBlocks];
  std::atomic<uint64_t> first_{0};  // a counter that tells old from new, and the index of the first free block
};

// What peers may do with one of our regions through cards: a registration a card, made when the first peer asks, taken
// away when the region is dropped. Thread safe.
class RegionGrant : public Grant, public std::enable_shared_from_this<RegionGrant> {
 public:
  RegionGrant(const RegionRef& region, std::shared_ptr<Workers> workers, bool atomics)
      : region_(region), workers_(std::move(workers)), atomics_(atomics) {}

  // May take long. Throws MR_REGISTRATION, or MR_ACCESS_DENIED once the region is dropped.
  RegistrationRef get(const ProtectionDomainRef& domain);
  bool revoke() override;
  // The card is gone. Peers are told to forget what they have of the region, and may ask again.
  void lose(const ProtectionDomain& domain);
  // Called once, from inside the first revoke or loss: peers that have keys are told to forget them.
  void on_revoked(std::function<void()> tell);
  bool atomics() const { return atomics_; }

 private:
  const std::weak_ptr<Region> region_;
  const std::shared_ptr<Workers> workers_;
  const bool atomics_;
  std::mutex lock_;
  bool revoked_ = false;
  int busy_ = 0;  // registrations being made or taken away
  std::map<const ProtectionDomain*, RegistrationRef> registrations_;
  std::vector<std::function<void()>> tell_;
};

}  // namespace mr
