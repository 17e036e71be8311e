// Decoding the keys and values of a block, in the order in which attention multiplies them.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/attention/kv_block.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Decoded keys form lines of 64 positions. For native formats and fp8 a line is one number of a head, in fp32. For INT8
// and INT4 it is a pair of codes of 16 bits each: if four stored bytes hold 2 n numbers, their line i pairs the numbers
// i and i + n.
constexpr int64_t lines_in_four_bytes(int64_t format) {
  return format == F32 ? 1 : format == BF16 || format == F16 || format == INT8 ? 2 : 4;
}

// Line `k` of four bytes of sixteen rows. One at a time: all of them would not fit in registers.
template <int64_t FORMAT>
TW_INLINE F line_of(I x, int k) {
  if constexpr (FORMAT == F32) return bits_to_float(x);
  if constexpr (FORMAT == BF16) return bits_to_float(k ? x & all(-65536) : x << 16);
  if constexpr (FORMAT == F16) return from_f16((k ? x >> 16 : x) & all(0xffff));
  if constexpr (FORMAT == FP8) return from_fp8((x >> 8 * k) & all(0xff));
  if constexpr (FORMAT == INT8) return bits_to_float(right16(k ? x : left16(x, 8), 8));
  const I levels = levels_of(k % 2 ? high_codes(x) : low_codes(x));
  return bits_to_float(right16(k < 2 ? left16(levels, 8) : levels, 8));
}

// Copies sixteen rows of keys, from a lane on, to contiguous memory in `copies`, each padded with zeros to a multiple
// of sixteen bytes.
static __attribute__((noinline)) Run copied_keys(const Block& block, int64_t bytes, int64_t lane, void* copies) {
  uint8_t* to = (uint8_t*)copies;
  const int64_t step = whole(bytes, 16);
  memset(to, 0, 16 * step);
  for (int64_t i = 0; i < 16; i++)
    memcpy(to + i * step, (const uint8_t*)block.k.codes + block.places[lane + i] * bytes, bytes);
  return {to, step};
}
// Sixteen evenly spaced rows of keys of whole sixteen bytes: in place if possible, else copied.
TW_INLINE Run even_keys(const Block& block, int64_t bytes, int64_t lane, void* copies) {
  if (!block.even[lane / 16] || bytes % 16) return copied_keys(block, bytes, lane, copies);
  return {(const uint8_t*)block.k.codes + block.places[lane] * bytes, block.apart * bytes};
}

template <int64_t FORMAT>
static void decode_keys_of(const Block& block, int64_t size, float* keys, void* copies) {
  constexpr int64_t count = lines_in_four_bytes(FORMAT);
  const int64_t bytes = row_bytes(FORMAT, size);
  for (int64_t lane = block.first(); lane < block.last(); lane += 16) {
    float* to = keys + lane;
    Run rows = even_keys(block, bytes, lane, copies);
    for (int64_t offset = 0; offset < bytes; offset += 16, rows.at += 16) {
      I x[4];
      transpose(rows, x);
      block.ahead->k.after(16 * 16);
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; i++) {
#pragma GCC unroll 4
        for (int k = 0; k < count; k++, to += BLOCK) store(to, line_of<FORMAT>(x[i], k));
      }
    }
  }
}

// copies: memory for sixteen rows of keys
static void decode_keys(const Block& block, int64_t size, float* keys, void* copies) {
  switch (block.k.format) {
    case F32: return decode_keys_of<F32>(block, size, keys, copies);
    case BF16: return decode_keys_of<BF16>(block, size, keys, copies);
    case F16: return decode_keys_of<F16>(block, size, keys, copies);
    case FP8: return decode_keys_of<FP8>(block, size, keys, copies);
    case INT8: return decode_keys_of<INT8>(block, size, keys, copies);
    case INT4: return decode_keys_of<INT4>(block, size, keys, copies);
  }
}

// Decoded fp32 values form rows: values[lane * depth + number], padded with zeros.
template <int64_t FORMAT>
TW_INLINE F load_numbers(const uint8_t* x) {
  if (FORMAT == F32) return load((const float*)x);
  if (FORMAT == BF16) return load_bf16((const uint16_t*)x);
  if (FORMAT == F16) return load_f16((const uint16_t*)x);
  return load_fp8(x);
}

