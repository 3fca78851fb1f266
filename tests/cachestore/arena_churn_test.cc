// Days of a busy store, on its arena alone: models of all page sizes come and go, sequences grow
// page by page beside each other, and go column by column once they are cold. What is asked: how
// full is the slab when something finds no room in it?

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/arena.h"
#include "cachestore/base/check.h"
#include "cachestore/model/model.h"
#include "tests/cachestore/model_shapes.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::SeededRandom;
using testing::UniformSpec;

constexpr std::int64_t kBudget = std::int64_t{8} << 30;
constexpr int kPageTokens = 128;
constexpr std::size_t kWriters = 8;
constexpr std::int64_t kMostPages = 24;
// Of the budget: sequences that stay open and can't be evicted, scattered over the slab.
constexpr double kOpen = 0.15;
constexpr int kStores = 2;

// Of what fits into it at the start, when things of all models find no room for the first time. A
// day replaces all that the slab holds seven times.
constexpr double kUsable = 0.97;
// After three such days, when what is lost had levelled off at 0.90 to 0.96 of the start
// (docs/adr/0009-one-slab-best-fit.md).
constexpr double kUsableMuchLater = 0.87;

// Addresses, and no memory behind them: an arena never looks at what it hands out.
class Addresses {
 public:
  explicit Addresses(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        begin_(
            mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    KVT_CHECK(begin_ != MAP_FAILED);
  }
  ~Addresses() { munmap(begin_, bytes_); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  std::byte* begin() const { return static_cast<std::byte*>(begin_); }

 private:
  const std::size_t bytes_;
  void* const begin_;
};

// What a model's sequences allocate.
struct Sizes {
  std::string name;
  std::vector<std::int64_t> page;   // K and V of every layer
  std::vector<std::int64_t> slots;  // with the first page, where the format has a residual
};

Sizes SizesOf(const std::string& name, const ModelSpec& spec, const std::string& format) {
  const auto model = ResolveModel(testing::RequestOf(spec, format), kPageTokens).value();
  Sizes sizes{.name = name + " " + format, .page = {}, .slots = {}};
  for (const LayerModel& layer : model->layers) {
    for (const TensorModel* tensor : {&layer.k, &layer.v}) {
      if (tensor->dim() == 0) continue;
      sizes.page.push_back(tensor->layout.bytes);
      if (tensor->residual.capacity() > 0) sizes.slots.push_back(tensor->residual_slot_bytes());
    }
  }
  return sizes;
}

ModelSpec MlaSpec() {
  ModelSpec spec = UniformSpec({.layers = 61, .heads = 1, .dim = 576});
  for (LayerSpec& layer : spec.layers)
    layer = {.kind = LayerKind::kMla, .kv_heads = 1, .k_head_dim = 576, .v_head_dim = 0};
  return spec;
}

// Pages of 3 MiB to 24 MiB, of parts of 48 KiB to 512 KiB: none a multiple of another, by their
// headers.
struct Models {
  ModelSpec llama = UniformSpec({.layers = 32, .heads = 8, .dim = 128});
  Sizes bf16 = SizesOf("llama", llama, "auto");
  Sizes fp8 = SizesOf("llama", llama, "fp8");
  Sizes int8 = SizesOf("llama", llama, "int8_per_token_head");
  Sizes kivi2 = SizesOf("llama", llama, "kivi2");
  Sizes small = SizesOf("small", UniformSpec({.layers = 30, .heads = 3, .dim = 64}), "auto");
  Sizes large = SizesOf("large", UniformSpec({.layers = 24, .heads = 4, .dim = 512}), "auto");
  Sizes mla = SizesOf("mla", MlaSpec(), "auto");
  Sizes mla_fp8 = SizesOf("mla", MlaSpec(), "fp8_ds_mla");
};
const Models& All() {
  static const Models models;
  return models;
}
using Mix = std::vector<const Sizes*>;

struct Held {
  const Sizes* model = nullptr;
  std::int64_t most_pages = 0;
  std::vector<std::vector<Allocation>> pages;  // the first with the slots

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& page : pages) sum += BytesOf(page);
    return sum;
  }
  static std::int64_t BytesOf(const std::vector<Allocation>& page) {
    std::int64_t sum = 0;
    for (const Allocation& part : page) sum += part.size();
    return sum;
  }
};

