#include "cachestore/model/format.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/status_matchers.h"

namespace kvtier::cachestore {
namespace {

using kernels::Codec;
using kernels::CodecId;
using kvtier::testing::Refuses;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Format, NamesGiveTheCodecsOfKAndV) {
  struct Want {
    const char* name = nullptr;
    Codec k;
    Codec v;
  };
  const Want wants[] = {
      {"auto",
       {.id = CodecId::kRaw, .element = ElementType::kFp32},
       {.id = CodecId::kRaw, .element = ElementType::kFp32}},
      {"float16",
       {.id = CodecId::kRaw, .element = ElementType::kFp16},
       {.id = CodecId::kRaw, .element = ElementType::kFp16}},
      {"bfloat16",
       {.id = CodecId::kRaw, .element = ElementType::kBf16},
       {.id = CodecId::kRaw, .element = ElementType::kBf16}},
      {"fp8_e4m3",
       {.id = CodecId::kFp8, .element = ElementType::kE4m3},
       {.id = CodecId::kFp8, .element = ElementType::kE4m3}},
      {"fp8_e5m2",
       {.id = CodecId::kFp8, .element = ElementType::kE5m2},
       {.id = CodecId::kFp8, .element = ElementType::kE5m2}},
      {"int8_per_token_head",
       {.id = CodecId::kInt8PerTokenHead},
       {.id = CodecId::kInt8PerTokenHead}},
      {"fp8_per_token_head", {.id = CodecId::kFp8PerTokenHead}, {.id = CodecId::kFp8PerTokenHead}},
      {"q8_0", {.id = CodecId::kLlamaQ8}, {.id = CodecId::kLlamaQ8}},
      {"q4_0", {.id = CodecId::kLlamaQ4}, {.id = CodecId::kLlamaQ4}},
      {"kivi2",
       {.id = CodecId::kKiviChannel, .bits = 2, .group = 32},
       {.id = CodecId::kKiviToken, .bits = 2, .group = 32}},
      {"kivi4",
       {.id = CodecId::kKiviChannel, .bits = 4, .group = 32},
       {.id = CodecId::kKiviToken, .bits = 4, .group = 32}},
      {"k4v2",
       {.id = CodecId::kKiviChannel, .bits = 4, .group = 32},
       {.id = CodecId::kKiviToken, .bits = 2, .group = 32}},
      {"kivi(8,4,16,48)",
       {.id = CodecId::kKiviChannel, .bits = 8, .group = 16},
       {.id = CodecId::kKiviToken, .bits = 4, .group = 16}},
  };
  for (const Want& want : wants) {
    const Format format = ParseFormat(want.name).value();
    EXPECT_EQ(KFormat(format, ElementType::kFp32).codec, want.k) << want.name;
    EXPECT_EQ(VFormat(format, ElementType::kFp32).codec, want.v) << want.name;
    EXPECT_EQ(FormatName(format), want.name);
  }
}

TEST(Format, AliasesAreOneFormat) {
  const auto name = [](const std::string& given) { return FormatName(ParseFormat(given).value()); };
  EXPECT_EQ(name(""), "auto");
  EXPECT_EQ(name("fp8"), "fp8_e4m3");
  EXPECT_EQ(name("kivi(2,2,32,128)"), "kivi2");
  EXPECT_EQ(name("kivi(4,4,32,128)"), "kivi4");
  EXPECT_EQ(name("kivi(4,2,32,128)"), "k4v2");
  EXPECT_EQ(name("kivi(2,4,32,128)"), "kivi(2,4,32,128)");
}

TEST(Format, KiviRefusesByTheParametersName) {
  const auto refuses = [](const char* name, const char* message) {
    EXPECT_THAT(ParseFormat(name), Refuses(Reason::kInvalidField, HasSubstr(message))) << name;
  };
  refuses("kivi(3,2,32,128)", "k_bits is 3; want 2, 4 or 8");
  refuses("kivi(2,0,32,128)", "v_bits is 0; want 2, 4 or 8");
  refuses("kivi(2,2,0,0)", "group_size is 0; want 1 to 1024");
  refuses("kivi(2,2,-32,0)", "group_size is -32; want 1 to 1024");
  refuses("kivi(2,2,1073741824,0)", "group_size is 1073741824; want 1 to 1024");
  refuses("kivi(2,2,2048,0)", "group_size is 2048; want 1 to 1024");
  refuses("kivi(2,2,6,6)", "group_size is 6; 6 codes of 2 bits must fill whole bytes");
  refuses("kivi(4,4,3,3)", "group_size is 3; 3 codes of 4 bits must fill whole bytes");
  refuses("kivi(2,2,32,100)",
          "residual_tokens is 100; want 0 to 4096, a multiple of group_size 32");
  refuses("kivi(2,2,32,-32)", "residual_tokens is -32");
  refuses("kivi(2,2,32,4128)", "residual_tokens is 4128");
}

TEST(Format, AnythingElseIsAnsweredWithWhatThereIs) {
  for (const char* name : {"fp4", "FP8", "kivi", "kivi(2,2,32)", "kivi(2,2,32,128", "kivi2 ",
                           "kivi(2,2,32,128)x", "kivi(a,2,32,128)", "calculate_kv_scales",
                           "kivi(4294967298,2,32,128)", "kivi(2, 2,32,128)", "kivi(+2,2,32,128)"}) {
    EXPECT_THAT(ParseFormat(name),
                Refuses(Reason::kUnknownFormat,
                        AllOf(HasSubstr("kv_cache_dtype is \"" + std::string(name) + "\""),
                              HasSubstr("auto, "), HasSubstr("fp8_e5m2"), HasSubstr("kivi2"),
                              HasSubstr("kivi(k_bits,v_bits,group_size,residual_tokens)"))))
        << name;
  }
}

}  // namespace
}  // namespace kvtier::cachestore
