#include "verbs_wire.h"

#include <algorithm>

namespace mr {
namespace {

constexpr size_t kMaxText = 4096;
constexpr uint32_t kMaxRails = 256, kMaxGids = 1024, kMaxKeys = 1u << 20;

void put_status(Writer& out, const Status& status) {
  out.put(static_cast<uint16_t>(status.kind)).put(static_cast<int32_t>(status.sys_errno));
  out.text(std::string_view(status.text).substr(0, kMaxText));
}

Status get_status(Reader& in) {
  Status status;
  status.kind = in.get<uint16_t>();
  if (status.kind > MR_CONFIG) throw Error(MR_PROTOCOL, "an answer of unknown kind " + std::to_string(status.kind));
  status.sys_errno = in.get<int32_t>();
  status.text = in.text(kMaxText);
  return status;
}

void put_gid(Writer& out, const GidBytes& gid) { out.raw({gid.data(), gid.size()}); }

GidBytes get_gid(Reader& in) {
  GidBytes gid;
  const ByteView bytes = in.raw(gid.size());
  std::copy(bytes.begin(), bytes.end(), gid.begin());
  return gid;
}

uint32_t get_count(Reader& in, uint32_t limit, const char* what) {
  const auto count = in.get<uint32_t>();
  if (count > limit) throw Error(MR_PROTOCOL, std::to_string(count) + " " + what);
  return count;
}

void put_end(Writer& out, const QueuePairEnd& end) { out.put(end.number).put(end.psn); }

QueuePairEnd get_end(Reader& in) {
  QueuePairEnd end;
  end.number = in.get<uint32_t>();
  end.psn = in.get<uint32_t>();
  if (end.psn > 0xffffff || end.number > 0xffffff) throw Error(MR_PROTOCOL, "a queue pair of more than 24 bits");
  return end;
}

}  // namespace

Bytes VerbsOffer::encode() const {
  Writer out;
  out.put(number).put(rail).put(gid_index);
  put_gid(out, server_gid);
  put_gid(out, gid);
  out.put(lid).put(global).put(mtu).put(rd_atomic);
  put_end(out, end);
  return out.take();
}

VerbsOffer VerbsOffer::decode(Reader& in) {
  VerbsOffer out;
  out.number = in.get<uint64_t>();
  out.rail = in.get<uint32_t>();
  out.gid_index = in.get<uint32_t>();
  out.server_gid = get_gid(in);
  out.gid = get_gid(in);
  out.lid = in.get<uint16_t>();
  out.global = in.get<uint8_t>();
  out.mtu = in.get<uint32_t>();
  out.rd_atomic = in.get<uint32_t>();
  out.end = get_end(in);
  in.end();
  return out;
}

Bytes VerbsAccept::encode() const {
  Writer out;
  out.put(number);
  put_status(out, status);
  out.put(mtu).put(rd_atomic);
  put_end(out, end);
  return out.take();
}

VerbsAccept VerbsAccept::decode(Reader& in) {
  VerbsAccept out;
  out.number = in.get<uint64_t>();
  out.status = get_status(in);
  out.mtu = in.get<uint32_t>();
  out.rd_atomic = in.get<uint32_t>();
  out.end = get_end(in);
  in.end();
  return out;
}

Bytes VerbsWant::encode() const {
  Writer out;
  out.put(number);
  region.encode(out);
  out.put(right).put(rail);
  return out.take();
}

VerbsWant VerbsWant::decode(Reader& in) {
  VerbsWant out;
  out.number = in.get<uint64_t>();
  out.region = RegionName::decode(in);
  out.right = in.get<uint32_t>();
  out.rail = in.get<uint32_t>();
  in.end();
  return out;
}

Bytes VerbsKeys::encode() const {
  Writer out;
  out.put(number);
  put_status(out, status);
  out.put(base).put(size).put(piece_bytes).put(atomics).put(static_cast<uint32_t>(rkeys.size()));
  for (const uint32_t key : rkeys) out.put(key);
  return out.take();
}

VerbsKeys VerbsKeys::decode(Reader& in) {
  VerbsKeys out;
  out.number = in.get<uint64_t>();
  out.status = get_status(in);
  out.base = in.get<uint64_t>();
  out.size = in.get<uint64_t>();
  out.piece_bytes = in.get<uint64_t>();
  out.atomics = in.get<uint8_t>();
  const uint32_t count = get_count(in, kMaxKeys, "keys of a region");
  for (uint32_t i = 0; i < count; ++i) out.rkeys.push_back(in.get<uint32_t>());
  in.end();
  const uint64_t pieces = out.piece_bytes == 0 ? 0 : (out.size + out.piece_bytes - 1) / out.piece_bytes;
  if (out.status.ok() && (out.size > UINT64_MAX - out.base || out.piece_bytes > (1ull << 63) || pieces != count))
    throw Error(MR_PROTOCOL, std::to_string(count) + " keys for " + std::to_string(out.size) + " bytes");
  return out;
}

Bytes encode_rails(const std::vector<RailFace>& rails) {
  Writer out;
  out.put(static_cast<uint32_t>(rails.size()));
  for (const RailFace& rail : rails) {
    out.put(rail.group).put(static_cast<uint8_t>(rail.layer)).put(rail.lid);
    out.put(static_cast<uint8_t>(rail.grh_required)).put(static_cast<uint32_t>(rail.gids.size()));
    for (const Gid& gid : rail.gids) {
      out.put(gid.index);
      put_gid(out, gid.bytes);
    }
  }
  return out.take();
}

std::vector<RailFace> decode_rails(Reader& in) {
  std::vector<RailFace> out(get_count(in, kMaxRails, "rails"));
  for (RailFace& rail : out) {
    rail.group = in.get<uint32_t>();
    const auto layer = in.get<uint8_t>();
    if (layer > static_cast<uint8_t>(LinkLayer::ethernet)) throw Error(MR_PROTOCOL, "a rail of an unknown kind");
    rail.layer = static_cast<LinkLayer>(layer);
    rail.lid = in.get<uint16_t>();
    rail.grh_required = in.get<uint8_t>() != 0;
    rail.gids.resize(get_count(in, kMaxGids, "addresses of a rail"));
    for (Gid& gid : rail.gids) {
      gid.index = in.get<uint32_t>();
      gid.bytes = get_gid(in);
    }
  }
  in.end();
  for (const RailFace& rail : out)
    if (rail.gids.empty()) throw Error(MR_PROTOCOL, "a rail without an address");
  return out;
}

}  // namespace mr
