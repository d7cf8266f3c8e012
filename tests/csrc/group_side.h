// A group of engines in this process, one thread a member, through the C face.
#pragma once

#include <functional>
#include <thread>

#include "engine_side.h"

namespace {

struct GroupMember {
  GroupMember(uint32_t rank, uint32_t size, uint64_t step_bytes, void (*change)(mr_options&))
      : engine(("rank" + std::to_string(rank)).c_str(), change), rank(rank), size(size) {
    const mr_group_options options{rank, size, step_bytes, step_bytes, 0, 100, nullptr};
    mr_error error{};
    if (mr_group_create(engine.handle, &options, &group, &error) != MR_OK) throw std::runtime_error(error.message);
  }
  ~GroupMember() {
    mr_group_close(group);
    mr_group_free(group);
  }
  GroupMember(const GroupMember&) = delete;

  std::vector<uint8_t> descriptor() const {
    std::vector<uint8_t> out(mr_group_descriptor(group, nullptr, 0));
    mr_group_descriptor(group, out.data(), out.size());
    return out;
  }

  struct Memory {
    void* at;
    uint64_t bytes;
  };
  int run(uint32_t kind, const std::vector<Memory>& inputs, const std::vector<Memory>& outputs, uint32_t root = 0,
          uint32_t dtype = 0, uint32_t reduction = 0, double timeout = 30) {
    const uint32_t way = mr_collective_has(kind, algorithm) != 0 ? algorithm : uint32_t{MR_DIRECT};
    std::vector<const void*> in;
    std::vector<void*> out;
    std::vector<uint64_t> in_bytes, out_bytes;
    for (const Memory& each : inputs) in.push_back(each.at), in_bytes.push_back(each.bytes);
    for (const Memory& each : outputs) out.push_back(each.at), out_bytes.push_back(each.bytes);
    const mr_collective call{kind,
                             dtype,
                             reduction,
                             root,
                             uint32_t(in.size()),
                             uint32_t(out.size()),
                             in.data(),
                             in_bytes.data(),
                             out.data(),
                             out_bytes.data(),
                             0,
                             way};
    return mr_group_run(group, &call, timeout, &error);
  }
  int send(uint32_t to, int64_t tag, const std::vector<uint8_t>& data, double timeout = 30) {
    return mr_group_send(group, to, tag, data.data(), data.size(), timeout, &error);
  }
  int receive(int64_t from, int64_t tag, std::vector<uint8_t>& data, double timeout = 30) {
    return mr_group_receive(group, from, tag, data.data(), data.size(), timeout, &sender, &error);
  }
  int64_t failed_rank() const {
    int64_t out = -1;
    mr_group_failure(group, &out, nullptr);
    return out;
  }

  Engine engine;
  mr_group* group = nullptr;
  uint32_t algorithm = MR_DIRECT;  // of collectives that have it
  uint32_t rank, size, sender = 0;
  mr_error error{};
};

struct GroupOf {
  explicit GroupOf(uint32_t size, uint64_t step_bytes, void (*change)(mr_options&) = nullptr) {
    for (uint32_t rank = 0; rank < size; ++rank)
      members.push_back(std::make_unique<GroupMember>(rank, size, step_bytes, change));
    std::vector<std::vector<uint8_t>> descriptors;
    for (const auto& member : members) descriptors.push_back(member->descriptor());
    std::vector<const uint8_t*> at;
    std::vector<uint64_t> lengths;
    for (const auto& each : descriptors) at.push_back(each.data()), lengths.push_back(each.size());
    each([&](GroupMember& member) {
      if (mr_group_join(member.group, at.data(), lengths.data(), 30, &member.error) != MR_OK)
        throw std::runtime_error(member.error.message);
    });
  }

  // All members at once; the first exception comes out.
  void each(const std::function<void(GroupMember&)>& body) {
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> failures(members.size());
    for (const auto& member : members)
      threads.emplace_back([&, at = member.get()] {
        try {
          body(*at);
        } catch (...) {
          failures[at->rank] = std::current_exception();
        }
      });
    for (auto& thread : threads) thread.join();
    for (const auto& failure : failures)
      if (failure) std::rethrow_exception(failure);
  }

  std::vector<std::unique_ptr<GroupMember>> members;
};

}  // namespace
