// Linear layers over packed weights, from one row to thousands.
//
// Each row and output has one accumulator, which adds the inputs in order under every blocking: by fp32 fused
// multiply-add for the float formats; for quantised formats by an exact integer sum over each group, times its scale.
// So a row's outputs do not depend on the other rows, and the quantised formats give the same bits on every processor
// with fused multiply-add.

namespace tw {
namespace TW_ISA {

// Rows and blocks that a kernel holds in registers, the most rows that read the weights only once, and how many rows of
// integers and of floats are interleaved.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 8, MOST_FLOAT_ROWS = 12, BLOCKS = 2, FEW_ROWS = 16, SIDE_BY_SIDE = 4, FLOATS_SIDE_BY_SIDE = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, MOST_FLOAT_ROWS = 6, BLOCKS = 1, FEW_ROWS = 4, SIDE_BY_SIDE = 4, FLOATS_SIDE_BY_SIDE = 1;
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 4, MOST_FLOAT_ROWS = 4, BLOCKS = 1, FEW_ROWS = 4, SIDE_BY_SIDE = 4, FLOATS_SIDE_BY_SIDE = 1;
#else
constexpr int MOST_ROWS = 2, MOST_FLOAT_ROWS = 2, BLOCKS = 1, FEW_ROWS = 2, SIDE_BY_SIDE = 1, FLOATS_SIDE_BY_SIDE = 1;
#endif

constexpr int64_t AHEAD = 4096;        // prefetch distance in bytes of a block's weights
constexpr int64_t SUPER_ROWS = 256;    // rows that a group of blocks processes together
constexpr int64_t SUPER_BLOCKS = 8;    // blocks of such a group
constexpr int64_t SHORT_CHUNK = 512;   // inputs per chunk for nine to sixteen rows
constexpr int64_t CHUNK_BYTES = 1024;  // bytes of a row per chunk: rows and weights stay in the L1 cache

template <int64_t FORMAT>
struct Slab {
  static constexpr int64_t inputs = slab_inputs(FORMAT), bytes = slab_bytes(FORMAT);
};

TW_INLINE int64_t slabs_of(const Matrix& m) {
  return (m.in + slab_inputs(m.format) - 1) / slab_inputs(m.format);
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

// The weights of a line as fp32: of a format of 16 bits the inputs 2 i (which = 0) or 2 i + 1 (which = 1).
template <int64_t FORMAT>
TW_INLINE F weights_of(const uint8_t* at, int which) {
  const I line = load_line(at);
  if (FORMAT == F32) return bits_to_float(line);
  if (FORMAT == BF16) return bits_to_float(which ? line & all((int32_t)0xffff0000) : line << 16);
  return from_f16((which ? line >> 16 : line) & all(0xffff));
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

// Hides from the compiler where the weights are, so that it loads a line twice that it needs twice: a kernel of many rows
// needs the register in which it would wait.
TW_INLINE void hide(const uint8_t*& weights) { __asm__ volatile("" : "+r"(weights)); }

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
    const uint8_t* at = w + i * LINE;
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
      if (work.ahead) __builtin_prefetch(at + b * run + work.ahead);
#pragma GCC unroll 2
    for (int k = 0; k < per_line; k++) {
      if (R > 4) hide(at);
      F weights[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) weights[b] = weights_of<FORMAT>(at + b * run, k);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F value = all(x.get(r, i * per_line + k));
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) acc[r][b] = fma(weights[b], value, acc[r][b]);
      }
    }
  }
  end<R, B>(work, acc);
}

// The correction to sum(code * x) per unit of sum(x): kernels that read codes as unsigned include their offset.
TW_INLINE int32_t offset(int64_t format) {
#if !defined(__AVX512VNNI__)
  if (format == INT8) return 0;
#endif
  return format == INT8 ? -128 : format == INT4 ? -8 : format == INT5 ? -16 : -32;
}

// How many products of `dot` a sum of it may hold, and from it the sum of 32 bits. On AVX2 the sums of 4-bit codes have
// 16 bits: eight times two products of at most 15 * 127.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t dots_together(int64_t format) { return format == INT4 ? 8 : 1; }
TW_INLINE I widened(I pairs) {
  TW_PARTS pairs.p[i] = (IPart)_mm256_madd_epi16((__m256i)pairs.p[i], _mm256_set1_epi16(1));
  return pairs;
}
#else
constexpr int64_t dots_together(int64_t) { return 1; }
TW_INLINE I widened(I sums) { return sums; }
#endif

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
    if (FORMAT == INT4)
      acc.p[i] = (IPart)_mm256_add_epi16((__m256i)acc.p[i], pairs);
    else
      acc.p[i] = acc.p[i] + (IPart)_mm256_madd_epi16(pairs, ones);
  }
