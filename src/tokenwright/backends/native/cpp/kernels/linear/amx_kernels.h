// Tiles of rows times blocks of weights on the matrix unit (AMX): one or two of each at a time.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "kernels/amx_tiles.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"
#include "kernels/linear/matrix_formats.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t TILE = 1024;       // bytes
constexpr int64_t TILE_ROWS = 16;    // also the value of `QuantisedRows::together` for rows in tiles
constexpr int64_t AHEAD = 8192;      // prefetch distance in bytes of a block's weights
constexpr int64_t SUPER_BLOCKS = 8;  // blocks that are computed together, and a column of sums for each
constexpr int64_t KEPT = 2;          // slabs with buffered integer sums, to be scaled together

// Rows in tiles, [row / 16][slab][16][64 bytes], times the weights of some blocks.
struct Work {
  const Matrix& m;
  const QuantisedRows& rows;
  int64_t top, bottom;  // rows
  int64_t slab, slabs, all_slabs;
  float* sums;              // [tile of rows][SUPER_BLOCKS][16][16]: sums over the chunks so far
  const uint8_t* tiles[2];  // the chunk's weights, of one block or two adjacent ones
  const uint8_t* next[2];   // the following weights, to prefetch
  int64_t block;            // index in the matrix
  int64_t column;           // index of the first of these blocks in its group, a column of `sums`

  const uint8_t* x(int64_t row) const {
    return (const uint8_t*)rows.numbers + (row / TILE_ROWS * all_slabs + slab) * TILE;
  }
  float* at(int64_t row, int64_t b) const {
    return sums + ((row - top) / TILE_ROWS * SUPER_BLOCKS + column + b) * TILE_ROWS * LANES;
  }
};

static void set_tiles(int64_t rows, int64_t row_bytes) {
  TileConfig to;
  for (int tile = 0; tile < 4; tile++) to.set(tile, (int)rows, 64);              // C
  for (int tile = 4; tile < 6; tile++) to.set(tile, (int)rows, (int)row_bytes);  // A: rows
  for (int tile = 6; tile < 8; tile++) to.set(tile, (int)row_bytes / 4, 64);     // B: weights
  configure(to);
}

// ---- bfloat16 ----

template <int T>
TW_INLINE void begin_tile(const Work& work, const float* sums) {
  if (work.slab)
    tile_load<T>(sums, 64);
  else
    tile_zero<T>();
}

// Prefetches one slab of the following weights.
template <int64_t BYTES, int BLOCKS>
TW_INLINE void fetch(const Work& work, int64_t slab) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < BYTES; i += 64)
    for (int b = 0; b < BLOCKS; b++) __builtin_prefetch(work.next[b] + slab * BYTES + i);
}

