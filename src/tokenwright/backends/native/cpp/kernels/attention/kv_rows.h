// The KV memory: rotating heads, and storing rows in each format.
//
// A row here is K or V of one head at one position: `size` numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/attention/int4_groups.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t BLOCK = 64;  // positions per block of decoding and online softmax

TW_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
TW_INLINE int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }  // rounded up to units

TW_INLINE bool scaled(int64_t format) { return format == INT8 || format == INT4; }
TW_INLINE int64_t row_scales(int64_t size) { return (size + SCALED - 1) / SCALED; }
constexpr int64_t row_bytes(int64_t format, int64_t size) {
  switch (format) {
    case F32: return 4 * size;
    case BF16:
    case F16: return 2 * size;
    case INT4: return (size + 1) / 2;
    default: return size;
  }
}

static void rotate(int64_t size, const float* rotation, const float* x, float* y) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = least(16, half - i);
    const F cosine = load(rotation + i, n), sine = load(rotation + half + i, n);
    const F first = load(x + i, n), second = load(x + half + i, n);
    store(y + i, fnma(second, sine, first * cosine), n);
    store(y + half + i, fma(first, sine, second * cosine), n);
  }
}

// The largest |x| of all lanes; infinity ranks above every number, and NaN above infinity.
TW_INLINE float largest_magnitude(F x) {
  const I magnitudes = float_to_bits(magnitude(x));  // without sign, the bits order as the numbers do
#if defined(__AVX512F__)
  const int32_t bits = _mm512_reduce_max_epi32((__m512i)magnitudes.p[0]);
#else
  int32_t each[16], bits = 0;
  store_bits(each, magnitudes);
  for (int i = 0; i < 16; i++) bits = bits > each[i] ? bits : each[i];
#endif
  float r;
  memcpy(&r, &bits, 4);
  return r;
}
TW_INLINE F larger_magnitude(F a, F b) {  // the larger magnitude, in the same order
  I x = float_to_bits(magnitude(a));
  const I y = float_to_bits(magnitude(b));
  TW_PARTS x.p[i] = x.p[i] > y.p[i] ? x.p[i] : y.p[i];
  return bits_to_float(x);
}
TW_INLINE bool finite(float x) { return x - x == 0; }

// The stored scale: the nearest finite float16; NaN if the exact scale is not finite.
TW_INLINE uint16_t stored_scale(float exact) {
  if (!finite(exact)) return 0x7e00;
  return to_f16(exact > 65504.0f ? 65504.0f : exact < -65504.0f ? -65504.0f : exact);
}

// round(x / scale), clamped to [low, high]; 0 if the scale is 0 or NaN.
TW_INLINE I codes_of(F x, float scale, float low, float high) {
  if (!(scale > 0 || scale < 0)) return all(0);
  return nearest(smaller(larger(x / all(scale), all(low)), all(high)));
}

// The exact scale of up to 32 numbers in two vectors, padded with zeros.
TW_INLINE float int8_scale(F a, F b) {
  const float low_half = largest_magnitude(a), high_half = largest_magnitude(b);
  if (!finite(low_half) || !finite(high_half)) return __builtin_nanf("");
  return (low_half > high_half ? low_half : high_half) / 127.0f;
}
TW_INLINE void store_bytes(I a, uint8_t* bytes, int64_t n) {  // the first n lanes
  uint8_t each[16];
  store_8(each, a);
  memcpy(bytes, each, n);
}

TW_INLINE void encode_int8(const float* x, int64_t n, uint8_t* bytes, uint16_t* scale) {
  const F a = load(x, least(n, 16)), b = load(x + 16, most(n - 16, 0));
  *scale = stored_scale(int8_scale(a, b));
  const float step = from_f16(*scale);
  store_bytes(codes_of(a, step, -127, 127), bytes, least(n, 16));
  store_bytes(codes_of(b, step, -127, 127), bytes + 16, most(n - 16, 0));
}

