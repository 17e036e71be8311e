// Linear layers, and attention over a latent in bfloat16, on the matrix unit (AMX); the AVX-512 kernels do all else.
//
// A slab's memory layout is that of a tile: 16 outputs over 64 bytes of inputs. Rows form tiles of 16; a short last
// tile is padded and the results of the padding are ignored, so the computation of a row does not depend on its
// neighbours. Quantised formats have the same integer sums, and so the same bits, as in the other instruction sets; the
// AVX-512 kernels take few rows of them, because they read the weights as fast and need no tiles. bfloat16 weights
// always use rows rounded to bfloat16, the unit's input format, for any number of rows.
#define TW_ISA amx
#include "kernels.h"
#include "lanes.h"
#include "forms.inl.h"
#include "quantise.inl.h"
#include "tiles.h"

#define TW_TILES
#include "attention.inl.h"

namespace tw {
namespace TW_ISA {

constexpr int64_t TILE = 1024;         // bytes
constexpr int64_t TILE_ROWS = 16;      // also the value of `QuantisedRows::together` for rows in tiles
constexpr int64_t FEW_ROWS = 8;        // up to so many rows of a quantised format run on AVX-512
constexpr int64_t CHUNK = 16;          // slabs per chunk for many rows
constexpr int64_t AHEAD = 8192;        // prefetch distance in bytes of a block's weights
constexpr int64_t SUPER_ROWS = 512;    // rows that a group of blocks processes together
constexpr int64_t SUPER_BLOCKS = 8;    // blocks of such a group
constexpr int64_t KEPT = 2;            // slabs with buffered integer sums, to be scaled together

// Rows in tiles, [row / 16][slab][16][64 bytes], times the weights of some blocks.
struct Work {
  const Matrix& m;
  const QuantisedRows& rows;
  int64_t top, bottom;               // rows
  int64_t slab, slabs, all_slabs;
  float* sums;                       // [tile of rows][SUPER_BLOCKS][16][16]: sums over the chunks so far
  const uint8_t* tiles[2];           // the chunk's weights, of one block or two adjacent ones
  const uint8_t* next[2];            // the following weights, to prefetch
  int64_t block;                     // index in the matrix
  int64_t column;                    // index of the first of these blocks in its group, a column of `sums`

  const uint8_t* x(int64_t row) const {
    return (const uint8_t*)rows.numbers + (row / TILE_ROWS * all_slabs + slab) * TILE;
  }
  float* at(int64_t row, int64_t b) const {
    return sums + ((row - top) / TILE_ROWS * SUPER_BLOCKS + column + b) * TILE_ROWS * LANES;
  }
};

static void set_tiles(int64_t rows, int64_t row_bytes) {
  TileConfig to;
  for (int tile = 0; tile < 4; tile++) to.set(tile, (int)rows, 64);                 // C
  for (int tile = 4; tile < 6; tile++) to.set(tile, (int)rows, (int)row_bytes);     // A: rows
  for (int tile = 6; tile < 8; tile++) to.set(tile, (int)row_bytes / 4, 64);        // B: weights
  configure(to);
}

// ---- bfloat16 ----

template <int T>
TW_INLINE void begin_tile(const Work& work, const float* sums) {
  if (work.slab)
    tile_load<T>(sums, 64);
  else
    tile_zero<T>();
}

// Prefetches one slab of the following weights.
template <int64_t BYTES, int BLOCKS>
TW_INLINE void fetch(const Work& work, int64_t slab) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < BYTES; i += 64)
    for (int b = 0; b < BLOCKS; b++) __builtin_prefetch(work.next[b] + slab * BYTES + i);
}

