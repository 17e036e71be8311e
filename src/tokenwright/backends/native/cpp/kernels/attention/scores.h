// The scores of a tile's queries with a block's keys: decoded to memory for many queries, read in place for few.
#pragma once

#include <cstdint>

#include "api.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_decode.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/attention/queries.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// The queries that registers hold beside vectors of 16 decoded keys or values. Each vector is loaded once for all of
// these queries, and a number of a query is repeated once for all vectors.
constexpr int QUERIES = WIDTH == 16 ? 4 : WIDTH == 8 ? 6 : 2, CODE_QUERIES = WIDTH >= 8 ? 4 : 2;
constexpr int vectors_beside(int queries) { return WIDTH == 16 ? 4 : WIDTH == 8 && queries <= 2 ? 2 : 1; }
constexpr int GROUP_QUERIES = WIDTH == 16 ? 8 : WIDTH == 8 ? 2 : 1;  // queries in registers with fewer vectors,
constexpr int KEY_VECTORS = WIDTH == 16 ? 2 : 1;                     // such as these of keys that are read in place
constexpr int FEW_QUERIES = WIDTH == 16 ? 16 : GROUP_QUERIES;        // so many read them in place, with one vector

TW_INLINE const QueryRows& meeting(const Tile& tile, const Block& block) { return block.sinks ? tile.sink_q : tile.q; }

