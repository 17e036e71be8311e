// Packs rows of numbers into the blocks and slabs of a matrix, in the order that api.h draws.
//
// Sixteen rows are packed together, each in its own lane: the result for a number depends on its row and group alone.
// The bytes equal those of backends/packed.py in every instruction set, because this code adds no rounded product that
// a compiler could fuse.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"
#include "kernels/linear/matrix_formats.h"

namespace tw {
namespace TW_ISA {

constexpr float LEAST_DIVISOR = 7.0f, DIVISOR_STEP = 0.25f;  // an int4 scale is -extreme / (7, 7.25, ... 10.75)
constexpr int DIVISORS = 16;

// The rows to pack into one block, in its lanes [first, last). `row` points to the row of lane `first`.
struct BlockRows {
  int64_t format, stride;
  const uint8_t* row;
  int64_t first, last;
};

TW_INLINE F load_numbers(int64_t format, const uint8_t* row, int64_t at, int64_t n) {
  if (format == F32) return load((const float*)row + at, n);
  uint16_t padded[16] = {};
  const uint16_t* x = (const uint16_t*)row + at;
  if (n < 16) {
    memcpy(padded, x, 2 * n);
    x = padded;
  }
  return format == BF16 ? load_bf16(x) : load_f16(x);
}

// Lane i of vector j becomes lane j of vector i.
TW_INLINE void transpose_16x16(F (&x)[16]) {
#if defined(__AVX512F__)
  F y[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // transpose 4 x 4 squares within each quarter
    const __m512 a = (__m512)x[i].p[0], b = (__m512)x[i + 1].p[0], c = (__m512)x[i + 2].p[0], d = (__m512)x[i + 3].p[0];
    const __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
    const __m512d AB = (__m512d)_mm512_unpackhi_ps(a, b), CD = (__m512d)_mm512_unpackhi_ps(c, d);
    y[i].p[0] = (FPart)_mm512_unpacklo_pd(ab, cd);
    y[i + 1].p[0] = (FPart)_mm512_unpackhi_pd(ab, cd);
    y[i + 2].p[0] = (FPart)_mm512_unpacklo_pd(AB, CD);
    y[i + 3].p[0] = (FPart)_mm512_unpackhi_pd(AB, CD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // transpose the grid of squares
    const __m512 a = (__m512)y[i].p[0], b = (__m512)y[i + 4].p[0];
    const __m512 c = (__m512)y[i + 8].p[0], d = (__m512)y[i + 12].p[0];
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x88), cd = _mm512_shuffle_f32x4(c, d, 0x88);
    const __m512 AB = _mm512_shuffle_f32x4(a, b, 0xdd), CD = _mm512_shuffle_f32x4(c, d, 0xdd);
    x[i].p[0] = (FPart)_mm512_shuffle_f32x4(ab, cd, 0x88);
    x[i + 4].p[0] = (FPart)_mm512_shuffle_f32x4(AB, CD, 0x88);
    x[i + 8].p[0] = (FPart)_mm512_shuffle_f32x4(ab, cd, 0xdd);
    x[i + 12].p[0] = (FPart)_mm512_shuffle_f32x4(AB, CD, 0xdd);
  }
#else
  float from[16][16], to[16][16];
  for (int i = 0; i < 16; i++) store(from[i], x[i]);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[i][j] = from[j][i];
  for (int i = 0; i < 16; i++) x[i] = load(to[i]);
#endif
}

// The inputs [at, at + N) of the block's rows, one vector per input, with zeros for missing rows and inputs.
template <int N>
TW_INLINE void read_inputs(const BlockRows& rows, int64_t at, int64_t inner, F (&x)[N]) {
  const int64_t row_bytes = rows.stride * (rows.format == F32 ? 4 : 2);
  for (int64_t part = 0; part < N; part += 16) {
    const int64_t left = inner - at - part, n = left < 0 ? 0 : left < 16 ? left : 16;
    F square[16];
    for (int64_t lane = 0; lane < 16; lane++) {
      const bool there = lane >= rows.first && lane < rows.last && n > 0;
      const uint8_t* row = rows.row + (lane - rows.first) * row_bytes;
      square[lane] = there ? load_numbers(rows.format, row, at + part, n) : F{};
    }
    transpose_16x16(square);
    for (int i = 0; i < 16; i++) x[part + i] = square[i];
  }
}

// Conversion to 16 bits, in the lower half of each lane.
TW_INLINE I to_bf16(F x) {
  const I bits = float_to_bits(x);
  return ((bits + all(0x7fff) + (bits >> 16 & all(1))) >> 16) & all(0xffff);
}
TW_INLINE I to_f16(F x) {
  I r;
#if defined(__AVX512F__)
  r.p[0] = (IPart)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x.p[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (IPart)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)x.p[i], _MM_FROUND_TO_NEAREST_INT));
#else
  float each[16];
  int32_t halves[16];
  store(each, x);
  for (int i = 0; i < 16; i++) halves[i] = to_f16(each[i]);
  r = load_bits(halves);
#endif
  return r;
}

