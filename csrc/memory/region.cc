#include "region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "../base/tls.h"

namespace mr {
namespace {

constexpr size_t kMaxText = 4096;
constexpr uint8_t kHandleVersion = 2;
constexpr uint64_t kHugePage = 2u << 20;
constexpr size_t kMaxNotifications = 1u << 20;

std::string address_space_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur >> 10) + " KiB";
}

std::string region_text(uint64_t id) { return "region " + std::to_string(id); }

}  // namespace

Key Key::random() { return Key{{random_u64(), random_u64()}}; }

Mapping::Mapping(int fd, uint64_t size, bool writable) : size_(size), writable_(writable) {
  void* at = ::mmap(nullptr, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED)
    throw Error(MR_REGISTRATION,
                "can't map " + std::to_string(size) + " bytes of shared memory (address space: " +
                    address_space_limit() + ", see `ulimit -v`; number of mappings: see `sysctl vm.max_map_count`)",
                errno);
  address_ = static_cast<uint8_t*>(at);
  // Huge pages are a wish: refused where the kernel has none for shared memory.
  if (size >= kHugePage) (void)::madvise(at, size, MADV_HUGEPAGE);
}

Mapping::~Mapping() { ::munmap(address_, size_); }

SharedMemory::SharedMemory(uint64_t id, uint64_t size)
    : id(id),
      fd(make_memfd("monarch_rdma", size)),
      fd_read_only(reopen_read_only(fd.get())),
      mapping(fd.get(), size, true) {}

Region::Region(uint64_t id, Key key, uint8_t* base, uint64_t size, uint32_t access, uint32_t slot, int device,
               std::shared_ptr<SharedMemory> shared, uint64_t shared_offset)
    : id(id),
      key(key),
      base(base),
      size(size),
      access(access),
      slot(slot),
      device(device),
      shared(std::move(shared)),
      shared_offset(shared_offset) {}

void Region::notify(uint64_t value) {
  std::unique_lock guard(lock_);
  if (const auto on_notify = on_notify_) {
    guard.unlock();
    return on_notify(value);
  }
  if (notifications_.size() >= kMaxNotifications)
    throw Error(MR_RESOURCE_EXHAUSTED, std::to_string(kMaxNotifications) + " notifications of " + region_text(id) +
                                           " are unread; its owner must take some");
  notifications_.push_back(value);
  arrived_.notify_one();
  tell_those(std::move(guard));
}

void Region::set_on_notify(std::function<void(uint64_t)> on_notify) {
  std::lock_guard guard(lock_);
  on_notify_ = std::move(on_notify);
}

int Region::next_notification(double timeout, uint64_t* value) {
  std::unique_lock guard(lock_);
  const auto ready = [this] { return is_notified(); };
  if (timeout < 0)
    arrived_.wait(guard, ready);
  else
    arrived_.wait_for(guard, std::chrono::duration<double>(std::min(timeout, 1e9)), ready);
  if (notifications_.empty()) return dropped.load() ? -MR_ACCESS_DENIED : 0;
  *value = notifications_.front();
  notifications_.pop_front();
  return 1;
}

void Region::wake_waiters() {
  std::unique_lock guard(lock_);
  arrived_.notify_all();
  tell_those(std::move(guard));
}

void Region::when_notified(std::weak_ptr<void> whom, std::function<void()> tell) {
  std::unique_lock guard(lock_);
  std::erase_if(told_, [](const Told& one) { return one.whom.expired(); });
  told_.push_back({std::move(whom), std::move(tell)});
  if (is_notified()) tell_those(std::move(guard));
}

void Region::tell_those(std::unique_lock<std::mutex> guard) {
  const std::vector<Told> told = std::exchange(told_, {});
  guard.unlock();
  for (const Told& one : told)
    if (const auto there = one.whom.lock()) one.tell();
}

std::shared_ptr<Grant> Region::grant(const char* lane, const std::function<std::shared_ptr<Grant>()>& make) {
  std::lock_guard guard(lock_);
  if (dropped.load()) return nullptr;
  auto& found = grants_[lane];
  if (!found) found = make();
  return found;
}

bool Region::revoke_grants() {
  std::lock_guard guard(lock_);
  std::erase_if(grants_, [](const auto& entry) { return entry.second->revoke(); });
  return grants_.empty();
}

