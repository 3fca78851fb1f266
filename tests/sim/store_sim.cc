#include "tests/sim/store_sim.h"

#include <fmt/format.h>

#include "cachestore/base/check.h"
#include "tests/cachestore/message.h"
#include "tests/cachestore/model_shapes.h"
#include "tests/sim/state.h"

namespace kvtier::sim {

using cachestore::EvictionPolicyName;
using cachestore::Reason;
using cachestore::testing::Message;

namespace {

constexpr std::size_t kMostSequences = 24;
constexpr absl::Duration kOpenDeadline = absl::Seconds(20);

}  // namespace

StoreSim::Tally& StoreSim::Tally::operator+=(const Tally& other) {
  operations += other.operations;
  rows_compared += other.rows_compared;
  rows_followed += other.rows_followed;
  tokens_shared += other.tokens_shared;
  evictions += other.evictions;
  refused_for_room += other.refused_for_room;
  reads_ended += other.reads_ended;
  device_failures += other.device_failures;
  truncated += other.truncated;
  events_checked += other.events_checked;
  lowered += other.lowered;
  windows_moved += other.windows_moved;
  return *this;
}

std::string StoreSim::Tally::Text() const {
  return fmt::format(
      "{} operations: {} rows compared, {} followed, {} tokens shared, {} evictions, {} refused "
      "for room, {} reads ended, {} device failures, {} truncated, {} times events checked, {} "
      "pages lowered, {} times behind a window",
      operations, rows_compared, rows_followed, tokens_shared, evictions, refused_for_room,
      reads_ended, device_failures, truncated, events_checked, lowered, windows_moved);
}

StoreSim::StoreSim(const SimOptions& options)
    : options_(options), random_(options.seed), device_(*memory_, options.forgets_one_copy_of) {
  cachestore::StoreOptions store{
      .memory = random_.Pick<std::int64_t>({120'000, 250'000, 1'000'000}),
      .open_sequence_deadline = kOpenDeadline,
      .max_lease = absl::Seconds(30)};
  store.eviction =
      random_.Pick<EvictionPolicyName>({EvictionPolicyName::kLru, EvictionPolicyName::kLru,
                                        EvictionPolicyName::kS3Fifo, EvictionPolicyName::kNone});
  evicts_for_room_ = store.eviction != EvictionPolicyName::kNone;
  if (random_.OneIn(3)) store.idle_ttl = absl::Seconds(random_.Between(3, 30));
  if (random_.OneIn(3)) {
    store.evict_above = 90;
    store.evict_until = static_cast<int>(random_.Between(60, 90));
  }
  store.event_log = random_.Pick<std::int64_t>({20'000, 100'000, 16'000'000});
  device_fails_ = random_.OneIn(3);
  store_ = cachestore::Store::Create(store, device_, clock_).value();
  lowers_ = random_.OneIn(4);
  for (const char* space : kSpaces) {
    if (lowers_) KVT_CHECK(store_->SetPressure(space, cachestore::Pressure::kLadder).ok());
  }
  const std::vector<std::pair<const char*, int>> formats = {
      {"auto", 32}, {"int8_per_token_head", 32}, {"kivi(2,2,32,32)", 32}, {"fp8(scale=page)", 16}};
  for (int i = 0; i < 2; ++i) {
    const auto [format, page] = random_.Pick(formats);
    auto spec = cachestore::testing::UniformSpec({.layers = 2, .heads = 1, .dim = 32});
    spec.name = fmt::format("model-{}", i);
    if (random_.OneIn(2)) {
      spec.layers[1].kind = cachestore::LayerKind::kSlidingWindow;
      spec.layers[1].window = random_.Pick<int>({16, 40, 64});
    }
    auto request = cachestore::testing::RequestOf(spec, format, page);
    request.policy.retention = cachestore::Retention::kWindow;
    models_.push_back(
        std::make_unique<ModelState>(store_->RegisterModel(std::move(request)).value(), random_));
  }
}

StoreSim::~StoreSim() = default;

std::optional<std::string> StoreSim::Run() {
  struct Operation {
    const char* name;
    std::string (StoreSim::*run)();
    int weight;
  };
  std::vector<Operation> operations = {{"open or append", &StoreSim::OpenOrAppend, 40},
                                       {"seal", &StoreSim::Seal, 14},
                                       {"drop", &StoreSim::Drop, 2},
                                       {"fork", &StoreSim::Fork, 4},
                                       {"truncate", &StoreSim::Truncate, 4},
                                       {"look up", &StoreSim::LookUp, 6},
                                       {"acquire", &StoreSim::Acquire, 4},
                                       {"renew or release", &StoreSim::RenewOrRelease, 4},
                                       {"pin or unpin", &StoreSim::PinOrUnpin, 2},
                                       {"read", &StoreSim::Read, 8},
                                       {"go on reading", &StoreSim::GoOnReading, 12},
                                       {"change quota", &StoreSim::ChangeQuota, 1},
                                       {"pass time", &StoreSim::PassTime, 6}};
  // A mix of its own: some often, some hardly, some never, so that rare states come about.
  std::vector<int> all;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    if (i > 0) operations[i].weight *= static_cast<int>(random_.Pick<int>({0, 1, 1, 2, 5}));
    all.insert(all.end(), static_cast<std::size_t>(operations[i].weight), static_cast<int>(i));
  }
  for (std::int64_t step = 0; step < options_.operations; ++step) {
    const Operation& operation = operations[static_cast<std::size_t>(random_.Pick(all))];
    may_evict_ = false;
    std::string wrong = (this->*operation.run)();
    ++tally_.operations;
    if (wrong.empty()) wrong = Observe();
    if (wrong.empty() && step % 16 == 0) wrong = CheckBooks();
    if (!wrong.empty()) return fmt::format("operation {}, {}: {}", step, operation.name, wrong);
  }
  if (std::string wrong = CheckNothingIsLeft(); !wrong.empty()) return "at the end: " + wrong;
  return std::nullopt;
}

