// The online softmax: scores of a block become weights, and the sums so far are rescaled.
#pragma once

#include <cstdint>

#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/attention/queries.h"
#include "kernels/conversions.h"
#include "kernels/functions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

TW_INLINE void multiply(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += 16) store(x + i, load(x + i) * all(factor));
}

// The largest of a query's scores in the lanes that it reads, after the soft cap; the others become -inf.
TW_INLINE float highest_score(const Tile& tile, int64_t query) {
  const Stretch read = tile.read[query];
  float* scores = tile.weights + query * BLOCK;
  F x[4];
  for (int v = 0; v < 4; v++) x[v] = load(scores + 16 * v);
  if (tile.cap > 0)
    for (int v = 0; v < 4; v++) store(scores + 16 * v, x[v] = soft_capped(x[v], tile.cap));
  if (read.low > 0 || read.high < BLOCK)
    for (int v = 0; v < 4; v++) store(scores + 16 * v, x[v] = only(x[v], 16 * v, read, -__builtin_inff()));
  return largest(larger(larger(x[0], x[1]), larger(x[2], x[3])));
}

// For queries that read these lanes of quantised values: the factors from weights to codes, and the value of one unit
// of a code.
static void weigh_scales(const Tile& tile, Stretch read) {
  for (int64_t g = 0; g < tile.value_groups; g++) {
    const float* scales = tile.value_scales + g * BLOCK;
    float* factors = tile.factors + g * BLOCK;
    F highest = all(0.0f);
    for (int v = 0; v < 4; v++) {
      F x = load(scales + 16 * v);
      if (read.low > 0 || read.high < BLOCK) x = only(x, 16 * v, read, 0.0f);
      highest = larger_magnitude(highest, x);
      store(factors + 16 * v, x);
    }
    const float extreme = largest_magnitude(highest);
    const float inverse = finite(extreme) && extreme > LEAST_SCALED ? MOST_CODE / extreme : 0.0f;
    multiply(factors, BLOCK, inverse);
    tile.worth[g] = finite(extreme) ? extreme / MOST_CODE : __builtin_nanf("");
  }
}

// Sixteen queries' factors to a new maximum. Their exponentials are one vector's.
struct Maxima {
  float before[16], of_block[16], now[16], factors[16];

  __attribute__((always_inline)) void find(const Tile& tile, int64_t first, int64_t count) {
    float distances[16] = {};
    for (int64_t i = 0; i < count; i++) of_block[i] = highest_score(tile, first + i);
    for (int64_t i = 0; i < count; i++) {
      before[i] = tile.highest[first + i];
      now[i] = of_block[i] > before[i] ? of_block[i] : before[i];
      distances[i] = (now[i] != before[i] ? before[i] : of_block[i]) - now[i];
    }
    store(factors, exponential(load(distances)));
  }
  bool higher(int64_t i) const { return now[i] != before[i]; }
  // From the block's weights, which are relative to its own maximum if they are encoded.
  float share(int64_t i) const { return higher(i) || now[i] == of_block[i] ? 1.0f : factors[i]; }
};

// Weights relative to a score `base`, and their sum by lane. For quantised values (CODES) the weights times the values'
// scales become integer codes, else they replace the scores.
template <bool CODES>
TW_INLINE F weigh_scores(const Tile& tile, int64_t query, float base) {
  float* weights = tile.weights + query * BLOCK;
  const int64_t groups = CODES ? tile.value_groups : 0, step = tile.queries() * BLOCK;
  uint16_t* codes = (uint16_t*)tile.weight_codes + query * BLOCK;
  const float* factors = tile.factors;
  F x[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) x[v] = load(weights + 16 * v) - all(base);
  exponentials(x);
  if (!CODES)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) store(weights + 16 * v, x[v]);
  for (int64_t g = 0; g < groups; g++, factors += BLOCK, codes += step)
#pragma GCC unroll 2
    for (int v = 0; v < 4; v += 2)
      store_16(codes + 16 * v, nearest(x[v] * load(factors + 16 * v)), nearest(x[v + 1] * load(factors + 16 * v + 16)));
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// Turns the scores of the queries [first, last) into weights, and rescales their sums so far to the new maxima.
static void soften(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const bool in_codes = scaled(block.v.format);
  Stretch weighed = {0, 0};
  Maxima maxima;
  for (; first < last; first += 16) {
    const int64_t count = least(16, last - first);
    maxima.find(tile, first, count);
    for (int64_t i = 0; i < count; i++) {
      const int64_t query = first + i;
      float* sums = tile.sums + query * 16;
      if (maxima.higher(i)) {
        multiply(sums, 16, maxima.factors[i]);
        multiply(tile.mixed + query * tile.depth, tile.depth, maxima.factors[i]);
        tile.highest[query] = maxima.now[i];
      }
      if (!in_codes) {
        store(sums, load(sums) + weigh_scores<false>(tile, query, maxima.now[i]));
        continue;
      }
      const Stretch read = tile.read[query];
      if (read.low != weighed.low || read.high != weighed.high) weigh_scales(tile, weighed = read);
      const float base = maxima.of_block[i] > -__builtin_inff() ? maxima.of_block[i] : maxima.now[i];
      const F total = weigh_scores<true>(tile, query, base);
      const float share = maxima.share(i);
      store(sums, fma(total, all(share), load(sums)));
      for (int64_t g = 0; g < tile.value_groups; g++)
        tile.weight_scales[query * tile.groups + g] = share * tile.worth[g];
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
