// The sums of a block's values times the weights of a tile's queries: the values are decoded to memory for many
// queries, and read in place for few.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_decode.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/scores.h"
#include "kernels/attention/softmax.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Evenly spaced values of the lanes from some lane up to `end`.
struct Values {
  Run rows;
  int64_t end;
};

// fp32 values, decoded once for many queries.
struct DecodedValues {
  const Tile& tile;

  void after(int64_t) const {}
  Values from(int64_t lane, int64_t high) const {
    return {{(const uint8_t*)(tile.numbers + lane * tile.depth), tile.depth * 4}, high};
  }
  TW_INLINE int64_t bytes_of(int64_t numbers) { return 4 * numbers; }
  template <int V>
  TW_INLINE void read(const uint8_t* at, F (&value)[V]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) settle(value[v] = load((const float*)at + 16 * v));
  }
  template <int V>
  TW_INLINE void begin(F (&)[V]) {}
  template <int V>
  TW_INLINE void end(F (&)[V]) {}
};

// Values read in place, for few queries. Prefetches those of the next block.
//
// For bfloat16, one load gives two vectors, of even and of odd numbers; the sums have that order too until `end`.
template <int64_t FORMAT>
struct StoredValues {
  const Tile& tile;
  const Block& block;

  inline __attribute__((always_inline)) void after(int64_t bytes) const { block.ahead->v.after(bytes); }
  Values from(int64_t lane, int64_t high) const {
    const int64_t bytes = row_bytes(FORMAT, tile.size), group = lane / 16;
    const Run rows = {(const uint8_t*)block.v.codes + block.places[lane] * bytes, block.apart * bytes};
    return {rows, block.even[group] ? least(16 * (group + 1), high) : lane + 1};
  }
  TW_INLINE int64_t bytes_of(int64_t numbers) { return row_bytes(FORMAT, numbers); }
  template <int V>
  TW_INLINE void read(const uint8_t* at, F (&value)[V]) {
    constexpr int pairs = FORMAT == BF16 ? V / 2 : 0;
#pragma GCC unroll 2
    for (int v = 0; v < 2 * pairs; v += 2) {
      const I both = load_bits(at + bytes_of(16 * v));
      value[v] = line_of<BF16>(both, 0);
      value[v + 1] = line_of<BF16>(both, 1);
    }
#pragma GCC unroll 4
    for (int v = 2 * pairs; v < V; v++) value[v] = load_numbers<FORMAT>(at + bytes_of(16 * v));
  }
  template <int V>
  TW_INLINE void begin(F (&total)[V]) {
    for (int v = 0; FORMAT == BF16 && v + 1 < V; v += 2) take_apart(total[v], total[v + 1]);
  }
  template <int V>
  TW_INLINE void end(F (&total)[V]) {
    for (int v = 0; FORMAT == BF16 && v + 1 < V; v += 2) interleave(total[v], total[v + 1]);
  }
};

