#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/terminal.h"
#include "client/client.h"

namespace CLI {  // NOLINT(readability-identifier-naming): its own
class App;
}

namespace kvtier::client {

inline constexpr int kExitOk = 0;
inline constexpr int kExitRefused = 1;   // the server said no, or can't be reached
inline constexpr int kExitBadUsage = 2;  // flags, or an input file

// The flags that every command has.
struct CommonFlags {
  std::string server = "127.0.0.1:7071";
  std::string name_space;
  bool json = false;
  std::string transport = "auto";
};

// --transport
inline const std::map<std::string, Transport> kTransports = {
    {"auto", Transport::kAuto}, {"inline", Transport::kInline}, {"shm", Transport::kShm}};

// --transfer
inline const std::map<std::string, Transfer> kTransfers = {{"values", Transfer::kValues},
                                                           {"stored", Transfer::kStored}};

// A sub-command: its parser, and what runs once its flags are in.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

// What the commands share: flags, the way to the server, the way errors are told.
class Session {
 public:
  Session(Terminal& terminal, std::string command);

  Terminal& terminal() const { return terminal_; }
  CommonFlags& flags() { return flags_; }
  const CommonFlags& flags() const { return flags_; }

  absl::StatusOr<std::unique_ptr<Client>> Connect() const;

  // Say why on stderr and give the exit code.
  int Refused(const absl::Status& status) const;
  int BadUsage(const absl::Status& status) const;

 private:
  Terminal& terminal_;
  const std::string command_;
  CommonFlags flags_;
};

// `--calculate-kv-scales`, for who knows it from an engine: refused, saying what replaced it.
void RefuseCalculateKvScales(CLI::App& app);

// `--transport`, for a command that moves K and V.
void AddTransport(CLI::App& app, CommonFlags& flags);

// A sub-command's parser with the common flags, and the session that reads them.
struct NewCommand {
  CLI::App* app = nullptr;
  std::shared_ptr<Session> session;
};
NewCommand AddCommand(CLI::App& parent, Terminal& terminal, const std::string& name,
                      const std::string& description);

Command AddPut(CLI::App& parent, Terminal& terminal);
Command AddGet(CLI::App& parent, Terminal& terminal);
Command AddList(CLI::App& parent, Terminal& terminal);
Command AddDescribe(CLI::App& parent, Terminal& terminal);
Command AddCapacity(CLI::App& parent, Terminal& terminal);
Command AddRemove(CLI::App& parent, Terminal& terminal);
Command AddScales(CLI::App& parent, Terminal& terminal);
Command AddPlan(CLI::App& parent, Terminal& terminal);
Command AddFormats(CLI::App& parent, Terminal& terminal);
Command AddDrain(CLI::App& parent, Terminal& terminal);

}  // namespace kvtier::client