// One or two tiles of rows times one or two blocks. FETCHED: bytes to prefetch of each following slab.
template <int ROWS, int BLOCKS, int64_t FETCHED>
static void bf16_tiles(const Work& work, int64_t row) {
  const uint8_t *x0 = work.x(row), *x1 = x0 + (ROWS - 1) * work.all_slabs * TILE;
  const uint8_t *w0 = work.tiles[0], *w1 = work.tiles[BLOCKS - 1];
  begin_tile<0>(work, work.at(row, 0));
  if (BLOCKS == 2) begin_tile<1>(work, work.at(row, 1));
  if (ROWS == 2) begin_tile<2>(work, work.at(row + TILE_ROWS, 0));
  if (ROWS == 2 && BLOCKS == 2) begin_tile<3>(work, work.at(row + TILE_ROWS, 1));
  for (int64_t at = 0; at < work.slabs * TILE; at += TILE) {
    fetch<FETCHED, BLOCKS>(work, at / TILE);
    tile_load<4>(x0 + at, 64);
    tile_load<6>(w0 + at, 64);
    tile_dot_bf16<0, 4, 6>();
    if (BLOCKS == 2) {
      tile_load<7>(w1 + at, 64);
      tile_dot_bf16<1, 4, 7>();
    }
    if (ROWS == 2) {
      tile_load<5>(x1 + at, 64);
      tile_dot_bf16<2, 5, 6>();
      if (BLOCKS == 2) tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(work.at(row, 0), 64);
  if (BLOCKS == 2) tile_store<1>(work.at(row, 1), 64);
  if (ROWS == 2) tile_store<2>(work.at(row + TILE_ROWS, 0), 64);
  if (ROWS == 2 && BLOCKS == 2) tile_store<3>(work.at(row + TILE_ROWS, 1), 64);
}

// ---- Quantised formats ----

// The offset that the codes of a matrix without minima are stored with.
constexpr int offset_of(int64_t format) {
  return format == INT8 ? 128 : format == INT4 ? 8 : format == INT5 ? 16 : 32;
}

// Decodes slabs to signed bytes. DISTANCE: prefetch distance in bytes, or 0.
template <int64_t FORMAT, int SCALES, int64_t DISTANCE>
static void widen(const uint8_t* from, int64_t slabs, uint8_t* to) {
  constexpr int64_t bytes = slab_bytes(FORMAT);
  const __m512i offset = _mm512_set1_epi8((char)(SCALES & MINIMA ? 0 : offset_of(FORMAT)));
  for (int64_t s = 0; s < slabs; s++)
#pragma GCC unroll 16
    for (int64_t four = 0; four < 16; four++) {
      const uint8_t* slab = from + s * bytes;
      if (DISTANCE && four < bytes / LINE) __builtin_prefetch(slab + four * LINE + DISTANCE);
      const __m512i codes = (__m512i)codes_of<FORMAT>(slab, four).p[0];
      _mm512_store_si512(to + s * TILE + four * LINE, _mm512_sub_epi8(codes, offset));
    }
}

// For one group: the sums of a tile of rows and a block += integer sums * scales of the outputs * scale of the row, and
// minima of the outputs * factors of the row.
template <int SCALES>
TW_INLINE void scale_group(F (&acc)[TILE_ROWS], const int32_t* totals, F scale, F minimum, const QuantisedRows& rows,
                           int64_t row, int64_t group) {
  const int64_t at = (row / TILE_ROWS * rows.groups + group) * TILE_ROWS;
  const float *x_scales = rows.scales + at, *x_minima = (const float*)rows.sums + at;
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) {
    acc[r] = fma(to_float(load_bits(totals + r * LANES)), scale * all(x_scales[r]), acc[r]);
    if (SCALES & MINIMA) acc[r] = fma(minimum, all(x_minima[r]), acc[r]);
  }
}

// As scale_group, for all groups of a slab. The reader stands at the slab.
template <int64_t GROUP, int SCALES>
TW_INLINE void scale_slab(F (&acc)[TILE_ROWS], const int32_t (*totals)[TILE_ROWS * LANES],
                          const ScaleReader<GROUP, SCALES>& scales, const QuantisedRows& rows, int64_t row,
                          int64_t slab) {
  constexpr int64_t groups = 64 / GROUP;
#pragma GCC unroll 4
  for (int g = 0; g < groups; g++) {
    const F minimum = SCALES & MINIMA ? scales.minimum_of(g) : F{};
    scale_group<SCALES>(acc, totals[g], scales.scale_of(g), minimum, rows, row, slab * groups + g);
  }
}

TW_INLINE void store_tile(float* sums, const F (&acc)[TILE_ROWS]) {
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) store(sums + r * LANES, acc[r]);
}

// Adds some slabs of the chunk to the sums of a tile of rows and a block.
template <int64_t GROUP, int SCALES>
static void scale_tile(const Work& work, int64_t row, int64_t b, int64_t slab, int64_t slabs,
                       const int32_t (*totals)[TILE_ROWS * LANES]) {
  float* sums = work.at(row, b);
  ScaleReader<GROUP, SCALES> scales;
  scales.begin(work.m, work.block + b, work.all_slabs);
  F acc[TILE_ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) acc[r] = slab ? load(sums + r * LANES) : F{};
  for (int64_t i = 0; i < slabs; i++) {
    scales.to(slab + i);
    scale_slab(acc, totals + i * (64 / GROUP), scales, work.rows, row, slab + i);
  }
  store_tile(sums, acc);
}

