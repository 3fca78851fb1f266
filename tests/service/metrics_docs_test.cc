#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "service/metrics/catalog.h"

namespace kvtier::service {
namespace {

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kCounter:
      return "counter";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

std::string MetricTable() {
  std::string table =
      "| name | type | labels | meaning |\n"
      "| --- | --- | --- | --- |\n";
  for (const MetricRow& row : Catalog()) {
    table += fmt::format("| `{}` | {} | {} | {} |\n", row.name, TypeName(row.type),
                         fmt::join(row.labels, ", "), row.help);
  }
  return table;
}

std::string MetricsDocument() {
  const std::ifstream file(KVTIER_TEST_DATA "/../../docs/metrics.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The document has exactly the table that this test makes: blank lines before and behind it.
TEST(MetricsDocs, TableIsThatOfTheCatalog) {
  EXPECT_NE(MetricsDocument().find("\n\n" + MetricTable() + "\n"), std::string::npos)
      << "the table of docs/metrics.md should be:\n"
      << MetricTable();
}

TEST(MetricsDocs, NamesAreUniqueAndSayTheirType) {
  std::set<std::string> names;
  for (const MetricRow& row : Catalog()) {
    const std::string name = row.name;
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(name.ends_with("_total"), row.type == MetricType::kCounter) << name;
    EXPECT_TRUE(name.starts_with("kvtier_") || name.starts_with("process_")) << name;
    EXPECT_EQ(row.read == nullptr,
              name == kAppendDuration || name == kReadDuration || name == kRejected)
        << name;
  }
}

}  // namespace
}  // namespace kvtier::service
