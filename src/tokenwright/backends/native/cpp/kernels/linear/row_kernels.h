// The kernels of a linear: some rows times one block of weights or two, with the sums in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"
#include "kernels/linear/dot.h"
#include "kernels/linear/matrix_formats.h"

namespace tw {
namespace TW_ISA {

struct Work {  // a kernel's work: some rows over a chunk of inputs, for one block or two adjacent ones
  const Matrix& matrix;
  const QuantisedRows& rows;
  int64_t row, live;  // the first row; the number of valid rows, at most the kernel's
  int64_t block, slab, slabs, all_slabs;
  float* sums;          // [row][16 for each block]: sums over the previous chunks
  int64_t sums_stride;  // floats from one row to the next
  bool first, last;     // whether this is the first or last chunk of the inputs
  const Out& out;
  int64_t ahead;  // prefetch distance of the weights in bytes; 0: they are in the cache already
};

template <int SCALES>
TW_INLINE void finish(const Work& work, int64_t block, int64_t row, F v) {
  const Matrix& m = work.matrix;
  const int64_t at = block * LANES, n = m.out - at < LANES ? m.out - at : LANES;
  const int64_t place = (work.row + row) * work.out.stride + at;
  if (SCALES & FACTORS) v = v * load(m.factors + at, n);
  if (m.bias) v = v + load(m.bias + at, n);
  if (work.out.add) v = v + load(work.out.add + place, n);
  store(work.out.y + place, v, n);
}

template <int R, int B>
TW_INLINE void begin(const Work& work, F (&acc)[R][B]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
      acc[r][b] = work.first || r >= work.live ? F{} : load(work.sums + r * work.sums_stride + b * LANES);
}

template <int SCALES, int R, int B>
TW_INLINE void end(const Work& work, F (&acc)[R][B]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    if (r >= work.live) break;
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      if (work.last)
        finish<SCALES>(work, work.block + b, r, acc[r][b]);
      else
        store(work.sums + r * work.sums_stride + b * LANES, acc[r][b]);
    }
  }
}

// The weights of a line as fp32: of a format of 16 bits the inputs 2 i (which = 0) or 2 i + 1 (which = 1).
template <int64_t FORMAT>
TW_INLINE F weights_of(const uint8_t* at, int which) {
  const I line = load_line(at);
  if (FORMAT == F32) return bits_to_float(line);
  if (FORMAT == BF16) return bits_to_float(which ? line & all((int32_t)0xffff0000) : line << 16);
  return from_f16((which ? line >> 16 : line) & all(0xffff));
}

// The pointers to a kernel's R rows: one for each TOGETHER interleaved rows, or one per row.
template <typename Unit, int R, int TOGETHER>
struct RowPointers {
  static constexpr int count = TOGETHER == 1 ? R : (R + TOGETHER - 1) / TOGETHER;
  const Unit* at[count];

  // units: per row. Without interleaving, rows after the last valid one repeat the first.
  TW_INLINE RowPointers from(const Work& work, const void* numbers, int64_t units, int64_t unit) {
    RowPointers p;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
      const int64_t row = work.row + (TOGETHER > 1 ? i * TOGETHER : i < work.live ? i : 0);
      p.at[i] = (const Unit*)numbers + row * units + unit * TOGETHER;
    }
    return p;
  }
  __attribute__((always_inline)) Unit get(int r, int64_t unit) const {
    Unit value;
    memcpy(&value, at[r / TOGETHER] + unit * TOGETHER + r % TOGETHER, sizeof value);
    return value;
  }
};

// Hides from the compiler where the weights are, so that it loads a line twice that it needs twice: a kernel of many
// rows needs the register in which it would wait.
TW_INLINE void hide(const uint8_t*& weights) { __asm__ volatile("" : "+r"(weights)); }

