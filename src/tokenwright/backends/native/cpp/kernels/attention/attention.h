// Attention of some rows and query heads over their KV heads, block by block through the sequence (online softmax).
//
// The result of one query (one head of one row) is defined independently of the others: it processes blocks of 64
// absolute positions in order (split where two parts meet and where sinks end). In each block it computes the scores
// (scores.h) and the new maximum, rescales the sums so far (softmax.h), and adds the weighted values in the order of
// positions (values.h). This code processes a block for many queries together (queries.h), to decode it once; that does
// not change the result of any query. docs/kernels.md has the full definition.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "kernels/attention/key_bias.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_decode.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/scores.h"
#include "kernels/attention/softmax.h"
#include "kernels/attention/values.h"
#include "kernels/functions.h"
#include "kernels/lanes.h"

#if defined(TW_TILES)
#include "kernels/attention/amx_latent.h"
#endif

namespace tw {
namespace TW_ISA {

// ---- The blocks of a sequence ----

// Sets up the block that begins at a position. It ends at a multiple of 64, at the end of the part or of the sinks.
static void begin_block(const KVLayer& layer, int64_t start, Block& block) {
  block.part = &part_of(layer, start);
  block.start = start;
  block.sinks = start < layer.sinks;
  block.stop = (start | (BLOCK - 1)) + 1;
  if (block.part->stop >= 0) block.stop = least(block.stop, block.part->stop);
  if (block.sinks) block.stop = least(block.stop, layer.sinks);
}

// The lanes of a block that a row of a tile reads; none if low >= high.
TW_INLINE Stretch stretch_of(const KVLayer& layer, const Block& block, const Tile& tile, int64_t row) {
  const bool all_of_it = block.sinks || !layer.window;
  const int64_t low = all_of_it ? block.start : most(block.start, tile.position + row - layer.window + 1);
  return {low - block.start, least(block.stop, tile.end(row)) - block.start};
}

// Fills in the places of the positions that rows of the tile read. They are contiguous, because the rows are.
static void locate(const Heads& heads, const ChunkRows& chunk, int64_t page_size, Block& block) {
  const int32_t* table = chunk.tables[block.part->table];
  int64_t page = (block.start + block.low) / page_size, within = (block.start + block.low) % page_size;
  for (int64_t lane = block.low; lane < block.high; page++, within = 0) {
    const int64_t n = least(page_size - within, block.high - lane), slot = table[page] * page_size + within;
    for (int64_t i = 0; i < n; i++) block.places[lane++] = (slot + i) * heads.kv_heads;
  }
  for (int64_t lane = block.first(); lane < block.low; lane++) block.places[lane] = block.places[block.low];
  for (int64_t lane = block.high; lane < block.last(); lane++) block.places[lane] = block.places[block.high - 1];
  block.apart = heads.kv_heads;
  for (int64_t lane = block.first(); lane < block.last(); lane += 16) {
    int64_t odd = 0;
    for (int64_t i = 1; i < 16; i++) odd |= block.places[lane + i] - block.places[lane] - i * block.apart;
    block.even[lane / 16] = !odd;
  }
}

// ---- The kernels of a block, by the format of its rows ----

// Computes the scores of the queries [first, last) with the block's keys.
static void score_queries(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const int64_t format = block.k.format;
#if defined(TW_TILES)
  if (tile.in_tiles) return score_in_tiles(tile, block, first, last);
#endif
  if (scaled(format)) load_scales(block, block.k, tile.size, block.ahead->k_scales, tile.scales);
  if (last - first <= FEW_QUERIES) switch (format) {
      case F32: return score_stored<F32>(tile, block, first, last);
      case BF16: return score_stored<BF16>(tile, block, first, last);
      case F16: return score_stored<F16>(tile, block, first, last);
      case INT8: return side_by_side<GROUP_QUERIES>(StoredCodeScores<INT8>{tile, block}, first, last);
      case INT4: return side_by_side<GROUP_QUERIES>(StoredCodeScores<INT4>{tile, block}, first, last);
    }
  decode_keys(block, tile.size, tile.numbers, tile.copies);
  if (!scaled(format)) return side_by_side<QUERIES>(Scores{tile, block}, first, last);
  side_by_side<CODE_QUERIES>(CodeScores{tile, block}, first, last);
}

// Adds the weighted values of the block for the queries [first, last).
static void mix_queries(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const int64_t format = block.v.format;
#if defined(TW_TILES)
  if (tile.in_tiles) return mix_in_tiles(tile, block, first, last);
#endif
  if (last - first <= FEW_QUERIES && tile.values % 16 == 0) {
    if (format == F32) return mix_stored<F32>(tile, block, first, last);
    if (format == BF16) return mix_stored<BF16>(tile, block, first, last);
    if (format == F16) return mix_stored<F16>(tile, block, first, last);
  }
  if (format == INT8) return mix_codes<INT8>(tile, block, first, last);
  if (format == INT4) return mix_codes<INT4>(tile, block, first, last);
  decode_values(block, tile.size, tile.values, tile.depth, tile.numbers);
  const DecodedValues kind{tile};
  side_by_side<QUERIES>(Mix<DecodedValues>{tile, kind, 0, whole(tile.values, 16)}, first, last);
}

// ---- Tiles over a sequence ----

// The rows of a tile that read some lanes of a block; they are contiguous: [low, high).
TW_INLINE Stretch rows_of(const KVLayer& layer, const Tile& tile, const Block& block) {
  const bool all_of_it = block.sinks || !layer.window;
  const int64_t last = all_of_it ? tile.rows : block.stop + layer.window - 1 - tile.position;
  int64_t first = most(0, block.start - tile.position);
  if (tile.ends)
    for (first = 0; first < tile.rows && tile.ends[first] <= block.start;) first++;
  return {first, least(tile.rows, last)};
}

// Iterates over the blocks of a sequence that some row of a tile reads, in order.
struct BlockIterator {
  const KVLayer& layer;
  const Heads& heads;
  const ChunkRows& chunk;
  int64_t page_size;
  int64_t start;  // position of the next block
  int64_t stop;   // of all blocks

