// Decodes one row of a matrix of any format: the embedding of a token.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"
#include "kernels/conversions.h"
#include "kernels/linear/matrix_formats.h"

namespace tw {
namespace TW_ISA {

// A code of a quantised row; w: the row's four bytes of the first line.
static float code_of(const Matrix& m, const uint8_t* w, int64_t input) {
  const int64_t four = input % 64 / 4;
  const uint8_t* at = w + input / 64 * slab_bytes(m.format) + input % 4;
  if (m.format == INT8) return (float)(at[four * LINE] - 128);
  if (m.format == INT2) return (float)((at[four / 4 * LINE] >> four % 4 * 2 & 3) - 1);
  if (m.format == INT1) return (float)((at[four / 8 * LINE] >> four % 8 & 1) * 2 - 1);
  const int both = at[(four & 7) * LINE], low = four < 8 ? both & 15 : both >> 4;
  if (m.format == TABLE4) return (float)(m.table[low] - 128);
  int upper = 0;
  if (m.format == INT5) upper = (at[(8 + four / 8) * LINE] >> four % 8 & 1) << 4;
  if (m.format == INT6) upper = (at[(8 + four / 4) * LINE] >> four % 4 * 2 & 3) << 4;
  return (float)((low | upper) + (m.minima ? 0 : m.format == INT4 ? -8 : m.format == INT5 ? -16 : -32));
}

// The scale (which = 0) or minimum (which = 1) of a group of one row. scales: of the row's block.
static float scale_of(const Matrix& m, const uint8_t* scales, int64_t lane, int64_t input, int64_t which) {
  const int64_t fields = m.minima ? 2 : 1, span = m.super ? m.super : m.group;
  const uint8_t* at = scales + input / span * scale_bytes(m);
  uint16_t half;
  memcpy(&half, at + which * 32 + 2 * lane, 2);
  if (!m.super || ternary(m.format)) return from_f16(half);
  const int64_t group = input % m.super / m.group;
  return from_f16(half) * (float)(int8_t)at[fields * 32 + (group * fields + which) * LANES + lane];
}

// Decodes row `index` of a matrix: it owns four bytes of each line of its block.
static void embed(const Matrix& m, int64_t index, float* x) {
  const int64_t block = index / LANES, lane = index % LANES, slabs = slabs_of(m);
  const uint8_t* w = (const uint8_t*)m.codes + block * slabs * slab_bytes(m.format) + 4 * lane;
  if (quantised(m.format)) {
    const uint8_t* scales = (const uint8_t*)m.scales + block * block_scale_bytes(m, slabs);
    for (int64_t first = 0; first < m.in; first += m.group) {
      const float scale = scale_of(m, scales, lane, first, 0);
      const float minimum = m.minima ? scale_of(m, scales, lane, first, 1) : 0;
      for (int64_t i = first; i < first + m.group && i < m.in; i++) x[i] = fma(code_of(m, w, i), scale, -minimum);
    }
    for (int64_t i = 0; m.factors && i < m.in; i++) x[i] *= m.factors[index];
    return;
  }
  if (m.format == F32) {
    for (int64_t i = 0; i < m.in; i++) memcpy(x + i, w + i * LINE, 4);
    return;
  }
  for (int64_t i = 0; i < m.in; i += 2) {
    uint16_t two[2];
    memcpy(two, w + i / 2 * LINE, 4);
    for (int64_t k = 0; k < 2 && i + k < m.in; k++) {
      const uint32_t wide = (uint32_t)two[k] << 16;
      if (m.format == BF16)
        memcpy(x + i + k, &wide, 4);
      else
        x[i + k] = from_f16(two[k]);
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
