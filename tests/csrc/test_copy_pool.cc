// The threads that carry out large copies.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "transport/copy_pool.h"
#include "transport/summed_copy.h"

using namespace mr;

namespace {

constexpr uint64_t kMiB = 1u << 20, kStep = 4096;
const Op none;

struct CountingJob : CopyJob {
  explicit CountingJob(uint64_t bytes) : seen(bytes / kStep + 1) {}
  Status begin() override { return begin_status; }
  Status copy(uint64_t begin, uint64_t length) override {
    in_order = in_order && begin == next.exchange(begin + length);
    for (uint64_t i = begin; i < begin + length; i += kStep) seen[i / kStep] += 1;
    return begin >= fails_from ? fail(MR_ACCESS_DENIED, "as told") : Status{};
  }
  void end(Status status, uint32_t num_chunks, uint32_t num_threads) override {
    kind = status.kind;
    chunks = num_chunks;
    threads = num_threads;
    ends += 1;
    ends.notify_all();
  }
  Status begin_status;
  uint64_t fails_from = ~0ull;
  std::vector<std::atomic<uint8_t>> seen;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> in_order{true};
  std::atomic<int> ends{0};
  int kind = -2;
  uint32_t chunks = 0, threads = 0;
};

}  // namespace

TEST(the_pool_does_each_chunk_once_and_ends_once) {
  const auto pool = CopyPool::of_process();
  CHECK(pool == CopyPool::of_process());
  for (uint32_t threads : {1u, 2u, 4u})
    for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, 4 * kMiB, 40 * kMiB + 5})
      for (bool help : {false, true}) {
        const auto job = std::make_shared<CountingJob>(bytes);
        const auto task = pool->submit(job, bytes, threads);
        if (help) task->help(none, Clock::now());  // joins and leaves at once
        if (help) task->help(none, Time::max());
        job->ends.wait(0);
        CHECK_EQ(job->kind, MR_OK);
        CHECK(job->threads <= threads);
        CHECK(threads > 1 || job->in_order);
        for (uint64_t i = 0; i < bytes; i += kStep) CHECK_EQ(job->seen[i / kStep], 1);
        task->help(none, Time::max());
        CHECK_EQ(job->ends, 1);
      }
}

TEST(threads_that_take_turns_count_once) {
  const auto pool = CopyPool::of_process();
  for (int round = 0; round < 20; ++round) {
    const auto job = std::make_shared<CountingJob>(64 * kMiB);
    const auto task = pool->submit(job, 64 * kMiB, 1);
    while (job->ends == 0) task->help(none, Clock::now() + std::chrono::microseconds(20));  // comes and goes
    CHECK_EQ(job->threads, 1u);
    CHECK(job->in_order);
  }
}

TEST(the_pool_ends_a_job_at_its_first_failure) {
  const auto pool = CopyPool::of_process();
  const auto late = std::make_shared<CountingJob>(64 * kMiB);
  late->fails_from = 8 * kMiB;
  pool->submit(late, 64 * kMiB, 2);
  late->ends.wait(0);
  CHECK_EQ(late->kind, MR_ACCESS_DENIED);
  CHECK(late->chunks < 8);
  const auto early = std::make_shared<CountingJob>(kMiB);
  early->begin_status = fail(MR_CANCELLED, "as told");
  pool->submit(early, kMiB, 2);
  early->ends.wait(0);
  CHECK_EQ(early->kind, MR_CANCELLED);
  CHECK_EQ(early->chunks, 0);
  CHECK_EQ(early->seen[0], 0);
}

TEST(copies_make_the_same_sums_on_any_number_of_threads) {
  constexpr uint64_t kBytes = 5 * kMiB + 12345, kBlocks = 6;
  std::vector<uint8_t> from(kBytes), to(kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) from[i] = static_cast<uint8_t>(i * i >> 7);
  std::vector<uint64_t> first(1 + kBlocks), sums(1 + kBlocks);
  copy_with_sums(nullptr, from.data(), kBytes, 1, BlockSums({0, kBytes, kMiB, first.data()}));
  CHECK_EQ(first[0], kBytes);
  for (uint32_t threads : {1u, 2u, 4u}) {
    std::fill(to.begin(), to.end(), 0);
    copy_with_sums(to.data(), from.data(), kBytes, threads, BlockSums({0, kBytes, kMiB, sums.data()}));
    CHECK(to == from && sums == first);
  }
  copy_with_sums(to.data(), from.data(), 0, 2, BlockSums({0, 0, kMiB, sums.data()}));
  CHECK_EQ(sums[0], 0u);
}

#ifndef __SANITIZE_THREAD__  // which forbids threads in a child of a process with threads
TEST(a_forked_child_has_a_pool_of_its_own) {
  const auto pool = CopyPool::of_process();
  const auto warm = std::make_shared<CountingJob>(kMiB);
  pool->submit(warm, kMiB, 2);
  warm->ends.wait(0);
  const int pid = ::fork();
  if (pid == 0) {
    const auto own = CopyPool::of_process();
    const auto job = std::make_shared<CountingJob>(kMiB);
    own->submit(job, kMiB, 2);
    job->ends.wait(0);
    ::_exit(own != pool && job->kind == MR_OK ? 0 : 1);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  CHECK_EQ(status, 0);
}
#endif

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
