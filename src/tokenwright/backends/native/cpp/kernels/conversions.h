// Numbers of other formats than fp32: loads, stores and roundings of sixteen lanes, and of one number.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Sixteen numbers of another format, widened to fp32.
TW_INLINE F load_bf16(const uint16_t* x) {
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16);
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (FPart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(x + 8 * i))), 16);
#else
  TW_PARTS {
    r.p[i] = (FPart)(__builtin_convertvector(load_part<HPart>(x + i * WIDTH), UPart) << 16);
  }
#endif
  return r;
}
TW_INLINE F from_f16(I w) {  // of the low 16 bits of each lane; the others must be zeros
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)w.p[0]));
#elif defined(__AVX2__)
  TW_PARTS {
    const __m256i halves = _mm256_packus_epi32((__m256i)w.p[i], (__m256i)w.p[i]);
    r.p[i] = (FPart)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 8)));
  }
#else
  TW_PARTS {
    const UPart u = (UPart)w.p[i], rest = (u & 0x7fff) << 13;
    // 2^112 is the difference of the exponent biases; the product is correct for subnormals too
    UPart out = (UPart)((FPart)rest * 5.192296858534828e33f);
    out |= (UPart)(rest >= (0x7c00u << 13)) & 0x7f800000u;  // infinities and NaN
    out |= (u & 0x8000) << 16;
    r.p[i] = (FPart)out;
  }
#endif
  return r;
}
TW_INLINE F load_f16(const uint16_t* x) {
#if defined(__AVX512F__)
  F r;
  r.p[0] = (FPart)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
  return r;
#elif defined(__AVX2__)
  F r;
  TW_PARTS r.p[i] = (FPart)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + 8 * i)));
  return r;
#else
  I w;
  TW_PARTS w.p[i] = (IPart) __builtin_convertvector(load_part<HPart>(x + i * WIDTH), UPart);
  return from_f16(w);
#endif
}
TW_INLINE I load_i8(const int8_t* x) {  // intrinsics here and below: compilers generate slower code without them
  I r;
#if defined(__AVX512F__)
  r.p[0] = (IPart)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (IPart)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8 * i)));
#else
  TW_PARTS r.p[i] = __builtin_convertvector(load_part<CPart>(x + i * WIDTH), IPart);
#endif
  return r;
}
TW_INLINE I load_u8(const uint8_t* x) {
  I r;
#if defined(__AVX512F__)
  r.p[0] = (IPart)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (IPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8 * i)));
#else
  TW_PARTS r.p[i] = __builtin_convertvector(load_part<BPart>(x + i * WIDTH), IPart);
#endif
  return r;
}
// Stores the low 16 bits of each lane.
TW_INLINE void store_16(uint16_t* x, I a) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)x, _mm512_cvtepi32_epi16((__m512i)a.p[0]));
#elif defined(__AVX2__)
  a = a & all(0xffff);
  const __m256i halves = _mm256_packus_epi32((__m256i)a.p[0], (__m256i)a.p[1]);
  _mm256_storeu_si256((__m256i*)x, _mm256_permute4x64_epi64(halves, 0xd8));
#elif defined(__SSE2__)
  a = a << 16 >> 16;  // within the range of the signed packing below
  for (int i = 0; i < 4; i += 2)
    _mm_storeu_si128((__m128i*)(x + 4 * i), _mm_packs_epi32((__m128i)a.p[i], (__m128i)a.p[i + 1]));
#else
  TW_PARTS store_part(x + i * WIDTH, __builtin_convertvector((UPart)a.p[i], HPart));
#endif
}
// Stores two vectors of integers that fit in 16 bits.
TW_INLINE void store_16(uint16_t* x, I a, I b) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  _mm512_storeu_si512(x, _mm512_permutex2var_epi16((__m512i)a.p[0], even, (__m512i)b.p[0]));
#elif defined(__AVX2__)
  const __m256i first = _mm256_packs_epi32((__m256i)a.p[0], (__m256i)a.p[1]);
  const __m256i second = _mm256_packs_epi32((__m256i)b.p[0], (__m256i)b.p[1]);
  _mm256_storeu_si256((__m256i*)x, _mm256_permute4x64_epi64(first, 0xd8));
  _mm256_storeu_si256((__m256i*)(x + 16), _mm256_permute4x64_epi64(second, 0xd8));
#else
  store_16(x, a);
  store_16(x + 16, b);
#endif
}
// Stores the low 8 bits of each lane.
TW_INLINE void store_8(uint8_t* x, I a) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)x, _mm512_cvtepi32_epi8((__m512i)a.p[0]));
#elif defined(__SSE2__)
  a = a & all(0xff);
#if defined(__AVX2__)
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a.p[0], (__m256i)a.p[1]), 0xd8);
  const __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
#else
  const __m128i low = _mm_packs_epi32((__m128i)a.p[0], (__m128i)a.p[1]);
  const __m128i high = _mm_packs_epi32((__m128i)a.p[2], (__m128i)a.p[3]);
#endif
  _mm_storeu_si128((__m128i*)x, _mm_packus_epi16(low, high));
#else
  TW_PARTS store_part(x + i * WIDTH, __builtin_convertvector(a.p[i], BPart));
#endif
}
// Stores as bfloat16, rounded to nearest, ties to even; NaN stays NaN.
TW_INLINE void store_bf16(uint16_t* x, F v) {
  const I u = float_to_bits(v);
  I near = u + all(0x7fff) + (u >> 16 & all(1));
  TW_PARTS near.p[i] = v.p[i] == v.p[i] ? near.p[i] : u.p[i] | 0x400000;
  store_16(x, near >> 16);
}
TW_INLINE F from_fp8(I w) {  // e4m3 in the low bytes, zeros above them
  const I rest = w & all(0x7f);
  F f = bits_to_float(rest << 20) * all(1.329227995784916e36f);  // 2^120
  I bits = float_to_bits(f);
  TW_PARTS {
    bits.p[i] |= (rest.p[i] == 0x7f) & 0x7fc00000;
    bits.p[i] |= (w.p[i] & 0x80) << 24;
  }
  return bits_to_float(bits);
}
TW_INLINE F load_fp8(const uint8_t* x) { return from_fp8(load_u8(x)); }

// Scalar conversions, rounded to nearest, ties to even.
TW_INLINE uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);  // NaN stays NaN
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
TW_INLINE uint16_t to_f16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above
  if (rest < 0x38800000) {                                   // below the smallest normal: a multiple of 2^-24
    float small;
    memcpy(&small, &rest, 4);
    small += 0.5f;  // the sum's last place is 2^-24
    uint32_t v;
    memcpy(&v, &small, 4);
    return (uint16_t)(sign | (v - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}
TW_INLINE float from_f16(uint16_t h) {
  uint16_t x[16] = {h};
  float y[16];
  store(y, load_f16(x));
  return y[0];
}

}  // namespace TW_ISA
}  // namespace tw
