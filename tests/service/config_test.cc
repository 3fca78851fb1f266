#include "service/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "service/config/fields.h"

namespace kvtier::service {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

// One start of kvtierd: what each source says.
class Start {
 public:
  Start& Flag(const std::string& argument) {
    arguments_.push_back(argument);
    return *this;
  }
  Start& Variable(const std::string& name, const std::string& value) {
    environment_[name] = value;
    return *this;
  }
  // Written to a real file, which --config then names.
  Start& File(const std::string& toml) {
    // One a process: tests of this file may run at the same time.
    path_ = ::testing::TempDir() + "config_test_" + std::to_string(getpid()) + ".toml";
    std::ofstream(path_) << toml;
    return Flag("--config").Flag(path_);
  }
  const std::string& path() const { return path_; }

  LoadResult Load() const {
    std::vector<const char*> argv = {"kvtierd"};
    for (const std::string& argument : arguments_) argv.push_back(argument.c_str());
    return LoadConfig(static_cast<int>(argv.size()), argv.data(), environment_);
  }

 private:
  std::vector<std::string> arguments_;
  Environment environment_;
  std::string path_;
};

Setting SettingOf(const LoadResult& result, const std::string& key) {
  for (const Setting& setting : result.settings) {
    if (setting.key == key) return setting;
  }
  ADD_FAILURE() << "no setting " << key;
  return {};
}

// Three values of each field that differ from each other and from the default, as far as there are
// so many; in the spelling that the effective configuration has. And one that is refused.
struct Values {
  std::string file;
  std::string variable;
  std::string flag;
  std::string refused;
};
const std::map<std::string, Values>& SampleValues() {
  static const std::map<std::string, Values> values = {
      {"listen", {"127.0.0.1:1", "[::1]:2", "localhost:3", "127.0.0.1"}},
      {"health_listen", {"127.0.0.1:4", "[::1]:5", "localhost:6", "127.0.0.1:65536"}},
      {"metrics_listen", {"127.0.0.1:7", "0.0.0.0:8", "", "[::1]:9464"}},
      {"device", {"host", "auto", "cuda:12", "cuda:+1"}},
      {"memory", {"64KiB", "3GiB", "64TiB", "65TiB"}},
      {"page_tokens", {"16", "160", "8192", "100"}},
      {"max_models", {"1", "2", "65536", "0"}},
      {"max_sequences", {"1", "2", "10000000", "many"}},
      {"open_sequence_deadline", {"1s", "1m30s", "24h", "5"}},
      {"max_leases", {"1", "2", "10000000", "0"}},
      {"max_lease", {"1s", "1m30s", "24h", "0"}},
      {"max_pins", {"1", "2", "10000000", "0"}},
      {"max_subscriptions", {"1", "2", "10000", "0"}},
      {"event_log", {"64KiB", "1GiB", "1TiB", "63KiB"}},
      {"max_pin", {"1s", "1m30s", "24h", "25h"}},
      {"eviction", {"lru", "s3-fifo", "none", "fifo"}},
      {"ladder", {"k4v2", "int8_per_token_head>kivi4", "q8_0>q4_0", "k4v2>two"}},
      {"evict_above", {"99", "98", "100", "101"}},
      {"evict_until", {"1", "50", "98", "0"}},
      {"idle_ttl", {"0", "1m", "720h", "forever"}},
      {"default_quota", {"0", "1GiB", "64TiB", "65TiB"}},
      {"shm_socket", {"/run/a", "@b", "", "shm"}},
      {"max_shm", {"1MiB", "3GiB", "64TiB", "1KiB"}},
      {"max_transports", {"1", "2", "4000", "0"}},
      {"nccl_library", {"/a", "b.so", "c d", ""}},  // takes anything
      {"max_nccl_transports", {"1", "2", "1024", "0"}},
      {"nccl_memory", {"1MiB", "3GiB", "1TiB", "1KiB"}},
      {"nccl_deadline", {"100ms", "1s", "1h", "61m"}},
      {"nccl_idle", {"1s", "1m", "24h", "0"}},
      {"max_message_bytes", {"64KiB", "5MiB", "16MiB", "17MiB"}},
      {"read_chunk_bytes", {"64KiB", "128KiB", "2MiB", "1KiB"}},
      {"workers", {"1", "2", "1024", "-1"}},
      {"drain_deadline", {"0", "1s", "1h", "61m"}},
      {"ready_file", {"/a", "/b", "c d", ""}},  // takes anything
      {"log_level", {"debug", "warning", "error", "INFO"}},
      {"log_format", {"json", "text", "json", "xml"}},
  };
  return values;
}

TEST(Config, EveryFieldHasSampleValuesHere) {
  EXPECT_THAT(SampleValues(), SizeIs(Fields().size()));
  for (const Field& field : Fields()) EXPECT_TRUE(SampleValues().contains(field.key)) << field.key;
}

TEST(Config, NamesOfAFieldAreOneNameInThreeSpellings) {
  const Field& field = *FindField("open_sequence_deadline");
  EXPECT_EQ(field.flag(), "--open-sequence-deadline");
  EXPECT_EQ(field.variable(), "KVTIER_OPEN_SEQUENCE_DEADLINE");
}

TEST(Config, DefaultsAreAllowedValues) {
  for (const Field& field : Fields()) {
    Config config;
    EXPECT_TRUE(field.type.parse(field.type.show(Config()), config)) << field.key;
    EXPECT_EQ(field.type.show(config), field.type.show(Config())) << field.key;
  }
  const LoadResult result = Start().Load();
  EXPECT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.exit_code, std::nullopt);
  EXPECT_EQ(result.config.listen, "127.0.0.1:7071");
  EXPECT_EQ(result.config.memory, 1 << 30);
  EXPECT_EQ(result.config.open_sequence_deadline, absl::Minutes(5));
  EXPECT_EQ(result.config.log_level, LogLevel::kInfo);
  for (const Setting& setting : result.settings) EXPECT_EQ(setting.origin, "default");
}

