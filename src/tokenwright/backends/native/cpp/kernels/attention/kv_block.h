// A block of positions in the KV memory: where its rows are, their prefetch, and loads of sixteen rows at once.
#pragma once

#include <cstdint>

#include "api.h"
#include "kernels/attention/kv_rows.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

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
  bool sinks;     // whether these are sinks
  KVTensor k, v;  // the tensors, offset to the current KV head
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

#if !defined(__AVX512F__)
// Of two registers: their first or last numbers in turn, and the numbers at even or odd places of both.
#if defined(__AVX2__)
TW_INLINE FPart first_in_turn(FPart a, FPart b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
TW_INLINE FPart last_in_turn(FPart a, FPart b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
TW_INLINE FPart even_numbers(FPart a, FPart b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
TW_INLINE FPart odd_numbers(FPart a, FPart b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
#else
TW_INLINE FPart first_in_turn(FPart a, FPart b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
TW_INLINE FPart last_in_turn(FPart a, FPart b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
TW_INLINE FPart even_numbers(FPart a, FPart b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
TW_INLINE FPart odd_numbers(FPart a, FPart b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
#endif
#endif

// interleave: from vectors of the even and the odd numbers to the first and the last sixteen. take_apart: the inverse.
TW_INLINE void interleave(F& even, F& odd) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512 a = (__m512)even.p[0], b = (__m512)odd.p[0];
  even.p[0] = (FPart)_mm512_permutex2var_ps(a, low, b);
  odd.p[0] = (FPart)_mm512_permutex2var_ps(a, _mm512_or_si512(low, _mm512_set1_epi32(8)), b);
#else
  FPart both[2 * PARTS];
  TW_PARTS {
    both[2 * i] = first_in_turn(even.p[i], odd.p[i]);
    both[2 * i + 1] = last_in_turn(even.p[i], odd.p[i]);
  }
  TW_PARTS {
    even.p[i] = both[i];
    odd.p[i] = both[PARTS + i];
  }
#endif
}
TW_INLINE void take_apart(F& first, F& second) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 a = (__m512)first.p[0], b = (__m512)second.p[0];
  first.p[0] = (FPart)_mm512_permutex2var_ps(a, even, b);
  second.p[0] = (FPart)_mm512_permutex2var_ps(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), b);
#else
  FPart both[2 * PARTS];
  TW_PARTS {
    both[i] = first.p[i];
    both[PARTS + i] = second.p[i];
  }
  TW_PARTS {
    first.p[i] = even_numbers(both[2 * i], both[2 * i + 1]);
    second.p[i] = odd_numbers(both[2 * i], both[2 * i + 1]);
  }
#endif
}

#if !defined(__AVX512F__)
// The steps of a transposition within each 128 bits: of two rows the first or last two numbers in turn, and of two such
// pairs the first or last halves. A register of 256 bits has a row in its lower and the fourth row behind it in its
// upper half.
#if defined(__AVX2__)
TW_INLINE IPart transposed_row(const uint8_t* row, const uint8_t* fourth) {
  const __m128i low = _mm_loadu_si128((const __m128i*)row), high = _mm_loadu_si128((const __m128i*)fourth);
  return (IPart)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
TW_INLINE IPart low_pairs(IPart a, IPart b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
TW_INLINE IPart high_pairs(IPart a, IPart b) { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
TW_INLINE IPart low_halves(IPart a, IPart b) { return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
TW_INLINE IPart high_halves(IPart a, IPart b) { return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
#else
TW_INLINE IPart transposed_row(const uint8_t* row, const uint8_t*) { return load_part<IPart>(row); }
TW_INLINE IPart low_pairs(IPart a, IPart b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
TW_INLINE IPart high_pairs(IPart a, IPart b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
TW_INLINE IPart low_halves(IPart a, IPart b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
TW_INLINE IPart high_halves(IPart a, IPart b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }
#endif
#endif

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
  TW_PARTS {
    IPart row[4];
    const uint8_t* at = rows.at + i * WIDTH * rows.step;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) row[k] = transposed_row(at + k * rows.step, at + (k + 4) * rows.step);
    const IPart ab = low_pairs(row[0], row[1]), cd = low_pairs(row[2], row[3]);
    const IPart ef = high_pairs(row[0], row[1]), gh = high_pairs(row[2], row[3]);
    x[0].p[i] = low_halves(ab, cd);
    x[1].p[i] = high_halves(ab, cd);
    x[2].p[i] = low_halves(ef, gh);
    x[3].p[i] = high_halves(ef, gh);
  }
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
  I r;  // assembled in registers: a wide load after narrow stores would stall on store forwarding
#if defined(__AVX512F__)
  r.p[0] = (IPart)_mm512_setr_epi32(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
                                    x[13], x[14], x[15]);
#elif defined(__AVX2__)
  r.p[0] = (IPart)_mm256_setr_epi32(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
  r.p[1] = (IPart)_mm256_setr_epi32(x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]);
#else
  TW_PARTS r.p[i] = IPart{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
#endif
  return r;
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

}  // namespace TW_ISA
}  // namespace tw