// Adds the values, each times its weight, in the order of positions.
template <typename Kind>
struct Mix {
  const Tile& tile;
  const Kind& kind;
  int64_t from, columns;  // [from, columns) of the values; the padding after their last vector is uninitialised

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t column, Stretch read) const {
    const float* weights = tile.weights + query * BLOCK;
    float* mixed = tile.mixed + query * tile.depth + column;
    F total[N][V];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) total[i][v] = load(mixed + i * tile.depth + 16 * v);
      Kind::begin(total[i]);
    }
    for (int64_t lane = read.low; lane < read.high;) {
      Values values = kind.from(lane, read.high);
      values.rows.at += Kind::bytes_of(column);
      for (; lane < values.end; lane++, values.rows.at += values.rows.step) {
        F value[V];
        Kind::read(values.rows.at, value);
        kind.after(Kind::bytes_of(16 * V));
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
          const F weight = all(weights[i * BLOCK + lane]);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) total[i][v] = fma(weight, value[v], total[i][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      Kind::end(total[i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(mixed + i * tile.depth + 16 * v, total[i][v]);
    }
  }

  template <int N>
  void lanes(int64_t query, Stretch read) const {
    if (read.low >= read.high) return;
    constexpr int fit = N > QUERIES ? 2 : vectors_beside(N);
    int64_t column = from;
    for (; column + 16 * fit <= columns; column += 16 * fit) vectors<N, fit>(query, column, read);
    if (fit > 2 && column + 32 < columns) return vectors<N, 3>(query, column, read);
    if (fit > 1 && column + 16 < columns) return vectors<N, 2>(query, column, read);
    if (column < columns) vectors<N, 1>(query, column, read);
  }

  // The queries go together over the lanes that all of them read, and one by one over the lanes before and after.
  template <int N>
  void run(int64_t query) const {
    const Stretch* read = tile.read + query;
    Stretch common = {0, BLOCK};
    for (int i = 0; i < N; i++) common = {most(common.low, read[i].low), least(common.high, read[i].high)};
    if (common.low >= common.high) common = {BLOCK, BLOCK};
    for (int i = 0; i < N; i++) lanes<1>(query + i, {read[i].low, least(read[i].high, common.low)});
    lanes<N>(query, common);
    for (int i = 0; i < N; i++) lanes<1>(query + i, {common.high, read[i].high});
  }
};

template <int64_t FORMAT>
static void mix_stored(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const StoredValues<FORMAT> kind{tile, block};
  const int64_t columns = whole(tile.values, 16);
  // A second group of queries finds the values of a few columns in the nearest cache.
  const int64_t step = last - first <= GROUP_QUERIES ? columns : 16 * KEY_VECTORS;
  for (int64_t from = 0; from < columns; from += step)
    side_by_side<GROUP_QUERIES>(Mix<StoredValues<FORMAT>>{tile, kind, from, least(from + step, columns)}, first, last);
}

// Adds quantised values: exact integer sums over the block, times the weights' scales. STORED: reads the values in
// place; else the copy that was decoded for many queries.
template <int64_t FORMAT, bool STORED>
struct CodeMix {
  const Tile& tile;
  const Block& block;

  // Adds two positions of values, each times its weight, to the sums of 32 columns.
  template <int N>
  TW_INLINE void add_two(const int16_t* weights, I (&x)[2], I (&total)[N][2]) {
    settle(x[0]);
    settle(x[1]);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      int32_t two;
      memcpy(&two, weights + i * BLOCK, 4);
      const I weight = all(two);
      total[i][0] = dot16(total[i][0], weight, x[0]);
      total[i][1] = dot16(total[i][1], weight, x[1]);
    }
  }

  template <int N>
  inline __attribute__((always_inline)) void add_stored(int64_t g, const int16_t* weights, I (&total)[N][2]) const {
    constexpr int64_t of_group = row_bytes(FORMAT, SCALED);
    const int64_t bytes = row_bytes(FORMAT, tile.size), step = 2 * block.apart * bytes;
    for (int64_t lane = block.low & -2; lane < block.high;) {
      const uint8_t* a = (const uint8_t*)block.v.codes + block.places[lane] * bytes + g * of_group;
      const uint8_t* b = (const uint8_t*)block.v.codes + block.places[lane + 1] * bytes + g * of_group;
      const int64_t end = block.even[lane / 16] ? least(lane / 16 * 16 + 16, block.high) : lane + 2;
      for (; lane < end; lane += 2, a += step, b += step) {
        I x[2];
        pair_values<FORMAT>(a, b, x);
        block.ahead->v.after(2 * of_group);
        add_two<N>(weights + lane, x, total);
      }
    }
  }

  template <int N>
  inline __attribute__((always_inline)) void add_decoded(int64_t g, const int16_t* weights, I (&total)[N][2]) const {
    const int64_t low = block.low & -2, high = block.high, depth = tile.depth;
    const float* values = tile.value_codes + low / 2 * depth + g * SCALED;
#pragma GCC unroll 2
    for (int64_t lane = low; lane < high; lane += 2, values += depth) {
      I x[2] = {load_bits(values), load_bits(values + 16)};
      add_two<N>(weights + lane, x, total);
    }
  }

  template <int N>
  void run(int64_t query) const {
    for (int64_t g = 0; g < tile.value_groups; g++) {
      const int16_t* weights = tile.weight_codes + (g * tile.queries() + query) * BLOCK;
      I total[N][2] = {};
      if constexpr (STORED)
        add_stored<N>(g, weights, total);
      else
        add_decoded<N>(g, weights, total);
      const float* scales = tile.weight_scales + query * tile.groups + g;
      const int64_t groups = tile.groups, depth = tile.depth;
      float* mixed = tile.mixed + query * depth + g * SCALED;
#pragma GCC unroll 8
      for (int i = 0; i < N; i++, mixed += depth) {
        F first = to_float(total[i][0]), second = to_float(total[i][1]);
        in_order<FORMAT>(first, second);
        const F scale = all(scales[i * groups]);
        store(mixed, fma(first, scale, load(mixed)));
        store(mixed + 16, fma(second, scale, load(mixed + 16)));
      }
    }
  }
};

// Has the sums of the queries [first, last) that read this block be those of values times the Hadamard matrix, as the
// values of an INT4 cache are; they stay so until `turn_back`.
static void turn_sums(const Tile& tile, int64_t first, int64_t last) {
  for (int64_t query = first; query < last; query++) {
    if (tile.turned[query] != 0 || tile.read[query].low >= tile.read[query].high) continue;
    hadamard_row(tile.mixed + query * tile.depth, tile.values, false);
    tile.turned[query] = 1;
  }
}
static void turn_back(const Tile& tile) {
  for (int64_t query = 0; query < tile.queries(); query++) {
    if (tile.turned[query] == 0) continue;
    hadamard_row(tile.mixed + query * tile.depth, tile.values, true);
    tile.turned[query] = 0;
  }
}

template <int64_t FORMAT>
static void mix_codes(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  if (FORMAT == INT4) turn_sums(tile, first, last);
  if (last - first <= FEW_QUERIES && tile.values % SCALED == 0)
    return side_by_side<GROUP_QUERIES>(CodeMix<FORMAT, true>{tile, block}, first, last);
  decode_values(block, tile.size, tile.values, tile.depth, tile.value_codes);
  side_by_side<GROUP_QUERIES>(CodeMix<FORMAT, false>{tile, block}, first, last);
}

}  // namespace TW_ISA
}  // namespace tw
