#include "threads/processors.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace tw {
namespace {

#if defined(__linux__)

// The first line of a file; empty if it cannot be read.
std::string line_of(const std::string& path) {
  std::string line;
  if (FILE* file = fopen(path.c_str(), "r")) {
    char text[256];
    if (fgets(text, sizeof text, file)) line = text;
    fclose(file);
  }
  return line;
}

// The CPU quota of one control group in processors, rounded up; 0 if it has none.
int64_t quota_of(const std::string& folder) {
  long long quota = 0, period = 0;
  if (sscanf(line_of(folder + "/cpu.max").c_str(), "%lld %lld", &quota, &period) < 2) {  // version 2: "max" or a number
    quota = period = 0;
    sscanf(line_of(folder + "/cpu.cfs_quota_us").c_str(), "%lld", &quota);  // version 1: -1 or a number
    sscanf(line_of(folder + "/cpu.cfs_period_us").c_str(), "%lld", &period);
  }
  return quota > 0 && period > 0 ? (quota + period - 1) / period : 0;
}

// The smallest quota of this process's control groups and their ancestors; 0 if there is none.
int64_t least_quota() {
  int64_t least = 0;
  FILE* file = fopen("/proc/self/cgroup", "r");
  char text[4096];
  while (file && fgets(text, sizeof text, file)) {  // "ID:CONTROLLERS:PATH"
    std::string line(text);
    line.erase(std::min(line.find('\n'), line.size()));
    const size_t names = line.find(':'), path = line.find(':', names + 1);
    if (names == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = "," + line.substr(names + 1, path - names - 1) + ",";
    if (controllers != ",," && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = controllers == ",," ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string group = line.substr(path + 1);; group.erase(group.rfind('/'))) {
      const int64_t quota = quota_of(root + group);
      if (quota && (!least || quota < least)) least = quota;
      if (group.rfind('/') == std::string::npos) break;
    }
  }
  if (file) fclose(file);
  return least;
}

#endif

}  // namespace

int64_t usable_processors() {
  int64_t count = std::max(1u, std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) count = std::max(1, CPU_COUNT(&set));
  if (const int64_t quota = least_quota()) count = std::min(count, quota);
#endif
  return count;
}

}  // namespace tw