// As bf16_tiles, group by group.
template <int64_t GROUP, int SCALES, int ROWS, int BLOCKS, int64_t FETCHED>
static void integer_tiles(const Work& work, int64_t row) {
  constexpr int64_t run = GROUP, G = 64 / GROUP;
  alignas(64) int32_t totals[ROWS * BLOCKS][KEPT * G][TILE_ROWS * LANES];
  const uint8_t *x0 = work.x(row), *x1 = x0 + (ROWS - 1) * work.all_slabs * TILE;
  for (int64_t s = 0; s < work.slabs; s += KEPT) {
    const int64_t slabs = work.slabs - s < KEPT ? work.slabs - s : KEPT;
    for (int64_t i = 0; i < slabs; i++) {
      fetch<FETCHED, BLOCKS>(work, s + i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const int64_t x = (s + i) * TILE + g * run, w = (s + i) * TILE + g * run / 4 * 64, kept = i * G + g;
        tile_load<4>(x0 + x, 64);
        tile_load<6>(work.tiles[0] + w, 64);
        tile_zero<0>();
        tile_dot_bytes<0, 4, 6>();
        if (BLOCKS == 2) {
          tile_load<7>(work.tiles[1] + w, 64);
          tile_zero<1>();
          tile_dot_bytes<1, 4, 7>();
        }
        if (ROWS == 2) {
          tile_load<5>(x1 + x, 64);
          tile_zero<2>();
          tile_dot_bytes<2, 5, 6>();
          if (BLOCKS == 2) {
            tile_zero<3>();
            tile_dot_bytes<3, 5, 7>();
          }
        }
        tile_store<0>(totals[0][kept], 64);
        if (BLOCKS == 2) tile_store<1>(totals[BLOCKS - 1][kept], 64);
        if (ROWS == 2) tile_store<2>(totals[(ROWS - 1) * BLOCKS][kept], 64);
        if (ROWS == 2 && BLOCKS == 2) tile_store<3>(totals[ROWS * BLOCKS - 1][kept], 64);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int b = 0; b < BLOCKS; b++)
        scale_tile<GROUP, SCALES>(work, row + r * TILE_ROWS, b, work.slab + s, slabs, totals[r * BLOCKS + b]);
  }
}

// One tile of rows times a block whose weights come from memory. While the unit multiplies one slab, the code scales
// the integer sums of the slab before; the fp32 sums stay in registers.
template <int64_t FORMAT, int64_t GROUP, int SCALES>
struct Stream {
  static constexpr int64_t groups = 64 / GROUP;
  const uint8_t *codes, *x;
  alignas(64) uint8_t wide[2][TILE];
  alignas(64) int32_t totals[2][groups][TILE_ROWS * LANES];

  template <int ODD>
  __attribute__((always_inline)) void multiply(int64_t slab) {
    widen<FORMAT, SCALES, AHEAD>(codes + slab * slab_bytes(FORMAT), 1, wide[ODD]);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      tile_load<4 + ODD>(x + slab * TILE + g * GROUP, 64);
      tile_load<6 + ODD>(wide[ODD] + g * GROUP / 4 * 64, 64);
      tile_zero<ODD>();
      tile_dot_bytes<ODD, 4 + ODD, 6 + ODD>();
      tile_store<ODD>(totals[ODD][g], 64);
    }
  }
};

template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void stream_block(const Matrix& m, const QuantisedRows& rows, int64_t block, float* sums) {
  const int64_t slabs = rows.depth / 64;
  Stream<FORMAT, GROUP, SCALES> stream;
  stream.codes = (const uint8_t*)m.codes + block * slabs * slab_bytes(FORMAT);
  stream.x = (const uint8_t*)rows.numbers;
  ScaleReader<GROUP, SCALES> scales;
  scales.begin(m, block, slabs);
  F acc[TILE_ROWS] = {};
  const auto scale = [&](int64_t slab) __attribute__((always_inline)) {
    scales.to(slab);
    scale_slab(acc, stream.totals[slab & 1], scales, rows, 0, slab);
  };
  stream.template multiply<0>(0);
  for (int64_t slab = 1; slab < slabs; slab += 2) {
    stream.template multiply<1>(slab);
    scale(slab - 1);
    if (slab + 1 == slabs) break;
    stream.template multiply<0>(slab + 1);
    scale(slab);
  }
  scale(slabs - 1);
  store_tile(sums, acc);
}

