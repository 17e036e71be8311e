// Linear layers over packed weights, from one row to thousands.
//
// Each row and output has one accumulator, which adds the inputs in order under every blocking: by fp32 fused
// multiply-add for the float formats; for quantised formats by an exact integer sum over each group, times its scale.
// So a row's outputs do not depend on the other rows, and the quantised formats give the same bits on every processor
// with fused multiply-add.

namespace tw {
namespace TW_ISA {

// Rows and blocks that a kernel holds in registers, and the most rows that read the weights only once.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 8, MOST_FLOAT_ROWS = 12, BLOCKS = 2, FEW_ROWS = 16, SIDE_BY_SIDE = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, MOST_FLOAT_ROWS = 4, BLOCKS = 1, FEW_ROWS = 4, SIDE_BY_SIDE = 1;
#else
constexpr int MOST_ROWS = 2, MOST_FLOAT_ROWS = 2, BLOCKS = 1, FEW_ROWS = 2, SIDE_BY_SIDE = 1;
#endif

constexpr int64_t LINE = 64;           // bytes: four bytes of inputs for each of 16 outputs
constexpr int64_t AHEAD = 4096;        // prefetch distance in bytes of a block's weights
constexpr int64_t SUPER_ROWS = 256;    // rows that a group of blocks processes together
constexpr int64_t SUPER_BLOCKS = 8;    // blocks of such a group
constexpr int64_t SHORT_CHUNK = 512;   // inputs per chunk for nine to sixteen rows
constexpr int64_t CHUNK_BYTES = 1024;  // bytes of a row per chunk: rows and weights stay in the L1 cache

template <int64_t FORMAT>
struct Slab {
  static constexpr int64_t inputs = FORMAT == F32 ? 16 : FORMAT == BF16 || FORMAT == F16 ? 32 : 64;
  static constexpr int64_t bytes = FORMAT == INT4 ? 512 : 1024;
};

TW_INLINE int64_t slabs_of(const Matrix& m) {
  const int64_t inputs = m.format == F32 ? 16 : m.format == BF16 || m.format == F16 ? 32 : 64;
  return (m.in + inputs - 1) / inputs;
}

struct Work {  // a kernel's work: some rows over a chunk of inputs, for one block or two adjacent ones
  const Matrix& matrix;
  const QuantisedRows& rows;
  int64_t row, live;      // the first row; the number of valid rows, at most the kernel's
  int64_t block, slab, slabs, all_slabs;
  float* sums;            // [row][16 for each block]: sums over the previous chunks
  int64_t sums_stride;    // floats from one row to the next
  bool first, last;       // whether this is the first or last chunk of the inputs
  const Out& out;
  int64_t ahead;          // prefetch distance of the weights in bytes; 0: they are in the cache already
};

TW_INLINE void finish(const Work& work, int64_t block, int64_t row, F v) {
  const Matrix& m = work.matrix;
  const int64_t at = block * LANES, n = m.out - at < LANES ? m.out - at : LANES;
  const int64_t place = (work.row + row) * work.out.stride + at;
  if (m.bias) v = v + load(m.bias + at, n);
  if (work.out.add) v = v + load(work.out.add + place, n);
  store(work.out.y + place, v, n);
}

template <int R, int B>
TW_INLINE void begin(const Work& work, F (&acc)[R][B]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
      acc[r][b] = work.first || r >= work.live ? F{} : load(work.sums + r * work.sums_stride + b * LANES);
}

template <int R, int B>
TW_INLINE void end(const Work& work, F (&acc)[R][B]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    if (r >= work.live) break;
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      if (work.last)
        finish(work, work.block + b, r, acc[r][b]);
      else
        store(work.sums + r * work.sums_stride + b * LANES, acc[r][b]);
    }
  }
}

TW_INLINE I load_line(const uint8_t* x) {
  I r;
  memcpy(&r, x, LINE);
  return r;
}

// One half of each lane of a line as fp32: the inputs 2 i (which = 0) or 2 i + 1 (which = 1).
template <int64_t FORMAT>
TW_INLINE F half(I line, int which) {
  if (FORMAT == BF16) return bits_to_float(which ? line & all((int32_t)0xffff0000) : line << 16);
  uint16_t each[32], picked[16];
  memcpy(each, &line, LINE);
  for (int i = 0; i < 16; i++) picked[i] = each[2 * i + which];
  return load_f16(picked);
}

