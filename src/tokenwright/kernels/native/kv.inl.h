// What lies in the KV memory: rotating heads, writing rows in each format, and reading a block of positions back.
//
// Included once for each instruction set. A row here is K or V of one head at one position: `size` numbers.
#pragma once

#include "api.h"
#include "lanes.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t BLOCK = 64;       // positions that are decoded, and go through the softmax, together
constexpr int64_t MOST_SIZE = 256;  // numbers of a head
constexpr int64_t MOST_SCALES = MOST_SIZE / SCALED;

TW_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
TW_INLINE int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }  // units, counted in ones

TW_INLINE bool scaled(int64_t format) { return format == INT8 || format == INT4; }
TW_INLINE int64_t row_scales(int64_t size) { return (size + SCALED - 1) / SCALED; }
TW_INLINE int64_t row_bytes(int64_t format, int64_t size) {
  switch (format) {
    case F32: return 4 * size;
    case BF16:
    case F16: return 2 * size;
    case INT4: return (size + 1) / 2;
    default: return size;
  }
}

TW_INLINE int64_t numbers_in_four_bytes(int64_t format) { return 32 / row_bytes(format, 8); }

static void rotate(int64_t size, const float* turn, const float* x, float* y) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = least(16, half - i);
    const F cosine = load(turn + i, n), sine = load(turn + half + i, n);
    const F first = load(x + i, n), second = load(x + half + i, n);
    store(y + i, first * cosine - second * sine, n);
    store(y + half + i, second * cosine + first * sine, n);
  }
}

// ---- Writing ----

// The largest |x| of all lanes; an infinity beats every number and NaN beats that.
TW_INLINE float largest_magnitude(F x) {
  int32_t bits[16];  // in the order of the numbers, for they have no signs
  const I magnitudes = float_to_bits(magnitude(x));
  memcpy(bits, &magnitudes, 64);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) bits[i] = bits[i] > bits[i + n] ? bits[i] : bits[i + n];
  float r;
  memcpy(&r, bits, 4);
  return r;
}
TW_INLINE bool finite(float x) { return x - x == 0; }

// A scale as it is stored: the nearest float16 that is finite; NaN where there is none.
TW_INLINE uint16_t stored_scale(float exact) {
  if (!finite(exact)) return 0x7e00;
  return to_f16(exact > 65504.0f ? 65504.0f : exact < -65504.0f ? -65504.0f : exact);
}

// round(x / scale) within [low, high]; 0 where the scale is 0 or NaN.
TW_INLINE I codes_of(F x, float scale, float low, float high) {
  if (!(scale > 0 || scale < 0)) return all(0);
  return to_int(rounded(smaller(larger(x / all(scale), all(low)), all(high))));
}

// The exact scale of up to 32 numbers in two vectors, zeros behind them.
TW_INLINE float int8_scale(F a, F b) {
  const float low_half = largest_magnitude(a), high_half = largest_magnitude(b);
  if (!finite(low_half) || !finite(high_half)) return __builtin_nanf("");
  return (low_half > high_half ? low_half : high_half) / 127.0f;
}
TW_INLINE float int4_scale(F a, F b) {
  if (!finite(largest_magnitude(a)) || !finite(largest_magnitude(b))) return __builtin_nanf("");
  const float high = largest(larger(a, b)), low = -largest(larger(all(0.0f) - a, all(0.0f) - b));
  return (high > -low ? high : low) / -8.0f;
}

// The low bytes of the lanes, from the first on: n of them.
TW_INLINE void store_bytes(I a, uint8_t* bytes, int64_t n) {
  uint8_t narrow[16];
  TW_PARTS {
    const BPart b = __builtin_convertvector(a.p[i], BPart);
    memcpy(narrow + i * WIDTH, &b, sizeof b);
  }
  memcpy(bytes, narrow, n);
}

