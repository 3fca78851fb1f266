// `kvtier plan` against a running server, to the byte: the same appends, however they are cut, open
// and sealed; and that what is said to fit does fit, to the token.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "cachestore/model/format.h"
#include "client/cli/cli.h"
#include "client/model_source.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

struct Answer {
  int code = -1;
  json out;
  std::string err;
};

// The command in this process: it needs no server.
Answer Plan(std::vector<std::string> arguments) {
  std::ostringstream out, err;
  client::Terminal terminal{.out = out, .err = err, .err_is_tty = false, .now = absl::Now};
  arguments.insert(arguments.begin(), "plan");
  arguments.emplace_back("--json");
  Answer answer{
      .code = client::RunCli(std::move(arguments), terminal), .out = {}, .err = err.str()};
  answer.out = json::parse(out.str(), nullptr, false);
  return answer;
}

json PartsOf(const v1::MemoryParts& memory) {
  return {{"codes", memory.codes()},
          {"scales", memory.scales()},
          {"residual", memory.residual()},
          {"header", memory.header()},
          {"slack", memory.slack()}};
}

// A model as the planner is told of it, by flags, and as the server is.
struct Subject {
  std::vector<std::string> flags;
  v1::RegisterModelRequest request;

  std::uint64_t BytesPerToken() const {
    std::uint64_t bytes = 0;
    for (const v1::LayerSpec& layer : request.spec().layers())
      bytes += 2 * std::uint64_t{layer.kv_heads()} * (layer.k_head_dim() + layer.v_head_dim());
    return bytes;
  }
};

Subject FromConfig(const std::string& path) {
  Subject subject{.flags = {"--model=" + path}, .request = {}};
  const auto config = client::ReadModelConfig(path);
  EXPECT_THAT(config, IsOk());
  *subject.request.mutable_spec() = config->spec;
  return subject;
}

Subject FromRandomFlags(Random& random) {
  const auto number = [&](std::int64_t low, std::int64_t high) {
    return static_cast<std::uint32_t>(random.Between(low, high));
  };
  const std::uint32_t layers = number(1, 5), heads = number(1, 4);
  const std::uint32_t k_dim = 32 * number(1, 5), v_dim = 32 * number(0, 5);
  const std::uint32_t window = v_dim > 0 && random.OneIn(2) ? number(1, 300) : 0;
  const std::uint32_t full_every = number(1, 3);
  Subject subject;
  const auto flag = [&](const std::string& name, std::uint32_t value) {
    subject.flags.push_back("--" + name + "=" + std::to_string(value));
  };
  flag("layers", layers);
  flag("kv-heads", heads);
  flag("head-dim", k_dim);
  flag("v-head-dim", v_dim);
  if (window > 0) flag("window", window);
  if (window > 0) flag("full-every", full_every);
  v1::ModelSpec& spec = *subject.request.mutable_spec();
  spec.set_name("random");
  spec.set_source_dtype(v1::DTYPE_BF16);
  for (std::uint32_t i = 1; i <= layers; ++i) {
    v1::LayerSpec& layer = *spec.add_layers();
    const bool windowed = window > 0 && i % full_every != 0;
    layer.set_kind(v_dim == 0 ? v1::LAYER_KIND_MLA
                   : windowed ? v1::LAYER_KIND_SLIDING_WINDOW
                              : v1::LAYER_KIND_FULL);
    layer.set_kv_heads(heads);
    layer.set_k_head_dim(k_dim);
    layer.set_v_head_dim(v_dim);
    layer.set_window(windowed ? window : 0);
  }
  return subject;
}

std::vector<std::string> Formats() {
  std::vector<std::string> formats = cachestore::FormatNames();
  formats.insert(formats.end(), {"kivi(2,2,32,32)", "kivi(4,2,16,48)", "kivi(8,4,32,0)"});
  return formats;
}

