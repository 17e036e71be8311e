// Quantises rows to 8 bits, the input format of linears over quantised weights.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Quantises a group of inputs to integers from -127 to 127, with scale max |x| / 127; the scale of an input that is not
// finite is NaN. total: the sum of the codes.
TW_INLINE void quantise(const float* x, int64_t n, int64_t group, int8_t* codes, float* scale, int32_t* total) {
  F extreme = {}, nothing = {};
  for (int64_t i = 0; i < n; i += 16) {
    const F v = load(x + i, n - i < 16 ? n - i : 16);
    extreme = larger(magnitude(v), extreme);
    nothing = fma(v, all(0.0f), nothing);
  }
  const float most = largest(extreme) + sum(nothing);
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  *scale = most / 127.0f;
  F all_codes = {};
  for (int64_t i = 0; i < group; i += 16) {
    const int64_t left = n - i < 16 ? n - i : 16;
    const F code = rounded(load(x + (left > 0 ? i : 0), left > 0 ? left : 0) * all(inverse));
    all_codes = all_codes + code;
    store_8((uint8_t*)codes + i, to_int(code));
  }
  const float added = sum(all_codes);
  *total = added == added ? (int32_t)added : 0;  // the scale carries the NaN
}

// What a row keeps of a group beside its codes, in the place of their sum: for a matrix with minima, the float by which
// a minimum is multiplied.
TW_INLINE void keep_minimum_factor(float scale, int32_t* sum) {
  const float factor = -(scale * (float)*sum);
  memcpy(sum, &factor, 4);
}

}  // namespace TW_ISA
}  // namespace tw
