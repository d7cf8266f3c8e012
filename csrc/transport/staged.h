// The staged lane's parts that know of each other: a link, its operations, and what it serves to the peer. Between two
// processes, over the control stream:
//   reader -> owner  slots: memory of the owner's for bytes on their way, as a region of host memory
//   reader -> owner  pack: copy a part of a region on a device into a slot, one piece after the other
//   reader -> owner  unpack: the contrary
//   owner -> reader  answer, when it is done
// The reader reads and writes the slots over any lane for host memory. It alone decides which slot is for what.
#pragma once

#include <map>
#include <mutex>
#include <set>

#include "device_domain.h"
#include "device_wire.h"
#include "transfer.h"

namespace mr {

// The owner's side: slots for one peer, made when it first asks, and the copies that it asks for.
class StagedServer : public std::enable_shared_from_this<StagedServer> {
 public:
  StagedServer(LinkHost& host, std::shared_ptr<DeviceDomain> domain)
      : host_(host), loop_(host.loop()), domain_(std::move(domain)) {}

  void on_slots_on_loop(Reader& in);
  void on_copy_on_loop(bool pack, Reader& in);
  void close_on_loop() { closed_ = true; }
  bool touches(uint64_t region_id) const;  // any thread

 private:
  struct OwnerSlots;
  void make_slots(uint64_t number);
  void copy(const RegionRef& region, const View& view, uint32_t slot, bool pack, uint64_t number);
  void copied_on_loop(const RegionRef& region, uint64_t number, Status status);
  void answer_on_loop(uint64_t number, const Status& status, const Bytes& payload);

  LinkHost& host_;
  Loop& loop_;
  const std::shared_ptr<DeviceDomain> domain_;
  bool closed_ = false;                // on the loop
  std::shared_ptr<OwnerSlots> slots_;  // on the domain's thread
  mutable std::mutex lock_;
  std::map<uint64_t, int> users_;  // regions that copies are in
};

class StagedTransfer;

// What transfers of one link share. On the domain's thread, but for what says otherwise.
class StagedClient : public std::enable_shared_from_this<StagedClient> {
 public:
  StagedClient(LinkHost& host, std::shared_ptr<DeviceDomain> domain)
      : host(host), domain(std::move(domain)), loop_(host.loop()), requests_(host) {}

  LinkHost& host;
  const std::shared_ptr<DeviceDomain> domain;

  bool start_on_loop(const OpRef& op);
  void stop_on_loop(const OpRef& op);
  void close_on_loop(const Status& why);
  void on_answer_on_loop(Reader& in, std::vector<Fd>& fds) { requests_.on_answer_on_loop(in, fds); }

  const Closing& closing() const { return closing_; }
  // The owner's slots, null until it has told. `then` is called when it has, or has refused.
  const RemoteRegion* their_slots() const { return theirs_.get(); }
  std::shared_ptr<const RemoteRegion> their_region() const { return theirs_; }
  Slots& their_free() { return *their_free_; }
  void ask_for_slots(const OpRef& op, std::function<void(Status)> then);
  // Has the owner copy between a slot and a part of the region.
  void ask_for_copy(const OpRef& op, bool pack, int slot, const View& part, std::function<void(Status)> then);
  void ended(const std::shared_ptr<StagedTransfer>& transfer) { transfers_.erase(transfer); }

 private:
  void ask(uint16_t type, Bytes question, std::function<void(DeviceAnswer&)> then);

  Loop& loop_;
  DeviceRequests requests_;
  Closing closing_;
  std::shared_ptr<const RemoteRegion> theirs_;
  std::unique_ptr<Slots> their_free_;
  std::vector<std::function<void(Status)>> slots_awaited_;
  std::set<std::shared_ptr<StagedTransfer>> transfers_;
};

// One read or write. Each of its parts goes through up to three steps: between the owner's device and a slot there,
// between two host memories, between a slot here and local memory. On the domain's thread.
class StagedTransfer : public std::enable_shared_from_this<StagedTransfer> {
 public:
  StagedTransfer(std::shared_ptr<StagedClient> client, OpRef op);
  void begin();
  void go_on();
  void stop();
  const OpRef& op() const { return op_; }

 private:
  struct Part;
  using PartRef = std::shared_ptr<Part>;
  using Next = void (StagedTransfer::*)(const PartRef&);

  bool take_slots(Part& part);
  void give_back(Part& part);
  void begin_part(const PartRef& part);
  void pack(const PartRef& part);
  void gather_here(const PartRef& part);
  void move(const PartRef& part);
  void moved(const PartRef& part);
  void scatter_here(const PartRef& part);
  void unpack(const PartRef& part);
  void part_done(const PartRef& part);
  void copy_here(const PartRef& part, Next next);
  void step_ended(const PartRef& part, Status status, Next next, bool touches_local);
  void end();

  const std::shared_ptr<StagedClient> client_;
  const OpRef op_;
  const std::shared_ptr<void> peer_;  // stays until the end is told
  const bool reads_, needs_mine_, needs_theirs_;
  Parts parts_;
  std::set<PartRef> open_;
  uint32_t touching_ = 0, num_parts_ = 0, retries_ = 0;  // touching_: steps under way that use local memory
  bool ended_ = false, going_on_ = false, changed_ = false;
  const char* lane_ = "staged";
  Status status_;
};

}  // namespace mr
