// Attention of some rows and query heads over their KV heads, block by block through the sequence (online softmax).
//
// Included once per instruction set. The result of one query (one head of one row) is defined independently of the
// others: it processes blocks of 64 absolute positions in order (split where two parts meet and where sinks end). In
// each block it computes the scores and the new maximum, rescales the sums so far, and adds the weighted values in the
// order of positions. This code processes a block for many queries together, to decode it once; that does not change
// the result of any query. docs/kernels.md has the full definition.
#pragma once

#include "kernels.h"
#include "kv.inl.h"

namespace tw {
namespace TW_ISA {

constexpr float MOST_CODE = 32767.0f;  // largest 16-bit code of queries and weights, to multiply a quantised cache
constexpr float LEAST_SCALED = 1e-30f;  // smaller extremes are encoded as zeros

// The range of a block's lanes that a row reads: [low, high).
struct Stretch {
  int64_t low, high;
};

// The numbers of queries, transposed to match the keys' lines: in fp32, and as codes for the keys of a quantised part.
struct QueryRows {
  float* numbers;  // [depth][beside], multiplied by the attention scale
  int32_t* pairs;  // [depth / 2][beside]: two codes of 16 bits each, in the order of the keys' lines
  float* scales;   // [queries][groups]
  int32_t* low;    // [depth / 2][beside]: for a latent on the matrix unit, as `pairs`
};

// Queries that are processed together (all of the given heads of some rows), and their state.
struct Tile {
  int64_t heads;     // query heads per row
  int64_t kv_head, kv_heads, shared;  // their first KV head; how many KV heads; query heads per KV head
  int64_t position;  // position of the first row
  int64_t rows;
  int64_t size, depth, groups;  // of a key: its size, that rounded up to whole groups of 32, the groups
  int64_t values, value_groups;  // of a value: its size, which is that of a key or smaller, and its groups
  int64_t beside;               // the number of queries, rounded up to whole vectors
  bool in_tiles;                // whether the matrix unit takes the products with keys and values
  float cap;                    // soft cap of the scores; 0: none
  QueryRows q, sink_q;
  float* weights;          // [queries][64]: scores, then their exponentials
  int16_t* weight_codes;   // [value groups][queries][64]: weights times the values' scales, as integer codes
  float* weight_scales;    // [queries][groups], of which the value groups are used
  float* mixed;            // [queries][depth]: sums of weights times values
  float* sums;             // [queries][16]: sums of weights, by lane modulo 16
  float* highest;          // [queries]: the largest score so far
  float* shares;           // [queries]: the factor from the block's weights to the query's maximum
  Stretch* read;           // [queries]: the lanes that each query reads
  float* numbers;          // [64 * depth]: the queries as loaded; then a block's decoded keys, then its values
  float* copies;             // [32 * depth]: copies of keys that are not evenly spaced
  float* scales;           // [groups][64]: the block's scales, in a quantised part,
  float* factors;          // [groups][64]: the factors from weights to their codes,
  float* worth;            // [groups]: and the value of one unit of such a code
  float* totals;           // [queries][stretch sums]: of a latent, the sums of the stretches so far
  int64_t queries() const { return rows * heads; }
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
  const int64_t each = totals + 2 * (2 * depth + groups) + BLOCK + groups * BLOCK / 2 + groups + depth + 16 + 1 + 1 + 4;
  return queries * each + (BLOCK + 32) * depth + groups * (2 * BLOCK + 1) + 16;
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
  tile.scales = take(scratch, BLOCK * tile.groups);
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
  tile.worth = take(scratch, tile.groups);
  tile.totals = take(scratch, tile.values < tile.size ? n * stretch_sums(heads) : 0);
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
    for (int64_t k = 0; k < 4; k++) memcpy((uint8_t*)to + (i / 4 + k) * beside * 4, &x[k], 64);
  }
}

static void load_queries(const KVLayer& layer, const Heads& heads, const Tile& tile, const float* from, int64_t stride,
                         const QueryRows& rows) {
  const KVTensor& keys = layer.part[layer.parts - 1].k;  // only the last part of a layer is quantised
  float* numbers = tile.numbers;                     // [16][depth]
  int16_t* codes = (int16_t*)(numbers + 16 * tile.depth);
  for (int64_t first = 0; first < tile.queries(); first += 16) {
    for (int64_t query = first; query < least(first + 16, tile.queries()); query++) {
      const float* x = from + query / tile.heads * stride + query % tile.heads * tile.size;
      float* to = numbers + query % 16 * tile.depth;
      for (int64_t i = 0; i < tile.depth; i += 16)
        store(to + i, load(x + i, most(0, least(16, tile.size - i))) * all((float)heads.scale));
      if (scaled(keys.format))
        encode_query(tile, keys.format, to, codes + query % 16 * tile.depth, rows.scales + query * tile.groups);
    }
    turn_rows(numbers, 4 * tile.depth, tile.beside, rows.numbers + first);
    if (scaled(keys.format)) turn_rows(codes, 2 * tile.depth, tile.beside, rows.pairs + first);
  }
}

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

// The lanes of a block that a row at a position reads; none if low >= high.
TW_INLINE Stretch stretch_of(const KVLayer& layer, const Block& block, int64_t position) {
  const bool all_of_it = block.sinks || !layer.window;
  const int64_t low = all_of_it ? block.start : most(block.start, position - layer.window + 1);
  return {low - block.start, least(block.stop, position + 1) - block.start};
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

// ---- Scores ----

constexpr int VECTORS = WIDTH == 16 ? 4 : WIDTH == 8 ? 2 : 1;  // vectors of 16 lanes that fit in registers,
constexpr int QUERIES = WIDTH == 16 ? 4 : 2;                   // for so many queries
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
      for (int v = 0; v < V; v++) key[v] = load(keys + 16 * v);
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
    for (; lane + 16 * VECTORS <= block.last(); lane += 16 * VECTORS) vectors<N, VECTORS>(query, lane);
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
        F keys[V][lines];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) spread<FORMAT>(x[v][j], keys[v]);
#pragma GCC unroll 2
        for (int k = 0; k < lines; k++, q += tile.beside)
#pragma GCC unroll 16
          for (int i = 0; i < N; i++) {
            const F number = all(q[i]);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) total[i][v] = fma(number, keys[v][k], total[i][v]);
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
TW_INLINE void add_codes(const Tile& tile, int64_t query, int64_t lane, int64_t group, float scale,
                         const I (&total)[V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    float* to = tile.weights + query * BLOCK + lane + 16 * v;
    const F part = to_float(total[v]) * load(tile.scales + group * BLOCK + lane + 16 * v);
    store(to, fma(part, all(scale), group ? load(to) : all(0.0f)));
  }
}

// Scores with quantised keys: exact integer sums over each group, times the scales of key and query, added in order.
struct CodeScores {
  const Tile& tile;
  const Block& block;