  // Sets up the next block and its lanes; false after the last.
  bool next(const Tile& tile, Block& block) {
    const int64_t near = layer.window ? most(0, tile.position - layer.window + 1) : 0;
    while (start < least(stop, tile.end(tile.rows - 1))) {
      if (start >= layer.sinks) start = most(start, near & -BLOCK);
      if (start >= stop) return false;
      begin_block(layer, start, block);
      start = block.stop;
      const Stretch rows = rows_of(layer, tile, block);
      if (rows.low >= rows.high) continue;
      block.low = stretch_of(layer, block, tile, rows.low).low;
      block.high = stretch_of(layer, block, tile, rows.high - 1).high;
      locate(heads, chunk, page_size, block);
      return true;
    }
    return false;
  }
};

// Whether a block's keys and values are decoded before all queries, sixteen of which then go through scores, softmax
// and values at a time: as integer codes keys, values and these queries' numbers fit in the nearest cache.
TW_INLINE bool goes_by_sixteens(const Tile& tile, const Block& block, int64_t queries) {
  return !tile.in_tiles && queries > FEW_QUERIES && scaled(block.k.format) && scaled(block.v.format);
}

template <int64_t FORMAT>
static void read_by_sixteens(const KVLayer& layer, const Tile& tile, const Block& block, int64_t first, int64_t last) {
  load_scales(block, block.k, tile.size, block.ahead->k_scales, tile.scales);
  load_scales(block, block.v, tile.size, block.ahead->v_scales, tile.value_scales);
  decode_keys(block, tile.size, tile.numbers, tile.copies);
  decode_values(block, tile.size, tile.values, tile.depth, tile.value_codes);
  for (int64_t end; first < last; first = end) {
    end = least(whole(first + 1, 16), last);
    side_by_side<CODE_QUERIES>(CodeScores{tile, block}, first, end);
    add_biases(layer, tile, block, first, end);
    soften(tile, block, first, end);
    if (FORMAT == INT4) turn_sums(tile, first, end);
    side_by_side<GROUP_QUERIES>(CodeMix<FORMAT, false>{tile, block}, first, end);
  }
}

// Processes one block for a tile's queries, one KV head at a time.
static void read_block(const KVLayer& layer, const Tile& tile, Block& block) {
  const Stretch rows = rows_of(layer, tile, block);
  int64_t first = rows.low * tile.heads, last = rows.high * tile.heads;
  for (int64_t row = rows.low, query = first; row < rows.high; row++)
    for (int64_t head = 0; head < tile.heads; head++) tile.read[query++] = stretch_of(layer, block, tile, row);
  for (int64_t head = 0; head < tile.kv_heads; head++) {
    if (tile.kv_heads > 1) first = head * tile.shared, last = first + tile.shared;  // the tile has one row
    block.k = of_head(block.part->k, tile.size, tile.kv_head + head);
    block.v = of_head(block.part->v, tile.size, tile.kv_head + head);
    if (goes_by_sixteens(tile, block, last - first)) {
      if (block.v.format == INT8) read_by_sixteens<INT8>(layer, tile, block, first, last);
      if (block.v.format == INT4) read_by_sixteens<INT4>(layer, tile, block, first, last);
      continue;
    }
    score_queries(tile, block, first, last);
    add_biases(layer, tile, block, first, last);
    if (scaled(block.v.format)) load_scales(block, block.v, tile.size, block.ahead->v_scales, tile.value_scales);
    soften(tile, block, first, last);
    mix_queries(tile, block, first, last);
  }
}

static void read_blocks(const KVLayer& layer, const Tile& tile, BlockIterator iterator) {
  Block blocks[2] = {};
  bool more = iterator.next(tile, blocks[0]);
  for (int i = 0; more; i = 1 - i) {
    Block &block = blocks[i], &next = blocks[1 - i];
    Ahead ahead;
    more = iterator.next(tile, next);
    if (more) begin_fetch(next, tile.size, tile.kv_head, tile.kv_heads, tile.values < tile.size, ahead);
    block.ahead = &ahead;
    read_block(layer, tile, block);
  }
}

static void write_out(const Tile& tile, float* out, int64_t stride) {
  for (int64_t row = 0, query = 0; row < tile.rows; row++)
    for (int64_t head = 0; head < tile.heads; head++, query++) {
      const F total = all(sum(load(tile.sums + query * 16)));
      for (int64_t i = 0; i < tile.values; i += 16)
        store(out + row * stride + head * tile.values + i, load(tile.mixed + query * tile.depth + i) / total,
              least(16, tile.values - i));
    }
}

// The tile of the rows from `first` on, with its queries.
static Tile begin_tile(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, const Queries& queries,
                       int64_t first, float* scratch) {
  Tile tile = tile_of(heads, chunk, queries, first, scratch);
  const int64_t row = chunk.row + first, column = queries.head * heads.size;
  tile.in_tiles = false;
#if defined(TW_TILES)
  tile.in_tiles = fits_tiles(layer, tile);
#endif
  load_queries(layer, heads, tile, queries.q + row * queries.stride + column, queries.stride, tile.q);
  if (layer.block_rotation) begin_biases(heads, tile, queries.q + row * queries.stride + column, queries.stride);
  if (queries.sink_q)
    load_queries(layer, heads, tile, queries.sink_q + row * queries.sink_stride + column, queries.sink_stride,
                 tile.sink_q);
  else
    tile.sink_q = tile.q;
#if defined(TW_TILES)
  if (tile.in_tiles) begin_tiles(tile, queries.sink_q);
#endif
  return tile;
}

TW_INLINE void end_tile(const Tile& tile) {
#if defined(TW_TILES)
  if (tile.in_tiles) release();
#else
  (void)tile;
#endif
}

static void begin_sums(const Heads& heads, const Queries& queries, const Tile& tile) {
  memset(tile.mixed, 0, 4 * tile.queries() * tile.depth);
  memset(tile.sums, 0, 4 * tile.queries() * 16);
  memset(tile.turned, 0, 4 * tile.queries());
  for (int64_t i = 0; i < tile.queries(); i++) {
    tile.highest[i] = heads.sink_logits ? heads.sink_logits[queries.head + i % tile.heads] : -__builtin_inff();
    if (heads.sink_logits) tile.sums[16 * i] = 1.0f;  // exp(logit - highest)
  }
}

// ---- Latents ----

static void save_sums(const Tile& tile, int64_t query, float* to) {
  store(to, load(tile.sums + query * 16));
  store(to + 16, all(tile.highest[query]));
  memcpy(to + SUMS, tile.mixed + query * tile.depth, 4 * tile.values);
}

// Adds the sums of a later stretch. One in which the query read nothing has sums of zero.
static void merge_sums(int64_t values, const float* from, float* to) {
  if (sum(load(from)) == 0.0f) return;
  if (sum(load(to)) == 0.0f) {
    memcpy(to, from, 4 * (SUMS + values));
    return;
  }
  const float highest = from[16] > to[16] ? from[16] : to[16];
  const F before = exponential(all(to[16] - highest)), more = exponential(all(from[16] - highest));
  store(to, fma(load(to), before, load(from) * more));
  store(to + 16, all(highest));
  for (int64_t i = SUMS; i < SUMS + values; i += 16) store(to + i, fma(load(to + i), before, load(from + i) * more));
}

static void finish_sums(int64_t values, const float* from, float* out) {
  const F total = all(sum(load(from)));
  for (int64_t i = 0; i < values; i += 16) store(out + i, load(from + SUMS + i) / total, least(16, values - i));
}

// Reads one stretch for a tile; false if it has no position that a row reads.
static bool read_stretch(const Heads& heads, const Queries& queries, const Tile& tile, const BlockIterator& iterator) {
  BlockIterator ahead = iterator;
  Block block;
  if (!ahead.next(tile, block)) return false;
  begin_sums(heads, queries, tile);
  read_blocks(iterator.layer, tile, iterator);
  turn_back(tile);
  return true;
}

static void attend_latent(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, int64_t page_size,
                          const Queries& queries, int64_t first, const Tile& tile) {
  const int64_t each = stretch_sums(heads);
  float* some = tile.numbers;  // one query's
  for (int64_t query = 0; query < tile.queries(); query++) memset(tile.totals + query * each, 0, 4 * SUMS);
  for (int64_t start = 0; start < tile.position + tile.rows; start += STRETCH) {
    if (!read_stretch(heads, queries, tile, {layer, heads, chunk, page_size, start, start + STRETCH})) continue;
    for (int64_t query = 0; query < tile.queries(); query++) {
      save_sums(tile, query, some);
      merge_sums(tile.values, some, tile.totals + query * each);
    }
  }
  for (int64_t query = 0; query < tile.queries(); query++) {
    const int64_t row = chunk.row + first + query / tile.heads, head = queries.head + query % tile.heads;
    finish_sums(tile.values, tile.totals + query * each, queries.out + row * queries.out_stride + head * tile.values);
  }
}

static void attend_stretch(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, int64_t page_size,
                           const Queries& queries, int64_t start, float* sums, float* scratch) {
  const Tile tile = begin_tile(layer, heads, chunk, queries, queries.first, scratch);
  const bool any = read_stretch(heads, queries, tile, {layer, heads, chunk, page_size, start, start + STRETCH});
  for (int64_t query = 0; query < tile.queries(); query++) {
    float* to = sums + query * stretch_sums(heads);
    if (any)
      save_sums(tile, query, to);
    else
      memset(to, 0, 4 * SUMS);
  }
  end_tile(tile);
}

static void merge_stretches(const Heads& heads, int64_t count, int64_t apart, float* sums, float* out) {
  for (int64_t i = 1; i < count; i++) merge_sums(heads.values, sums + i * apart, sums);
  finish_sums(heads.values, sums, out);
}

static void attend(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, int64_t page_size,
                   const Queries& queries, float* scratch) {
  for (int64_t first = queries.first; first < queries.last;) {
    const Tile tile = begin_tile(layer, heads, chunk, queries, first, scratch);
    if (tile.values < tile.size) {
      attend_latent(layer, heads, chunk, page_size, queries, first, tile);
    } else {
      begin_sums(heads, queries, tile);
      read_blocks(layer, tile, {layer, heads, chunk, page_size, 0, chunk.start + chunk.rows});
      turn_back(tile);
      const int64_t row = chunk.row + first, column = queries.head * heads.values;
      write_out(tile, queries.out + row * queries.out_stride + column, queries.out_stride);
    }
    end_tile(tile);
    first += tile.rows;
  }
}

// ---- A prefix of several sequences ----

// One row of a tile alone, with its queries and its sums so far, which are those of the tile.
static Tile row_of(const Tile& tile, int64_t row, int64_t position) {
  Tile one = tile;
  const int64_t first = row * tile.heads;
  one.rows = 1;
  one.position = position;
  const auto begin_at = [&](QueryRows& rows) {
    rows.numbers += first;
    rows.pairs += first;
    rows.scales += first * tile.groups;
  };
  begin_at(one.q);
  begin_at(one.sink_q);
  one.mixed += first * tile.depth;
  one.bias += first * tile.depth;
  one.sums += first * 16;
  one.highest += first;
  one.turned += first;
  return one;
}

// The rows go through the shared blocks together, and then each goes on alone: the order of blocks is that of `attend`.
static void attend_shared(const KVLayer& layer, const Heads& heads, int64_t chunks, const ChunkRows* chunk,
                          int64_t shared, int64_t page_size, const Queries& queries, float* scratch) {
  const ChunkRows together = {chunk->row, chunks, shared, chunk->rotation, chunk->tables, nullptr};
  const Tile tile = begin_tile(layer, heads, together, queries, 0, scratch);
  begin_sums(heads, queries, tile);
  read_blocks(layer, tile, {layer, heads, together, page_size, 0, shared});
  const int64_t column = queries.head * heads.values;
  for (int64_t row = 0; row < chunks; row++) {
    const Tile one = row_of(tile, row, chunk[row].start);
    read_blocks(layer, one, {layer, heads, chunk[row], page_size, shared, one.position + 1});
    turn_back(one);
    write_out(one, queries.out + chunk[row].row * queries.out_stride + column, queries.out_stride);
  }
  end_tile(tile);
}

// ---- One row ----

[[maybe_unused]] static void weigh(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, int64_t page_size,
                                   const Queries& queries, float* weights, float* scratch) {
  const Tile tile = begin_tile(layer, heads, chunk, queries, queries.first, scratch);
  const int64_t count = tile.position + 1;
  for (int64_t i = 0; i < count; i++) weights[i] = -__builtin_inff();
  BlockIterator iterator{layer, heads, chunk, page_size, 0, count};
  Block block;
  while (iterator.next(tile, block)) {
    Ahead ahead;
    block.ahead = &ahead;
    block.k = of_head(block.part->k, tile.size, tile.kv_head);
    score_queries(tile, block, 0, 1);
    add_biases(layer, tile, block, 0, 1);
    if (tile.cap > 0)
      for (int64_t i = 0; i < BLOCK; i += 16) store(tile.weights + i, soft_capped(load(tile.weights + i), tile.cap));
    memcpy(weights + block.start + block.low, tile.weights + block.low, 4 * (block.high - block.low));
  }
  end_tile(tile);
  float highest = heads.sink_logits ? heads.sink_logits[queries.head] : -__builtin_inff();
  for (int64_t i = 0; i < count; i++) highest = weights[i] > highest ? weights[i] : highest;
  double total = 0;
  if (heads.sink_logits)
    total = sum(only(exponential(all(heads.sink_logits[queries.head] - highest)), 0, {0, 1}, 0.0f));
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = least(16, count - i);
    const F x = exponential(only(load(weights + i, n) - all(highest), 0, {0, n}, -__builtin_inff()));
    store(weights + i, x, n);
    total += sum(x);
  }
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = least(16, count - i);
    store(weights + i, load(weights + i, n) / all((float)total), n);
  }
}

}  // namespace TW_ISA
}  // namespace tw
