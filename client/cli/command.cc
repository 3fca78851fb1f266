#include "client/cli/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <utility>

#include "client/cli/json.h"
#include "client/error_reason.h"

namespace kvtier::client {

Session::Session(Terminal& terminal, std::string command)
    : terminal_(terminal), command_(std::move(command)) {}

absl::StatusOr<std::unique_ptr<Client>> Session::Connect() const {
  ClientOptions options;
  options.transport = kTransports.at(flags_.transport);
  return Client::Connect(flags_.server, options);
}

int Session::Refused(const absl::Status& status) const {
  const std::string reason = ErrorReason(status);
  const std::string code = absl::StatusCodeToString(status.code());
  // A reason comes from kvtier itself; without one it may be the way there that failed.
  std::string where =
      reason.empty() ? fmt::format(" (server {})", flags_.server) : fmt::format(" [{}]", reason);
  if (reason.empty() && status.code() == absl::StatusCode::kUnavailable)
    where += "\nIs kvtierd running there, and has it said that it is ready?";
  terminal_.err << fmt::format("kvtier {}: {}: {}{}\n", command_, code,
                               std::string(status.message()), where);
  return kExitRefused;
}

int Session::BadUsage(const absl::Status& status) const {
  terminal_.err << fmt::format("kvtier {}: {}\n", command_, std::string(status.message()));
  return kExitBadUsage;
}

void RefuseCalculateKvScales(CLI::App& app) {
  app.add_flag_callback(
         "--calculate-kv-scales",
         [] {
           throw CLI::ValidationError(
               "--calculate-kv-scales",
               "scales guessed from a request's first tokens are not supported; take a calibrated "
               "checkpoint (put --scales), or write what a server has seen (scales --observed)");
         },
         "Not supported")
      ->group("");
}

void AddTransport(CLI::App& app, CommonFlags& flags) {
  app.add_option("--transport", flags.transport,
                 "How K and V travel: inline, in gRPC's messages; shm, in memory shared with a "
                 "server on this host; auto: shm where there is much, and the server offers it")
      ->check(CLI::IsMember(kTransports))
      ->capture_default_str();
}

NewCommand AddCommand(CLI::App& parent, Terminal& terminal, const std::string& name,
                      const std::string& description) {
  NewCommand command;
  command.app = parent.add_subcommand(name, description);
  command.session = std::make_shared<Session>(terminal, name);
  CommonFlags& flags = command.session->flags();
  command.app->add_option("--server", flags.server, "Address of kvtierd, host:port")
      ->envname("KVTIER_SERVER")
      ->capture_default_str();
  command.app
      ->add_option("--namespace", flags.name_space, "Namespace; the server's default if not given")
      ->envname("KVTIER_NAMESPACE")
      ->check([](const std::string& text) { return IsUtf8(text) ? "" : "want UTF-8 text"; }, "");
  command.app->add_flag("--json", flags.json, "Print one JSON object for programs");
  return command;
}

}  // namespace kvtier::client
