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
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#endif

#ifndef TW_ISA
#error "TW_ISA names the instruction set that this file is compiled for"
#endif

// VNNI multiplies four pairs of bytes, or two of 16 bits, and adds them to a sum of 32 bits, in one instruction.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define TW_VNNI
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
TW_INLINE void store(float* x, F v) {
  TW_PARTS store_part(x + i * WIDTH, v.p[i]);
}
TW_INLINE I load_bits(const void* x) {  // 64 bytes
  I r;
  TW_PARTS r.p[i] = load_part<IPart>((const char*)x + 4 * i * WIDTH);
  return r;
}
TW_INLINE void store_bits(void* x, I v) {
  TW_PARTS store_part((char*)x + 4 * i * WIDTH, v.p[i]);
}
#if defined(__AVX512F__)
#elif defined(__AVX2__)
TW_INLINE __m256i first_lanes(int64_t n) {  // -1 in the first n lanes of eight; n may be negative or above eight
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#else
// Of a part, its first n lanes; n may be negative or above four. Not by memcpy of a variable length: no register
// outlives a call, so sums that are stored after a loop would be in memory within it.
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
// before they add them up, and run out of registers; and a vector that several products need they load for each.
template <typename T>
TW_INLINE void settle(T& a) {
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

#define TW_BINARY(T, op)                \
  TW_INLINE T operator op(T a, T b) {   \
    T r;                                \
    TW_PARTS r.p[i] = a.p[i] op b.p[i]; \
    return r;                           \
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

#if defined(__wasm_simd128__) && !defined(__wasm_relaxed_simd__)
// The double next to `sum` in the direction of its error, if `sum` is inexact and its last bit is 0: the exact sum
// rounded to odd. Rounded further, to a float, it becomes what the exact sum would become.
TW_INLINE v128_t rounded_to_odd(v128_t product, v128_t c, v128_t sum) {
  const v128_t of_c = wasm_f64x2_sub(sum, product);
  const v128_t error = wasm_f64x2_add(wasm_f64x2_sub(product, wasm_f64x2_sub(sum, of_c)), wasm_f64x2_sub(c, of_c));
  const v128_t zero = wasm_f64x2_const_splat(0);
  const v128_t inexact = wasm_v128_or(wasm_f64x2_lt(error, zero), wasm_f64x2_gt(error, zero));
  const v128_t even = wasm_i64x2_eq(wasm_v128_and(sum, wasm_i64x2_const_splat(1)), wasm_i64x2_const_splat(0));
  const v128_t outwards = wasm_i64x2_eq(wasm_f64x2_gt(error, zero), wasm_f64x2_gt(sum, zero));
  const v128_t step = wasm_v128_bitselect(wasm_i64x2_const_splat(1), wasm_i64x2_const_splat(-1), outwards);
  return wasm_i64x2_add(sum, wasm_v128_and(step, wasm_v128_and(inexact, even)));
}
// a b + c of two lanes, rounded once. The product of two floats is exact as a double. The sum is rounded to a double
// and then to a float; this can differ from one rounding only if the double lies halfway between two floats (its last
// 29 bits are a one and zeros), or if the float may be subnormal.
TW_INLINE v128_t fused_pair(v128_t a, v128_t b, v128_t c) {  // doubles; the result is two floats, and zeros
  const v128_t product = wasm_f64x2_mul(a, b);
  v128_t sum = wasm_f64x2_add(product, c);
  const v128_t last = wasm_v128_and(sum, wasm_i64x2_const_splat(0x1fffffff));
  const v128_t halfway = wasm_i64x2_eq(last, wasm_i64x2_const_splat(0x10000000));
  const v128_t small = wasm_f64x2_lt(wasm_f64x2_abs(sum), wasm_f64x2_const_splat(0x1p-125));
  if (__builtin_expect(wasm_v128_any_true(wasm_v128_or(halfway, small)), 0)) sum = rounded_to_odd(product, c, sum);
  return wasm_f32x4_demote_f64x2_zero(sum);
}
TW_INLINE FPart fused(FPart a, FPart b, FPart c) {
  const v128_t x = (v128_t)a, y = (v128_t)b, z = (v128_t)c;
  const v128_t low =
      fused_pair(wasm_f64x2_promote_low_f32x4(x), wasm_f64x2_promote_low_f32x4(y), wasm_f64x2_promote_low_f32x4(z));
#define TW_HIGH(v) wasm_f64x2_promote_low_f32x4(wasm_i32x4_shuffle(v, v, 2, 3, 2, 3))
  const v128_t high = fused_pair(TW_HIGH(x), TW_HIGH(y), TW_HIGH(z));
#undef TW_HIGH
  return (FPart)wasm_i32x4_shuffle(low, high, 0, 1, 4, 5);
}
#elif defined(__wasm_simd128__)
TW_INLINE FPart fused(FPart a, FPart b, FPart c) {  // rounds once only where the host does: see library.cpp
  return (FPart)wasm_f32x4_relaxed_madd((v128_t)a, (v128_t)b, (v128_t)c);
}
#endif

// a b + c and c - a b, rounded once where the instruction set has fused multiply-add (all but SSE), else twice. The
// compiler fuses nothing by itself (-ffp-contract=off), so every compiler computes the same bits.
TW_INLINE F fma(F a, F b, F c) {
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_fmadd_ps((__m512)a.p[0], (__m512)b.p[0], (__m512)c.p[0]);
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (FPart)_mm256_fmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]);
#elif defined(__aarch64__)
  TW_PARTS r.p[i] = (FPart)vfmaq_f32((float32x4_t)c.p[i], (float32x4_t)a.p[i], (float32x4_t)b.p[i]);
#elif defined(__wasm_simd128__)
  TW_PARTS r.p[i] = fused(a.p[i], b.p[i], c.p[i]);
#else
  TW_PARTS r.p[i] = a.p[i] * b.p[i] + c.p[i];
#endif
  return r;
}
TW_INLINE F fnma(F a, F b, F c) {
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_fnmadd_ps((__m512)a.p[0], (__m512)b.p[0], (__m512)c.p[0]);
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (FPart)_mm256_fnmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]);
#elif defined(__aarch64__)
  TW_PARTS r.p[i] = (FPart)vfmsq_f32((float32x4_t)c.p[i], (float32x4_t)a.p[i], (float32x4_t)b.p[i]);