  template <int N, int V>
  inline __attribute__((always_inline)) void vectors(int64_t query, int64_t lane, int64_t group) const {
    const QueryRows& rows = meeting(tile, block);
    const int32_t* pairs = rows.pairs + group * SCALED / 2 * tile.beside + query;
    const float* keys = tile.numbers + group * SCALED / 2 * BLOCK + lane;
    I total[N][V] = {};
    const int64_t lines = least(SCALED, whole(tile.size - group * SCALED, 8)) / 2;
    for (int64_t line = 0; line < lines; line++, keys += BLOCK, pairs += tile.beside) {
      I key[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) key[v] = float_to_bits(load(keys + 16 * v));
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const I x = all(pairs[i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[i][v] = dot16(total[i][v], x, key[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
      add_codes<V>(tile, query + i, lane, group, rows.scales[(query + i) * tile.groups + group], total[i]);
  }

  template <int N>
  void run(int64_t query) const {
    for (int64_t group = 0; group < tile.groups; group++) {
      int64_t lane = block.first();
      for (; lane + 16 * VECTORS <= block.last(); lane += 16 * VECTORS) vectors<N, VECTORS>(query, lane, group);
      for (; lane < block.last(); lane += 16) vectors<N, 1>(query, lane, group);
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
          F keys[V][lines];
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) spread<FORMAT>(x[v][j], keys[v]);
#pragma GCC unroll 4
          for (int k = 0; k < lines; k++, pairs += tile.beside)
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
              const I pair = all(pairs[i]);
#pragma GCC unroll 2
              for (int v = 0; v < V; v++) total[i][v] = dot16(total[i][v], pair, float_to_bits(keys[v][k]));
            }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; i++)
        add_codes<V>(tile, query + i, lane, group, queries.scales[(query + i) * tile.groups + group], total[i]);
    }
  }

  template <int N>
  void run(int64_t query) const {
    int64_t lane = block.first();
    for (; lane + 16 * KEY_VECTORS <= block.last(); lane += 16 * KEY_VECTORS) vectors<N, KEY_VECTORS>(query, lane);
    for (; lane < block.last(); lane += 16) vectors<N, 1>(query, lane);
  }
};

#if defined(TW_TILES)
#include "latent_tiles.inl.h"
#endif

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
  side_by_side<QUERIES>(CodeScores{tile, block}, first, last);
}

// ---- Softmax ----

// x in the lanes of [low, high), `other` elsewhere; the vector's first lane is `lane`.
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

// ---- Values ----

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
    for (int v = 0; v < V; v++) value[v] = load((const float*)at + 16 * v);
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
      F both[2];
      I x;
      memcpy(&x, at + bytes_of(16 * v), 64);
      spread<BF16>(x, both);
      value[v] = both[0];
      value[v + 1] = both[1];
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
    constexpr int fit = N > QUERIES ? VECTORS / 2 : VECTORS;
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

// For queries that read these lanes: the factors from weights to codes, and the value of one unit of a code.
static void weigh_scales(const Tile& tile, Stretch read) {
  for (int64_t g = 0; g < tile.value_groups; g++) {
    F x[4], highest = all(0.0f);
    for (int v = 0; v < 4; v++) {
      x[v] = load(tile.scales + g * BLOCK + 16 * v);
      if (read.low > 0 || read.high < BLOCK) x[v] = only(x[v], 16 * v, read, 0.0f);
      highest = larger_magnitude(highest, x[v]);
    }
    const float extreme = largest_magnitude(highest);
    const F inverse = all(finite(extreme) && extreme > LEAST_SCALED ? MOST_CODE / extreme : 0.0f);
    for (int v = 0; v < 4; v++) store(tile.factors + g * BLOCK + 16 * v, x[v] * inverse);
    tile.worth[g] = finite(extreme) ? extreme / MOST_CODE : __builtin_nanf("");
  }
}

// Encodes the weights of the queries [first, last), times the values' scales, to integer codes.
static void encode_weights(const Tile& tile, int64_t first, int64_t last) {
  Stretch weighed = {0, 0};
  for (int64_t query = first; query < last; query++) {
    const Stretch read = tile.read[query];
    if (read.low != weighed.low || read.high != weighed.high) weigh_scales(tile, weighed = read);
    const float* weights = tile.weights + query * BLOCK;
    for (int64_t g = 0; g < tile.value_groups; g++) {
      uint16_t* codes = (uint16_t*)tile.weight_codes + (g * tile.queries() + query) * BLOCK;
      for (int v = 0; v < 4; v++)
        store_16(codes + 16 * v, nearest(load(weights + 16 * v) * load(tile.factors + g * BLOCK + 16 * v)));
      tile.weight_scales[query * tile.groups + g] = tile.shares[query] * tile.worth[g];
    }
  }
}

// Adds quantised values: exact integer sums over the block, times the weights' scales. STORED: reads the values in
// place; else the copy that was decoded for many queries.
template <int64_t FORMAT, bool STORED>
struct CodeMix {
  const Tile& tile;
  const Block& block;

