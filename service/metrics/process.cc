#include "service/metrics/process.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace kvtier::service {
namespace {

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

// See proc(5): statm counts pages, the second figure is what is resident.
std::int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0;
  std::int64_t resident = 0;
  return statm >> total >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

// When the machine booted, and how long after that the process began.
double StartTimeSeconds() {
  std::ifstream stat("/proc/stat");
  double boot = 0;
  for (std::string word; stat >> word;) {
    if (word == "btime" && stat >> boot) break;
  }
  std::ifstream self("/proc/self/stat");
  std::string line;
  std::getline(self, line);
  // The name, second of the fields, may hold blanks and brackets; the start is 20 after it.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string field;
  for (int i = 0; i < 20; ++i) fields >> field;
  return fields && boot > 0 ? boot + std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK))
                            : 0;
}

// Without the one that the counting itself opens.
std::int64_t OpenDescriptors() {
  std::error_code error;
  const std::filesystem::directory_iterator open("/proc/self/fd", error);
  return error ? 0 : std::distance(begin(open), end(open)) - 1;
}

}  // namespace

ProcessFigures ReadProcessFigures() {
  ProcessFigures figures;
  figures.resident_bytes = ResidentBytes();
  figures.start_time_seconds = StartTimeSeconds();
  figures.open_descriptors = OpenDescriptors();
  if (rusage usage{}; getrusage(RUSAGE_SELF, &usage) == 0)
    figures.cpu_seconds = Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
  if (rlimit limit{}; getrlimit(RLIMIT_NOFILE, &limit) == 0)
    figures.max_descriptors = static_cast<std::int64_t>(limit.rlim_cur);
  return figures;
}

}  // namespace kvtier::service
