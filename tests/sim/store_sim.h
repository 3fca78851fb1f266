#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/store.h"
#include "tests/cachestore/event_mirror.h"
#include "tests/sim/content.h"
#include "tests/sim/sim_device.h"
#include "tests/support/device.h"
#include "tests/support/manual_clock.h"
#include "tests/support/seed.h"

namespace kvtier::sim {

struct SimOptions {
  std::uint64_t seed = 0;
  std::int64_t operations = 2000;
  // A bug of the device's: one copy of so many copies nothing and says that it did. 0: none.
  int forgets_one_copy_of = 0;
};

// The whole store under a mix of operations that follows from a seed, beside a naive model of it
// that knows what each must answer. Nothing else moves: time is a clock that the simulation moves,
// the device fails when the simulation says so.
class StoreSim {
 public:
  explicit StoreSim(const SimOptions& options);
  ~StoreSim();

  // What first went against the model or a promise, with the operation; nothing if all went well.
  std::optional<std::string> Run();

  // What came about, so that a test can tell that it tried something.
  struct Tally {
    std::int64_t operations = 0;
    std::int64_t rows_compared = 0;
    std::int64_t rows_followed = 0;
    std::int64_t tokens_shared = 0;
    std::int64_t evictions = 0;
    std::int64_t refused_for_room = 0;
    std::int64_t reads_ended = 0;
    std::int64_t device_failures = 0;
    std::int64_t truncated = 0;
    std::int64_t events_checked = 0;
    std::int64_t lowered = 0;
    std::int64_t windows_moved = 0;  // what was asked for was behind them

    Tally& operator+=(const Tally& other);
    std::string Text() const;
  };
  const Tally& tally() const { return tally_; }

 private:
  struct ModelState;
  struct Held;     // a sequence, as the model knows it
  struct LeaseOf;  // a lease that a client has
  struct PinOf;
  struct Reading;  // a read that is under way
  using HeldPtr = std::shared_ptr<Held>;

  // Operations. Each says what went wrong, or "".
  std::string OpenOrAppend();
  std::string Seal();
  std::string Drop();
  std::string Fork();
  std::string Truncate();
  std::string LookUp();
  // That events tell what lookups find.
  std::string CheckEvents(const std::vector<cachestore::PrefixKey>& keys, std::int64_t hit,
                          bool windowed);
  std::string Acquire();
  std::string RenewOrRelease();
  std::string PinOrUnpin();
  std::string Read();
  std::string Follow();
  std::string GoOnReading();
  std::string ChangeQuota();
  std::string PassTime();

  std::string Append(const HeldPtr& held);
  std::string Open(const HeldPtr& held);
  std::string ReadByName();
  std::string ReadByLease();
  std::string GoOnFollowing(Reading& reading, bool& over);
  std::string CheckPiece(Reading& reading, cachestore::SequenceReader& piece, std::int64_t end);
  void Begin(cachestore::SequenceReader reader, std::unique_ptr<Reading> reading);
  // What a piece must be; "" or how it differs.
  std::string CompareRows(const Reading& reading, int side, std::int64_t first,
                          const std::vector<float>& rows) const;
  bool IsLowered(const Reading& reading, int side, const ExpectedHead& expected, std::int64_t token,
                 const float* row) const;
  static std::int64_t LoweredPages(const cachestore::SequenceDescription& description) {
    return std::accumulate(description.lowered_pages.begin(), description.lowered_pages.end(),
                           std::int64_t{0});
  }
  bool Ended(const Reading& reading) const;
  static bool LacksRoom(const absl::Status& status);
  // Nothing that could have gone is left.
  // `user`: whose operation it was.
  std::string CheckRefusedForRoom(const HeldPtr& user, const absl::Status& status);
  // What may have been evicted since, and whether that was allowed.
  std::string Observe();
  std::string CheckBooks();
  std::string CheckNothingIsLeft();

  HeldPtr Any();
  Content SomeContent(const ModelState& model);
  // Other texts from `tokens` on, mostly.
  void Replan(Held& held, std::int64_t tokens);
  void Forget(const HeldPtr& held);
  void Remember(const Held& held);
  bool Guarded(const Held& held) const;
  // What is kept, at the most, by what is in use.
  struct Guard {
    std::string name_space;
    const ModelState* model = nullptr;
    Content content;
  };
  std::vector<Guard> Guards() const;
  // The most and the least that a lookup may find of a prompt.
  std::pair<std::int64_t, std::int64_t> HitBounds(const ModelState& model,
                                                  const std::string& name_space,
                                                  const Content& prompt) const;

  const SimOptions options_;
  testing::Random random_;
  const std::unique_ptr<cachestore::Device> memory_ = testing::MakeDevice();
  SimDevice device_;
  testing::ManualClock clock_;
  std::unique_ptr<cachestore::Store> store_;
  std::vector<std::unique_ptr<ModelState>> models_;
  std::vector<HeldPtr> held_;
  std::vector<std::shared_ptr<LeaseOf>> leases_;
  std::vector<std::unique_ptr<PinOf>> pins_;
  std::vector<std::unique_ptr<Reading>> readings_;
  std::unique_ptr<cachestore::Subscription> subscription_;  // to the first namespace
  testing::EventMirror mirror_;
  // What was ever held, by namespace and model.
  std::map<std::pair<std::string, const ModelState*>, std::vector<Content>> history_;
  std::int64_t next_name_ = 0;
  bool evicts_for_room_ = false;
  bool device_fails_ = false;  // now and then
  bool may_evict_ = false;     // the operation
  bool lowers_ = false;        // pages, under pressure
  Tally tally_;
};

}  // namespace kvtier::sim
