// What lies in the KV memory: rotating heads, writing rows in each format, and reading a block of positions back.
//
// Included once for each instruction set. A row here is K or V of one head at one position: `size` numbers.
#pragma once

#include "api.h"
#include "lanes.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t BLOCK = 64;  // positions that are decoded, and go through the softmax, together

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
  const I magnitudes = float_to_bits(magnitude(x));  // in the order of the numbers, for they have no signs
#if defined(__AVX512F__)
  const int32_t bits = _mm512_reduce_max_epi32((__m512i)magnitudes.p[0]);
#else
  int32_t each[16], bits = 0;
  memcpy(each, &magnitudes, 64);
  for (int i = 0; i < 16; i++) bits = bits > each[i] ? bits : each[i];
#endif
  float r;
  memcpy(&r, &bits, 4);
  return r;
}
TW_INLINE F larger_magnitude(F a, F b) {  // as a magnitude, in the same order
  I x = float_to_bits(magnitude(a));
  const I y = float_to_bits(magnitude(b));
  TW_PARTS x.p[i] = x.p[i] > y.p[i] ? x.p[i] : y.p[i];
  return bits_to_float(x);
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

TW_INLINE void store_bytes(I a, uint8_t* bytes, int64_t n) {  // of the first n lanes
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
  const F a = load(x, least(n, 16)), b = load(x + 16, most(n - 16, 0));
  *scale = stored_scale(int4_scale(a, b));
  const float step = from_f16(*scale);
  uint8_t codes[32];
  store_8(codes, codes_of(a, step, -8, 7) + all(8));
  store_8(codes + 16, codes_of(b, step, -8, 7) + all(8));
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

// Walks through the rows that a block has for some heads on one side, to have them brought near line by line.
struct Fetch {
  const uint8_t* codes = nullptr;  // of the first of these heads, of place 0
  const int64_t* places = nullptr;
  int64_t row = 0, width = 0;  // bytes of one head, and of all of them
  int64_t lane = 0, high = 0;  // the lane after this one; behind the last
  const uint8_t *at = nullptr, *end = nullptr;

  inline __attribute__((always_inline)) void lines(int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      if (at >= end) {
        if (lane >= high) return;
        at = codes + places[lane++] * row;
        end = at + width;
        at = (const uint8_t*)((uintptr_t)at & ~(uintptr_t)63);
      }
      __builtin_prefetch(at);
      at += 64;
    }
  }
  inline __attribute__((always_inline)) void bytes(int64_t n) { lines((n + 63) / 64); }
};

// Positions [start, stop) of one part, at most 64 and none on both sides of a multiple of 64.
//
// Lanes are counted from `start`; those in [low, high) are read. places: where each lies in the memory (slot times
// heads). Around those that are read, up to whole vectors, stand places of others that are: what is decoded there goes
// nowhere.
struct Block {
  const Part* part;
  int64_t start, stop;
  bool sinks;  // whether these are sinks
  Side k, v;   // of the KV head that is read: what lies in its places
  int64_t low, high;
  int64_t places[BLOCK];
  bool even[BLOCK / 16];  // whether sixteen lanes lie as far apart as neighbours do: `apart` places
  int64_t apart;
  const Block* ahead;        // the block to be read next, to be fetched meanwhile
  Fetch *k_ahead, *v_ahead;  // how far that has come
  int64_t first() const { return low & -16; }
  int64_t last() const { return whole(high, 16); }
};

TW_INLINE Side of_head(const Side& side, int64_t size, int64_t head) {
  const int64_t scales = scaled(side.format) ? head * row_scales(size) : 0;
  return {side.format, (uint8_t*)side.codes + head * row_bytes(side.format, size), side.scales + scales};
}

TW_INLINE Fetch all_of(const Block& block, const Side& side, int64_t size, int64_t head, int64_t heads) {
  const int64_t row = row_bytes(side.format, size);
  const uint8_t* codes = (const uint8_t*)side.codes + head * row;
  return {codes, block.places, row, heads * row, block.low, block.high, nullptr, nullptr};
}

// Rows of a block from some lane on that lie evenly: row i at `at + i * step`.
struct Run {
  const uint8_t* at;
  int64_t step;
};

TW_INLINE F from_f16(I w) {  // of the low halves
#if defined(__AVX512F__)
  F r;
  r.p[0] = (FPart)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)w.p[0]));
  return r;
