// The rounds in which experts that lie in a file are computed.
//
// A round has as many of a layer's busy experts as are pinned at once: they are read and computed, while the next ones
// are read ahead. In which round an expert is changes no sum. During the last round the next layer's router guesses,
// from x as it is before this layer's experts, what that layer will read.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels.h"
#include "step/expert_pool.h"
#include "step/pass.h"
#include "step/step.h"
#include "step/workspace.h"
#include "threads/pool.h"

namespace tw {

// An expert with visits, or the shared one, which every row visits.
struct Busy {
  int64_t expert;
  Matrix up, down;
  int64_t first;             // index of its first visit
  QuantisedRows in, middle;  // of its visits
  float* hidden;
  int64_t up_piece, down_piece;  // indices of its first work item in the two phases of linears
};

constexpr int64_t SHARED_EXPERT = -1;

struct Visit {
  int64_t busy, row;  // which of the busy experts; the row of the step
};

inline void set(ExpertPlace& to, int64_t busy, int64_t visits, int64_t up, int64_t down) {
  to.busy.store(busy, std::memory_order_relaxed);
  to.visits.store(visits, std::memory_order_relaxed);
  to.up.store(up, std::memory_order_relaxed);
  to.down.store(down, std::memory_order_relaxed);
}

// Where a round begins, which is where the one before it ends. Each round has a place of its own, since a thread may
// still ask for the work of a phase when another one has begun the next round.
inline ExpertPlace& bound(ExpertMemory& m, int64_t round) { return m.bounds.of<ExpertPlace>(0)[round]; }

// Its functions are called by one thread, in phases of one piece, but for `ends`.
class ExpertRounds {
 public:
  ExpertRounds(Pass& p, const ExpertsOp& op)
      : m_(p.r.experts), p_(p), op_(op), pool_(*op.paged->pool), busy_(m_.busy.of<Busy>(0)) {}

  void begin(int64_t round);             // pins the experts of a round
  void wait(Team& team, int64_t round);  // waits until they are read
  void end(int64_t round);               // gives their slots back

  // Whether a round is the last one. Any thread may ask once the round has begun, also a late one: each layer has a
  // number of rounds for itself.
  bool ends(int64_t round) const { return last().load() == round + 1; }

 private:
  std::atomic<int64_t>& last() const { return m_.rounds.of<std::atomic<int64_t>>(0)[op_.paged->index]; }
  int64_t paged() const;
  void guess();
  void fail(const Busy& b, int64_t error);

  ExpertMemory& m_;
  Pass& p_;
  const ExpertsOp& op_;
  ExpertPool& pool_;
  Busy* const busy_;
};

// Grows the workspace for a layer whose experts lie in a file.
void reserve_rounds(ExpertMemory& m, const Batch& batch, const ExpertsOp& op);

// Asks the router of the next such layer about x as it is here; each thread calls it.
void ask_ahead(Pass& p, Team& team, int64_t thread, const ExpertsOp& next);

}  // namespace tw
