// Unpacks the file of a page. See page_file.h.
#include "step/page_file.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tw {
namespace {

constexpr int64_t ROW_WORDS = HASHED / 4;

// Writes the HASHES sums of a row: of the products of its words two by two, after a word of the key was added to each.
// Words have 32 bits, products and sums 64; all of them wrap around (NH of UMAC, RFC 4418).
void hash_row(const char* row, const uint32_t* key, uint64_t* sums) {
#if defined(__SSE2__)
  __m128i total[HASHES] = {};
  for (int64_t i = 0; i < ROW_WORDS; i += 4) {
    const __m128i words = _mm_loadu_si128((const __m128i*)(row + i * 4));
#pragma GCC unroll 2
    for (int64_t k = 0; k < HASHES; k++) {
      const __m128i keyed = _mm_add_epi32(words, _mm_loadu_si128((const __m128i*)(key + k * ROW_WORDS + i)));
      total[k] = _mm_add_epi64(total[k], _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32)));
    }
  }
  for (int64_t k = 0; k < HASHES; k++) {
    uint64_t halves[2];
    _mm_storeu_si128((__m128i*)halves, total[k]);
    sums[k] = halves[0] + halves[1];
  }
#else
  std::fill(sums, sums + HASHES, 0);
  for (int64_t i = 0; i < ROW_WORDS; i += 2) {
    uint32_t words[2];
    memcpy(words, row + i * 4, sizeof words);
    for (int64_t k = 0; k < HASHES; k++) {
      const uint32_t* one = key + k * ROW_WORDS + i;
      sums[k] += (uint64_t)(uint32_t)(words[0] + one[0]) * (uint32_t)(words[1] + one[1]);
    }
  }
#endif
}

// memcpy, but past the caches where the stretch is long: the page is next read after many others, and a write that
// misses the cache would read the line first.
void stream(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t least = 256;
  if (bytes >= least && ((uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes) % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
#pragma GCC unroll 4
      for (int64_t k = i; k < i + 64; k += 16) _mm_stream_si128((__m128i*)(to + k), *(const __m128i*)(from + k));
    }
    return;
  }
#endif
  memcpy(to, from, bytes);
}

}  // namespace

void unpack_page(const char* contents, int64_t bytes, int64_t places, const PagePlace* place, const uint32_t* key,
                 uint64_t* sums) {
  const int64_t rows = bytes / HASHED;
  int64_t at = 0, hashed = 0;
  const auto hash_until = [&](int64_t stop) {
    for (; hashed < rows && hashed * HASHED < stop; hashed++)
      hash_row(contents + hashed * HASHED, key, sums + hashed * HASHES);
  };
  for (int64_t i = 0; i < places; i++)
    for (int64_t piece = 0; piece < place[i].pieces; piece++) {
      char* to = (char*)place[i].address + piece * place[i].apart;
      for (int64_t end = at + place[i].bytes; at < end;) {  // at most a row at a time, while it is in the cache
        const int64_t count = std::min(end - at, HASHED);
        hash_until(at + count);
        stream(to, contents + at, count);
        at += count;
        to += count;
      }
    }
  hash_until(bytes);
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace tw
