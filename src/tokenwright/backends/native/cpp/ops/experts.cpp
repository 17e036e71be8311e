// The mixture of experts.
//
// A visit is a row at an expert. Visits are sorted by expert, and the visits of one expert are a linear's rows like any
// others: an expert's rows lie in whole tiles of their own. Each row adds its experts' results in the order of their
// numbers, and the shared expert's last, so its bits do not depend on what other rows choose. Only experts with visits
// are read.
//
// Experts that lie in a file are computed in rounds of as many as fit: pinned, read and computed, with the next ones
// read ahead. Which round an expert is in changes no sum. While the last round is read, the next layer's router
// guesses, from x as it is here, what that layer will read.
//
//   normed [rows][width] -> logits [rows][router.out] -> ids [rows][chosen], weights
//   visits, sorted: in -> hidden [visits][2 m] -> middle -> results [visits][width]
//   places [rows][chosen]: the visit of each choice
#include "ops/ops.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "ops/residual.h"
#include "ops/threaded_linear.h"
#include "step/expert_rounds.h"

namespace tw {

namespace {

int64_t visits_of(const Batch& batch, const ExpertsOp& op) {
  return batch.rows * (op.routing.chosen + (op.shared_up.out > 0));
}

// Sorts the choices of all rows by expert, and lists the experts that have any.
class Sorting {
 public:
  Sorting(Pass& p, const ExpertsOp& op, int64_t threads)
      : p_(p), m_(p.r.experts), op_(op), threads_(threads), visit_(m_.visits.of<Visit>(0)) {}

  void run() {
    const int64_t experts = op_.routing.experts, rows = p_.batch.rows, choices = rows * op_.routing.chosen;
    const int64_t* ids = m_.ids.of<int64_t>(0);
    int64_t* next = m_.next.of<int64_t>(0);  // [experts]: the number of visits, then the next one
    std::fill(next, next + experts, 0);
    for (int64_t i = 0; i < choices; i++) next[ids[i]]++;
    for (int64_t expert = 0; expert < experts; expert++) {
      const int64_t visits = next[expert];
      next[expert] = visits_;
      if (visits) list_expert(expert, visits);
    }
    for (int64_t i = 0; i < choices; i++) {
      const int64_t place = next[ids[i]]++;
      m_.places.of<int64_t>(0)[i] = place;
      visit_[place].row = i / op_.routing.chosen;
    }
    if (op_.shared_up.out && rows) {  // an expert without visits has no work items
      for (int64_t row = 0; row < rows; row++) visit_[choices + row].row = row;
      list(SHARED_EXPERT, op_.shared_up, op_.shared_down, m_.shared_in.of(p_.k, op_.shared_up, rows),
           m_.shared_middle.of(p_.k, op_.shared_down, rows));
    }
    set(bound(m_, 0), 0, 0, 0, 0);
    if (!op_.paged) set(bound(m_, 1), count_, visits_, up_pieces_, down_pieces_);
    set(m_.all, count_, visits_, up_pieces_, down_pieces_);
  }

 private:
  void list_expert(int64_t expert, int64_t visits) {
    const Matrix up = matrix_in(op_.up, expert, op_.routing.experts);
    const Matrix down = matrix_in(op_.down, expert, op_.routing.experts);
    list(expert, up, down, m_.in.of(p_.k, up, visits, tiles_), m_.middle.of(p_.k, down, visits, tiles_));
    tiles_ += whole_tiles(visits);
  }

  void list(int64_t expert, const Matrix& up, const Matrix& down, const QuantisedRows& in,
            const QuantisedRows& middle) {
    float* hidden = m_.hidden.of<float>(0) + hidden_;
    m_.busy.of<Busy>(0)[count_] = Busy{expert, up, down, visits_, in, middle, hidden, up_pieces_, down_pieces_};
    for (int64_t i = 0; i < in.rows; i++) visit_[visits_++].busy = count_;
    count_++;
    hidden_ += in.rows * up.out;
    up_pieces_ += Pieces(up, in.rows, threads_).count();
    down_pieces_ += Pieces(down, in.rows, threads_).count();
  }

