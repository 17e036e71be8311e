// What the processor can do at most, to hold the kernels against.

namespace tw {
namespace TW_ISA {

// Reads all of it, from two places at a time and asking for what comes as the kernels do; returns what its words add up
// to.
static uint64_t read(const void* data, int64_t bytes) {
  constexpr int64_t stretch = 4 * LINE;
  const uint8_t* at = (const uint8_t*)data;
  const int64_t half = bytes / 2 / stretch * stretch;
  I sums[2][4] = {};
  for (int64_t i = 0; i < half; i += stretch)
#pragma GCC unroll 2
    for (int which = 0; which < 2; which++)
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        const uint8_t* line = at + which * half + i + k * LINE;
        __builtin_prefetch(line + AHEAD);
        sums[which][k] = sums[which][k] + load_line(line);
      }
  I all_sums = {};
  for (int k = 0; k < 4; k++) all_sums = all_sums + (sums[0][k] + sums[1][k]);
  uint32_t each[16], word;
  memcpy(each, &all_sums, sizeof each);
  uint64_t total = 0;
  for (int k = 0; k < 16; k++) total += each[k];
  int64_t i = 2 * half;
  for (; i + 4 <= bytes; i += 4) {
    memcpy(&word, at + i, 4);
    total += word;
  }
  for (; i < bytes; i++) total += at[i];
  return total;
}

// Multiplies and adds as the kernels of a format do, eight rows by two blocks, with factors in the nearest cache; returns
// how many multiplications that were.
static int64_t multiply(int64_t format, int64_t rounds) {
  constexpr int rows = 8, blocks = 2;
  alignas(64) uint8_t weights[blocks][LINE], inputs[rows][LINE];
  memset(weights, 1, sizeof weights);
  memset(inputs, 0, sizeof inputs);
  const bool integer = format == INT8 || format == INT4;
  F numbers[rows][blocks] = {};
  I whole[rows][blocks] = {};
  for (int64_t i = 0; i < rounds; i++) {
    __asm__ volatile("" : : "r"(weights), "r"(inputs) : "memory");  // they are read anew
    I lines[blocks];
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) lines[b] = load_line(weights[b]);
    if (integer) {
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, inputs[r], 4);
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) whole[r][b] = dot<INT8>(whole[r][b], lines[b], four);
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        float value;
        memcpy(&value, inputs[r], 4);
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) numbers[r][b] = fma(bits_to_float(lines[b]), all(value), numbers[r][b]);
      }
    }
  }
  __asm__ volatile("" : : "r"(numbers), "r"(whole) : "memory");
  return rounds * rows * blocks * LANES * (integer ? 4 : 1);
}

}  // namespace TW_ISA
}  // namespace tw