#elif defined(__wasm_simd128__)
  TW_PARTS r.p[i] = fused(-a.p[i], b.p[i], c.p[i]);
#else
  TW_PARTS r.p[i] = c.p[i] - a.p[i] * b.p[i];
#endif
  return r;
}
TW_INLINE float fma(float a, float b, float c) {
#if defined(__AVX2__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#elif defined(__wasm_simd128__)
  return fused(a - (FPart){}, b - (FPart){}, c - (FPart){})[0];
#else
  return a * b + c;
#endif
}
TW_INLINE F larger(F a, F b) {  // b where one is NaN
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_max_ps((__m512)a.p[0], (__m512)b.p[0]);
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (FPart)_mm256_max_ps((__m256)a.p[i], (__m256)b.p[i]);
#else
  TW_PARTS r.p[i] = a.p[i] > b.p[i] ? a.p[i] : b.p[i];
#endif
  return r;
}
TW_INLINE F smaller(F a, F b) {
  F r;
#if defined(__AVX512F__)
  r.p[0] = (FPart)_mm512_min_ps((__m512)a.p[0], (__m512)b.p[0]);
#elif defined(__AVX2__)
  TW_PARTS r.p[i] = (FPart)_mm256_min_ps((__m256)a.p[i], (__m256)b.p[i]);
#else
  TW_PARTS r.p[i] = a.p[i] < b.p[i] ? a.p[i] : b.p[i];
#endif
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
#elif defined(__AVXVNNI__)
  TW_PARTS total.p[i] = (IPart)_mm256_dpwssd_avx_epi32((__m256i)total.p[i], (__m256i)a.p[i], (__m256i)b.p[i]);
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
#elif defined(__wasm_simd128__)
  TW_PARTS total.p[i] += (IPart)wasm_i32x4_dot_i16x8((v128_t)a.p[i], (v128_t)b.p[i]);
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
#elif defined(__AVX2__)
  I r;
  TW_PARTS r.p[i] = (IPart)_mm256_cvtps_epi32((__m256)a.p[i]);
  return r;
#else
  return to_int(rounded(a));
#endif
}

// Sum and maximum of all lanes, always in the same order: a tree reduction by halves.
TW_INLINE float sum(F a) {
#if defined(__AVX512F__)
  const __m512 x = (__m512)a.p[0];
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return two[0] + two[1];
#else
  float x[8];
  TW_PARTS
    if (i < PARTS / 2) store_part(x + i * WIDTH, a.p[i] + a.p[i + PARTS / 2]);
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#endif
}
TW_INLINE float largest(F a) {
#if defined(__AVX512F__)
  const __m512 x = (__m512)a.p[0];
  const __m256 eight = _mm256_max_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x));
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#elif defined(__AVX2__)
  const __m256 eight = _mm256_max_ps((__m256)a.p[0], (__m256)a.p[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float x[8];
  TW_PARTS
    if (i < PARTS / 2) store_part(x + i * WIDTH, a.p[i] > a.p[i + PARTS / 2] ? a.p[i] : a.p[i + PARTS / 2]);
  for (int n = 4; n; n /= 2)
    for (int i = 0; i < n; i++) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
  return x[0];
#endif
}

// A range of lanes: [low, high).
struct Stretch {
  int64_t low, high;
};

// x in the lanes of [low, high), `other` elsewhere; the vector's first lane is `lane`.
TW_INLINE F only(F x, int64_t lane, Stretch read, float other) {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I number = load_bits(numbers);
  const I low = all((int32_t)(read.low - lane)), high = all((int32_t)(read.high - lane));
  const F instead = all(other);
  TW_PARTS x.p[i] = ((number.p[i] >= low.p[i]) & (number.p[i] < high.p[i])) ? x.p[i] : instead.p[i];
  return x;
}

}  // namespace TW_ISA
}  // namespace tw