// One or two tiles of rows times one or two blocks. FETCHED: bytes to prefetch of each following slab.
template <int ROWS, int BLOCKS, int64_t FETCHED>
static void bf16_tiles(const Work& work, int64_t row) {
  const uint8_t *x0 = work.x(row), *x1 = x0 + (ROWS - 1) * work.all_slabs * TILE;
  const uint8_t *w0 = work.tiles[0], *w1 = work.tiles[BLOCKS - 1];
  begin_tile<0>(work, work.at(row, 0));
  if (BLOCKS == 2) begin_tile<1>(work, work.at(row, 1));
  if (ROWS == 2) begin_tile<2>(work, work.at(row + TILE_ROWS, 0));
  if (ROWS == 2 && BLOCKS == 2) begin_tile<3>(work, work.at(row + TILE_ROWS, 1));
  for (int64_t at = 0; at < work.slabs * TILE; at += TILE) {
    fetch<FETCHED, BLOCKS>(work, at / TILE);
    tile_load<4>(x0 + at, 64);
    tile_load<6>(w0 + at, 64);
    tile_dot_bf16<0, 4, 6>();
    if (BLOCKS == 2) {
      tile_load<7>(w1 + at, 64);
      tile_dot_bf16<1, 4, 7>();
    }
    if (ROWS == 2) {
      tile_load<5>(x1 + at, 64);
      tile_dot_bf16<2, 5, 6>();
      if (BLOCKS == 2) tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(work.at(row, 0), 64);
  if (BLOCKS == 2) tile_store<1>(work.at(row, 1), 64);
  if (ROWS == 2) tile_store<2>(work.at(row + TILE_ROWS, 0), 64);
  if (ROWS == 2 && BLOCKS == 2) tile_store<3>(work.at(row + TILE_ROWS, 1), 64);
}

// ---- Quantised formats ----

// The offset that the codes of a matrix without minima are stored with.
constexpr int offset_of(int64_t format) {
  return format == INT8 || format == TABLE4 ? 128 : ternary(format) ? 1 : format == INT4 ? 8 : format == INT5 ? 16 : 32;
}

// Decodes slabs to signed bytes. DISTANCE: prefetch distance in bytes, or 0.
template <int64_t FORMAT, int SCALES, int64_t DISTANCE>
static void widen(const uint8_t* from, int64_t slabs, uint8_t* to, I table) {
  constexpr int64_t bytes = slab_bytes(FORMAT);
  const __m512i offset = _mm512_set1_epi8((char)(SCALES & MINIMA ? 0 : offset_of(FORMAT)));
  for (int64_t s = 0; s < slabs; s++)
#pragma GCC unroll 16
    for (int64_t four = 0; four < 16; four++) {
      const uint8_t* slab = from + s * bytes;
      if (DISTANCE && four < bytes / LINE) __builtin_prefetch(slab + four * LINE + DISTANCE);
      const __m512i codes = (__m512i)codes_of<FORMAT>(slab, four, table).p[0];
      _mm512_store_si512(to + s * TILE + four * LINE, _mm512_sub_epi8(codes, offset));
    }
}

// For one group: the sums of a tile of rows and a block += integer sums * scales of the outputs * scale of the row, and
// minima of the outputs * factors of the row.
template <int SCALES>
TW_INLINE void scale_group(F (&acc)[TILE_ROWS], const int32_t* totals, F scale, F minimum, const QuantisedRows& rows,
                           int64_t row, int64_t group) {
  const int64_t at = (row / TILE_ROWS * rows.groups + group) * TILE_ROWS;
  const float *x_scales = rows.scales + at, *x_minima = (const float*)rows.sums + at;
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) {
    acc[r] = fma(to_float(load_bits(totals + r * LANES)), scale * all(x_scales[r]), acc[r]);
    if (SCALES & MINIMA) acc[r] = fma(minimum, all(x_minima[r]), acc[r]);
  }
}

// As scale_group, for all groups of a slab. The reader stands at the slab.
template <int64_t GROUP, int SCALES>
TW_INLINE void scale_slab(F (&acc)[TILE_ROWS], const int32_t (*totals)[TILE_ROWS * LANES],
                          const ScaleReader<GROUP, SCALES>& scales, const QuantisedRows& rows, int64_t row,
                          int64_t slab) {
  constexpr int64_t groups = 64 / GROUP;
#pragma GCC unroll 4
  for (int g = 0; g < groups; g++) {
    const F minimum = SCALES & MINIMA ? scales.minimum_of(g) : F{};
    scale_group<SCALES>(acc, totals[g], scales.scale_of(g), minimum, rows, row, slab * groups + g);
  }
}

TW_INLINE void store_tile(float* sums, const F (&acc)[TILE_ROWS]) {
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) store(sums + r * LANES, acc[r]);
}

// Adds some slabs of the chunk to the sums of a tile of rows and a block.
template <int64_t GROUP, int SCALES>
static void scale_tile(const Work& work, int64_t row, int64_t b, int64_t slab, int64_t slabs,
                       const int32_t (*totals)[TILE_ROWS * LANES]) {
  float* sums = work.at(row, b);
  ScaleReader<GROUP, SCALES> scales;
  scales.begin(work.m, work.block + b, work.all_slabs);
  F acc[TILE_ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) acc[r] = slab ? load(sums + r * LANES) : F{};
  for (int64_t i = 0; i < slabs; i++) {
    scales.to(slab + i);
    scale_slab(acc, totals + i * (64 / GROUP), scales, work.rows, row, slab + i);
  }
  store_tile(sums, acc);
}

