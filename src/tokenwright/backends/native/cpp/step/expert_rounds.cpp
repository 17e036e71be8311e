#include "step/expert_rounds.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ops/residual.h"
#include "ops/threaded_linear.h"
#include "step/observer.h"

namespace tw {

namespace {

constexpr int64_t GUESSED_ROWS = 64;  // of which the next layer's router is asked; more name nearly all experts

}  // namespace

void ExpertRounds::begin(int64_t round) {
  if (round) end(round - 1);
  const int64_t first = bound(m_, round).busy, left = paged() - first;
  int64_t* named = m_.named.of<int64_t>(0);
  for (int64_t i = 0; i < left; i++) named[i] = busy_[first + i].expert;
  const int64_t count = left ? pool_.pin(*op_.paged, named, left, m_.slots.of<int64_t>(0)) : 0;
  if (count == left) {
    set(bound(m_, round + 1), m_.all.busy, m_.all.visits, m_.all.up, m_.all.down);
    last().store(round + 1);
    return;
  }
  const Busy& next = busy_[first + count];
  set(bound(m_, round + 1), first + count, next.first, next.up_piece, next.down_piece);
  pool_.read_ahead(*op_.paged, named + count, left - count);
}

void ExpertRounds::wait(Team& team, int64_t round) {
  if (ends(round)) guess();
  const int64_t first = bound(m_, round).busy, count = std::min<int64_t>(bound(m_, round + 1).busy, paged()) - first;
  const int64_t *slots = m_.slots.of<int64_t>(0), *place = op_.paged->place;
  team.waited(pool_.wait(slots, count));
  for (int64_t i = 0; i < count; i++) {
    Busy& b = busy_[first + i];
    const char* memory = pool_.memory(slots[i]);
    b.up.codes = memory + place[0];
    b.down.codes = memory + place[2];
    if (b.up.group) b.up.scales = (const uint16_t*)(memory + place[1]);
    if (b.down.group) b.down.scales = (const uint16_t*)(memory + place[3]);
    if (const int64_t error = pool_.error(slots[i])) fail(b, error);
  }
}

void ExpertRounds::end(int64_t round) {
  const int64_t count = std::min<int64_t>(bound(m_, round + 1).busy, paged()) - bound(m_, round).busy;
  pool_.unpin(m_.slots.of<int64_t>(0), count);
}

// The number of busy experts in the file: all but the shared one, which is the last.
int64_t ExpertRounds::paged() const {
  const int64_t all = m_.all.busy;
  return all && busy_[all - 1].expert == SHARED_EXPERT ? all - 1 : all;
}

// Reads ahead what the next layer's router guesses, or its first experts where there are rows for nearly all.
void ExpertRounds::guess() {
  if (!op_.next) return;
  const Routing& routing = op_.next->routing;
  const bool asked = p_.batch.rows <= GUESSED_ROWS;
  const int64_t count = asked ? p_.batch.rows * routing.chosen : routing.experts;
  int64_t* experts = asked ? m_.guessed.of<int64_t>(0) : m_.named.of<int64_t>(0);
  for (int64_t i = 0; !asked && i < count; i++) experts[i] = i;
  pool_.read_ahead(*op_.next->paged, experts, count);
}

// Marks the texts of the rows that visit an expert, whose results are of no use.
void ExpertRounds::fail(const Busy& b, int64_t error) {
  const Visit* visit = m_.visits.of<Visit>(0);
  for (int64_t i = b.first; i < b.first + b.in.rows; i++) p_.batch.unread[chunk_of(p_.batch, visit[i].row)] = error;
}

void ask_ahead(Pass& p, Team& team, int64_t thread, const ExpertsOp& op) {
  if (p.batch.rows > GUESSED_ROWS) return;
  ExpertMemory& m = p.r.experts;
  const int64_t rows = p.batch.rows, width = p.model.width, chosen = op.routing.chosen;
  const QuantisedRows asking = m.guessing.of(p.k, op.router, rows);
  const Norm& norm = op.router_norm.weight ? op.router_norm : op.norm;
  float* logits = m.guessed_logits.of<float>(0);
  each_row(team, rows, [&](int64_t row) {
    const float* x = norm.weight ? normed_row(p, thread, p.x, norm, row) : p.x + row * width;
    p.k.quantise_row(op.router, x, row, asking);
  });
  const Work before = counted;  // a guess is no work of the model
  linears_of(p, team, op.router, asking, logits, nullptr, op.router.out);
  counted = before;
  each_row(team, rows, [&](int64_t row) {
    float* weights = m.guessed_weights.of<float>(0) + row * (chosen + op.routing.shared_gate);
    if (op.router_scale != 1) scale_row(op.router.out, op.router_scale, logits + row * op.router.out);
    route(op.routing, logits + row * op.router.out, m.guessed.of<int64_t>(0) + row * chosen, weights);
  });
}

void reserve_rounds(ExpertMemory& m, const Batch& batch, const ExpertsOp& op) {
  const int64_t rows = batch.rows, experts = op.routing.experts;
  m.rounds.of<std::atomic<int64_t>>(op.paged->pool->layers())[op.paged->index] = 0;
  m.slots.of<int64_t>(experts);
  m.named.of<int64_t>(op.next ? std::max(experts, op.next->routing.experts) : experts);
  if (!op.next || rows > GUESSED_ROWS) return;
  m.guessing.reserve(op.next->router, rows);
  m.guessed_logits.of<float>(rows * op.next->router.out);
  m.guessed.of<int64_t>(rows * op.next->routing.chosen);
  m.guessed_weights.of<float>(rows * (op.next->routing.chosen + 1));
}

}  // namespace tw
