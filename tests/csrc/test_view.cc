// Strided views against the plainest possible reference: the list of their bytes' offsets.
#include "memory/view.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "view_copy.h"

using namespace mr;

namespace {

mr_view raw_view(uint64_t offset, uint64_t run, std::vector<std::pair<uint64_t, uint64_t>> dims) {
  mr_view raw{};
  raw.offset = offset;
  raw.run = run;
  raw.ndim = static_cast<uint32_t>(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) raw.count[i] = dims[i].first, raw.stride[i] = dims[i].second;
  return raw;
}

// Straight from the definition in engine.h.
std::vector<uint64_t> offsets_of(const mr_view& raw) {
  std::vector<uint64_t> starts{raw.offset};
  for (uint32_t dim = 0; dim < raw.ndim; ++dim) {
    std::vector<uint64_t> next;
    for (uint64_t start : starts)
      for (uint64_t i = 0; i < raw.count[dim]; ++i) next.push_back(start + i * raw.stride[dim]);
    starts = std::move(next);
  }
  std::vector<uint64_t> out;
  for (uint64_t start : starts)
    for (uint64_t i = 0; i < raw.run; ++i) out.push_back(start + i);
  return out;
}

std::vector<uint64_t> walk(const View& view, uint64_t position, uint64_t limit) {
  std::vector<uint64_t> out;
  Cursor cursor(view, position);
  while (cursor.left() > 0) {
    const uint64_t before = cursor.position();
    const auto run = cursor.next(limit);
    CHECK(run.length > 0 && run.length <= limit);
    CHECK_EQ(cursor.position(), before + run.length);
    for (uint64_t i = 0; i < run.length; ++i) out.push_back(run.offset + i);
  }
  CHECK_EQ(cursor.peek(limit).length, 0u);
  return out;
}

using Random = std::mt19937_64;

uint64_t below(Random& random, uint64_t bound) { return random() % bound; }

// Up to 5 dimensions of any strides: nested, transposed, merged, broadcast, overlapping, empty.
mr_view random_view(Random& random) {
  const uint64_t run = below(random, 8) == 0 ? 0 : 1 + below(random, 9);
  std::vector<std::pair<uint64_t, uint64_t>> dims(below(random, 6));
  uint64_t nested = run;
  for (size_t i = dims.size(); i-- > 0;) {
    const uint64_t count = below(random, 30) == 0 ? 0 : 1 + below(random, 4);
    uint64_t stride = nested;                                           // contiguous
    if (below(random, 2) == 0) stride += below(random, 5);              // with a gap
    if (below(random, 6) == 0) stride = below(random, 3 * nested + 1);  // anything
    dims[i] = {count, stride};
    nested = std::max<uint64_t>(1, count) * stride;
  }
  if (below(random, 3) == 0) std::shuffle(dims.begin(), dims.end(), random);
  return raw_view(below(random, 100), run, dims);
}

TEST(random_views_walk_as_defined) {
  Random random(1);
  int non_empty = 0;
  for (int round = 0; round < 20000; ++round) {
    const mr_view raw = random_view(random);
    const auto expected = offsets_of(raw);
    const View view = View::from(raw);
    CHECK_EQ(view.bytes(), expected.size());
    CHECK_EQ(view.end(), expected.empty() ? 0 : *std::max_element(expected.begin(), expected.end()) + 1);
    CHECK(offsets_of(view.raw()) == expected);
    const uint64_t from = below(random, expected.size() + 1);
    const std::vector<uint64_t> tail(expected.begin() + static_cast<ptrdiff_t>(from), expected.end());
    CHECK(walk(view, from, 1 + below(random, 12)) == tail);
    CHECK(walk(view, 0, UINT64_MAX) == expected);
    non_empty += !expected.empty();
  }
  CHECK(non_empty > 10000);
}

TEST(views_are_merged_as_far_as_they_go) {
  // A contiguous 5-D tensor is one run, and so is one with dimensions of one.
  CHECK(View::from(raw_view(8, 4, {{2, 240}, {3, 80}, {5, 16}, {4, 4}})).is_contiguous());
  CHECK(View::from(raw_view(0, 8, {{1, 999}, {1, 0}, {6, 8}, {1, 5}})).is_contiguous());
  const View rows = View::from(raw_view(0, 4, {{3, 400}, {10, 40}, {5, 4}}));  // 30 rows of 20 of 40 bytes
  CHECK_EQ(rows.run(), 20u);
  CHECK_EQ(rows.raw().ndim, 1u);
  CHECK_EQ(rows.raw().count[0], 30u);
  CHECK_EQ(rows.raw().stride[0], 40u);
  const View transposed = View::from(raw_view(0, 4, {{8, 4}, {8, 32}}));
  CHECK_EQ(transposed.raw().ndim, 2u);
}

TEST(cursors_seek_anywhere) {
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    const mr_view raw = random_view(random);
    const auto expected = offsets_of(raw);
    const View view = View::from(raw);
    Cursor cursor(view);
    for (int i = 0; i < 8; ++i) {
      const uint64_t at = below(random, expected.size() + 3);
      cursor.seek(at);
      CHECK_EQ(cursor.position(), at < expected.size() ? at : expected.size());
      const auto run = cursor.peek(5);
      if (at < expected.size())
        CHECK_EQ(run.offset, expected[at]);
      else
        CHECK_EQ(run.length, 0u);
      for (uint64_t k = 0; k < run.length; ++k) CHECK_EQ(run.offset + k, expected[at + k]);
      if (run.length > 1) {
        cursor.advance(1);
        CHECK_EQ(cursor.peek(1).offset, expected[at + 1]);
      }
    }
  }
}

