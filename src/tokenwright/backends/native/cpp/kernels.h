// What an instruction set must be able to do: one table of functions for each, chosen at run time.
//
// Every function works on what it is told by one thread; `step.cpp` shares the work out. What a row becomes depends on
// that row alone: sums run along the inputs in order, one accumulator for each output, however many rows go together.
#pragma once

#include "api.h"

namespace tw {

// How a linear wants its rows: as fp32, as int8 with a scale for each group, or as bf16.
enum RowKind : int64_t { ROWS_F32 = 0, ROWS_INT8 = 1, ROWS_BF16 = 2 };

// Rows made ready for a matrix, `depth` inputs each: `in` rounded up to whole slabs, zeros behind `in`.
//
// `together` rows lie side by side, unit by unit, so that a kernel walks through them with one pointer: a unit is a float,
// four int8 or two bfloat16, and one scale or sum. For AMX sixteen rows make a tile, line by line; isa_amx.cpp says how.
// There is room for whole tiles: rows up to the next multiple of 32.
struct Rows {
  int64_t kind, rows, depth;
  int64_t groups;    // of a row, where it is int8
  int64_t together;  // 1, 4, or 16 where rows lie in tiles
  void* numbers;     // [rows / together][depth in units][together] units
  float* scales;     // [rows / together][groups][together]
  int32_t* sums;     // as scales: what makes up for the offset of the weights' codes
};

// Where a linear's outputs go: y = x W^T + bias, and + add where that is not null. add may be y.
struct Out {
  float* y;
  const float* add;
  int64_t stride;  // floats from one row to the next, of both
};

// What lies between an MLP's first linear and its last one, whose rows are made ready meanwhile.
struct Between {
  int64_t activation;
  int64_t gated;  // act(gates) * values: the first half of the outputs are the gates
  int64_t width;  // inputs of the last linear
  const Matrix& down;
  const Rows& to;
};
constexpr int64_t ACTIVATED = 64;  // of these inputs, at a time

// Rows [first, last) of a chunk, counted in the chunk, and query heads [head, head_last): some of one KV head, or, of one
// row alone, all those of some KV heads that stand side by side, QUERIES_TOGETHER at most.
constexpr int64_t QUERIES_TOGETHER = 64;
struct Queries {
  int64_t first, last;
  int64_t head, head_last;
  const float* q;       // [T][stride], the query heads at the front
  const float* sink_q;  // as q: what meets the keys of sinks; null where q does
  float* out;           // [T][out_stride]
  int64_t stride, sink_stride, out_stride;
};

struct Kernels {
  const char* name;

  int64_t (*row_kind)(int64_t format);
  int64_t (*together)(int64_t format, int64_t rows);
  // One row of fp32 inputs into place `row` of `rows`.
  void (*prepare)(const Matrix&, const float* x, int64_t row, const Rows&);
  // The blocks [first, last) of a linear, for all rows.
  void (*linear)(const Matrix&, const Rows&, int64_t first, int64_t last, const Out&);
  // Whether `up_rows` can take these, and that for units [first, last) of ACTIVATED inputs of the last linear: linear,
  // activation and the last linear's prepare in one, so that what lies between never goes to memory. Bit by bit the same.
  bool (*fuses)(const Matrix& up, const Rows&, const Between&);
  void (*up_rows)(const Matrix& up, const Rows&, int64_t first, int64_t last, const Between&);
  // Row `index` of a matrix, decoded: [in].
  void (*embed)(const Matrix&, int64_t index, float* x);

  void (*norm)(const Norm&, int64_t size, const float* x, float* y);
  void (*activate)(int64_t activation, int64_t size, const float* x, float* y);
  // act(gates) * values, of [2 size].
  void (*gated)(int64_t activation, int64_t size, const float* x, float* y);
  // A head of `size` numbers, its pairs (i, i + size / 2) turned. turn: cosines [size / 2], then sines. x may be y.
  void (*rotate)(int64_t size, const float* turn, const float* x, float* y);

  // Write K and V [G, D] of one position into the layer's memory, if a part keeps it.
  void (*keep)(const KVLayer&, const Heads&, const ChunkRows&, int64_t page_size, int64_t position, const float* k,
               const float* v);
  // Some rows and query heads of one chunk over what they read. scratch: `attention_scratch` floats.
  void (*attend)(const KVLayer&, const Heads&, const ChunkRows&, int64_t page_size, const Queries&, float* scratch);
  int64_t (*attention_scratch)(const Heads&);

  // Rows [first, first + count) of a matrix from fp32, bf16 or fp16 rows of `stride` numbers each; its codes and scales
  // are written where these rows lie, and nowhere else. Returns how many numbers are not finite.
  int64_t (*pack)(const Matrix&, int64_t source_format, const void* source, int64_t stride, int64_t first,
                  int64_t count);

  // The index of the largest (the lowest of equals), the largest, and log(sum(exp)) of n numbers.
  void (*summary)(int64_t n, const float* x, int64_t* index, float* most, double* total);

  // Limits: reads all of it, and returns what its words add up to; multiplies as fast as the kernels of a format could,
  // and returns how many multiplications that were.
  uint64_t (*read)(const void* data, int64_t bytes);
  int64_t (*multiply)(int64_t format, int64_t rounds);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where this was compiled for another architecture
const Kernels* avx512_kernels();  // with VNNI
const Kernels* amx_kernels();

}  // namespace tw
