// Linear layers over packed weights, from one row to thousands.
//
// Each row and output has one accumulator, which adds the inputs in order under every blocking: by fp32 fused
// multiply-add for the float formats; for quantised formats by an exact integer sum over each group, times its scale.
// So a row's outputs do not depend on the other rows, and the quantised formats give the same bits on every processor
// with fused multiply-add.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "kernels/lanes.h"
#include "kernels/linear/dot.h"
#include "kernels/linear/matrix_formats.h"
#include "kernels/linear/quantise_rows.h"
#include "kernels/linear/row_kernels.h"

namespace tw {
namespace TW_ISA {

// Rows and blocks that a kernel holds in registers, the most rows that read the weights only once, and how many rows of
// integers and of floats are interleaved.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 8, MOST_FLOAT_ROWS = 12, BLOCKS = 2, FEW_ROWS = 16, SIDE_BY_SIDE = 4, FLOATS_SIDE_BY_SIDE = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, MOST_FLOAT_ROWS = 6, BLOCKS = 1, FEW_ROWS = 4, SIDE_BY_SIDE = 4, FLOATS_SIDE_BY_SIDE = 1;
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 4, MOST_FLOAT_ROWS = 4, BLOCKS = 1, FEW_ROWS = 4, SIDE_BY_SIDE = 4, FLOATS_SIDE_BY_SIDE = 1;
#else
constexpr int MOST_ROWS = 2, MOST_FLOAT_ROWS = 2, BLOCKS = 1, FEW_ROWS = 2, SIDE_BY_SIDE = 1, FLOATS_SIDE_BY_SIDE = 1;
#endif

constexpr int64_t AHEAD = 4096;        // prefetch distance in bytes of a block's weights
constexpr int64_t SUPER_ROWS = 256;    // rows that a group of blocks processes together
constexpr int64_t SUPER_BLOCKS = 8;    // blocks of such a group
constexpr int64_t SHORT_CHUNK = 512;   // inputs per chunk for nine to sixteen rows
constexpr int64_t CHUNK_BYTES = 1024;  // bytes of a row per chunk: rows and weights stay in the L1 cache

// How many rows are interleaved: enough that a kernel's pointers fit in registers.
constexpr int side_by_side_of(int64_t format) { return quantised(format) ? SIDE_BY_SIDE : FLOATS_SIDE_BY_SIDE; }
static int64_t together(int64_t format, int64_t rows) { return rows > 4 ? side_by_side_of(format) : 1; }

// Whether a kernel of `rows` rows prefetches its weights. AMD's processors read a plain stream of codes faster by
// themselves, as long as its multiplications are few; the fifth and sixth bits of codes are not read in order.
template <int64_t FORMAT, int R>
static int64_t ahead_of() {
#if defined(__AVX512F__)
  static const bool amd = __builtin_cpu_is("amd");
  if (amd && (FORMAT == INT8 || (FORMAT == INT4 && R <= 2))) return 0;
#endif
  return AHEAD;
}

// Few rows: the weights come from memory, and one pass over them computes all rows. Block after block the weights are
// one stream, whose end is where the prefetch of the next block begins; two blocks at once only where fp32 products
// bound the kernel.
template <int64_t FORMAT, int64_t GROUP, int SCALES, int R>
static void in_one_go(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  constexpr int side_by_side = R > 4 ? side_by_side_of(FORMAT) : 1, B = quantised(FORMAT) || R <= 2 ? 1 : BLOCKS;
  const int64_t slabs = slabs_of(m), ahead = ahead_of<FORMAT, R>();
  for (int64_t block = first; block < last;) {
    const Work work{m, rows, 0, rows.rows, block, 0, slabs, slabs, nullptr, 0, true, true, out, ahead};
    if (block + B <= last)
      kernel<FORMAT, GROUP, SCALES, R, B, side_by_side>(work);
    else
      kernel<FORMAT, GROUP, SCALES, R, 1, side_by_side>(work);
    block += block + B <= last ? B : 1;
  }
}

// How many rows the next of the kernels takes that take up to `most` rows: `most`, 8 or 4. Twice 4 are faster than 6
// and 2.
constexpr int64_t rows_of_kernel(int64_t most, int64_t left) {
  if (left <= 4 || (most == 6 && (left == 7 || left == 8))) return most < 4 ? most : 4;
  return most > 8 && left <= 8 ? 8 : most;
}

// Many rows: the weights of a pair of blocks over a chunk of inputs stay in the cache, and all rows use them in turn.
// The first rows prefetch the weights after them, `next` bytes away.
template <int64_t FORMAT, int64_t GROUP, int SCALES, int B>
static void past_rows(Work work, int64_t top, int64_t bottom, float* sums, int64_t next) {
  constexpr int most = quantised(FORMAT) ? MOST_ROWS : MOST_FLOAT_ROWS, beside = side_by_side_of(FORMAT);
  for (work.row = top; work.row < bottom; work.row += work.live) {
    const int64_t left = bottom - work.row, rows = rows_of_kernel(most, left);
    work.live = left < rows ? left : rows;
    work.sums = sums + (work.row - top) * work.sums_stride;
    work.ahead = work.row ? 0 : next;
    if (most > 8 && rows == 8)
      kernel<FORMAT, GROUP, SCALES, (most > 8 ? 8 : most), B, beside>(work);
    else if (most > 4 && rows == 4)
      kernel<FORMAT, GROUP, SCALES, (most > 4 ? 4 : most), B, beside>(work);
    else
      kernel<FORMAT, GROUP, SCALES, most, B, beside>(work);
  }
}

// The sums over the chunks so far, in `in_chunks`. One for all formats: a thread's memory has every such variable.
static thread_local float chunk_sums[SUPER_ROWS * SUPER_BLOCKS * LANES] __attribute__((aligned(64)));

template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void in_chunks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  constexpr int64_t number = quantised(FORMAT) ? 1 : 4;  // bytes of one input in a row
  constexpr int64_t chunk = CHUNK_BYTES / number / Slab<FORMAT>::inputs / (quantised(FORMAT) ? 2 : 1);
  const int64_t slabs = slabs_of(m), run = slabs * Slab<FORMAT>::bytes;
  for (int64_t group = first; group < last; group += SUPER_BLOCKS)
    for (int64_t top = 0; top < rows.rows; top += SUPER_ROWS)
      for (int64_t slab = 0; slab < slabs; slab += chunk) {
        const int64_t bottom = rows.rows - top < SUPER_ROWS ? rows.rows : top + SUPER_ROWS;
        const int64_t end = last - group < SUPER_BLOCKS ? last : group + SUPER_BLOCKS;
        for (int64_t block = group; block < end;) {
          const int64_t some = slabs - slab < chunk ? slabs - slab : chunk;
          const Work work{m,         rows,
                          0,         0,
                          block,     slab,
                          some,      slabs,
                          nullptr,   SUPER_BLOCKS * LANES,
                          slab == 0, slab + chunk >= slabs,
                          out,       0};
          float* kept = chunk_sums + (block - group) * LANES;
          const int64_t step = block + BLOCKS <= end ? BLOCKS : 1;
          const int64_t next = block + step < end ? step * run : chunk * Slab<FORMAT>::bytes - (block - group) * run;
          if (step == BLOCKS)
            past_rows<FORMAT, GROUP, SCALES, BLOCKS>(work, top, bottom, kept, next);
          else
            past_rows<FORMAT, GROUP, SCALES, 1>(work, top, bottom, kept, next);
          block += step;
        }
      }
}

// Nine to sixteen rows: they fit in the cache only for a chunk of inputs. Prefetches the next block's weights.
template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void in_short_chunks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  float sums[SUPER_BLOCKS][16 * LANES] __attribute__((aligned(64)));
  constexpr int64_t chunk = SHORT_CHUNK / Slab<FORMAT>::inputs;
  const int64_t slabs = slabs_of(m), run = slabs * Slab<FORMAT>::bytes;
  for (int64_t group = first; group < last; group += SUPER_BLOCKS)
    for (int64_t slab = 0; slab < slabs; slab += chunk) {
      const int64_t end = last - group < SUPER_BLOCKS ? last : group + SUPER_BLOCKS;
      for (int64_t block = group; block < end; block++) {
        const int64_t some = slabs - slab < chunk ? slabs - slab : chunk;
        const int64_t next = block + 1 < end ? run : chunk * Slab<FORMAT>::bytes - (end - 1 - group) * run;
        const Work work{m,         rows,      0,
                        rows.rows, block,     slab,
                        some,      slabs,     sums[block - group],
                        LANES,     slab == 0, slab + chunk >= slabs,
                        out,       next};
        kernel<FORMAT, GROUP, SCALES, 16, 1, side_by_side_of(FORMAT)>(work);
      }
    }
}