// Scores with decoded fp32 keys: sums over the numbers of a head, in order.
struct Scores {
  const Tile& tile;
  const Block& block;

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t lane) const {
    const float *q = meeting(tile, block).numbers + query, *keys = tile.numbers + lane;
    F total[N][V] = {};
    for (int64_t d = 0; d < tile.size; d++, keys += BLOCK, q += tile.beside) {
      F key[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) settle(key[v] = load(keys + 16 * v));
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const F x = all(q[i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[i][v] = fma(x, key[v], total[i][v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(tile.weights + (query + i) * BLOCK + lane + 16 * v, total[i][v]);
  }

  template <int N>
  void run(int64_t query) const {
    int64_t lane = block.first();
    constexpr int fit = vectors_beside(N);
    for (; lane + 16 * fit <= block.last(); lane += 16 * fit) vectors<N, fit>(query, lane);
    for (; lane < block.last(); lane += 16) vectors<N, 1>(query, lane);
  }
};

// Transposes sixteen bytes of V times sixteen keys, and prefetches the next block.
template <int V>
TW_INLINE void take_keys(const Block& block, Run (&rows)[V], I (&x)[V][4]) {
#pragma GCC unroll 2
  for (int v = 0; v < V; v++) {
    transpose(rows[v], x[v]);
    rows[v].at += 16;
  }
  block.ahead->k.after(V * 16 * 16);
}

// Scores for few queries, with keys of a native format read in place: for one use, decoding to memory does not pay.
template <int64_t FORMAT>
struct StoredScores {
  const Tile& tile;
  const Block& block;

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t lane) const {
    constexpr int64_t lines = lines_in_four_bytes(FORMAT);
    const float* q = meeting(tile, block).numbers + query;
    const int64_t bytes = row_bytes(FORMAT, tile.size);
    Run rows[V];
    for (int v = 0; v < V; v++) rows[v] = even_keys(block, bytes, lane + 16 * v, tile.copies + v * 16 * tile.depth);
    F total[N][V] = {};
    for (int64_t offset = 0; offset < bytes; offset += 16) {
      I x[V][4];
      take_keys<V>(block, rows, x);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
#pragma GCC unroll 2
        for (int k = 0; k < lines; k++, q += tile.beside) {
          F keys[V];
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) keys[v] = line_of<FORMAT>(x[v][j], k);
#pragma GCC unroll 16
          for (int i = 0; i < N; i++) {
            const F number = all(q[i]);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) total[i][v] = fma(number, keys[v], total[i][v]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; i++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) store(tile.weights + (query + i) * BLOCK + lane + 16 * v, total[i][v]);
  }

  template <int N>
  void run(int64_t query) const {
    constexpr int fit = N > GROUP_QUERIES ? 1 : KEY_VECTORS;
    int64_t lane = block.first();
    for (; lane + 16 * fit <= block.last(); lane += 16 * fit) vectors<N, fit>(query, lane);
    for (; lane < block.last(); lane += 16) vectors<N, 1>(query, lane);
  }
};

template <int64_t FORMAT>
static void score_stored(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const StoredScores<FORMAT> kernel{tile, block};
  for (; first + FEW_QUERIES <= last; first += FEW_QUERIES) kernel.template run<FEW_QUERIES>(first);
  side_by_side<GROUP_QUERIES>(kernel, first, last);
}

// Adds one group's integer sums, times the scales of the keys and of the query, to a query's scores from a lane on.
template <int V>
TW_INLINE void add_codes(float* scores, const float* key_scales, float scale, bool first, const I (&total)[V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    const F part = to_float(total[v]) * load(key_scales + 16 * v);
    store(scores + 16 * v, fma(part, all(scale), first ? all(0.0f) : load(scores + 16 * v)));
  }
}

// Scores with quantised keys: exact integer sums over each group, times the scales of key and query, added in order.
struct CodeScores {
  const Tile& tile;
  const Block& block;

  // Adds the products of some lines of keys.
  template <int N, int V>
  TW_INLINE void multiply_lines(const float* keys, const int32_t* pairs, int64_t beside, int64_t lines,
                                I (&total)[N][V]) {
#pragma GCC unroll 4
    for (int64_t line = 0; line < lines; line++) {
      I key[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) settle(key[v] = load_bits(keys + line * BLOCK + 16 * v));
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const I x = all(pairs[line * beside + i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[i][v] = dot16(total[i][v], x, key[v]);
      }
    }
  }

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t lane, int64_t group) const {
    const QueryRows& rows = meeting(tile, block);
    const int64_t beside = tile.beside, groups = tile.groups;
    const int32_t* pairs = rows.pairs + group * SCALED / 2 * beside + query;
    const float *keys = tile.numbers + group * SCALED / 2 * BLOCK + lane,
                *scales = rows.scales + query * groups + group;
    const float* key_scales = tile.scales + group * BLOCK + lane;
    float* scores = tile.weights + query * BLOCK + lane;  // in locals: stores could change the tile, to the compiler
    I total[N][V] = {};
    const int64_t lines = least(SCALED, whole(tile.size - group * SCALED, 8)) / 2;
    if (lines == SCALED / 2)
      multiply_lines<N, V>(keys, pairs, beside, SCALED / 2, total);
    else
      multiply_lines<N, V>(keys, pairs, beside, lines, total);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) add_codes<V>(scores + i * BLOCK, key_scales, scales[i * groups], group == 0, total[i]);
  }

  template <int N>
  void run(int64_t query) const {
    constexpr int fit = vectors_beside(N);
    const int64_t first = block.first(), last = block.last();
    for (int64_t group = 0; group < tile.groups; group++) {
      int64_t lane = first;
      for (; lane + 16 * fit <= last; lane += 16 * fit) vectors<N, fit>(query, lane, group);
      for (; fit > 1 && lane < last; lane += 16) vectors<N, 1>(query, lane, group);
    }
  }
};

// The same for few queries, with keys read in place: the decoded pairs stay in registers.
template <int64_t FORMAT>
struct StoredCodeScores {
  const Tile& tile;
  const Block& block;

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t lane) const {
    constexpr int64_t lines = lines_in_four_bytes(FORMAT), of_group = row_bytes(FORMAT, SCALED);
    const QueryRows& queries = meeting(tile, block);
    const int64_t bytes = row_bytes(FORMAT, tile.size);
    Run rows[V];
    for (int v = 0; v < V; v++) rows[v] = even_keys(block, bytes, lane + 16 * v, tile.copies + v * 16 * tile.depth);
    for (int64_t group = 0; group < tile.groups; group++) {
      const int32_t* pairs = queries.pairs + group * SCALED / 2 * tile.beside + query;
      I total[N][V] = {};
      const int64_t end = least((group + 1) * of_group, bytes);
      for (int64_t offset = group * of_group; offset < end; offset += 16) {
        I x[V][4];
        take_keys<V>(block, rows, x);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
#pragma GCC unroll 4
          for (int k = 0; k < lines; k++, pairs += tile.beside) {
            I keys[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) keys[v] = float_to_bits(line_of<FORMAT>(x[v][j], k));
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
              const I pair = all(pairs[i]);
#pragma GCC unroll 2
              for (int v = 0; v < V; v++) {
                total[i][v] = dot16(total[i][v], pair, keys[v]);
                settle(total[i][v]);
              }
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; i++)
        add_codes<V>(tile.weights + (query + i) * BLOCK + lane, tile.scales + group * BLOCK + lane,
                     queries.scales[(query + i) * tile.groups + group], group == 0, total[i]);
    }
  }

  template <int N>
  void run(int64_t query) const {
    int64_t lane = block.first();
    for (; lane + 16 * KEY_VECTORS <= block.last(); lane += 16 * KEY_VECTORS) vectors<N, KEY_VECTORS>(query, lane);
    for (; lane < block.last(); lane += 16) vectors<N, 1>(query, lane);
  }
};

}  // namespace TW_ISA
}  // namespace tw
