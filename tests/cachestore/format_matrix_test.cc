// Formats over head dims, heads, lengths, source types and instruction sets: stored on one
// instruction set, each reads as the plain build's codecs say, and takes what the planner says.
//
// Every pair of values of any two of these comes up together; with KVTIER_EXHAUSTIVE=1, all of
// them.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cachestore/model/plan.h"
#include "kernels/host_target.h"
#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/test_store.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::KvTensor;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using testing::NaiveSequence;
using testing::ReadCheck;
using testing::TestStore;

const std::vector<std::string> kFormats = {"auto",
                                           "float16",
                                           "fp8_e4m3",
                                           "fp8_e5m2",
                                           "fp8_e4m3(scale=page)",
                                           "fp8_e4m3(scale=page,k_rotation=hadamard)",
                                           "int8_per_token_head",
                                           "fp8_per_token_head",
                                           "int4_per_token_head",
                                           "nvfp4",
                                           "nvfp4_4over6",
                                           "fp8_ds_mla",
                                           "q8_0",
                                           "q4_0",
                                           "kivi2",
                                           "kivi4",
                                           "kivi(8,8,32,128)",
                                           "kivi2(scales=fp8_e4m3)",
                                           "kivi4(k_rotation=hadamard)"};
const std::vector<int> kDims = {64, 80, 96, 100, 112, 128, 192, 256, 512, 576};
const std::vector<int> kHeads = {1, 2, 4, 5, 8, 16};
// Around groups of 32 and a residual of 128.
const std::vector<int> kTokens = {1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 4096};
const std::vector<ElementType> kSources = {ElementType::kFp16, ElementType::kBf16};

// An index into each list, the last into HostTargets().
using Case = std::array<int, 6>;

Case Sizes() {
  const auto size = [](const auto& list) { return static_cast<int>(list.size()); };
  return {size(kFormats), size(kDims),    size(kHeads),
          size(kTokens),  size(kSources), size(kernels::HostTargets())};
}

std::vector<Case> AllCases() {
  const Case sizes = Sizes();
  std::vector<Case> cases;
  for (Case at{}; at[0] < sizes[0];) {
    cases.push_back(at);
    for (std::size_t i = at.size() - 1;; --i) {
      if (++at[i] < sizes[i] || i == 0) break;
      at[i] = 0;
    }
  }
  return cases;
}

using Pair = std::array<int, 4>;  // a list and an index into it, twice

std::vector<Pair> PairsOf(const Case& at) {
  std::vector<Pair> pairs;
  for (int i = 0; i < static_cast<int>(at.size()); ++i) {
    for (int j = i + 1; j < static_cast<int>(at.size()); ++j)
      pairs.push_back({i, at[static_cast<std::size_t>(i)], j, at[static_cast<std::size_t>(j)]});
  }
  return pairs;
}

// As long as pairs are missing, the one of some random cases with one of them that has most.
std::vector<Case> PairwiseCases(SeededRandom& random) {
  const Case sizes = Sizes();
  std::set<Pair> missing;
  for (const Case& at : AllCases()) {
    for (const Pair& pair : PairsOf(at)) missing.insert(pair);
  }
  std::vector<Case> cases;
  while (!missing.empty()) {
    Case best{};
    int most = 0;
    for (int candidate = 0; candidate < 40; ++candidate) {
      Case at;
      for (std::size_t i = 0; i < at.size(); ++i)
        at[i] = static_cast<int>(random.Between(0, sizes[i] - 1));
      const Pair& wanted = *missing.begin();
      at[static_cast<std::size_t>(wanted[0])] = wanted[1];
      at[static_cast<std::size_t>(wanted[2])] = wanted[3];
      int found = 0;
      for (const Pair& pair : PairsOf(at)) found += missing.contains(pair) ? 1 : 0;
      if (found > most) std::tie(most, best) = std::pair(found, at);
    }
    for (const Pair& pair : PairsOf(best)) missing.erase(pair);
    cases.push_back(best);
  }
  return cases;
}

class FormatMatrix : public ::testing::Test {
 protected:
  ~FormatMatrix() override { kernels::UseHostTarget(kernels::HostTargets().front()); }

  // Rows cut from a few thousand values of every kind, which are made once a source.
  KvTensor Tensor(const KvTensor& pool, int heads, std::int64_t tokens, int dim) {
    KvTensor tensor{.type = pool.type, .heads = heads, .tokens = tokens, .dim = dim, .bytes = {}};
    tensor.bytes.resize(static_cast<std::size_t>(heads * tokens * tensor.row_bytes()));
    const std::size_t row = static_cast<std::size_t>(tensor.row_bytes());
    for (std::size_t at = 0; at < tensor.bytes.size(); at += row) {
      const auto from = 2 * static_cast<std::size_t>(random_.Between(
                                0, static_cast<std::int64_t>((pool.bytes.size() - row) / 2)));
      std::memcpy(tensor.bytes.data() + at, pool.bytes.data() + from, row);
    }
    return tensor;
  }

