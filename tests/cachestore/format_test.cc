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
      {"int4_per_token_head",
       {.id = CodecId::kInt4PerTokenHead},
       {.id = CodecId::kInt4PerTokenHead}},
      {"nvfp4", {.id = CodecId::kNvfp4}, {.id = CodecId::kNvfp4}},
      {"nvfp4_4over6", {.id = CodecId::kNvfp4FourOverSix}, {.id = CodecId::kNvfp4FourOverSix}},
      {"fp8_ds_mla", {.id = CodecId::kMlaFp8}, {.id = CodecId::kMlaFp8}},
      {"fp8_e4m3(scale=page)",
       {.id = CodecId::kFp8Page, .element = ElementType::kE4m3, .group = 96},
       {.id = CodecId::kFp8Page, .element = ElementType::kE4m3, .group = 96}},
      {"q8_0(k_rotation=hadamard)",
       {.id = CodecId::kLlamaQ8, .rotation = kernels::Rotation::kHadamard},
       {.id = CodecId::kLlamaQ8}},
      {"q8_0", {.id = CodecId::kLlamaQ8}, {.id = CodecId::kLlamaQ8}},
      {"q4_0", {.id = CodecId::kLlamaQ4}, {.id = CodecId::kLlamaQ4}},
      {"kivi2",
       {.id = CodecId::kKiviChannel, .element = ElementType::kFp16, .bits = 2, .group = 32},
       {.id = CodecId::kKiviToken, .element = ElementType::kFp16, .bits = 2, .group = 32}},
      {"kivi4",
       {.id = CodecId::kKiviChannel, .element = ElementType::kFp16, .bits = 4, .group = 32},
       {.id = CodecId::kKiviToken, .element = ElementType::kFp16, .bits = 4, .group = 32}},
      {"k4v2",
       {.id = CodecId::kKiviChannel, .element = ElementType::kFp16, .bits = 4, .group = 32},
       {.id = CodecId::kKiviToken, .element = ElementType::kFp16, .bits = 2, .group = 32}},
      {"kivi2(scales=fp8_e4m3)",
       {.id = CodecId::kKiviChannel, .element = ElementType::kE4m3, .bits = 2, .group = 32},
       {.id = CodecId::kKiviToken, .element = ElementType::kE4m3, .bits = 2, .group = 32}},
      {"kivi(8,4,16,48,scales=fp8_e4m3,k_rotation=hadamard)",
       {.id = CodecId::kKiviChannel,
        .element = ElementType::kE4m3,
        .bits = 8,
        .group = 16,
        .rotation = kernels::Rotation::kHadamard},
       {.id = CodecId::kKiviToken, .element = ElementType::kE4m3, .bits = 4, .group = 16}},
      {"kivi(8,4,16,48)",
       {.id = CodecId::kKiviChannel, .element = ElementType::kFp16, .bits = 8, .group = 16},
       {.id = CodecId::kKiviToken, .element = ElementType::kFp16, .bits = 4, .group = 16}},
  };
  for (const Want& want : wants) {
    const Format format = ParseFormat(want.name).value();
    EXPECT_EQ(KFormat(format, ElementType::kFp32, 96).codec, want.k) << want.name;
    EXPECT_EQ(VFormat(format, ElementType::kFp32, 96).codec, want.v) << want.name;
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
  EXPECT_EQ(name("fp8(scale=page)"), "fp8_e4m3(scale=page)");
  EXPECT_EQ(name("fp8(k_rotation=hadamard,scale=page)"),
            "fp8_e4m3(scale=page,k_rotation=hadamard)");
  EXPECT_EQ(name("kivi(2,2,32,128,k_rotation=hadamard,scales=fp8_e4m3)"),
            "kivi2(scales=fp8_e4m3,k_rotation=hadamard)");
}

TEST(Format, EveryNameIsParsedAndIsItsFormatsName) {
  EXPECT_EQ(FormatNames().front(), "auto");
  for (const std::string& name : FormatNames())
    EXPECT_EQ(FormatName(ParseFormat(name).value()), name);
}

TEST(Format, OptionsAreTakenWhereTheyMeanSomething) {
  const auto refuses = [](const char* name, const char* message) {
    EXPECT_THAT(ParseFormat(name), Refuses(Reason::kUnknownFormat, HasSubstr(message))) << name;
  };
  refuses("auto(k_rotation=hadamard)",
          "auto has the option \"k_rotation=hadamard\"; it takes none");
  refuses("float16(scale=page)", "it takes none");
  refuses("int4_per_token_head(k_rotation=hadamard)", "it takes none");
  refuses("fp8_ds_mla(k_rotation=hadamard)", "it takes none");
  refuses("fp8_e5m2(scale=page)", "it takes none");
  refuses("fp8(scale=head)", "\"scale=head\"; it takes scale=page");
  // Scales that are given are those of keys that aren't rotated.
  refuses("fp8(k_rotation=hadamard)", "\"k_rotation=hadamard\"; it takes scale=page");
  refuses("nvfp4(k_rotation=hadamard)", "it takes none");
  refuses("kivi2(scales=fp8_e4m3,scales=fp8_e4m3)", "the option \"scales=fp8_e4m3\"");
  refuses("kivi2(scale=page)", "it takes scales=fp8_e4m3, k_rotation=hadamard");
  refuses("kivi2()", "the option \"\"");
  refuses("kivi2(scales=fp8_e4m3, k_rotation=hadamard)", "the option \" k_rotation=hadamard\"");
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
