// The choice of experts by a router's logits.
#include "step/step.h"

#include <cmath>
#include <cstdint>

#include "ops/residual.h"
#include "step/functions.h"

namespace tw {

namespace {

float sigmoid(float x) { return 1.0f / (1.0f + (float)exponential(-x)); }

// Turns the router's logits into scores.
void score(const Routing& r, float* x) {
  if (r.scores == SIGMOID) {
    for (int64_t i = 0; i < r.experts; i++) x[i] = sigmoid(x[i]);
    return;
  }
  float most = x[0], total = 0;
  for (int64_t i = 1; i < r.experts; i++) most = x[i] > most ? x[i] : most;
  for (int64_t i = 0; i < r.experts; i++) {
    x[i] = (float)exponential(x[i] - most);
    total += x[i];
  }
  for (int64_t i = 0; i < r.experts; i++) x[i] /= total;
}

constexpr float TAKEN = -1;  // the score of an expert that cannot be chosen any more; scores are at least 0 or NaN

float rank_of(const Routing& r, const float* scores, int64_t expert) {
  return r.correction ? scores[expert] + r.correction[expert] : scores[expert];
}

// Takes the experts out of the scores whose groups are not chosen.
void choose_groups(const Routing& r, float* scores) {
  const int64_t size = r.experts / r.groups;
  float sums[MOST_GROUPS];
  bool chosen[MOST_GROUPS] = {};
  for (int64_t group = 0; group < r.groups; group++) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = group * size; i < (group + 1) * size; i++) {
      const float rank = rank_of(r, scores, i);
      if (rank > best) {
        second = best;
        best = rank;
      } else if (rank > second) {
        second = rank;
      }
    }
    sums[group] = r.group_best == 2 ? best + second : best;
  }
  for (int64_t count = 0; count < r.chosen_groups; count++) {
    int64_t best = -1;
    for (int64_t group = 0; group < r.groups; group++)
      if (!chosen[group] && (best < 0 || sums[group] > sums[best])) best = group;
    chosen[best] = true;
  }
  for (int64_t i = 0; i < r.experts; i++)
    if (!chosen[i / size]) scores[i] = TAKEN;
}

// The experts of the highest ranks, sorted by number. Takes them out of the scores.
void choose(const Routing& r, float* scores, int64_t* ids, float* weights) {
  if (r.groups > 1) choose_groups(r, scores);
  for (int64_t count = 0; count < r.chosen; count++) {
    int64_t best = -1, place = count;
    for (int64_t i = 0; i < r.experts; i++)
      if (scores[i] != TAKEN && (best < 0 || rank_of(r, scores, i) > rank_of(r, scores, best))) best = i;
    for (; place > 0 && ids[place - 1] > best; place--) {
      ids[place] = ids[place - 1];
      weights[place] = weights[place - 1];
    }
    ids[place] = best;
    weights[place] = scores[best];
    scores[best] = TAKEN;
  }
  if (r.renormalise) {
    float total = 0;
    for (int64_t i = 0; i < r.chosen; i++) total += weights[i];
    for (int64_t i = 0; i < r.chosen; i++) weights[i] /= total;
  }
  if (r.factor != 1) scale_row(r.chosen, r.factor, weights);
}

}  // namespace

void route(const Routing& r, float* logits, int64_t* ids, float* weights) {
  if (r.shared_gate) weights[r.chosen] = sigmoid(logits[r.experts]);
  score(r, logits);
  choose(r, logits, ids, weights);
}

}  // namespace tw