#elif defined(__aarch64__)
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  TW_PARTS {
    const int8x16_t code = veorq_s8((int8x16_t)codes.p[i], vdupq_n_s8(FORMAT == INT8 ? -128 : 0));
    const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(x));
    acc.p[i] = (IPart)vpadalq_s16((int32x4_t)acc.p[i], vpaddq_s16(low, vmull_high_s8(code, x)));
  }
#elif defined(__SSE2__)
  const __m128i x = _mm_set1_epi32(four), x_even = _mm_srai_epi16(_mm_slli_epi16(x, 8), 8), x_odd = _mm_srai_epi16(x, 8);
  TW_PARTS {
    const __m128i code = _mm_xor_si128((__m128i)codes.p[i], _mm_set1_epi8((char)(FORMAT == INT8 ? 0x80 : 0)));
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(code, 8), 8), odd = _mm_srai_epi16(code, 8);
    acc.p[i] += (IPart)_mm_madd_epi16(even, x_even) + (IPart)_mm_madd_epi16(odd, x_odd);
  }
#else
  const I x = all(four), code = FORMAT == INT8 ? codes ^ all((int32_t)0x80808080) : codes;
  acc = dot16(acc, right16(left16(code, 8), 8), right16(left16(x, 8), 8));
  acc = dot16(acc, right16(code, 8), right16(x, 8));
#endif
  return acc;
}

template <int64_t FORMAT, int64_t GROUP, int SCALES, int R, int B, int TOGETHER>
static void integer_kernel(const Work& work) {
  constexpr int64_t groups = 64 / GROUP, fours = GROUP / 4, together = dots_together(FORMAT);
  const int64_t run = work.all_slabs * Slab<FORMAT>::bytes;
  const uint8_t* w = (const uint8_t*)work.matrix.codes + work.block * run + work.slab * Slab<FORMAT>::bytes;
  ScaleReader<GROUP, SCALES> scales[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) scales[b].begin(work.matrix, work.block + b, work.all_slabs);
  using Pointers = RowPointers<int32_t, R, TOGETHER>;
  using Floats = RowPointers<float, R, TOGETHER>;
  const auto x = Pointers::from(work, work.rows.numbers, work.rows.depth / 4, work.slab * 16);
  const auto x_sums = Pointers::from(work, work.rows.sums, work.rows.groups, work.slab * groups);
  const auto x_minima = Floats::from(work, work.rows.sums, work.rows.groups, work.slab * groups);
  const auto x_scales = Floats::from(work, work.rows.scales, work.rows.groups, work.slab * groups);
  F acc[R][B];
  begin<R, B>(work, acc);
  for (int64_t s = 0; s < work.slabs; s++) {
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) scales[b].to(work.slab + s);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      const uint8_t* slab = w + s * Slab<FORMAT>::bytes;
      if (R > 2) hide(slab);
      const auto start = [&](int r) __attribute__((always_inline)) {
        return SCALES & MINIMA ? I{} : all(x_sums.get(r, s * groups + g));
      };
      I sums[R][B];
#pragma GCC unroll 16
      for (int first = 0; first < fours; first += together) {
        I some[R][B];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
          for (int b = 0; b < B; b++) some[r][b] = together > 1 ? I{} : first ? sums[r][b] : start(r);
#pragma GCC unroll 16
        for (int q = first; q < first + together; q++) {
          const int64_t four = g * fours + q;  // the index in the slab
          I codes[B];
#pragma GCC unroll 4
          for (int b = 0; b < B; b++) {
            const uint8_t* at = slab + b * run;
            if (work.ahead && four < Slab<FORMAT>::bytes / LINE) __builtin_prefetch(at + four * LINE + work.ahead);
            codes[b] = codes_of<FORMAT>(at, four);
          }
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            const int32_t values = x.get(r, s * 16 + four);
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
              some[r][b] = dot<FORMAT>(some[r][b], codes[b], values);
              settle(some[r][b]);
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
          for (int b = 0; b < B; b++)
            sums[r][b] = together > 1 ? (first ? sums[r][b] : start(r)) + widened(some[r][b]) : some[r][b];
      }
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        const F scale = scales[b].scale_of(g), minimum = SCALES & MINIMA ? scales[b].minimum_of(g) : F{};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          acc[r][b] = fma(to_float(sums[r][b]), scale * all(x_scales.get(r, s * groups + g)), acc[r][b]);
          if (SCALES & MINIMA) acc[r][b] = fma(minimum, all(x_minima.get(r, s * groups + g)), acc[r][b]);
        }
      }
    }
  }
  end<R, B>(work, acc);
}

