// A fake of libibverbs: cards, queue pairs and a wire in memory. It checks what a card checks, moves the bytes, and can
// fail the n-th call or any work request in every way.
//
//   fake_objects.h   cards, ports, queue pairs: what there is
//   fake_traffic.h   what cards do with work requests
//   fake_fabric.h    what tests say and ask: FakeFabric
//   fake_calls.h     the table of calls
//   fake_gates.h     calls that the kernel holds
//   fake_wire.h      the fabrics of several processes as one
#pragma once

#include "fake_calls.h"
