// Memory that others may reach. A Region is ours: bounds, rights and keys. A RemoteRegion is theirs: a small value that
// travels. The Board is how owners tell peers on the same host, without a message, that a region is still alive.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "../base/fd.h"
#include "../base/life_sign.h"
#include "../base/wire.h"
#include "view.h"

namespace mr {

struct Key {
  uint64_t word[2] = {0, 0};
  static Key random();
  bool equals_constant_time(const Key& other) const {
    return ((word[0] ^ other.word[0]) | (word[1] ^ other.word[1])) == 0;
  }
};

// A mapping of a whole memfd; unmapped by the last owner.
class Mapping {
 public:
  Mapping(int fd, uint64_t size, bool writable);  // throws MR_REGISTRATION
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* address() const { return address_; }
  uint64_t size() const { return size_; }
  bool writable() const { return writable_; }

 private:
  uint8_t* address_;
  uint64_t size_;
  bool writable_;
};

// One line of the board, in memory shared with peers on this host (they map it read-only).
// Cooperative: members of the job trust each other; see docs/security.md.
struct alignas(64) BoardSlot {
  std::atomic<uint64_t> live_id;  // the region's id while it may be used, else 0. Ids are never used twice.
  std::atomic<uint64_t> key[2];
  std::atomic<uint64_t> base, size, access;
};

// What a peer writes down before it touches our memory by itself, and wipes after (a hazard pointer, across processes).
// One ledger a link, made by the accessing side, mapped read-only by the owner; gone with the link, so a killed reader
// holds nobody up.
struct alignas(64) LedgerEntry {
  std::atomic<uint64_t> region_id;
};
constexpr uint32_t kLedgerEntries = 64;

constexpr uint32_t kBoardSlots = 1u << 20;
constexpr uint64_t kBoardBytes = (kBoardSlots + 1) * sizeof(BoardSlot);  // the last line is the process's LifeSign

// Memory from mr_shared_alloc.
struct SharedMemory {
  SharedMemory(uint64_t id, uint64_t size);

  const uint64_t id;  // never used twice in this process
  Fd fd, fd_read_only;
  Mapping mapping;
  uint32_t num_regions = 0;  // under the table's lock
};

// What a lane has set up so that peers reach a region without the owner's help, and must take away when it is dropped.
class Grant {
 public:
  virtual ~Grant() = default;
  // Any thread; begins to take it away, and never waits. True once nothing reaches the memory this way any more.
  virtual bool revoke() = 0;
};

class Region {
 public:
  const uint64_t id;
  const Key key;
  uint8_t* const base;
  const uint64_t size;
  const uint32_t access;
  const uint32_t slot;
  const int device;                            // whose memory it is, as this process counts devices; -1: the host's
  const std::shared_ptr<SharedMemory> shared;  // null for memory that is not from mr_shared_alloc
  const uint64_t shared_offset;

  std::atomic<bool> dropped{false};  // remote access has ended
  std::atomic<bool> quiet{false};    // and the memory is not touched any more

  // Notifications, in order of arrival.
  void notify(uint64_t value);
  int next_notification(double timeout, uint64_t* value);  // 1, 0, or -MR_ACCESS_DENIED once dropped and empty
  void wake_waiters();
  // Calls `tell` once, when there is a notification or the region is dropped (at once where it is so), unless `whom`
  // has ended before. Must not wait.
  void when_notified(std::weak_ptr<void> whom, std::function<void()> tell);
  // From now on they are handed to this instead, on the loop: it must not wait. Null: as before.
  void set_on_notify(std::function<void(uint64_t)> on_notify);

  // A lane's grant, by name, made by the first who asks; null once the region is dropped.
  std::shared_ptr<Grant> grant(const char* lane, const std::function<std::shared_ptr<Grant>()>& make);
  // Of a region that is dropped: true once nothing is left of its grants.
  bool revoke_grants();

  Region(uint64_t id, Key key, uint8_t* base, uint64_t size, uint32_t access, uint32_t slot, int device,
         std::shared_ptr<SharedMemory> shared, uint64_t shared_offset);

