#include "figures.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "baselines.h"
#include "failure.h"
#include "transfers.h"
#include "verify.h"

namespace mr::bench {
namespace {

TransferPlan plan_of(Lane lane, Op op, uint64_t size, const Options& options) {
  TransferPlan plan{op, op == Op::kFetchAdd ? 8 : size, options.strided, false, 1, lane_flags(lane)};
  if (plan.strided.pieces) plan.size = plan.strided.pieces * plan.strided.run;
  return plan;
}

Request allocation(Lane lane, const TransferPlan& plan) {
  Request request;
  request.ask = Ask::kAllocate;
  request.memory = lane == Lane::kMapped ? Memory::kShared : Memory::kOrdinary;
  request.size = region_bytes(plan.size, plan.strided);
  request.seed = kReadSeed;
  return request;
}

Turn turn_of(const Options& options) {
  uint64_t operations = options.iters ? (options.iters + options.rounds - 1) / options.rounds : UINT64_MAX;
  return {options.iters ? 86400 : options.seconds / options.rounds, operations};
}

void summarise(Row& row, Figure figure, const std::vector<Contender>& contenders) {
  const std::vector<double>& ours = contenders[0].samples;
  row.figure = name_of(figure);
  if (figure == Figure::kLatency) {
    row.p50 = quantile(ours, 0.5);
    row.p99 = quantile(ours, 0.99);
    row.p999 = quantile(ours, 0.999);
  } else {
    row.bandwidth = median(ours);
  }
  for (size_t i = 1; i < contenders.size(); ++i) {
    double value = median(contenders[i].samples);
    row.against.push_back({contenders[i].name, value, (figure == Figure::kLatency ? row.p50 : row.bandwidth) / value});
  }
}

// This process's memory, which the owners work on at the same time.
class BothWays {
 public:
  BothWays(Session& session, Lane lane, const TransferPlan& plan, bool verify)
      : session_(session), plan_(plan), exposed_(session.engine(), allocation(lane, plan)) {
    request_.op = static_cast<uint32_t>(plan.op);
    request_.size = plan.size;
    request_.pieces = plan.strided.pieces;
    request_.run = plan.strided.run;
    request_.depth = plan.depth;
    request_.flags = plan.flags;
    request_.verify = verify;
  }
  // Bytes per second of both directions together.
  double turn(Transfers& transfers, const Turn& turn) {
    ask_all(Ask::kMirrorStart, exposed_.descriptor());
    Moved moved = transfers.window(turn);
    return moved.rate() + ask_all(Ask::kMirrorStop, {});
  }
  void verify() const {
    if (plan_.op == Op::kWrite) verify_written(exposed_.data(), exposed_.size(), plan_);
  }

 private:
  double ask_all(Ask ask, const Bytes& tail) {
    double rate = 0;
    request_.ask = ask;
    for (size_t owner = 0; owner < session_.owners(); ++owner) {
      Answer answer = session_.ask(owner, request_, tail);
      rate += Moved{0, answer.bytes, answer.seconds}.rate();
    }
    return rate;
  }
  Session& session_;
  const TransferPlan plan_;
  Exposed exposed_;
  Request request_;
};

// One figure of one kind of transfer, on one region of each owner.
class TransferFigure {
 public:
  TransferFigure(Session& session, Lane lane, Figure figure, const TransferPlan& plan, const Options& options,
                 const std::vector<RemoteMemory>& memory, const Answer& raw_target)
      : lane_(lane),
        figure_(figure),
        plan_(plan),
        options_(options),
        memory_(memory),
        raw_target_(raw_target),
        transfers_(remotes(), plan) {
    transfers_.keep(session.engine());
    first_ = transfers_.probe();
    if (plan.op != Op::kFetchAdd && std::string(name_of(lane)) != first_.lane)  // atomics choose their own way
      throw Failure(std::string("asked for the lane ") + name_of(lane) + " but the engine took '" + first_.lane + "' " +
                    first_.skipped);
    if (options.bidirectional && figure == Figure::kBandwidth)
      both_ = std::make_unique<BothWays>(session, lane, plan, options.verify);
    if (options.mapped_view) view_ = std::make_unique<MappedView>(memory.front().remote(), plan.size);
    if (plan.strided.pieces) {
      TransferPlan one_by_one = plan;
      one_by_one.one_by_one = true;
      singles_ = std::make_unique<Transfers>(remotes(), one_by_one);
      singles_->keep(session.engine());
    }
  }

