// The number of processors that this process may use.
#pragma once

#include <cstdint>

namespace tw {

// The processors in the calling thread's affinity mask, or fewer if a control group has a CPU quota. At least 1.
int64_t usable_processors();

}  // namespace tw