RemoteRegion RemoteRegion::of(const Region& region) {
  RemoteRegion out;
  out.name = {region.id, region.key};
  out.size = region.size;
  out.access = region.access;
  out.base = reinterpret_cast<uintptr_t>(region.base);
  out.slot = region.slot;
  out.shared_id = region.shared ? region.shared->id : 0;
  out.shared_offset = region.shared_offset;
  out.on_device = region.device >= 0;
  return out;
}

Bytes RemoteRegion::encode() const {
  Writer out;
  out.put(kHandleVersion).text(owner).put(incarnation).text(address);
  name.encode(out);
  out.put(size).put(access).put(base).put(slot).put(shared_id).put(shared_offset);
  out.put(static_cast<uint8_t>(on_device));
  return out.take();
}

RemoteRegion RemoteRegion::decode(ByteView bytes) {
  Reader in(bytes);
  if (const int version = in.get<uint8_t>(); version != kHandleVersion)
    throw Error(MR_PROTOCOL, "a handle of version " + std::to_string(version) + ", this library reads version " +
                                 std::to_string(kHandleVersion));
  RemoteRegion out;
  out.owner = in.text(kMaxText);
  out.incarnation = in.get<uint64_t>();
  out.address = in.text(kMaxText);
  out.name = RegionName::decode(in);
  out.size = in.get<uint64_t>();
  out.access = in.get<uint32_t>();
  out.base = in.get<uint64_t>();
  out.slot = in.get<uint32_t>();
  out.shared_id = in.get<uint64_t>();
  out.shared_offset = in.get<uint64_t>();
  out.on_device = in.get<uint8_t>() != 0;
  in.end();
  if (out.slot >= kBoardSlots) throw Error(MR_PROTOCOL, "a handle with board slot " + std::to_string(out.slot));
  if (out.size > std::numeric_limits<uint64_t>::max() - out.base ||
      out.size > std::numeric_limits<uint64_t>::max() - out.shared_offset)
    throw Error(MR_PROTOCOL, "a handle whose range overflows 64 bits");
  return out;
}

RegionTable::RegionTable()
    : next_id_(random_u64() >> 16),
      board_fd_(make_memfd("monarch_rdma board", kBoardBytes)),
      board_(std::make_unique<Mapping>(board_fd_.get(), kBoardBytes, true)),
      life_(&slot(kBoardSlots)) {
  static_assert(LifeSign::kBytes == sizeof(BoardSlot));
}

void RegionTable::close() {
  std::lock_guard guard(lock_);
  // Peers keep their mapping of the board: tell them that nothing on it lives.
  if (board_)
    for (auto& [id, region] : regions_) slot(region->slot).live_id.store(0);
  regions_.clear();
  board_.reset();
  board_fd_.reset();
}

void* RegionTable::shared_alloc(uint64_t size) {
  if (size == 0) throw Error(MR_CONFIG, "shared memory of 0 bytes");
  if (size > std::numeric_limits<uint64_t>::max() - kHugePage)
    throw Error(MR_CONFIG, "shared memory of " + std::to_string(size) + " bytes");
  const uint64_t unit = size >= kHugePage ? kHugePage : 4096;
  std::lock_guard guard(lock_);
  auto memory = std::make_shared<SharedMemory>(next_shared_id_++, (size + unit - 1) / unit * unit);
  void* address = memory->mapping.address();
  shared_.emplace(reinterpret_cast<uintptr_t>(address), std::move(memory));
  return address;
}

uint64_t RegionTable::shared_free(void* address) {
  std::shared_ptr<SharedMemory> memory;
  std::lock_guard guard(lock_);
  auto found = shared_.find(reinterpret_cast<uintptr_t>(address));
  if (found == shared_.end()) throw Error(MR_CONFIG, "the address is not of shared memory of this engine");
  if (found->second->num_regions != 0)
    throw Error(MR_CONFIG,
                "shared memory with " + std::to_string(found->second->num_regions) + " regions that are not dropped");
  memory = std::move(found->second);
  shared_.erase(found);
  return memory->id;
}

std::shared_ptr<SharedMemory> RegionTable::shared_at(const void* address, uint64_t size) {
  std::lock_guard guard(lock_);
  return shared_at_locked(address, size);
}

std::shared_ptr<SharedMemory> RegionTable::shared_at_locked(const void* address, uint64_t size) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto found = shared_.upper_bound(at);
  if (found == shared_.begin()) return nullptr;
  --found;
  const uint64_t offset = at - found->first, whole = found->second->mapping.size();
  return offset <= whole && size <= whole - offset ? found->second : nullptr;
}

