// Writer and Reader: what goes in comes out, and nothing else is accepted.
#include "base/wire.h"

#include <limits>
#include <string>

#include "check.h"

using namespace mr;

namespace {

// Runs `read` and returns the status that it threw.
template <typename Read>
Status refused(Read read) {
  try {
    read();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

TEST(everything_comes_back) {
  Writer out;
  out.put<uint8_t>(0xab).put<uint16_t>(0x1234).put<uint32_t>(0xdeadbeef).put(std::numeric_limits<uint64_t>::max());
  out.put<int32_t>(-5).put(1.5).text("name").text("").blob(Bytes{1, 2, 3}).raw(Bytes{9, 8});
  const Bytes bytes = out.take();
  Reader in(bytes);
  CHECK_EQ(in.get<uint8_t>(), 0xab);
  CHECK_EQ(in.get<uint16_t>(), 0x1234);
  CHECK_EQ(in.get<uint32_t>(), 0xdeadbeefu);
  CHECK_EQ(in.get<uint64_t>(), std::numeric_limits<uint64_t>::max());
  CHECK_EQ(in.get<int32_t>(), -5);
  CHECK_EQ(in.get<double>(), 1.5);
  CHECK_EQ(in.text(4), "name");
  CHECK_EQ(in.text(0), "");
  const ByteView blob = in.blob(3);
  CHECK(Bytes(blob.begin(), blob.end()) == (Bytes{1, 2, 3}));
  const ByteView rest = in.rest();
  CHECK(Bytes(rest.begin(), rest.end()) == (Bytes{9, 8}));
  in.end();
}

TEST(the_layout_is_little_endian_without_padding) {
  Writer out;
  out.put<uint8_t>(1).put<uint32_t>(0x05040302).text("ab");
  CHECK(out.bytes() == (Bytes{1, 2, 3, 4, 5, 2, 0, 0, 0, 'a', 'b'}));
}

TEST(text_may_hold_any_byte) {
  const std::string text("a\0\xff\n", 4);
  Writer out;
  out.text(text);
  Reader in(out.bytes());
  CHECK_EQ(in.text(100), text);
}

TEST(every_truncation_is_refused) {
  Writer out;
  out.put<uint64_t>(7).text("some text").put<uint16_t>(3).blob(Bytes(20, 1));
  const Bytes bytes = out.take();
  for (size_t length = 0; length < bytes.size(); ++length) {
    const Status status = refused([&] {
      Reader in(ByteView(bytes).first(length));
      in.get<uint64_t>();
      in.text(100);
      in.get<uint16_t>();
      in.blob(100);
    });
    CHECK_EQ(status.kind, MR_PROTOCOL);
    CHECK(status.text.find("truncated") != std::string::npos);
  }
}

TEST(a_refused_read_takes_nothing) {
  const Bytes bytes{1, 2, 3};
  Reader in(bytes);
  CHECK_EQ(refused([&] { in.get<uint32_t>(); }).kind, MR_PROTOCOL);
  CHECK_EQ(in.rest().size(), 3u);
}

TEST(lengths_over_the_limit_are_refused_before_anything_is_made_of_them) {
  Writer out;
  out.put<uint32_t>(0xffffffff).raw(Bytes(8, 0));
  for (const auto& read : {+[](Reader& in) { in.blob(1000); }, +[](Reader& in) { in.text(1000); }}) {
    Reader in(out.bytes());
    const Status status = refused([&] { read(in); });
    CHECK_EQ(status.kind, MR_PROTOCOL);
    CHECK(status.text.find("4294967295") != std::string::npos && status.text.find("1000") != std::string::npos);
  }
  // Within the limit, but more than there is.
  Reader in(out.bytes());
  CHECK_EQ(refused([&] { in.blob(SIZE_MAX); }).kind, MR_PROTOCOL);
}

TEST(the_limit_itself_is_allowed) {
  Writer out;
  out.text("12345");
  Reader exact(out.bytes()), under(out.bytes());
  CHECK_EQ(exact.text(5), "12345");
  CHECK_EQ(refused([&] { under.text(4); }).kind, MR_PROTOCOL);
}

TEST(bytes_too_many_are_refused) {
  const Bytes bytes{1, 2};
  Reader in(bytes);
  in.get<uint8_t>();
  const Status status = refused([&] { in.end(); });
  CHECK_EQ(status.kind, MR_PROTOCOL);
  CHECK(status.text.find("1 bytes too many") != std::string::npos);
}

TEST(huge_raw_reads_do_not_wrap) {
  const Bytes bytes(16, 0);
  Reader in(bytes);
  CHECK_EQ(refused([&] { in.raw(SIZE_MAX); }).kind, MR_PROTOCOL);
  CHECK_EQ(refused([&] { in.raw(SIZE_MAX - 8); }).kind, MR_PROTOCOL);
  CHECK_EQ(in.raw(16).size(), 16u);
  in.end();
}

TEST(an_empty_input_holds_nothing) {
  Reader in({});
  CHECK_EQ(in.rest().size(), 0u);
  CHECK_EQ(in.raw(0).size(), 0u);
  in.end();
  CHECK_EQ(refused([&] { in.get<uint8_t>(); }).kind, MR_PROTOCOL);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
