// The queries of attention that are processed together, and the scratch memory that they use: a tile.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_decode.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

constexpr float MOST_CODE = 32767.0f;   // largest 16-bit code of queries and weights, to multiply a quantised cache
constexpr float LEAST_SCALED = 1e-30f;  // smaller extremes are encoded as zeros
constexpr int64_t BIASED = 8;           // most queries whose biases are added together

// The numbers of queries, transposed to match the keys' lines: in fp32, and as codes for the keys of a quantised part.
struct QueryRows {
  float* numbers;  // [depth][beside], multiplied by the attention scale
  int32_t* pairs;  // [depth / 2][beside]: two codes of 16 bits each, in the order of the keys' lines
  float* scales;   // [queries][groups]
  int32_t* low;    // [depth / 2][beside]: for a latent on the matrix unit, as `pairs`
};

// Queries that are processed together (all of the given heads of some rows), and their state.
struct Tile {
  int64_t heads;                      // query heads per row
  int64_t kv_head, kv_heads, shared;  // their first KV head; how many KV heads; query heads per KV head
  int64_t position;                   // position of the first row
  const int64_t* ends;                // of the positions that each row reads; null: each reads up to its own
  int64_t rows;
  int64_t size, depth, groups;   // of a key: its size, that rounded up to whole groups of 32, the groups
  int64_t values, value_groups;  // of a value: its size, which is that of a key or smaller, and its groups
  int64_t beside;                // the number of queries, rounded up to whole vectors
  bool in_tiles;                 // whether the matrix unit takes the products with keys and values
  float cap;                     // soft cap of the scores; 0: none
  QueryRows q, sink_q;
  float* weights;         // [queries][64]: scores, then their exponentials
  int16_t* weight_codes;  // [value groups][queries][64]: weights times the values' scales, as integer codes
  float* weight_scales;   // [queries][groups], of which the value groups are used
  float* mixed;           // [queries][depth]: sums of weights times values
  float* sums;            // [queries][16]: sums of weights, by lane modulo 16
  float* highest;         // [queries]: the largest score so far
  float* shares;          // [queries]: the factor from the block's weights to the query's maximum
  float* turned;          // [queries]: 1 once `mixed` is that of values times the Hadamard matrix, else 0
  Stretch* read;          // [queries]: the lanes that each query reads
  float* numbers;         // [64 * depth]: the queries as loaded; then a block's decoded keys, then its values
  float* value_codes;     // [32 * depth]: the second half of `numbers`, for pairs of value codes beside those of keys
  float* copies;          // [32 * depth]: copies of keys that are not evenly spaced
  float* scales;          // [groups][64]: the scales of the block's keys, in a quantised part,
  float* value_scales;    // [groups][64]: of its values,
  float* factors;         // [groups][64]: the factors from weights to their codes,
  float* worth;           // [groups]: and the value of one unit of such a code
  float* totals;          // [queries][stretch sums]: of a latent, the sums of the stretches so far
  float* bias;  // [queries][depth]: a query times a key's bias, by the cosines and then the sines of a position
  float* bias_of_block;  // [BIASED][depth]: the same for some queries, by those of a place in a block
  int64_t queries() const { return rows * heads; }
  int64_t end(int64_t row) const { return ends ? ends[row] : position + row + 1; }
};

// A query's sums over a stretch of a latent's positions: sixteen sums of weights, the largest score, padding up to
// SUMS, and the sums of weights times values.
constexpr int64_t SUMS = 32;
static int64_t stretch_sums(const Heads& heads) { return SUMS + heads.values; }

TW_INLINE int64_t rows_together(int64_t heads) { return most(1, QUERIES_TOGETHER / heads); }

static int64_t attention_scratch(const Heads& heads) {
  const int64_t queries = whole(most(QUERIES_TOGETHER, heads.heads / heads.kv_heads), 16);
  const int64_t groups = row_scales(heads.size), depth = groups * SCALED;
  const int64_t totals = heads.values < heads.size ? stretch_sums(heads) : 0;
  const int64_t bias = heads.key_bias ? depth : 0;  // and BIASED of them
  const int64_t each =
      totals + bias + 2 * (2 * depth + groups) + BLOCK + groups * BLOCK / 2 + groups + depth + 16 + 3 + 4;
  return queries * each + (BLOCK + 32) * depth + BIASED * bias + groups * (3 * BLOCK + 1) + 16;
}

TW_INLINE float* take(float*& scratch, int64_t n) { return (scratch += n) - n; }

static QueryRows query_rows(int64_t queries, const Tile& tile, float*& scratch) {
  return {take(scratch, tile.beside * tile.depth), (int32_t*)take(scratch, tile.beside * tile.depth / 2),
          take(scratch, queries * tile.groups), (int32_t*)take(scratch, tile.beside * tile.depth / 2)};
}