// Rounds a scale to float16; returns its bits and sets `scale` to the rounded value.
TW_INLINE I round_scale(F& scale) {
  const I kept = to_f16(scale);
  scale = from_f16(kept);
  return kept;
}

// -1 in each lane whose exponent bits are all set.
TW_INLINE I not_finite(I bits, int32_t exponent) {
  I r;
  TW_PARTS r.p[i] = (IPart)((bits.p[i] & exponent) == exponent);
  return r;
}

TW_INLINE F clamped(F x, float low, float high) { return larger(all(low), smaller(all(high), x)); }

// round(x / scale); where the scale is 0, all numbers of the group are (nearly) 0 and 1 stands in for it.
TW_INLINE F code_of(F x, F scale) {
  TW_PARTS scale.p[i] = scale.p[i] == 0 ? 1.0f - (FPart){} : scale.p[i];
  return rounded(x / scale);
}

// One slab of a float format, with one or two inputs per line. Returns, in each lane, minus the count of numbers that
// are not finite.
template <int64_t FORMAT>
TW_INLINE I float_slab(const BlockRows& rows, int64_t at, int64_t inner, I (&lines)[16]) {
  constexpr int inputs = FORMAT == F32 ? 16 : 32;
  constexpr int32_t exponent = FORMAT == F32 ? 0x7f800000 : FORMAT == BF16 ? 0x7f80 : 0x7c00;
  F x[inputs];
  read_inputs(rows, at, inner, x);
  I bad = {};
  for (int i = 0; i < inputs; i++) {
    const I bits = FORMAT == F32 ? float_to_bits(x[i]) : FORMAT == BF16 ? to_bf16(x[i]) : to_f16(x[i]);
    bad = bad + not_finite(bits, exponent);
    if (FORMAT == F32)
      lines[i] = bits;
    else
      lines[i / 2] = i % 2 ? lines[i / 2] | bits << 16 : bits;
  }
  return bad;
}

// A group's int8 codes, -127 to 127 plus 128. Returns the scale as float16 bits.
template <int GROUP>
TW_INLINE I int8_group(const F* x, I* codes) {
  F most = {};
  for (int i = 0; i < GROUP; i++) most = larger(magnitude(x[i]), most);
  F scale = most / all(127.0f);
  const I kept = round_scale(scale);
  for (int i = 0; i < GROUP; i++) codes[i] = to_int(clamped(code_of(x[i], scale), -127, 127)) + all(128);
  return kept;
}

// The squared error of a group at a scale. Differences are truncated to 12 bits, so that their squares are exact.
template <int GROUP>
TW_INLINE F int4_error(const F* x, F scale) {
  F total = {};
  for (int i = 0; i < GROUP; i++) {
    const F code = clamped(code_of(x[i], scale), -8, 7);  // code * scale is exact too
    const F difference = bits_to_float(float_to_bits(x[i] - code * scale) & all(~0xfff));
    total = fma(difference, difference, total);
  }
  return total;
}

// A group's int4 codes, -8 to 7 plus 8, with the first scale of least error. Returns the scale as float16 bits.
template <int GROUP>
TW_INLINE I int4_group(const F* x, I* codes) {
  F high = x[0], low = x[0], best = {}, scale = {};
  for (int i = 1; i < GROUP; i++) high = larger(x[i], high), low = smaller(x[i], low);
  TW_PARTS high.p[i] = (high.p[i] > -low.p[i] ? high.p[i] : low.p[i]) + 0.0f;  // the extreme; no -0
  for (int k = 0; k < DIVISORS; k++) {
    F tried = high * all((float)(-1.0 / (LEAST_DIVISOR + DIVISOR_STEP * (float)k)));
    round_scale(tried);
    const F error = int4_error<GROUP>(x, tried);
    TW_PARTS {
      const IPart better = k == 0 ? ~(IPart){} : (IPart)(error.p[i] < best.p[i]);
      best.p[i] = better ? error.p[i] : best.p[i];
      scale.p[i] = better ? tried.p[i] : scale.p[i];
    }
  }
  for (int i = 0; i < GROUP; i++) codes[i] = to_int(clamped(code_of(x[i], scale), -8, 7)) + all(8);
  return to_f16(scale);
}

