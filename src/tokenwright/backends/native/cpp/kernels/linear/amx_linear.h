// Linear layers, and attention over a latent in bfloat16, on the matrix unit (AMX); the AVX-512 kernels do all else.
//
// A slab's memory layout is that of a tile: 16 outputs over 64 bytes of inputs. Rows form tiles of 16; a short last
// tile is padded and the results of the padding are ignored, so the computation of a row does not depend on its
// neighbours. Quantised formats have the same integer sums, and so the same bits, as in the other instruction sets; the
// AVX-512 kernels take few rows of them, because they read the weights as fast and need no tiles. bfloat16 weights
// always use rows rounded to bfloat16, the unit's input format, for any number of rows.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "kernels/amx_tiles.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"
#include "kernels/linear/amx_kernels.h"
#include "kernels/linear/matrix_formats.h"
#include "kernels/linear/quantise_rows.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t FEW_ROWS = 8;      // up to so many rows of a quantised format run on AVX-512
constexpr int64_t CHUNK = 16;        // slabs per chunk for many rows
constexpr int64_t SUPER_ROWS = 512;  // rows that a group of blocks processes together

// The blocks of a group, in the order of the columns of `Work::sums`.
struct Columns {
  int64_t first;  // block of the first column
  int64_t count;
  int64_t apart;  // 0, or blocks from the first half of the columns to the second

  int64_t block(int64_t column) const {
    return first + (apart && column >= count / 2 ? apart + column - count / 2 : column);
  }
};

TW_INLINE F total_of(const Work& work, int64_t row, int64_t column, int64_t block) {
  const int64_t at = block * LANES, n = work.m.out - at < LANES ? work.m.out - at : LANES;
  F v = load(work.at(row, column) + row % TILE_ROWS * LANES);
  if (work.m.factors) v = v * load(work.m.factors + at, n);
  return work.m.bias ? v + load(work.m.bias + at, n) : v;
}

struct ToMemory {
  const Out& out;

  void operator()(const Work& work, const Columns& columns) const {
    for (int64_t row = work.top; row < work.bottom; row++)
      for (int64_t column = 0; column < columns.count; column++) {
        const int64_t block = columns.block(column), at = block * LANES;
        const int64_t n = work.m.out - at < LANES ? work.m.out - at : LANES;
        F v = total_of(work, row, column, block);
        if (out.add) v = v + load(out.add + row * out.stride + at, n);
        store(out.y + row * out.stride + at, v, n);
      }
  }
};

// Quantises inputs [input, input + n) of a row into its tiles; zeros if n is 0. Scales after the last row are set to 0,
// because leftover numbers there may be subnormal, which processors multiply slowly.
TW_INLINE void to_tiles(const QuantisedRows& rows, const Matrix& m, const float* x, int64_t row, int64_t input,
                        int64_t n) {
  const int64_t bytes = rows.kind == ROWS_BF16 ? 2 : 1, slabs = rows.depth * bytes / 64, at = input * bytes;
  char* to = (char*)rows.numbers + (row / TILE_ROWS * slabs + at / 64) * TILE + row % TILE_ROWS * 64 + at % 64;
  if (rows.kind == ROWS_BF16) return store_bf16((uint16_t*)to, load(x, n));
  const int64_t scale = (row / TILE_ROWS * rows.groups + input / m.group) * TILE_ROWS + row % TILE_ROWS;
  quantise(x, n, m.group, (int8_t*)to, rows.scales + scale, rows.sums + scale);
  if (m.minima) keep_minimum_factor(rows.scales[scale], rows.sums + scale);
  for (int64_t i = 1; row + 1 == rows.rows && (row + i) % TILE_ROWS; i++)
    rows.scales[scale + i] = 0, rows.sums[scale + i] = 0;
}

struct ToRows {
  const Between& between;