TEST(overlap_is_never_missed) {
  Random random(3);
  int overlapping = 0, apart = 0;
  for (int round = 0; round < 20000; ++round) {
    const mr_view raw = random_view(random);
    const auto offsets = offsets_of(raw);
    const bool overlaps = std::set<uint64_t>(offsets.begin(), offsets.end()).size() != offsets.size();
    const View view = View::from(raw);
    if (overlaps) CHECK(view.overlaps_itself());
    overlapping += overlaps;
    apart += !view.overlaps_itself();
  }
  CHECK(overlapping > 500 && apart > 5000);
}

TEST(ordinary_tensors_do_not_overlap) {
  CHECK(!View::contiguous(5, 100).overlaps_itself());
  CHECK(!View::from(raw_view(0, 4, {{8, 4}, {8, 32}})).overlaps_itself());             // transposed
  CHECK(!View::from(raw_view(0, 4, {{3, 8}, {5, 1000}, {7, 30}})).overlaps_itself());  // permuted with gaps
  CHECK(!View::from(raw_view(0, 0, {{8, 0}})).overlaps_itself());                      // empty
  CHECK(View::from(raw_view(0, 4, {{8, 0}})).overlaps_itself());                       // broadcast
  CHECK(View::from(raw_view(0, 4, {{8, 3}})).overlaps_itself());                       // sliding window
}

TEST(copies_equal_the_reference) {
  Random random(4);
  for (int round = 0; round < 5000; ++round) {
    const mr_view raw_dst = random_view(random);
    const auto dst_offsets = offsets_of(raw_dst);
    const View dst_view = View::from(raw_dst);
    if (dst_view.overlaps_itself() || dst_offsets.empty()) continue;
    // A source of as many bytes: runs of a divisor of them, with gaps.
    uint64_t run = 1 + below(random, dst_offsets.size());
    while (dst_offsets.size() % run != 0) --run;
    const mr_view raw_src = raw_view(below(random, 20), run, {{dst_offsets.size() / run, run + below(random, 4)}});
    const auto src_offsets = offsets_of(raw_src);
    const View src_view = View::from(raw_src);

    Bytes src(src_view.end()), dst(dst_view.end(), 0xee), expected = dst;
    for (auto& b : src) b = static_cast<uint8_t>(random());
    const uint64_t begin = below(random, dst_offsets.size() + 1);
    const uint64_t length = below(random, dst_offsets.size() - begin + 1);
    for (uint64_t i = begin; i < begin + length; ++i) expected[dst_offsets[i]] = src[src_offsets[i]];
    test::copy_views(dst.data(), dst_view, src.data(), src_view, begin, length);
    CHECK(dst == expected);
  }
}

TEST(fits_is_exact) {
  CHECK(View::contiguous(10, 20).fits(30));
  CHECK(!View::contiguous(10, 20).fits(29));
  CHECK(View::contiguous(UINT64_MAX, 0).fits(0));  // empty views are nowhere
  CHECK(!View::contiguous(UINT64_MAX - 20, 20).fits(1000));
  CHECK(View::from(raw_view(UINT64_MAX, 8, {{0, UINT64_MAX}})).fits(0));
}

int refusal(const mr_view& raw) {
  try {
    View::from(raw);
  } catch (const Error& error) {
    return error.status().kind;
  }
  return MR_OK;
}

