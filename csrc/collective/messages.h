// Messages between two members: bytes with a tag, in the order in which they were sent. A message goes in parts through
// the receiver's channel from the sender, whose slots are used again and again; so a sender waits while they are full.
#pragma once

#include "group.h"

namespace mr {

constexpr int64_t kAnybody = -1;

// Returns when the bytes are in the receiver's memory or on their way to it: they may be changed then.
void send_message(Group& group, uint32_t to, int64_t tag, const uint8_t* data, uint64_t bytes, Time deadline);

// The next message with this tag from member `from`, or from anybody; returns from whom. Those with other tags that
// come before it are kept for who asks for them. MR_OUT_OF_BOUNDS where it has not `bytes` bytes; it is gone then.
uint32_t receive_message(Group& group, int64_t from, int64_t tag, uint8_t* out, uint64_t bytes, Time deadline);

}  // namespace mr