// One slab of a quantised format, and the scales of its groups. Returns, in each lane, minus the count of numbers in
// groups that cannot be encoded, because a number or the scale is not finite.
template <int64_t FORMAT, int GROUP>
TW_INLINE I integer_slab(const BlockRows& rows, int64_t at, int64_t inner, I (&lines)[16], I (&scales)[2]) {
  constexpr int per_line = FORMAT == INT8 ? 1 : 2, apart = 64 / per_line;
  F x[64];
  I codes[64], bad = {};
  read_inputs(rows, at, inner, x);
  for (int g = 0; g < 64 / GROUP; g++) {
    const F* numbers = x + g * GROUP;
    scales[g] =
        FORMAT == INT8 ? int8_group<GROUP>(numbers, codes + g * GROUP) : int4_group<GROUP>(numbers, codes + g * GROUP);
    I without = not_finite(scales[g], 0x7c00);
    for (int i = 0; i < GROUP; i++) without = without | not_finite(float_to_bits(numbers[i]), 0x7f800000);
    const int64_t left = inner - at - g * GROUP;
    bad = bad + without * all(left < 0 ? 0 : left < GROUP ? (int32_t)left : GROUP);
  }
  for (int line = 0; line < apart / 4; line++) {
    lines[line] = I{};
    for (int k = 0; k < 4; k++)
      for (int half = 0; half < per_line; half++)
        lines[line] = lines[line] | codes[4 * line + k + apart * half] << (8 * k + 4 * half);
  }
  return bad;
}

// Stores lanes [first, last) of a vector with `size` bytes per lane.
TW_INLINE void store_lanes(uint8_t* to, const void* from, int64_t first, int64_t last, int64_t size) {
  if (last - first == 16)
    memcpy(to, from, 16 * size);
  else
    memcpy(to + first * size, (const uint8_t*)from + first * size, (last - first) * size);
}

TW_INLINE int64_t lanes_total(I x, int64_t first, int64_t last) {
  int32_t each[16];
  store_bits(each, x);
  int64_t total = 0;
  for (int64_t i = first; i < last; i++) total += each[i];
  return total;
}

// Packs the rows of one block, slab by slab. Returns how many numbers are not finite.
template <int64_t FORMAT, int GROUP>
static int64_t pack_block(const Matrix& m, int64_t block, const BlockRows& rows) {
  constexpr int groups = GROUP ? 64 / (GROUP ? GROUP : 1) : 0;
  const int64_t slabs = slabs_of(m);
  uint8_t* codes = (uint8_t*)m.codes + block * slabs * Slab<FORMAT>::bytes;
  uint16_t* scales = (uint16_t*)m.scales + block * slabs * groups * LANES;
  I bad = {};
  for (int64_t slab = 0; slab < slabs; slab++) {
    I lines[16], kept[2];
    if constexpr (GROUP == 0)
      bad = bad + float_slab<FORMAT>(rows, slab * Slab<FORMAT>::inputs, m.in, lines);
    else
      bad = bad + integer_slab<FORMAT, GROUP>(rows, slab * 64, m.in, lines, kept);
    for (int64_t line = 0; line < Slab<FORMAT>::bytes / LINE; line++, codes += LINE)
      store_lanes(codes, lines + line, rows.first, rows.last, 4);
    for (int64_t g = 0; g < groups; g++, scales += LANES) {
      uint16_t halves[16];
      store_16(halves, kept[g]);
      store_lanes((uint8_t*)scales, halves, rows.first, rows.last, 2);
    }
  }
  return -lanes_total(bad, rows.first, rows.last);
}

static int64_t pack_rows_of_block(const Matrix& m, int64_t block, const BlockRows& rows) {
  switch (m.format) {
    case F32: return pack_block<F32, 0>(m, block, rows);
    case BF16: return pack_block<BF16, 0>(m, block, rows);
    case F16: return pack_block<F16, 0>(m, block, rows);
    case INT8: return m.group == 32 ? pack_block<INT8, 32>(m, block, rows) : pack_block<INT8, 64>(m, block, rows);
    default: return m.group == 32 ? pack_block<INT4, 32>(m, block, rows) : pack_block<INT4, 64>(m, block, rows);
  }
}

static int64_t pack(const Matrix& m, int64_t source_format, const void* source, int64_t stride, int64_t first,
                    int64_t count) {
  const int64_t row_bytes = stride * (source_format == F32 ? 4 : 2);
  int64_t bad = 0;
  for (int64_t row = first; row < first + count;) {
    const int64_t block = row / LANES, lane = row % LANES, left = first + count - row;
    const int64_t last = lane + left < LANES ? lane + left : LANES;
    const BlockRows rows{source_format, stride, (const uint8_t*)source + (row - first) * row_bytes, lane, last};
    bad += pack_rows_of_block(m, block, rows);
    row += last - lane;
  }
  return bad;
}

}  // namespace TW_ISA
}  // namespace tw