// Appends zeros to every layer of "s", in messages cut anyhow.
struct Tokens {
  std::uint64_t first;
  std::uint64_t end;
};
absl::Status Append(client::Client& client, const Subject& subject, const std::string& model_id,
                    Tokens tokens, Random& random) {
  auto stream = OpenStream(client, model_id, "s");
  if (!stream.ok()) return stream.status();
  const auto& layers = subject.request.spec().layers();
  std::vector<std::uint64_t> next(static_cast<std::size_t>(layers.size()), tokens.first);
  std::vector<int> open(next.size());
  for (std::size_t i = 0; i < open.size(); ++i) open[i] = static_cast<int>(i);
  while (!open.empty()) {
    const auto pick = open.begin() + random.Between(0, std::ssize(open) - 1);
    const v1::LayerSpec& layer = layers[*pick];
    std::uint64_t& token = next[static_cast<std::size_t>(*pick)];
    const std::int64_t token_bytes =
        std::int64_t{2} * layer.kv_heads() * (layer.k_head_dim() + layer.v_head_dim());
    const std::int64_t most = (2 << 20) / token_bytes;
    const std::int64_t cut = random.Between(1, std::min<std::int64_t>(tokens.end - token, most));
    v1::AppendChunk chunk;
    chunk.set_first_layer(static_cast<std::uint32_t>(*pick));
    chunk.set_first_token(token);
    chunk.set_num_tokens(static_cast<std::uint32_t>(cut));
    const std::size_t rows = static_cast<std::size_t>(cut) * layer.kv_heads() * 2;
    chunk.mutable_k()->resize(rows * layer.k_head_dim());
    chunk.mutable_v()->resize(rows * layer.v_head_dim());
    if (absl::Status sent = (*stream)->Send(std::move(chunk)); !sent.ok()) return sent;
    token += static_cast<std::uint64_t>(cut);
    if (token == tokens.end) open.erase(pick);
  }
  return (*stream)->Finish().status();
}

class PlanAgrees : public ::testing::Test {
 protected:
  static constexpr std::int64_t kBudget = std::int64_t{256} << 20;

  static void SetUpTestSuite() {
    server_ = std::make_unique<LiveServer>(std::vector<std::string>{"--memory=256MiB"});
  }
  static void TearDownTestSuite() { server_.reset(); }

  client::Client& client() { return server_->client(); }

  v1::MemoryParts Described() {
    v1::DescribeRequest request;
    request.set_sequence("s");
    const auto described = client().Describe(request);
    EXPECT_THAT(described, IsOk());
    return described.ok() ? described->info().memory() : v1::MemoryParts();
  }

  // The sequence, and the whole server since it holds nothing else, hold what was planned.
  void ExpectHeld(const json& plan, bool sealed, bool windowed) {
    const json& parts = plan.at(sealed ? "memory" : "memory_while_open");
    const std::int64_t stored = plan.at(sealed ? "stored_bytes" : "stored_bytes_while_open");
    EXPECT_EQ(PartsOf(Described()), parts);
    const v1::CapacityResponse capacity = server_->Capacity();
    EXPECT_EQ(PartsOf(capacity.memory()), parts);
    EXPECT_EQ(capacity.memory().free(), kBudget - stored);
    // Of windows the server counts as held what whole pages hold.
    if (sealed && !windowed) {
      EXPECT_DOUBLE_EQ(capacity.compression_ratio(), plan.at("compression_ratio").get<double>());
    }
  }

  void RemoveSequence() {
    v1::RemoveRequest request;
    request.set_sequence("s");
    ASSERT_THAT(client().Remove(request), IsOk());
  }

  // Grows one sequence through `lengths`, in order, and seals it at the last.
  void CheckGrowth(const Subject& subject, const std::string& format, int page_tokens,
                   const std::vector<std::uint64_t>& lengths, Random& random) {
    SCOPED_TRACE(format + " of " + subject.flags[0]);
    std::vector<std::string> flags = subject.flags;
    flags.push_back("--kv-cache-dtype=" + format);
    flags.push_back("--page-tokens=" + std::to_string(page_tokens));
    flags.emplace_back();
    v1::RegisterModelRequest request = subject.request;
    request.mutable_policy()->set_kv_cache_dtype(format);
    request.set_page_tokens(static_cast<std::uint32_t>(page_tokens));
    const bool windowed = request.policy().retention() == v1::RETENTION_WINDOW;
    const auto registered = client().RegisterModel(request);
    if (!registered.ok()) {  // then the planner says the same
      flags.pop_back();
      EXPECT_THAT(Plan(flags).err, HasSubstr(std::string(registered.status().message())));
      return;
    }
    std::uint64_t held = 0;
    json plan;
    for (const std::uint64_t tokens : lengths) {
      SCOPED_TRACE(tokens);
      ASSERT_THAT(Append(client(), subject, registered->model_id(), {held, tokens}, random),
                  IsOk());
      held = tokens;
      flags.back() = "--tokens=" + std::to_string(tokens);
      const Answer answer = Plan(flags);
      ASSERT_EQ(answer.code, 0) << answer.err;
      plan = answer.out.at("formats").at(0);
      ExpectHeld(plan, /*sealed=*/false, windowed);
    }
    v1::SealRequest seal;
    seal.set_sequence("s");
    seal.set_tokens(held);
    ASSERT_THAT(client().Seal(seal), IsOk());
    ExpectHeld(plan, /*sealed=*/true, windowed);
    RemoveSequence();
  }

