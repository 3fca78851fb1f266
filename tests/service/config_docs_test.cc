#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "service/config/fields.h"

namespace kvtier::service {
namespace {

using ::testing::IsEmpty;

std::string ConfigurationDocument() {
  const std::ifstream file(KVTIER_TEST_DATA "/../../docs/configuration.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string FieldTable() {
  std::string table =
      "| flag | environment | file | default | allowed | meaning |\n"
      "| --- | --- | --- | --- | --- | --- |\n";
  for (const Field& field : Fields()) {
    const std::string value = field.type.show(Config());
    table += fmt::format("| `{}` | `{}` | `{}` | {} | {} | {} |\n", field.flag(), field.variable(),
                         field.key, value.empty() ? "empty" : "`" + value + "`", field.type.allowed,
                         field.help);
  }
  return table;
}

// The document has exactly the table that this test makes: blank lines before and behind it.
TEST(ConfigDocs, TableIsThatOfTheCode) {
  EXPECT_NE(ConfigurationDocument().find("\n\n" + FieldTable() + "\n"), std::string::npos)
      << "the table of docs/configuration.md should be:\n"
      << FieldTable();
}

TEST(ConfigDocs, ExampleIsAccepted) {
  const std::string document = ConfigurationDocument();
  const std::string fence = "```toml\n";
  const std::size_t begin = document.find(fence);
  ASSERT_NE(begin, std::string::npos);
  const std::size_t end = document.find("```", begin + fence.size());
  const std::string path = ::testing::TempDir() + "config_docs_example.toml";
  std::ofstream(path) << document.substr(begin + fence.size(), end - begin - fence.size());

  const char* const arguments[] = {"kvtierd", "--config", path.c_str()};
  const LoadResult result = LoadConfig(3, arguments, {});
  EXPECT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.config.page_tokens, 256);
}

}  // namespace
}  // namespace kvtier::service
