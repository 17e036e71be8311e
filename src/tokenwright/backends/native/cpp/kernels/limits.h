// The processor's limits, read bandwidth and multiply rate, to compare the kernels with.
//
// The loops are plain intrinsics of their own. Over the vectors of lanes.h they would be as slow as the kernels where a
// compiler makes those slow, and every share of a limit would look fine.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

namespace limits {

#if defined(__AVX512F__)
#define TW_HELD "v"
#elif defined(__SSE2__)
#define TW_HELD "x"
#elif defined(__aarch64__)
#define TW_HELD "w"
#else
#define TW_HELD "m"
#endif

// Has the compiler forget what a register holds, so that it computes every product again. No instruction.
template <typename Register>
TW_INLINE void forget(Register& x) {
  __asm__ volatile("" : "+" TW_HELD(x));
}

// Bits, Floats: a register. CHAINS: independent sums, as many as hide the latency. fused: a b + sum. bytes, nibbles:
// adds products of int8, and of codes below 16 times int8, as fast as the instruction set can.
#if defined(__AVX512F__)
typedef __m512i Bits;
typedef __m512 Floats;
constexpr int CHAINS = 16;
TW_INLINE Bits plus(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
TW_INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
TW_INLINE Bits bytes(Bits a, Bits b, Bits sum) { return _mm512_dpbusd_epi32(sum, a, b); }
TW_INLINE Bits nibbles(Bits a, Bits b, Bits sum) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVX2__)
typedef __m256i Bits;
typedef __m256 Floats;
constexpr int CHAINS = 12;
TW_INLINE Bits plus(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
TW_INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
#if defined(TW_VNNI)
TW_INLINE Bits bytes(Bits a, Bits b, Bits sum) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
TW_INLINE Bits nibbles(Bits a, Bits b, Bits sum) { return bytes(a, b, sum); }
#else
TW_INLINE Bits bytes(Bits a, Bits b, Bits sum) {
  return plus(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
TW_INLINE Bits nibbles(Bits a, Bits b, Bits sum) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
#endif
#elif defined(__SSE2__)
typedef __m128i Bits;
typedef __m128 Floats;
constexpr int CHAINS = 12;
TW_INLINE Bits plus(Bits a, Bits b) { return _mm_add_epi32(a, b); }
TW_INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm_add_ps(sum, _mm_mul_ps(a, b)); }
TW_INLINE Bits bytes(Bits a, Bits b, Bits sum) {  // two instructions of eight products of 16 bits
  const Bits first = _mm_madd_epi16(a, b);
  forget(a);
  return plus(sum, plus(first, _mm_madd_epi16(a, b)));
}
TW_INLINE Bits nibbles(Bits a, Bits b, Bits sum) { return bytes(a, b, sum); }
#elif defined(__aarch64__)
typedef int32x4_t Bits;
typedef float32x4_t Floats;
constexpr int CHAINS = 16;
TW_INLINE Bits plus(Bits a, Bits b) { return vaddq_s32(a, b); }
TW_INLINE Floats fused(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
TW_INLINE Bits bytes(Bits a, Bits b, Bits sum) {
  const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, x, y);
#else
  return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)));
#endif
}
TW_INLINE Bits nibbles(Bits a, Bits b, Bits sum) { return bytes(a, b, sum); }
#else
typedef int32_t Bits __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
constexpr int CHAINS = 8;
TW_INLINE Bits plus(Bits a, Bits b) { return a + b; }
TW_INLINE Floats fused(Floats a, Floats b, Floats sum) { return a * b + sum; }
TW_INLINE Bits bytes(Bits a, Bits b, Bits sum) { return a * b + sum; }
TW_INLINE Bits nibbles(Bits a, Bits b, Bits sum) { return bytes(a, b, sum); }
#endif

TW_INLINE Bits read_one(const uint8_t* x) {
  Bits r;
  memcpy(&r, x, sizeof r);
  return r;
}

}  // namespace limits

// Reads all bytes, with a prefetch `ahead` bytes before each line (0: none); returns the sum of their words.
static uint64_t read(const void* data, int64_t bytes, int64_t ahead) {
  constexpr int64_t line = 64, stretch = 4 * line, each = sizeof(limits::Bits);
  const uint8_t* at = (const uint8_t*)data;
  const int64_t whole = bytes / stretch * stretch;
  limits::Bits sums[4] = {};
  for (int64_t i = 0; i < whole; i += stretch) {
    for (int64_t k = 0; ahead && k < stretch; k += line) __builtin_prefetch(at + i + k + ahead);
#pragma GCC unroll 16
    for (int k = 0; k < stretch / each; k++)
      sums[k % 4] = limits::plus(sums[k % 4], limits::read_one(at + i + k * each));
  }
  const limits::Bits both = limits::plus(limits::plus(sums[0], sums[1]), limits::plus(sums[2], sums[3]));
  uint32_t words[each / 4], word;
  memcpy(words, &both, each);
  uint64_t total = 0;
  for (uint32_t one : words) total += one;
  int64_t i = whole;
  for (; i + 4 <= bytes; i += 4) {
    memcpy(&word, at + i, 4);
    total += word;
  }
  for (; i < bytes; i++) total += at[i];
  return total;
}

// Multiplies and adds `rounds` times, with all operands in registers; returns the number of multiplications.
template <typename Register, Register (*STEP)(Register, Register, Register)>
static int64_t multiply_as(int64_t rounds, int64_t products) {
  Register sums[limits::CHAINS] = {}, a = {}, b = {};
  limits::forget(b);
#pragma GCC unroll 16
  for (int k = 0; k < limits::CHAINS; k++) limits::forget(sums[k]);
  for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 16
    for (int k = 0; k < limits::CHAINS; k++) {
      limits::forget(a);
      sums[k] = STEP(a, b, sums[k]);
    }
#pragma GCC unroll 16
  for (int k = 0; k < limits::CHAINS; k++) limits::forget(sums[k]);
  return rounds * limits::CHAINS * products;
}

static int64_t multiply(int64_t format, int64_t rounds) {
  constexpr int64_t bytes = sizeof(limits::Bits);
  if (format == INT4 || ternary(format)) return multiply_as<limits::Bits, limits::nibbles>(rounds, bytes);
  if (quantised(format)) return multiply_as<limits::Bits, limits::bytes>(rounds, bytes);
  return multiply_as<limits::Floats, limits::fused>(rounds, bytes / 4);
}

#undef TW_HELD

}  // namespace TW_ISA
}  // namespace tw
