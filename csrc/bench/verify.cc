#include "verify.h"

#include <algorithm>
#include <string>

#include "failure.h"

namespace mr::bench {

void verify_written(const uint8_t* region, uint64_t size, const TransferPlan& plan) {
  mr_view view = remote_view(plan);
  for (uint64_t i = 0; i < std::max<uint64_t>(plan.strided.pieces, 1); ++i) {
    uint64_t offset = i * view.stride[0];
    if (offset > size || view.run > size - offset) throw Failure("the check leaves the region");
    auto wrong = find_mismatch(region + offset, i * view.run, view.run, kWriteSeed);
    if (wrong) throw Failure("wrong byte at offset " + std::to_string(offset + *wrong));
  }
}

void verify_read(const Transfers& transfers, const TransferPlan& plan) {
  for (uint64_t slot = 0; slot < transfers.slots_used(); ++slot) verify_copy(transfers.slot(slot), plan);
}

void verify_copy(const uint8_t* local, const TransferPlan& plan) {
  mr_view view = remote_view(plan);
  for (uint64_t i = 0; i < std::max<uint64_t>(plan.strided.pieces, 1); ++i) {
    auto wrong = find_mismatch(local + i * view.run, i * view.stride[0], view.run, kReadSeed);
    if (wrong) throw Failure("the read delivered a wrong byte at offset " + std::to_string(i * view.run + *wrong));
  }
}

void verify_write(Session& session, size_t owner, const RemoteMemory& memory, const TransferPlan& plan) {
  Request request;
  request.ask = Ask::kCheck;
  request.id = memory.where().id;
  request.size = plan.size;
  request.pieces = plan.strided.pieces;
  request.run = plan.strided.run;
  session.ask(owner, request);
}

void verify_fetch_add(Session& session, const std::vector<RemoteMemory>& memory, uint64_t operations) {
  uint64_t first, total = 0;
  fill_pattern(reinterpret_cast<uint8_t*>(&first), 0, sizeof first, kReadSeed);
  for (size_t owner = 0; owner < memory.size(); ++owner) {
    Request request;
    request.ask = Ask::kWord;
    request.id = memory[owner].where().id;
    total += session.ask(owner, request).value - first;
  }
  if (total != operations)
    throw Failure(std::to_string(operations) + " fetch_adds of 1 added " + std::to_string(total));
}

}  // namespace mr::bench
