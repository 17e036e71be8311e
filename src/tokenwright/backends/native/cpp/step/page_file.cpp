// Unpacks the file of a page. See page_file.h.
#include "step/page_file.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tw {
namespace {

typedef uint64_t Words __attribute__((vector_size(16)));
constexpr int64_t ROW_WORDS = SUMMED / sizeof(Words), WORDS_AT_ONCE = 4;

// Adds a row to the sums of the columns, and returns its own sum.
uint64_t sum_row(const char* row, uint64_t* columns) {
  Words total[WORDS_AT_ONCE] = {};
  for (int64_t i = 0; i < ROW_WORDS; i += WORDS_AT_ONCE) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < WORDS_AT_ONCE; k++) {
      Words x, sum;
      memcpy(&x, row + (i + k) * sizeof(Words), sizeof x);
      memcpy(&sum, columns + (i + k) * 2, sizeof sum);
      sum += x;
      memcpy(columns + (i + k) * 2, &sum, sizeof sum);
      total[k] += x;
    }
  }
  const Words all = total[0] + total[1] + (total[2] + total[3]);
  return all[0] + all[1];
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

void unpack_page(const char* contents, int64_t bytes, int64_t places, const PagePlace* place, uint64_t* sums) {
  const int64_t rows = bytes / SUMMED;
  uint64_t* of_rows = sums + SUMMED / sizeof(uint64_t);
  std::fill(sums, of_rows + rows, 0);
  int64_t at = 0, summed = 0;
  for (int64_t i = 0; i < places; i++)
    for (int64_t piece = 0; piece < place[i].pieces; piece++) {
      char* to = (char*)place[i].address + piece * place[i].apart;
      for (int64_t end = at + place[i].bytes; at < end;) {  // at most a row at a time, while it is in the cache
        const int64_t count = std::min(end - at, SUMMED);
        for (; summed < rows && summed * SUMMED < at + count; summed++)
          of_rows[summed] = sum_row(contents + summed * SUMMED, sums);
        stream(to, contents + at, count);
        at += count;
        to += count;
      }
    }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace tw