template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void blocks_of(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  const int64_t count = rows.rows;
  if (count == 1) return in_one_go<FORMAT, GROUP, SCALES, 1>(m, rows, first, last, out);
  if (count == 2) return in_one_go<FORMAT, GROUP, SCALES, 2>(m, rows, first, last, out);
  if (FEW_ROWS >= 4 && count <= 4) return in_one_go<FORMAT, GROUP, SCALES, 4>(m, rows, first, last, out);
#if defined(__AVX512F__)
  if (count <= 8) return in_one_go<FORMAT, GROUP, SCALES, 8>(m, rows, first, last, out);
  if (count <= 16) return in_short_chunks<FORMAT, GROUP, SCALES>(m, rows, first, last, out);
#endif
  in_chunks<FORMAT, GROUP, SCALES>(m, rows, first, last, out);
}

template <int64_t FORMAT>
static void quantised_blocks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  with_scheme<FORMAT>(m, [&](auto scheme) {
    blocks_of<FORMAT, decltype(scheme)::group, decltype(scheme)::scales>(m, rows, first, last, out);
  });
}

static void linear(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  switch (m.format) {
    case F32: return blocks_of<F32, 0, PLAIN>(m, rows, first, last, out);
    case BF16: return blocks_of<BF16, 0, PLAIN>(m, rows, first, last, out);
    case F16: return blocks_of<F16, 0, PLAIN>(m, rows, first, last, out);
    case INT8: return quantised_blocks<INT8>(m, rows, first, last, out);
    case INT4: return quantised_blocks<INT4>(m, rows, first, last, out);
    case INT5: return quantised_blocks<INT5>(m, rows, first, last, out);
    case INT6: return quantised_blocks<INT6>(m, rows, first, last, out);
    case INT2: return quantised_blocks<INT2>(m, rows, first, last, out);
    case INT1: return quantised_blocks<INT1>(m, rows, first, last, out);
    case TABLE4: return quantised_blocks<TABLE4>(m, rows, first, last, out);
  }
}

