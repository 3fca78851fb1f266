// The documents say of each codec what the table says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "kernels/codec_table.h"

namespace kvtier::kernels {
namespace {

using ::testing::HasSubstr;

std::string Document(const std::string& name) {
  std::ifstream file(KVTIER_TEST_DATA "/../../docs/" + name);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_GT(text.str().size(), 1000u) << name;
  return text.str();
}

TEST(CodecDocs, FormatsHasARowOfEachCodec) {
  const std::string document = Document("formats.md");
  for (const CodecRow& row : CodecRows()) {
    const std::string line = std::string("\n| `") + row.name + "` | " + row.group + " | " +
                             row.scale + " | " + row.equal_to + " | " + row.read_by + " |\n";
    EXPECT_THAT(document, HasSubstr(line));
  }
}

TEST(CodecDocs, PageFormatNumbersEachCodec) {
  const std::string document = Document("page_format.md");
  for (const CodecRow& row : CodecRows()) {
    const auto id = std::to_string(static_cast<int>(row.id));
    EXPECT_THAT(document, HasSubstr(" " + id + " " + row.name + " "));
  }
}

}  // namespace
}  // namespace kvtier::kernels
