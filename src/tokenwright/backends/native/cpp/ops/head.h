// The head: the logits of the rows that need them, and the argmax and logsumexp of each.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "threads/pool.h"

namespace tw {

constexpr int64_t SUMMARY = 2048;  // logits per partial sum; the totals are merged in order
// The summary of a range of logits: the argmax, the maximum, and sum(exp(x - maximum)).
struct Partial {
  int64_t index;
  float most;
  double total;
};

inline int64_t summary_pieces(int64_t vocab) { return (vocab + SUMMARY - 1) / SUMMARY; }

// The argmax and logsumexp of logits [rows][vocab]: partial summaries first, then a merge per row.
struct Summary {
  const Kernels& k;
  int64_t rows, vocab;
  const float* logits;
  Partial* partial;  // [rows][pieces]
  int64_t* best;
  double* log_total;

  int64_t pieces() const { return summary_pieces(vocab); }

  void sum_up(int64_t row, int64_t piece) const;

  void merge_all(Team& team) const;

  void run(Team& team) const;
};

}  // namespace tw
