// The matrix unit of x86 (AMX): eight tiles of 16 rows of 64 bytes. Also emulated in plain C++, for tests without AMX.
//
// The instructions are inline assembly: some compilers' intrinsics do not declare the memory that they access, and then
// the compiler may drop stores into a buffer that a tile is loaded from.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = (uint8_t)tile_rows;
    bytes[tile] = (uint16_t)row_bytes;
  }
};
static_assert(sizeof(TileConfig) == 64, "as the processor reads it");

#if defined(TW_EMULATE_AMX)

struct TileBytes {
  uint8_t at[16][64];
};
static thread_local TileBytes tiles[8];
static thread_local TileConfig shape;

TW_INLINE void configure(const TileConfig& to) {
  shape = to;
  memset(tiles, 0, sizeof tiles);
}
TW_INLINE void release() { shape = TileConfig{}; }
template <int T>
TW_INLINE void tile_zero() {
  memset(&tiles[T], 0, sizeof(TileBytes));
}
template <int T>
TW_INLINE void tile_load(const void* from, int64_t stride) {
  memset(&tiles[T], 0, sizeof(TileBytes));
  for (int r = 0; r < shape.rows[T]; r++) memcpy(tiles[T].at[r], (const char*)from + r * stride, shape.bytes[T]);
}
template <int T>
TW_INLINE void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < shape.rows[T]; r++) memcpy((char*)to + r * stride, tiles[T].at[r], shape.bytes[T]);
}
// C += A B for signed bytes; each row of B holds four for each column.
template <int C, int A, int B>
TW_INLINE void tile_dot_bytes() {
  for (int m = 0; m < shape.rows[C]; m++)
    for (int n = 0; n < shape.bytes[C] / 4; n++) {
      int32_t total;
      memcpy(&total, &tiles[C].at[m][4 * n], 4);
      for (int k = 0; k < shape.bytes[A]; k++)
        total += (int32_t)(int8_t)tiles[A].at[m][k] * (int32_t)(int8_t)tiles[B].at[k / 4][4 * n + k % 4];
      memcpy(&tiles[C].at[m][4 * n], &total, 4);
    }
}
TW_INLINE float widened(const uint8_t* x) {  // from bfloat16; subnormals count as zeros
  uint16_t v;
  memcpy(&v, x, 2);
  if (!(v & 0x7f80)) v &= 0x8000;
  const uint32_t w = (uint32_t)v << 16;
  float f;
  memcpy(&f, &w, 4);
  return f;
}
// C += A B for bfloat16: separate fused sums over even and odd inputs, then the sum of both.
template <int C, int A, int B>
TW_INLINE void tile_dot_bf16() {
  for (int m = 0; m < shape.rows[C]; m++)
    for (int n = 0; n < shape.bytes[C] / 4; n++) {
      float sums[2] = {0, 0}, total;
      for (int k = 0; k < shape.bytes[A] / 4; k++)
        for (int odd = 0; odd < 2; odd++)
          sums[odd] = __builtin_fmaf(widened(&tiles[A].at[m][4 * k + 2 * odd]),
                                     widened(&tiles[B].at[k][4 * n + 2 * odd]), sums[odd]);
      memcpy(&total, &tiles[C].at[m][4 * n], 4);
      total += sums[0] + sums[1];
      memcpy(&tiles[C].at[m][4 * n], &total, 4);
    }
}

#else

TW_INLINE void configure(const TileConfig& to) { __asm__ volatile("ldtilecfg %0" : : "m"(to) : "memory"); }
TW_INLINE void release() { __asm__ volatile("tilerelease" : : : "memory"); }
template <int T>
TW_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
TW_INLINE void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
TW_INLINE void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
}
template <int C, int A, int B>
TW_INLINE void tile_dot_bytes() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
TW_INLINE void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace TW_ISA
}  // namespace tw
