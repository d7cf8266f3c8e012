// One read or write that a device carries out by itself, in pieces: both ends are memory that it reaches.
#pragma once

#include "device_domain.h"
#include "lane.h"

namespace mr {

class DeviceCopy : public std::enable_shared_from_this<DeviceCopy> {
 public:
  struct Target {
    uint8_t* address = nullptr;    // of the region
    int device = -1;               // that copies
    std::function<Status()> look;  // before each piece and after the last: may it go on?
    std::function<void()> left;    // no copy is under way any more; before the end is told
  };

  // On the domain's thread. Ends in one on_done.
  static void start(LinkHost& host, const OpRef& op, const std::shared_ptr<DeviceDomain>& domain, const char* lane,
                    Target target);

 private:
  DeviceCopy(LinkHost& host, const OpRef& op, std::shared_ptr<DeviceDomain> domain, const char* lane, Target target)
      : host_(host), op_(op), domain_(std::move(domain)), lane_(lane), target_(std::move(target)) {}

  void go_on();
  void copy_piece();
  Status may_go_on() const;
  void end();

  LinkHost& host_;
  const OpRef op_;
  const std::shared_ptr<DeviceDomain> domain_;
  const char* const lane_;
  Target target_;
  uint64_t begun_ = 0;  // bytes
  uint32_t pieces_ = 0, under_way_ = 0;
  bool going_on_ = false;
  Status status_;
};

}  // namespace mr