TW_INLINE void encode_int8(const float* x, int64_t n, uint8_t* bytes, uint16_t* scale) {
  const F a = load(x, least(n, 16)), b = load(x + 16, most(n - 16, 0));
  *scale = stored_scale(int8_scale(a, b));
  const float step = from_f16(*scale);
  store_bytes(codes_of(a, step, -127, 127), bytes, least(n, 16));
  store_bytes(codes_of(b, step, -127, 127), bytes + 16, most(n - 16, 0));
}

TW_INLINE void encode_int4(const float* x, int64_t n, uint8_t* bytes, uint16_t* scale) {
  const F a = load(x, least(n, 16)), b = load(x + 16, most(n - 16, 0));
  *scale = stored_scale(int4_scale(a, b));
  const float step = from_f16(*scale);
  uint8_t codes[32];
  store_bytes(codes_of(a, step, -8, 7) + all(8), codes, 16);
  store_bytes(codes_of(b, step, -8, 7) + all(8), codes + 16, 16);
  for (int64_t i = 0; i < (n + 1) / 2; i++) bytes[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

// e4m3, the nearest and halves to the even one; the largest where x is beyond it, NaN where x is not finite.
TW_INLINE uint8_t to_fp8(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80, rest = u & 0x7fffffff;
  if (rest >= 0x7f800000) return 0x7f;
  if (rest >= 0x43e00000) return (uint8_t)(sign | 0x7e);  // 448
  if (rest < 0x3c800000) {                                // below the smallest normal, 2^-6: a multiple of 2^-9
    float small;
    memcpy(&small, &rest, 4);
    small += 16384.0f;  // the sum's last place is 2^-9
    uint32_t v;
    memcpy(&v, &small, 4);
    return (uint8_t)(sign | (v - 0x46800000));
  }
  return (uint8_t)(sign | ((rest + 0x7ffff + (rest >> 20 & 1) - 0x3c000000) >> 20));
}

// One row in the format of a side, at one slot and head.
static void encode(const Side& side, int64_t size, int64_t place, const float* x) {
  uint8_t* bytes = (uint8_t*)side.codes + place * row_bytes(side.format, size);
  uint16_t* halves = (uint16_t*)bytes;
  uint16_t* scales = scaled(side.format) ? side.scales + place * row_scales(size) : nullptr;
  switch (side.format) {
    case F32: memcpy(bytes, x, 4 * size); return;
    case BF16:
      for (int64_t i = 0; i < size; i++) halves[i] = to_bf16(x[i]);
      return;
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

// Where a part keeps a position of a text: a slot of its memory, or -1.
TW_INLINE int64_t slot_of(const Part& part, const Span& span, int64_t page_size, int64_t position) {
  const int64_t page = span.tables[part.table][position / page_size];
  return page < 0 ? -1 : page * page_size + position % page_size;
}

TW_INLINE const Part& part_of(const KVLayer& layer, int64_t position) {
  int64_t i = 0;
  while (i + 1 < layer.parts && position >= layer.part[i + 1].start) i++;
  return layer.part[i];
}

static void keep(const KVLayer& layer, const Heads& heads, const Span& span, int64_t page_size, int64_t position,
                 const float* k, const float* v) {
  const Part& part = part_of(layer, position);
  const int64_t slot = slot_of(part, span, page_size, position);
  if (slot < 0) return;
  for (int64_t g = 0; g < heads.kv_heads; g++) {
    encode(part.k, heads.size, slot * heads.kv_heads + g, k + g * heads.size);
    encode(part.v, heads.size, slot * heads.kv_heads + g, v + g * heads.size);
  }
}

// ---- Reading ----

// Positions [start, stop) of one part, at most 64 and none on both sides of a multiple of 64, of one KV head.
// rows: of each its place in the memory (slot times heads plus head); only those in [low, high) are to be read.
struct Block {
  const Part* part;
  int64_t start, stop;
  bool sinks;         // whether these are sinks
  int64_t low, high;  // what is read, counted from `start`
  int64_t places[BLOCK];
};

TW_INLINE F f16_value(I w) {  // of the low halves
  uint16_t halves[16];
  TW_PARTS {
    const HPart h = __builtin_convertvector(w.p[i], HPart);
    memcpy(halves + i * WIDTH, &h, sizeof h);
  }
  return load_f16(halves);
}

// The first n bytes, at most 64, zeros behind them; nothing else is touched.
TW_INLINE I load_some(const uint8_t* x, int64_t n) {
  I r = {};
#if defined(__AVX512F__)
  r.p[0] = (IPart)_mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << n) - 1, x);
#else
  if (n >= 64)
    memcpy(&r, x, 64);
  else
    memcpy(&r, x, n);
#endif
  return r;
}

// Rows and columns of 16 x 16 numbers of 32 bits, exchanged.
TW_INLINE void transpose(I* x) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)x[i].p[0], (__m512i)x[i + 1].p[0]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i].p[0], (__m512i)x[i + 1].p[0]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i c0 = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), c1 = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    const __m512i d0 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    const __m512i d1 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    x[i].p[0] = (IPart)_mm512_shuffle_i32x4(c0, d0, 0x88);
    x[i + 4].p[0] = (IPart)_mm512_shuffle_i32x4(c1, d1, 0x88);
    x[i + 8].p[0] = (IPart)_mm512_shuffle_i32x4(c0, d0, 0xdd);
    x[i + 12].p[0] = (IPart)_mm512_shuffle_i32x4(c1, d1, 0xdd);
  }
