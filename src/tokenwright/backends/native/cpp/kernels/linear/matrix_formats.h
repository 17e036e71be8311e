// Quantised matrices as kernels read them: the codes of a slab, and the scales and minima of its groups, as api.h draws
// them.
#pragma once

#include <cstdint>

#include "api.h"
#include "kernels/conversions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t LINE = 64;  // bytes: four bytes of inputs for each of 16 outputs
// The scales of a matrix: with minima, in super-blocks, of super-blocks alone; and whether outputs have factors.
constexpr int PLAIN = 0, MINIMA = 1, SUPER = 2, BOTH = 3, WHOLE = 4, FACTORS = 8;

// The group and the scales of a matrix, for the compiler.
template <int64_t GROUP, int SCALES>
struct Scheme {
  static constexpr int64_t group = GROUP;
  static constexpr int scales = SCALES;
};

// Calls `run` with the Scheme of a matrix of a quantised format: one of those that its format can have.
template <int64_t FORMAT, typename Run>
TW_INLINE void with_scheme(const Matrix& m, const Run& run) {
  if constexpr (FORMAT == INT2)
    if (m.factors) return run(Scheme < 64, WHOLE | FACTORS > {});
  if constexpr (ternary(FORMAT)) return run(Scheme<64, WHOLE>{});
  if constexpr (FORMAT == TABLE4)
    if (m.group == 16) return m.super ? run(Scheme<16, SUPER>{}) : run(Scheme<16, FACTORS>{});
  if constexpr (FORMAT == INT6) return m.minima ? run(Scheme<16, BOTH>{}) : run(Scheme<16, SUPER>{});
  if constexpr (FORMAT == INT5)
    if (m.minima) return m.super ? run(Scheme<32, BOTH>{}) : run(Scheme<32, MINIMA>{});
  if constexpr (FORMAT == INT4)
    if (m.minima) return run(Scheme<32, BOTH>{});
  if constexpr (FORMAT == INT4 || FORMAT == INT8)
    if (m.group == 64) return run(Scheme<64, PLAIN>{});
  if constexpr (FORMAT != INT6 && !ternary(FORMAT)) run(Scheme<32, PLAIN>{});
}

TW_INLINE I load_line(const uint8_t* x) { return load_bits(x); }

// The numbers in a table whose indices are the bytes of a line, all below 16.
TW_INLINE I looked_up(I table, I line) {
#if defined(__AVX512F__)
  line.p[0] = (IPart)_mm512_shuffle_epi8((__m512i)table.p[0], (__m512i)line.p[0]);
#elif defined(__AVX2__)
  TW_PARTS line.p[i] = (IPart)_mm256_shuffle_epi8((__m256i)table.p[i], (__m256i)line.p[i]);
#elif defined(__aarch64__)
  TW_PARTS line.p[i] = (IPart)vqtbl1q_u8((uint8x16_t)table.p[i], (uint8x16_t)line.p[i]);
#elif defined(__wasm_simd128__)
  TW_PARTS line.p[i] = (IPart)wasm_i8x16_swizzle((v128_t)table.p[i], (v128_t)line.p[i]);
#else
  uint8_t numbers[LINE], codes[LINE];
  store_bits(numbers, table);
  store_bits(codes, line);
  for (uint8_t& code : codes) code = numbers[code];
  line = load_bits(codes);
#endif
  return line;
}

template <int64_t FORMAT>
TW_INLINE I table_of(const Matrix& m) {
  return FORMAT == TABLE4 ? load_bits(m.table) : I{};
}

// The codes of the inputs 4 four, ... 4 four + 3 of a slab, from 0 on. table: of TABLE4, whose codes are its numbers.
template <int64_t FORMAT>
TW_INLINE I codes_of(const uint8_t* slab, int64_t four, I table) {
  if (FORMAT == INT2) return (load_line(slab + four / 4 * LINE) >> (int)(four % 4 * 2)) & all(0x03030303);
  if (FORMAT == INT1) {
    const I line = load_line(slab + four / 8 * LINE);
    const int left = 1 - (int)(four & 7);
    return (left >= 0 ? line << left : line >> -left) & all(0x02020202);
  }
  if (FORMAT == INT8) return load_line(slab + four * LINE);
  const I both = load_line(slab + (four & 7) * LINE);
  const I low = (four < 8 ? both : both >> 4) & all(0x0f0f0f0f);
  if (FORMAT == INT4) return low;
  if (FORMAT == TABLE4) return looked_up(table, low);
  constexpr int64_t bits = FORMAT == INT5 ? 1 : 2, together = 8 / bits;
  const I upper = load_line(slab + (8 + four / together) * LINE);
  const int64_t left = 4 - four % together * bits;
  return low | ((left >= 0 ? upper << (int)left : upper >> (int)-left) & all(FORMAT == INT5 ? 0x10101010 : 0x30303030));
}

// Reads the scales of a block of outputs, slab by slab.
template <int64_t GROUP, int SCALES>
struct ScaleReader {
  static constexpr int64_t fields = SCALES & MINIMA ? 2 : 1, groups = 64 / GROUP;
  const uint8_t *block, *at;  // the scales of the block, and of the current slab's first group
  const uint8_t* super;       // the scales, and behind them the minima, of the current super-block
  int64_t shift, bytes;       // log2 of the slabs of a super-block, and its bytes

  __attribute__((always_inline)) void begin(const Matrix& m, int64_t index, int64_t slabs) {
    shift = SCALES & (SUPER | WHOLE) ? __builtin_ctzll((uint64_t)m.super) - 6 : 0;
    const int64_t steps = SCALES & SUPER ? (int64_t)((uint64_t)m.super / GROUP) * LANES : 0;
    bytes = fields * (SCALES & (SUPER | WHOLE) ? 2 * LANES + steps : groups * 2 * LANES);
    block = (const uint8_t*)m.scales + index * (slabs >> shift) * bytes;
  }
  __attribute__((always_inline)) void to(int64_t slab) {
    super = at = block + (slab >> shift) * bytes;
    if (SCALES & SUPER) at += 32 * fields + (slab & ((1 << shift) - 1)) * groups * fields * LANES;
  }
  __attribute__((always_inline)) F scale_of(int64_t group) const {
    if (!(SCALES & SUPER)) return load_f16((const uint16_t*)(at + group * fields * 32));
    return load_f16((const uint16_t*)super) * to_float(load_i8((const int8_t*)(at + group * fields * LANES)));
  }
  __attribute__((always_inline)) F minimum_of(int64_t group) const {
    if (!(SCALES & SUPER)) return load_f16((const uint16_t*)(at + group * fields * 32 + 32));
    return load_f16((const uint16_t*)(super + 32)) *
           to_float(load_i8((const int8_t*)(at + group * fields * LANES + LANES)));
  }
};

template <int64_t FORMAT>
struct Slab {
  static constexpr int64_t inputs = slab_inputs(FORMAT), bytes = slab_bytes(FORMAT);
};

TW_INLINE int64_t slabs_of(const Matrix& m) { return (m.in + slab_inputs(m.format) - 1) / slab_inputs(m.format); }

}  // namespace TW_ISA
}  // namespace tw