static int64_t row_kind(int64_t format) { return quantised(format) ? ROWS_INT8 : ROWS_F32; }

// The index of a row's first unit, with `units` units per row.
TW_INLINE int64_t place(int64_t row, int64_t units, int64_t together) {
  return row / together * together * units + row % together;
}

static void quantise_row(const Matrix& m, const float* x, int64_t row, const QuantisedRows& rows) {
  if (rows.kind == ROWS_F32) {
    float* to = (float*)rows.numbers + place(row, rows.depth, rows.together);
    for (int64_t i = 0; i < m.in; i++) to[i * rows.together] = x[i];
    for (int64_t i = m.in; i < rows.depth; i++) to[i * rows.together] = 0;
    return;
  }
  for (int64_t g = 0; g < rows.groups; g++) {
    const int64_t left = m.in - g * m.group, n = left < 0 ? 0 : left < m.group ? left : m.group;
    const int64_t at = place(row, rows.groups, rows.together) + g * rows.together;
    int8_t codes[64];
    quantise(x + (n ? g * m.group : 0), n, m.group, codes, rows.scales + at, rows.sums + at);
    if (m.minima)
      keep_minimum_factor(rows.scales[at], rows.sums + at);
    else
      rows.sums[at] *= offset(m.format);
    char* to = (char*)rows.numbers + 4 * (place(row, rows.depth / 4, rows.together) + g * m.group / 4 * rows.together);
    for (int64_t i = 0; i < m.group / 4; i++) memcpy(to + 4 * i * rows.together, codes + 4 * i, 4);
  }
}

static bool fuses(const Matrix&, const QuantisedRows&, const Between&) { return false; }
static void up_rows(const Matrix&, const QuantisedRows&, int64_t, int64_t, const Between&) {}

}  // namespace TW_ISA
}  // namespace tw