// A store's worth of sequences over an arena.
class Churn {
 public:
  explicit Churn(SeededRandom& random) : random_(random) {}

  // Sequences of these models come until as many bytes as the budget has were evicted for them.
  // How full it was, on the average, when a page found no room at first.
  double Run(const Mix& mix) {
    return FullWhile([&, until = evicted_ + kBudget] { return evicted_ < until; }, mix);
  }

  // No others come until all that can go of the models before have gone, then until the slab was
  // found full many times. How full that was, of what the open sequences of others leave.
  double RunAlone(const Sizes& model) {
    changes_open_ = false;
    const auto is_other = [&](const auto& sequence) { return sequence->model != &model; };
    for (auto one = growing_.begin(); one != growing_.end();) {
      const auto next = std::next(one);
      if (is_other(*one)) Finish(one);
      one = next;
    }
    FullWhile([&] { return std::any_of(cold_.begin(), cold_.end(), is_other); }, {&model});
    const double full = FullWhile([&] { return times_full_ < 60; }, {&model});
    changes_open_ = true;
    std::int64_t others = 0;
    for (const auto& sequence : open_) others += is_other(sequence) ? sequence->bytes() : 0;
    const double taken = static_cast<double>(others) / kBudget;
    return (full - taken) / (1 - taken);
  }

  // What is open is sealed.
  void SealAll() {
    open_bytes_ = 0;
    cold_.splice(cold_.begin(), open_);
  }
  void Clear() {
    SealAll();
    cold_.clear();
    growing_.clear();
  }
  bool IsOnePiece() { return static_cast<bool>(arena_.Allocate(kBudget)); }

 private:
  using Sequences = std::list<std::unique_ptr<Held>>;

  template <class Condition>
  double FullWhile(const Condition& condition, const Mix& mix) {
    times_full_ = 0;
    full_ = 0;
    while (condition()) Step(mix);
    return times_full_ == 0 ? 1 : full_ / times_full_;
  }

  void Step(const Mix& mix) {
    while (growing_.size() < kWriters) {
      const std::int64_t root = random_.Between(1, kMostPages);
      growing_.push_back(std::make_unique<Held>());
      growing_.back()->model = random_.Pick(mix);
      growing_.back()->most_pages = std::max<std::int64_t>(1, root * root / kMostPages);
    }
    const auto one = AnyOf(growing_);
    if (!Grow(**one) || static_cast<std::int64_t>((*one)->pages.size()) == (*one)->most_pages)
      Finish(one);
    // One is read again, and is the last to go.
    if (!cold_.empty() && random_.OneIn(20)) cold_.splice(cold_.end(), cold_, AnyOf(cold_));
    // An open one is sealed.
    if (changes_open_ && open_share() > kOpen - 0.01 && random_.OneIn(30)) {
      const auto sealed = AnyOf(open_);
      open_bytes_ -= (*sealed)->bytes();
      cold_.splice(cold_.end(), open_, sealed);
    }
  }

  Sequences::iterator AnyOf(Sequences& all) {
    return std::next(all.begin(), random_.Between(0, static_cast<std::int64_t>(all.size()) - 1));
  }

  bool Grow(Held& sequence) {
    std::vector<Allocation> page;
    bool full = false;
    const auto take_all = [&](const std::vector<std::int64_t>& sizes) {
      for (const std::int64_t size : sizes) {
        Allocation part = arena_.Allocate(size);
        for (; !part; part = arena_.Allocate(size)) {
          if (!std::exchange(full, true)) NoteFull();
          if (!EvictColdest()) return false;
        }
        page.push_back(std::move(part));
      }
      return true;
    };
    if (sequence.pages.empty() && !take_all(sequence.model->slots)) return false;
    if (!take_all(sequence.model->page)) return false;
    sequence.pages.push_back(std::move(page));
    return true;
  }