 private:
  struct Told {
    std::weak_ptr<void> whom;
    std::function<void()> tell;
  };
  void tell_those(std::unique_lock<std::mutex> guard);
  bool is_notified() const { return !notifications_.empty() || dropped.load(); }  // under lock_

  std::mutex lock_;
  std::condition_variable arrived_;
  std::deque<uint64_t> notifications_;
  std::vector<Told> told_;
  std::function<void(uint64_t)> on_notify_;
  std::map<std::string, std::shared_ptr<Grant>> grants_;
};
using RegionRef = std::shared_ptr<Region>;

// How others name a region: goes into handles and requests.
struct RegionName {
  uint64_t id = 0;
  Key key;

  void encode(Writer& out) const { out.put(id).put(key.word[0]).put(key.word[1]); }
  static RegionName decode(Reader& in) {
    RegionName name;
    name.id = in.get<uint64_t>();
    for (auto& word : name.key.word) word = in.get<uint64_t>();
    return name;
  }
};

// Their region: everything a reader must know, without asking the owner.
struct RemoteRegion {
  std::string owner;         // name
  uint64_t incarnation = 0;  // of the owner's process
  std::string address;       // where the owner's engine listens
  RegionName name;
  uint64_t size = 0;
  uint32_t access = 0;
  uint64_t base = 0;       // address in the owner's process, for process_vm
  uint32_t slot = 0;       // on the owner's board
  uint64_t shared_id = 0;  // 0: not shared memory
  uint64_t shared_offset = 0;
  bool on_device = false;  // memory of a GPU: the owner's processor can't touch it

  static RemoteRegion of(const Region& region);  // all but the owner
  Bytes encode() const;
  static RemoteRegion decode(ByteView bytes);  // throws MR_PROTOCOL
};

// All regions and shared memories of one engine. Thread safe.
class RegionTable {
 public:
  RegionTable();
  void close();  // ends access to all, and gives the board back; existing shared memory stays

  void* shared_alloc(uint64_t size);
  uint64_t shared_free(void* address);  // its id; MR_CONFIG where unknown or in use
  std::shared_ptr<SharedMemory> shared_at(const void* address, uint64_t size);  // null: no such memory has all of it

  RegionRef create(void* base, uint64_t size, uint32_t access, int device = -1);
  // The region if the name is known, the key right and `right` granted; else throws MR_ACCESS_DENIED.
  RegionRef find(const RegionName& name, uint32_t right);
  // find, for who touches the bytes of the view itself: they must lie inside (MR_OUT_OF_BOUNDS), and in host memory.
  RegionRef find(const RegionName& name, uint32_t right, const View& view);
  // No access begins after this returns. Accesses in flight are the caller's business. Null where it is gone already.
  RegionRef end_access(uint64_t id);
  std::vector<RegionRef> end_all();
  void release(const RegionRef& region);  // after the last access: gives back the slot and the shared memory

  int board_fd() const { return board_fd_.get(); }
  LifeSign& life() { return life_; }
  uint64_t life_offset() const { return kBoardSlots * sizeof(BoardSlot) + life_.offset(); }  // on the board
  // A line of the board that shows `word` to those who map it, until it is wiped; nothing else is in it.
  uint32_t write_line(uint64_t word);
  void wipe_line(uint32_t index);
  const BoardSlot* line(uint32_t index) { return &slot(index); }
  uint64_t count();

 private:
  std::shared_ptr<SharedMemory> shared_at_locked(const void* address, uint64_t size);
  uint32_t take_slot_locked();
  BoardSlot& slot(uint32_t index) { return reinterpret_cast<BoardSlot*>(board_->address())[index]; }

  std::mutex lock_;
  std::unordered_map<uint64_t, RegionRef> regions_;
  std::map<uintptr_t, std::shared_ptr<SharedMemory>> shared_;  // by address
  std::vector<uint32_t> free_slots_;
  uint32_t next_slot_ = 0;
  uint64_t next_id_, next_shared_id_ = 1;
  Fd board_fd_;
  std::unique_ptr<Mapping> board_;
  LifeSign life_;
};

}  // namespace mr
