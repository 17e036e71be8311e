// Exponential and logarithm in double precision, from sums, products and quotients alone. So they have the same bits
// with every C library and on every processor; their relative errors are below 1e-15.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace tw {

inline double power_of_two(int64_t n) {  // of the exponents of normal numbers
  const uint64_t bits = (uint64_t)(n + 1023) << 52;
  double r;
  memcpy(&r, &bits, sizeof r);
  return r;
}

// e^x = 2^n e^f with |f| <= log(2) / 2, and of e^f the Taylor polynomial. 0 below -708, infinite above 709.
inline double exponential(double x) {
  if (!(x >= -708)) return x < -708 ? 0 : x;  // NaN stays
  if (x > 709) return INFINITY;
  constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52: to add it and to subtract it rounds to a whole number
  const double n = (x * 1.4426950408889634 + shift) - shift;
  const double f = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = 1;
  _Pragma("GCC unroll 13") for (int k = 13; k > 0; k--) p = 1 + p * f * (1.0 / k);
  return p * power_of_two((int64_t)n);
}

// log(x) = n log(2) + 2 artanh((m - 1) / (m + 1)) for x = 2^n m with m about 1; x must not be subnormal.
inline double logarithm(double x) {
  if (!(x > 0 && x < INFINITY)) return x == 0 ? -INFINITY : x < 0 ? NAN : x;
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t n = (int64_t)(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffff) | (uint64_t)1023 << 52;
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m /= 2;
    n++;
  }
  const double t = (m - 1) / (m + 1), square = t * t;
  double p = 0;
  _Pragma("GCC unroll 10") for (int k = 21; k > 1; k -= 2) p = square * (1.0 / k + p);
  return (double)n * 0.693147180369123816490 + ((double)n * 1.90821492927058770002e-10 + 2 * (t + t * p));
}

}  // namespace tw