// The pointers to a kernel's R rows: one for each TOGETHER interleaved rows, or one per row.
template <typename Unit, int R, int TOGETHER>
struct RowPointers {
  static constexpr int count = TOGETHER == 1 ? R : (R + TOGETHER - 1) / TOGETHER;
  const Unit* at[count];

  // units: per row. Without interleaving, rows after the last valid one repeat the first.
  TW_INLINE RowPointers from(const Work& work, const void* numbers, int64_t units, int64_t unit) {
    RowPointers p;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
      const int64_t row = work.row + (TOGETHER > 1 ? i * TOGETHER : i < work.live ? i : 0);
      p.at[i] = (const Unit*)numbers + row * units + unit * TOGETHER;
    }
    return p;
  }
  __attribute__((always_inline)) Unit get(int r, int64_t unit) const {
    Unit value;
    memcpy(&value, at[r / TOGETHER] + unit * TOGETHER + r % TOGETHER, sizeof value);
    return value;
  }
};

template <int64_t FORMAT, int R, int B, int TOGETHER>
static void float_kernel(const Work& work) {
  constexpr int64_t per_line = FORMAT == F32 ? 1 : 2;
  const int64_t run = work.all_slabs * Slab<FORMAT>::bytes;
  const uint8_t* w = (const uint8_t*)work.matrix.codes + work.block * run + work.slab * Slab<FORMAT>::bytes;
  using Pointers = RowPointers<float, R, TOGETHER>;
  const auto x = Pointers::from(work, work.rows.numbers, work.rows.depth, work.slab * Slab<FORMAT>::inputs);
  F acc[R][B];
  begin<R, B>(work, acc);
  const int64_t lines = work.slabs * (Slab<FORMAT>::bytes / LINE);
  for (int64_t i = 0; i < lines; i++) {
    F weights[B][per_line];
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const uint8_t* at = w + b * run + i * LINE;
      if (work.ahead) __builtin_prefetch(at + work.ahead);
      if (FORMAT == F32) {
        weights[b][0] = bits_to_float(load_line(at));
      } else {
        weights[b][0] = half<FORMAT>(load_line(at), 0);
        weights[b][per_line - 1] = half<FORMAT>(load_line(at), 1);
      }
    }
#pragma GCC unroll 2
    for (int k = 0; k < per_line; k++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F value = all(x.get(r, i * per_line + k));
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) acc[r][b] = fma(weights[b][k], value, acc[r][b]);
      }
  }
  end<R, B>(work, acc);
}

// The correction to sum(code * x) per unit of sum(x): kernels that read codes as unsigned include their offset.
TW_INLINE int32_t offset(int64_t format) {
#if defined(__AVX512VNNI__)
  return format == INT8 ? -128 : -8;
#else
  return format == INT8 ? 0 : -8;
#endif
}

// acc[lane] += the sum of four codes of the lane times four of x; exact.
template <int64_t FORMAT>
TW_INLINE I dot(I acc, I codes, int32_t four) {
#if defined(__AVX512VNNI__)
  acc.p[0] = (IPart)_mm512_dpbusd_epi32((__m512i)acc.p[0], (__m512i)codes.p[0], _mm512_set1_epi32(four));
#elif defined(__AVX2__)
  const __m256i x = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  const __m256i size = _mm256_abs_epi8(x);
  TW_PARTS {
    __m256i pairs;
    if (FORMAT == INT8) {  // sign_epi8 moves the sign of x to the code: no pair overflows 16 bits
      const __m256i code = _mm256_xor_si256((__m256i)codes.p[i], _mm256_set1_epi8((char)0x80));
      pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(code, x));
    } else {
      pairs = _mm256_maddubs_epi16((__m256i)codes.p[i], x);
    }
    acc.p[i] = acc.p[i] + (IPart)_mm256_madd_epi16(pairs, ones);
  }
#else
  int8_t x[4];
  uint8_t each[64];
  int32_t sums[16];
  memcpy(x, &four, 4);
  memcpy(each, &codes, 64);
  memcpy(sums, &acc, 64);
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 4; k++) sums[i] += ((int32_t)each[4 * i + k] - (FORMAT == INT8 ? 128 : 0)) * x[k];
  memcpy(&acc, sums, 64);
