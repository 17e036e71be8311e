#include "ops/head.h"

#include <algorithm>
#include <cstring>

#include "ops/ops.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"
#include "step/functions.h"
#include "step/observer.h"
#include "step/pass.h"

namespace tw {

namespace {

constexpr int64_t MANY_PIECES = 8;  // partial sums per thread from which on linear and summary are fused

// The argmax and logsumexp of a row, from the partial summaries of its ranges.
void merge(const Partial* parts, int64_t count, int64_t* best, double* log_total) {
  const Partial* most = parts;
  for (int64_t i = 1; i < count; i++)
    if (parts[i].most > most->most) most = parts + i;
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += parts[i].total * exponential((double)parts[i].most - most->most);
  *best = most->index;
  *log_total = logarithm(total) + most->most;
}

}  // namespace

void Summary::sum_up(int64_t row, int64_t piece) const {
  const int64_t at = piece * SUMMARY, n = vocab - at < SUMMARY ? vocab - at : SUMMARY;
  Partial& part = partial[row * pieces() + piece];
  k.summary(n, logits + row * vocab + at, &part.index, &part.most, &part.total);
  part.index += at;
}

void Summary::merge_all(Team& team) const {
  each_row(team, rows, [&](int64_t row) { merge(partial + row * pieces(), pieces(), best + row, log_total + row); });
}

void Summary::run(Team& team) const {
  team.each(rows * pieces(), [&](int64_t unit) { sum_up(unit / pieces(), unit % pieces()); });
  merge_all(team);
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const HeadOp& op) {
  r.rows.reserve(op.matrix, batch.wanted);
  needs.partial = std::max(needs.partial, batch.wanted * summary_pieces(outputs_of(op.matrix)));
  needs.gathered = std::max(needs.gathered, batch.wanted * op.matrix.whole);
}

void run(Pass& p, Team& team, int64_t thread, const HeadOp& op) {
  const int64_t width = p.model.width, vocab = outputs_of(op.matrix), wanted = p.batch.wanted;
  each_row(team, p.batch.hidden, [&](int64_t i) {
    p.k.norm(op.norm, width, p.x + p.batch.hidden_row[i] * width, p.batch.states + i * width);
  });
  if (!wanted) return;
  QuantisedRows quantised = p.r.rows.of(p.k, op.matrix, wanted);
  team.each(wanted, [&](int64_t i) {
    float* normed = p.normed + thread * width;
    p.k.norm(op.norm, width, p.x + p.batch.row[i] * width, normed);
    if (op.scale != 1) scale_row(width, op.scale, normed);
    p.k.quantise_row(op.matrix, normed, i, quantised);
  });
  const Summary summary{p.k, wanted, vocab, p.batch.logits, p.partial, p.batch.best, p.batch.log_total};
  const auto cap = [&](int64_t row, int64_t piece) {
    const int64_t at = piece * SUMMARY;
    if (op.cap > 0) p.k.soft_cap(op.cap, std::min(vocab - at, SUMMARY), p.batch.logits + row * vocab + at);
  };
  if (summary.pieces() < MANY_PIECES * team.size() || op.matrix.whole) {
    if (op.matrix.whole) {
      const Gather all(*p.model.ranks);
      linear(p.k, team, op.matrix, quantised, Out{all.rows + op.matrix.first, nullptr, vocab});
      all.wait(team);
      if (p.model.ranks->rank) return;  // the first one alone answers
      each_row(team, wanted,
               [&](int64_t row) { memcpy(p.batch.logits + row * vocab, all.rows + row * vocab, 4 * vocab); });
    } else {
      linears_of(p, team, op.matrix, quantised, p.batch.logits, nullptr, vocab);
    }
    if (op.cap > 0)
      team.each(wanted * summary.pieces(), [&](int64_t i) { cap(i / summary.pieces(), i % summary.pieces()); });
    return summary.run(team);
  }
  team.each(summary.pieces(), [&](int64_t piece) {  // sums them up while they are in the cache
    constexpr int64_t blocks = SUMMARY / LANES;
    const int64_t first = piece * blocks, last = std::min(first + blocks, blocks_of(op.matrix));
    p.k.linear(op.matrix, quantised, first, last, Out{p.batch.logits, nullptr, vocab});
    count_blocks(op.matrix, wanted, first, last);
    for (int64_t row = 0; row < wanted; row++) {
      cap(row, piece);
      summary.sum_up(row, piece);
    }
  });
  summary.merge_all(team);
}

}  // namespace tw