template <int64_t FORMAT, int64_t GROUP, int SCALES, int R, int B, int TOGETHER>
TW_INLINE void kernel(const Work& work) {
  if constexpr (quantised(FORMAT))
    integer_kernel<FORMAT, GROUP, SCALES, R, B, TOGETHER>(work);
  else
    float_kernel<FORMAT, R, B, TOGETHER>(work);
}

// How many rows are interleaved: enough that a kernel's pointers fit in registers.
constexpr int side_by_side_of(int64_t format) { return quantised(format) ? SIDE_BY_SIDE : FLOATS_SIDE_BY_SIDE; }
static int64_t together(int64_t format, int64_t rows) { return rows > 4 ? side_by_side_of(format) : 1; }

// Whether a kernel of `rows` rows prefetches its weights. AMD's processors read a plain stream of codes faster by
// themselves, as long as its multiplications are few; the fifth and sixth bits of codes are not read in order.
template <int64_t FORMAT, int R>
static int64_t ahead_of() {
#if defined(__AVX512F__)
  static const bool amd = __builtin_cpu_is("amd");
  if (amd && (FORMAT == INT8 || (FORMAT == INT4 && R <= 2))) return 0;
#endif
  return AHEAD;
}

// Few rows: the weights come from memory, and one pass over them computes all rows. Block after block the weights are
// one stream, whose end is where the prefetch of the next block begins; two blocks at once only where fp32 products
// bound the kernel.
template <int64_t FORMAT, int64_t GROUP, int SCALES, int R>
static void in_one_go(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  constexpr int side_by_side = R > 4 ? side_by_side_of(FORMAT) : 1, B = quantised(FORMAT) || R <= 2 ? 1 : BLOCKS;
  const int64_t slabs = slabs_of(m), ahead = ahead_of<FORMAT, R>();
  for (int64_t block = first; block < last;) {
    const Work work{m, rows, 0, rows.rows, block, 0, slabs, slabs, nullptr, 0, true, true, out, ahead};
    if (block + B <= last)
      kernel<FORMAT, GROUP, SCALES, R, B, side_by_side>(work);
    else
      kernel<FORMAT, GROUP, SCALES, R, 1, side_by_side>(work);
    block += block + B <= last ? B : 1;
  }
}

// How many rows the next of the kernels takes that take up to `most` rows: `most`, 8 or 4. Twice 4 are faster than 6 and 2.
constexpr int64_t rows_of_kernel(int64_t most, int64_t left) {
  if (left <= 4 || (most == 6 && (left == 7 || left == 8))) return most < 4 ? most : 4;
  return most > 8 && left <= 8 ? 8 : most;
}

// Many rows: the weights of a pair of blocks over a chunk of inputs stay in the cache, and all rows use them in turn. The
// first rows prefetch the weights after them, `next` bytes away.
template <int64_t FORMAT, int64_t GROUP, int SCALES, int B>
static void past_rows(Work work, int64_t top, int64_t bottom, float* sums, int64_t next) {
  constexpr int most = quantised(FORMAT) ? MOST_ROWS : MOST_FLOAT_ROWS, beside = side_by_side_of(FORMAT);
  for (work.row = top; work.row < bottom; work.row += work.live) {
    const int64_t left = bottom - work.row, rows = rows_of_kernel(most, left);
    work.live = left < rows ? left : rows;
    work.sums = sums + (work.row - top) * work.sums_stride;
    work.ahead = work.row ? 0 : next;
    if (most > 8 && rows == 8)
      kernel<FORMAT, GROUP, SCALES, (most > 8 ? 8 : most), B, beside>(work);
    else if (most > 4 && rows == 4)
      kernel<FORMAT, GROUP, SCALES, (most > 4 ? 4 : most), B, beside>(work);
    else
      kernel<FORMAT, GROUP, SCALES, most, B, beside>(work);
  }
}

// The sums over the chunks so far, in `in_chunks`. One for all formats: a thread's memory has every such variable.
static thread_local float chunk_sums[SUPER_ROWS * SUPER_BLOCKS * LANES] __attribute__((aligned(64)));