StoreSim::HeldPtr StoreSim::Any() { return held_.empty() ? nullptr : random_.Pick(held_); }

// A text, and perhaps another from some token on.
Content StoreSim::SomeContent(const ModelState& model) {
  const auto text = [&] {
    return static_cast<std::uint8_t>(random_.Between(0, model.texts.count() - 1));
  };
  Content content(static_cast<std::size_t>(model.texts.tokens()), text());
  if (random_.OneIn(2)) {
    const auto from = random_.Between(0, model.texts.tokens());
    std::fill(content.begin() + from, content.end(), text());
  }
  return content;
}

void StoreSim::Replan(Held& held, std::int64_t tokens) {
  Remember(held);
  const Content other = SomeContent(*held.model);
  std::copy(other.begin() + tokens, other.end(), held.plan.begin() + tokens);
}

void StoreSim::Remember(const Held& held) {
  const Content content(held.plan.begin(), held.plan.begin() + held.longest());
  if (!content.empty()) history_[{held.key.name_space, held.model}].push_back(content);
}

void StoreSim::Forget(const HeldPtr& held) {
  Remember(*held);
  held->gone = true;
  held->writer.reset();
  std::erase(held_, held);
}

std::string StoreSim::OpenOrAppend() {
  HeldPtr held = Any();
  if (held == nullptr || (held_.size() < kMostSequences && random_.OneIn(8))) {
    held = std::make_shared<Held>();
    held->key = {random_.Pick<std::string>({kSpaces[0], kSpaces[1]}), std::to_string(next_name_++)};
    held->model = random_.Pick(models_).get();
    held->plan = SomeContent(*held->model);
    held->told = random_.OneIn(3) ? 0 : random_.Between(0, held->model->texts.tokens());
    held->StandAt(0);
    return Open(held);
  }
  if (held->writer == nullptr || random_.OneIn(20)) return Open(held);
  return Append(held);
}

std::string StoreSim::Open(const HeldPtr& held) {
  const bool fresh = !held->gone && std::find(held_.begin(), held_.end(), held) == held_.end();
  held->writer.reset();
  if (!fresh && held->longest() == 0 && held->open() && !store_->Describe(held->key).ok()) {
    Forget(held);  // it went with its last writer
    return "";
  }
  cachestore::WriterRequest request;
  request.key = held->key;
  request.model_id = held->model->model().id;
  request.epoch = ++held->epoch;
  request.prompt = PromptOf(held->plan, held->told);
  auto writer = store_->OpenWriter(std::move(request));
  if (!held->open()) {
    if (!Is(writer.status(), Reason::kSealed))
      return Unexpected("open a sealed one", writer.status());
    return "";
  }
  if (!writer.ok()) return Unexpected("open", writer.status());
  held->last_message = clock_.Now();
  const std::int64_t from = (*writer)->standing().received_tokens;
  if (fresh) {
    const auto [least, most] = HitBounds(*held->model, held->key.name_space,
                                         {held->plan.begin(), held->plan.begin() + held->told});
    if (from > most || from % held->model->page() != 0)
      return fmt::format("begins with {} tokens; at most {} were ever held", from, most);
    held->StandAt(from);
    held->origin = from;
    held->begin = held->model->FirstSeen(from);
    held->plain = from == 0;
    tally_.tokens_shared += from;
    held_.push_back(held);
  } else if (from != held->committed()) {
    return fmt::format("stands at {}, want {}", from, held->committed());
  }
  held->writer = *std::move(writer);
  return "";
}

