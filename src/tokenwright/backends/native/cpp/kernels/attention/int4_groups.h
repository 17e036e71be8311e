// The groups of an INT4 cache: 32 numbers times a Hadamard matrix, each stored as one of sixteen levels times a scale.
//
// The matrix spreads a large number over its group, and makes the others nearly Gaussian, which is what the levels are
// for. Queries are multiplied by it as well, so that scores need no decoded key; sums of values are multiplied back.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Of the code c + 8, c (c c + 164) / 16, rounded down.
static constexpr int8_t LEVELS[16] = {-114, -94, -75, -60, -45, -33, -21, -11, 0, 10, 21, 32, 45, 59, 75, 93};
// A scale is the extreme of its group over minus one of these: that of least squared error.
constexpr int SCALES = 6;
static const float LEVEL_DIVISORS[SCALES] = {142, 130, 119, 110, 102, 95};

// The levels of sixteen codes in each four bytes.
TW_INLINE I levels_of(I codes) {
#if defined(__AVX512F__)
  const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)LEVELS));
  codes.p[0] = (IPart)_mm512_shuffle_epi8(levels, (__m512i)codes.p[0]);
#elif defined(__AVX2__)
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)LEVELS));
  TW_PARTS codes.p[i] = (IPart)_mm256_shuffle_epi8(levels, (__m256i)codes.p[i]);
#elif defined(__aarch64__)
  TW_PARTS codes.p[i] = (IPart)vqtbl1q_s8(vld1q_s8(LEVELS), (uint8x16_t)codes.p[i]);
#else
  TW_PARTS {
    const SPart even = (SPart)codes.p[i] & 255, odd = (SPart)codes.p[i] >> 8;
    const SPart a = even - 8, b = odd - 8;
    codes.p[i] = (IPart)(((a * (a * a + 164) >> 4) & 255) | (b * (b * b + 164) >> 4) << 8);
  }
#endif
  return codes;
}
TW_INLINE I low_codes(I x) { return x & all(0x0f0f0f0f); }
TW_INLINE I high_codes(I x) { return (x >> 4) & all(0x0f0f0f0f); }

// Lane i gets the lane with the bit S of its number turned over.
template <int S>
TW_INLINE F partner(F a) {
  F r;
#if defined(__AVX512F__)
  const __m512 x = (__m512)a.p[0];
  if constexpr (S == 8) r.p[0] = (FPart)_mm512_shuffle_f32x4(x, x, 0x4e);
  if constexpr (S == 4) r.p[0] = (FPart)_mm512_shuffle_f32x4(x, x, 0xb1);
  if constexpr (S == 2) r.p[0] = (FPart)_mm512_permute_ps(x, 0x4e);
  if constexpr (S == 1) r.p[0] = (FPart)_mm512_permute_ps(x, 0xb1);
#else
  TW_PARTS {
    const FPart x = a.p[i ^ S / WIDTH];
    if constexpr (S >= WIDTH) r.p[i] = x;
#if defined(__AVX2__)
    if constexpr (S == 4) r.p[i] = (FPart)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
    if constexpr (S == 2) r.p[i] = (FPart)_mm256_permute_ps((__m256)x, 0x4e);
    if constexpr (S == 1) r.p[i] = (FPart)_mm256_permute_ps((__m256)x, 0xb1);
#else
    if constexpr (S == 2) r.p[i] = __builtin_shufflevector(x, x, 2, 3, 0, 1);
    if constexpr (S == 1) r.p[i] = __builtin_shufflevector(x, x, 1, 0, 3, 2);
#endif
  }
#endif
  return r;
}

// Sums where the bit S of a lane's number is 0, and differences where it is 1.
template <int S>
TW_INLINE F butterfly(F a) {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int bit = S == 8 ? 3 : S == 4 ? 2 : S == 2 ? 1 : 0;
  const I signs = (load_bits(numbers) >> bit) << 31;
  return partner<S>(a) + bits_to_float(float_to_bits(a) ^ signs);
}

