// Linear layers on the matrix unit; all else is AVX-512's.
//
// A slab is a tile as it lies in memory: 16 outputs over 64 bytes' worth of inputs. Rows go in tiles of 16, short ones
// with the rest of their room behind them, whose results are not looked at: so a row is computed the same way whatever
// its neighbours. Quantised formats come to the same integer sums as everywhere, and to the same bits. bfloat16 takes its
// rows rounded to bfloat16, as the unit reads them.
#define TW_ISA amx
#include "kernels.h"
#include "lanes.h"
#include "tiles.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t CHUNK = 16;  // slabs that are taken through all rows together; they stay in a core's own cache
constexpr int64_t SUPER_ROWS = 512;  // rows that are taken through a pair of blocks together

struct Pair {  // of blocks, or a single one, and the rows of a chunk of slabs
  const Matrix& m;
  const Rows& rows;
  int64_t block, blocks;
  int64_t slab, slabs, all_slabs;
  int64_t top, bottom;  // rows
  const uint8_t* codes[2];
  float* sums;  // [row - top][32]: of the chunks so far
};

TW_INLINE int64_t live_rows(const Pair& p, int64_t row) {
  return p.bottom - row < TILE_ROWS ? p.bottom - row : TILE_ROWS;
}

static void set_tiles(int64_t row_bytes) {
  TileConfig to;
  for (int tile = 0; tile < 4; tile++) to.set(tile, 16, 64);               // C
  for (int tile = 4; tile < 6; tile++) to.set(tile, 16, (int)row_bytes);   // A: rows
  for (int tile = 6; tile < 8; tile++) to.set(tile, (int)row_bytes / 4, 64);  // B: weights
  configure(to);
}

// sums [live][16] of a block += integer sums * scale of the group * scale of the row.
template <int T>
TW_INLINE void scale_tile(const Pair& p, int64_t row, int64_t block, int64_t group) {
  int32_t whole[16][16] __attribute__((aligned(64)));
  tile_store<T>(whole, 64);
  const int64_t groups = p.rows.groups;
  const F scale = load_f16(p.m.scales + ((p.block + block) * groups + group) * LANES);
  float* sums = p.sums + (row - p.top) * 32 + block * LANES;
  for (int64_t r = 0; r < live_rows(p, row); r++) {
    const int64_t at = (row + r) * groups + group;
    I total;
    memcpy(&total, whole[r], 64);
    total = total + all(p.rows.sums[at]);
    store(sums + r * 32, fma(to_float(total), scale * all(p.rows.scales[at]), load(sums + r * 32)));
  }
}

// Two tiles of rows by two blocks where there are so many; G groups to a slab.
template <int G>
static void integer_rows(const Pair& p) {
  const int64_t depth = p.rows.depth, run = 64 / G;
  const int8_t* x = (const int8_t*)p.rows.numbers;
  for (int64_t row = p.top; row < p.bottom; row += 2 * TILE_ROWS) {
    const bool two_rows = row + TILE_ROWS < p.bottom, two_blocks = p.blocks == 2;
    for (int64_t s = 0; s < p.slabs; s++)
      for (int g = 0; g < G; g++) {
        const int8_t* at = x + row * depth + (p.slab + s) * 64 + g * run;
        const int64_t w = s * 1024 + g * run / 4 * 64, group = (p.slab + s) * G + g;
        tile_load<4>(at, depth);
        tile_load<6>(p.codes[0] + w, 64);
        tile_zero<0>();
        tile_dot_bytes<0, 4, 6>();
        if (two_blocks) {
          tile_load<7>(p.codes[1] + w, 64);
          tile_zero<1>();
          tile_dot_bytes<1, 4, 7>();
        }
        if (two_rows) {
          tile_load<5>(at + TILE_ROWS * depth, depth);
          tile_zero<2>();
          tile_dot_bytes<2, 5, 6>();
          if (two_blocks) {
            tile_zero<3>();
            tile_dot_bytes<3, 5, 7>();
          }
        }
        scale_tile<0>(p, row, 0, group);
        if (two_blocks) scale_tile<1>(p, row, 1, group);
        if (two_rows) scale_tile<2>(p, row + TILE_ROWS, 0, group);
        if (two_rows && two_blocks) scale_tile<3>(p, row + TILE_ROWS, 1, group);
      }
  }
}

static void bf16_rows(const Pair& p) {
  const int64_t depth = p.rows.depth * 2;  // bytes
  const char* x = (const char*)p.rows.numbers;
  for (int64_t row = p.top; row < p.bottom; row += 2 * TILE_ROWS) {
    const bool two_rows = row + TILE_ROWS < p.bottom, two_blocks = p.blocks == 2;
    float* sums = p.sums + (row - p.top) * 32;
    tile_load<0>(sums, 128);
    if (two_blocks) tile_load<1>(sums + LANES, 128);
    if (two_rows) tile_load<2>(sums + TILE_ROWS * 32, 128);
    if (two_rows && two_blocks) tile_load<3>(sums + TILE_ROWS * 32 + LANES, 128);
    for (int64_t s = 0; s < p.slabs; s++) {
      const char* at = x + row * depth + (p.slab + s) * 64;
      tile_load<4>(at, depth);
      tile_load<6>(p.codes[0] + s * 1024, 64);
      tile_dot_bf16<0, 4, 6>();
      if (two_blocks) {
        tile_load<7>(p.codes[1] + s * 1024, 64);
        tile_dot_bf16<1, 4, 7>();
      }
      if (two_rows) {
        tile_load<5>(at + TILE_ROWS * depth, depth);
        tile_dot_bf16<2, 5, 6>();
        if (two_blocks) tile_dot_bf16<3, 5, 7>();
      }
    }
    tile_store<0>(sums, 128);
    if (two_blocks) tile_store<1>(sums + LANES, 128);
    if (two_rows) tile_store<2>(sums + TILE_ROWS * 32, 128);
    if (two_rows && two_blocks) tile_store<3>(sums + TILE_ROWS * 32 + LANES, 128);
  }
}

