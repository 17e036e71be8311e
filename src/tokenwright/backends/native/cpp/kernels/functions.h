// Functions of sixteen lanes: exponential, hyperbolic tangent, error function, softplus.
#pragma once

#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// e^x with an error below 2 ulp; 0 below -87.3, infinite above 88.8, NaN for NaN. x must be at most 89.
//
// V vectors go through each step together: one after the other their long chains of dependent instructions would not
// overlap.
template <int V>
TW_INLINE void exponentials(F (&x)[V]) {
#define TW_VECTORS _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
  const F low = all(-87.33654f);
  F n[V], f[V], p[V];
#if defined(__AVX512F__)
  TW_VECTORS f[v] = x[v];
#else
  TW_VECTORS f[v] = larger(low, x[v]);  // NaN stays
#endif
  TW_VECTORS n[v] = f[v] * all(1.44269504f);
  TW_VECTORS n[v] = rounded(n[v]);
  TW_VECTORS f[v] = fma(n[v], all(-0.693145752f), f[v]);
  TW_VECTORS f[v] = fma(n[v], all(-1.42860677e-6f), f[v]);
#if !defined(__AVX512F__)
  TW_VECTORS n[v] = bits_to_float((to_int(n[v]) + all(127)) << 23);  // 2^n
  TW_VECTORS TW_PARTS n[v].p[i] = x[v].p[i] < low.p[i] ? (FPart){} : n[v].p[i];
#endif
  TW_VECTORS p[v] = fma(all(1.9875691500e-4f), f[v], all(1.3981999507e-3f));
  TW_VECTORS p[v] = fma(p[v], f[v], all(8.3334519073e-3f));
  TW_VECTORS p[v] = fma(p[v], f[v], all(4.1665795894e-2f));
  TW_VECTORS p[v] = fma(p[v], f[v], all(1.6666665459e-1f));
  TW_VECTORS p[v] = fma(p[v], f[v], all(5.0000001201e-1f));
  TW_VECTORS p[v] = fma(p[v], f[v] * f[v], f[v] + all(1.0f));
#if defined(__AVX512F__)
  TW_VECTORS {
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x[v].p[0], (__m512)low.p[0], _CMP_NLT_UQ);
    x[v].p[0] = (FPart)_mm512_maskz_scalef_ps(there, (__m512)p[v].p[0], (__m512)n[v].p[0]);
  }
#else
  TW_VECTORS x[v] = p[v] * n[v];
#endif
#undef TW_VECTORS
}
TW_INLINE F exponential(F x) {
  F r[1] = {x};
  exponentials(r);
  return r[0];
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
// erf(x) with an error below 2 ulp; NaN for NaN. Both polynomials are minimax fits of our own: erf(x) / x in x^2 below
// 0.95, and above it -log(1 - erf(x)) in x - 2.4. erf(4) rounds to 1.
TW_INLINE F error_function(F x) {
  const F size = smaller(all(4.0f), magnitude(x)), square = size * size, apart = size - all(2.4f);
  F p = all(7.9866833e-5f);
  p = fma(p, square, all(-8.0463755e-4f));
  p = fma(p, square, all(5.1920018e-3f));
  p = fma(p, square, all(-2.6855519e-2f));
  p = fma(p, square, all(1.1283620e-1f));
  p = fma(p, square, all(-3.7612629e-1f));
  p = fma(p, square, all(1.1283791f));
  F q = all(-1.9718177e-4f);
  q = fma(q, apart, all(2.1619110e-4f));
  q = fma(q, apart, all(-2.6462968e-3f));
  q = fma(q, apart, all(1.1663516e-2f));
  q = fma(q, apart, all(9.4050956e-1f));
  q = fma(q, apart, all(5.1642518f));
  q = fma(q, apart, all(7.2809772f));
  const F near = p * size, far = all(1.0f) - exponential(all(0.0f) - q), border = all(0.95f);
  F r;
  TW_PARTS r.p[i] = size.p[i] < border.p[i] ? near.p[i] : far.p[i];
  return bits_to_float(float_to_bits(r) | (float_to_bits(x) & all((int32_t)0x80000000)));
}
// log(1 + e^x), with an error below 4 ulp. log(1 + u) = 2 artanh(u / (2 + u)), whose argument is at most 1/3 here.
TW_INLINE F softplus(F x) {
  const F u = exponential(all(0.0f) - magnitude(x)), t = u / (all(2.0f) + u), square = t * t;
  F p = all(2.0f / 17);
  p = fma(p, square, all(2.0f / 15));
  p = fma(p, square, all(2.0f / 13));
  p = fma(p, square, all(2.0f / 11));
  p = fma(p, square, all(2.0f / 9));
  p = fma(p, square, all(2.0f / 7));
  p = fma(p, square, all(2.0f / 5));
  p = fma(p, square, all(2.0f / 3));
  return larger(x, all(0.0f)) + fma(p * square, t, t + t);
}
// cap tanh(x / cap).
TW_INLINE F soft_capped(F x, float cap) { return all(cap) * hyperbolic_tangent(x / all(cap)); }

}  // namespace TW_ISA
}  // namespace tw