#endif
  return acc;
}

template <int64_t FORMAT, int64_t GROUP, int R, int B, int TOGETHER>
static void integer_kernel(const Work& work) {
  constexpr int64_t groups = 64 / GROUP, fours = GROUP / 4;
  const int64_t run = work.all_slabs * Slab<FORMAT>::bytes;
  const uint8_t* w = (const uint8_t*)work.matrix.codes + work.block * run + work.slab * Slab<FORMAT>::bytes;
  const uint16_t* scales = work.matrix.scales + (work.block * work.all_slabs + work.slab) * groups * LANES;
  using Pointers = RowPointers<int32_t, R, TOGETHER>;
  using Scales = RowPointers<float, R, TOGETHER>;
  const auto x = Pointers::from(work, work.rows.numbers, work.rows.depth / 4, work.slab * 16);
  const auto x_sums = Pointers::from(work, work.rows.sums, work.rows.groups, work.slab * groups);
  const auto x_scales = Scales::from(work, work.rows.scales, work.rows.groups, work.slab * groups);
  F acc[R][B];
  begin<R, B>(work, acc);
  for (int64_t s = 0; s < work.slabs; s++) {
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
      I sums[R][B];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) sums[r][b] = all(x_sums.get(r, s * groups + g));
#pragma GCC unroll 16
      for (int q = 0; q < fours; q++) {
        const int64_t four = g * fours + q;  // the index in the slab
        I codes[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
          const uint8_t* at = w + b * run + s * Slab<FORMAT>::bytes;
          if (FORMAT == INT8) {
            if (work.ahead) __builtin_prefetch(at + four * LINE + work.ahead);
            codes[b] = load_line(at + four * LINE);
          } else {
            if (work.ahead && four < 8) __builtin_prefetch(at + four * LINE + work.ahead);
            const I both = load_line(at + (four & 7) * LINE);
            codes[b] = (four < 8 ? both : both >> 4) & all(0x0f0f0f0f);
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const int32_t values = x.get(r, s * 16 + four);
#pragma GCC unroll 4
          for (int b = 0; b < B; b++) sums[r][b] = dot<FORMAT>(sums[r][b], codes[b], values);
        }
      }
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        const F scale = load_f16(scales + (b * work.all_slabs + s) * groups * LANES + g * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
          acc[r][b] = fma(to_float(sums[r][b]), scale * all(x_scales.get(r, s * groups + g)), acc[r][b]);
      }
    }
  }
  end<R, B>(work, acc);
}

template <int64_t FORMAT, int64_t GROUP, int R, int B, int TOGETHER>
TW_INLINE void kernel(const Work& work) {
  if constexpr (FORMAT == INT8 || FORMAT == INT4)
    integer_kernel<FORMAT, GROUP, R, B, TOGETHER>(work);
  else
    float_kernel<FORMAT, R, B, TOGETHER>(work);
}

// How many rows are interleaved: enough that a kernel's pointers fit in registers.
static int64_t together(int64_t, int64_t rows) { return rows > 4 ? SIDE_BY_SIDE : 1; }

// Few rows: the weights come from memory, and one pass over them computes all rows.
template <int64_t FORMAT, int64_t GROUP, int R, int B>
static void in_one_go(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  constexpr int side_by_side = R > 4 ? SIDE_BY_SIDE : 1;
  const int64_t slabs = slabs_of(m);
  for (int64_t block = first; block < last;) {
    const Work work{m, rows, 0, rows.rows, block, 0, slabs, slabs, nullptr, 0, true, true, out, AHEAD};
    if (block + B <= last)
      kernel<FORMAT, GROUP, R, B, side_by_side>(work);
    else
      kernel<FORMAT, GROUP, R, 1, side_by_side>(work);
    block += block + B <= last ? B : 1;
  }
}