// ---- Both ----

// The blocks of a group, in the order of the columns of `Work::sums`.
struct Columns {
  int64_t first;   // block of the first column
  int64_t count;
  int64_t apart;   // 0, or blocks from the first half of the columns to the second

  int64_t block(int64_t column) const {
    return first + (apart && column >= count / 2 ? apart + column - count / 2 : column);
  }
};

TW_INLINE F total_of(const Work& work, int64_t row, int64_t column, int64_t block) {
  const int64_t at = block * LANES, n = work.m.out - at < LANES ? work.m.out - at : LANES;
  const F v = load(work.at(row, column) + row % TILE_ROWS * LANES);
  return work.m.bias ? v + load(work.m.bias + at, n) : v;
}

struct ToMemory {
  const Out& out;

  void operator()(const Work& work, const Columns& columns) const {
    for (int64_t row = work.top; row < work.bottom; row++)
      for (int64_t column = 0; column < columns.count; column++) {
        const int64_t block = columns.block(column), at = block * LANES;
        const int64_t n = work.m.out - at < LANES ? work.m.out - at : LANES;
        F v = total_of(work, row, column, block);
        if (out.add) v = v + load(out.add + row * out.stride + at, n);
        store(out.y + row * out.stride + at, v, n);
      }
  }
};

// Quantises inputs [input, input + n) of a row into its tiles; zeros if n is 0. Scales after the last row are set to 0,
// because leftover numbers there may be subnormal, which processors multiply slowly.
TW_INLINE void to_tiles(const QuantisedRows& rows, const Matrix& m, const float* x, int64_t row, int64_t input,
                        int64_t n) {
  const int64_t bytes = rows.kind == ROWS_BF16 ? 2 : 1, slabs = rows.depth * bytes / 64, at = input * bytes;
  char* to = (char*)rows.numbers + (row / TILE_ROWS * slabs + at / 64) * TILE + row % TILE_ROWS * 64 + at % 64;
  if (rows.kind == ROWS_BF16) return store_bf16((uint16_t*)to, load(x, n));
  const int64_t scale = (row / TILE_ROWS * rows.groups + input / m.group) * TILE_ROWS + row % TILE_ROWS;
  quantise(x, n, m.group, (int8_t*)to, rows.scales + scale, rows.sums + scale);
  if (m.minima) keep_minimum_factor(rows.scales[scale], rows.sums + scale);
  for (int64_t i = 1; row + 1 == rows.rows && (row + i) % TILE_ROWS; i++)
    rows.scales[scale + i] = 0, rows.sums[scale + i] = 0;
}

struct ToRows {
  const Between& between;

  void operator()(const Work& work, const Columns& columns) const {
    const QuantisedRows& to = between.to;
    const int64_t step = to.kind == ROWS_BF16 ? LANES : between.down.group;
    const int64_t units = between.gated ? 1 : columns.count * LANES / ACTIVATED;
    for (int64_t row = work.top; row < work.bottom; row++)
      for (int64_t unit = 0; unit < units; unit++) {
        float up[2 * ACTIVATED] __attribute__((aligned(64))), act[ACTIVATED] __attribute__((aligned(64)));
        const int64_t first = unit * ACTIVATED / LANES, some = (between.gated ? 2 : 1) * ACTIVATED / LANES;
        for (int64_t i = 0; i < some; i++)
          store(up + i * LANES, total_of(work, row, first + i, columns.block(first + i)));
        if (between.gated)
          avx512_kernels()->gated(between.activation, ACTIVATED, up, act);
        else
          avx512_kernels()->activate(between.activation, ACTIVATED, up, act);
        const int64_t input = columns.first * LANES + unit * ACTIVATED;
        for (int64_t i = 0; i < ACTIVATED; i += step) to_tiles(to, between.down, act + i, row, input + i, step);
      }
  }
};

template <int64_t FORMAT, typename SCHEME, int ROWS, int BLOCKS, int64_t FETCHED>
static void tiles_of(const Work& work, int64_t row) {
  if constexpr (FORMAT == BF16)
    bf16_tiles<ROWS, BLOCKS, FETCHED>(work, row);
  else
    integer_tiles<SCHEME::group, SCHEME::scales, ROWS, BLOCKS, FETCHED>(work, row);
}

