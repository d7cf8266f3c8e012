#include "baselines.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "raw_copy.h"

namespace mr::bench {
namespace {

constexpr uint64_t kLeastForBandwidth = 64 << 10;  // raw streams and copies of less measure their own start

uint32_t host_threads(const Options& options) {
  return options.threads ? options.threads : std::max(1u, std::thread::hardware_concurrency());
}

// A contender that times single steps.
template <typename Step>
Contender timed(std::string name, Step step) {
  auto run = [step](const Turn& turn, std::vector<double>& samples) {
    double end = now() + turn.seconds, before = now();
    for (uint64_t i = 0; i < turn.operations && (i == 0 || before < end); ++i) {
      step();
      double after = now();
      samples.push_back(after - before);
      before = after;
    }
  };
  return {std::move(name), run, {}};
}

// A contender that moves `bytes` per step, over and over; one sample a turn.
template <typename Step>
Contender streaming(std::string name, uint64_t bytes, Step step) {
  auto run = [step, bytes](const Turn& turn, std::vector<double>& samples) {
    Deadline deadline(turn.seconds);
    const double started = now();
    uint64_t done = 0;
    do {
      step();
      ++done;
    } while (!deadline.passed() && done < turn.operations);
    samples.push_back(static_cast<double>(done * bytes) / (now() - started));
  };
  return {std::move(name), run, {}};
}

}  // namespace

void add_latency_baselines(std::vector<Contender>& contenders, Lane lane, const TransferPlan& plan, const Answer& where,
                           RawPeer* raw) {
  if (lane == Lane::kTcp && raw) {
    uint64_t request = plan.op == Op::kWrite ? plan.size : 8, reply = plan.op == Op::kRead ? plan.size : 8;
    contenders.push_back({"raw TCP ping-pong",
                          [=](const Turn& turn, auto& samples) { raw->tcp_ping_pong(request, reply, turn, samples); },
                          {}});
  } else if (lane == Lane::kProcessVm && plan.op != Op::kFetchAdd) {
    auto copy = std::make_shared<RawProcessVm>(where.pid, where.address, plan.size, plan.op == Op::kWrite, 1);
    contenders.push_back(timed("process_vm x1", [copy] { copy->copy(); }));
  } else if (lane != Lane::kTcp && lane != Lane::kVerbs && plan.op != Op::kFetchAdd) {
    auto copy = std::make_shared<RawMemcpy>(plan.size, 1);
    contenders.push_back(timed("memcpy x1", [copy] { copy->copy(); }));
  }
}

void add_bandwidth_baselines(std::vector<Contender>& contenders, Lane lane, const TransferPlan& plan,
                             const Answer& where, const Options& options, RawPeer* raw) {
  if (plan.op == Op::kFetchAdd || plan.size < kLeastForBandwidth) return;
  if (lane == Lane::kTcp) {
    for (uint32_t streams = 1; raw && streams <= RawPeer::kMaxStreams; streams *= 2)
      contenders.push_back(streaming("raw TCP x" + std::to_string(streams), plan.size,
                                     [=] { raw->stream(plan.size, streams, plan.op == Op::kWrite); }));
    return;
  }
  if (lane == Lane::kVerbs) return;  // perftest's programs are what it is compared with
  for (uint32_t threads = 1; threads <= host_threads(options); threads *= 2) {
    std::string times = " x" + std::to_string(threads);
    if (lane == Lane::kProcessVm) {
      auto copy = std::make_shared<RawProcessVm>(where.pid, where.address, plan.size, plan.op == Op::kWrite, threads);
      contenders.push_back(streaming("process_vm" + times, plan.size, [copy] { copy->copy(); }));
    } else {
      auto copy = std::make_shared<RawMemcpy>(plan.size, threads);
      contenders.push_back(streaming("memcpy" + times, plan.size, [copy] { copy->copy(); }));
    }
  }
}

void add_mapped_view(std::vector<Contender>& contenders, Figure figure, MappedView& view, uint64_t size) {
  const auto copy = [&view] { view.copy(); };
  contenders.push_back(figure == Figure::kLatency ? timed("mapped view", copy) : streaming("mapped view", size, copy));
}

}  // namespace mr::bench