// Many rows: the weights of a pair of blocks over a chunk of inputs stay in the cache, and all rows use them in turn.
template <int64_t FORMAT, int64_t GROUP, int B>
static void past_rows(Work work, int64_t top, int64_t bottom, float* sums) {
  constexpr int most = FORMAT == INT8 || FORMAT == INT4 ? MOST_ROWS : MOST_FLOAT_ROWS;
  for (work.row = top; work.row < bottom; work.row += work.live) {
    const int64_t left = bottom - work.row;
    work.live = left < most ? left : most;
    work.sums = sums + (work.row - top) * work.sums_stride;
    if (most > 8 && left <= 8 && left > 4)
      kernel<FORMAT, GROUP, (most > 8 ? 8 : most), B, SIDE_BY_SIDE>(work);
    else if (most > 4 && left <= 4)
      kernel<FORMAT, GROUP, (most > 4 ? 4 : most), B, SIDE_BY_SIDE>(work);
    else
      kernel<FORMAT, GROUP, most, B, SIDE_BY_SIDE>(work);
  }
}

template <int64_t FORMAT, int64_t GROUP>
static void in_chunks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  static thread_local float sums[SUPER_ROWS * SUPER_BLOCKS * LANES] __attribute__((aligned(64)));
  constexpr int64_t number = FORMAT == INT8 || FORMAT == INT4 ? 1 : 4;  // bytes of one input in a row
  constexpr int64_t chunk = CHUNK_BYTES / number / Slab<FORMAT>::inputs / (FORMAT == INT8 || FORMAT == INT4 ? 2 : 1);
  const int64_t slabs = slabs_of(m);
  for (int64_t group = first; group < last; group += SUPER_BLOCKS)
    for (int64_t top = 0; top < rows.rows; top += SUPER_ROWS)
      for (int64_t slab = 0; slab < slabs; slab += chunk) {
        const int64_t bottom = rows.rows - top < SUPER_ROWS ? rows.rows : top + SUPER_ROWS;
        const int64_t end = last - group < SUPER_BLOCKS ? last : group + SUPER_BLOCKS;
        for (int64_t block = group; block < end;) {
          const int64_t some = slabs - slab < chunk ? slabs - slab : chunk;
          const Work work{m,    rows, 0, 0, block, slab, some, slabs, nullptr, SUPER_BLOCKS * LANES, slab == 0,
                          slab + chunk >= slabs, out, 0};
          float* kept = sums + (block - group) * LANES;
          if (block + BLOCKS <= end)
            past_rows<FORMAT, GROUP, BLOCKS>(work, top, bottom, kept);
          else
            past_rows<FORMAT, GROUP, 1>(work, top, bottom, kept);
          block += block + BLOCKS <= end ? BLOCKS : 1;
        }
      }
}

// Nine to sixteen rows: they fit in the cache only for a chunk of inputs. Prefetches the next block's weights.
template <int64_t FORMAT, int64_t GROUP>
static void in_short_chunks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  float sums[SUPER_BLOCKS][16 * LANES] __attribute__((aligned(64)));
  constexpr int64_t chunk = SHORT_CHUNK / Slab<FORMAT>::inputs;
  const int64_t slabs = slabs_of(m), run = slabs * Slab<FORMAT>::bytes;
  for (int64_t group = first; group < last; group += SUPER_BLOCKS)
    for (int64_t slab = 0; slab < slabs; slab += chunk) {
      const int64_t end = last - group < SUPER_BLOCKS ? last : group + SUPER_BLOCKS;
      for (int64_t block = group; block < end; block++) {
        const int64_t some = slabs - slab < chunk ? slabs - slab : chunk;
        const int64_t next = block + 1 < end ? run : chunk * Slab<FORMAT>::bytes - (end - 1 - group) * run;
        const Work work{m,     rows, 0, rows.rows, block, slab, some, slabs, sums[block - group], LANES, slab == 0,
                        slab + chunk >= slabs, out,  next};
        kernel<FORMAT, GROUP, 16, 1, SIDE_BY_SIDE>(work);
      }
    }
}

template <int64_t FORMAT, int64_t GROUP>
static void blocks_of(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  const int64_t count = rows.rows;
  if (count == 1) return in_one_go<FORMAT, GROUP, 1, BLOCKS>(m, rows, first, last, out);
  if (count == 2) return in_one_go<FORMAT, GROUP, 2, BLOCKS>(m, rows, first, last, out);
  if (FEW_ROWS >= 4 && count <= 4) return in_one_go<FORMAT, GROUP, 4, BLOCKS>(m, rows, first, last, out);
#if defined(__AVX512F__)
  if (count <= 8) return in_one_go<FORMAT, GROUP, 8, BLOCKS>(m, rows, first, last, out);
  if (count <= 16) return in_short_chunks<FORMAT, GROUP>(m, rows, first, last, out);
#endif
  in_chunks<FORMAT, GROUP>(m, rows, first, last, out);
}

