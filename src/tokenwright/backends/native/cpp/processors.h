// How many processors this process may use.
#pragma once

#include <cstdint>

namespace tw {

// Those that the calling thread may run on, or fewer where a control group has a quota of processor time. At least 1.
int64_t usable_processors();

}  // namespace tw