// A chunk of the weights of one or two blocks, times some rows. The first tiles of rows prefetch the following weights.
template <int64_t FORMAT, typename SCHEME, int BLOCKS>
static void past_rows(Work& work) {
  constexpr int64_t fetched = slab_bytes(FORMAT);
  alignas(64) uint8_t wide[FORMAT == BF16 ? 1 : BLOCKS][FORMAT == BF16 ? 64 : CHUNK * TILE];
  if constexpr (FORMAT != BF16)
    for (int b = 0; b < BLOCKS; b++) {
      widen<FORMAT, SCHEME::scales, 0>(work.tiles[b], work.slabs, wide[b]);
      work.tiles[b] = wide[b];
    }
  if (work.bottom - work.top <= TILE_ROWS) return tiles_of<FORMAT, SCHEME, 1, BLOCKS, fetched>(work, work.top);
  tiles_of<FORMAT, SCHEME, 2, BLOCKS, fetched>(work, work.top);
  int64_t row = work.top + 2 * TILE_ROWS;
  for (; row + TILE_ROWS < work.bottom; row += 2 * TILE_ROWS) tiles_of<FORMAT, SCHEME, 2, BLOCKS, 0>(work, row);
  if (row < work.bottom) tiles_of<FORMAT, SCHEME, 1, BLOCKS, 0>(work, row);
}

// `Work::sums`. One for all formats: a thread's memory has every such variable.
static thread_local float chunk_sums[SUPER_ROWS / TILE_ROWS * SUPER_BLOCKS][TILE_ROWS * LANES]
    __attribute__((aligned(64)));

// All rows times a group of blocks.
template <int64_t FORMAT, typename SCHEME, typename To>
static void columns_in(const Matrix& m, const QuantisedRows& rows, const Columns& columns, const To& to) {
  constexpr int64_t bytes = slab_bytes(FORMAT), inputs = slab_inputs(FORMAT);
  const int64_t slabs = (m.in + inputs - 1) / inputs, run = slabs * bytes;
  const bool few = rows.rows <= TILE_ROWS;
  const int64_t chunk = few ? slabs : CHUNK;
  for (int64_t top = 0; top < rows.rows; top += SUPER_ROWS) {
    const int64_t bottom = rows.rows - top < SUPER_ROWS ? rows.rows : top + SUPER_ROWS;
    Work work{m, rows, top, bottom, 0, 0, slabs, chunk_sums[0], {nullptr, nullptr}, {nullptr, nullptr}, 0, 0};
    for (; work.slab < slabs; work.slab += chunk) {
      work.slabs = slabs - work.slab < chunk ? slabs - work.slab : chunk;
      for (work.column = 0; work.column < columns.count; work.column += 2) {
        const bool two = work.column + 1 < columns.count, last = work.column + 2 >= columns.count;
        work.block = columns.block(work.column);
        if constexpr (FORMAT != BF16)
          if (few) {
            for (int64_t b = 0; b <= two; b++)
              stream_block<FORMAT, SCHEME::group, SCHEME::scales>(m, rows, work.block + b, work.at(0, b));
            continue;
          }
        const uint8_t* codes = (const uint8_t*)m.codes + work.slab * bytes;
        const uint8_t* next = last ? codes + columns.first * run + work.slabs * bytes
                                   : codes + columns.block(work.column + 2) * run;
        for (int64_t b = 0; b < 2; b++) {
          work.tiles[b] = codes + (work.block + b) * run;
          work.next[b] = few ? work.tiles[b] + AHEAD : next + b * run;
        }
        two ? past_rows<FORMAT, SCHEME, 2>(work) : past_rows<FORMAT, SCHEME, 1>(work);
      }
    }
    work.column = 0;
    to(work, columns);
  }
}

template <int64_t FORMAT, typename To>
static void quantised_columns(const Matrix& m, const QuantisedRows& rows, const Columns& columns, const To& to) {
  with_scheme<FORMAT>(m, [&](auto scheme) { columns_in<FORMAT, decltype(scheme)>(m, rows, columns, to); });
}

template <typename To>
static void columns_of(const Matrix& m, const QuantisedRows& rows, const Columns& columns, const To& to) {
  switch (m.format) {
    case BF16: return columns_in<BF16, Scheme<0, PLAIN>>(m, rows, columns, to);
    case INT8: return quantised_columns<INT8>(m, rows, columns, to);
    case INT4: return quantised_columns<INT4>(m, rows, columns, to);
    case INT5: return quantised_columns<INT5>(m, rows, columns, to);
    case INT6: return quantised_columns<INT6>(m, rows, columns, to);
  }
}