static void linear(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  switch (m.format) {
    case F32: return blocks_of<F32, 0>(m, rows, first, last, out);
    case BF16: return blocks_of<BF16, 0>(m, rows, first, last, out);
    case F16: return blocks_of<F16, 0>(m, rows, first, last, out);
    case INT8:
      return m.group == 32 ? blocks_of<INT8, 32>(m, rows, first, last, out)
                           : blocks_of<INT8, 64>(m, rows, first, last, out);
    case INT4:
      return m.group == 32 ? blocks_of<INT4, 32>(m, rows, first, last, out)
                           : blocks_of<INT4, 64>(m, rows, first, last, out);
  }
}

static int64_t row_kind(int64_t format) { return format == INT8 || format == INT4 ? ROWS_INT8 : ROWS_F32; }

// The index of a row's first unit, with `units` units per row.
TW_INLINE int64_t place(int64_t row, int64_t units, int64_t together) {
  return row / together * together * units + row % together;
}

static void quantise_row(const Matrix& m, const float* x, int64_t row, const QuantisedRows& rows) {
  if (rows.kind == ROWS_F32) {
    float* to = (float*)rows.numbers + place(row, rows.depth, rows.together);
    for (int64_t i = 0; i < m.in; i++) to[i * rows.together] = x[i];
    for (int64_t i = m.in; i < rows.depth; i++) to[i * rows.together] = 0;
    return;
  }
  for (int64_t g = 0; g < rows.groups; g++) {
    const int64_t left = m.in - g * m.group, n = left < 0 ? 0 : left < m.group ? left : m.group;
    const int64_t at = place(row, rows.groups, rows.together) + g * rows.together;
    int8_t codes[64];
    quantise(x + (n ? g * m.group : 0), n, m.group, codes, rows.scales + at, rows.sums + at);
    rows.sums[at] *= offset(m.format);
    char* to = (char*)rows.numbers + 4 * (place(row, rows.depth / 4, rows.together) + g * m.group / 4 * rows.together);
    for (int64_t i = 0; i < m.group / 4; i++) memcpy(to + 4 * i * rows.together, codes + 4 * i, 4);
  }
}

static bool fuses(const Matrix&, const QuantisedRows&, const Between&) { return false; }
static void up_rows(const Matrix&, const QuantisedRows&, int64_t, int64_t, const Between&) {}

// Decodes row `index` of a matrix: it owns four bytes of each line of its block.
static void embed(const Matrix& m, int64_t index, float* x) {
  const int64_t block = index / LANES, lane = index % LANES, slabs = slabs_of(m);
  const uint8_t* w = (const uint8_t*)m.codes + block * slabs * (m.format == INT4 ? 512 : 1024) + 4 * lane;
  const uint16_t* scales = m.group ? m.scales + block * slabs * (64 / m.group) * LANES + lane : nullptr;
  if (m.format == F32) {
    for (int64_t i = 0; i < m.in; i++) memcpy(x + i, w + i * LINE, 4);
    return;
  }
  const bool halves = m.format == BF16 || m.format == F16;
  float scale = 0;
  for (int64_t i = 0; i < m.in; i += halves ? 2 : 4) {
    const int64_t n = m.in - i;
    if (halves) {
      uint16_t two[2];
      memcpy(two, w + i / 2 * LINE, 4);
      for (int64_t k = 0; k < 2 && k < n; k++) {
        const uint32_t wide = (uint32_t)two[k] << 16;
        if (m.format == BF16)
          memcpy(x + i + k, &wide, 4);
        else
          x[i + k] = from_f16(two[k]);
      }
      continue;
    }
    if (i % m.group == 0) scale = from_f16(scales[i / m.group * LANES]);
    const bool high = m.format == INT4 && i % 64 >= 32;
    uint8_t four[4];
    memcpy(four, w + (m.format == INT8 ? i / 4 : i / 64 * 8 + i % 32 / 4) * LINE, 4);
    for (int64_t k = 0; k < 4 && k < n; k++)
      x[i + k] = (float)(m.format == INT8 ? four[k] - 128 : (high ? four[k] >> 4 : four[k] & 15) - 8) * scale;
  }
}

}  // namespace TW_ISA
}  // namespace tw
