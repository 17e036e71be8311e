// Vectors of sixteen lanes, for any register width: one register of 512 bits, two of 256 or four of 128.
//
// Each instruction set has its own namespace, so that the linker never merges code of different instruction sets. Files
// that include this header use no templates of std, because the linker would merge those.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef TW_ISA
#error "TW_ISA names the instruction set that this file is compiled for"
#endif

#define TW_INLINE static inline __attribute__((always_inline))

namespace tw {
namespace TW_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = 16 / WIDTH;

typedef float FPart __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IPart __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t UPart __attribute__((vector_size(4 * WIDTH)));
typedef int16_t SPart __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t HPart __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t BPart __attribute__((vector_size(WIDTH)));
typedef int8_t CPart __attribute__((vector_size(WIDTH)));

struct F {  // fp32
  FPart p[PARTS];
};
struct I {  // int32
  IPart p[PARTS];
};

#define TW_PARTS _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

// Memory is read and written part by part. Where memcpy copies a whole F or I, or the index of a part or lane is not
// known at compile time, GCC keeps the struct, and every sum that it meets, in memory instead of registers.
template <typename Part>
TW_INLINE Part load_part(const void* x) {
  Part r;
  memcpy(&r, x, sizeof r);
  return r;
}
template <typename Part>
TW_INLINE void store_part(void* x, Part v) {
  memcpy(x, &v, sizeof v);
}
TW_INLINE F load(const float* x) {
  F r;
  TW_PARTS r.p[i] = load_part<FPart>(x + i * WIDTH);
  return r;
}
TW_INLINE void store(float* x, F v) { TW_PARTS store_part(x + i * WIDTH, v.p[i]); }
TW_INLINE I load_bits(const void* x) {  // 64 bytes
  I r;
  TW_PARTS r.p[i] = load_part<IPart>((const char*)x + 4 * i * WIDTH);
  return r;
}
TW_INLINE void store_bits(void* x, I v) { TW_PARTS store_part((char*)x + 4 * i * WIDTH, v.p[i]); }
#if defined(__AVX512F__)
#elif defined(__AVX2__)
TW_INLINE __m256i first_lanes(int64_t n) {  // -1 in the first n lanes of eight; n may be negative or above eight
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#else
// Of a part, its first n lanes; n may be negative or above four. Not by memcpy of a variable length: no register outlives
// a call, so sums that are stored after a loop would be in memory within it.
TW_INLINE FPart load_first(const float* x, int64_t n) {
  if (n >= 4) return load_part<FPart>(x);
  return FPart{n > 0 ? x[0] : 0.0f, n > 1 ? x[1] : 0.0f, n > 2 ? x[2] : 0.0f, 0.0f};
}
TW_INLINE void store_first(float* x, FPart v, int64_t n) {
  if (n >= 4) return store_part(x, v);
  if (n > 0) x[0] = v[0];
  if (n > 1) x[1] = v[1];
  if (n > 2) x[2] = v[2];
}
#endif
TW_INLINE F load(const float* x, int64_t n) {  // the first n <= 16 lanes; the others are zeros
#if defined(__AVX512F__)
  F r;
  r.p[0] = (FPart)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x);
  return r;
#elif defined(__AVX2__)
  F r;
  TW_PARTS r.p[i] = (FPart)_mm256_maskload_ps(x + 8 * i, first_lanes(n - 8 * i));
  return r;
#else
  F r;
  TW_PARTS r.p[i] = load_first(x + 4 * i, n - 4 * i);
  return r;
#endif
}
TW_INLINE void store(float* x, F v, int64_t n) {  // the first n <= 16 lanes
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), (__m512)v.p[0]);
#elif defined(__AVX2__)
  TW_PARTS _mm256_maskstore_ps(x + 8 * i, first_lanes(n - 8 * i), (__m256)v.p[i]);
#else
  TW_PARTS store_first(x + 4 * i, v.p[i], n - 4 * i);
#endif
}

// Has a vector computed here and held in registers. Without it compilers collect the products of a long unrolled sum
// before they add them up, and run out of registers.
TW_INLINE void settle(I& a) {
#if defined(__AVX512F__)
  TW_PARTS __asm__ volatile("" : "+v"(a.p[i]));
#elif defined(__SSE2__)
  TW_PARTS __asm__ volatile("" : "+x"(a.p[i]));
#elif defined(__aarch64__)
  TW_PARTS __asm__ volatile("" : "+w"(a.p[i]));
#else
  (void)a;
#endif
}

