// The simulation's readers: lookups, leases, pins, and reads that go on while everything changes.

#include <fmt/format.h>

#include "tests/sim/state.h"
#include "tests/sim/store_sim.h"

namespace kvtier::sim {

using cachestore::Reason;

namespace {

constexpr std::size_t kMostReadings = 6;

}  // namespace

std::string StoreSim::LookUp() {
  const ModelState& model = *random_.Pick(models_);
  const std::string space = random_.Pick<std::string>({kSpaces[0], kSpaces[1]});
  Content prompt = SomeContent(model);
  if (const HeldPtr held = Any(); held != nullptr && held->model == &model) prompt = held->plan;
  const std::int64_t hit =
      store_->Lookup(space, model.model().id, {PromptOf(prompt, std::ssize(prompt))}).value()[0];
  const auto [least, most] = HitBounds(model, space, prompt);
  if (hit < least || hit > most || hit % kBlock != 0)
    return fmt::format("{} tokens hit, want {} to {}", hit, least, most);
  if (space != kSpaces[0]) return "";
  return CheckEvents(cachestore::PrefixKeysOf(space, model.model().id, kBlock,
                                              PromptOf(prompt, std::ssize(prompt))),
                     hit, model.windowed());
}

std::string StoreSim::CheckEvents(const std::vector<cachestore::PrefixKey>& keys, std::int64_t hit,
                                  bool windowed) {
  if (subscription_ == nullptr || random_.OneIn(4)) {
    const auto after = random_.OneIn(4) ? cachestore::EventPosition() : mirror_.position();
    subscription_ = store_->Subscribe(kSpaces[0], after, [] {}).value();
  }
  mirror_.Drain(*subscription_);
  ++tally_.events_checked;
  if (!mirror_.wrong().empty()) return mirror_.wrong();
  const std::int64_t told = kBlock * mirror_.Held(keys);
  // Of what windows see they tell nothing.
  return told == hit || (windowed && told > hit)
             ? ""
             : fmt::format("{} tokens hit, events told of {}", hit, told);
}

std::string StoreSim::Acquire() {
  auto lease = std::make_shared<LeaseOf>();
  const auto duration = absl::Milliseconds(random_.Between(100, 5000));
  lease->deadline = clock_.Now() + duration;
  absl::StatusOr<cachestore::Grant> grant;
  if (random_.OneIn(2)) {
    const HeldPtr held = Any();
    if (held == nullptr) return "";
    lease->held = held;
    lease->model = held->model;
    lease->name_space = held->key.name_space;
    lease->content = held->plan;
    grant = store_->Acquire(held->key, duration);
    if (!grant.ok()) return Unexpected("acquire", grant.status());
    if (grant->tokens != held->committed())
      return fmt::format("leases {} tokens, want {}", grant->tokens, held->committed());
    lease->sees = held->Sees(grant->tokens);
  } else {
    lease->model = random_.Pick(models_).get();
    lease->name_space = random_.Pick<std::string>({kSpaces[0], kSpaces[1]});
    lease->content = SomeContent(*lease->model);
    grant = store_->Acquire(lease->name_space, lease->model->model().id,
                            PromptOf(lease->content, std::ssize(lease->content)), duration);
    if (!grant.ok()) return Unexpected("acquire", grant.status());
    const auto [least, most] = HitBounds(*lease->model, lease->name_space, lease->content);
    if (grant->tokens < least || grant->tokens > most)
      return fmt::format("leases {} tokens, want {} to {}", grant->tokens, least, most);
    if (grant->id == 0) return grant->tokens == 0 ? "" : "a lease of tokens without an id";
    lease->content.resize(static_cast<std::size_t>(grant->tokens));
  }
  lease->id = grant->id;
  lease->tokens = grant->tokens;
  leases_.push_back(std::move(lease));
  return "";
}

std::string StoreSim::RenewOrRelease() {
  if (leases_.empty()) return "";
  const auto lease = random_.Pick(leases_);
  if (random_.OneIn(2)) {
    store_->Release(lease->name_space, lease->id);
    lease->ended = true;
    std::erase(leases_, lease);
    return "";
  }
  const auto grant = store_->Renew(lease->name_space, lease->id, absl::Seconds(3));
  if (clock_.Now() >= lease->deadline)
    return Is(grant.status(), Reason::kLeaseEnded) ? "" : Unexpected("renew", grant.status());
  if (!grant.ok()) return Unexpected("renew", grant.status());
  lease->deadline = clock_.Now() + absl::Seconds(3);
  return "";
}

std::string StoreSim::PinOrUnpin() {
  if (!pins_.empty() && random_.OneIn(2)) {
    const std::size_t at = static_cast<std::size_t>(random_.Between(0, std::ssize(pins_) - 1));
    store_->Unpin(pins_[at]->name_space, pins_[at]->id);
    pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(at));
    return "";
  }
  const HeldPtr held = Any();
  if (held == nullptr) return "";
  auto pin = std::make_unique<PinOf>();
  pin->hard = random_.OneIn(2);
  pin->name_space = held->key.name_space;
  pin->model = held->model;
  const auto duration = absl::Seconds(random_.Between(1, 8));
  pin->deadline = clock_.Now() + duration;
  const auto kind = pin->hard ? cachestore::PinKind::kHard : cachestore::PinKind::kSoft;
  const bool prompt = random_.OneIn(3);
  const auto grant = prompt
                         ? store_->AddPin(held->key.name_space, held->model->model().id,
                                          PromptOf(held->plan, held->committed()), {kind, duration})
                         : store_->AddPin(held->key, {kind, duration});
  if (!grant.ok()) return Unexpected("pin", grant.status());
  if (grant->id == 0) return "";
  if (!prompt) pin->held = held;
  pin->content = held->plan;
  pin->content.resize(static_cast<std::size_t>(prompt ? grant->tokens : held->committed()));
  pin->id = grant->id;
  pins_.push_back(std::move(pin));
  return "";
}

