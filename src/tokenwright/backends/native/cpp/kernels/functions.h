// Functions of sixteen lanes: exponential and hyperbolic tangent.
#pragma once

#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// e^x with an error below 2 ulp; 0 below -87.3, infinite above 88.8, NaN for NaN. x must be at most 89.
TW_INLINE F exponential(F x) {
  const F low = all(-87.33654f);
  F r;
#if defined(__AVX512F__)
  const F from = x;
#else
  const F from = larger(x, low);
#endif
  F n = rounded(from * all(1.44269504f));
  F f = fma(n, all(-0.693145752f), from);
  f = fma(n, all(-1.42860677e-6f), f);
  F p = all(1.9875691500e-4f);
  p = fma(p, f, all(1.3981999507e-3f));
  p = fma(p, f, all(8.3334519073e-3f));
  p = fma(p, f, all(4.1665795894e-2f));
  p = fma(p, f, all(1.6666665459e-1f));
  p = fma(p, f, all(5.0000001201e-1f));
  p = fma(p, f * f, f + all(1.0f));
#if defined(__AVX512F__)
  const __mmask16 there = _mm512_cmp_ps_mask((__m512)x.p[0], (__m512)low.p[0], _CMP_NLT_UQ);
  r.p[0] = (FPart)_mm512_maskz_scalef_ps(there, (__m512)p.p[0], (__m512)n.p[0]);
#else
  r = p * bits_to_float((to_int(n) + all(127)) << 23);
  TW_PARTS r.p[i] = x.p[i] < low.p[i] ? (FPart){} : x.p[i] == x.p[i] ? r.p[i] : x.p[i];
#endif
  return r;
}

// tanh(x) with an error below 3 ulp; NaN for NaN. The polynomial is a minimax fit on [0, 0.63] of our own.
TW_INLINE F hyperbolic_tangent(F x) {
  const F size = smaller(all(10.0f), magnitude(x));  // tanh(10) rounds to 1
  const F square = size * size;
  F p = all(-5.666977e-3f);
  p = fma(p, square, all(2.0606177e-2f));
  p = fma(p, square, all(-5.3730007e-2f));
  p = fma(p, square, all(1.3331331e-1f));
  p = fma(p, square, all(-3.3333278e-1f));
  const F near = fma(p * square, size, size), far = all(1.0f) - all(2.0f) / (exponential(size + size) + all(1.0f));
  const F border = all(0.625f);
  F r;
  TW_PARTS r.p[i] = size.p[i] < border.p[i] ? near.p[i] : far.p[i];
  return bits_to_float(float_to_bits(r) | (float_to_bits(x) & all((int32_t)0x80000000)));
}
// cap tanh(x / cap).
TW_INLINE F soft_capped(F x, float cap) { return all(cap) * hyperbolic_tangent(x / all(cap)); }

}  // namespace TW_ISA
}  // namespace tw
