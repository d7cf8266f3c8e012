// The groups of engine.h, in terms of collective/.
#include <utility>

#include "collective/messages.h"
#include "collective/patterns.h"
#include "engine_face.h"

using namespace mr;

struct mr_group {
  std::shared_ptr<Node> node;
  std::shared_ptr<Group> group;
};

namespace {

// Shared memory for the arena, with the region through which others reach it.
RegionRef make_arena(mr_engine& engine, const GroupOptions& options) {
  engine.node->check_usable();
  const uint64_t bytes = Group::geometry_of(options).bytes();
  void* const memory = engine.node->regions().shared_alloc(bytes);
  try {
    return make_region(engine, memory, bytes, MR_READ | MR_WRITE);
  } catch (const Error&) {
    engine.node->shared_free(memory);
    throw;
  }
}

// Its arena is shared memory: a forked child would speak for its parent.
Group& ours(mr_group* group) {
  if (!group->node->is_ours()) group->node->check_usable();
  return *group->group;
}

Time deadline_after(double timeout) {
  demand_number(timeout);
  return deadline_of(Clock::now(), timeout);
}

}  // namespace

extern "C" {

int mr_group_create(mr_engine* engine, const mr_group_options* raw, mr_group** group, mr_error* error) {
  return guarded(error, [&] {
    const GroupOptions options = Group::checked(*raw);
    *group = new mr_group{engine->node, Group::create(engine->node, options, make_arena(*engine, options))};
  });
}

uint64_t mr_group_descriptor(mr_group* group, uint8_t* out, uint64_t capacity) {
  return copy_out(handle_of(*group->node, *group->group->memory()).encode(), out, capacity);
}

int mr_group_join(mr_group* group, const uint8_t* const* descriptors, const uint64_t* lengths, double timeout,
                  mr_error* error) {
  return guarded(error, [&] {
    group->node->check_usable();
    const Time deadline = deadline_after(timeout);
    std::vector<RemoteRegion> regions;
    for (uint32_t rank = 0; rank < group->group->size(); ++rank)
      regions.push_back(RemoteRegion::decode({descriptors[rank], lengths[rank]}));
    group->group->join(regions, deadline);
  });
}

int mr_collective_has(uint32_t kind, uint32_t algorithm) { return has_algorithm(kind, algorithm) ? 1 : 0; }

int mr_group_run(mr_group* group, const mr_collective* collective, double timeout, mr_error* error) {
  return guarded(error, [&] {
    const Time deadline = deadline_after(timeout);
    check_call(ours(group), *collective);
    run_collective(*group->group, *collective, deadline);
  });
}

int mr_group_send(mr_group* group, uint32_t to, int64_t tag, const void* data, uint64_t bytes, double timeout,
                  mr_error* error) {
  return guarded(error, [&] {
    send_message(ours(group), to, tag, static_cast<const uint8_t*>(data), bytes, deadline_after(timeout));
  });
}

int mr_group_receive(mr_group* group, int64_t from, int64_t tag, void* data, uint64_t bytes, double timeout,
                     uint32_t* sender, mr_error* error) {
  return guarded(error, [&] {
    const uint32_t got =
        receive_message(ours(group), from, tag, static_cast<uint8_t*>(data), bytes, deadline_after(timeout));
    if (sender != nullptr) *sender = got;
  });
}

int mr_group_abort(mr_group* group, const char* reason, mr_error* error) {
  return guarded(error,
                 [&] { ours(group).fail(group->group->rank(), MR_CANCELLED, reason == nullptr ? "aborted" : reason); });
}

void mr_group_lack(mr_group* group, uint32_t rank) {
  if (group->node->is_ours() && rank < group->group->size()) group->group->lack(group->group->member(rank));
}

int mr_group_failure(mr_group* group, int64_t* rank, mr_error* error) {
  const Status failure = group->group->failure();
  if (rank != nullptr) *rank = group->group->failed_rank();
  return failure.ok() ? MR_OK : tell(failure, error);
}

int mr_group_is_lost(mr_group* group, uint32_t rank) {
  if (rank >= group->group->size()) return 0;
  const Member& member = group->group->member(rank);
  return member.lost || group->group->has_left(member) ? 1 : 0;
}

void mr_group_close(mr_group* group) {
  if (group->node->is_ours()) group->group->close();
}

void mr_group_free(mr_group* group) {
  if (group != nullptr && group->node->is_ours()) delete group;
}

}  // extern "C"