#else
  uint16_t halves[16];
  store_16(halves, w);
  return load_f16(halves);
#endif
}

// Two whole numbers of 16 bits that lie side by side, in all lanes.
TW_INLINE I all_pairs(const int16_t* x) {
  int32_t both;
  memcpy(&both, x, 4);
  return all(both);
}

// Lanes of even and of odd numbers as the first sixteen numbers and the next; and the other way round.
TW_INLINE void interleave(F& even, F& odd) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512 a = (__m512)even.p[0], b = (__m512)odd.p[0];
  even.p[0] = (FPart)_mm512_permutex2var_ps(a, low, b);
  odd.p[0] = (FPart)_mm512_permutex2var_ps(a, _mm512_or_si512(low, _mm512_set1_epi32(8)), b);
#else
  float numbers[32], of_even[16], of_odd[16];
  store(of_even, even);
  store(of_odd, odd);
  for (int i = 0; i < 16; i++) {
    numbers[2 * i] = of_even[i];
    numbers[2 * i + 1] = of_odd[i];
  }
  even = load(numbers);
  odd = load(numbers + 16);
#endif
}
TW_INLINE void take_apart(F& first, F& second) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 a = (__m512)first.p[0], b = (__m512)second.p[0];
  first.p[0] = (FPart)_mm512_permutex2var_ps(a, even, b);
  second.p[0] = (FPart)_mm512_permutex2var_ps(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), b);
#else
  float numbers[32], of_even[16], of_odd[16];
  store(numbers, first);
  store(numbers + 16, second);
  for (int i = 0; i < 16; i++) {
    of_even[i] = numbers[2 * i];
    of_odd[i] = numbers[2 * i + 1];
  }
  first = load(of_even);
  second = load(of_odd);
#endif
}

