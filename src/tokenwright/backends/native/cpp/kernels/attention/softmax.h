// The online softmax: a query's scores in a block become weights, and its sums so far are rescaled.
#pragma once

#include <cstdint>

#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/attention/queries.h"
#include "kernels/functions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

TW_INLINE void multiply(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += 16) store(x + i, load(x + i) * all(factor));
}

// Turns a query's scores into weights, and rescales its sums so far to the new maximum.
//
// The weights are exp(score - maximum). With quantised values they are exp(score - the block's maximum), and the
// query's share is exp(the block's maximum - maximum).
TW_INLINE void soften(const Tile& tile, const Block& block, int64_t query) {
  const Stretch read = tile.read[query];
  float* weights = tile.weights + query * BLOCK;
  float* sums = tile.sums + query * 16;
  F x[4];
  for (int v = 0; v < 4; v++) x[v] = load(weights + 16 * v);
  if (tile.cap > 0)
    for (int v = 0; v < 4; v++) x[v] = soft_capped(x[v], tile.cap);
  if (read.low > 0 || read.high < BLOCK)
    for (int v = 0; v < 4; v++) x[v] = only(x[v], 16 * v, read, -__builtin_inff());
  const float before = tile.highest[query];
  const float block_highest = largest(larger(larger(x[0], x[1]), larger(x[2], x[3])));
  const float highest = block_highest > before ? block_highest : before;
  const bool in_codes = scaled(block.v.format);
  float factor = 1.0f;
  if (highest != before || (in_codes && highest != block_highest)) {
    float each[16];
    store(each, exponential(all(highest != before ? before - highest : block_highest - highest)));
    factor = each[0];
  }
  if (highest != before) {
    multiply(sums, 16, factor);
    multiply(tile.mixed + query * tile.depth, tile.depth, factor);
    tile.highest[query] = highest;
  }
  const F base = all(in_codes && block_highest > -__builtin_inff() ? block_highest : highest);
  for (int v = 0; v < 4; v++) {
    x[v] = exponential(x[v] - base);
    store(weights + 16 * v, x[v]);
  }
  const F total = (x[0] + x[1]) + (x[2] + x[3]);
  if (!in_codes) return store(sums, load(sums) + total);
  tile.shares[query] = highest != before ? 1.0f : factor;
  store(sums, fma(total, all(tile.shares[query]), load(sums)));
}

}  // namespace TW_ISA
}  // namespace tw
