#include "summed_copy.h"

#include <semaphore>

#include "../memory/strided_copy.h"

namespace mr {
namespace {

constexpr uint64_t kOnOneThread = 1u << 20;  // handing less than this to others takes longer than doing it
constexpr uint64_t kChunk = 512u << 10;

class SummedCopy final : public CopyJob {
 public:
  SummedCopy(uint8_t* to, const uint8_t* from, uint64_t length, const BlockSums& sums)
      : to_(to), from_(from), streaming_(length >= kStreamingPart), sums_(sums) {}

  Status begin() override { return {}; }
  Status copy(uint64_t begin, uint64_t length) override {
    if (to_ == nullptr)
      sums_.add(from_ + begin, begin, length);
    else
      sums_.copy(to_ + begin, from_ + begin, begin, length, streaming_);
    return {};
  }
  void end(Status, uint32_t, uint32_t) override { ended_.release(); }
  void wait() { ended_.acquire(); }

 private:
  uint8_t* const to_;
  const uint8_t* const from_;
  const bool streaming_;
  const BlockSums sums_;
  std::binary_semaphore ended_{0};
};

}  // namespace

void check_block_sums(const mr_block_sums& sums, uint64_t length) {
  if (sums.block_bytes == 0 || sums.block_bytes % 8 != 0 || sums.first % 8 != 0 || sums.first > sums.total ||
      length > sums.total - sums.first || (length % 8 != 0 && length != sums.total - sums.first))
    throw Error(MR_CONFIG, "argument sums: " + std::to_string(length) + " bytes from " + std::to_string(sums.first) +
                               " of " + std::to_string(sums.total) + " in blocks of " +
                               std::to_string(sums.block_bytes) + " do not begin and end between words of 8 bytes");
}

void copy_with_sums(uint8_t* to, const uint8_t* from, uint64_t length, uint32_t threads, const BlockSums& sums) {
  sums.clear(length);
  if (length == 0) return;
  const auto job = std::make_shared<SummedCopy>(to, from, length, sums);
  if (threads <= 1 || length <= kOnOneThread) {
    (void)job->copy(0, length);
    return;
  }
  const auto pool = CopyPool::of_process();
  const auto task = pool->submit(job, length, threads, kChunk);
  job->wait();
}

}  // namespace mr