  template <int N>
  void run(int64_t query) const {
    constexpr int64_t of_group = row_bytes(FORMAT, SCALED);
    const int64_t bytes = row_bytes(FORMAT, tile.size);
    for (int64_t g = 0; g < tile.value_groups; g++) {
      const int16_t* weights = tile.weight_codes + (g * tile.queries() + query) * BLOCK;
      I total[N][2] = {};
      for (int64_t lane = block.low & -2; lane < block.high;) {
        const uint8_t* a = (const uint8_t*)(tile.numbers + lane / 2 * tile.depth + g * SCALED);
        const uint8_t* b = a;
        int64_t step = 4 * tile.depth, end = block.high;
        if (STORED) {
          a = (const uint8_t*)block.v.codes + block.places[lane] * bytes + g * of_group;
          b = (const uint8_t*)block.v.codes + block.places[lane + 1] * bytes + g * of_group;
          step = 2 * block.apart * bytes;
          end = block.even[lane / 16] ? least(lane / 16 * 16 + 16, block.high) : lane + 2;
        }
        for (; lane < end; lane += 2, a += step, b += step) {
          I x[2];
          if (STORED) {
            pair_values<FORMAT>(a, b, x);
            block.ahead->v.after(2 * of_group);
          } else {
            memcpy(x, a, sizeof x);
          }
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) {
            int32_t two;
            memcpy(&two, weights + i * BLOCK + lane, 4);
            const I weight = all(two);
            total[i][0] = dot16(total[i][0], weight, x[0]);
            total[i][1] = dot16(total[i][1], weight, x[1]);
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        F first = to_float(total[i][0]), second = to_float(total[i][1]);
        in_order<FORMAT>(first, second);
        const F scale = all(tile.weight_scales[(query + i) * tile.groups + g]);
        float* mixed = tile.mixed + (query + i) * tile.depth + g * SCALED;
        store(mixed, fma(first, scale, load(mixed)));
        store(mixed + 16, fma(second, scale, load(mixed + 16)));
      }
    }
  }
};

template <int64_t FORMAT>
static void mix_codes(const Tile& tile, const Block& block, int64_t first, int64_t last) {
  load_scales(block, block.v, tile.size, block.ahead->v_scales, tile.scales);
  encode_weights(tile, first, last);
  if (last - first <= FEW_QUERIES && tile.values % SCALED == 0)
    return side_by_side<GROUP_QUERIES>(CodeMix<FORMAT, true>{tile, block}, first, last);
  decode_values(block, tile.size, tile.values, tile.depth, tile.numbers);
  side_by_side<GROUP_QUERIES>(CodeMix<FORMAT, false>{tile, block}, first, last);
}

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
  return {most(0, block.start - tile.position), least(tile.rows, last)};
}

// Iterates over the blocks of a sequence that some row of a tile reads, in order.
struct Text {
  const KVLayer& layer;
  const Heads& heads;
  const ChunkRows& chunk;
  int64_t page_size;
  int64_t start;  // position of the next block
  int64_t stop;   // of all blocks