static void begin_tiles(const Matrix& m, const QuantisedRows& rows) {
  set_tiles(m.format == BF16 && rows.rows < TILE_ROWS ? rows.rows : TILE_ROWS, m.group ? m.group : 64);
}

static bool in_tiles(int64_t format) { return format == BF16 || quantised(format); }

static int64_t row_kind(int64_t format) { return format == BF16 ? ROWS_BF16 : avx512_kernels()->row_kind(format); }

static int64_t together(int64_t format, int64_t rows) {
  if (format == BF16 || (in_tiles(format) && rows > FEW_ROWS)) return TILE_ROWS;
  return avx512_kernels()->together(format, rows);
}

static void linear(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  if (rows.together != TILE_ROWS) return avx512_kernels()->linear(m, rows, first, last, out);
  if (!rows.rows) return;  // AMX has no tiles of zero rows
  begin_tiles(m, rows);
  for (int64_t block = first; block < last; block += SUPER_BLOCKS)
    columns_of(m, rows, {block, last - block < SUPER_BLOCKS ? last - block : SUPER_BLOCKS, 0}, ToMemory{out});
  release();
}

static bool fuses(const Matrix&, const QuantisedRows& rows, const Between& between) {
  return rows.together == TILE_ROWS && between.to.together == TILE_ROWS && rows.rows > 0 &&
         between.width % ACTIVATED == 0;
}

static void up_rows(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Between& between) {
  constexpr int64_t unit = ACTIVATED / LANES;  // blocks
  const int64_t units = between.gated ? 1 : SUPER_BLOCKS / unit;
  begin_tiles(m, rows);
  for (int64_t at = first; at < last; at += units) {
    const int64_t some = last - at < units ? last - at : units;
    if (between.gated)
      columns_of(m, rows, {at * unit, 2 * unit, between.width / LANES}, ToRows{between});
    else
      columns_of(m, rows, {at * unit, some * unit, 0}, ToRows{between});
  }
  release();
}

static void quantise_row(const Matrix& m, const float* x, int64_t row, const QuantisedRows& rows) {
  if (rows.together != TILE_ROWS) return avx512_kernels()->quantise_row(m, x, row, rows);
  const int64_t step = rows.kind == ROWS_BF16 ? LANES : m.group;
  for (int64_t input = 0; input < rows.depth; input += step) {
    const int64_t left = m.in - input, n = left < 0 ? 0 : left < step ? left : step;
    to_tiles(rows, m, x + (n ? input : 0), row, input, n);
  }
}

// Four independent tiles of sums at a time, as in the kernels.
static int64_t multiply(int64_t format, int64_t rounds) {
  if (!in_tiles(format)) return avx512_kernels()->multiply(format, rounds);
  alignas(64) uint8_t zeros[TILE] = {};
  set_tiles(TILE_ROWS, 64);
  tile_load<4>(zeros, 64), tile_load<5>(zeros, 64), tile_load<6>(zeros, 64), tile_load<7>(zeros, 64);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t i = 0; i < rounds; i++)
    if (format == BF16)
      tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>(), tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    else
      tile_dot_bytes<0, 4, 6>(), tile_dot_bytes<1, 4, 7>(), tile_dot_bytes<2, 5, 6>(), tile_dot_bytes<3, 5, 7>();
  release();
  return rounds * 4 * TILE_ROWS * LANES * (format == BF16 ? 32 : 64);
}

static Kernels made() {
  Kernels k = *avx512_kernels();
  k.name = "amx";
  k.row_kind = row_kind;
  k.together = together;
  k.quantise_row = quantise_row;
  k.linear = linear;
  k.fuses = fuses;
  k.up_rows = up_rows;
  k.multiply = multiply;
  k.rotate = rotate;
  k.store_kv = store_kv;
  k.attend = attend;
  k.attention_scratch = attention_scratch;
  k.stretch_sums = stretch_sums;
  k.attend_stretch = attend_stretch;
  k.merge_stretches = merge_stretches;
  return k;
}

}  // namespace TW_ISA
}  // namespace tw

const tw::Kernels* tw::amx_kernels() {
  static const Kernels table = amx::made();
  return &table;
}