TW_INLINE void encode_int4(const float* x, int64_t n, uint8_t* bytes, uint16_t* scale) {
  F a, b;
  hadamard(x, n, false, a, b);
  const float high = largest(larger(a, b)), low = -largest(larger(all(0.0f) - a, all(0.0f) - b));
  const float extreme = high > -low ? high : low;
  const bool usable = finite(largest_magnitude(a)) && finite(largest_magnitude(b));
  if (!usable) a = b = all(0.0f);
  uint16_t scales[16] = {};
  for (int k = 0; k < SCALES; k++) scales[k] = stored_scale(usable ? extreme / -LEVEL_DIVISORS[k] : __builtin_nanf(""));
  float steps[16], inverses[16], errors[SCALES];
  store(steps, load_f16(scales));
  store(inverses, all(1.0f) / load(steps));
  uint8_t codes[SCALES][32];
  int best = 0;
  for (int k = 0; k < SCALES; k++) {
    const F step = all(steps[k]), inverse = all(steps[k] > 0 || steps[k] < 0 ? inverses[k] : 0.0f);
    F first, second;
    store_8(codes[k], nearest_codes(a * inverse, first));
    store_8(codes[k] + 16, nearest_codes(b * inverse, second));
    first = a - first * step;
    second = b - second * step;
    errors[k] = sum(first * first + second * second);
  }
  for (int k = 1; k < SCALES; k++) best = errors[k] < errors[best] ? k : best;
  *scale = scales[best];
  for (int64_t i = 0; i < (n + 1) / 2; i++) bytes[i] = (uint8_t)(codes[best][2 * i] | codes[best][2 * i + 1] << 4);
}

// To fp8 e4m3, rounded to nearest, ties to even; saturates at 448, and NaN if x is not finite.
TW_INLINE uint8_t to_fp8(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80, rest = u & 0x7fffffff;
  if (rest >= 0x7f800000) return 0x7f;
  if (rest >= 0x43e00000) return (uint8_t)(sign | 0x7e);  // 448
  if (rest < 0x3c800000) {                                // below the smallest normal, 2^-6: a multiple of 2^-9
    float small;
    memcpy(&small, &rest, 4);
    small += 16384.0f;  // one ulp of the sum is 2^-9
    uint32_t v;
    memcpy(&v, &small, 4);
    return (uint8_t)(sign | (v - 0x46800000));
  }
  return (uint8_t)(sign | ((rest + 0x7ffff + (rest >> 20 & 1) - 0x3c000000) >> 20));
}

// Stores one row in the format of a tensor. place: slot times KV heads plus head.
static void encode(const KVTensor& tensor, int64_t size, int64_t place, const float* x) {
  uint8_t* bytes = (uint8_t*)tensor.codes + place * row_bytes(tensor.format, size);
  uint16_t* halves = (uint16_t*)bytes;
  uint16_t* scales = scaled(tensor.format) ? tensor.scales + place * row_scales(size) : nullptr;
  switch (tensor.format) {
    case F32: memcpy(bytes, x, 4 * size); return;
    case BF16: {
      int64_t i = 0;
      for (; i + 16 <= size; i += 16) store_bf16(halves + i, load(x + i));
      for (; i < size; i++) halves[i] = to_bf16(x[i]);
      return;
    }
    case F16:
      for (int64_t i = 0; i < size; i++) halves[i] = to_f16(x[i]);
      return;
    case FP8:
      for (int64_t i = 0; i < size; i++) bytes[i] = to_fp8(x[i]);
      return;
    case INT8:
      for (int64_t i = 0; i < size; i += SCALED) encode_int8(x + i, least(SCALED, size - i), bytes + i, scales++);
      return;
    case INT4:
      for (int64_t i = 0; i < size; i += SCALED) encode_int4(x + i, least(SCALED, size - i), bytes + i / 2, scales++);
      return;
  }
}

// The slot of a position in a part's memory; -1 if it has no page.
TW_INLINE int64_t slot_of(const Part& part, const ChunkRows& chunk, int64_t page_size, int64_t position) {
  const int64_t page = chunk.tables[part.table][position / page_size];
  return page < 0 ? -1 : page * page_size + position % page_size;
}

TW_INLINE const Part& part_of(const KVLayer& layer, int64_t position) {
  int64_t i = 0;
  while (i + 1 < layer.parts && position >= layer.part[i + 1].start) i++;
  return layer.part[i];
}

static void store_kv(const KVLayer& layer, const Heads& heads, const ChunkRows& chunk, int64_t page_size,
                     int64_t position, const float* k, const float* v) {
  const Part& part = part_of(layer, position);
  const int64_t slot = slot_of(part, chunk, page_size, position);
  if (slot < 0) return;
  for (int64_t g = 0; g < heads.kv_heads; g++) {
    encode(part.k, heads.size, slot * heads.kv_heads + g, k + g * heads.size);
    if (heads.values == heads.size) encode(part.v, heads.size, slot * heads.kv_heads + g, v + g * heads.size);
  }
}

}  // namespace TW_ISA
}  // namespace tw