  void NoteFull() {
    ++times_full_;
    full_ += 1 - static_cast<double>(arena_.Snapshot().free) / kBudget;
  }

  // Its last column, as the store does.
  bool EvictColdest() {
    if (cold_.empty()) return false;
    Held& coldest = *cold_.front();
    evicted_ += Held::BytesOf(coldest.pages.back());
    coldest.pages.pop_back();
    if (coldest.pages.empty()) cold_.pop_front();
    return true;
  }

  void Finish(Sequences::iterator sequence) {
    if ((*sequence)->pages.empty()) {
      growing_.erase(sequence);
    } else if (changes_open_ && open_share() < kOpen && random_.OneIn(4)) {
      open_bytes_ += (*sequence)->bytes();
      open_.splice(open_.end(), growing_, sequence);
    } else {
      cold_.splice(cold_.end(), growing_, sequence);
    }
  }

  double open_share() const { return static_cast<double>(open_bytes_) / kBudget; }

  SeededRandom& random_;
  const Addresses addresses_{kBudget};
  Arena arena_{addresses_.begin(), kBudget};

  Sequences growing_;
  Sequences cold_;  // coldest first
  Sequences open_;
  std::int64_t open_bytes_ = 0;
  bool changes_open_ = true;
  std::int64_t evicted_ = 0;
  int times_full_ = 0;
  double full_ = 0;  // what was handed out then, of the budget, summed
};

TEST(ArenaChurn, AsMuchFitsAtTheEndOfADayAsAtItsStart) {
  const Models& m = All();
  const Mix all = {&m.bf16, &m.fp8, &m.int8, &m.kivi2, &m.small, &m.large, &m.mla, &m.mla_fp8};
  const std::vector<Mix> day = {{&m.bf16, &m.fp8, &m.int8, &m.kivi2},
                                {&m.small},
                                {&m.large},
                                {&m.mla, &m.mla_fp8},
                                {&m.small, &m.large},
                                {&m.kivi2, &m.small, &m.mla},
                                all};
  SeededRandom random;
  double end = 0, much_later = 0;
  for (int store = 0; store < kStores; ++store) {
    Churn churn(random);
    const double start = churn.Run(all);
    const auto live = [&] {
      double last = 0;
      for (const Mix& mix : day) last = churn.Run(mix);
      return last / start / kStores;
    };
    end += live();
    live();
    much_later += live();
  }
  RecordProperty("end", std::to_string(end));
  RecordProperty("much_later", std::to_string(much_later));
  EXPECT_GE(end, kUsable);
  EXPECT_GE(much_later, kUsableMuchLater);
}

// No page size keeps memory from another for good.
TEST(ArenaChurn, AModelThatComesGetsWhatOthersLeave) {
  const Models& m = All();
  // What the model that comes gets, of the smallest that was measured and a margin: while the
  // others' sequences go, and right after; then once its own were replaced twice. Of memory that
  // large pages leave nothing is lost on small ones.
  const struct {
    const Sizes* before;
    const Sizes* after;
    double at_first;
    double later;
  } changes[] = {{&m.small, &m.large, 0.91, 0.93},
                 {&m.mla_fp8, &m.large, 0.90, 0.93},
                 {&m.large, &m.small, 0.99, 0.99},
                 {&m.large, &m.mla, 0.99, 0.99},
                 {&m.kivi2, &m.bf16, 0.97, 0.97}};
  SeededRandom random;
  for (const auto& change : changes) {
    SCOPED_TRACE(change.after->name + " after " + change.before->name);
    Churn churn(random);
    churn.Run({change.before});
    EXPECT_GE(churn.Run({change.after}), change.at_first);
    EXPECT_GE(churn.RunAlone(*change.after), change.at_first);
    churn.SealAll();
    churn.Run({change.after});
    EXPECT_GE(churn.Run({change.after}), change.later);
    churn.Clear();
    EXPECT_TRUE(churn.IsOnePiece());
    EXPECT_GE(churn.Run({change.after}), 0.99);
  }
}

}  // namespace
}  // namespace kvtier::cachestore