  Row measure(RawPeer* raw) {
    std::vector<Contender> contenders = {contender("engine", transfers_, both_.get())};
    if (singles_) {
      const char* how = figure_ == Figure::kLatency ? " single, one after another" : " single, all in flight";
      contenders.push_back(contender(std::to_string(plan_.strided.pieces) + how, *singles_, nullptr));
    } else if (options_.baseline && figure_ == Figure::kLatency) {
      add_latency_baselines(contenders, lane_, plan_, raw_target_, raw);
    } else if (options_.baseline && !both_) {
      add_bandwidth_baselines(contenders, lane_, plan_, raw_target_, options_, raw);
    }
    if (view_) add_mapped_view(contenders, figure_, *view_, plan_.size);
    take_turns(contenders, options_.rounds, turn_of(options_));
    if (options_.verify && plan_.op == Op::kRead) verify_read(transfers_, plan_);
    if (options_.verify && view_) verify_copy(view_->copied(), plan_);
    if (options_.verify && both_) both_->verify();

    Row row;
    row.lane = first_.lane;
    row.op = name_of(plan_.op);
    row.bytes = plan_.size;
    row.strided = plan_.strided;
    row.depth = plan_.depth;
    row.rails = first_.rails;
    row.peers = memory_.size();
    row.bidirectional = both_ != nullptr;
    summarise(row, figure_, contenders);
    return row;
  }

  uint64_t operations() const { return transfers_.operations(); }

 private:
  Contender contender(std::string name, Transfers& transfers, BothWays* both) const {
    auto run = [&transfers, both, figure = figure_](const Turn& turn, std::vector<double>& samples) {
      if (figure == Figure::kLatency) return transfers.latency(turn, samples);
      samples.push_back(both ? both->turn(transfers, turn) : transfers.window(turn).rate());
    };
    return {std::move(name), run, {}};
  }
  std::vector<mr_remote*> remotes() const {
    std::vector<mr_remote*> all;
    for (const RemoteMemory& memory : memory_) all.push_back(memory.remote());
    return all;
  }

  const Lane lane_;
  const Figure figure_;
  const TransferPlan plan_;
  const Options& options_;
  const std::vector<RemoteMemory>& memory_;
  const Answer raw_target_;
  Transfers transfers_;
  mr_result first_{};
  std::unique_ptr<BothWays> both_;
  std::unique_ptr<Transfers> singles_;
  std::unique_ptr<MappedView> view_;
};

}  // namespace

std::vector<Row> measure_transfers(Session& session, Lane lane, Op op, uint64_t size, const Options& options,
                                   RawPeer* raw) {
  TransferPlan plan = plan_of(lane, op, size, options);
  std::vector<RemoteMemory> memory;
  for (size_t owner = 0; owner < session.owners(); ++owner) memory.emplace_back(session, owner, allocation(lane, plan));
  // Raw writes have a target of their own, so that the engine's can be verified.
  std::optional<RemoteMemory> raw_target;
  if (options.baseline && lane == Lane::kProcessVm) raw_target.emplace(session, 0, allocation(lane, plan));
  uint64_t operations = 0;
  std::vector<Row> rows;
  for (Figure figure : options.figures) {
    plan.depth = figure == Figure::kLatency ? 1 : options.depth;
    TransferFigure transfer(session, lane, figure, plan, options, memory, raw_target ? raw_target->where() : Answer{});
    rows.push_back(transfer.measure(raw));
    operations += transfer.operations();
  }
  if (options.verify && op == Op::kFetchAdd) verify_fetch_add(session, memory, operations);
  for (size_t owner = 0; owner < memory.size(); ++owner) {
    if (options.verify && op == Op::kWrite) verify_write(session, owner, memory[owner], plan);
    memory[owner].release();
  }
  if (raw_target) raw_target->release();
  return rows;
}

std::vector<Row> measure_messages(Session& session, uint64_t size, const Options& options, RawPeer* raw) {
  std::vector<Row> rows;
  for (Figure figure : options.figures) {
    Row row;
    row.lane = "control";
    row.op = name_of(Op::kMessage);
    row.bytes = size;
    row.depth = figure == Figure::kLatency ? 1 : options.depth;
    row.peers = figure == Figure::kLatency ? 1 : session.owners();
    row.bidirectional = true;
    auto run = [&](const Turn& turn, std::vector<double>& samples) {
      bool latency = figure == Figure::kLatency;
      Moved moved = session.ping_pong(size, row.depth * row.peers, options.verify, turn, latency ? &samples : nullptr);
      if (!latency) samples.push_back(moved.rate());
    };
    std::vector<Contender> contenders = {{"engine", run, {}}};
    if (options.baseline && raw && figure == Figure::kLatency)
      contenders.push_back({"raw Unix ping-pong",
                            [&](const Turn& turn, auto& samples) { raw->unix_ping_pong(size, turn, samples); },
                            {}});
    take_turns(contenders, options.rounds, turn_of(options));
    summarise(row, figure, contenders);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace mr::bench