// Sixteen bytes of sixteen rows, turned: the four bytes from 4 i on of every row in lanes of x[i].
TW_INLINE void turn(Run rows, I (&x)[4]) {
#if defined(__AVX512F__)
  __m512i row[4];  // of the rows i, i + 4, i + 8 and i + 12
  const auto bytes = [&](int i) __attribute__((always_inline)) {
    return _mm_loadu_si128((const __m128i*)(rows.at + i * rows.step));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    row[i] = _mm512_castsi128_si512(bytes(i));
    row[i] = _mm512_inserti32x4(row[i], bytes(i + 4), 1);
    row[i] = _mm512_inserti32x4(row[i], bytes(i + 8), 2);
    row[i] = _mm512_inserti32x4(row[i], bytes(i + 12), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
  const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
  x[0].p[0] = (IPart)_mm512_unpacklo_epi64(a, c);
  x[1].p[0] = (IPart)_mm512_unpackhi_epi64(a, c);
  x[2].p[0] = (IPart)_mm512_unpacklo_epi64(b, d);
  x[3].p[0] = (IPart)_mm512_unpackhi_epi64(b, d);
#else
  typedef int32_t Four __attribute__((vector_size(16)));
  int32_t out[4][16];
  for (int i = 0; i < 16; i += 4) {
    Four row[4];
    for (int k = 0; k < 4; k++) memcpy(&row[k], rows.at + (i + k) * rows.step, 16);
    const Four ab = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
    const Four cd = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
    const Four ef = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
    const Four gh = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
    const Four r[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                       __builtin_shufflevector(ef, gh, 0, 1, 4, 5), __builtin_shufflevector(ef, gh, 2, 3, 6, 7)};
    for (int k = 0; k < 4; k++) memcpy(&out[k][i], &r[k], 16);
  }
  memcpy(x, out, sizeof out);
#endif
}

// The scales of a side: scales[group * 64 + lane].
static void load_scales(const Block& block, const Side& side, int64_t size, float* scales) {
  const int64_t groups = row_scales(size);
  for (int64_t lane = block.first(); lane < block.last(); lane += 16)
    for (int64_t g = 0; g < groups; g += 2) {
      int32_t both[16] = {};
      for (int i = 0; i < 16; i++) {
        const uint16_t* from = side.scales + block.places[lane + i] * groups + g;
        __builtin_prefetch(side.scales + block.ahead->places[lane + i] * groups + g);
        if (g + 1 < groups)
          memcpy(&both[i], from, 4);
        else
          memcpy(&both[i], from, 2);
      }
      I x;
      memcpy(&x, both, 64);
      store(scales + g * BLOCK + lane, from_f16(x & all(0xffff)));
      if (g + 1 < groups) store(scales + (g + 1) * BLOCK + lane, from_f16((x >> 16) & all(0xffff)));
    }
}

// Keys lie in lines of 64 positions. Of native formats and fp8 a line is one number in fp32. Of INT8 and INT4 it is two
// codes of 16 bits: in each four bytes those numbers go together that stand half of them apart.
constexpr int64_t lines_in_four_bytes(int64_t format) {
  return format == F32 ? 1 : format == BF16 || format == F16 || format == INT8 ? 2 : 4;
}

// What four bytes of sixteen rows hold: lines of them.
template <int64_t FORMAT>
TW_INLINE void spread(I x, F (&lines)[lines_in_four_bytes(FORMAT)]) {
  if constexpr (FORMAT == F32) lines[0] = bits_to_float(x);
  if constexpr (FORMAT == BF16) {
    lines[0] = bits_to_float(x << 16);
    lines[1] = bits_to_float(x & all(-65536));
  }
  if constexpr (FORMAT == F16) {
    lines[0] = from_f16(x & all(0xffff));
    lines[1] = from_f16((x >> 16) & all(0xffff));
  }
  if constexpr (FORMAT == FP8)
    for (int i = 0; i < 4; i++) lines[i] = from_fp8((x >> 8 * i) & all(0xff));
  if constexpr (FORMAT == INT8)
    for (int i = 0; i < 2; i++) {
      const I codes = (x >> 8 * i) & all(0x00ff00ff);  // a sign of 8 bits is worth 256
      lines[i] = bits_to_float(minus16(codes, (codes & all(0x00800080)) << 1));
    }
  if constexpr (FORMAT == INT4)
    for (int i = 0; i < 4; i++)
      lines[i] = bits_to_float(minus16((x >> 4 * i) & all(0x000f000f), all(0x00080008)));
}

// Sixteen keys of a block, from a lane on, taken sixteen bytes at a time: of each row 16 bytes, turned. What comes next
// is fetched on the way. Rows that do not lie evenly, or end amid sixteen bytes, are copied first.
TW_INLINE void turned_keys(const Block& block, int64_t bytes, int64_t lane, int64_t offset, I (&x)[4]) {
  const uint8_t* codes = (const uint8_t*)block.k.codes + offset;
  block.k_ahead->lines(4);
  if (block.even[lane / 16] && bytes % 16 == 0)
    return turn({codes + block.places[lane] * bytes, block.apart * bytes}, x);
  uint8_t copy[16][16] = {};
  for (int64_t i = 0; i < 16; i++) memcpy(copy[i], codes + block.places[lane + i] * bytes, least(16, bytes - offset));
  turn({copy[0], 16}, x);
}

template <int64_t FORMAT>
static void decode_keys_of(const Block& block, int64_t size, float* keys) {
  constexpr int64_t count = lines_in_four_bytes(FORMAT);
  const int64_t bytes = row_bytes(FORMAT, size);
  for (int64_t lane = block.first(); lane < block.last(); lane += 16) {
    float* to = keys + lane;
    for (int64_t offset = 0; offset < bytes; offset += 16) {
      I x[4];
      turned_keys(block, bytes, lane, offset, x);
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; i++) {
        F lines[count];
        spread<FORMAT>(x[i], lines);
        for (int64_t k = 0; k < count; k++, to += BLOCK) store(to, lines[k]);
      }
    }
  }
}

static void decode_keys(const Block& block, int64_t size, float* keys) {
  switch (block.k.format) {
    case F32: return decode_keys_of<F32>(block, size, keys);
    case BF16: return decode_keys_of<BF16>(block, size, keys);
    case F16: return decode_keys_of<F16>(block, size, keys);
    case FP8: return decode_keys_of<FP8>(block, size, keys);
    case INT8: return decode_keys_of<INT8>(block, size, keys);
    case INT4: return decode_keys_of<INT4>(block, size, keys);
  }
}

// Values in fp32 lie in rows: values[lane * depth + number], zeros behind the numbers.
template <int64_t FORMAT>
TW_INLINE F load_numbers(const uint8_t* x) {
  if (FORMAT == F32) return load((const float*)x);
  if (FORMAT == BF16) return load_bf16((const uint16_t*)x);
  if (FORMAT == F16) return load_f16((const uint16_t*)x);
  return load_fp8(x);
}

template <int64_t FORMAT>
static void decode_values_of(const Block& block, int64_t size, int64_t depth, float* values) {
  const uint8_t* codes = (const uint8_t*)block.v.codes;
  const int64_t bytes = row_bytes(FORMAT, size), step = row_bytes(FORMAT, 16);
  for (int64_t lane = block.low; lane < block.high; lane++) {
    const uint8_t* from = codes + block.places[lane] * bytes;
    block.v_ahead->bytes(bytes);
    int64_t i = 0;
    for (; i + 16 <= size; i += 16, from += step) store(values + lane * depth + i, load_numbers<FORMAT>(from));
    if (i == size) continue;
    uint8_t last[64] = {};
    memcpy(last, from, row_bytes(FORMAT, size - i));
    store(values + lane * depth + i, load_numbers<FORMAT>(last));
  }
}

// The codes of values lie in rows for two positions each, in the two halves of a number: values[lane / 2 * depth +
// column]. A column is a number of INT8; of INT4, in each 32, those with even places come before those with odd ones.
TW_INLINE I load_bytes(const uint8_t* x, int64_t n) {  // the first n, at most 16, zeros behind them
  if (n >= 16) return load_u8(x);
  uint8_t some[16] = {};
  memcpy(some, x, n);
  return load_u8(some);
}

static void decode_int8_values(const Block& block, int64_t size, int64_t depth, float* values) {
  const uint8_t* codes = (const uint8_t*)block.v.codes;
  for (int64_t lane = block.low & -2; lane < block.high; lane += 2) {
    const uint8_t *a = codes + block.places[lane] * size, *b = codes + block.places[lane + 1] * size;
    block.v_ahead->bytes(2 * size);
    for (int64_t i = 0; i < size; i += 16) {
      const I both = load_bytes(a + i, size - i) | load_bytes(b + i, size - i) << 16;
      const I signs = (both & all(0x00800080)) << 1;
      store(values + lane / 2 * depth + i, bits_to_float(minus16(both, signs)));
    }
  }
}

static void decode_int4_values(const Block& block, int64_t size, int64_t depth, float* values) {
  const uint8_t* codes = (const uint8_t*)block.v.codes;
  const int64_t bytes = row_bytes(INT4, size);
  for (int64_t lane = block.low & -2; lane < block.high; lane += 2) {
    const uint8_t *a = codes + block.places[lane] * bytes, *b = codes + block.places[lane + 1] * bytes;
    block.v_ahead->bytes(2 * bytes);
    for (int64_t i = 0; i < bytes; i += 16) {
      const I both = load_bytes(a + i, bytes - i) | load_bytes(b + i, bytes - i) << 16;
      float* to = values + lane / 2 * depth + 2 * i;
      store(to, bits_to_float(minus16(both & all(0x000f000f), all(0x00080008))));
      store(to + 16, bits_to_float(minus16((both >> 4) & all(0x000f000f), all(0x00080008))));
    }
  }
}

static void decode_values(const Block& block, int64_t size, int64_t depth, float* values) {
  switch (block.v.format) {
    case F32: return decode_values_of<F32>(block, size, depth, values);
    case BF16: return decode_values_of<BF16>(block, size, depth, values);
    case F16: return decode_values_of<F16>(block, size, depth, values);
    case FP8: return decode_values_of<FP8>(block, size, depth, values);
    case INT8: return decode_int8_values(block, size, depth, values);
    case INT4: return decode_int4_values(block, size, depth, values);
  }
}

}  // namespace TW_ISA
}  // namespace tw