  void Run(const Case& at) {
    const std::string& format = kFormats[static_cast<std::size_t>(at[0])];
    const int dim = kDims[static_cast<std::size_t>(at[1])];
    const int heads = kHeads[static_cast<std::size_t>(at[2])];
    const std::int64_t tokens = kTokens[static_cast<std::size_t>(at[3])];
    const ElementType source = kSources[static_cast<std::size_t>(at[4])];
    const std::vector<std::string> targets = kernels::HostTargets();
    const std::string& target = targets[static_cast<std::size_t>(at[5])];
    SCOPED_TRACE(format + ", dim " + std::to_string(dim) + ", heads " + std::to_string(heads) +
                 ", tokens " + std::to_string(tokens) + ", " + kernels::ElementName(source) +
                 " on " + target);

    ModelSpec spec = testing::UniformSpec({.layers = 1, .heads = heads, .dim = dim}, source);
    if (format == "fp8_ds_mla")
      spec.layers[0] = {.kind = LayerKind::kMla, .kv_heads = heads, .k_head_dim = dim};
    const ModelRequest request = testing::RequestOf(spec, format);
    const auto model = ResolveModel(request, 128);
    if (!model.ok()) {
      ModelSpec suited = spec;
      testing::SuitTo(format, suited);
      EXPECT_THAT(model, Refuses(Reason::kFormatRefused, ::testing::HasSubstr("needs")));
      EXPECT_TRUE(suited.layers[0].k_head_dim != dim || suited.layers[0].v_head_dim != dim);
      ++refused_;
      return;
    }
    if (pools_[at[4]].bytes.empty()) {
      const float largest = testing::LargestFor("kivi2(scales=fp8_e4m3,k_rotation=hadamard)", spec);
      pools_[at[4]] = kvtier::testing::MakeKvData(
                          testing::UniformSpec({.layers = 1, .heads = 1, .dim = 1024}, source), 64,
                          random_, largest)
                          .layers[0]
                          .k;
    }
    const KvTensor& pool = pools_[at[4]];
    KvData data{.tokens = tokens, .layers = {}};
    data.layers.push_back(
        {Tensor(pool, heads, tokens, dim), Tensor(pool, heads, tokens, spec.layers[0].v_head_dim)});

    kernels::UseHostTarget(target);
    const MemoryHeld planned = PlanSequence(**model, tokens);
    TestStore store(AlignUp(planned.allocated + OnePageOfEveryLayer(**model)));
    const Model& registered = store.Register(request)->model();
    store.AppendAtOnce("s", registered, data, tokens);
    EXPECT_EQ(store->Describe({"default", "s"})->held, planned);
    const ReadFormat as{.as = ElementType::kFp32};
    SequenceReader reader = store.Read("s", as);
    kernels::UseHostTarget(targets.back());
    ReadCheck(reader, as, NaiveSequence(registered, data, tokens)).Run(random_);
    ++stored_;
  }

  SeededRandom random_;
  KvTensor pools_[2];
  int stored_ = 0, refused_ = 0;
};

TEST_F(FormatMatrix, StoresOrRefusesByTheDim) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here sets the environment
  const bool all = std::getenv("KVTIER_EXHAUSTIVE") != nullptr;
  const std::vector<Case> cases = all ? AllCases() : PairwiseCases(random_);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (all && i % (cases.size() / 20) == 0)
      std::cout << "matrix: case " << i << " of " << cases.size() << std::endl;
    Run(cases[i]);
    if (HasFailure()) return;
  }
  RecordProperty("cases", static_cast<int>(cases.size()));
  EXPECT_GT(stored_, refused_);
  EXPECT_GT(refused_, 10);
}

// One model with layers of 16 heads of 256 channels and 4 of 512, whose parts lie beside one
// another.
TEST_F(FormatMatrix, LayersOfVeryDifferentHeadsDontOverlap) {
  for (const std::string& format : kFormats) {
    SCOPED_TRACE(format);
    ModelSpec spec = testing::UniformSpec({.layers = 4, .heads = 16, .dim = 256});
    for (const std::size_t i : {1, 3}) {
      spec.layers[i] = {.kv_heads = 4, .k_head_dim = 512, .v_head_dim = 512};
    }
    testing::SuitTo(format, spec);
    const KvData data =
        kvtier::testing::MakeKvData(spec, 150, random_, testing::LargestFor(format, spec));
    TestStore store(std::int64_t{64} << 20);
    const Model& model = store.Register(testing::RequestOf(spec, format, 64))->model();
    store.AppendAtOnce("s", model, data, 150);
    const ReadFormat as{.as = ElementType::kFp32};
    SequenceReader reader = store.Read("s", as);
    ReadCheck(reader, as, NaiveSequence(model, data, 150)).Run(random_);
    EXPECT_THAT(store->Remove({"default", "s"}), IsOk());
  }
}

}  // namespace
}  // namespace kvtier::cachestore
