// Did the right bytes arrive? Each function throws Failure where they did not.
#pragma once

#include <cstdint>
#include <vector>

#include "session.h"
#include "transfers.h"

namespace mr::bench {

// What the plan writes into a region of `size` bytes.
void verify_written(const uint8_t* region, uint64_t size, const TransferPlan& plan);
// Every slot of local memory that was used.
void verify_read(const Transfers& transfers, const TransferPlan& plan);
void verify_copy(const uint8_t* local, const TransferPlan& plan);  // of what the plan reads
void verify_write(Session& session, size_t owner, const RemoteMemory& memory, const TransferPlan& plan);
void verify_fetch_add(Session& session, const std::vector<RemoteMemory>& memory, uint64_t operations);

}  // namespace mr::bench