#else
  typedef int32_t Four __attribute__((vector_size(16)));
  int32_t out[16][16];
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 16; j += 4) {
      Four a, b, c, d;
      memcpy(&a, (const int32_t*)&x[i] + j, 16);
      memcpy(&b, (const int32_t*)&x[i + 1] + j, 16);
      memcpy(&c, (const int32_t*)&x[i + 2] + j, 16);
      memcpy(&d, (const int32_t*)&x[i + 3] + j, 16);
      const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Four ef = __builtin_shufflevector(a, b, 2, 6, 3, 7), gh = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const Four r[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                         __builtin_shufflevector(ef, gh, 0, 1, 4, 5), __builtin_shufflevector(ef, gh, 2, 3, 6, 7)};
      for (int k = 0; k < 4; k++) memcpy(&out[j + k][i], &r[k], 16);
    }
  memcpy(x, out, sizeof out);
#endif
}

TW_INLINE bool is_read(const Block& block, int64_t lane) { return lane >= block.low && lane < block.high; }

// 64 bytes, from `offset` on, of 16 rows of a block from `first` on: 16 lines of 16 positions by four bytes.
TW_INLINE void load_columns(const Block& block, const uint8_t* codes, int64_t bytes, int64_t first, int64_t offset,
                            I* lines) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    const uint8_t* row = codes + block.places[first + i] * bytes + offset;
    lines[i] = is_read(block, first + i) ? load_some(row, bytes - offset) : all(0);
  }
  transpose(lines);
}

// Scales of 16 positions from `first` on: to[group * stride + position], those of positions that are not read 0.
TW_INLINE void load_scales(const Block& block, const Side& side, int64_t size, int64_t first, float* to,
                           int64_t stride) {
  const int64_t count = row_scales(size);
  for (int64_t g = 0; g < count; g += 2) {
    int32_t both[16] = {};
    for (int i = 0; i < 16; i++)
      if (is_read(block, first + i)) {
        const uint16_t* scales = side.scales + block.places[first + i] * count + g;
        memcpy(&both[i], scales, g + 1 < count ? 4 : 2);
      }
    I x;
    memcpy(&x, both, 64);
    store(to + g * stride, f16_value(x & all(0xffff)));
    if (g + 1 < count) store(to + (g + 1) * stride, f16_value((x >> 16) & all(0xffff)));
  }
}

