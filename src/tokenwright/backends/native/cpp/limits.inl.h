// The processor's limits, read bandwidth and multiply rate, to compare the kernels with.

namespace tw {
namespace TW_ISA {

// Reads all bytes, as the kernels of one row read int8; returns the sum of their words.
static uint64_t read(const void* data, int64_t bytes) {
  constexpr int64_t stretch = 4 * LINE;
  const uint8_t* at = (const uint8_t*)data;
  const int64_t whole = bytes / stretch * stretch, ahead = ahead_of<INT8, 1>();
  I sums[4] = {};
  for (int64_t i = 0; i < whole; i += stretch)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const uint8_t* line = at + i + k * LINE;
      if (ahead) __builtin_prefetch(line + ahead);
      sums[k] = sums[k] + load_line(line);
    }
  I all_sums = {};
  for (int k = 0; k < 4; k++) all_sums = all_sums + sums[k];
  uint32_t each[16], word;
  memcpy(each, &all_sums, sizeof each);
  uint64_t total = 0;
  for (int k = 0; k < 16; k++) total += each[k];
  int64_t i = whole;
  for (; i + 4 <= bytes; i += 4) {
    memcpy(&word, at + i, 4);
    total += word;
  }
  for (; i < bytes; i++) total += at[i];
  return total;
}

// Multiplies and adds as the kernels of a format do, with as many rows and blocks at a time, and operands in the L1
// cache; returns the number of multiplications.
template <bool INTEGER>
static int64_t multiply_as(int64_t rounds) {
  constexpr int rows = MOST_ROWS, blocks = BLOCKS;
  alignas(64) uint8_t weights[blocks][LINE], inputs[rows][4], total[LINE];
  memset(weights, 1, sizeof weights);
  memset(inputs, 0, sizeof inputs);
  F numbers[rows][blocks] = {};
  I whole[rows][blocks] = {};
  for (int64_t i = 0; i < rounds; i++) {
    const void *w = weights, *x = inputs;
    __asm__ volatile("" : "+r"(w), "+r"(x) : : "memory");  // forces a reload; the sums stay in registers
    I lines[blocks];
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) lines[b] = load_line((const uint8_t*)w + b * LINE);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      int32_t four;
      memcpy(&four, (const uint8_t*)x + 4 * r, 4);
#pragma GCC unroll 2
      for (int b = 0; b < blocks; b++)
        if constexpr (INTEGER)
          whole[r][b] = dot<INT8>(whole[r][b], lines[b], four);
        else
          numbers[r][b] = fma(bits_to_float(lines[b]), bits_to_float(all(four)), numbers[r][b]);
    }
  }
  F sum = {};
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) sum = sum + (INTEGER ? to_float(whole[r][b]) : numbers[r][b]);
  memcpy(total, &sum, LINE);
  __asm__ volatile("" : : "r"(total) : "memory");
  return rounds * rows * blocks * LANES * (INTEGER ? 4 : 1);
}

static int64_t multiply(int64_t format, int64_t rounds) {
  return quantised(format) ? multiply_as<true>(rounds) : multiply_as<false>(rounds);
}

}  // namespace TW_ISA
}  // namespace tw