// Multiplies a group by the Hadamard matrix: its first 32 of n numbers, or if it has fewer, blocks of the largest power
// of two that divides n, padded with zeros. `divided`: by the size of the matrix too.
TW_INLINE void hadamard(const float* x, int64_t n, bool divided, F& a, F& b) {
  if (n >= 32) {
    const F first = load(x), second = load(x + 16), factor = all(divided ? 1.0f / 32 : 1.0f);
    a = butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(first + second)))) * factor;
    b = butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(first - second)))) * factor;
    return;
  }
  float y[32] = {};
  memcpy(y, x, 4 * n);
  const int64_t block = n & -n;
  for (int64_t apart = block / 2; apart; apart /= 2)
    for (int64_t i = 0; i < n; i++) {
      if (i & apart) continue;
      const float one = y[i], other = y[i + apart];
      y[i] = one + other;
      y[i + apart] = one - other;
    }
  for (int64_t i = 0; divided && i < n; i++) y[i] /= (float)block;
  a = load(y);
  b = load(y + 16);
}

// The same in place for a row of `size` numbers in whole groups, those after `size` zeros.
static void hadamard_row(float* x, int64_t size, bool divided) {
  for (int64_t i = 0; i < size; i += SCALED) {
    F a, b;
    hadamard(x + i, size - i, divided, a, b);
    store(x + i, a);
    store(x + i + 16, b);
  }
}

constexpr float middle(int code) { return (float)(LEVELS[code] + LEVELS[code + 1]) / 2; }

#if defined(__AVX512F__)
// Numbers in units of a scale from FIRST on in buckets of 8, of which none has two middles: how many middles are below
// each, and the one that is next.
constexpr float FIRST = -104.5f;
struct Buckets {
  int32_t below[32];
  float next[32], levels[16];
};
constexpr Buckets buckets() {
  Buckets r{};
  for (int i = 0; i < 32; i++) {
    while (r.below[i] < 15 && middle(r.below[i]) < FIRST + 8.0f * (float)i) r.below[i]++;
    r.next[i] = r.below[i] < 15 ? middle(r.below[i]) : 1e38f;
  }
  for (int i = 0; i < 16; i++) r.levels[i] = LEVELS[i];
  return r;
}
static constexpr Buckets BUCKETS = buckets();
#endif

// The nearest levels for numbers in units of the scale, the lower of two: their codes, and `level`.
TW_INLINE I nearest_codes(F x, F& level) {
#if defined(__AVX512F__)
  const F bucket = smaller(larger((x - all(FIRST)) * all(0.125f), all(0.0f)), all(31.0f));
  const __m512i at = (__m512i)to_int(bucket).p[0];
  const F low = load(BUCKETS.next), high = load(BUCKETS.next + 16);
  const I few = load_bits(BUCKETS.below), many = load_bits(BUCKETS.below + 16);
  const __m512 next = _mm512_permutex2var_ps((__m512)low.p[0], at, (__m512)high.p[0]);
  const __m512i below = _mm512_permutex2var_epi32((__m512i)few.p[0], at, (__m512i)many.p[0]);
  const __mmask16 above = _mm512_cmp_ps_mask((__m512)x.p[0], next, _CMP_GT_OQ);
  I code;
  code.p[0] = (IPart)_mm512_mask_add_epi32(below, above, below, _mm512_set1_epi32(1));
  level.p[0] = (FPart)_mm512_permutexvar_ps((__m512i)code.p[0], (__m512)load(BUCKETS.levels).p[0]);
#else
  I code = all(0);
#pragma GCC unroll 15
  for (int k = 0; k < 15; k++) {
    const F limit = all(middle(k));
    TW_PARTS code.p[i] -= (IPart)(x.p[i] > limit.p[i]);
  }
  const I c = code - all(8);
  level = to_float((c * (c * c + all(164))) >> 4);
#endif
  return code;
}

}  // namespace TW_ISA
}  // namespace tw