  Pass& p_;
  ExpertMemory& m_;
  const ExpertsOp& op_;
  const int64_t threads_;
  Visit* const visit_;
  int64_t count_ = 0, visits_ = 0, tiles_ = 0, hidden_ = 0, up_pieces_ = 0, down_pieces_ = 0;
};

// The busy expert that a work item of one phase belongs to. The visits tell the last of them.
const Busy& owner(const Busy* busy, int64_t last, int64_t Busy::* first, int64_t piece) {
  int64_t low = 0;
  while (low < last) {
    const int64_t middle = (low + last + 1) / 2;
    if (busy[middle].*first <= piece)
      low = middle;
    else
      last = middle - 1;
  }
  return busy[low];
}

// added = the sum of a row's results, times their weights.
void sum_visits(Pass& p, const ExpertsOp& op, int64_t row) {
  ExpertMemory& m = p.r.experts;
  const int64_t chosen = op.routing.chosen, width = p.model.width;
  const float* weights = m.weights.of<float>(0) + row * (chosen + op.routing.shared_gate);
  const int64_t* places = m.places.of<int64_t>(0) + row * chosen;
  float *added = p.added + row * width, *results = m.results.of<float>(0);
  std::fill(added, added + width, 0.0f);
  for (int64_t i = 0; i < chosen; i++) {
    float* result = results + places[i] * width;
    scale_row(width, weights[i], result);
    add(width, result, added);
  }
  if (!op.shared_up.out) return;
  float* result = results + (p.batch.rows * chosen + row) * width;
  if (op.routing.shared_gate) scale_row(width, weights[chosen], result);
  add(width, result, added);
}

// Computes the visits of a round's experts: all visits, where the experts are in memory.
void compute_round(Pass& p, Team& team, int64_t thread, const ExpertsOp& op, int64_t round) {
  ExpertMemory& m = p.r.experts;
  const ExpertPlace &start = bound(m, round), &stop = bound(m, round + 1);
  const int64_t width = p.model.width, widest = std::max(op.down.in, op.shared_down.in);
  const int64_t last = stop.busy.load(std::memory_order_relaxed) - 1;
  const int64_t begin = start.visits.load(std::memory_order_relaxed);
  const int64_t visits = stop.visits.load(std::memory_order_relaxed) - begin;
  const Busy* busy = m.busy.of<Busy>(0);
  const Visit* visit = m.visits.of<Visit>(0);
  const auto gather = [&] {  // of the rows of visits: ranks have some rows of each expert
    return op.down.whole ? std::optional<Gather>(std::in_place, *p.model.ranks) : std::nullopt;
  };
  const auto each_visit = [&](auto body) {
    each_row(team, visits, [&](int64_t i) { body(busy[visit[begin + i].busy], begin + i); });
  };
  // A phase over the work items of one kind.
  const auto each_piece = [&](std::atomic<int64_t> ExpertPlace::* counted_in, int64_t Busy::* first, auto body) {
    const int64_t from = (start.*counted_in).load(std::memory_order_relaxed);
    const int64_t to = (stop.*counted_in).load(std::memory_order_relaxed);
    team.each(to - from, [&](int64_t i) {
      const Busy& b = owner(busy, last, first, from + i);
      body(b, from + i - b.*first);
    });
  };

  each_piece(&ExpertPlace::up, &Busy::up_piece, [&](const Busy& b, int64_t i) {
    const Pieces pieces(b.up, b.in.rows, team.size());
    linear_piece(p.k, b.up, b.in, pieces, i, Out{b.hidden, nullptr, b.up.out});
  });
  const std::optional<Gather> activated = gather();
  each_visit([&](const Busy& b, int64_t i) {
    float* act = activated ? activated->rows + i * widest + b.up.first : p.act + thread * widest;
    const int64_t own = op.gated ? b.up.out / 2 : b.up.out;
    (op.gated ? p.k.gated : p.k.activate)(op.activation, own, b.hidden + (i - b.first) * b.up.out, act);
    if (!activated) p.k.quantise_row(b.down, act, i - b.first, b.middle);
  });
  if (activated) {
    activated->wait(team);
    each_visit([&](const Busy& b, int64_t i) {
      p.k.quantise_row(b.down, activated->rows + i * widest, i - b.first, b.middle);
    });
  }
  const std::optional<Gather> all_results = gather();
  float* const results = m.results.of<float>(0);
  float* const to = all_results ? all_results->rows : results;
  each_piece(&ExpertPlace::down, &Busy::down_piece, [&](const Busy& b, int64_t i) {
    const Pieces pieces(b.down, b.middle.rows, team.size());
    linear_piece(p.k, b.down, b.middle, pieces, i, Out{to + b.first * width + b.down.first, nullptr, width});
  });
  if (!all_results) return;
  all_results->wait(team);
  each_visit([&](const Busy&, int64_t i) { memcpy(results + i * width, to + i * width, 4 * width); });
}

}  // namespace

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const ExpertsOp& op) {
  ExpertMemory& m = r.experts;
  const Routing& routing = op.routing;
  const int64_t rows = batch.rows, chosen = rows * routing.chosen, busy = std::min(chosen, routing.experts);
  const int64_t all = visits_of(batch, op), inner = op.down.in, width = op.router.in;
  r.rows.reserve(op.router, rows);
  m.in.reserve(op.up, chosen + 31 * busy);
  m.middle.reserve(op.down, chosen + 31 * busy);
  m.shared_in.reserve(op.shared_up, rows);
  m.shared_middle.reserve(op.shared_down, rows);
  m.normed.of<float>(rows * width);
  m.logits.of<float>(rows * op.router.out);
  m.ids.of<int64_t>(chosen);
  m.weights.of<float>(rows * (routing.chosen + 1));
  m.places.of<int64_t>(chosen);
  m.next.of<int64_t>(routing.experts);
  m.busy.of<Busy>(busy + 1);
  m.bounds.of<ExpertPlace>(busy + 2);
  m.visits.of<Visit>(all);
  m.hidden.of<float>(chosen * 2 * inner + rows * op.shared_up.out);
  m.results.of<float>(all * width);
  needs.act = std::max({needs.act, inner, op.shared_down.in});
  needs.added = std::max(needs.added, width);
  if (op.paged) reserve_rounds(m, batch, op);
  if (op.down.whole) needs.gathered = std::max(needs.gathered, all * std::max({inner, op.shared_down.in, width}));
}