// size: numbers of a row, of which the first `columns` are values.
template <int64_t FORMAT>
static void decode_values_of(const Block& block, int64_t size, int64_t columns, int64_t depth, float* values) {
  const uint8_t* codes = (const uint8_t*)block.v.codes;
  const int64_t bytes = row_bytes(FORMAT, size), step = row_bytes(FORMAT, 16);
  for (int64_t lane = block.low; lane < block.high; lane++) {
    const uint8_t* from = codes + block.places[lane] * bytes;
    block.ahead->v.after(bytes);
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16, from += step) store(values + lane * depth + i, load_numbers<FORMAT>(from));
    if (i == columns) continue;
    uint8_t last[64] = {};
    memcpy(last, from, row_bytes(FORMAT, columns - i));
    store(values + lane * depth + i, load_numbers<FORMAT>(last));
  }
}

// Pairs the value codes of two adjacent positions over 32 columns, each pair in the two halves of a lane.
//
// The columns are in the cheapest order (for INT4 even ones, then odd ones); `in_order` reorders the final sums.
template <int64_t FORMAT>
TW_INLINE void pair_values(const uint8_t* a, const uint8_t* b, I (&x)[2]) {
  if constexpr (FORMAT == INT4) {
#if defined(__AVX512F__)
    const __m128i of_a = _mm_loadu_si128((const __m128i*)a), of_b = _mm_loadu_si128((const __m128i*)b);
    const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(of_a, of_b), _mm_unpacklo_epi8(of_a, of_b));
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)LEVELS));
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    x[0].p[0] = (IPart)_mm512_cvtepi8_epi16(_mm256_shuffle_epi8(levels, _mm256_and_si256(both, low)));
    x[1].p[0] = (IPart)_mm512_cvtepi8_epi16(_mm256_shuffle_epi8(levels, odd));
#else
    const I both = load_u8(a) | load_u8(b) << 16;
    x[0] = right16(left16(levels_of(low_codes(both)), 8), 8);
    x[1] = right16(left16(levels_of(high_codes(both)), 8), 8);
#endif
    return;
  }
#if defined(__AVX512F__)
  const __m512i of_a = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)a));
  const __m512i of_b = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)b));
  x[0].p[0] = (IPart)_mm512_unpacklo_epi16(of_a, of_b);
  x[1].p[0] = (IPart)_mm512_unpackhi_epi16(of_a, of_b);
#else
  for (int i = 0; i < 2; i++) {
    const I both = load_u8(a + 16 * i) | load_u8(b + 16 * i) << 16;
    x[i] = right16(left16(both, 8), 8);
  }
#endif
}

template <int64_t FORMAT>
TW_INLINE void in_order(F& a, F& b) {
  if constexpr (FORMAT == INT4) return interleave(a, b);
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512 x = (__m512)a.p[0], y = (__m512)b.p[0];
  a.p[0] = (FPart)_mm512_permutex2var_ps(x, low, y);
  b.p[0] = (FPart)_mm512_permutex2var_ps(x, _mm512_or_si512(low, _mm512_set1_epi32(8)), y);
#endif
}

// Decoded value codes form rows of two positions each: values[lane / 2 * depth + column].
template <int64_t FORMAT>
static void decode_value_codes(const Block& block, int64_t size, int64_t columns, int64_t depth, float* values) {
  const uint8_t* codes = (const uint8_t*)block.v.codes;
  const int64_t bytes = row_bytes(FORMAT, size), of_group = row_bytes(FORMAT, SCALED);
  const int64_t end = row_bytes(FORMAT, columns);
  for (int64_t lane = block.low & -2; lane < block.high; lane += 2) {
    const uint8_t *a = codes + block.places[lane] * bytes, *b = codes + block.places[lane + 1] * bytes;
    float* to = values + lane / 2 * depth;
    block.ahead->v.after(2 * bytes);
    for (int64_t i = 0; i < end; i += of_group, to += SCALED) {
      uint8_t last[2][32] = {};
      const bool all_there = i + of_group <= end;
      if (!all_there) {
        memcpy(last[0], a + i, end - i);
        memcpy(last[1], b + i, end - i);
      }
      I x[2];
      pair_values<FORMAT>(all_there ? a + i : last[0], all_there ? b + i : last[1], x);
      store(to, bits_to_float(x[0]));
      store(to + 16, bits_to_float(x[1]));
    }
  }
}

static void decode_values(const Block& block, int64_t size, int64_t columns, int64_t depth, float* values) {
  switch (block.v.format) {
    case F32: return decode_values_of<F32>(block, size, columns, depth, values);
    case BF16: return decode_values_of<BF16>(block, size, columns, depth, values);
    case F16: return decode_values_of<F16>(block, size, columns, depth, values);
    case FP8: return decode_values_of<FP8>(block, size, columns, depth, values);
    case INT8: return decode_value_codes<INT8>(block, size, columns, depth, values);
    case INT4: return decode_value_codes<INT4>(block, size, columns, depth, values);
  }
}

}  // namespace TW_ISA
}  // namespace tw
