// docs/capacity.md shows what the commands in it print.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/cli.h"

namespace kvtier::client {
namespace {

struct Example {
  std::string command;  // on one line
  std::string output;
};

// The console blocks: a command behind "$ ", over several lines where each but the last ends in a
// backslash, and its output.
std::vector<Example> Examples() {
  std::ifstream file(KVTIER_TEST_DATA "/../../docs/capacity.md");
  std::vector<Example> examples;
  bool inside = false;
  bool in_command = false;
  for (std::string line; std::getline(file, line);) {
    if (line == "```console") {
      inside = true;
      examples.emplace_back();
    } else if (line == "```") {
      inside = false;
    } else if (inside) {
      const bool starts = line.starts_with("$ ");
      if (!starts && !in_command) {
        examples.back().output += line + "\n";
        continue;
      }
      in_command = line.ends_with("\\");
      if (in_command) line.pop_back();
      examples.back().command += starts ? line.substr(2) : line;
    }
  }
  return examples;
}

TEST(CapacityDocs, ExamplesPrintWhatIsShown) {
  const std::vector<Example> examples = Examples();
  ASSERT_FALSE(examples.empty());
  for (const Example& example : examples) {
    const std::string command =
        absl::StrReplaceAll(example.command, {{"tests/data", KVTIER_TEST_DATA}});
    std::vector<std::string> words = absl::StrSplit(command, ' ', absl::SkipEmpty());
    ASSERT_EQ(words.front(), "kvtier");
    words.erase(words.begin());
    std::ostringstream out, err;
    Terminal terminal{.out = out, .err = err, .err_is_tty = false, .now = absl::Now};
    EXPECT_EQ(RunCli(words, terminal), 0) << err.str();
    EXPECT_EQ(out.str(), example.output) << "of " << example.command;
  }
}

}  // namespace
}  // namespace kvtier::client
