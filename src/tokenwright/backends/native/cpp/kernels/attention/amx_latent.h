// Attention over a latent in bfloat16 on the matrix unit.
//
// A query's number is a sum of two bfloat16, high and low, and so is a weight: sixteen bits of each. Every product with
// a key or a value is made with both, so sums differ from those of fp32 by its last bits. The matrix unit adds in an
// order that depends on nothing but the sizes of a row, so a query's bits depend on that query alone here too.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/amx_tiles.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/scores.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

TW_INLINE I load_u16(const uint16_t* x) {
  I r;
  r.p[0] = (IPart)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
  return r;
}

// Two bfloat16 that sum up to x: high is x cut off, in the upper half of a lane; low the rest, rounded, in the lower.
TW_INLINE void halves(F x, I& high, I& low) {
  high = float_to_bits(x) & all(-65536);
  uint16_t rest[16];
  store_bf16(rest, x - bits_to_float(high));
  low = load_u16(rest);
}

// Whether the matrix unit computes a layer for tiles of this shape: a latent in bfloat16 whose rows are whole tiles.
static bool fits_tiles(const KVLayer& layer, const Tile& tile) {
  bool all_wide = true;
  for (int64_t i = 0; i < layer.parts; i++) all_wide = all_wide && layer.part[i].k.format == BF16;
  return all_wide && tile.values < tile.size && tile.size % 32 == 0 && tile.values % 32 == 0;
}

// The queries' numbers as pairs of bfloat16, as tiles need them: pairs[number / 2][query].
static void split_queries(const Tile& tile, const QueryRows& rows) {
  for (int64_t d = 0; d < tile.size; d += 2)
    for (int64_t query = 0; query < tile.beside; query += 16) {
      const float* at = rows.numbers + d * tile.beside + query;
      I high[2], low[2];
      halves(load(at), high[0], low[0]);
      halves(load(at + tile.beside), high[1], low[1]);
      const I highs = ((high[0] >> 16) & all(0xffff)) | high[1], lows = low[0] | low[1] << 16;
      store_bits(rows.pairs + d / 2 * tile.beside + query, highs);
      store_bits(rows.low + d / 2 * tile.beside + query, lows);
    }
}

static void begin_tiles(const Tile& tile, bool sinks) {
  TileConfig to;
  for (int i = 0; i < 8; i++) to.set(i, 16, 64);
  configure(to);
  split_queries(tile, tile.q);
  if (sinks) split_queries(tile, tile.sink_q);
}

// Scores of up to sixteen queries with up to 64 keys: tiles 0 to 3 are 16 keys each, by query.
template <int GROUPS>
static void score_groups(const Tile& tile, const QueryRows& rows, const Run (&keys)[4], int64_t query) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  const int64_t stride = 4 * tile.beside;
  for (int64_t d = 0; d < tile.size; d += 32) {
    tile_load<6>(rows.pairs + d / 2 * tile.beside + query, stride);
    tile_load<7>(rows.low + d / 2 * tile.beside + query, stride);
    tile_load<4>(keys[0].at + 2 * d, keys[0].step);
    tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<0, 4, 7>();
    if (GROUPS > 1) {
      tile_load<5>(keys[1].at + 2 * d, keys[1].step);
      tile_dot_bf16<1, 5, 6>(), tile_dot_bf16<1, 5, 7>();
    }
    if (GROUPS > 2) {
      tile_load<4>(keys[2].at + 2 * d, keys[2].step);
      tile_dot_bf16<2, 4, 6>(), tile_dot_bf16<2, 4, 7>();
    }
    if (GROUPS > 3) {
      tile_load<5>(keys[3].at + 2 * d, keys[3].step);
      tile_dot_bf16<3, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    }
  }
}

static void score_in_tiles(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  const QueryRows& rows = meeting(tile, block);
  const int64_t bytes = row_bytes(BF16, tile.size), groups = (block.last() - block.first()) / 16;
  Run keys[4];
  for (int64_t g = 0; g < groups; g++)
    keys[g] = even_keys(block, bytes, block.first() + 16 * g, tile.numbers + g * 16 * tile.depth);
  alignas(64) float scores[4][16][16], turned[16][16];
  for (int64_t query = first & -16; query < last; query += 16) {
    if (groups == 1) score_groups<1>(tile, rows, keys, query);
    if (groups == 2) score_groups<2>(tile, rows, keys, query);
    if (groups == 3) score_groups<3>(tile, rows, keys, query);
    if (groups == 4) score_groups<4>(tile, rows, keys, query);
    tile_store<0>(scores[0], 64), tile_store<1>(scores[1], 64);
    tile_store<2>(scores[2], 64), tile_store<3>(scores[3], 64);
    for (int64_t g = 0; g < groups; g++) {
      turn_rows(scores[g], 64, 16, turned);
      for (int64_t i = most(first, query); i < least(query + 16, last); i++)
        memcpy(tile.weights + i * BLOCK + block.first() + 16 * g, turned[i - query], 64);
    }
  }
}

// The positions of a block that some queries read, two by two: their rows, and whether they are read.
struct Pairs {
  const uint8_t* rows[BLOCK];
  __mmask32 read[BLOCK];
};

