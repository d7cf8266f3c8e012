#include "verbs_domain.h"

#include <algorithm>
#include <future>

#include "../base/thread.h"
#include "verbs_devices.h"

namespace mr {
namespace {

constexpr size_t kMaxThreads = 32;  // so many calls may be held by the kernel before others wait for them
constexpr double kCloseLimit = 5;   // seconds
constexpr double kReopenPause = 0.05;

}  // namespace

QueuePairPath verbs_path(const Options& options, const VerbsRail& rail) {
  const mr_options& raw = options.raw;
  QueuePairPath path;
  path.port = static_cast<uint8_t>(rail.port);
  path.hop_limit = static_cast<uint8_t>(raw.verbs_hop_limit);
  path.traffic_class = static_cast<uint8_t>(raw.verbs_traffic_class);
  path.service_level = static_cast<uint8_t>(raw.verbs_service_level);
  path.mtu = raw.verbs_mtu != 0 ? std::min(raw.verbs_mtu, rail.mtu) : rail.mtu;
  path.timeout = static_cast<uint8_t>(raw.verbs_timeout);
  path.retries = static_cast<uint8_t>(raw.verbs_retries);
  path.rnr_retries = static_cast<uint8_t>(raw.verbs_rnr_retries);
  path.rnr_timer = static_cast<uint8_t>(raw.verbs_rnr_timer);
  path.pkey_index = static_cast<uint16_t>(raw.verbs_pkey_index);
  return path;
}

VerbsCard::VerbsCard(VerbsContextRef opened, const KeptRanges& kept, std::shared_ptr<Workers> workers,
                     const Options& options, VerbsPoller::OnCardEvent on_event, bool is_software)
    : context(std::move(opened)),
      domain(std::make_shared<ProtectionDomain>(context)),
      memory_worker{std::move(workers)},
      memory(domain, kept, memory_worker, options.raw.verbs_cache_bytes,
             options.raw.verbs_on_demand != 0 && context->has_on_demand_paging()),
      staging(std::make_shared<StagingBlocks>(domain)),
      poller(context, std::move(on_event), is_software) {}

VerbsDomain::VerbsDomain(const Verbs& verbs, const Options& options)
    : verbs_(verbs),
      options_(options),
      pid_(this_pid()),
      workers_(std::make_shared<Workers>("mr_verbs", kMaxThreads)) {}

std::shared_ptr<VerbsDomain> VerbsDomain::open(const Verbs& verbs, const Options& options, std::string* why,
                                               const Topology& topology) {
  const RailChoice choice = choose_rails(verbs, options, topology);
  if (!choice.status.ok()) throw Error(choice.status);
  auto domain = std::shared_ptr<VerbsDomain>(new VerbsDomain(verbs, options));
  *why = choice.why_none();
  for (const Rail& rail : choice.rails) {
    auto& places = domain->places_;
    auto found =
        std::find_if(places.begin(), places.end(), [&](const auto& place) { return place->name == rail.device; });
    try {
      if (found == places.end()) {
        const auto place = std::make_shared<CardPlace>(rail.device, rail.software);
        place->card.set(domain->open_card(*place));
        found = places.insert(found, place);
      }
      ibv_port_attr port{};
      ibv_context* const context = (*found)->card.get()->context->get();
      if (const int error = verbs.query_port(context, static_cast<uint8_t>(rail.port), &port); error != 0)
        throw Error(verbs_failure(MR_CONFIG, "ibv_query_port", rail.name(), error));
      domain->rails_.push_back({rail, *found, std::max<uint64_t>(port.max_msg_sz, 4096)});
    } catch (const Error& error) {
      *why = error.what();
    }
  }
  std::vector<Place> places;
  for (const Rail& rail : domain->rails_) places.push_back(rail.place);
  domain->near_rails_ = std::make_unique<const NearRails>(places, topology);
  domain->is_open_ = true;
  if (!domain->rails_.empty()) return domain;
  domain->close();
  return nullptr;
}

// ---- Cards come and go ----

// The last to let go of a card may be its own poller, or a thread that must not wait.
VerbsCardRef VerbsDomain::open_card(const CardPlace& place) {
  const VerbsContextRef context = VerbsContext::open(verbs_, place.name);
  const auto on_event = [weak = weak_from_this(), at = context.get()](const ibv_async_event& event) {
    if (const auto self = weak.lock(); self && self->is_open_) self->on_card_event(*at, event);
  };
  return VerbsCardRef(new VerbsCard(context, kept_, workers_, options_, on_event, place.is_software),
                      [workers = workers_](const VerbsCard* card) {
                        if (!workers->run([card] { delete card; })) delete card;
                      });
}

VerbsCardRef VerbsDomain::need_card(size_t rail) {
  CardPlace& place = *rails_[rail].place;
  if (auto card = place.card.get()) return card;
  const std::unique_lock guard(place.opening, std::try_to_lock);
  if (!guard || Clock::now() < place.not_before)
    throw Error(MR_CONFIG, place.name + " has failed, and is not back yet");
  if (auto card = place.card.get()) return card;
  place.not_before = after(kReopenPause);
  auto card = open_card(place);
  place.card.set(card);
  return card;
}

void VerbsDomain::on_failure(const VerbsCardRef& card, const Status& failure) {
  if (card && is_of_dead_card(failure)) lose_card(card);
}

void VerbsDomain::lose_card(const VerbsCardRef& card) {
  if (card->lost.exchange(true)) return;
  for (const auto& place : places_)
    if (place->card.get() == card) place->card.set(nullptr);
  std::vector<std::weak_ptr<RegionGrant>> grants;
  {
    std::lock_guard guard(lock_);
    grants = grants_;
  }
  for (const auto& each : grants)
    if (const auto grant = each.lock()) grant->lose(*card->domain);
  for (const auto& listener : listeners()) listener->on_card_lost(card);
}

// In a forked child the pollers' threads are let go of and nothing else: locks may have been held at the fork.
void VerbsDomain::close() {
  if (!is_this_process(pid_)) {
    for (const auto& place : places_)
      if (const auto card = place->card.get()) card->poller.close();
    return;
  }
  const auto closed = std::make_shared<std::promise<void>>();
  const auto finish = [self = shared_from_this(), closed] {
    self->workers_->close(-1);
    for (const auto& place : self->places_) {
      const auto card = place->card.get();
      if (!card) continue;
      card->memory.clear();
      card->poller.close();
      place->card.set(nullptr);
    }
    closed->set_value();
  };
  auto end = closed->get_future();
  try {
    start_without_signals("mr_verbs_close", finish).detach();
  } catch (const Error&) {
    finish();
  }
  end.wait_for(std::chrono::duration<double>(kCloseLimit));
}

void VerbsDomain::keep(const void* address, uint64_t size) { kept_.keep(reinterpret_cast<uintptr_t>(address), size); }

void VerbsDomain::forget(const void* address, uint64_t size) {
  kept_.forget(reinterpret_cast<uintptr_t>(address), size);
  for (const auto& place : places_)
    if (const auto card = place->card.get()) card->memory.forget(reinterpret_cast<uintptr_t>(address), size);
}

std::shared_ptr<RegionGrant> VerbsDomain::grant(const RegionRef& region) {
  auto found = region->grant("verbs", [&] {
    auto made = std::make_shared<RegionGrant>(region, workers_, options_.raw.verbs_atomics != 0);
    std::lock_guard guard(lock_);
    std::erase_if(grants_, [](const auto& each) { return each.expired(); });
    grants_.push_back(made);
    return made;
  });
  return std::static_pointer_cast<RegionGrant>(found);
}

std::shared_ptr<void> VerbsDomain::take_pair() {
  const uint32_t most = options_.raw.verbs_max_queue_pairs;
  if (num_pairs_.fetch_add(1) >= most) {
    num_pairs_.fetch_sub(1);
    throw Error(MR_RESOURCE_EXHAUSTED, std::to_string(most) + " queue pairs are in use (option verbs_max_queue_pairs)");
  }
  const auto self = shared_from_this();
  return std::shared_ptr<void>(static_cast<void*>(nullptr), [self](void*) { self->num_pairs_.fetch_sub(1); });
}

std::shared_ptr<void> VerbsDomain::take_responders(const VerbsCardRef& card, uint32_t* wanted) {
  const auto all = static_cast<uint32_t>(std::max(0, card->context->attributes().max_res_rd_atom));
  uint32_t used = card->responders.load(), granted;
  do {
    granted = std::min(*wanted, all - std::min(all, used));
    if (granted == 0)
      throw Error(MR_RESOURCE_EXHAUSTED, card->name() + " has resources for " + std::to_string(all) +
                                             " reads of peers at a time, and all are promised");
  } while (!card->responders.compare_exchange_weak(used, used + granted));
  *wanted = granted;
  return std::shared_ptr<void>(static_cast<void*>(nullptr),
                               [card, granted](void*) { card->responders.fetch_sub(granted); });
}

void VerbsDomain::listen(const std::weak_ptr<VerbsListener>& listener) {
  std::lock_guard guard(lock_);
  std::erase_if(listeners_, [](const auto& each) { return each.expired(); });
  listeners_.push_back(listener);
}

std::vector<std::shared_ptr<VerbsListener>> VerbsDomain::listeners() {
  std::vector<std::shared_ptr<VerbsListener>> out;
  std::lock_guard guard(lock_);
  for (const auto& each : listeners_)
    if (auto listener = each.lock()) out.push_back(std::move(listener));
  return out;
}

void VerbsDomain::on_card_event(const VerbsContext& context, const ibv_async_event& event) {
  const auto tell = [&](const auto& what) {
    for (const auto& listener : listeners()) what(*listener);
  };
  switch (event.event_type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
      for (size_t i = 0; i < rails_.size(); ++i)
        if (rails_[i].device == context.name() && rails_[i].port == static_cast<uint32_t>(event.element.port_num))
          tell([&](VerbsListener& each) { each.on_port(i, event.event_type == IBV_EVENT_PORT_ACTIVE); });
      break;
    case IBV_EVENT_DEVICE_FATAL:
      for (const auto& place : places_)
        if (const auto card = place->card.get(); card && card->context.get() == &context) lose_card(card);
      break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_PATH_MIG_ERR:
      tell([&](VerbsListener& each) {
        each.on_pair_event(event.element.qp->qp_num, "the card reports an error of it");
      });
      break;
    default:
      break;  // the rest concerns what we do not use, or is told by completions as well
  }
}

}  // namespace mr
