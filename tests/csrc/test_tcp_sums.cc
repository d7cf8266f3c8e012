// Checksums of a read over the tcp lane, made as its bytes come.
#include <list>
#include <numeric>

#include "check.h"
#include "kernels/kernels.h"
#include "tcp_side.h"

using namespace mr;
using mr::test::Proxy;
using mr::test::TcpPair;
using mr::test::TcpSide;

namespace {

constexpr uint64_t kMiB = 1u << 20,
                   kBlock = 3 * kMiB / 2;  // chunks end inside of a block, and blocks inside of a chunk

Bytes counted(uint64_t size) {
  Bytes out(size);
  std::iota(out.begin(), out.end(), uint8_t{3});
  for (uint64_t i = 0; i < size; i += 251) out[i] = static_cast<uint8_t>(i / 251);
  return out;
}

// A read of `owned` from `first` to its end.
struct SummedRead {
  SummedRead(TcpPair& pair, const Bytes& owned, uint64_t first) : first(first), here(owned.size() - first) {
    const uint64_t blocks = (owned.size() + kBlock - 1) / kBlock - first / kBlock;
    sums.assign(1 + blocks, 77);
    const BlockSums wanted({first, owned.size(), kBlock, sums.data()});
    const RemoteRegion region = pair.owner.share(const_cast<uint8_t*>(owned.data()), owned.size());
    op = pair.user.read(region, first, here.data(), here.size(), wanted);
  }

  bool are_made() const { return sums[0] == here.size(); }
  bool are_right(const Bytes& owned) const {
    for (uint64_t i = 1; i < sums.size(); ++i) {
      const uint64_t block = (first / kBlock + i - 1) * kBlock, block_end = std::min(block + kBlock, owned.size());
      const uint64_t begin = std::max(block, first);
      const uint64_t start = begin == block ? kernels::checksum_start(block_end - block) : 0;
      if (sums[i] != start + kernels::checksum(owned.data() + begin, block_end - begin, (begin - block) / 8))
        return false;
    }
    return true;
  }

  const uint64_t first;
  Bytes here;
  std::vector<uint64_t> sums;
  OpRef op;
};

TEST(sums_of_all_that_comes) {
  for (const bool tls : {false, true}) {
    static const Bytes secret(32, 7);
    mr_options options = Options::defaults();
    options.bulk_tls = tls;
    options.secret = secret.data();
    options.secret_len = secret.size();
    std::list<Bytes> memory;  // outlives the owner, which may be sending from it until it is closed
    TcpPair pair(options);
    pair.begin();
    for (const uint64_t size : {uint64_t{1}, uint64_t{9}, uint64_t{4099}, kMiB, 13 * kMiB + 5})
      for (const uint64_t first : {uint64_t{0}, size / 16 * 8}) {
        const Bytes& owned = memory.emplace_back(counted(size));
        const SummedRead read(pair, owned, first);
        CHECK_EQ(TcpSide::wait(read.op), MR_OK);
        CHECK(read.are_made() && read.are_right(owned));
      }
  }
}

TEST(sums_of_many_reads_at_once) {
  const Bytes owned = counted(300'000);
  TcpPair pair;
  pair.begin();
  std::list<SummedRead> reads;
  for (uint64_t i = 0; i < 40; ++i) reads.emplace_back(pair, owned, i * 7000);
  for (const SummedRead& read : reads) {
    CHECK_EQ(TcpSide::wait(read.op), MR_OK);
    CHECK(read.are_made() && read.are_right(owned));
  }
}

TEST(what_came_twice_has_no_sums) {
  const Bytes owned = counted(32 * kMiB);
  TcpPair pair;
  pair.begin();
  pair.proxy.allow(Proxy::down, 6 * kMiB);  // half of a part
  const SummedRead read(pair, owned, 0);
  CHECK(pair.proxy.await_stall(Proxy::down));
  pair.proxy.cut();
  pair.proxy.allow(Proxy::down, Proxy::kUnlimited);
  CHECK_EQ(TcpSide::wait(read.op), MR_OK);
  CHECK(read.here == owned);
  CHECK(read.op->retries >= 1 && !read.are_made());
}

TEST(a_cancelled_read_never_touches_its_sums_again) {
  const Bytes owned = counted(32 * kMiB);
  TcpPair pair;
  pair.begin();
  pair.proxy.allow(Proxy::down, 3 * kMiB + 17);
  SummedRead read(pair, owned, 0);
  CHECK(pair.proxy.await_stall(Proxy::down));
  pair.user.stop(read.op, MR_CANCELLED);
  CHECK_EQ(read.op->status().kind, MR_CANCELLED);
  const std::vector<uint64_t> mark(read.sums.size(), 5);
  read.sums = mark;
  pair.proxy.allow(Proxy::down, Proxy::kUnlimited);
  const SummedRead next(pair, owned, 0);  // behind the rest of that one
  CHECK_EQ(TcpSide::wait(next.op), MR_OK);
  CHECK(next.are_made() && next.are_right(owned));
  CHECK(read.sums == mark);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