std::string StoreSim::Read() {
  if (readings_.size() >= kMostReadings) return GoOnReading();
  if (random_.OneIn(3)) return Follow();
  return random_.OneIn(2) ? ReadByName() : ReadByLease();
}

std::string StoreSim::ReadByName() {
  const HeldPtr held = Any();
  if (held == nullptr) return "";
  cachestore::ReadRange range;
  if (random_.OneIn(2)) range.tokens = random_.Between(0, held->committed());
  range.within_windows = random_.OneIn(2);
  auto reader = store_->OpenReader(held->key, "", range, {.as = kernels::ElementType::kFp32});
  if (range.tokens < 0 && held->sealed_tokens > held->committed())
    return Is(reader.status(), Reason::kEvicted) ? "" : Unexpected("read all", reader.status());
  const std::int64_t want = range.tokens < 0 ? held->committed() : range.tokens;
  const bool sees = held->begin == 0 || (range.within_windows && held->Sees(want));
  if (WindowGone(reader.status()) && !sees) {
    ++tally_.windows_moved;
    return "";
  }
  if (!reader.ok()) return Unexpected("read", reader.status());
  auto reading = std::make_unique<Reading>();
  reading->model = held->model;
  reading->held = held;
  reading->deadline = clock_.Now() + absl::Seconds(30);
  reading->kept_tokens = held->committed();
  reading->content.assign(held->plan.begin(), held->plan.begin() + held->longest());
  for (std::size_t layer = 0; layer < held->received.size(); ++layer)
    reading->codes.push_back({held->codes(layer, 0), held->codes(layer, 1)});
  if (reader->pins().tokens != want)
    return fmt::format("reads {} tokens, want {}", reader->pins().tokens, want);
  Begin(*std::move(reader), std::move(reading));
  return "";
}