uint32_t RegionTable::take_slot_locked() {
  if (!board_) throw Error(MR_CONFIG, "the engine is closed");
  if (free_slots_.empty() && next_slot_ == kBoardSlots)
    throw Error(MR_RESOURCE_EXHAUSTED, std::to_string(kBoardSlots) + " regions are in use; drop some first");
  if (free_slots_.empty()) return next_slot_++;
  const uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  return index;
}

uint32_t RegionTable::write_line(uint64_t word) {
  std::lock_guard guard(lock_);
  const uint32_t index = take_slot_locked();
  slot(index).live_id.store(word);
  return index;
}

void RegionTable::wipe_line(uint32_t index) {
  std::lock_guard guard(lock_);
  if (!board_) return;
  slot(index).live_id.store(0);
  free_slots_.push_back(index);
}

RegionRef RegionTable::create(void* base, uint64_t size, uint32_t access, int device) {
  if (access == 0 || (access & ~(MR_READ | MR_WRITE)) != 0)
    throw Error(MR_CONFIG, "access " + std::to_string(access) + " is not read, write or both");
  if (base == nullptr && size != 0)
    throw Error(MR_REGISTRATION, "a null address with " + std::to_string(size) + " bytes");
  if (size > std::numeric_limits<uintptr_t>::max() - reinterpret_cast<uintptr_t>(base))
    throw Error(MR_REGISTRATION, "a range of " + std::to_string(size) + " bytes that leaves the address space");
  std::lock_guard guard(lock_);
  const uint32_t index = take_slot_locked();
  auto shared = shared_at_locked(base, size);
  const uint64_t shared_offset = shared ? static_cast<uint8_t*>(base) - shared->mapping.address() : 0;
  if (shared) ++shared->num_regions;
  auto region = std::make_shared<Region>(next_id_++, Key::random(), static_cast<uint8_t*>(base), size, access, index,
                                         device, std::move(shared), shared_offset);
  BoardSlot& line = slot(index);
  line.key[0].store(region->key.word[0]);
  line.key[1].store(region->key.word[1]);
  line.base.store(reinterpret_cast<uintptr_t>(base));
  line.size.store(size);
  line.access.store(access);
  line.live_id.store(region->id);
  regions_.emplace(region->id, region);
  return region;
}

RegionRef RegionTable::find(const RegionName& name, uint32_t right) {
  std::lock_guard guard(lock_);
  auto found = regions_.find(name.id);
  // One sentence for "unknown" and "wrong key": a guesser learns nothing.
  if (found == regions_.end() || !found->second->key.equals_constant_time(name.key))
    throw Error(MR_ACCESS_DENIED, region_text(name.id) + " was dropped or never granted");
  if ((found->second->access & right) != right)
    throw Error(MR_ACCESS_DENIED, region_text(name.id) + " does not grant " +
                                      (right == MR_READ    ? "read"
                                       : right == MR_WRITE ? "write"
                                                           : "read and write"));
  return found->second;
}

RegionRef RegionTable::find(const RegionName& name, uint32_t right, const View& view) {
  RegionRef region = find(name, right);
  if (region->device >= 0)
    throw Error(MR_ACCESS_DENIED,
                region_text(name.id) + " is memory of a device: its owner's processor can't reach it");
  if (!view.fits(region->size))
    throw Error(MR_OUT_OF_BOUNDS, "bytes up to " + std::to_string(view.end()) + " of " + region_text(name.id) +
                                      ", which has " + std::to_string(region->size));
  return region;
}

RegionRef RegionTable::end_access(uint64_t id) {
  std::lock_guard guard(lock_);
  auto found = regions_.find(id);
  if (found == regions_.end()) return nullptr;
  RegionRef region = std::move(found->second);
  regions_.erase(found);
  slot(region->slot).live_id.store(0, std::memory_order_seq_cst);
  region->dropped.store(true);
  region->wake_waiters();
  return region;
}

std::vector<RegionRef> RegionTable::end_all() {
  std::vector<uint64_t> ids;
  {
    std::lock_guard guard(lock_);
    for (const auto& [id, region] : regions_) ids.push_back(id);
  }
  std::vector<RegionRef> ended;
  for (const uint64_t id : ids)
    if (auto region = end_access(id)) ended.push_back(std::move(region));
  return ended;
}

void RegionTable::release(const RegionRef& region) {
  std::lock_guard guard(lock_);
  if (region->quiet.exchange(true)) return;
  free_slots_.push_back(region->slot);
  if (region->shared) --region->shared->num_regions;
}

uint64_t RegionTable::count() {
  std::lock_guard guard(lock_);
  return regions_.size();
}

}  // namespace mr