TEST(overflow_is_refused) {
  const uint64_t big = 1ull << 63;
  CHECK_EQ(refusal(raw_view(UINT64_MAX, 1, {})), MR_OUT_OF_BOUNDS);
  CHECK_EQ(refusal(raw_view(0, big, {{2, 0}})), MR_OUT_OF_BOUNDS);  // the size
  CHECK_EQ(refusal(raw_view(0, 1, {{1ull << 32, 0}, {1ull << 32, 0}})), MR_OUT_OF_BOUNDS);
  CHECK_EQ(refusal(raw_view(0, 1, {{3, big}})), MR_OUT_OF_BOUNDS);             // a step
  CHECK_EQ(refusal(raw_view(0, 1, {{2, big}, {2, big}})), MR_OUT_OF_BOUNDS);   // the sum of steps
  CHECK_EQ(refusal(raw_view(big, 1, {{2, big}})), MR_OUT_OF_BOUNDS);           // with the offset
  CHECK_EQ(refusal(raw_view(0, 2, {{2, UINT64_MAX - 1}})), MR_OUT_OF_BOUNDS);  // the last byte of the last run
  CHECK_EQ(refusal(raw_view(0, 1, {{2, UINT64_MAX - 1}})), MR_OK);
  try {
    View::contiguous(UINT64_MAX - 1, 2);
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.status().kind, MR_OUT_OF_BOUNDS);
  }
}

TEST(merging_does_not_wrap) {
  // 2 x 2^63 is 0 in 64 bits, the stride of the broadcast dimension outside: not the same dimension.
  const View view = View::from(raw_view(0, 1, {{3, 0}, {2, 1ull << 63}}));
  const std::vector<uint64_t> expected{0, 1ull << 63, 0, 1ull << 63, 0, 1ull << 63};
  CHECK(walk(view, 0, 100) == expected);
}

TEST(too_many_dimensions_are_refused) {
  mr_view raw{};
  raw.run = 1;
  raw.ndim = MR_MAX_DIMS + 1;
  CHECK_EQ(refusal(raw), MR_CONFIG);
  raw.ndim = UINT32_MAX;
  CHECK_EQ(refusal(raw), MR_CONFIG);
}

TEST(sixteen_dimensions_work) {
  std::vector<std::pair<uint64_t, uint64_t>> dims;
  uint64_t stride = 1ull << 20;
  for (int i = 0; i < MR_MAX_DIMS; ++i, stride /= 2) dims.push_back({i < 6 ? 2 : 1 + i % 2, stride + 1});
  const mr_view raw = raw_view(3, 2, dims);
  CHECK(walk(View::from(raw), 0, 100) == offsets_of(raw));
}

TEST(views_travel) {
  Random random(5);
  for (int round = 0; round < 2000; ++round) {
    const View view = View::from(random_view(random));
    Writer out;
    view.encode(out);
    Reader in(out.bytes());
    const View back = View::decode(in);
    in.end();
    CHECK(offsets_of(back.raw()) == offsets_of(view.raw()));
    CHECK_EQ(back.bytes(), view.bytes());
    CHECK_EQ(back.end(), view.end());
  }
}

TEST(malformed_views_are_refused) {
  Writer out;
  out.put<uint64_t>(0).put<uint64_t>(1).put<uint32_t>(MR_MAX_DIMS + 1).raw(Bytes(1000, 1));
  Reader many(out.bytes());
  CHECK_THROWS(Error, View::decode(many));
  Writer cut;
  View::from(raw_view(0, 4, {{8, 16}})).encode(cut);
  for (size_t length = 0; length < cut.bytes().size(); ++length) {
    Reader in(ByteView(cut.bytes()).first(length));
    CHECK_THROWS(Error, View::decode(in));
  }
}

}  // namespace

TEST(parts_are_the_view_in_order) {
  // One run; rows; planes of rows; rows longer than the limit. Bytes of all parts, in order, are those of the view.
  const mr_view shapes[] = {{5, 1000, 0, {}, {}},
                            {3, 10, 1, {7}, {13}},
                            {0, 10, 2, {5, 7}, {100, 13}},
                            {9, 100, 2, {3, 4}, {1000, 150}},
                            {1, 1, 3, {4, 5, 6}, {400, 50, 3}}};
  for (const mr_view& shape : shapes) {
    const View whole = View::from(shape);
    for (const uint64_t limit : {1ull, 7ull, 64ull, 99ull, 100ull, 101ull, 1000ull, 100000ull}) {
      std::vector<uint64_t> wanted, found;
      for (Cursor at(whole); at.left() > 0;) {
        const auto run = at.next(whole.bytes());
        for (uint64_t i = 0; i < run.length; ++i) wanted.push_back(run.offset + i);
      }
      for (Parts parts(whole, limit); !parts.done();) {
        CHECK_EQ(parts.position(), found.size());
        const View part = parts.next();
        CHECK(part.bytes() > 0);
        CHECK(part.bytes() <= limit);
        for (Cursor at(part); at.left() > 0;) {
          const auto run = at.next(part.bytes());
          for (uint64_t i = 0; i < run.length; ++i) found.push_back(run.offset + i);
        }
      }
      CHECK(found == wanted);
    }
  }
  CHECK(Parts(View::contiguous(9, 0), 10).done());
  CHECK_EQ(Parts(View::contiguous(9, 10), 10).next().bytes(), 10u);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