// The numbers in 16 lines of four bytes each, one under the other: to[number * 64 + position].
TW_INLINE void spread(int64_t format, I x, float* to, const float* scales) {
  switch (format) {
    case F32: store(to, bits_to_float(x)); return;
    case BF16:
      store(to, bits_to_float(x << 16));
      store(to + BLOCK, bits_to_float(x & all(-65536)));
      return;
    case F16:
      store(to, f16_value(x & all(0xffff)));
      store(to + BLOCK, f16_value((x >> 16) & all(0xffff)));
      return;
    case FP8:
      for (int i = 0; i < 4; i++) store(to + i * BLOCK, from_fp8((x >> 8 * i) & all(0xff)));
      return;
    case INT8:
      for (int i = 0; i < 4; i++) store(to + i * BLOCK, to_float((x << (24 - 8 * i)) >> 24) * load(scales));
      return;
    case INT4:
      for (int i = 0; i < 8; i++) store(to + i * BLOCK, to_float(((x >> 4 * i) & all(15)) - all(8)) * load(scales));
      return;
  }
}

// The keys of a block in fp32, turned: keys[number * 64 + position].
static void decode_keys(const Block& block, int64_t size, float* keys) {
  const Side& side = block.part->k;
  const int64_t bytes = row_bytes(side.format, size), packed = numbers_in_four_bytes(side.format);
  float scales[MOST_SCALES * 16];
  for (int64_t first = block.low & -16; first < block.high; first += 16) {
    if (scaled(side.format)) load_scales(block, side, size, first, scales, 16);
    for (int64_t offset = 0; offset < bytes; offset += 64) {
      I lines[16];
      load_columns(block, (const uint8_t*)side.codes, bytes, first, offset, lines);
      for (int64_t i = 0; i < 16 && offset + 4 * i < bytes; i++) {
        const int64_t number = (offset / 4 + i) * packed;
        spread(side.format, lines[i], keys + number * BLOCK + first, scales + number / SCALED * 16);
      }
    }
  }
}

TW_INLINE I load_i4(const uint8_t* x) {  // 16 codes in 8 bytes, the first of two in the lower half
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  Bytes pairs = {};
  memcpy(&pairs, x, 8);
  const Bytes codes = __builtin_shufflevector(pairs & 15, pairs >> 4, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                              7, 23);
  return load_u8((const uint8_t*)&codes) - all(8);
}

// Sixteen numbers of a row from `first` on, at codes that may be read 16 numbers far; without their scales.
TW_INLINE F load_numbers(int64_t format, const uint8_t* codes) {
  switch (format) {
    case F32: return load((const float*)codes);
    case BF16: return load_bf16((const uint16_t*)codes);
    case F16: return load_f16((const uint16_t*)codes);
    case FP8: return load_fp8(codes);
    case INT8: return to_float(load_i8((const int8_t*)codes));
    default: return to_float(load_i4(codes));
  }
}

// The values of a block in fp32: values[position * depth + number], zeros behind the numbers.
static void decode_values(const Block& block, int64_t size, int64_t depth, float* values) {
  const Side& side = block.part->v;
  const int64_t bytes = row_bytes(side.format, size), step = 4 * 16 / numbers_in_four_bytes(side.format);
  for (int64_t lane = block.low; lane < block.high; lane++) {
    const uint8_t* codes = (const uint8_t*)side.codes + block.places[lane] * bytes;
    float scales[16];
    if (scaled(side.format)) {
      uint16_t halves[16] = {};
      memcpy(halves, side.scales + block.places[lane] * row_scales(size), 2 * row_scales(size));
      store(scales, load_f16(halves));
    }
    for (int64_t i = 0; i < size; i += 16) {
      const uint8_t* from = codes + i / 16 * step;
      uint8_t last[64] = {};
      if (i + 16 > size) from = (const uint8_t*)memcpy(last, from, bytes - i / 16 * step);
      F x = load_numbers(side.format, from);
      if (scaled(side.format)) x = x * all(scales[i / SCALED]);
      store(values + lane * depth + i, x);
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