  static std::unique_ptr<LiveServer> server_;
};
std::unique_ptr<LiveServer> PlanAgrees::server_;

// Lengths at which pages, groups and residuals turn, of those that are not too many bytes; sealed
// at any of them.
std::vector<std::uint64_t> TurningPoints(std::uint64_t most, Random& random) {
  std::set<std::uint64_t> lengths = {1};
  for (const std::uint64_t at : {32, 48, 64, 128, 256}) lengths.insert({at - 1, at, at + 1});
  std::erase_if(lengths, [&](std::uint64_t length) { return length > most; });
  std::vector<std::uint64_t> points(lengths.begin(), lengths.end());
  points.resize(static_cast<std::size_t>(random.Between(1, std::ssize(points))));
  return points;
}

class PlanAgreesOnConfig : public PlanAgrees, public ::testing::WithParamInterface<std::string> {};

TEST_P(PlanAgreesOnConfig, InEveryFormat) {
  SeededRandom random;
  const Subject subject = FromConfig(KVTIER_TEST_DATA "/configs/" + GetParam() + ".json");
  const std::uint64_t most = (std::uint64_t{12} << 20) / subject.BytesPerToken();
  for (const std::string& format : Formats()) {
    CheckGrowth(subject, format, random.Pick<int>({0, 96}), TurningPoints(most, random), random);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PlanAgreesOnConfig,
                         ::testing::Values("deepseek-v3", "gemma-3-270m", "gemma-3-27b",
                                           "gpt-oss-20b", "llama-3-70b", "llama-3-8b", "qwen2.5-7b",
                                           "smollm2-135m"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !std::isalnum(c); },
                               '_');
                           return name;
                         });

TEST_F(PlanAgrees, OnRandomModels) {
  SeededRandom random;
  for (int i = 0; i < 40; ++i) {
    Subject subject = FromRandomFlags(random);
    if (random.OneIn(2)) {
      subject.flags.emplace_back("--retention=window");
      subject.request.mutable_policy()->set_retention(v1::RETENTION_WINDOW);
    }
    std::set<std::uint64_t> lengths;
    for (int n = 0; n < 4; ++n) lengths.insert(static_cast<std::uint64_t>(random.Between(1, 700)));
    CheckGrowth(subject, random.Pick(Formats()), 96 * static_cast<int>(random.Between(0, 2)),
                {lengths.begin(), lengths.end()}, random);
  }
}

// What the server says still fits as one long sequence does, and not one token more; the planner
// says the same of as much memory.
TEST(PlanFits, MoreTokensFitAndNoneBeyond) {
  SeededRandom random;
  LiveServer server({"--memory=4MiB"});
  const auto other = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(other, IsOk());
  // So that what is free is no round number.
  const auto held = static_cast<std::uint32_t>(random.Between(1, 600));
  ASSERT_THAT(AppendAll(server.client(), other->model_id(), "other", held), IsOk());
  for (const std::string& format : Formats()) {
    SCOPED_TRACE(format);
    Subject subject = FromRandomFlags(random);
    subject.request.mutable_policy()->set_kv_cache_dtype(format);
    const auto registered = server.client().RegisterModel(subject.request);
    if (!registered.ok()) continue;  // the shape is refused, or one page of every layer is too much
    v1::CapacityRequest ask;
    ask.set_model_id(registered->model_id());
    const auto capacity = server.client().Capacity(ask);
    ASSERT_THAT(capacity, IsOk());
    const std::uint64_t more = capacity->models(0).more_tokens();
    std::vector<std::string> flags = subject.flags;
    flags.insert(flags.end(), {"--kv-cache-dtype=" + format,
                               "--memory=" + std::to_string(capacity->memory().free())});
    EXPECT_EQ(Plan(flags).out.at("formats").at(0).at("tokens_that_fit"), more);
    if (more == 0) continue;
    EXPECT_THAT(Append(server.client(), subject, registered->model_id(), {0, more}, random),
                IsOk());
    EXPECT_THAT(Append(server.client(), subject, registered->model_id(), {more, more + 1}, random),
                StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("budget")));
    v1::RemoveRequest remove;
    remove.set_sequence("s");
    ASSERT_THAT(server.client().Remove(remove), IsOk());
  }
}

TEST(PlanPlot, NamesThePackageWhereGnuplotIsMissing) {
  const TempFolder folder;
  const std::string file = folder / "ratio.svg";
  const Finished finished =
      RunCommand({"/usr/bin/env", "PATH=/nonexistent", KVTIER_CLI, "plan", "--layers=2",
                  "--kv-heads=2", "--head-dim=64", "--plot=" + file});
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.output, HasSubstr("apt-get install gnuplot-nox"));
}

}  // namespace
}  // namespace kvtier::testing