std::string StoreSim::Append(const HeldPtr& held) {
  std::vector<int> layers = {0, 1};
  if (random_.OneIn(4)) layers = {static_cast<int>(random_.Between(0, 1))};
  std::int64_t stands = held->model->texts.tokens();
  for (const int layer : layers)
    stands = std::min(stands, held->received[static_cast<std::size_t>(layer)]);
  const std::int64_t first =
      std::max<std::int64_t>(0, stands - (random_.OneIn(6) ? random_.Between(0, 9) : 0));
  const std::int64_t end = std::min(held->model->texts.tokens(), stands + random_.Between(1, 48));
  if (end <= first) return "";
  const KvData data = held->model->texts.DataOf({held->plan.begin(), held->plan.begin() + end});
  Message message(data, held->writer->shard(), {}, layers, {first, end - first});
  const bool fails = device_fails_ && random_.OneIn(40);
  if (fails) device_.faults().FailEncode(random_.Between(1, 3));
  may_evict_ = true;
  const auto ack = held->writer->Append(message.chunk());
  device_.faults().FailEncode(0);
  if (fails && ack.status().code() == absl::StatusCode::kUnavailable) {
    ++tally_.device_failures;
    held->lost = true;
    for (const auto& lease : leases_) {
      lease->may_be_lost |= lease->held == nullptr && lease->model == held->model &&
                            CommonPrefix(lease->content, held->plan) == std::ssize(lease->content);
    }
    Forget(held);
    return "";
  }
  if (LacksRoom(ack.status())) return CheckRefusedForRoom(held, ack.status());
  if (!ack.ok()) return Unexpected("append", ack.status());
  held->last_message = clock_.Now();
  for (const int layer : layers) {
    std::int64_t& received = held->received[static_cast<std::size_t>(layer)];
    received = std::max(received, end);
  }
  held->MoveOn();
  if (ack->received_tokens != held->committed() || ack->committed_tokens != held->committed())
    return fmt::format("acknowledges {} of {}", ack->committed_tokens, held->committed());
  return "";
}

std::string StoreSim::Seal() {
  const HeldPtr held = Any();
  if (held == nullptr) return "";
  const std::int64_t tokens = random_.OneIn(5) ? random_.Between(0, 160)
                              : held->open()   ? held->committed()
                                               : held->sealed_tokens;
  const bool right = held->open() ? held->together() && tokens == held->committed()
                                  : tokens == held->sealed_tokens;
  const absl::Status status = store_->Seal(held->key, tokens);
  if (right != status.ok() || (!right && !Is(status, Reason::kIncomplete)))
    return Unexpected("seal", status);
  if (right) held->sealed_tokens = tokens;
  if (right) held->writer.reset();
  return "";
}

std::string StoreSim::Drop() {
  const HeldPtr held = Any();
  if (held == nullptr) return "";
  const bool abort = random_.OneIn(2);
  const absl::Status status = abort ? store_->Abort(held->key) : store_->Remove(held->key);
  if (abort && !held->open())
    return Is(status, Reason::kNotOpen) ? "" : Unexpected("abort a sealed one", status);
  if (!status.ok()) return Unexpected("drop", status);
  Forget(held);
  if (store_->Describe(held->key).ok()) return "is still described";
  return "";
}

std::string StoreSim::Fork() {
  const HeldPtr source = Any();
  if (source == nullptr || held_.size() >= kMostSequences) return "";
  const std::int64_t asked = random_.OneIn(2) ? -1 : random_.Between(0, source->committed() + 1);
  auto fork = std::make_shared<Held>();
  fork->key = {source->key.name_space, std::to_string(next_name_++)};
  may_evict_ = true;
  const auto tokens = store_->Fork(source->key, fork->key.id, asked);
  if (asked > source->committed()) {
    return Is(tokens.status(),
              asked <= source->sealed_tokens ? Reason::kEvicted : Reason::kPastCommitted)
               ? ""
               : Unexpected("fork past the end", tokens.status());
  }
  if (LacksRoom(tokens.status())) return CheckRefusedForRoom(source, tokens.status());
  const std::int64_t length = asked < 0 ? source->committed() : asked;
  const bool exact = length == source->committed() && source->together();
  const std::int64_t page = source->model->page();
  const std::int64_t want = exact ? length : std::min(length / page, source->columns()) * page;
  if (WindowGone(tokens.status()) && !source->Sees(want)) {
    ++tally_.windows_moved;
    return "";
  }
  if (!tokens.ok()) return Unexpected("fork", tokens.status());
  if (*tokens != want) return fmt::format("forks at {}, want {}", *tokens, want);
  fork->model = source->model;
  fork->plan = source->plan;
  fork->StandAt(want);
  fork->origin = exact ? source->origin : want;
  fork->begin = fork->model->FirstSeen(want);
  if (exact) fork->frozen = source->frozen;
  fork->plain = exact && source->plain && source->open();  // a sealed one gave a slot back
  fork->told = std::min(source->told / kBlock, want / kBlock) * kBlock;
  fork->last_message = clock_.Now();
  Replan(*fork, want);
  held_.push_back(fork);
  return "";
}