template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void in_chunks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  constexpr int64_t number = quantised(FORMAT) ? 1 : 4;  // bytes of one input in a row
  constexpr int64_t chunk = CHUNK_BYTES / number / Slab<FORMAT>::inputs / (quantised(FORMAT) ? 2 : 1);
  const int64_t slabs = slabs_of(m), run = slabs * Slab<FORMAT>::bytes;
  for (int64_t group = first; group < last; group += SUPER_BLOCKS)
    for (int64_t top = 0; top < rows.rows; top += SUPER_ROWS)
      for (int64_t slab = 0; slab < slabs; slab += chunk) {
        const int64_t bottom = rows.rows - top < SUPER_ROWS ? rows.rows : top + SUPER_ROWS;
        const int64_t end = last - group < SUPER_BLOCKS ? last : group + SUPER_BLOCKS;
        for (int64_t block = group; block < end;) {
          const int64_t some = slabs - slab < chunk ? slabs - slab : chunk;
          const Work work{m,    rows, 0, 0, block, slab, some, slabs, nullptr, SUPER_BLOCKS * LANES, slab == 0,
                          slab + chunk >= slabs, out, 0};
          float* kept = chunk_sums + (block - group) * LANES;
          const int64_t step = block + BLOCKS <= end ? BLOCKS : 1;
          const int64_t next = block + step < end ? step * run : chunk * Slab<FORMAT>::bytes - (block - group) * run;
          if (step == BLOCKS)
            past_rows<FORMAT, GROUP, SCALES, BLOCKS>(work, top, bottom, kept, next);
          else
            past_rows<FORMAT, GROUP, SCALES, 1>(work, top, bottom, kept, next);
          block += step;
        }
      }
}

// Nine to sixteen rows: they fit in the cache only for a chunk of inputs. Prefetches the next block's weights.
template <int64_t FORMAT, int64_t GROUP, int SCALES>
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
        kernel<FORMAT, GROUP, SCALES, 16, 1, side_by_side_of(FORMAT)>(work);
      }
    }
}

template <int64_t FORMAT, int64_t GROUP, int SCALES>
static void blocks_of(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  const int64_t count = rows.rows;
  if (count == 1) return in_one_go<FORMAT, GROUP, SCALES, 1>(m, rows, first, last, out);
  if (count == 2) return in_one_go<FORMAT, GROUP, SCALES, 2>(m, rows, first, last, out);
  if (FEW_ROWS >= 4 && count <= 4) return in_one_go<FORMAT, GROUP, SCALES, 4>(m, rows, first, last, out);
#if defined(__AVX512F__)
  if (count <= 8) return in_one_go<FORMAT, GROUP, SCALES, 8>(m, rows, first, last, out);
  if (count <= 16) return in_short_chunks<FORMAT, GROUP, SCALES>(m, rows, first, last, out);
#endif
  in_chunks<FORMAT, GROUP, SCALES>(m, rows, first, last, out);
}

template <int64_t FORMAT>
static void quantised_blocks(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  with_scheme<FORMAT>(m, [&](auto scheme) {
    blocks_of<FORMAT, decltype(scheme)::group, decltype(scheme)::scales>(m, rows, first, last, out);
  });
}

static void linear(const Matrix& m, const QuantisedRows& rows, int64_t first, int64_t last, const Out& out) {
  switch (m.format) {
    case F32: return blocks_of<F32, 0, PLAIN>(m, rows, first, last, out);
    case BF16: return blocks_of<BF16, 0, PLAIN>(m, rows, first, last, out);
    case F16: return blocks_of<F16, 0, PLAIN>(m, rows, first, last, out);
    case INT8: return quantised_blocks<INT8>(m, rows, first, last, out);
    case INT4: return quantised_blocks<INT4>(m, rows, first, last, out);
    case INT5: return quantised_blocks<INT5>(m, rows, first, last, out);
    case INT6: return quantised_blocks<INT6>(m, rows, first, last, out);
  }
}

static int64_t row_kind(int64_t format) { return quantised(format) ? ROWS_INT8 : ROWS_F32; }

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
    if (m.minima)
      keep_minimum_factor(rows.scales[at], rows.sums + at);
    else
      rows.sums[at] *= offset(m.format);
    char* to = (char*)rows.numbers + 4 * (place(row, rows.depth / 4, rows.together) + g * m.group / 4 * rows.together);
    for (int64_t i = 0; i < m.group / 4; i++) memcpy(to + 4 * i * rows.together, codes + 4 * i, 4);
  }
}

static bool fuses(const Matrix&, const QuantisedRows&, const Between&) { return false; }
static void up_rows(const Matrix&, const QuantisedRows&, int64_t, int64_t, const Between&) {}

// A code of a quantised row; w: the row's four bytes of the first line.
static float code_of(const Matrix& m, const uint8_t* w, int64_t input) {
  const int64_t four = input % 64 / 4;
  const uint8_t* at = w + input / 64 * slab_bytes(m.format) + input % 4;
  if (m.format == INT8) return (float)(at[four * LINE] - 128);
  const int both = at[(four & 7) * LINE], low = four < 8 ? both & 15 : both >> 4;
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
  if (!m.super) return from_f16(half);
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
      for (int64_t i = first; i < first + m.group && i < m.in; i++) x[i] = code_of(m, w, i) * scale - minimum;
    }
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