void run(Pass& p, Team& team, int64_t thread, const ExpertsOp& op) {
  run_experts(p, team, thread, op, [&](int64_t row) { add_row(p, op.after, row); });
}

void run_experts(Pass& p, Team& team, int64_t thread, const ExpertsOp& op, const std::function<void(int64_t)>& end) {
  ExpertMemory& m = p.r.experts;
  const Routing& routing = op.routing;
  const int64_t rows = p.batch.rows, visits = visits_of(p.batch, op), width = p.model.width;
  float *normed = m.normed.of<float>(0), *logits = m.logits.of<float>(0);
  const Busy* busy = m.busy.of<Busy>(0);
  const Visit* visit = m.visits.of<Visit>(0);

  const QuantisedRows asking = p.r.rows.of(p.k, op.router, rows);
  each_row(team, rows, [&](int64_t row) {
    float* to = normed + row * width;
    if (op.norm.weight)
      p.k.norm(op.norm, width, p.x + row * width, to);
    else
      std::copy(p.x + row * width, p.x + (row + 1) * width, to);
    const bool own = op.router_norm.weight;
    p.k.quantise_row(op.router, own ? normed_row(p, thread, p.x, op.router_norm, row) : to, row, asking);
  });
  linears_of(p, team, op.router, asking, logits, nullptr, op.router.out);
  each_row(team, rows, [&](int64_t row) {
    int64_t* ids = m.ids.of<int64_t>(0) + row * routing.chosen;
    float* weights = m.weights.of<float>(0) + row * (routing.chosen + routing.shared_gate);
    if (op.router_scale != 1) scale_row(op.router.out, op.router_scale, logits + row * op.router.out);
    route(routing, logits + row * op.router.out, ids, weights);
    for (int64_t i = 0; op.weight_scales && i < routing.chosen; i++) weights[i] *= op.weight_scales[ids[i]];
  });
  team.each(1, [&](int64_t) { Sorting(p, op, team.size()).run(); });

  each_row(team, visits, [&](int64_t i) {
    const Busy& b = busy[visit[i].busy];
    p.k.quantise_row(b.up, normed + visit[i].row * width, i - b.first, b.in);
  });
  int64_t round = 0;
  for (;; round++) {
    if (op.paged) {
      team.each(1, [&](int64_t) { ExpertRounds(p, op).begin(round); });
      if (!round && op.next) ask_ahead(p, team, thread, *op.next);
      team.each(1, [&](int64_t) { ExpertRounds(p, op).wait(team, round); });
    }
    compute_round(p, team, thread, op, round);
    if (!op.paged || ExpertRounds(p, op).ends(round)) break;
  }
  if (op.paged) team.each(1, [&](int64_t) { ExpertRounds(p, op).end(round); });
  each_row(team, rows, [&](int64_t row) {
    sum_visits(p, op, row);
    end(row);
  });
}

}  // namespace tw
