#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/cli/range.h"
#include "client/cli/table.h"
#include "tests/support/status_matchers.h"

namespace kvtier::client {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::StatusIs;
using ::testing::HasSubstr;

TEST(Table, AlignsColumns) {
  Table table({{"NAME"}, {"N", Table::Align::kRight}, {"LAST"}});
  table.AddRow({"a", "1,234", "x"});
  table.AddRow({"\xC3\xA9t\xC3\xA9s-long", "5", ""});
  EXPECT_EQ(table.ToString(),
            "NAME           N  LAST\n"
            "a          1,234  x\n"
            "\xC3\xA9t\xC3\xA9s-long      5\n");
}

TEST(Table, HasNoTitleLineWithoutTitles) {
  Table table({{}, {}});
  table.AddRow({"key", "value"});
  EXPECT_EQ(table.ToString(), "key  value\n");
}

TEST(Table, WritesNumbersForPeople) {
  EXPECT_EQ(WithThousands(0), "0");
  EXPECT_EQ(WithThousands(999), "999");
  EXPECT_EQ(WithThousands(1'234'567), "1,234,567");
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.00 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.00 MiB");
  EXPECT_EQ(FormatBytes(3ull << 30), "3.00 GiB");
  EXPECT_EQ(FormatBytes(~0ull), "16.00 EiB");
  EXPECT_EQ(FormatRatio(3.198), "3.20x");
  EXPECT_EQ(FormatRatio(0), "-");
}

TEST(Range, IsHalfOpen) {
  const auto both = ParseRange("2:5", 100);
  ASSERT_THAT(both, IsOk());
  EXPECT_EQ(both->first, 2u);
  EXPECT_EQ(both->count, 3u);
  const auto rest = ParseRange("2:", 100);
  ASSERT_THAT(rest, IsOk());
  EXPECT_EQ(rest->first, 2u);
  EXPECT_EQ(rest->count, 0u);
  const auto start = ParseRange(":5", 100);
  ASSERT_THAT(start, IsOk());
  EXPECT_EQ(start->first, 0u);
  EXPECT_EQ(start->count, 5u);
  EXPECT_EQ(ParseRange(":", 100)->count, 0u);
}

// An empty range must not become "all", which is what a count of 0 asks for.
TEST(Range, RefusesAllElse) {
  for (const char* text : {"", "5", "5:5", "6:5", "-1:5", "1:-5", "a:b", "1:2:3", " 1:2", "0:101",
                           "0:99999999999999999999", "101:"}) {
    EXPECT_THAT(ParseRange(text, 100),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)))
        << text;
  }
}

class ProgressTest : public ::testing::Test {
 protected:
  Terminal MakeTerminal(bool tty) {
    return {.out = out_, .err = err_, .err_is_tty = tty, .now = [this] { return now_; }};
  }

  absl::Time now_ = absl::UnixEpoch();
  std::ostringstream out_;
  std::ostringstream err_;
};

TEST_F(ProgressTest, SpeaksAfterTwoSecondsAndWipesItself) {
  Terminal terminal = MakeTerminal(true);
  {
    Progress progress(terminal, "put", false);
    now_ += absl::Seconds(1.9);
    progress.Update(1 << 20, 4 << 20);
    EXPECT_EQ(err_.str(), "");
    now_ += absl::Seconds(0.2);
    progress.Update(2 << 20, 4 << 20);
    EXPECT_EQ(err_.str(), "\r\x1b[Kput: 2.00 MiB of 4.00 MiB (50 %), 1 MB/s");
    progress.Update(3 << 20, 4 << 20);
    EXPECT_THAT(err_.str(), ::testing::Not(HasSubstr("75 %")));
    now_ += absl::Seconds(0.2);
    progress.Update(3 << 20, 4 << 20);
    EXPECT_THAT(err_.str(), HasSubstr("75 %"));
  }
  EXPECT_TRUE(err_.str().ends_with("\r\x1b[K"));
  EXPECT_EQ(out_.str(), "");
}

TEST_F(ProgressTest, IsSilentWhereNobodyLooksUnlessAskedFor) {
  Terminal terminal = MakeTerminal(false);
  {
    Progress progress(terminal, "put", false);
    now_ += absl::Seconds(10);
    progress.Update(1, 2);
  }
  EXPECT_EQ(err_.str(), "");
  Progress progress(terminal, "get", true);
  now_ += absl::Seconds(3);
  progress.Update(3'000'000, 6'000'000);
  EXPECT_EQ(err_.str(), "get: 2.86 MiB of 5.72 MiB (50 %), 1 MB/s\n");
}

TEST(Json, ShowsAMessageAsTheProtoNamesIt) {
  v1::ListSequencesResponse reply;
  v1::SequenceInfo& info = *reply.add_sequences();
  info.set_sequence("s\xFF");
  info.set_state(v1::SEQUENCE_STATE_OPEN);
  info.set_committed_tokens(1ull << 60);
  info.mutable_memory()->set_codes(5);
  const auto json = ToJson(reply);
  EXPECT_EQ(json["sequences"][0]["state"], "open");
  EXPECT_EQ(json["sequences"][0]["committed_tokens"], 1ull << 60);
  EXPECT_EQ(json["sequences"][0]["memory"]["codes"], 5);
  EXPECT_EQ(json["next_page_token"], "");
  EXPECT_THAT(JsonLine(json), HasSubstr("\"s\xEF\xBF\xBD\""));
}

TEST(Json, KnowsAllKindsOfFields) {
  v1::RegisterModelRequest request;
  request.mutable_spec()->set_source_dtype(v1::DTYPE_FP8_E4M3);
  request.mutable_spec()->add_layers()->set_kind(v1::LAYER_KIND_SLIDING_WINDOW);
  request.mutable_policy()->add_kv_cache_dtype_skip_layers("1");
  request.add_scales()->add_k_scale(0.5F);
  const auto json = ToJson(request);
  EXPECT_EQ(json["spec"]["source_dtype"], "fp8_e4m3");
  EXPECT_EQ(json["spec"]["layers"][0]["kind"], "sliding_window");
  EXPECT_EQ(json["policy"]["kv_cache_dtype_skip_layers"][0], "1");
  EXPECT_EQ(json["scales"][0]["k_scale"][0], 0.5);
  v1::ModelCapacity capacity;
  capacity.set_compression_ratio(2.5);
  EXPECT_EQ(ToJson(capacity)["compression_ratio"], 2.5);
  v1::SequenceManifest manifest;
  manifest.set_sealed(true);
  EXPECT_EQ(ToJson(manifest)["sealed"], true);
}

TEST(Json, StoredIsAllButFree) {
  v1::MemoryParts memory;
  memory.set_codes(1);
  memory.set_scales(2);
  memory.set_residual(4);
  memory.set_header(8);
  memory.set_slack(16);
  memory.set_free(1000);
  EXPECT_EQ(StoredBytes(memory), 31u);
}

}  // namespace
}  // namespace kvtier::client