TW_INLINE F all(float x) {
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_set1_ps(x);
#else
  TW_PARTS r.p[i] = x - (FPart){};
#endif
  return r;
}
TW_INLINE I all(int32_t x) {
  I r;
  TW_PARTS r.p[i] = x - (IPart){};
  return r;
}

#define TW_BINARY(T, op) \
  TW_INLINE T operator op(T a, T b) { \
    T r; \
    TW_PARTS r.p[i] = a.p[i] op b.p[i]; \
    return r; \
  }
TW_BINARY(F, +)
TW_BINARY(F, -)
TW_BINARY(F, *)
TW_BINARY(F, /)
TW_BINARY(I, +)
TW_BINARY(I, -)
TW_BINARY(I, *)
TW_BINARY(I, &)
TW_BINARY(I, |)
TW_BINARY(I, ^)
#undef TW_BINARY

TW_INLINE I operator<<(I a, int n) {
  TW_PARTS a.p[i] = a.p[i] << n;
  return a;
}
TW_INLINE I operator>>(I a, int n) {  // arithmetic
  TW_PARTS a.p[i] = a.p[i] >> n;
  return a;
}

// a b + c, rounded once if the processor has fused multiply-add (the build uses -ffp-contract=fast).
TW_INLINE F fma(F a, F b, F c) {
  F r;
  TW_PARTS r.p[i] = a.p[i] * b.p[i] + c.p[i];
  return r;
}
TW_INLINE F larger(F a, F b) {  // b where a is NaN
  F r;
  TW_PARTS r.p[i] = a.p[i] > b.p[i] ? a.p[i] : b.p[i];
  return r;
}
TW_INLINE F smaller(F a, F b) {
  F r;
  TW_PARTS r.p[i] = a.p[i] < b.p[i] ? a.p[i] : b.p[i];
  return r;
}
TW_INLINE F bits_to_float(I a) {
  F r;
  TW_PARTS r.p[i] = (FPart)a.p[i];
  return r;
}
TW_INLINE I float_to_bits(F a) {
  I r;
  TW_PARTS r.p[i] = (IPart)a.p[i];
  return r;
}
TW_INLINE F magnitude(F a) { return bits_to_float(float_to_bits(a) & all(0x7fffffff)); }
// Each lane of a and b as two int16: total + the sum of both products.
TW_INLINE I dot16(I total, I a, I b) {
#if defined(__AVX512VNNI__)
  total.p[0] = (IPart)_mm512_dpwssd_epi32((__m512i)total.p[0], (__m512i)a.p[0], (__m512i)b.p[0]);
#elif defined(__AVX2__)
  TW_PARTS total.p[i] += (IPart)_mm256_madd_epi16((__m256i)a.p[i], (__m256i)b.p[i]);
#elif defined(__SSE2__)
  TW_PARTS total.p[i] += (IPart)_mm_madd_epi16((__m128i)a.p[i], (__m128i)b.p[i]);
#elif defined(__aarch64__)
  TW_PARTS {
    const int16x8_t x = (int16x8_t)a.p[i], y = (int16x8_t)b.p[i];
    const int32x4_t products = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    total.p[i] += (IPart)vpaddq_s32(products, vmull_high_s16(x, y));
  }
#else
  TW_PARTS total.p[i] += (a.p[i] << 16 >> 16) * (b.p[i] << 16 >> 16) + (a.p[i] >> 16) * (b.p[i] >> 16);
#endif
  return total;
}
// Shifts both int16 of each lane: to the left, and arithmetically to the right.
TW_INLINE I left16(I a, int n) {
  TW_PARTS a.p[i] = (IPart)((SPart)a.p[i] << n);
  return a;
}
TW_INLINE I right16(I a, int n) {
  TW_PARTS a.p[i] = (IPart)((SPart)a.p[i] >> n);
  return a;
}
TW_INLINE F to_float(I a) {
  F r;
  TW_PARTS r.p[i] = __builtin_convertvector(a.p[i], FPart);
  return r;
}
TW_INLINE I to_int(F a) {  // towards zero
  I r;
  TW_PARTS r.p[i] = __builtin_convertvector(a.p[i], IPart);
  return r;
}
// Rounds to the nearest integer, ties to even; |a| below 2^22.
TW_INLINE F rounded(F a) {
#if defined(__AVX512F__)
  a.p[0] = (FPart)_mm512_roundscale_ps((__m512)a.p[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return a;
#elif defined(__AVX2__)
  TW_PARTS a.p[i] = (FPart)_mm256_round_ps((__m256)a.p[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return a;
#else
  const F magic = all(12582912.0f);  // 1.5 * 2^23
  return (a + magic) - magic;
#endif
}

TW_INLINE I nearest(F a) {
#if defined(__AVX512F__)
  I r;
  r.p[0] = (IPart)_mm512_cvt_roundps_epi32((__m512)a.p[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return r;
#else
  return to_int(rounded(a));
#endif
}

// Sum and maximum of all lanes, always in the same order: a tree reduction by halves.
TW_INLINE float sum(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)a.p[0]);
#else
  float x[8];
  TW_PARTS if (i < PARTS / 2) store_part(x + i * WIDTH, a.p[i] + a.p[i + PARTS / 2]);
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#endif
}
TW_INLINE float largest(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.p[0]);
#else
  float x[8];
  TW_PARTS if (i < PARTS / 2) store_part(x + i * WIDTH, a.p[i] > a.p[i + PARTS / 2] ? a.p[i] : a.p[i + PARTS / 2]);
  for (int n = 4; n; n /= 2)
    for (int i = 0; i < n; i++) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
  return x[0];
#endif
}

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
  TW_PARTS w.p[i] = (IPart)__builtin_convertvector(load_part<HPart>(x + i * WIDTH), UPart);
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

// e^x with an error below 2 ulp; 0 below -87.3, infinite above 88.8, NaN for NaN. x must be at most 89.
TW_INLINE F exponential(F x) {
  const F low = all(-87.33654f);
  F r;
#if defined(__AVX512F__)
  const F from = x;
#else
  const F from = larger(x, low);
#endif
  F n = rounded(from * all(1.44269504f));
  F f = fma(n, all(-0.693145752f), from);
  f = fma(n, all(-1.42860677e-6f), f);
  F p = all(1.9875691500e-4f);
  p = fma(p, f, all(1.3981999507e-3f));
  p = fma(p, f, all(8.3334519073e-3f));
  p = fma(p, f, all(4.1665795894e-2f));
  p = fma(p, f, all(1.6666665459e-1f));
  p = fma(p, f, all(5.0000001201e-1f));
  p = fma(p, f * f, f + all(1.0f));
#if defined(__AVX512F__)
  const __mmask16 there = _mm512_cmp_ps_mask((__m512)x.p[0], (__m512)low.p[0], _CMP_NLT_UQ);
  r.p[0] = (FPart)_mm512_maskz_scalef_ps(there, (__m512)p.p[0], (__m512)n.p[0]);
#else
  r = p * bits_to_float((to_int(n) + all(127)) << 23);
  TW_PARTS r.p[i] = x.p[i] < low.p[i] ? (FPart){} : x.p[i] == x.p[i] ? r.p[i] : x.p[i];
#endif
  return r;
}

// tanh(x) with an error below 3 ulp; NaN for NaN. The polynomial is a minimax fit on [0, 0.63] of our own.
TW_INLINE F hyperbolic_tangent(F x) {
  const F size = smaller(all(10.0f), magnitude(x));  // tanh(10) rounds to 1
  const F square = size * size;
  F p = all(-5.666977e-3f);
  p = fma(p, square, all(2.0606177e-2f));
  p = fma(p, square, all(-5.3730007e-2f));
  p = fma(p, square, all(1.3331331e-1f));
  p = fma(p, square, all(-3.3333278e-1f));
  const F near = fma(p * square, size, size), far = all(1.0f) - all(2.0f) / (exponential(size + size) + all(1.0f));
  const F border = all(0.625f);
  F r;
  TW_PARTS r.p[i] = size.p[i] < border.p[i] ? near.p[i] : far.p[i];
  return bits_to_float(float_to_bits(r) | (float_to_bits(x) & all((int32_t)0x80000000)));
}
// cap tanh(x / cap).
TW_INLINE F soft_capped(F x, float cap) { return all(cap) * hyperbolic_tangent(x / all(cap)); }

}  // namespace TW_ISA
}  // namespace tw