  void operator()(const Work& work, const Columns& columns) const {
    const QuantisedRows& to = between.to;
    const int64_t step = to.kind == ROWS_BF16 ? LANES : between.down.group;
    const int64_t units = between.gated ? 1 : columns.count * LANES / ACTIVATED;
    for (int64_t row = work.top; row < work.bottom; row++)
      for (int64_t unit = 0; unit < units; unit++) {
        float up[2 * ACTIVATED] __attribute__((aligned(64))), act[ACTIVATED] __attribute__((aligned(64)));
        const int64_t first = unit * ACTIVATED / LANES, some = (between.gated ? 2 : 1) * ACTIVATED / LANES;
        for (int64_t i = 0; i < some; i++)
          store(up + i * LANES, total_of(work, row, first + i, columns.block(first + i)));
        if (between.gated)
          avx512_kernels()->gated(between.activation, ACTIVATED, up, act);
        else
          avx512_kernels()->activate(between.activation, ACTIVATED, up, act);
        const int64_t input = columns.first * LANES + unit * ACTIVATED;
        for (int64_t i = 0; i < ACTIVATED; i += step) to_tiles(to, between.down, act + i, row, input + i, step);
      }
  }
};

template <int64_t FORMAT, typename SCHEME, int ROWS, int BLOCKS, int64_t FETCHED>
static void tiles_of(const Work& work, int64_t row) {
  if constexpr (FORMAT == BF16)
    bf16_tiles<ROWS, BLOCKS, FETCHED>(work, row);
  else
    integer_tiles<SCHEME::group, SCHEME::scales, ROWS, BLOCKS, FETCHED>(work, row);
}

// A chunk of the weights of one or two blocks, times some rows. The first tiles of rows prefetch the following weights.
template <int64_t FORMAT, typename SCHEME, int BLOCKS>
static void past_rows(Work& work) {
  constexpr int64_t fetched = slab_bytes(FORMAT);
  alignas(64) uint8_t wide[FORMAT == BF16 ? 1 : BLOCKS][FORMAT == BF16 ? 64 : CHUNK * TILE];
  if constexpr (FORMAT != BF16)
    for (int b = 0; b < BLOCKS; b++) {
      widen<FORMAT, SCHEME::scales, 0>(work.tiles[b], work.slabs, wide[b], table_of<FORMAT>(work.m));
      work.tiles[b] = wide[b];
    }
  if (work.bottom - work.top <= TILE_ROWS) return tiles_of<FORMAT, SCHEME, 1, BLOCKS, fetched>(work, work.top);
  tiles_of<FORMAT, SCHEME, 2, BLOCKS, fetched>(work, work.top);
  int64_t row = work.top + 2 * TILE_ROWS;
  for (; row + TILE_ROWS < work.bottom; row += 2 * TILE_ROWS) tiles_of<FORMAT, SCHEME, 2, BLOCKS, 0>(work, row);
  if (row < work.bottom) tiles_of<FORMAT, SCHEME, 1, BLOCKS, 0>(work, row);
}

// `Work::sums`. One for all formats: a thread's memory has every such variable.
static thread_local float chunk_sums[SUPER_ROWS / TILE_ROWS * SUPER_BLOCKS][TILE_ROWS * LANES]
    __attribute__((aligned(64)));

// All rows times a group of blocks.
template <int64_t FORMAT, typename SCHEME, typename To>
static void columns_in(const Matrix& m, const QuantisedRows& rows, const Columns& columns, const To& to) {
  constexpr int64_t bytes = slab_bytes(FORMAT), inputs = slab_inputs(FORMAT);
  const int64_t slabs = (m.in + inputs - 1) / inputs, run = slabs * bytes;
  const bool few = rows.rows <= TILE_ROWS;
  const int64_t chunk = few ? slabs : CHUNK;
  for (int64_t top = 0; top < rows.rows; top += SUPER_ROWS) {
    const int64_t bottom = rows.rows - top < SUPER_ROWS ? rows.rows : top + SUPER_ROWS;
    Work work{m, rows, top, bottom, 0, 0, slabs, chunk_sums[0], {nullptr, nullptr}, {nullptr, nullptr}, 0, 0};
    for (; work.slab < slabs; work.slab += chunk) {
      work.slabs = slabs - work.slab < chunk ? slabs - work.slab : chunk;
      for (work.column = 0; work.column < columns.count; work.column += 2) {
        const bool two = work.column + 1 < columns.count, last = work.column + 2 >= columns.count;
        work.block = columns.block(work.column);
        if constexpr (FORMAT != BF16)
          if (few) {
            for (int64_t b = 0; b <= two; b++)
              stream_block<FORMAT, SCHEME::group, SCHEME::scales>(m, rows, work.block + b, work.at(0, b));
            continue;
          }
        const uint8_t* codes = (const uint8_t*)m.codes + work.slab * bytes;
        const uint8_t* next =
            last ? codes + columns.first * run + work.slabs * bytes : codes + columns.block(work.column + 2) * run;
        for (int64_t b = 0; b < 2; b++) {
          work.tiles[b] = codes + (work.block + b) * run;
          work.next[b] = few ? work.tiles[b] + AHEAD : next + b * run;
        }
        two ? past_rows<FORMAT, SCHEME, 2>(work) : past_rows<FORMAT, SCHEME, 1>(work);
      }
    }
    work.column = 0;
    to(work, columns);
  }
}