std::string StoreSim::Truncate() {
  const HeldPtr held = Any();
  if (held == nullptr) return "";
  const std::int64_t tokens =
      std::max<std::int64_t>(0, random_.OneIn(2) ? held->committed() - random_.Between(-1, 9)
                                                 : random_.Between(0, held->committed()));
  bool cuts_group = false;
  for (std::size_t layer = 0; layer < held->received.size(); ++layer) {
    for (const int side : {0, 1})
      cuts_group |= tokens < held->codes(layer, side) &&
                    tokens % held->model->tensor(layer, side).layout.unit_tokens != 0;
  }
  may_evict_ = true;
  const absl::Status status = store_->Truncate(held->key, tokens, ++held->epoch);
  if (LacksRoom(status)) return CheckRefusedForRoom(held, status);
  const auto refused = [&](Reason reason) {
    return Is(status, reason) ? "" : Unexpected("a truncate that can't be", status);
  };
  if (!held->open()) return refused(Reason::kSealed);
  if (tokens > held->committed()) return refused(Reason::kPastCommitted);
  if (cuts_group) return refused(Reason::kGroupBound);
  if (lowers_ && tokens % held->model->page() != 0 && Is(status, Reason::kGroupBound)) return "";
  if (Is(status, Reason::kTruncateTooShort) && !held->Sees(tokens)) {
    ++tally_.windows_moved;
    return "";
  }
  if (!status.ok()) return Unexpected("truncate", status);
  ++tally_.truncated;
  held->writer.reset();
  // Who has a lease on it keeps what it was.
  const auto before = std::make_shared<Held>();
  before->key = held->key;
  before->model = held->model;
  before->plan = held->plan;
  before->received = held->received;
  before->frozen = held->frozen;
  before->origin = held->origin;
  before->gone = true;
  bool copied = false;
  // Of an uncertain one nobody knows whether it's still of this sequence, or of what that was.
  for (const auto& lease : leases_)
    copied |= lease->held == held && !lease->uncertain && lease->tokens > tokens;
  for (const auto& reading : readings_) {
    copied |= reading->held == held && !reading->uncertain && reading->lease == nullptr &&
              reading->kept_tokens > tokens;
  }
  // Others, of which the model knows nothing, may have made it copy all the same.
  const auto move = [&](auto& grant) {
    if (grant.held != held) return;
    grant.uncertain |= !copied;
    if (copied) grant.held = before;
  };
  for (const auto& lease : leases_) move(*lease);
  for (const auto& reading : readings_) move(*reading);
  Replan(*held, tokens);
  for (std::size_t layer = 0; layer < held->received.size(); ++layer) {
    for (const int side : {0, 1})
      held->frozen[layer][static_cast<std::size_t>(side)] =
          std::min(tokens, held->codes(layer, side));
  }
  held->received.assign(held->received.size(), tokens);
  held->origin = std::min(held->origin, tokens / held->model->page() * held->model->page());
  held->told = std::min(held->told / kBlock, tokens / kBlock) * kBlock;
  held->begin = std::min(held->begin, held->model->FirstSeen(tokens));
  held->plain = false;
  held->last_message = clock_.Now();
  return "";
}

std::string StoreSim::ChangeQuota() {
  const std::int64_t bytes = random_.OneIn(3) ? 0 : random_.Between(20'000, 300'000);
  may_evict_ = true;
  const auto standing =
      store_->SetQuota(random_.Pick<std::string>({kSpaces[0], kSpaces[1]}), bytes).value();
  return standing.quota == (bytes == 0 ? cachestore::kNoQuota : bytes) ? "" : "another quota";
}

std::string StoreSim::PassTime() {
  clock_.Advance(absl::Milliseconds(random_.Between(0, 2500)));
  if (random_.OneIn(2)) return "";
  may_evict_ = true;
  store_->Sweep();
  const auto over = [&](const auto& grant) { return grant->deadline <= clock_.Now(); };
  for (const auto& lease : leases_) lease->ended |= over(lease);
  std::erase_if(leases_, over);
  std::erase_if(pins_, over);
  if (!random_.OneIn(3)) return "";
  const int reclaimed = store_->ReclaimAbandoned();
  int want = 0;
  for (const HeldPtr& held : std::vector<HeldPtr>(held_)) {
    if (!held->open() || held->last_message > clock_.Now() - kOpenDeadline) continue;
    ++want;
    Forget(held);
  }
  return reclaimed == want ? "" : fmt::format("gave up {} sequences, want {}", reclaimed, want);
}

}  // namespace kvtier::sim