// Flags over environment over file over default, for every field and every set of sources.
TEST(Config, EachFieldIsTakenFromTheStrongestSource) {
  for (const Field& field : Fields()) {
    const Values& values = SampleValues().at(field.key);
    for (int sources = 0; sources < 8; ++sources) {
      SCOPED_TRACE(field.key + " of sources " + std::to_string(sources));
      Start start;
      std::string value = field.type.show(Config());
      std::string origin = "default";
      if (sources & 1) {
        start.File("# the value is on line 2\n" + field.key + " = '" + values.file + "'\n");
        value = values.file;
        origin = "file " + start.path() + " line 2";
      }
      if (sources & 2) {
        start.Variable(field.variable(), values.variable);
        value = values.variable;
        origin = "environment " + field.variable();
      }
      if (sources & 4) {
        start.Flag(field.flag()).Flag(values.flag);
        value = values.flag;
        origin = "flag " + field.flag();
      }
      const LoadResult result = start.Load();
      EXPECT_THAT(result.problems, IsEmpty());
      EXPECT_THAT(result.warnings, IsEmpty());
      EXPECT_EQ(field.type.show(result.config), value);
      EXPECT_EQ(SettingOf(result, field.key).value, value);
      EXPECT_EQ(SettingOf(result, field.key).origin, origin);
    }
  }
}

TEST(Config, ARefusedValueIsNamedWithItsOriginWhereverItIsFrom) {
  for (const Field& field : Fields()) {
    if (field.key == "ready_file" || field.key == "nccl_library") continue;
    const std::string refused = SampleValues().at(field.key).refused;
    const auto named = [&](const std::string& origin) {
      return ElementsAre(field.key + " is \"" + refused + "\" (" + origin + "); want " +
                         field.type.allowed);
    };
    Start in_file;
    in_file.File(field.key + " = \"" + refused + "\"");
    EXPECT_THAT(in_file.Load().problems, named("file " + in_file.path() + " line 1"));
    EXPECT_THAT(Start().Variable(field.variable(), refused).Load().problems,
                named("environment " + field.variable()));
    const LoadResult result = Start().Flag(field.flag() + "=" + refused).Load();
    EXPECT_THAT(result.problems, named("flag " + field.flag()));
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(SettingOf(result, field.key).origin, "default");
  }
}

