// What the fake of libibverbs consists of: the facts of cards and ports, which tests may change, and the objects that
// are made with them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "transport/verbs.h"

namespace mr::test::fake {

struct Port {
  ibv_port_state state = IBV_PORT_ACTIVE;
  uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  ibv_mtu mtu = IBV_MTU_4096;
  uint16_t lid = 0;
  std::vector<ibv_gid> gids;
};
struct Card {
  std::string name;
  ibv_device_attr attributes{};
  uint32_t max_inline = 64;
  bool on_demand_paging = false;
  Port port;
  bool dead = false;  // it can't be opened
};

// A work request as it was posted.
struct Request {
  uint64_t number;  // counted over the fabric, from 1
  ibv_wr_opcode opcode;
  uint32_t queue_pair;
  std::string card;
  std::vector<ibv_sge> pieces;
  uint64_t remote;
  uint32_t rkey;
  bool inlined, signalled;
};
// What becomes of a work request.
struct Fate {
  enum Kind { carry_out, fail_before, fail_after, lose, hold } kind = carry_out;
  ibv_wc_status status = IBV_WC_RETRY_EXC_ERR;
  uint32_t vendor_error = 0;
};

// A work request on its way to the other end.
struct Packet {
  uint32_t to = 0;  // queue pair
  uint32_t psn = 0;
  ibv_mtu mtu{};
  bool global = false;
  ibv_gid gid{};
  ibv_wr_opcode opcode{};
  uint64_t remote = 0, length = 0, operand[2] = {0, 0};
  uint32_t rkey = 0;
};

struct FakeDevice : ibv_device {
  Card facts;
};
struct FakeContext : ibv_context {
  FakeDevice* card;
  std::deque<ibv_async_event> events;
  int children = 0;
  bool lost = false;  // for good, also when there is such a card again
};
struct FakePd : ibv_pd {
  int children = 0;
};
struct FakeMr : ibv_mr {
  int access;
};
struct FakeCq;
struct FakeChannel : ibv_comp_channel {
  std::deque<FakeCq*> events;
  int children = 0;
};
struct FakeCq : ibv_cq {
  std::deque<ibv_wc> entries;
  size_t capacity;
  bool armed = false;
  int unacknowledged = 0, users = 0;
};
struct Posted {
  Request request;
  ibv_send_wr wr;
  std::vector<uint8_t> data;  // of an inlined request
  uint64_t sequence;
};
struct FakeQp : ibv_qp {
  ibv_qp_attr attributes{};
  ibv_qp_cap cap{};
  std::deque<Posted> queue;
  uint64_t posted = 0, retired = 0;    // retired: known to the program through polled completions
  std::map<uint64_t, uint64_t> until;  // wr_id of a completion: what it retires
  bool away = false;                   // its first request is being served by another process
};

inline FakeDevice* device_of(const ibv_context* context) { return static_cast<const FakeContext*>(context)->card; }
inline bool is_lost(const ibv_context* context) { return static_cast<const FakeContext*>(context)->lost; }

inline bool writes(ibv_wr_opcode opcode) { return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }
inline bool is_atomic(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
}

}  // namespace mr::test::fake
