// Attention of some rows and query heads over one KV head, block by block through the text.
//
// Included once for each instruction set. What one row and head becomes is defined for itself: it goes through blocks
// of 64 absolute positions in order (cut where two parts meet and where sinks end); in each it takes its scores, the
// new maximum, the sums so far times what that changes, and then the values in the order of positions. Here many rows
// and heads go through a block together, so that it is decoded once; that changes nothing of what each one computes.
// A query is one head of one row. docs/attention.md has it in full.
#pragma once

#include "kernels.h"
#include "kv.inl.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t TOGETHER = 64;  // queries, at least: what a block is decoded for

// Queries that go through the text together, all heads of some rows, and what belongs to each.
struct Tile {
  int64_t heads;     // of a row
  int64_t position;  // of the first row
  int64_t rows;
  int64_t size, depth;  // of a head, and rounded up to whole lanes
  float* q;             // [queries][depth], times the scale
  float* sink_q;
  float* weights;  // [queries][64]: scores, then their exponentials
  float* mixed;    // [queries][depth]: sums of weights times values
  float* sums;     // [queries][16]: of weights, by position modulo 16
  float* highest;  // [queries]: the largest score
  float* numbers;  // [64 * depth]: the block's keys, then its values
  int64_t queries() const { return rows * heads; }
};

// The lanes of a block that a row reads: [low, high).
struct Stretch {
  int64_t low, high;
};

TW_INLINE int64_t rows_together(int64_t heads) { return most(1, TOGETHER / heads); }

static int64_t attention_scratch(const Heads& heads) {
  const int64_t queries = most(TOGETHER, heads.heads / heads.kv_heads), depth = whole(heads.size, 16);
  return queries * (3 * depth + BLOCK + 16 + 1) + BLOCK * depth + 16;
}

static Tile tile_of(const Heads& heads, const Span& span, const Queries& queries, int64_t first, float* scratch) {
  Tile tile;
  tile.heads = queries.head_last - queries.head;
  tile.rows = least(rows_together(tile.heads), queries.last - first);
  tile.position = span.start + first;
  tile.size = heads.size;
  tile.depth = whole(heads.size, 16);
  tile.numbers = (float*)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);  // on whole lines
  tile.q = tile.numbers + BLOCK * tile.depth;
  tile.sink_q = tile.q + tile.queries() * tile.depth;
  tile.mixed = tile.sink_q + tile.queries() * tile.depth;
  tile.weights = tile.mixed + tile.queries() * tile.depth;
  tile.sums = tile.weights + tile.queries() * BLOCK;
  tile.highest = tile.sums + tile.queries() * 16;
  return tile;
}

static void load_queries(const Heads& heads, const Tile& tile, const float* from, int64_t stride, float* q) {
  for (int64_t row = 0; row < tile.rows; row++)
    for (int64_t head = 0; head < tile.heads; head++, q += tile.depth)
      for (int64_t i = 0; i < tile.size; i += 16)
        store(q + i, load(from + row * stride + head * tile.size + i, least(16, tile.size - i)) * all((float)heads.scale));
}

// ---- The blocks of a text ----

// The block that begins at a position: up to where the next one begins, another part or what lies behind the sinks.
static Block block_at(const KVLayer& layer, int64_t start) {
  Block block;
  block.part = &part_of(layer, start);
  block.start = start;
  block.sinks = start < layer.sinks;
  block.stop = (start | (BLOCK - 1)) + 1;
  if (block.part->stop >= 0) block.stop = least(block.stop, block.part->stop);
  if (block.sinks) block.stop = least(block.stop, layer.sinks);
  return block;
}

// What a row at a position reads of a block.
TW_INLINE Stretch stretch_of(const KVLayer& layer, const Block& block, int64_t position) {
  const bool all_of_it = block.sinks || !layer.window;
  const int64_t low = all_of_it ? block.start : most(block.start, position - layer.window + 1);
  return {low - block.start, least(block.stop, position + 1) - block.start};
}

// Find where the positions lie that some row of [first, last) reads. The rows are side by side, and so is what they read.
static void locate(const KVLayer& layer, const Heads& heads, const Span& span, int64_t page_size, int64_t head,
                   const Tile& tile, int64_t first, int64_t last, Block& block) {
  block.low = stretch_of(layer, block, tile.position + first).low;
  block.high = stretch_of(layer, block, tile.position + last - 1).high;
  for (int64_t lane = block.low; lane < block.high;) {
    const int64_t position = block.start + lane, within = position % page_size;
    const int64_t n = least(page_size - within, block.high - lane);
    const int64_t slot = slot_of(*block.part, span, page_size, position);
    for (int64_t i = 0; i < n; i++) block.places[lane + i] = (slot + i) * heads.kv_heads + head;
    lane += n;
  }
}

