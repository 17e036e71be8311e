// Dot products of four codes of a weight with four of a row, as fast as the instruction set makes them; exact.
#pragma once

#include <cstdint>

#include "api.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Whether `codes_of` gives bytes of all sizes, with 128 added.
static constexpr bool bytes_in(int64_t format) { return format == INT8 || format == TABLE4; }

// The correction to sum(code * x) per unit of sum(x): kernels that read codes as unsigned include their offset.
TW_INLINE int32_t offset(int64_t format) {
#if !defined(TW_VNNI)
  if (bytes_in(format)) return 0;
#endif
  return bytes_in(format) ? -128 : ternary(format) ? -1 : format == INT4 ? -8 : format == INT5 ? -16 : -32;
}

// How many products of `dot` a sum of it may hold, and from it the sum of 32 bits. On AVX2 the sums of 4-bit codes have
// 16 bits: eight times two products of at most 15 * 127, or sixteen times two of at most 3 * 127.
#if defined(__AVX2__) && !defined(TW_VNNI)
constexpr int64_t dots_together(int64_t format) { return format == INT4 ? 8 : ternary(format) ? 16 : 1; }
TW_INLINE I widened(I pairs) {
  TW_PARTS pairs.p[i] = (IPart)_mm256_madd_epi16((__m256i)pairs.p[i], _mm256_set1_epi16(1));
  return pairs;
}
#else
constexpr int64_t dots_together(int64_t) { return 1; }
TW_INLINE I widened(I sums) { return sums; }
#endif

// acc[lane] += the sum of four codes of the lane times four of x; exact.
template <int64_t FORMAT>
TW_INLINE I dot(I acc, I codes, int32_t four) {
#if defined(__AVX512VNNI__)
  acc.p[0] = (IPart)_mm512_dpbusd_epi32((__m512i)acc.p[0], (__m512i)codes.p[0], _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
  const __m256i x = _mm256_set1_epi32(four);
  TW_PARTS acc.p[i] = (IPart)_mm256_dpbusd_avx_epi32((__m256i)acc.p[i], (__m256i)codes.p[i], x);
#elif defined(__AVX2__)
  const __m256i x = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  TW_PARTS {
    __m256i pairs;
    if (bytes_in(FORMAT)) {  // sign_epi8 moves the sign of the code to x: no pair overflows 16 bits
      const __m256i code = _mm256_xor_si256((__m256i)codes.p[i], _mm256_set1_epi8((char)0x80));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
    } else {
      pairs = _mm256_maddubs_epi16((__m256i)codes.p[i], x);
    }
    if (dots_together(FORMAT) > 1)
      acc.p[i] = (IPart)_mm256_add_epi16((__m256i)acc.p[i], pairs);
    else
      acc.p[i] = acc.p[i] + (IPart)_mm256_madd_epi16(pairs, ones);
  }
#elif defined(__aarch64__)
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  TW_PARTS {
    const int8x16_t code = veorq_s8((int8x16_t)codes.p[i], vdupq_n_s8(bytes_in(FORMAT) ? -128 : 0));
#if defined(__ARM_FEATURE_DOTPROD)
    acc.p[i] = (IPart)vdotq_s32((int32x4_t)acc.p[i], code, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(x));
    acc.p[i] = (IPart)vpadalq_s16((int32x4_t)acc.p[i], vpaddq_s16(low, vmull_high_s8(code, x)));
#endif
  }
#elif defined(__SSE2__)
  const __m128i x = _mm_set1_epi32(four), x_even = _mm_srai_epi16(_mm_slli_epi16(x, 8), 8),
                x_odd = _mm_srai_epi16(x, 8);
  TW_PARTS {
    const __m128i code = _mm_xor_si128((__m128i)codes.p[i], _mm_set1_epi8((char)(bytes_in(FORMAT) ? 0x80 : 0)));
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(code, 8), 8), odd = _mm_srai_epi16(code, 8);
    acc.p[i] += (IPart)_mm_madd_epi16(even, x_even) + (IPart)_mm_madd_epi16(odd, x_odd);
  }
#else
  const I x = all(four), code = bytes_in(FORMAT) ? codes ^ all((int32_t)0x80808080) : codes;
  acc = dot16(acc, right16(left16(code, 8), 8), right16(left16(x, 8), 8));
  acc = dot16(acc, right16(code, 8), right16(x, 8));
#endif
  return acc;
}

}  // namespace TW_ISA
}  // namespace tw
