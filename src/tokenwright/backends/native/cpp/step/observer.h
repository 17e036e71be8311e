// What a pass reports about its own run: times, counts, and what the watched rows show.
//
// A watched row's query is copied when it is computed; its attention weights are computed from it after the head.
// Linears are counted piece by piece, by the thread that computes them; the threads add up their counts at the end of
// the layers and of the head. The reads and writes of the KV cache follow from the chunks and the windows.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "ops/head.h"
#include "step/step.h"
#include "threads/pool.h"

namespace tw {

// The work of one thread's linears.
struct Work {
  int64_t flop = 0, bytes = 0;
};
inline thread_local Work counted;

// Counts a linear over `rows` rows by the blocks [first, last).
void count_blocks(const Matrix& m, int64_t rows, int64_t first, int64_t last);

class Observer {
 public:
  Observer(const Model& model, const Observed& to);

  struct Sum {
    std::atomic<int64_t> flop{0}, bytes{0};
  };
  Sum layers, head;

  // Hands in what the calling thread has counted.
  void add(Sum& to);

  // Something has ended, as `Observed::ends` numbers it. The first thread to see that sets the time.
  void end(int64_t index);

  bool watches(int64_t layer) const;

  // Copies the query of watched row `i`, if it is in this layer. size: of a query.
  void keep_query(int64_t i, int64_t layer, int64_t size, const Queries& all);

  // Computes what the watched rows show, as phases of the team. summed: the partial summaries of all
  // logits rows. scratch: of the calling thread.
  void look(const Kernels& k, Team& team, const Model& model, const Batch& batch, const Partial* summed,
            float* scratch);

  // Writes the times and counts, when all threads are done.
  void report(const Model& model, const Batch& batch) const;

 private:
  void weigh(const Kernels& k, const Model& model, const Batch& batch, int64_t i, float* scratch) const;

  int64_t ended() const;

  std::vector<std::atomic<int64_t>> ends_;  // zeros until then
  const Observed& to_;
  std::vector<std::vector<float>> queries_, sink_queries_;  // of the watched rows
  std::vector<double> entropies_;                           // [watched][pieces]; see `look`
};

}  // namespace tw
