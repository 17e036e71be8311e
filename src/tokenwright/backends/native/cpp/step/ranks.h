// Processes that compute a model together. Each rank has some of the rows of every matrix and computes their outputs
// alone, with all inputs, so no sum is divided. The ranks run the same ops over the same batch; where an op needs what
// all have computed, they gather it: each writes its columns into shared memory, waits for the others and reads all.
//
//   halves:  gather 0, 2, 4 ...  [rows][columns of all]
//            gather 1, 3, 5 ...  [rows][columns of all]
//
// A rank that writes into a half has waited at the gather before, which the others reach only when they have read it.
#pragma once

#include <atomic>
#include <cstdint>

#include "step/step.h"
#include "threads/pool.h"

namespace tw {

// Where ranks meet, in shared memory of zeros.
struct Meeting {
  std::atomic<uint32_t> arrived, round, asleep, broken;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share them");

// One process's view of the ranks.
struct Ranks {
  int64_t rank, count;
  int64_t parent;    // the process without which this one ends its waits; 0: none
  int64_t patience;  // nanoseconds of spinning before a wait sleeps
  Meeting* meeting;
  float* halves;     // [2][capacity]
  int64_t capacity;  // floats of a half
  int64_t gathers;   // so far: the same number in all ranks between two passes

  // Waits for all ranks; returns at once when some rank is known to have ended.
  void meet() const;
};

// Gathers of a pass that the calling thread has begun.
inline thread_local int64_t begun_gathers = 0;

// One gather: rank's columns are written to `rows`, then `wait` is a phase behind which `rows` has those of all.
class Gather {
 public:
  explicit Gather(const Ranks& ranks)
      : rows(ranks.halves + (ranks.gathers + begun_gathers++) % 2 * ranks.capacity), ranks_(ranks) {}

  void wait(Team& team) const {
    team.each(1, [&](int64_t) { ranks_.meet(); });
  }

  float* const rows;

 private:
  const Ranks& ranks_;
};

// The outputs of the matrix that a matrix is cut from, if all ranks gather them; else its own.
inline int64_t outputs_of(const Matrix& m) { return m.whole ? m.whole : m.out; }

}  // namespace tw
