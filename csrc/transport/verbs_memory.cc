#include "verbs_memory.h"

#include <algorithm>

namespace mr {
namespace {

constexpr uint64_t kPage = 4096;
constexpr size_t kMaxNested = 64;  // entries looked at for one that begins early and covers

uint64_t piece_size(const ProtectionDomain& domain, uint64_t size) {
  const uint64_t most = domain.context()->attributes().max_mr_size;
  if (most == 0 || size <= most) return std::max<uint64_t>(size, 1);
  return std::max<uint64_t>(most / kPage * kPage, kPage);
}

// Deregistration may take long, and the last one to need a registration is often a thread that must not wait.
RegistrationRef owned_by(const MemoryWorker& worker, std::unique_ptr<Registration> made) {
  return RegistrationRef(made.release(), [worker](const Registration* registration) {
    if (!worker.delist([registration] { delete registration; })) delete registration;
  });
}

// What a card's driver says of an address that it does not know.
const char kPeerMemory[] = " (device memory by its address needs the GPU driver's peer memory module)";

std::unique_ptr<MemoryRegion> region_on_device(const ProtectionDomainRef& domain, uint8_t* at, uint64_t length,
                                               int access) {
  std::string why = "this libibverbs has no ibv_reg_dmabuf_mr";
  try {
    if (domain->verbs().reg_dmabuf_mr != nullptr)
      return std::make_unique<MemoryRegion>(domain, Gpu::need("registering device memory").export_dmabuf(at, length),
                                            at, length, access);
  } catch (const Error& error) {
    why = error.status().text;
  }
  try {
    return std::make_unique<MemoryRegion>(domain, at, length, access);
  } catch (const Error& error) {
    throw Error(Status{MR_REGISTRATION, error.status().sys_errno, why + "; " + error.status().text + kPeerMemory});
  }
}

}  // namespace

Registration::Registration(const ProtectionDomainRef& domain, uint8_t* base, uint64_t size, int access, bool on_device)
    : domain_(domain.get()),
      base_(reinterpret_cast<uintptr_t>(base)),
      size_(size),
      piece_bytes_(piece_size(*domain, size)) {
  for (uint64_t at = 0; at < size; at += piece_bytes_) {
    const uint64_t length = std::min(piece_bytes_, size - at);
    pieces_.push_back(on_device ? region_on_device(domain, base + at, length, access)
                                : std::make_unique<MemoryRegion>(domain, base + at, length, access));
  }
}

std::vector<uint32_t> Registration::rkeys() const {
  std::vector<uint32_t> out;
  for (const auto& piece : pieces_) out.push_back(piece->rkey());
  return out;
}

// Who comes second waits for the first: it may go on when the card has lost the memory, not before.
bool Registration::revoke() const {
  revoked_.store(true);
  std::lock_guard guard(revoking_);
  for (const auto& piece : pieces_) refused_ |= !has_ended(piece->destroy());
  return !refused_;
}

bool MemoryWorker::enlist(std::function<bool(bool last)> attempt) const {
  const auto first = [self = *this, attempt = std::move(attempt)] {
    if (attempt(false)) return;
    const auto again = [attempt] { (void)attempt(true); };
    if (!self.delist(again)) again();
  };
  return workers->run(first, registering);
}

// ---- What stays ----

void KeptRanges::keep(uint64_t begin, uint64_t size) {
  if (size == 0) return;
  std::lock_guard guard(lock_);
  ++ranges_[{begin, begin + size}];
}

void KeptRanges::forget(uint64_t begin, uint64_t size) {
  std::lock_guard guard(lock_);
  auto found = ranges_.find({begin, begin + size});
  if (found != ranges_.end() && --found->second == 0) ranges_.erase(found);
}

KeptRanges::Range KeptRanges::covering(uint64_t begin, uint64_t size) const {
  std::lock_guard guard(lock_);
  auto at = ranges_.upper_bound({begin, UINT64_MAX});
  for (size_t seen = 0; at != ranges_.begin() && seen < kMaxNested; ++seen) {
    --at;
    const auto [first, end] = at->first;
    if (begin < end && size <= end - begin) return {first, end};
  }
  return {};
}

// ---- The cache ----

bool LocalMemory::begins_later(uint64_t address, const std::shared_ptr<const Entry>& entry) {
  return address < entry->registration->base();
}

uint64_t LocalMemory::size_of(const Entries& entries) {
  uint64_t bytes = 0;
  for (const auto& entry : entries) bytes += entry->registration->size();
  return bytes;
}

LocalMemory::LocalMemory(ProtectionDomainRef domain, const KeptRanges& kept, MemoryWorker worker, uint64_t budget,
                         bool on_demand)
    : domain_(std::move(domain)), kept_(kept), worker_(std::move(worker)), budget_(budget), on_demand_(on_demand) {}

RegistrationRef LocalMemory::find(uint64_t address, uint64_t length) const {
  if (bytes() == 0) return nullptr;
  const auto entries = entries_.get();
  auto at = std::upper_bound(entries->begin(), entries->end(), address, begins_later);
  for (size_t seen = 0; at != entries->begin() && seen < kMaxNested; ++seen) {
    const Entry& entry = **--at;
    if (!entry.registration->covers(address, length)) continue;
    entry.used.store(tick_.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
    return entry.registration;
  }
  return nullptr;
}

void LocalMemory::replace(const Change& change) {
  std::shared_ptr<const Entries> before;
  std::lock_guard guard(changing_);
  before = entries_.get();
  auto fresh = change(*before);
  if (!fresh) return;
  bytes_ = size_of(*fresh);
  entries_.set(std::move(fresh));
}

void LocalMemory::erase(const std::function<bool(const RegistrationRef&)>& goes) {
  replace([&](const Entries& before) -> std::shared_ptr<Entries> {
    const auto matches = [&](const auto& entry) { return goes(entry->registration); };
    if (std::none_of(before.begin(), before.end(), matches)) return nullptr;
    auto fresh = std::make_shared<Entries>(before);
    std::erase_if(*fresh, matches);
    return fresh;
  });
}

RegistrationRef LocalMemory::make(uint8_t* base, uint64_t size, bool on_device) {
  const int access = IBV_ACCESS_LOCAL_WRITE | (on_demand_ && !on_device ? IBV_ACCESS_ON_DEMAND : 0);
  return owned_by(worker_, std::make_unique<Registration>(domain_, base, size, access, on_device));
}

RegistrationRef LocalMemory::get(uint8_t* address, uint64_t length, bool on_device) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (auto found = find(begin, length)) return found;
  const auto range = kept_.covering(begin, length);
  if (range.end == 0) return make(address, length, on_device);
  auto made = make(reinterpret_cast<uint8_t*>(range.begin), range.end - range.begin, on_device);
  replace([&](const Entries& before) -> std::shared_ptr<Entries> {
    // It may have been forgotten while the kernel pinned it.
    if (kept_.covering(range.begin, range.end - range.begin).end == 0) return nullptr;
    auto fresh = std::make_shared<Entries>(before);
    fresh->insert(std::upper_bound(fresh->begin(), fresh->end(), range.begin, begins_later),
                  std::make_shared<const Entry>(made, tick_.fetch_add(1)));
    evict(*fresh);
    return fresh;
  });
  return made;
}

void LocalMemory::evict(Entries& entries) const {
  for (uint64_t bytes = size_of(entries); bytes > budget_;) {
    auto oldest = entries.end();
    for (auto at = entries.begin(); at != entries.end(); ++at)
      if ((*at)->registration.use_count() == 1 &&
          (oldest == entries.end() || (*at)->used.load() < (*oldest)->used.load()))
        oldest = at;
    if (oldest == entries.end()) return;
    bytes -= (*oldest)->registration->size();
    entries.erase(oldest);
  }
}

void LocalMemory::forget(uint64_t address, uint64_t length) {
  erase([&](const RegistrationRef& known) {
    const bool overlaps = known->base() < address + length && address < known->base() + known->size();
    return overlaps && kept_.covering(known->base(), known->size()).end == 0;
  });
}

void LocalMemory::remove(const RegistrationRef& registration) {
  erase([&](const RegistrationRef& known) { return known == registration; });
}

void LocalMemory::clear() {
  erase([](const RegistrationRef&) { return true; });
}

// ---- Staging ----

StagingBlocks::StagingBlocks(const ProtectionDomainRef& domain)
    : bytes_(new uint8_t[kBlocks * kBlock]),
      registration_(
          std::make_shared<const Registration>(domain, bytes_.get(), kBlocks * kBlock, IBV_ACCESS_LOCAL_WRITE)) {
  lkey_ = registration_->lkey(registration_->base());
  if (registration_->rkeys().size() != 1)
    throw Error(MR_REGISTRATION, domain->context()->name() + " registers less than " +
                                     std::to_string(kBlocks * kBlock) + " bytes at a time");
  for (uint32_t i = 0; i < kBlocks; ++i) next_[i].store(i + 1 < kBlocks ? i + 1 : kNone);
}

uint8_t* StagingBlocks::take() {
  uint64_t seen = first_.load();
  while (true) {
    const auto index = static_cast<uint32_t>(seen);
    if (index == kNone) return nullptr;
    const uint64_t next = ((seen >> 32) + 1) << 32 | next_[index].load();
    if (first_.compare_exchange_weak(seen, next)) return bytes_.get() + index * kBlock;
  }
}

void StagingBlocks::give_back(uint8_t* block) {
  const auto index = static_cast<uint32_t>(static_cast<uint64_t>(block - bytes_.get()) / kBlock);
  uint64_t seen = first_.load();
  do next_[index].store(static_cast<uint32_t>(seen));
  while (!first_.compare_exchange_weak(seen, ((seen >> 32) + 1) << 32 | index));
}

// ---- Regions ----

RegistrationRef RegionGrant::get(const ProtectionDomainRef& domain) {
  const RegionRef region = region_.lock();
  {
    std::lock_guard guard(lock_);
    if (!region || revoked_) throw Error(MR_ACCESS_DENIED, "the region was dropped");
    if (auto found = registrations_.find(domain.get()); found != registrations_.end()) return found->second;
    ++busy_;
  }
  const bool writable = (region->access & MR_WRITE) != 0, readable = (region->access & MR_READ) != 0;
  const bool on_device = region->device >= 0;
  const int access = (readable ? IBV_ACCESS_REMOTE_READ : 0) |
                     (writable ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0) |
                     (writable && readable && atomics_ && !on_device ? IBV_ACCESS_REMOTE_ATOMIC : 0);
  std::shared_ptr<const Registration> made;
  Status failure;
  try {
    made = std::make_shared<const Registration>(domain, region->base, region->size, access, on_device);
  } catch (const Error& error) {
    failure = error.status();
  }
  std::unique_lock guard(lock_);
  if (made && !revoked_) registrations_.emplace(domain.get(), made);
  const bool too_late = revoked_;
  if (too_late) {
    guard.unlock();
    made.reset();  // before it counts as gone
    guard.lock();
  }
  --busy_;
  if (!failure.ok()) throw Error(failure);
  if (too_late) throw Error(MR_ACCESS_DENIED, "the region was dropped");
  return made;
}

void RegionGrant::on_revoked(std::function<void()> tell) {
  std::lock_guard guard(lock_);
  if (!revoked_) tell_.push_back(std::move(tell));
}

void RegionGrant::lose(const ProtectionDomain& domain) {
  std::vector<std::function<void()>> tell;
  decltype(registrations_)::node_type gone;
  {
    std::lock_guard guard(lock_);
    gone = registrations_.extract(&domain);
    if (!gone.empty()) tell = std::exchange(tell_, {});
  }
  for (const auto& each : tell) each();
  if (!gone.empty()) workers_->run([registration = std::move(gone.mapped())] {});  // which lets go of it
}

bool RegionGrant::revoke() {
  std::lock_guard guard(lock_);
  revoked_ = true;
  for (const auto& tell : std::exchange(tell_, {})) tell();
  if (!registrations_.empty()) {
    ++busy_;
    auto gone = std::make_shared<decltype(registrations_)>(std::exchange(registrations_, {}));
    // By itself: it must not wait for what else is asked of the card. One that the kernel refuses counts as busy for
    // good.
    const auto take_away = [gone] {
      bool taken = true;
      for (const auto& [domain, registration] : *gone) taken &= registration->revoke();
      return taken;
    };
    const auto work = [self = shared_from_this(), take_away] {
      const bool taken = take_away();
      std::lock_guard guard(self->lock_);
      self->busy_ -= taken;
    };
    if (!workers_->run(work)) busy_ -= take_away();  // the engine closes
  }
  return busy_ == 0;
}

}  // namespace mr
