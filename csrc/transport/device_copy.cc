#include "device_copy.h"

#include <algorithm>

namespace mr {
namespace {

// Small enough that a drop or an early end does not wait for long, large enough that a queue of two keeps a device
// busy.
constexpr uint64_t kPiece = 16u << 20;
constexpr uint32_t kQueued = 2;

}  // namespace

void DeviceCopy::start(LinkHost& host, const OpRef& op, const std::shared_ptr<DeviceDomain>& domain, const char* lane,
                       Target target) {
  const std::shared_ptr<DeviceCopy> copy(new DeviceCopy(host, op, domain, lane, std::move(target)));
  copy->go_on();
}

Status DeviceCopy::may_go_on() const {
  if (const int kind = op_->stop_kind.load(); kind != 0) return fail(kind, "it was stopped");
  return target_.look();
}

void DeviceCopy::go_on() {
  if (going_on_) return;  // a copy that ended at once
  going_on_ = true;
  while (status_.ok() && under_way_ < kQueued && begun_ < op_->bytes()) {
    status_ = may_go_on();
    if (status_.ok()) copy_piece();
  }
  going_on_ = false;
  if (under_way_ == 0) end();
}

void DeviceCopy::copy_piece() {
  const uint64_t length = std::min(kPiece, op_->bytes() - begun_);
  DeviceDomain::Side here{op_->local, Cursor(op_->local_view, begun_)};
  DeviceDomain::Side there{target_.address, Cursor(op_->remote_view, begun_)};
  begun_ += length;
  ++pieces_;
  ++under_way_;
  const bool reads = op_->verb == Verb::read;
  domain_->copy(target_.device, reads ? here : there, reads ? there : here, length,
                [self = shared_from_this()](Status status) {
                  --self->under_way_;
                  if (self->status_.ok()) self->status_ = std::move(status);
                  self->go_on();
                });
}

void DeviceCopy::end() {
  if (status_.ok()) status_ = target_.look();
  target_.left();
  op_->lane = lane_;
  op_->chunks.store(pieces_, std::memory_order_relaxed);
  op_->rails.store(1, std::memory_order_relaxed);
  if (op_->verb == Verb::write)
    op_->remote_state = status_.ok() ? MR_WRITTEN : pieces_ > 0 ? MR_UNKNOWN : MR_NOT_WRITTEN;
  if (status_.ok()) host_.count(op_->verb == Verb::read ? "device_read_bytes" : "device_write_bytes", op_->bytes());
  host_.on_done(op_, std::move(status_));
}

}  // namespace mr