  // Sets up the next block and its lanes; false after the last.
  bool next(const Tile& tile, Block& block) {
    const int64_t near = layer.window ? most(0, tile.position - layer.window + 1) : 0;
    while (start < least(stop, tile.position + tile.rows)) {
      if (start >= layer.sinks) start = most(start, near & -BLOCK);
      if (start >= stop) return false;
      begin_block(layer, start, block);
      start = block.stop;
      const Stretch rows = rows_of(layer, tile, block);
      if (rows.low >= rows.high) continue;
      block.low = stretch_of(layer, block, tile.position + rows.low).low;
      block.high = stretch_of(layer, block, tile.position + rows.high - 1).high;
      locate(heads, chunk, page_size, block);
      return true;
    }
    return false;
  }
};

// Processes one block for a tile's queries, one KV head at a time.
static void read_block(const KVLayer& layer, const Tile& tile, Block& block) {
  const Stretch rows = rows_of(layer, tile, block);
  int64_t first = rows.low * tile.heads, last = rows.high * tile.heads;
  for (int64_t row = rows.low, query = first; row < rows.high; row++)
    for (int64_t head = 0; head < tile.heads; head++)
      tile.read[query++] = stretch_of(layer, block, tile.position + row);
  for (int64_t head = 0; head < tile.kv_heads; head++) {
    if (tile.kv_heads > 1) first = head * tile.shared, last = first + tile.shared;  // the tile has one row
    block.k = of_head(block.part->k, tile.size, tile.kv_head + head);
    block.v = of_head(block.part->v, tile.size, tile.kv_head + head);
    score_queries(tile, block, first, last);
    for (int64_t query = first; query < last; query++) soften(tile, block, query);
    mix_queries(tile, block, first, last);
  }
}

static void read_text(const KVLayer& layer, const Tile& tile, Text text) {
  Block blocks[2] = {};
  bool more = text.next(tile, blocks[0]);
  for (int i = 0; more; i = 1 - i) {
    Block &block = blocks[i], &next = blocks[1 - i];
    Ahead ahead;
    more = text.next(tile, next);
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

// Adds the sums of a later stretch. One in which the query read nothing has sums of zero. Not inlined, so that it
// rounds the same wherever it is called.
static __attribute__((noinline)) void merge_sums(int64_t values, const float* from, float* to) {
  if (sum(load(from)) == 0.0f) return;
  if (sum(load(to)) == 0.0f) {
    memcpy(to, from, 4 * (SUMS + values));
    return;
  }
  const float highest = from[16] > to[16] ? from[16] : to[16];
  const F before = exponential(all(to[16] - highest)), more = exponential(all(from[16] - highest));
  store(to, fma(load(from), more, load(to) * before));
  store(to + 16, all(highest));
  for (int64_t i = SUMS; i < SUMS + values; i += 16) store(to + i, fma(load(from + i), more, load(to + i) * before));
}

static void finish_sums(int64_t values, const float* from, float* out) {
  const F total = all(sum(load(from)));
  for (int64_t i = 0; i < values; i += 16) store(out + i, load(from + SUMS + i) / total, least(16, values - i));
}

// Reads one stretch for a tile; false if it has no position that a row reads.
static bool read_stretch(const Heads& heads, const Queries& queries, const Tile& tile, const Text& text) {
  Text ahead = text;
  Block block;
  if (!ahead.next(tile, block)) return false;
  begin_sums(heads, queries, tile);
  read_text(text.layer, tile, text);
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
  const bool any =
      read_stretch(heads, queries, tile, {layer, heads, chunk, page_size, start, start + STRETCH});
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
      read_text(layer, tile, {layer, heads, chunk, page_size, 0, chunk.start + chunk.rows});
      const int64_t row = chunk.row + first, column = queries.head * heads.values;
      write_out(tile, queries.out + row * queries.out_stride + column, queries.out_stride);
    }
    end_tile(tile);
    first += tile.rows;
  }
}

// ---- One row ----

static void weigh(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, int64_t page_size,
                  const Queries& queries, float* weights, float* scratch) {
  const Tile tile = begin_tile(layer, heads, chunk, queries, queries.first, scratch);
  const int64_t count = tile.position + 1;
  for (int64_t i = 0; i < count; i++) weights[i] = -__builtin_inff();
  Text text{layer, heads, chunk, page_size, 0, count};
  Block block;
  while (text.next(tile, block)) {
    Ahead ahead;
    block.ahead = &ahead;
    block.k = of_head(block.part->k, tile.size, tile.kv_head);
    score_queries(tile, block, 0, 1);
    if (tile.cap > 0)
      for (int64_t i = 0; i < BLOCK; i += 16) store(tile.weights + i, soft_capped(load(tile.weights + i), tile.cap));
    memcpy(weights + block.start + block.low, tile.weights + block.low, 4 * (block.high - block.low));
  }
  end_tile(tile);
  float highest = heads.sink_logits ? heads.sink_logits[queries.head] : -__builtin_inff();
  for (int64_t i = 0; i < count; i++) highest = weights[i] > highest ? weights[i] : highest;
  double total = 0;
  if (heads.sink_logits) total = sum(only(exponential(all(heads.sink_logits[queries.head] - highest)), 0, {0, 1}, 0.0f));
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