std::string StoreSim::ReadByLease() {
  if (leases_.empty()) return "";
  const auto lease = random_.Pick(leases_);
  auto reader = store_->OpenReader(lease->name_space, lease->id, "", {.within_windows = true},
                                   {.as = kernels::ElementType::kFp32});
  if (clock_.Now() >= lease->deadline)
    return Is(reader.status(), Reason::kLeaseEnded) ? "" : Unexpected("read late", reader.status());
  const bool lost = lease->held != nullptr && lease->held->lost;
  if (lost && !lease->uncertain && reader.ok()) return "reads what went with the device";
  if (lost && Is(reader.status(), Reason::kLeaseEnded)) return "";
  if (lease->may_be_lost && Is(reader.status(), Reason::kLeaseEnded)) return "";
  if (WindowGone(reader.status()) && !lease->sees) {
    ++tally_.windows_moved;
    return "";
  }
  if (!reader.ok()) return Unexpected("read by a lease", reader.status());
  if (reader->pins().tokens != lease->tokens)
    return fmt::format("reads {} tokens of a lease of {}", reader->pins().tokens, lease->tokens);
  auto reading = std::make_unique<Reading>();
  reading->model = lease->model;
  reading->held = lease->held;
  reading->lease = lease;
  reading->uncertain = lease->uncertain;
  reading->content = lease->content;
  if (lease->held != nullptr)
    reading->content.assign(lease->held->plan.begin(),
                            lease->held->plan.begin() + lease->held->longest());
  Begin(*std::move(reader), std::move(reading));
  return "";
}

void StoreSim::Begin(cachestore::SequenceReader reader, std::unique_ptr<Reading> reading) {
  if (reader.pins().tokens == 0) return;
  reading->data = reading->model->texts.DataOf(reading->content);
  reading->next = reader.layers()[0].first_token;
  reading->reader.emplace(std::move(reader));
  readings_.push_back(std::move(reading));
}

std::string StoreSim::GoOnReading() {
  if (readings_.empty()) return "";
  const auto at = static_cast<std::size_t>(random_.Between(0, std::ssize(readings_) - 1));
  Reading& reading = *readings_[at];
  const auto finish = [&] { readings_.erase(readings_.begin() + static_cast<std::ptrdiff_t>(at)); };
  if (reading.follower.has_value()) {
    bool over = false;
    std::string wrong = GoOnFollowing(reading, over);
    if (over) finish();
    return wrong;
  }
  cachestore::SequenceReader& reader = *reading.reader;
  const cachestore::LayerOutput& out = reader.layers()[reading.layer];
  const std::int64_t end = reader.pins().tokens;
  const std::int64_t count = std::min(end - reading.next, random_.Between(1, 64));
  std::vector<float> k(static_cast<std::size_t>(count * out.k_dim)),
      v(static_cast<std::size_t>(count * out.v_dim));
  const bool fails = device_fails_ && random_.OneIn(40);
  if (fails) device_.faults().FailDecode(1);
  const absl::Status status =
      reader.Fill(reading.layer, reading.next, count, reinterpret_cast<std::byte*>(k.data()),
                  reinterpret_cast<std::byte*>(v.data()));
  device_.faults().FailDecode(0);
  if (Ended(reading)) {
    if (!Is(status, Reason::kLeaseEnded)) return Unexpected("fill after the end", status);
    ++tally_.reads_ended;
    finish();
    return "";
  }
  if (fails)
    return status.code() == absl::StatusCode::kUnavailable ? "" : Unexpected("fill", status);
  if (!status.ok()) return Unexpected("fill", status);
  for (const int side : {0, 1}) {
    std::string wrong = CompareRows(reading, side, reading.next, side == 0 ? k : v);
    if (!wrong.empty()) return wrong;
    tally_.rows_compared += count;
  }
  reading.next += count;
  if (reading.next < end) return "";
  if (++reading.layer == reader.layers().size()) {
    finish();
  } else {
    reading.next = reader.layers()[reading.layer].first_token;
  }
  return "";
}

}  // namespace kvtier::sim