TEST(Config, AllProblemsAtOnce) {
  Start start;
  start.File(
      "memory = \"6GiX\"\n"
      "healht_listen = \"0.0.0.0:7072\"\n"
      "page_tokens = 1.5\n"
      "[server]\n"
      "listen = \"0.0.0.0:7071\"\n");
  start.Variable("KVTIER_LOG_LEVEL", "loud")
      .Flag("--memory=1KiB")  // overrides the file's, which is wrong all the same
      .Flag("--page-token=32")
      .Flag("serve")
      .Flag("--workers");
  const LoadResult result = start.Load();
  const std::string file = "(file " + start.path() + " line ";
  EXPECT_THAT(
      result.problems,
      ElementsAre(
          AllOf(HasSubstr("--workers"), HasSubstr("missing")),
          "flag --page-token is unknown; did you mean \"--page-tokens\"?",
          "argument \"serve\" belongs to no flag",
          "memory is \"6GiX\" " + file + "1); want a size from 64KiB to 64TiB",
          "key \"healht_listen\" " + file + "2) is unknown; did you mean \"health_listen\"?",
          "page_tokens is of type floating-point " + file +
              "3); want a multiple of 16 from 16 to 8192",
          "key \"server\" " + file + "4) is unknown; keys stand at the top, in no table",
          "log_level is \"loud\" (environment KVTIER_LOG_LEVEL); want debug, info, "
          "warning or error",
          "memory is \"1KiB\" (flag --memory); want a size from 64KiB to 64TiB"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.text, StartsWith("kvtierd: the configuration has 9 problems\n"));
  for (const std::string& problem : result.problems)
    EXPECT_THAT(result.text, HasSubstr("\n  " + problem + "\n"));
}

TEST(Config, ValuesInAFileAreStringsOrIntegers) {
  const LoadResult result =
      Start().File("memory = 1_048_576\npage_tokens = '32'\nread_chunk_bytes = \"128KiB\"").Load();
  EXPECT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.config.memory, 1 << 20);
  EXPECT_EQ(result.config.page_tokens, 32);
  EXPECT_EQ(result.config.read_chunk_bytes, 128 << 10);
}

TEST(Config, AFileThatIsNoTomlIsNamedWithTheLine) {
  Start start;
  start.File("memory = \"1GiB\"\nworkers = = 3\n").Flag("--page-tokens=1");
  EXPECT_THAT(start.Load().problems,
              ElementsAre(StartsWith("file " + start.path() + " line 2 is not TOML: "),
                          HasSubstr("page_tokens is \"1\"")));
}

TEST(Config, AFileThatCannotBeReadIsAProblem) {
  EXPECT_THAT(Start().Variable("KVTIER_CONFIG", "/no/such.toml").Load().problems,
              ElementsAre("file /no/such.toml can't be read: No such file or directory"));
  EXPECT_THAT(Start().Flag("--config=/tmp").Load().problems,
              ElementsAre("file /tmp can't be read: not a regular file"));
  EXPECT_THAT(Start().Flag("--config=/dev/zero").Load().problems,
              ElementsAre("file /dev/zero can't be read: not a regular file"));
}

TEST(Config, FlagNamesTheFileOverTheVariable) {
  Start start;
  start.File("workers = 7").Variable("KVTIER_CONFIG", "/no/such.toml");
  EXPECT_EQ(start.Load().config.workers, 7);
  EXPECT_THAT(Start().Variable("KVTIER_CONFIG", "/no/such.toml").Flag("--config=").Load().problems,
              IsEmpty());
}

TEST(Config, TheLastOfRepeatedFlagsCounts) {
  EXPECT_EQ(Start().Flag("--workers=1").Flag("--workers").Flag("2").Load().config.workers, 2);
}

TEST(Config, TheFileOfTheKubernetesBaseIsAccepted) {
  const LoadResult result =
      Start().Flag("--config=" KVTIER_TEST_DATA "/../../deploy/kustomize/base/kvtier.toml").Load();
  EXPECT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.config.listen, "0.0.0.0:7071");
}

TEST(Config, UnknownVariablesAreWarnedOf) {
  const LoadResult result = Start()
                                .Variable("KVTIER_MEMROY", "1GiB")
                                .Variable("KVTIER_PORT_7071_TCP", "tcp://10.0.0.1:7071")
                                .Variable("KVTIER_SERVER", "a:1")
                                .Variable("KVTIER_NAMESPACE", "b")
                                .Variable("KVTIER_SEED", "3")
                                .Variable("MEMORY", "3")
                                .Load();
  EXPECT_THAT(
      result.warnings,
      ElementsAre(
          "environment variable KVTIER_MEMROY is unknown; did you mean \"KVTIER_MEMORY\"?",
          "environment variable KVTIER_PORT_7071_TCP is unknown; kvtierd --help lists them"));
  EXPECT_EQ(result.exit_code, std::nullopt);
}

TEST(Config, WatermarksMustBeInOrder) {
  EXPECT_THAT(Start().Flag("--evict-above=50").Load().problems,
              ElementsAre("evict_until is 98 (default) and evict_above is 50 (flag --evict-above); "
                          "want at most as much"));
  EXPECT_THAT(Start().Flag("--evict-above=50").Flag("--evict-until=50").Load().problems, IsEmpty());
}

