// The KV memory: rotating heads, storing rows in each format, and reading a block of positions back.
//
// Included once per instruction set. A row here is K or V of one head at one position: `size` numbers.
#pragma once

#include "api.h"
#include "lanes.h"

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
    store(y + i, first * cosine - second * sine, n);
    store(y + half + i, second * cosine + first * sine, n);
  }
}

// ---- Writing ----

// The largest |x| of all lanes; infinity ranks above every number, and NaN above infinity.
TW_INLINE float largest_magnitude(F x) {
  const I magnitudes = float_to_bits(magnitude(x));  // without sign, the bits order as the numbers do
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
TW_INLINE float int4_scale(F a, F b) {
  if (!finite(largest_magnitude(a)) || !finite(largest_magnitude(b))) return __builtin_nanf("");
  const float high = largest(larger(a, b)), low = -largest(larger(all(0.0f) - a, all(0.0f) - b));
  return (high > -low ? high : low) / -8.0f;
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
  const F a = load(x, least(n, 16)), b = load(x + 16, most(n - 16, 0));
  *scale = stored_scale(int4_scale(a, b));
  const float step = from_f16(*scale);
  uint8_t codes[32];
  store_8(codes, codes_of(a, step, -8, 7) + all(8));
  store_8(codes + 16, codes_of(b, step, -8, 7) + all(8));
  for (int64_t i = 0; i < (n + 1) / 2; i++) bytes[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
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

// ---- Reading ----

// Prefetches the rows of a block for some heads in one tensor, cache line by cache line, as the kernel reads an equal
// number of bytes of another block. Rows that share a line count as separate lines: of small rows (scales) it
// prefetches the first ones, and the hardware prefetcher follows. It is inlined, because a call would spill the sums in
// registers.
struct Fetch {
  const uint8_t* first = nullptr;  // the first of these heads at place 0
  const int64_t* places = nullptr;
  int64_t row = 0, width = 0;  // bytes of one head, and of all these heads
  int64_t lane = 0, high = 0;  // the next lane; the end of the lanes
  const uint8_t *at = nullptr, *end = nullptr;

  // Call after reading `bytes` bytes of one head.
  inline __attribute__((always_inline)) void after(int64_t bytes) {
    for (int64_t left = (bytes + 63) / 64; left; left--) {
      if (at >= end) {
        if (lane >= high) return;
        at = first + places[lane++] * row;
        end = at + width;
        at = (const uint8_t*)((uintptr_t)at & ~(uintptr_t)63);
      }
      __builtin_prefetch(at);
      at += 64;
    }
  }
};
struct Ahead {
  Fetch k, v, k_scales, v_scales;
};

// Positions [start, stop) of one part, at most 64, which do not cross a multiple of 64.
//
// Lanes count from `start`; the kernel reads lanes [low, high). places: the place of each lane in the memory (slot
// times heads). The lanes around these, up to whole vectors, repeat valid places; the kernel ignores their values.
struct Block {
  const Part* part;
  int64_t start, stop;
  bool sinks;  // whether these are sinks
  KVTensor k, v;   // the tensors, offset to the current KV head
  int64_t low, high;
  int64_t places[BLOCK];
  bool even[BLOCK / 16];  // whether the places of sixteen lanes are evenly spaced, `apart` places from one to the next
  int64_t apart;
  Ahead* ahead;  // the prefetch of the next block
  int64_t first() const { return low & -16; }
  int64_t last() const { return whole(high, 16); }
};

TW_INLINE KVTensor of_head(const KVTensor& tensor, int64_t size, int64_t head) {
  const int64_t scales = scaled(tensor.format) ? head * row_scales(size) : 0;
  return {tensor.format, (uint8_t*)tensor.codes + head * row_bytes(tensor.format, size), tensor.scales + scales};
}

TW_INLINE Fetch fetch_of(const Block& block, const void* first, int64_t row, int64_t head, int64_t heads) {
  Fetch f;
  f.first = (const uint8_t*)first + head * row;
  f.places = block.places;
  f.row = row;
  f.width = heads * row;
  f.lane = block.low;
  f.high = block.high;
  return f;
}

// Starts the prefetch of a block for some heads; `shared`: of rows that are keys and values.
static void begin_fetch(const Block& block, int64_t size, int64_t head, int64_t heads, bool shared, Ahead& ahead) {
  const KVTensor &k = block.part->k, &v = block.part->v;
  const int64_t scales = 2 * row_scales(size);
  ahead.k = fetch_of(block, k.codes, row_bytes(k.format, size), head, heads);
  ahead.v = shared ? Fetch() : fetch_of(block, v.codes, row_bytes(v.format, size), head, heads);
  ahead.k_scales = scaled(k.format) ? fetch_of(block, k.scales, scales, head, heads) : Fetch();
  ahead.v_scales = scaled(v.format) && !shared ? fetch_of(block, v.scales, scales, head, heads) : Fetch();
}

// Evenly spaced rows of a block: row i at `at + i * step`.
struct Run {
  const uint8_t* at;
  int64_t step;
};

TW_INLINE F from_f16(I w) {  // of the low 16 bits of each lane
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

// interleave: from vectors of the even and the odd numbers to the first and the last sixteen. take_apart: the inverse.
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

// Transposes sixteen bytes of sixteen rows: lane r of x[i] holds bytes [4 i, 4 i + 4) of row r.
TW_INLINE void transpose(Run rows, I (&x)[4]) {
#if defined(__AVX512F__)
  __m512i row[4];  // row[i]: the rows i, i + 4, i + 8 and i + 12
  const uint8_t* at[4] = {rows.at, rows.at + 4 * rows.step, rows.at + 8 * rows.step, rows.at + 12 * rows.step};
  const int64_t places[4] = {0, rows.step, 2 * rows.step, 3 * rows.step};
  const auto bytes = [&](int i, int k) __attribute__((always_inline)) {
    return _mm_loadu_si128((const __m128i*)(at[k] + places[i]));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    row[i] = _mm512_castsi128_si512(bytes(i, 0));
    row[i] = _mm512_inserti32x4(row[i], bytes(i, 1), 1);
    row[i] = _mm512_inserti32x4(row[i], bytes(i, 2), 2);
    row[i] = _mm512_inserti32x4(row[i], bytes(i, 3), 3);
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

// Two adjacent scales of each of sixteen positions.
TW_INLINE I two_scales(const uint16_t* scales, const Block& block, int64_t lane, int64_t groups) {
  int32_t x[16];
  if (block.even[lane / 16]) {
    const uint16_t* at = scales + block.places[lane] * groups;
    const int64_t step = block.apart * groups;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) memcpy(&x[i], at + i * step, 4);
  } else {
    for (int i = 0; i < 16; i++) memcpy(&x[i], scales + block.places[lane + i] * groups, 4);
  }
#if defined(__AVX512F__)  // assembled in registers: a wide load after narrow stores would stall on store forwarding
  I r;
  r.p[0] = (IPart)_mm512_setr_epi32(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
                                    x[13], x[14], x[15]);
  return r;
#else
  I r;
  memcpy(&r, x, 64);
  return r;
#endif
}

// Loads the scales of a block of a tensor: scales[group * 64 + lane].
static void load_scales(const Block& block, const KVTensor& tensor, int64_t size, Fetch& ahead, float* scales) {
  const int64_t groups = row_scales(size);
  for (int64_t lane = block.first(); lane < block.last(); lane += 16) {
    float* to = scales + lane;
    ahead.after(16 * 2 * groups);
    for (int64_t g = 0; g + 1 < groups; g += 2) {
      const I both = two_scales(tensor.scales + g, block, lane, groups);
      store(to + g * BLOCK, from_f16(both & all(0xffff)));
      store(to + (g + 1) * BLOCK, from_f16((both >> 16) & all(0xffff)));
    }
    if (groups % 2 == 0) continue;
    uint16_t last[16];
    for (int i = 0; i < 16; i++) last[i] = tensor.scales[(block.places[lane + i] + 1) * groups - 1];
    store(to + (groups - 1) * BLOCK, load_f16(last));
  }
}

// Decoded keys form lines of 64 positions. For native formats and fp8 a line is one number of a head, in fp32. For INT8
// and INT4 it is a pair of codes of 16 bits each: if four stored bytes hold 2 n numbers, their line i pairs the numbers
// i and i + n.
constexpr int64_t lines_in_four_bytes(int64_t format) {
  return format == F32 ? 1 : format == BF16 || format == F16 || format == INT8 ? 2 : 4;
}

// Converts 4-bit codes with offset 8 to signed 4-bit numbers.
TW_INLINE I signed_nibbles(I x) {
  const I high = all((int32_t)0x88888888);
  TW_PARTS x.p[i] = x.p[i] ^ high.p[i];
  return x;
}

// Decodes four bytes of sixteen rows to lines.
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
  if constexpr (FORMAT == INT8) {
    lines[0] = bits_to_float(right16(left16(x, 8), 8));
    lines[1] = bits_to_float(right16(x, 8));
  }
  if constexpr (FORMAT == INT4) {
    x = signed_nibbles(x);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) lines[i] = bits_to_float(right16(left16(x, 12 - 4 * i), 12));
  }
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
        F lines[count];
        spread<FORMAT>(x[i], lines);
        for (int64_t k = 0; k < count; k++, to += BLOCK) store(to, lines[k]);
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
    const I both = signed_nibbles(load_u8(a) | load_u8(b) << 16);
    x[0] = right16(left16(both, 12), 12);
    x[1] = right16(left16(both, 8), 12);
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
