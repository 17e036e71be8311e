// The data that Python and the kernels share. Plain structs of 8-byte fields and pointers, mirrored in native.py.
//
// Words: a row is a token of the step; a matrix is [out, in]; a block is 16 outputs side by side, whose weights lie
// together; a slab is one block's weights over a stretch of inputs. Whatever instructions are used, lanes are 16 wide.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {

enum Format : int64_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, INT4 = 4, FP8 = 5 };
enum Activation : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

constexpr int64_t LANES = 16;   // outputs of a block
constexpr int64_t SCALED = 32;  // numbers of a cache row that share a scale

// A weight [out, in] in blocks of 16 outputs, each block a run of slabs. Missing outputs and inputs are zeros.
//
//   F32         16 inputs a slab    [input 16][output 16]                 1,024 bytes
//   BF16, F16   32 inputs a slab    [pair 16][output 16][2]               1,024 bytes
//   INT8        64 inputs a slab    [four 16][output 16][4], code + 128   1,024 bytes
//   INT4        64 inputs a slab    [four 8][output 16][4], code + 8; inputs 0..31 in the lower halves, 32..63 above
//
// scales: float16 [block][inputs / group][output 16], for INT8 and INT4 alone. The lines of a slab are those that AMX
// loads as a tile and VNNI multiplies as a vector.
struct Matrix {
  int64_t out, in;
  int64_t format;
  int64_t group;  // inputs that share a scale: 32 or 64, else 0
  const void* codes;
  const uint16_t* scales;
  const float* bias;  // [out], or null
};

struct Norm {
  const float* weight;
  const float* bias;  // null for RMSNorm
  double eps;
};

// K or V of one layer's part: numbers [slots][G][bytes], and for INT8 and INT4 float16 scales [slots][G][ceil(D / 32)].
struct Side {
  int64_t format;
  void* codes;
  uint16_t* scales;
};

// A stretch [start, stop) of every text, kept in one format. `table`: which of a chunk's page tables tells its pages.
struct Part {
  int64_t start, stop;
  int64_t table;
  Side k, v;
};

// The K and V of one layer: one part, or two that follow each other.
struct KVLayer {
  int64_t parts;
  Part part[2];
  int64_t window;  // positions that a row reads back, itself included; 0: all
  int64_t sinks;   // first positions that stay in reach beside a window
};

// Rows [row, row + rows) of the step: positions [start, start + rows) of one text.
// rotation: [rows][2][D / 2], cosines and then sines. sink_rotation: the same from position 0 on, up to where a row
// stands right behind the sinks and a full window; null where no layer has sinks. Both null where nothing turns.
// tables: for each group of the store, the page of memory that holds each page of the text; -1 where there is none.
struct ChunkRows {
  int64_t row, rows, start;
  const float* rotation;
  const float* sink_rotation;
  const int32_t* const* tables;
};

struct Heads {
  int64_t heads, kv_heads, size;
  double scale;  // of q k
};

}  // namespace tw