template <int64_t FORMAT, typename To>
static void quantised_columns(const Matrix& m, const QuantisedRows& rows, const Columns& columns, const To& to) {
  with_scheme<FORMAT>(m, [&](auto scheme) { columns_in<FORMAT, decltype(scheme)>(m, rows, columns, to); });
}

template <typename To>
static void columns_of(const Matrix& m, const QuantisedRows& rows, const Columns& columns, const To& to) {
  switch (m.format) {
    case BF16: return columns_in<BF16, Scheme<0, PLAIN>>(m, rows, columns, to);
    case INT8: return quantised_columns<INT8>(m, rows, columns, to);
    case INT4: return quantised_columns<INT4>(m, rows, columns, to);
    case INT5: return quantised_columns<INT5>(m, rows, columns, to);
    case INT6: return quantised_columns<INT6>(m, rows, columns, to);
    case INT2: return quantised_columns<INT2>(m, rows, columns, to);
    case INT1: return quantised_columns<INT1>(m, rows, columns, to);
    case TABLE4: return quantised_columns<TABLE4>(m, rows, columns, to);
  }
}

static void begin_tiles(const Matrix& m, const QuantisedRows& rows) {
  set_tiles(m.format == BF16 && rows.rows < TILE_ROWS ? rows.rows : TILE_ROWS, m.group ? m.group : 64);
}

static bool in_tiles(int64_t format) { return format == BF16 || quantised(format); }

static int64_t row_kind(int64_t format) { return format == BF16 ? ROWS_BF16 : avx512_kernels()->row_kind(format); }

static int64_t together(int64_t format, int64_t rows) {
  if (format == BF16 || (in_tiles(format) && rows > FEW_ROWS)) return TILE_ROWS;
  return avx512_kernels()->together(format, rows);
}

static void linear(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  if (rows.together != TILE_ROWS) return avx512_kernels()->linear(m, rows, first, last, out);
  if (!rows.rows) return;  // AMX has no tiles of zero rows
  begin_tiles(m, rows);
  for (int64_t block = first; block < last; block += SUPER_BLOCKS)
    columns_of(m, rows, {block, last - block < SUPER_BLOCKS ? last - block : SUPER_BLOCKS, 0}, ToMemory{out});
  release();
}

static bool fuses(const Matrix&, const QuantisedRows& rows, const Between& between) {
  return rows.together == TILE_ROWS && between.to.together == TILE_ROWS && rows.rows > 0 &&
         between.width % ACTIVATED == 0;
}

static void up_rows(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Between& between) {
  constexpr int64_t unit = ACTIVATED / LANES;  // blocks
  const int64_t units = between.gated ? 1 : SUPER_BLOCKS / unit;
  begin_tiles(m, rows);
  for (int64_t at = first; at < last; at += units) {
    const int64_t some = last - at < units ? last - at : units;
    if (between.gated)
      columns_of(m, rows, {at * unit, 2 * unit, between.width / LANES}, ToRows{between});
    else
      columns_of(m, rows, {at * unit, some * unit, 0}, ToRows{between});
  }
  release();
}

static void quantise_row(const Matrix& m, const float* x, int64_t row, const QuantisedRows& rows) {
  if (rows.together != TILE_ROWS) return avx512_kernels()->quantise_row(m, x, row, rows);
  const int64_t step = rows.kind == ROWS_BF16 ? LANES : m.group;
  for (int64_t input = 0; input < rows.depth; input += step) {
    const int64_t left = m.in - input, n = left < 0 ? 0 : left < step ? left : step;
    to_tiles(rows, m, x + (n ? input : 0), row, input, n);
  }
}

}  // namespace TW_ISA
}  // namespace tw
