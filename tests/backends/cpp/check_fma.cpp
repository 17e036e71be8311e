// Counts the triples whose fused multiply-add in sixteen lanes (kernels/lanes.h) is not the exact sum, rounded once,
// which integers of 128 bits compute. (fmaf of some C libraries is wrong where the result is subnormal.) Prints the
// count of each set; ends with 1 if there is one.
#include <cmath>
#include <cstdio>
#include <cstring>

#define TW_ISA checked
#include "kernels/lanes.h"

namespace {

uint64_t state = 1;
uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}

float number(uint32_t mantissa, int exponent) {  // with a random sign
  const uint32_t bits = (random_bits() & 0x80000000) | (uint32_t)(exponent + 127) << 23 | (mantissa & 0x7fffff);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Exponents of a b, and how far the exponent of c is from it. `close`: the product is a power of two less a little, so
// that, with c 24 powers of two above it, a sum rounded to a double lies halfway between two floats.
struct Set {
  const char* name;
  int product, least, most;
  bool close;
};
const Set SETS[] = {
    {"any numbers", 0, -30, 30, false},
    {"sums next to halfway", 0, 24, 24, true},
    {"subnormal sums", -140, -12, 12, false},
    {"subnormal sums next to halfway", -150, 23, 24, true},
};

struct Whole {  // number = mantissa 2^exponent
  __int128 mantissa;
  int exponent;
};
Whole whole(float x) {
  int exponent;
  return {(int64_t)ldexp(frexp((double)x, &exponent), 24), exponent - 24};
}

float exact(float a, float b, float c) {
  const Whole x = whole(a), y = whole(b), z = whole(c);
  Whole sum{x.mantissa * y.mantissa, x.exponent + y.exponent};
  const int lowest = sum.exponent < z.exponent ? sum.exponent : z.exponent;
  sum = {(sum.mantissa << (sum.exponent - lowest)) + (z.mantissa << (z.exponent - lowest)), lowest};
  unsigned __int128 size = sum.mantissa < 0 ? -sum.mantissa : sum.mantissa;
  int bits = 0;
  while (bits < 127 && size >> bits) bits++;
  const int normal = bits - 24, least = -149 - lowest, cut = normal > least ? normal : least;
  if (cut > 0) {  // to nearest, ties to even
    const unsigned __int128 rest = size & (((unsigned __int128)1 << cut) - 1), half = (unsigned __int128)1 << (cut - 1);
    size >>= cut;
    size += rest > half || (rest == half && (size & 1));
  }
  const double r = ldexp((double)(int64_t)size, lowest + (cut > 0 ? cut : 0));
  return (float)(sum.mantissa < 0 ? -r : r);
}

int64_t differing(const Set& set) {
  int64_t found = 0;
  for (int64_t round = 0; round < 20'000; round++) {
    float a[16], b[16], c[16], r[16], s[16];
    for (int i = 0; i < 16; i++) {
      const int exponent = set.product + set.least + (int)(random_bits() % (set.most - set.least + 1));
      const uint32_t little = random_bits() % 300 + 1;  // (1 + little 2^-23) (1 - little 2^-23)
      a[i] = number(set.close ? little : random_bits(), set.product / 2);
      b[i] = number(set.close ? 0x800000 - 2 * little : random_bits(), set.product - set.product / 2 - set.close);
      c[i] = number(random_bits(), exponent < -126 ? -127 : exponent);
    }
    using namespace tw::checked;
    store(r, fma(load(a), load(b), load(c)));
    store(s, fnma(load(a), load(b), load(c)));
    for (int i = 0; i < 16; i++) {
      const float first = exact(a[i], b[i], c[i]), second = exact(-a[i], b[i], c[i]);
      found += first != r[i] || second != s[i];
    }
  }
  return found;
}

}  // namespace

int main() {
  int64_t all = 0;
  for (const Set& set : SETS) {
    const int64_t found = differing(set);
    printf("%s: %lld of 320000 differ\n", set.name, (long long)found);
    all += found;
  }
  return all != 0;
}