// As bf16_tiles, group by group.
template <int64_t GROUP, int SCALES, int ROWS, int BLOCKS, int64_t FETCHED>
static void integer_tiles(const Work& work, int64_t row) {
  constexpr int64_t run = GROUP, G = 64 / GROUP;
  alignas(64) int32_t totals[ROWS * BLOCKS][KEPT * G][TILE_ROWS * LANES];
  const uint8_t *x0 = work.x(row), *x1 = x0 + (ROWS - 1) * work.all_slabs * TILE;
  for (int64_t s = 0; s < work.slabs; s += KEPT) {
    const int64_t slabs = work.slabs - s < KEPT ? work.slabs - s : KEPT;
    for (int64_t i = 0; i < slabs; i++) {
      fetch<FETCHED, BLOCKS>(work, s + i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const int64_t x = (s + i) * TILE + g * run, w = (s + i) * TILE + g * run / 4 * 64, kept = i * G + g;
        tile_load<4>(x0 + x, 64);
        tile_load<6>(work.tiles[0] + w, 64);
        tile_zero<0>();
        tile_dot_bytes<0, 4, 6>();
        if (BLOCKS == 2) {
          tile_load<7>(work.tiles[1] + w, 64);
          tile_zero<1>();
          tile_dot_bytes<1, 4, 7>();
        }
        if (ROWS == 2) {
          tile_load<5>(x1 + x, 64);
          tile_zero<2>();
          tile_dot_bytes<2, 5, 6>();
          if (BLOCKS == 2) {
            tile_zero<3>();
            tile_dot_bytes<3, 5, 7>();
          }
        }
        tile_store<0>(totals[0][kept], 64);
        if (BLOCKS == 2) tile_store<1>(totals[BLOCKS - 1][kept], 64);
        if (ROWS == 2) tile_store<2>(totals[(ROWS - 1) * BLOCKS][kept], 64);
        if (ROWS == 2 && BLOCKS == 2) tile_store<3>(totals[ROWS * BLOCKS - 1][kept], 64);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int b = 0; b < BLOCKS; b++)
        scale_tile<GROUP, SCALES>(work, row + r * TILE_ROWS, b, work.slab + s, slabs, totals[r * BLOCKS + b]);
  }
}

// One tile of rows times a block whose weights come from memory. While the unit multiplies one slab, the code scales
// the integer sums of the slab before; the fp32 sums stay in registers.
template <int64_t FORMAT, int64_t GROUP, int SCALES>
struct Stream {
  static constexpr int64_t groups = 64 / GROUP;
  const uint8_t *codes, *x;
  I table;
  alignas(64) uint8_t wide[2][TILE];
  alignas(64) int32_t totals[2][groups][TILE_ROWS * LANES];

  template <int ODD>
  __attribute__((always_inline)) void multiply(int64_t slab) {
    widen<FORMAT, SCALES, AHEAD>(codes + slab * slab_bytes(FORMAT), 1, wide[ODD], table);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      tile_load<4 + ODD>(x + slab * TILE + g * GROUP, 64);
      tile_load<6 + ODD>(wide[ODD] + g * GROUP / 4 * 64, 64);
      tile_zero<ODD>();
      tile_dot_bytes<ODD, 4 + ODD, 6 + ODD>();
      tile_store<ODD>(totals[ODD][g], 64);
    }
  }
};

template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void stream_block(const Matrix& m, const QuantisedRows& rows, int64_t block, float* sums) {
  const int64_t slabs = rows.depth / 64;
  Stream<FORMAT, GROUP, SCALES> stream;
  stream.codes = (const uint8_t*)m.codes + block * slabs * slab_bytes(FORMAT);
  stream.x = (const uint8_t*)rows.numbers;
  stream.table = table_of<FORMAT>(m);
  ScaleReader<GROUP, SCALES> scales;
  scales.begin(m, block, slabs);
  F acc[TILE_ROWS] = {};
  const auto scale = [&](int64_t slab) __attribute__((always_inline)) {
    scales.to(slab);
    scale_slab(acc, stream.totals[slab & 1], scales, rows, 0, slab);
  };
  stream.template multiply<0>(0);
  for (int64_t slab = 1; slab < slabs; slab += 2) {
    stream.template multiply<1>(slab);
    scale(slab - 1);
    if (slab + 1 == slabs) break;
    stream.template multiply<0>(slab + 1);
    scale(slab);
  }
  scale(slabs - 1);
  store_tile(sums, acc);
}

}  // namespace TW_ISA
}  // namespace tw
