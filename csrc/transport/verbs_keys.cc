#include "verbs_keys.h"

namespace mr {
namespace {

constexpr size_t kMaxEntries = 1u << 16;  // then all but those asked for are forgotten

bool same(const RegionName& a, const RegionName& b) { return a.id == b.id && a.key.equals_constant_time(b.key); }

}  // namespace

VerbsKeyBook::Entry* VerbsKeyBook::find(const RegionName& name, uint32_t rail) {
  auto found = entries_.find({name.id, rail});
  return found == entries_.end() || !same(found->second.name, name) ? nullptr : &found->second;
}

VerbsKeyBook::Entry& VerbsKeyBook::ask(const RegionName& name, uint32_t rail) {
  if (entries_.size() >= kMaxEntries) std::erase_if(entries_, [](const auto& entry) { return entry.second.known; });
  const Place place{name.id, rail};
  Entry& entry = entries_[place];
  auto waiting = std::move(entry.waiting);
  if (entry.number != 0) by_number_.erase(entry.number);
  entry = Entry{name, rail, false, next_number_++, {}, std::move(waiting)};
  by_number_[entry.number] = place;
  return entry;
}

VerbsKeyBook::Entry* VerbsKeyBook::asked(uint64_t number) {
  auto node = by_number_.extract(number);
  if (node.empty()) return nullptr;
  auto found = entries_.find(node.mapped());
  return found == entries_.end() || found->second.number != number ? nullptr : &found->second;
}

void VerbsKeyBook::forget(uint64_t region) {
  for (auto at = entries_.lower_bound({region, 0}); at != entries_.end() && at->first.first == region;)
    at = at->second.known ? entries_.erase(at) : std::next(at);
}

void VerbsKeyBook::erase(const Entry& entry) { entries_.erase({entry.name.id, entry.rail}); }

std::vector<VerbsTransferRef> VerbsKeyBook::all_waiting() {
  std::vector<VerbsTransferRef> out;
  for (auto& [place, entry] : entries_) out.insert(out.end(), entry.waiting.begin(), entry.waiting.end());
  return out;
}

bool VerbsKeyCache::find(const RegionName& name, uint32_t rail, Found* out) const {
  const Entry& entry = entries_[index(name.id, rail)];
  const uint32_t version = entry.version.load(std::memory_order_acquire);
  if ((version & 1) != 0 || entry.region.load(std::memory_order_acquire) != name.id ||
      entry.rail.load(std::memory_order_acquire) != rail)
    return false;
  const RegionName there{
      name.id, Key{{entry.key[0].load(std::memory_order_acquire), entry.key[1].load(std::memory_order_acquire)}}};
  *out = {entry.base.load(std::memory_order_acquire), entry.size.load(std::memory_order_acquire),
          entry.rkey.load(std::memory_order_acquire), entry.atomics.load(std::memory_order_acquire)};
  // Whoever has read one of the new values sees that the version has moved.
  return entry.version.load(std::memory_order_relaxed) == version && same(there, name);
}

void VerbsKeyCache::put(const RegionName& name, uint32_t rail, const VerbsKeys& keys) {
  if (keys.rkeys.size() != 1) return;
  Entry& entry = entries_[index(name.id, rail)];
  entry.version.fetch_add(1, std::memory_order_acq_rel);
  entry.region.store(name.id, std::memory_order_release);
  entry.rail.store(rail, std::memory_order_release);
  for (int i = 0; i < 2; ++i) entry.key[i].store(name.key.word[i], std::memory_order_release);
  entry.base.store(keys.base, std::memory_order_release);
  entry.size.store(keys.size, std::memory_order_release);
  entry.rkey.store(keys.rkeys[0], std::memory_order_release);
  entry.atomics.store(keys.atomics != 0, std::memory_order_release);
  entry.version.fetch_add(1, std::memory_order_release);
}

void VerbsKeyCache::forget(uint64_t region) {
  for (Entry& entry : entries_) {
    if (entry.region.load(std::memory_order_relaxed) != region) continue;
    entry.version.fetch_add(1, std::memory_order_acq_rel);
    entry.region.store(0, std::memory_order_release);
    entry.version.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace mr
