// What must hold after every operation of the simulation.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "cachestore/model/plan.h"
#include "tests/sim/state.h"
#include "tests/sim/store_sim.h"

namespace kvtier::sim {

using cachestore::Reason;

bool StoreSim::LacksRoom(const absl::Status& status) {
  return Is(status, Reason::kBudget) || Is(status, Reason::kQuota);
}

bool StoreSim::Ended(const Reading& reading) const {
  if (reading.lease == nullptr) return clock_.Now() >= reading.deadline;
  return reading.lease->ended || clock_.Now() >= reading.lease->deadline;
}

bool StoreSim::Guarded(const Held& held) const {
  const auto on = [&](const auto& grant) {
    if constexpr (requires { grant->uncertain; }) {
      if (grant->uncertain) return false;
    }
    return grant->held.get() == &held;
  };
  return held.open() || std::any_of(leases_.begin(), leases_.end(), on) ||
         std::any_of(pins_.begin(), pins_.end(),
                     [&](const auto& pin) { return pin->hard && on(pin); }) ||
         std::any_of(readings_.begin(), readings_.end(), [&](const auto& reading) {
           return on(reading) && (reading->lease == nullptr || !reading->lease->ended);
         });
}

std::vector<StoreSim::Guard> StoreSim::Guards() const {
  std::vector<Guard> guards;
  const auto add_held = [&](const Held& held) {
    guards.push_back(
        {held.key.name_space, held.model, {held.plan.begin(), held.plan.begin() + held.longest()}});
  };
  // Of a prompt, that may have been found in a sequence, which is then kept whole.
  const auto add_prompt = [&](const std::string& name_space, const ModelState* model,
                              const Content& content) {
    guards.push_back({name_space, model, content});
    if (const auto known = history_.find({name_space, model}); known != history_.end()) {
      for (const Content& other : known->second) {
        if (CommonPrefix(other, content) == std::ssize(content))
          guards.push_back({name_space, model, other});
      }
    }
    for (const HeldPtr& held : held_) {
      if (CommonPrefix(held->plan, content) == std::ssize(content)) add_held(*held);
    }
  };
  for (const HeldPtr& held : held_) {
    if (Guarded(*held)) add_held(*held);
  }
  for (const auto& lease : leases_) {
    if (lease->held != nullptr) add_held(*lease->held);
    if (lease->uncertain) {
      add_prompt(lease->name_space, lease->model,
                 {lease->content.begin(), lease->content.begin() + lease->tokens});
    } else if (lease->held == nullptr) {
      add_prompt(lease->name_space, lease->model, lease->content);
    }
  }
  for (const auto& pin : pins_) {
    if (!pin->hard) continue;
    if (pin->held != nullptr) {
      add_held(*pin->held);
    } else {
      add_prompt(pin->name_space, pin->model, pin->content);
    }
  }
  for (const auto& reading : readings_) {
    if (reading->lease == nullptr) add_held(*reading->held);
    if (reading->uncertain)
      add_prompt(reading->held->key.name_space, reading->model, reading->content);
  }
  return guards;
}

std::string StoreSim::CheckRefusedForRoom(const HeldPtr& user, const absl::Status& status) {
  ++tally_.refused_for_room;
  if (!evicts_for_room_) return "";
  if (std::string wrong = Observe(); !wrong.empty()) return wrong;
  const bool quota = Is(status, Reason::kQuota);
  std::vector<Guard> guards = Guards();
  guards.push_back({user->key.name_space, user->model, user->plan});
  for (const HeldPtr& held : held_) {
    if (quota && held->key.name_space != user->key.name_space) continue;
    if (Guarded(*held) || held == user) continue;
    const std::int64_t page = held->model->page();
    std::int64_t kept = 0;
    for (const Guard& guard : guards) {
      if (guard.name_space == held->key.name_space && guard.model == held->model)
        kept = std::max(kept, CommonPrefix(guard.content, held->plan));
    }
    kept = (kept + page - 1) / page * page;  // a page is kept whole
    if (held->committed() > kept)
      return fmt::format("{}, though sequence {} has {} tokens that could go, but for {}",
                         status.ToString(), held->key.id, held->committed(), kept);
  }
  return "";
}

std::string StoreSim::Observe() {
  for (const HeldPtr& held : std::vector<HeldPtr>(held_)) {
    const auto description = store_->Describe(held->key);
    const std::int64_t committed = description.ok() ? description->committed_tokens : 0;
    if (description.ok() && committed == held->committed()) continue;
    if (!description.ok() && !Is(description.status(), Reason::kUnknownSequence))
      return description.status().ToString();
    const bool empty = held->open() && held->longest() == 0 && held->writer == nullptr;
    if (!description.ok() && empty) {
      Forget(held);
      continue;
    }
    if (held->open() || Guarded(*held) || !may_evict_ || committed > held->committed()) {
      return fmt::format("sequence {} has {} tokens, want {}: it {}", held->key.id, committed,
                         held->committed(), may_evict_ ? "is in use" : "could not be evicted now");
    }
    ++tally_.evictions;
    if (!description.ok()) {
      Forget(held);
      continue;
    }
    if (committed % held->model->page() != 0) return "what is left are no whole pages";
    Remember(*held);
    held->StandAt(committed);
    for (auto& frozen : held->frozen) frozen = {committed, committed};
    held->origin = committed;
    held->begin = std::min(held->begin, committed / held->model->page());
    held->plain = false;
  }
  return "";
}

std::string StoreSim::CheckBooks() {
  const cachestore::MemoryParts parts = store_->memory();
  const std::int64_t sum = parts.use.total() + parts.slack + parts.staging + parts.free;
  if (sum != store_->budget()) return fmt::format("the parts sum to {}", sum);
  std::int64_t held = 0, sequences = 0, tokens = 0;
  for (const auto& model : models_) {
    const cachestore::ModelTotals totals = model->entry->totals();
    held += totals.held.allocated;
    sequences += totals.sequences();
    tokens += totals.sequence_tokens;
  }
  if (held != store_->budget() - parts.free - parts.staging)
    return fmt::format("the models hold {}", held);
  std::int64_t of_spaces = 0;
  for (const char* space : kSpaces) of_spaces += store_->GetQuota(space).held;
  if (of_spaces != held)
    return fmt::format("the namespaces hold {}, the models {}", of_spaces, held);
  std::int64_t want_tokens = 0;
  for (const HeldPtr& sequence : held_) want_tokens += sequence->committed();
  if (sequences != std::ssize(held_) || tokens != want_tokens)
    return fmt::format("{} sequences of {} tokens, want {} of {}", sequences, tokens, held_.size(),
                       want_tokens);
  if (store_->leases() != std::ssize(leases_) || store_->pins() != std::ssize(pins_))
    return fmt::format("{} leases and {} pins", store_->leases(), store_->pins());
  for (const HeldPtr& sequence : held_) {
    if (!sequence->plain || !sequence->together()) continue;
    const auto plan = sequence->open()
                          ? PlanSequence(sequence->model->model(), sequence->committed())
                          : PlanSealed(sequence->model->model(), sequence->committed());
    const auto description = store_->Describe(sequence->key);
    if (description.ok() && LoweredPages(*description) > 0) continue;
    // Others may keep what its window does not.
    const bool alone = held_.size() == 1 && leases_.empty() && pins_.empty() && readings_.empty();
    if (description.ok() && sequence->model->windowed() && !alone &&
        description->held.allocated >= plan.allocated)
      continue;
    if (!description.ok() || description->held != plan)
      return fmt::format("sequence {} of {} tokens takes {} bytes, planned {}", sequence->key.id,
                         sequence->committed(), description.ok() ? description->held.allocated : -1,
                         plan.allocated);
  }
  return "";
}

std::string StoreSim::CheckNothingIsLeft() {
  readings_.clear();
  for (const HeldPtr& held : std::vector<HeldPtr>(held_)) {
    held->writer.reset();
    store_->Remove(held->key).IgnoreError();  // one that held nothing went with its writer
    Forget(held);
  }
  clock_.Advance(absl::Hours(1));
  store_->Sweep();
  leases_.clear();
  pins_.clear();
  if (std::string wrong = CheckBooks(); !wrong.empty()) return wrong;
  for (const auto& [format, columns] : store_->lowered()) tally_.lowered += columns;
  if (store_->memory().free + store_->memory().staging != store_->budget())
    return fmt::format("{} bytes are not free", store_->budget() - store_->memory().free);
  for (const auto& [where, contents] : history_) {
    for (const Content& content : contents) {
      const auto hit = store_->Lookup(where.first, where.second->model().id,
                                      {PromptOf(content, std::ssize(content))});
      if (hit.value()[0] != 0) return "something is still found";
    }
  }
  return "";
}

std::pair<std::int64_t, std::int64_t> StoreSim::HitBounds(const ModelState& model,
                                                          const std::string& name_space,
                                                          const Content& prompt) const {
  std::int64_t least = 0, most = 0;
  const auto blocks = [](std::int64_t tokens) { return tokens / kBlock * kBlock; };
  if (const auto known = history_.find({name_space, &model}); known != history_.end()) {
    for (const Content& content : known->second)
      most = std::max(most, blocks(CommonPrefix(content, prompt)));
  }
  for (const HeldPtr& held : held_) {
    if (held->key.name_space != name_space || held->model != &model) continue;
    const std::int64_t common = CommonPrefix(held->plan, prompt);
    most = std::max(most, blocks(std::min(common, held->longest())));
    const std::int64_t own = blocks(std::min({common, held->told, held->committed()}));
    if (held->Sees(own)) least = std::max(least, own);
  }
  return {least, most};
}

// Whether a row is what its page, as it reads as codes, has become after one step of the ladder or
// more.
bool StoreSim::IsLowered(const Reading& reading, int side, const ExpectedHead& expected,
                         std::int64_t token, const float* row) const {
  const std::int64_t page_tokens = reading.model->page();
  const std::int64_t first = token / page_tokens * page_tokens;
  if (!lowers_) return false;
  // A page that ends behind the lease is of tokens that only who wrote it knows.
  if (first + page_tokens > std::ssize(reading.content)) return reading.held == nullptr;
  if (first + page_tokens > expected.whole_units) return false;
  const TensorModel& tensor = reading.model->tensor(reading.layer, side);
  const auto dim = static_cast<std::size_t>(tensor.dim());
  const auto begin = expected.codes.begin() + static_cast<std::ptrdiff_t>(first) * tensor.dim();
  std::vector<float> values(begin, begin + static_cast<std::ptrdiff_t>(page_tokens) * tensor.dim());
  const float* const same = values.data() + static_cast<std::size_t>(token - first) * dim;
  if (std::memcmp(row, same, dim * sizeof(float)) == 0) return false;
  for (const auto& rung : reading.model->entry->rungs()) {
    KvTensor page{kernels::ElementType::kFp32, 1, page_tokens, tensor.dim(), {}};
    page.bytes.resize(values.size() * sizeof(float));
    std::memcpy(page.bytes.data(), values.data(), page.bytes.size());
    const cachestore::LayerModel& layer = rung->layers[reading.layer];
    values = Expect(side == 0 ? layer.k : layer.v, page, 0).codes;
    const float* const lowered = values.data() + static_cast<std::size_t>(token - first) * dim;
    if (std::memcmp(row, lowered, dim * sizeof(float)) == 0) return true;
  }
  return false;
}

std::string StoreSim::CompareRows(const Reading& reading, int side, std::int64_t first,
                                  const std::vector<float>& rows) const {
  const TensorModel& tensor = reading.model->tensor(reading.layer, side);
  const KvTensor& data =
      side == 0 ? reading.data.layers[reading.layer].k : reading.data.layers[reading.layer].v;
  const ExpectedHead expected = Expect(tensor, data, 0);
  const auto dim = static_cast<std::size_t>(data.dim);
  for (std::size_t i = 0; i * dim < rows.size(); ++i) {
    const auto token = static_cast<std::size_t>(first) + i;
    const auto is = [&](const std::vector<float>& want) {
      return std::memcmp(rows.data() + i * dim, want.data() + token * dim, dim * sizeof(float)) ==
             0;
    };
    const auto at = static_cast<std::int64_t>(token);
    if (IsLowered(reading, side, expected, at, rows.data() + i * dim)) continue;
    const bool has_codes = at < expected.whole_units;
    bool right = false;
    if (!reading.codes.empty()) {
      right =
          is(at < reading.codes[reading.layer][static_cast<std::size_t>(side)] ? expected.codes
                                                                               : expected.source);
    } else {
      // A unit that ends behind the lease is of tokens that only who wrote it knows.
      right = !has_codes || is(expected.codes) || is(expected.source);
    }
    if (!right)
      return fmt::format("{} of layer {}, token {}, is not what it was written as",
                         side == 0 ? "k" : "v", reading.layer, token);
  }
  return "";
}

}  // namespace kvtier::sim