TEST(Config, AddressesMustNotShareAPort) {
  EXPECT_THAT(Start().Flag("--listen=0.0.0.0:9464").Load().problems,
              ElementsAre("listen is \"0.0.0.0:9464\" (flag --listen) and metrics_listen is "
                          "\"127.0.0.1:9464\" (default); want different ports"));
  EXPECT_THAT(Start().Flag("--health-listen=127.0.0.1:7071").Load().problems, SizeIs(1));
  EXPECT_THAT(Start().Flag("--health-listen=127.0.0.2:7071").Load().problems, IsEmpty());
  EXPECT_THAT(
      Start().Flag("--listen=127.0.0.1:0").Flag("--health-listen=127.0.0.1:0").Load().problems,
      IsEmpty());
}

TEST(Config, SizesHaveUnits) {
  const std::pair<const char*, std::int64_t> taken[] = {{"65536", 65536},
                                                        {"64KiB", 64 << 10},
                                                        {"1 MiB", 1 << 20},
                                                        {"2GiB", std::int64_t{2} << 30},
                                                        {"1TiB", std::int64_t{1} << 40},
                                                        {"100kB", 100'000},
                                                        {"1MB", 1'000'000},
                                                        {"1GB", 1'000'000'000},
                                                        {"1gib", 1 << 30}};
  for (const auto& [text, bytes] : taken)
    EXPECT_EQ(Start().Flag("--memory").Flag(text).Load().config.memory, bytes) << text;
  for (const char* text : {"1.5GiB", "-1GiB", "GiB", "1XiB", "", "1GiB2", "99999999999999999999",
                           "9999999999TiB", "0x10000", "1 GiB extra"}) {
    EXPECT_THAT(Start().Flag("--memory").Flag(text).Load().problems, SizeIs(1)) << text;
  }
}

TEST(Config, AddressesAreHostAndPort) {
  for (const char* text : {"0.0.0.0:0", "[::]:7071", "[fe80::1%eth0]:1", "host-1.example.:65535"})
    EXPECT_THAT(Start().Flag("--listen").Flag(text).Load().problems, IsEmpty()) << text;
  for (const char* text :
       {"", ":7071", "7071", "host", "host:", "host:-1", "host:99999", "::1:7071", "[::1]", "[]:1",
        "[host]:1", "a b:1", "http://host:1", "h:1,h:2"}) {
    EXPECT_THAT(Start().Flag("--listen").Flag(text).Load().problems, SizeIs(1)) << text;
  }
}

TEST(Config, CheckConfigPrintsWhatHoldsAndWhereItIsFrom) {
  const LoadResult result = Start()
                                .Flag("--check-config")
                                .Flag("--metrics-listen=")
                                .Variable("KVTIER_MEMORY", "512MiB")
                                .Variable("KVTIER_WORKRES", "3")
                                .Load();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.text,
              AllOf(ContainsRegex("listen +127.0.0.1:7071 +default\n"),
                    ContainsRegex("metrics_listen +\"\" +flag --metrics-listen\n"),
                    ContainsRegex("memory +512MiB +environment KVTIER_MEMORY\n"),
                    HasSubstr("\nwarning: environment variable KVTIER_WORKRES is unknown")));
  for (const Field& field : Fields()) EXPECT_THAT("\n" + result.text, HasSubstr("\n" + field.key));

  EXPECT_EQ(Start().Flag("--check-config").Flag("--workers=x").Load().exit_code, 2);
}

TEST(Config, VersionAndHelpWinOverProblems) {
  const LoadResult version = Start().Flag("--workers=x").Flag("--version").Load();
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.text, StartsWith("kvtierd "));

  const LoadResult help = Start().Flag("--nonsense").Flag("--help").Load();
  EXPECT_EQ(help.exit_code, 0);
  for (const Field& field : Fields()) {
    EXPECT_THAT(help.text, AllOf(HasSubstr(field.flag() + " " + field.placeholder),
                                 HasSubstr(field.help), HasSubstr(field.type.allowed)));
  }
}

TEST(Config, EnvironmentOfAProcess) {
  const char* const variables[] = {"KVTIER_MEMORY=1GiB", "A=b=c", "EMPTY=", nullptr};
  EXPECT_THAT(EnvironmentOf(variables), ElementsAre(std::pair("A", "b=c"), std::pair("EMPTY", ""),
                                                    std::pair("KVTIER_MEMORY", "1GiB")));
}

}  // namespace
}  // namespace kvtier::service