// A chunk of int4 slabs as bytes, in the order of int8 ones.
static void widen(const uint8_t* from, int64_t slabs, uint8_t* to) {
  for (int64_t line = 0; line < slabs * 8; line++) {
    I both;
    memcpy(&both, from + line * 64, 64);
    const I low = both & all(0x0f0f0f0f), high = both >> 4 & all(0x0f0f0f0f);
    uint8_t* slab = to + line / 8 * 1024 + line % 8 * 64;
    memcpy(slab, &low, 64);
    memcpy(slab + 512, &high, 64);
  }
}

static void finish(const Pair& p, const Out& out) {
  for (int64_t b = 0; b < p.blocks; b++) {
    const int64_t at = (p.block + b) * LANES, n = p.m.out - at < LANES ? p.m.out - at : LANES;
    for (int64_t row = p.top; row < p.bottom; row++) {
      F v = load(p.sums + (row - p.top) * 32 + b * LANES);
      if (p.m.bias) v = v + load(p.m.bias + at, n);
      if (out.add) v = v + load(out.add + row * out.stride + at, n);
      store(out.y + row * out.stride + at, v, n);
    }
  }
}

static void fetch(const Pair& p, int64_t bytes) {  // the next chunk, while this one is computed with
  for (int64_t b = 0; b < p.blocks; b++)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p.codes[b] + bytes + i, 0, 2);
}

static bool in_tiles(int64_t format) { return format == BF16 || format == INT8 || format == INT4; }

static void linear(const Matrix& m, const Rows& rows, int64_t first, int64_t last, const Out& out) {
  if (!in_tiles(m.format)) return avx512_kernels()->linear(m, rows, first, last, out);
  static thread_local float sums[SUPER_ROWS * 32] __attribute__((aligned(64)));
  static thread_local uint8_t wide[2 * CHUNK * 1024] __attribute__((aligned(64)));
  const int64_t inputs = m.format == BF16 ? 32 : 64, slabs = (m.in + inputs - 1) / inputs;
  const int64_t slab_bytes = m.format == INT4 ? 512 : 1024;
  set_tiles(m.group ? m.group : 64);
  for (int64_t block = first; block < last; block += 2)
    for (int64_t top = 0; top < rows.rows; top += SUPER_ROWS) {
      const int64_t bottom = rows.rows - top < SUPER_ROWS ? rows.rows : top + SUPER_ROWS;
      memset(sums, 0, (bottom - top + 2 * TILE_ROWS < SUPER_ROWS ? bottom - top + 2 * TILE_ROWS : SUPER_ROWS) * 128);
      Pair p{m, rows, block, block + 1 < last ? 2 : 1, 0, 0, slabs, top, bottom, {nullptr, nullptr}, sums};
      for (; p.slab < slabs; p.slab += CHUNK) {
        p.slabs = slabs - p.slab < CHUNK ? slabs - p.slab : CHUNK;
        for (int64_t b = 0; b < p.blocks; b++)
          p.codes[b] = (const uint8_t*)m.codes + ((block + b) * slabs + p.slab) * slab_bytes;
        fetch(p, p.slabs * slab_bytes);
        if (m.format == BF16) {
          bf16_rows(p);
          continue;
        }
        for (int64_t b = 0; m.format == INT4 && b < p.blocks; b++) {
          widen(p.codes[b], p.slabs, wide + b * CHUNK * 1024);
          p.codes[b] = wide + b * CHUNK * 1024;
        }
        m.group == 32 ? integer_rows<2>(p) : integer_rows<1>(p);
      }
      finish(p, out);
    }
  release();
}

static int64_t row_kind(int64_t format) { return format == BF16 ? ROWS_BF16 : avx512_kernels()->row_kind(format); }

static int64_t together(int64_t format, int64_t rows) {
  return in_tiles(format) ? 1 : avx512_kernels()->together(format, rows);
}

static void prepare(const Matrix& m, const float* x, int64_t row, const Rows& rows) {
  if (rows.kind != ROWS_BF16) return avx512_kernels()->prepare(m, x, row, rows);
  uint16_t* to = (uint16_t*)rows.numbers + row * rows.depth;
  for (int64_t i = 0; i < m.in; i++) to[i] = to_bf16(x[i]);
  memset(to + m.in, 0, 2 * (rows.depth - m.in));
}

static Kernels made() {
  Kernels k = *avx512_kernels();
  k.name = "amx";
  k.row_kind = row_kind;
  k.together = together;
  k.prepare = prepare;
  k.linear = linear;
  return k;
}

}  // namespace TW_ISA
}  // namespace tw

const tw::Kernels* tw::amx_kernels() {
  static const Kernels table = amx::made();
  return &table;
}