// ---- Scores ----

// Products of some queries with some vectors of keys: scores[query * 64 + position].
template <int QUERIES, int VECTORS>
TW_INLINE void score(int64_t size, int64_t depth, const float* q, const float* keys, float* scores) {
  F total[QUERIES][VECTORS] = {};
  for (int64_t d = 0; d < size; d++) {
    F key[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) key[v] = load(keys + d * BLOCK + 16 * v);
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; i++) {
      const F x = all(q[i * depth + d]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) total[i][v] = fma(x, key[v], total[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(scores + i * BLOCK + 16 * v, total[i][v]);
}

constexpr int SIDE_BY_SIDE = WIDTH == 16 ? 4 : 2;      // queries whose sums fit the registers
constexpr int VECTORS = WIDTH == 16 ? 4 : WIDTH == 8 ? 2 : 1;  // of 16, beside them

template <int QUERIES>
static void score_vectors(const Tile& tile, const Block& block, const float* q, float* scores) {
  int64_t lane = block.low & -16;
  for (; lane + 16 * VECTORS <= whole(block.high, 16); lane += 16 * VECTORS)
    score<QUERIES, VECTORS>(tile.size, tile.depth, q, tile.numbers + lane, scores + lane);
  for (; lane < block.high; lane += 16) score<QUERIES, 1>(tile.size, tile.depth, q, tile.numbers + lane, scores + lane);
}

// Scores of the queries [first, last) with the block's keys.
static void score_queries(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const float* q = block.sinks ? tile.sink_q : tile.q;
  int64_t i = first;
  for (; i + SIDE_BY_SIDE <= last; i += SIDE_BY_SIDE)
    score_vectors<SIDE_BY_SIDE>(tile, block, q + i * tile.depth, tile.weights + i * BLOCK);
  for (; i < last; i++) score_vectors<1>(tile, block, q + i * tile.depth, tile.weights + i * BLOCK);
}

// ---- Softmax ----

TW_INLINE F exponential_or_nan(F x) {  // x at most 0; NaN stays NaN
  F r = exponential(x);
  TW_PARTS r.p[i] = x.p[i] == x.p[i] ? r.p[i] : x.p[i];
  return r;
}

// The lanes of [low, high), and others elsewhere; this vector's first lane is `lane`.
TW_INLINE F only(F x, int64_t lane, Stretch read, float other) {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I number;
  memcpy(&number, numbers, 64);
  const I low = all((int32_t)(read.low - lane)), high = all((int32_t)(read.high - lane));
  const F instead = all(other);
  TW_PARTS x.p[i] = (number.p[i] >= low.p[i]) & (number.p[i] < high.p[i]) ? x.p[i] : instead.p[i];
  return x;
}

TW_INLINE void multiply(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += 16) store(x + i, load(x + i) * all(factor));
}

// A query's scores become weights; what it has so far is brought to its new maximum.
TW_INLINE void soften(const Tile& tile, int64_t query, Stretch read) {
  float* weights = tile.weights + query * BLOCK;
  float* sums = tile.sums + query * 16;
  F x[4];
  for (int v = 0; v < 4; v++) x[v] = only(load(weights + 16 * v), 16 * v, read, -__builtin_inff());
  const float before = tile.highest[query];
  const float block_highest = largest(larger(larger(x[0], x[1]), larger(x[2], x[3])));
  const float highest = block_highest > before ? block_highest : before;
  if (highest != before) {
    float factor[16];
    store(factor, exponential_or_nan(all(before - highest)));
    multiply(sums, 16, factor[0]);
    multiply(tile.mixed + query * tile.depth, tile.depth, factor[0]);
    tile.highest[query] = highest;
  }
  for (int v = 0; v < 4; v++) {
    x[v] = exponential_or_nan(x[v] - all(highest));
    store(weights + 16 * v, x[v]);
  }
  store(sums, load(sums) + ((x[0] + x[1]) + (x[2] + x[3])));
}

// ---- Values ----

// Add the values of [low, high), each times its weight, to some queries' sums.
template <int QUERIES, int VECTORS>
TW_INLINE void mix(int64_t depth, const float* weights, const float* values, Stretch read, float* mixed) {
  F total[QUERIES][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) total[i][v] = load(mixed + i * depth + 16 * v);
  for (int64_t j = read.low; j < read.high; j++) {
    F value[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) value[v] = load(values + j * depth + 16 * v);
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; i++) {
      const F weight = all(weights[i * BLOCK + j]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) total[i][v] = fma(weight, value[v], total[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(mixed + i * depth + 16 * v, total[i][v]);
}

template <int QUERIES>
static void mix_vectors(const Tile& tile, int64_t query, Stretch read) {
  if (read.low >= read.high) return;
  const float* weights = tile.weights + query * BLOCK;
  float* mixed = tile.mixed + query * tile.depth;
  int64_t d = 0;
  for (; d + 16 * VECTORS <= tile.depth; d += 16 * VECTORS)
    mix<QUERIES, VECTORS>(tile.depth, weights, tile.numbers + d, read, mixed + d);
  for (; d < tile.depth; d += 16) mix<QUERIES, 1>(tile.depth, weights, tile.numbers + d, read, mixed + d);
}

// Queries [first, first + n) side by side over what all of them read, each alone before it and behind it.
template <int QUERIES>
static void mix_together(const Tile& tile, const KVLayer& layer, const Block& block, int64_t first) {
  Stretch read[QUERIES], common = {0, BLOCK};
  for (int i = 0; i < QUERIES; i++) {
    read[i] = stretch_of(layer, block, tile.position + (first + i) / tile.heads);
    common = {most(common.low, read[i].low), least(common.high, read[i].high)};
  }
  if (common.low >= common.high) common = {BLOCK, BLOCK};
  for (int i = 0; i < QUERIES; i++) mix_vectors<1>(tile, first + i, {read[i].low, least(read[i].high, common.low)});
  mix_vectors<QUERIES>(tile, first, common);
  for (int i = 0; i < QUERIES; i++) mix_vectors<1>(tile, first + i, {common.high, read[i].high});
}

static void mix_queries(const Tile& tile, const KVLayer& layer, const Block& block, int64_t first, int64_t last) {
  int64_t i = first;
  for (; i + SIDE_BY_SIDE <= last; i += SIDE_BY_SIDE) mix_together<SIDE_BY_SIDE>(tile, layer, block, i);
  for (; i < last; i++) mix_together<1>(tile, layer, block, i);
}

// ---- All of it ----

// A tile's queries over all blocks that any of them reads.
static void read_text(const KVLayer& layer, const Heads& heads, const Span& span, int64_t page_size, int64_t kv_head,
                      const Tile& tile) {
  const int64_t near = layer.window ? most(0, tile.position - layer.window + 1) : 0;
  for (int64_t start = 0, end = tile.position + tile.rows; start < end;) {
    if (start >= layer.sinks) start = most(start, near & -BLOCK);
    Block block = block_at(layer, start);
    start = block.stop;
    // The rows that read something of it: they stand side by side.
    const int64_t first = most(0, block.start - tile.position);
    int64_t last = tile.rows;
    if (layer.window && !block.sinks) last = least(last, block.stop + layer.window - 1 - tile.position);
    if (first >= last) continue;
    locate(layer, heads, span, page_size, kv_head, tile, first, last, block);
    const int64_t from = first * tile.heads, to = last * tile.heads;
    decode_keys(block, tile.size, tile.numbers);
    score_queries(tile, block, from, to);
    for (int64_t i = from; i < to; i++) soften(tile, i, stretch_of(layer, block, tile.position + i / tile.heads));
    decode_values(block, tile.size, tile.depth, tile.numbers);
    mix_queries(tile, layer, block, from, to);
  }
}

static void write_out(const Tile& tile, float* out, int64_t stride) {
  for (int64_t row = 0, query = 0; row < tile.rows; row++)
    for (int64_t head = 0; head < tile.heads; head++, query++) {
      const F total = all(sum(load(tile.sums + query * 16)));
      for (int64_t i = 0; i < tile.size; i += 16)
        store(out + row * stride + head * tile.size + i, load(tile.mixed + query * tile.depth + i) / total,
              least(16, tile.size - i));
    }
}

static void attend(const KVLayer& layer, const Heads& heads, const Span& span, int64_t page_size,
                   const Queries& queries, float* scratch) {
  const int64_t kv_head = queries.head / (heads.heads / heads.kv_heads);
  for (int64_t first = queries.first; first < queries.last;) {
    Tile tile = tile_of(heads, span, queries, first, scratch);
    const int64_t row = span.row + first, column = queries.head * heads.size;
    load_queries(heads, tile, queries.q + row * queries.stride + column, queries.stride, tile.q);
    if (queries.sink_q)
      load_queries(heads, tile, queries.sink_q + row * queries.sink_stride + column, queries.sink_stride, tile.sink_q);
    else
      tile.sink_q = tile.q;
    memset(tile.mixed, 0, 4 * tile.queries() * tile.depth);
    memset(tile.sums, 0, 4 * tile.queries() * 16);
    for (int64_t i = 0; i < tile.queries(); i++) tile.highest[i] = -__builtin_inff();
    read_text(layer, heads, span, page_size, kv_head, tile);
    write_out(tile, queries.out + row * queries.out_stride + column, queries.out_stride);
    first += tile.rows;
  }
}

}  // namespace TW_ISA
}  // namespace tw
