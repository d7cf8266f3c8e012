// Figures about what the engine costs besides time: processor time while idle, memory while moving a large buffer.
#include <chrono>
#include <string>
#include <thread>

#include "failure.h"
#include "figures.h"

namespace mr::bench {
namespace {

constexpr double kSettle = 0.5;  // seconds for the last answers of the handshake to be read
constexpr uint64_t kSeed = 0xf007;
constexpr uint64_t kEnd = 4096;  // the owner's pattern is in the first and in the last page

void verify_ends(const uint8_t* data, uint64_t size) {
  if (find_mismatch(data, 0, std::min(kEnd, size), kSeed) ||
      (size > kEnd && find_mismatch(data + size - kEnd, size - kEnd, kEnd, kSeed)))
    throw Failure("the read delivered wrong bytes");
}

}  // namespace

std::vector<IdleRow> measure_idle_engines(Session& session, double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(kSettle));
  IdleUsage here = measure_idle(seconds);
  std::vector<IdleRow> rows = {{"client", seconds, here.cpu_seconds, here.context_switches}};
  for (size_t owner = 0; owner < session.owners(); ++owner) {
    Request request;
    request.ask = Ask::kIdle;
    request.seconds = seconds;
    Answer answer = session.ask(owner, request);
    rows.push_back({"server " + std::to_string(owner), seconds, answer.seconds, answer.value});
  }
  return rows;
}

MemoryRow measure_memory(Session& session, Lane lane, Op op, uint64_t size) {
  if (available_memory() / 4 * 3 < 2 * size)
    throw Failure("--memory needs two buffers of " + size_text(size) + " in 3/4 of the available memory, which is " +
                  std::to_string(available_memory() >> 20) + " MiB; give a smaller --sizes");
  Request request;
  request.ask = Ask::kAllocate;
  request.memory = lane == Lane::kMapped ? Memory::kShared : Memory::kOrdinary;
  request.size = size;
  request.seed = kSeed;
  request.sparse = op == Op::kRead;  // what is only read stays without pages; what is written has them before
  RemoteMemory memory(session, 0, request);
  Buffer local = op == Op::kRead ? Buffer::touched(size) : Buffer::sparse(size);

  Transfers transfers({memory.remote()}, {op, size, {}, false, 1, lane_flags(lane)}, std::move(local));
  request.ask = Ask::kPeakStart;
  session.ask(0, request);
  PeakMemory peak;
  peak.start();
  mr_result result = transfers.probe();
  PeakMemory::Growth here = peak.stop();
  request.ask = Ask::kPeakStop;
  Answer there = session.ask(0, request);
  if (op == Op::kRead) verify_ends(transfers.slot(0), size);
  memory.release();

  return {result.lane, name_of(op), size, here.extra, here.peak, there.bytes, there.value, result.seconds};
}

}  // namespace mr::bench
