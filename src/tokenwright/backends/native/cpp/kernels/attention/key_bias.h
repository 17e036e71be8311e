// Scores of the bias that keys were stored without.
//
// A biased projection of keys (Qwen2's) may add numbers much larger than the keys' own, and a group of a quantised
// cache would spend its codes on them. So a quantised key k is stored without its bias b, and q R(p) (k + b), where
// R(p) is the rotation of position p, is computed as q R(p) k + q R(p) b. With pairs i of a head and angles a_i of the
// position,
//
//   q R(p) b = sum over i of cos(a_i) (q1 b1 + q2 b2) + sin(a_i) (q2 b1 - q1 b2)
//
// A position is the sum of its block's first position and its place in the block, so a block costs one more rotation of
// these factors, and its keys one product each with a table that stays in the cache of the processor.
#pragma once

#include <cstdint>

#include "api.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/scores.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// The factors of the cosines and of the sines of a position, for the queries of a tile.
static void begin_biases(const Heads& heads, const Tile& tile, const float* from, int64_t stride) {
  const int64_t half = tile.size / 2;
  for (int64_t query = 0; query < tile.queries(); query++) {
    const int64_t head = query % tile.heads;
    const float* q = from + query / tile.heads * stride + head * tile.size;
    const float* b = heads.key_bias + (tile.kv_head + head / tile.shared) * tile.size;
    float* to = tile.bias + query * tile.depth;
    for (int64_t i = 0; i < half; i += 16) {
      const int64_t n = least(16, half - i);
      const F scale = all((float)heads.scale), q1 = load(q + i, n) * scale, q2 = load(q + half + i, n) * scale;
      const F b1 = load(b + i, n), b2 = load(b + half + i, n);
      store(to + i, fma(q1, b1, q2 * b2), n);
      store(to + half + i, q2 * b1 - q1 * b2, n);
    }
  }
}

// Adds the bias of a block's keys to the scores of some queries.
struct BiasScores {
  const KVLayer& layer;
  const Tile& tile;
  const Block& block;

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t lane) const {
    const float* places = layer.place_rotation + block.start % BLOCK + lane;
    const float* q = tile.bias_of_block;
    float* scores = tile.weights + query * BLOCK + lane;
    F total[N][V];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) total[i][v] = load(scores + i * BLOCK + 16 * v);
    for (int64_t d = 0; d < tile.size; d++, places += PLACES) {
      F place[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) settle(place[v] = load(places + 16 * v));
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const F x = all(q[i * tile.depth + d]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[i][v] = fma(x, place[v], total[i][v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(scores + i * BLOCK + 16 * v, total[i][v]);
  }

  // The factors of a query for the places of this block.
  void turn(int64_t query, float* to) const {
    const int64_t half = tile.size / 2;
    const float *cos = layer.block_rotation + block.start / BLOCK * tile.size, *sin = cos + half;
    const float *by_cos = tile.bias + query * tile.depth, *by_sin = by_cos + half;
    for (int64_t i = 0; i < half; i += 16) {
      const int64_t n = least(16, half - i);
      const F c = load(cos + i, n), s = load(sin + i, n), x = load(by_cos + i, n), y = load(by_sin + i, n);
      store(to + i, fma(x, c, y * s), n);
      store(to + half + i, y * c - x * s, n);
    }
  }

  template <int N>
  void run(int64_t query) const {
    constexpr int fit = vectors_beside(N);
    static_assert(N <= BIASED);
    for (int i = 0; i < N; i++) turn(query + i, tile.bias_of_block + i * tile.depth);
    int64_t lane = block.first();
    for (; lane + 16 * fit <= block.last(); lane += 16 * fit) vectors<N, fit>(query, lane);
    for (; lane < block.last(); lane += 16) vectors<N, 1>(query, lane);
  }
};

TW_INLINE void add_biases(const KVLayer& layer, const Tile& tile, const Block& block, int64_t first, int64_t last) {
  if (layer.block_rotation) side_by_side<QUERIES>(BiasScores{layer, tile, block}, first, last);
}

}  // namespace TW_ISA
}  // namespace tw
