// The verbs lane between two engines on the fake fabric: bytes, views, notifications, atomics, drops.
#include <algorithm>

#include "check.h"
#include "pattern.h"
#include "verbs_side.h"
#include "view_copy.h"

using namespace mr;
using mr::test::FakeFabric;
using mr::test::VerbsPair;
using mr::test::VerbsSide;

namespace {

constexpr uint64_t kMiB = 1u << 20;

Bytes painted_bytes(uint64_t length, uint64_t seed) {
  Bytes out(length);
  mr::test::paint(out.data(), length, seed);
  return out;
}

}  // namespace

TEST(reads_and_writes_of_every_size) {
  VerbsPair pair;
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{64}, uint64_t{221}, uint64_t{4095}, uint64_t{4096},
        uint64_t{4097}, uint64_t{65536}, uint64_t{65537}, kMiB - 1, kMiB, kMiB + 1, 9 * kMiB + 5}) {
    Bytes owned = painted_bytes(size + 5, size), here(size + 2, 0xee);
    const auto region = pair.owner->share(owned.data(), owned.size());
    const auto remote = pair.owner->remote(region);
    for (int again = 0; again < 2; ++again) {
      std::fill(here.begin(), here.end(), 0xee);
      const OpRef read = pair.user->read(remote, 3, here.data() + 1, size);
      CHECK_EQ(VerbsSide::wait(read), MR_OK);
      CHECK_EQ(std::string(read->lane), "verbs");
      CHECK(std::equal(here.begin() + 1, here.end() - 1, owned.begin() + 3));
      CHECK_EQ(here.front(), 0xee);
      CHECK_EQ(here.back(), 0xee);
      const Bytes fresh = painted_bytes(size, size + 1 + static_cast<uint64_t>(again)), before = owned;
      const OpRef write = pair.user->write(remote, 2, fresh.data(), size);
      CHECK_EQ(VerbsSide::wait(write), MR_OK);
      CHECK_EQ(write->remote_state, MR_WRITTEN);
      CHECK(std::equal(fresh.begin(), fresh.end(), owned.begin() + 2));
      CHECK_EQ(owned[1], before[1]);
      CHECK_EQ(owned[size + 2], before[size + 2]);
    }
    CHECK_EQ(VerbsSide::wait(pair.owner->drop(region)), MR_OK);
  }
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
