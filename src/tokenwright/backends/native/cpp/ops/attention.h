// Attention over rows of a step, split among the threads.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "step/pass.h"
#include "threads/pool.h"

namespace tw {

constexpr int64_t QUERY_ROWS = 16;  // fewest rows of a chunk per piece of attention

// Copies the watched queries of a layer, when they are all computed. size: of a query.
void keep_queries(Pass& p, Team& team, int64_t layer, int64_t size, const Queries& all);

// Chunks, the first ones of a list, that attend together to positions [0, positions), which they have in the same
// pages. A chunk that shares with no neighbour is a run of one, with 0 positions.
struct SharedRun {
  int64_t chunks, positions;
};
SharedRun shared_run(const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk, int64_t page_size);

// Attention of all rows and heads, as one phase. scratch: `scratch_each` floats for each thread.
void attend_all(const Kernels& k, Team& team, const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk,
                int64_t page_size, const Queries& all, float* scratch, int64_t scratch_each, int64_t thread);

}  // namespace tw
