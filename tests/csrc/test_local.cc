// The local lane: operations of a process on its own regions.
#include <array>

#include "check.h"
#include "kernels/kernels.h"
#include "pattern.h"
#include "shm_side.h"

using namespace mr;
using namespace mr::test;

TEST(local_reads_writes_atomics_and_maps) {
  Side side(Fd(), 0, options(true, true), make_local);
  const uint64_t size = 20 * kMiB;
  for (bool shared : {false, true}) {
    Memory memory(side, size, shared);
    const RegionRef region = side.regions().create(memory.base, size, kBoth);
    const RemoteRegion remote = side.describe(*region);
    paint(memory.base, size, 1);
    Bytes local(size);
    for (uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{4097}, kMiB + 1, size}) {
      const OpRef op = side.submit(side.read(remote, 0, local.data(), length));
      CHECK_EQ(Side::wait(op), MR_OK);
      CHECK_EQ(std::string(op->lane), "local");
      CHECK(painted(local.data(), length, 1));
    }
    paint(local.data(), size, 2);
    CHECK_EQ(side.run(side.write(remote, 0, local.data(), size)), MR_OK);
    CHECK(painted(memory.base, size, 2));
    const uint64_t old = std::atomic_ref(*reinterpret_cast<uint64_t*>(memory.base)).load();
    const OpRef add = side.submit(side.atomic(Verb::fetch_add, remote, 0, 3));
    CHECK_EQ(Side::wait(add), MR_OK);
    CHECK_EQ(add->value, old);
    const OpRef swap = side.submit(side.atomic(Verb::compare_and_swap, remote, 0, old + 3, 1));
    CHECK_EQ(swap->value, old + 3);
    CHECK_EQ(*reinterpret_cast<uint64_t*>(memory.base), 1);
    CHECK_EQ(side.run(side.atomic(Verb::fetch_add, remote, 4, 3)), MR_OUT_OF_BOUNDS);

    const OpRef map = side.start(side.op(Verb::map, remote));
    CHECK_EQ(Side::wait(map), shared ? int{MR_OK} : kUnavailable);
    if (shared) CHECK(map->mapping->address() + remote.shared_offset == memory.base);

    RemoteRegion bad = remote;
    bad.name.key.word[0] ^= 1;
    CHECK_EQ(side.run(side.read(bad, 0, local.data(), 8)), MR_ACCESS_DENIED);
    CHECK_EQ(side.run(side.read(remote, size - 4, local.data(), 8)), MR_OUT_OF_BOUNDS);
    CHECK(side.drop(remote.name.id));
    CHECK_EQ(side.run(side.read(remote, 0, local.data(), 8)), MR_ACCESS_DENIED);
    CHECK_EQ(side.run(side.read(remote, 0, local.data(), size)), MR_ACCESS_DENIED);
  }
}

TEST(overlapping_ranges_of_one_process_are_moved_like_memmove) {
  Side side(Fd(), 0, options(true, true), make_local);
  const uint64_t size = 40 * kMiB;
  Bytes memory(size), wanted(size);
  const RemoteRegion remote = side.describe(*side.regions().create(memory.data(), size, kBoth));
  for (auto [from, to, length] : {std::array<uint64_t, 3>{0, 5, 1000},
                                  {5, 0, 1000},
                                  {0, 12345, 30 * kMiB},
                                  {12345, 0, 30 * kMiB},
                                  {0, 0, 30 * kMiB},
                                  {3, 20 * kMiB, 19 * kMiB}}) {
    paint(memory.data(), size, from);
    wanted = memory;
    std::memmove(wanted.data() + to, wanted.data() + from, length);
    CHECK_EQ(side.run(side.read(remote, from, memory.data() + to, length)), MR_OK);
    CHECK(memory == wanted);
  }
}

TEST(threads_that_share_a_read_share_its_sums) {
  Side side(Fd(), 0, options(true, true, 4), make_local);
  constexpr uint64_t kSize = 20 * kMiB + 13, kBlock = 3 * kMiB / 2, kFirst = kMiB;  // a chunk ends inside of a block
  Bytes memory(kSize);
  paint(memory.data(), kSize, 1);
  const RemoteRegion remote = side.describe(*side.regions().create(memory.data(), kSize, kBoth));
  for (const uint64_t shift : {0, 3}) {
    Bytes local(kSize + shift);
    std::vector<uint64_t> sums(1 + (kSize + kBlock - 1) / kBlock, 77);
    const OpRef op = side.read(remote, kFirst, local.data() + shift, kSize - kFirst);
    op->block_sums = BlockSums(mr_block_sums{kFirst, kSize, kBlock, sums.data()});
    CHECK_EQ(Side::wait(side.submit(op)), MR_OK);
    CHECK_EQ(sums[0], kSize - kFirst);
    for (uint64_t block = 0; block * kBlock < kSize; ++block) {
      const uint64_t begin = std::max(block * kBlock, kFirst), end = std::min((block + 1) * kBlock, kSize);
      const uint64_t start = begin == block * kBlock ? kernels::checksum_start(end - begin) : 0;
      CHECK_EQ(sums[1 + block],
               start + kernels::checksum(memory.data() + begin, end - begin, (begin - block * kBlock) / 8));
    }
  }
}

TEST(a_local_drop_waits_for_a_local_copy) {
  Side side(Fd(), 0, options(true, true, 1), make_local);
  const uint64_t size = kLong;
  Bytes memory(size, 1), local(size);
  int denied = 0;
  for (int round = 0; round < 3 || (denied == 0 && round < 500); ++round) {
    const RemoteRegion remote = side.describe(*side.regions().create(memory.data(), size, kBoth));
    const OpRef op = side.start(side.write(remote, 0, local.data(), size));
    while (!side.link().touches(remote.name.id) && !op->done()) std::this_thread::yield();
    CHECK(side.drop(remote.name.id));
    std::memset(memory.data(), 0xEE, size);
    const int kind = Side::wait(op);
    CHECK(kind == MR_OK || kind == MR_ACCESS_DENIED);
    denied += kind == MR_ACCESS_DENIED;
    CHECK(all(memory.data(), size, 0xEE));
  }
  CHECK(denied > 0);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