static void begin_pairs(const Block& block, Stretch read, int64_t bytes, Pairs& pairs) {
  for (int64_t lane = 0; lane < BLOCK; lane++) {
    const bool reads = lane >= read.low && lane < read.high;
    pairs.rows[lane] = (const uint8_t*)block.v.codes + block.places[reads ? lane : read.low] * bytes;
    pairs.read[lane] = reads ? 0xffffffff : 0;
  }
}

// 32 columns of all pairs: of each column the two values side by side, zeros for those that are not read.
static void pair_columns(const Pairs& pairs, int64_t column, uint8_t (&lines)[2][BLOCK / 2][64]) {
  alignas(64) static const uint16_t places[2][32] = {{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
                                                     {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                                      24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i first = _mm512_load_si512(places[0]), second = _mm512_load_si512(places[1]);
  for (int64_t lane = 0; lane < BLOCK; lane += 2) {
    const __m512i a = _mm512_maskz_loadu_epi16(pairs.read[lane], pairs.rows[lane] + 2 * column);
    const __m512i b = _mm512_maskz_loadu_epi16(pairs.read[lane + 1], pairs.rows[lane + 1] + 2 * column);
    _mm512_store_si512(lines[0][lane / 2], _mm512_permutex2var_epi16(a, first, b));
    _mm512_store_si512(lines[1][lane / 2], _mm512_permutex2var_epi16(a, second, b));
  }
}

// The weights of sixteen queries: tiles 4 and 5 the high and low parts of 32 positions, 6 and 7 those of the others.
static void load_weights(const uint16_t* high, const uint16_t* low) {
  tile_load<4>(high, 2 * BLOCK), tile_load<5>(low, 2 * BLOCK);
  tile_load<6>(high + 32, 2 * BLOCK), tile_load<7>(low + 32, 2 * BLOCK);
}

// Adds 16 columns of the values, tiles 2 and 3, to the sums of sixteen queries, of which [first, last) are changed.
static void add_columns(const Tile& tile, int64_t column, int64_t query, int64_t first, int64_t last) {
  float* mixed = tile.mixed + query * tile.depth + column;
  tile_load<0>(mixed, 4 * tile.depth);
  tile_dot_bf16<0, 4, 2>(), tile_dot_bf16<0, 5, 2>(), tile_dot_bf16<0, 6, 3>(), tile_dot_bf16<0, 7, 3>();
  if (query >= first && query + 16 <= last) return tile_store<0>(mixed, 4 * tile.depth);
  alignas(64) float some[16][16];
  tile_store<0>(some, 64);
  for (int64_t i = most(first, query); i < least(query + 16, last); i++)
    memcpy(tile.mixed + i * tile.depth + column, some[i - query], 64);
}

// Adds the values of some lanes times the weights of the queries [first, last), which all read these lanes.
static void mix_lanes(const Tile& tile, const Block& block, Stretch read, int64_t first, int64_t last) {
  const uint16_t *high = (const uint16_t*)tile.weight_codes, *low = high + tile.beside * BLOCK;
  const int64_t bytes = row_bytes(BF16, tile.size), from = first & -16;
  const bool one = last <= from + 16;  // sixteen queries, whose weights stay in their tiles
  Pairs pairs;
  begin_pairs(block, read, bytes, pairs);
  alignas(64) uint8_t lines[2][BLOCK / 2][64];
  if (one) load_weights(high + from * BLOCK, low + from * BLOCK);
  for (int64_t column = 0; column < tile.values; column += 32) {
    pair_columns(pairs, column, lines);
    block.ahead->k.after(BLOCK * bytes / (tile.values / 32));
    for (int64_t query = from; query < last; query += 16) {
      if (!one) load_weights(high + query * BLOCK, low + query * BLOCK);
      tile_load<2>(lines[0][0], 64), tile_load<3>(lines[0][16], 64);
      add_columns(tile, column, query, first, last);
      tile_load<2>(lines[1][0], 64), tile_load<3>(lines[1][16], 64);
      add_columns(tile, column + 16, query, first, last);
    }
  }
}

// Adds the values. Where rows read different lanes, each goes by itself, so that a lane that a row does not read cannot
// touch it, whatever lies there.
static void mix_in_tiles(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  uint16_t *high = (uint16_t*)tile.weight_codes, *low = high + tile.beside * BLOCK;  // [beside][64] each
  bool even = true;
  for (int64_t query = first; query < last; query++) {
    even = even && tile.read[query].low == tile.read[first].low && tile.read[query].high == tile.read[first].high;
    for (int64_t lane = 0; lane < BLOCK; lane += 16) {
      I a, b;
      halves(load(tile.weights + query * BLOCK + lane), a, b);
      store_16(high + query * BLOCK + lane, a >> 16);
      store_16(low + query * BLOCK + lane, b);
    }
  }
  if (even) return mix_lanes(tile, block, tile.read[first], first, last);
  for (; first < last; first += tile.heads) mix_lanes(tile, block, tile.read[first], first, first + tile.heads);
}

}  // namespace TW_ISA
}  // namespace tw