static Tile tile_of(const Heads& heads, const ChunkRows& chunk, const Queries& queries, int64_t first, float* scratch) {
  Tile tile;
  const int64_t ratio = heads.heads / heads.kv_heads;
  tile.heads = queries.head_last - queries.head;
  tile.kv_head = queries.head / ratio;
  tile.kv_heads = (queries.head_last - 1) / ratio - tile.kv_head + 1;
  tile.shared = tile.heads / tile.kv_heads;
  tile.rows = least(rows_together(tile.heads), queries.last - first);
  tile.position = chunk.start + first;
  tile.ends = chunk.ends ? chunk.ends + first : nullptr;
  tile.size = heads.size;
  tile.groups = row_scales(heads.size);
  tile.values = heads.values;
  tile.value_groups = row_scales(heads.values);
  tile.depth = tile.groups * SCALED;
  const int64_t n = tile.queries();
  tile.beside = whole(n, 16);
  tile.cap = (float)heads.cap;
  scratch = (float*)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);  // align to cache lines
  tile.numbers = take(scratch, BLOCK * tile.depth);
  tile.copies = take(scratch, 32 * tile.depth);
  tile.value_codes = tile.numbers + BLOCK / 2 * tile.depth;
  tile.scales = take(scratch, BLOCK * tile.groups);
  tile.value_scales = take(scratch, BLOCK * tile.groups);
  tile.factors = take(scratch, BLOCK * tile.groups);
  tile.read = (Stretch*)take(scratch, whole(n * 4, 16));  // keeps the next arrays aligned
  tile.weights = take(scratch, n * BLOCK);
  tile.weight_codes = (int16_t*)take(scratch, tile.beside * tile.groups * BLOCK / 2);
  tile.mixed = take(scratch, tile.beside * tile.depth);  // whole tiles of queries, for the matrix unit
  tile.sums = take(scratch, n * 16);
  tile.q = query_rows(n, tile, scratch);
  tile.sink_q = query_rows(n, tile, scratch);
  tile.weight_scales = take(scratch, n * tile.groups);
  tile.highest = take(scratch, n);
  tile.shares = take(scratch, n);
  tile.turned = take(scratch, n);
  tile.worth = take(scratch, tile.groups);
  tile.totals = take(scratch, tile.values < tile.size ? n * stretch_sums(heads) : 0);
  tile.bias = take(scratch, heads.key_bias ? n * tile.depth : 0);
  tile.bias_of_block = take(scratch, heads.key_bias ? BIASED * tile.depth : 0);
  return tile;
}

// Runs a kernel for the queries [first, last), at most N at a time.
template <int N, typename Kernel>
static void side_by_side(const Kernel& kernel, int64_t first, int64_t last) {
  for (; first + N <= last; first += N) kernel.template run<N>(first);
  if constexpr (N > 1) side_by_side<N - 1>(kernel, first, last);
}

// ---- Queries ----

// Encodes two vectors that share a scale to 16-bit codes [32]. Returns the scale, NaN if some lane is not finite.
TW_INLINE float encode_group(F a, F b, int16_t* codes) {
  const float one = largest_magnitude(a), other = largest_magnitude(b);
  const bool whole_numbers = finite(one) && finite(other);
  const float extreme = one > other ? one : other;
  const F inverse = all(whole_numbers && extreme > LEAST_SCALED ? MOST_CODE / extreme : 0.0f);
  store_16((uint16_t*)codes, nearest(a * inverse));
  store_16((uint16_t*)codes + 16, nearest(b * inverse));
  return whole_numbers ? extreme / MOST_CODE : __builtin_nanf("");
}

// Encodes a query's numbers `q` to codes [depth], in the order of the keys' lines, and scales [groups].
static void encode_query(const Tile& tile, int64_t format, const float* q, int16_t* codes, float* scales) {
  const int64_t apart = lines_in_four_bytes(format);  // distance of two numbers in one line
  for (int64_t g = 0; g < tile.groups; g++) {
    int16_t some[SCALED];
    scales[g] = encode_group(load(q + g * SCALED), load(q + g * SCALED + 16), some);
    for (int64_t i = 0; i < SCALED; i += 2 * apart)
      for (int64_t j = 0; j < apart; j++) {
        *codes++ = some[i + j];
        *codes++ = some[i + j + apart];
      }
  }
}

// Transposes 16 rows of `bytes` bytes, a multiple of 16, by units of four bytes: 16 columns of to[bytes / 4][beside].
static void turn_rows(const void* rows, int64_t bytes, int64_t beside, void* to) {
  for (int64_t i = 0; i < bytes; i += 16) {
    I x[4];
    transpose({(const uint8_t*)rows + i, bytes}, x);
    for (int64_t k = 0; k < 4; k++) store_bits((uint8_t*)to + (i / 4 + k) * beside * 4, x[k]);
  }
}

static void load_queries(const KVLayer& layer, const Heads& heads, const Tile& tile, const float* from, int64_t stride,
                         const QueryRows& rows) {
  const KVTensor& keys = layer.part[layer.parts - 1].k;  // only the last part of a layer is quantised
  float* numbers = tile.numbers;                         // [16][depth]
  int16_t* codes = (int16_t*)(numbers + 16 * tile.depth);
  float* turned = numbers + 32 * tile.depth;  // [depth]
  for (int64_t first = 0; first < tile.queries(); first += 16) {
    for (int64_t query = first; query < least(first + 16, tile.queries()); query++) {
      const float* x = from + query / tile.heads * stride + query % tile.heads * tile.size;
      float* to = numbers + query % 16 * tile.depth;
      for (int64_t i = 0; i < tile.depth; i += 16)
        store(to + i, load(x + i, most(0, least(16, tile.size - i))) * all((float)heads.scale));
      if (!scaled(keys.format)) continue;
      if (keys.format == INT4) {
        memcpy(turned, to, 4 * tile.depth);
        hadamard_row(to = turned, tile.size, true);
      }
      encode_query(tile, keys.format, to, codes + query % 16 * tile.depth, rows.scales + query * tile.groups);
    }
    turn_rows(numbers, 4 * tile.depth, tile.beside, rows.numbers + first);
    if (scaled(keys.format)) turn_rows(codes, 2 * tile.depth, tile.beside, rows.pairs + first);
  }
}

}  // namespace TW_ISA
}  // namespace tw
