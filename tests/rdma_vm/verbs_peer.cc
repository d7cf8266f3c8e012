// One end of a connection that is made of the verbs lane's own queue pair and memory region, led by lines on standard
// input; whoever leads it has the other end (guest/test_oracle.py: pyverbs). Memory keeps its content: byte i is i %
// 251.
//
//   verbs_peer DEVICE GID_INDEX SIZE      prints {"number": .., "psn": .., "gid": .., "address": .., "key": ..}
//   connect NUMBER PSN GID MTU            to the other end; GID as 32 hexadecimal digits
//   read | write OFFSET LENGTH REMOTE KEY between our memory at OFFSET and theirs
//   fetch_add OFFSET REMOTE KEY ADD       the old value comes to OFFSET
//   compare_and_swap OFFSET REMOTE KEY COMPARE SWAP
//   fill OFFSET LENGTH BYTE
//   show OFFSET LENGTH                    our memory in hexadecimal
//   deregister                            ends access to our memory
// Each is answered by a line: what was asked for or "done", or "failed: " and why.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "transport/queue_pair.h"
#include "transport/verbs.h"

namespace mr {
namespace {

constexpr int kRemoteAccess = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

std::string hex(const uint8_t* bytes, size_t length) {
  std::string out;
  for (size_t i = 0; i < length; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", bytes[i]);
    out += digits;
  }
  return out;
}

ibv_gid gid_of(const std::string& digits) {
  ibv_gid gid{};
  for (size_t i = 0; i < sizeof gid.raw && 2 * i + 2 <= digits.size(); ++i)
    gid.raw[i] = static_cast<uint8_t>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
  return gid;
}

const Verbs& library() {
  std::string why;
  const Verbs* verbs = Verbs::installed(&why);
  if (verbs == nullptr) throw Error(MR_CONFIG, why);
  return *verbs;
}

class VerbsPeer : public QueuePair::Sink {
 public:
  VerbsPeer(const std::string& device, uint8_t gid_index, size_t size)
      : context_(VerbsContext::open(library(), device)),
        domain_(std::make_shared<ProtectionDomain>(context_)),
        memory_(size),
        region_(std::make_unique<MemoryRegion>(domain_, memory_.data(), size, kRemoteAccess | IBV_ACCESS_LOCAL_WRITE)) {
    for (size_t i = 0; i < size; ++i) memory_[i] = static_cast<uint8_t>(i % 251);
    path_.gid_index = gid_index;
    path_.global = true;
  }

  // The queue pair needs to know its sink as a weak reference.
  static std::shared_ptr<VerbsPeer> make(const std::string& device, uint8_t gid_index, size_t size) {
    auto peer = std::make_shared<VerbsPeer>(device, gid_index, size);
    peer->pair_ = std::make_shared<QueuePair>(peer->domain_, std::make_shared<CompletionChannel>(peer->context_), 1,
                                              peer, QueuePairLimits{}, peer->path_, kRemoteAccess);
    return peer;
  }

  std::string introduction() const {
    ibv_gid gid{};
    if (context_->verbs().query_gid(context_->get(), path_.port, path_.gid_index, &gid) != 0)
      throw Error(MR_CONFIG, "ibv_query_gid", errno);
    const QueuePairEnd ours = pair_->ours();
    std::ostringstream out;
    out << "{\"number\": " << ours.number << ", \"psn\": " << ours.psn << ", \"gid\": \""
        << hex(gid.raw, sizeof gid.raw) << "\", \"address\": " << reinterpret_cast<uint64_t>(memory_.data())
        << ", \"key\": " << region_->rkey() << "}";
    return out.str();
  }

  std::string carry_out(std::istringstream asked) {
    std::string verb, gid;
    asked >> verb;
    uint64_t offset = 0, length = 8, remote = 0, a = 0, b = 0;
    uint32_t key = 0;
    if (verb == "connect") {
      QueuePairEnd theirs;
      asked >> theirs.number >> theirs.psn >> gid >> path_.mtu;
      path_.gid = gid_of(gid);
      pair_->connect(path_, theirs);
    } else if (verb == "read" || verb == "write") {
      asked >> offset >> length >> remote >> key;
      return post(verb == "read" ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, offset, length, remote, key, 0, 0);
    } else if (verb == "fetch_add" || verb == "compare_and_swap") {
      asked >> offset >> remote >> key >> a >> b;
      const auto opcode = verb == "fetch_add" ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
      return post(opcode, offset, length, remote, key, a, b);
    } else if (verb == "fill") {
      asked >> offset >> length >> a;
      std::memset(at(offset, length), static_cast<int>(a), length);
    } else if (verb == "show") {
      asked >> offset >> length;
      return hex(at(offset, length), length);
    } else if (verb == "deregister") {
      if (const int error = region_->destroy(); error != 0) throw Error(MR_REGISTRATION, "ibv_dereg_mr", error);
    } else {
      throw Error(MR_CONFIG, "no such order: " + verb);
    }
    return "done";
  }

  void on_done(QueuePair&, std::span<Work> done) override { num_done_ += done.size(); }
  void on_broken(QueuePair&) override {}
  void on_quiet(QueuePair&) override {}

 private:
  uint8_t* at(uint64_t offset, uint64_t length) {
    if (offset > memory_.size() || length > memory_.size() - offset) throw Error(MR_OUT_OF_BOUNDS, "not our memory");
    return memory_.data() + offset;
  }

  std::string post(ibv_wr_opcode opcode, uint64_t offset, uint64_t length, uint64_t remote, uint32_t key, uint64_t a,
                   uint64_t b) {
    const ibv_sge piece{reinterpret_cast<uint64_t>(at(offset, length)), static_cast<uint32_t>(length), region_->lkey()};
    {
      QueuePair::Batch batch(*pair_, true);
      if (opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_RDMA_WRITE)
        batch.add({}, opcode, {&piece, 1}, remote, key);
      else
        batch.add_atomic({}, opcode, piece, remote, key, a, b);
    }
    const size_t wanted = num_done_ + 1;
    while (num_done_ < wanted && !pair_->is_broken()) pair_->drain(true);
    return num_done_ == wanted ? "done" : "failed: " + std::string(completion_text(pair_->failure().status));
  }

  const VerbsContextRef context_;
  const ProtectionDomainRef domain_;
  std::vector<uint8_t> memory_;
  std::unique_ptr<MemoryRegion> region_;
  QueuePairPath path_;
  QueuePairRef pair_;
  size_t num_done_ = 0;
};

void lead(const std::string& device, int gid_index, size_t size) {
  const auto peer = VerbsPeer::make(device, static_cast<uint8_t>(gid_index), size);
  std::cout << peer->introduction() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << peer->carry_out(std::istringstream(line)) << std::endl;
    } catch (const Error& error) {
      std::cout << "failed: " << error.what() << std::endl;
    }
  }
}

}  // namespace
}  // namespace mr

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: verbs_peer DEVICE GID_INDEX SIZE\n", stderr);
    return 2;
  }
  try {
    mr::lead(argv[1], std::stoi(argv[2]), std::stoul(argv[3]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "verbs_peer: %s\n", error.what());
    return 1;
  }
}