template <int64_t FORMAT, int R, int B, int TOGETHER>
static void float_kernel(const Work& work) {
  constexpr int64_t per_line = FORMAT == F32 ? 1 : 2;
  const int64_t run = work.all_slabs * Slab<FORMAT>::bytes;
  const uint8_t* w = (const uint8_t*)work.matrix.codes + work.block * run + work.slab * Slab<FORMAT>::bytes;
  using Pointers = RowPointers<float, R, TOGETHER>;
  const auto x = Pointers::from(work, work.rows.numbers, work.rows.depth, work.slab * Slab<FORMAT>::inputs);
  F acc[R][B];
  begin<R, B>(work, acc);
  const int64_t lines = work.slabs * (Slab<FORMAT>::bytes / LINE);
  for (int64_t i = 0; i < lines; i++) {
    const uint8_t* at = w + i * LINE;
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
      if (work.ahead) __builtin_prefetch(at + b * run + work.ahead);
#pragma GCC unroll 2
    for (int k = 0; k < per_line; k++) {
      if (R > 4) hide(at);
      F weights[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) weights[b] = weights_of<FORMAT>(at + b * run, k);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F value = all(x.get(r, i * per_line + k));
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
          acc[r][b] = fma(weights[b], value, acc[r][b]);
          if (WIDTH == 8) settle(acc[r][b]);  // all registers are taken, and a sum would go through memory
        }
      }
    }
  }
  end<PLAIN, R, B>(work, acc);
}

template <int64_t FORMAT, int64_t GROUP, int SCALES, int R, int B, int TOGETHER>
static void integer_kernel(const Work& work) {
  constexpr int64_t groups = 64 / GROUP, fours = GROUP / 4, together = dots_together(FORMAT);
  const int64_t run = work.all_slabs * Slab<FORMAT>::bytes;
  const uint8_t* w = (const uint8_t*)work.matrix.codes + work.block * run + work.slab * Slab<FORMAT>::bytes;
  ScaleReader<GROUP, SCALES> scales[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) scales[b].begin(work.matrix, work.block + b, work.all_slabs);
  using Pointers = RowPointers<int32_t, R, TOGETHER>;
  using Floats = RowPointers<float, R, TOGETHER>;
  const auto x = Pointers::from(work, work.rows.numbers, work.rows.depth / 4, work.slab * 16);
  const auto x_sums = Pointers::from(work, work.rows.sums, work.rows.groups, work.slab * groups);
  const auto x_minima = Floats::from(work, work.rows.sums, work.rows.groups, work.slab * groups);
  const auto x_scales = Floats::from(work, work.rows.scales, work.rows.groups, work.slab * groups);
  const I table = table_of<FORMAT>(work.matrix);
  F acc[R][B];
  begin<R, B>(work, acc);
  for (int64_t s = 0; s < work.slabs; s++) {
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) scales[b].to(work.slab + s);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      const uint8_t* slab = w + s * Slab<FORMAT>::bytes;
      if (R > 2) hide(slab);
      const auto start = [&](int r) __attribute__((always_inline)) {
        return SCALES & MINIMA ? I{} : all(x_sums.get(r, s * groups + g));
      };
      I sums[R][B];
#pragma GCC unroll 16
      for (int first = 0; first < fours; first += together) {
        I some[R][B];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
          for (int b = 0; b < B; b++) some[r][b] = together > 1 ? I{} : first ? sums[r][b] : start(r);
#pragma GCC unroll 16
        for (int q = first; q < first + together; q++) {
          const int64_t four = g * fours + q;  // the index in the slab
          I codes[B];
#pragma GCC unroll 4
          for (int b = 0; b < B; b++) {
            const uint8_t* at = slab + b * run;
            if (work.ahead && four < Slab<FORMAT>::bytes / LINE) __builtin_prefetch(at + four * LINE + work.ahead);
            codes[b] = codes_of<FORMAT>(at, four, table);
          }
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            const int32_t values = x.get(r, s * 16 + four);
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
              some[r][b] = dot<FORMAT>(some[r][b], codes[b], values);
              settle(some[r][b]);
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
          for (int b = 0; b < B; b++)
            sums[r][b] = together > 1 ? (first ? sums[r][b] : start(r)) + widened(some[r][b]) : some[r][b];
      }
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        const F scale = scales[b].scale_of(g), minimum = SCALES & MINIMA ? scales[b].minimum_of(g) : F{};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          acc[r][b] = fma(to_float(sums[r][b]), scale * all(x_scales.get(r, s * groups + g)), acc[r][b]);
          if (SCALES & MINIMA) acc[r][b] = fma(minimum, all(x_minima.get(r, s * groups + g)), acc[r][b]);
        }
      }
    }
  }
  end<SCALES, R, B>(work, acc);
}

template <int64_t FORMAT, int64_t GROUP, int SCALES, int R, int B, int TOGETHER>
TW_INLINE void kernel(const Work& work) {
  if constexpr (quantised(FORMAT))
    integer_kernel<FORMAT, GROUP, SCALES, R, B, TOGETHER>(work);
  else
    float_kernel<FORMAT, R, B, TOGETHER>(work);
}

}  // namespace TW_ISA
}  // namespace tw
