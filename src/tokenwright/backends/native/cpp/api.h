// The data that Python and the kernels share: plain structs of 8-byte fields and pointers. backends/native/structs.py
// reads them here.
//
// Terms: a row is a token of the step; a matrix is [out, in]; a block is 16 consecutive outputs, whose weights are
// contiguous; a slab is one block's weights over a range of inputs. A vector has 16 lanes in every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {

enum Format : int64_t {
  F32 = 0,
  BF16 = 1,
  F16 = 2,
  INT8 = 3,
  INT4 = 4,
  FP8 = 5,
  INT5 = 6,
  INT6 = 7,
  INT2 = 8,
  INT1 = 9,
  TABLE4 = 10
};
enum Activation : int64_t {
  SILU = 0,
  GELU = 1,
  GELU_TANH = 2,
  RELU = 3,
  CLAMPED_SWIGLU = 4,
  RELU2 = 5,
  QUICK_GELU = 6
};

constexpr int64_t LANES = 16;   // outputs of a block
constexpr int64_t SCALED = 32;  // numbers of a KV cache row that share a scale
constexpr int64_t PLACES = 80;  // positions in a block of 64, padded

// A weight [out, in] in blocks of 16 outputs, each block a sequence of slabs. Zeros pad the outputs and inputs.
//
//   F32         16 inputs a slab    [input 16][output 16]                 1,024 bytes
//   BF16, F16   32 inputs a slab    [pair 16][output 16][2]               1,024 bytes
//   INT8        64 inputs a slab    [four 16][output 16][4], code + 128   1,024 bytes
//   INT4        64 inputs a slab    [four 8][output 16][4], code + 8; inputs 0..31 in the lower halves, 32..63 above
//   INT5        64 inputs a slab    as INT4, code + 16, and then its fifth bits [2][output 16][4]: input i has bit
//                                   i / 4 % 8 of byte i % 4 in line i / 32                                 640 bytes
//   INT6        64 inputs a slab    as INT4, code + 32, and then its upper bits [4][output 16][4]: input i has the bits
//                                   from 2 (i / 4 % 4) on of byte i % 4 in line i / 16                     768 bytes
//   INT2        64 inputs a slab    the upper bits of INT6 alone, code + 1                                  256 bytes
//   INT1        64 inputs a slab    the fifth bits of INT5 alone: set for 1, else -1                        128 bytes
//   TABLE4      64 inputs a slab    as INT4, but a code is the index of a number in `table`
//
// Of a matrix with minima the codes are stored as they are, from 0 on: a weight is scale * code - minimum.
//
// scales: of a quantised format alone, for each block and each group of inputs float16 [output 16], and with minima
// another float16 [output 16]. With super-blocks of `super` inputs, for each block and super-block
//
//   float16 [output 16], with minima [2][output 16]; and for each of its groups int8 [output 16], with minima [2][16]
//
// where the scale of a group is the product of both, and so is its minimum. INT2 and INT1 have no groups in a
// super-block, only its scale. AMX loads the lines of a slab as a tile, and VNNI multiplies each line as a vector.
struct Matrix {
  int64_t out, in;
  int64_t format;
  int64_t group;  // inputs that share a scale: 16, 32 or 64, else 0
  const void* codes;
  const uint16_t* scales;
  const float* bias;     // [out], or null
  int64_t super;         // inputs of a super-block: 64, 128 or 256; 0: there are none
  int64_t minima;        // whether groups have a minimum beside their scale
  int64_t first;         // in a rank's part of a matrix, the number of its first row in the whole one; else 0
  int64_t whole;         // outputs of the whole one, if the ranks gather them; else 0
  const uint8_t* table;  // of TABLE4: [4][16], the same 16 numbers four times, plus 128
  const float* factors;  // [out], of the sums over all inputs, of INT2 and of TABLE4 in plain groups of 16; or null
};

// static: each instruction set has these functions for itself.
static constexpr bool quantised(int64_t format) {
  return format == INT8 || format == INT4 || format == INT5 || format == INT6 || format >= INT2;
}
// Whether a format has nothing but the sign and perhaps a zero or 2: few products overflow 16 bits.
static constexpr bool ternary(int64_t format) { return format == INT2 || format == INT1; }
static constexpr int64_t slab_inputs(int64_t format) {
  return format == F32 ? 16 : format == BF16 || format == F16 ? 32 : 64;
}
static constexpr int64_t slab_bytes(int64_t format) {
  switch (format) {
    case INT4:
    case TABLE4: return 512;
    case INT5: return 640;
    case INT6: return 768;
    case INT2: return 256;
    case INT1: return 128;
    default: return 1024;
  }
}
// The bytes of a block's scales: of one super-block, or of one group; and of `slabs` slabs.
static inline int64_t scale_bytes(const Matrix& m) {
  return (m.minima ? 2 : 1) * (2 * LANES + (m.super && !ternary(m.format) ? m.super / m.group * LANES : 0));
}
static inline int64_t block_scale_bytes(const Matrix& m, int64_t slabs) {
  return m.group ? slabs * 64 / (m.super ? m.super : m.group) * scale_bytes(m) : 0;
}

struct Norm {
  const float* weight;
  const float* bias;  // null for RMSNorm
  double eps;
};

// K or V of one layer's part: codes [slots][G][bytes], and for INT8 and INT4 float16 scales [slots][G][ceil(D / 32)].
// Of a latent both are the same rows of K.
struct KVTensor {
  int64_t format;
  void* codes;
  uint16_t* scales;
};

// The positions [start, stop) of every sequence, stored in one format. `table`: the index of the part's page table in
// `ChunkRows::tables`. `bytes`: of K and V of one position.
struct Part {
  int64_t start, stop;
  int64_t table, bytes;
  KVTensor k, v;
};

// The KV memory of one layer: one part, or two with consecutive positions.
struct KVLayer {
  int64_t parts;
  Part part[2];
  int64_t window;              // attention window: positions that a row attends to, itself included; 0: all
  int64_t sinks;               // first positions that every row attends to beside the window
  const float* sink_rotation;  // [2][D / 2]: of the queries on sinks, at positions from sinks + window - 1 on; or null
  // Where keys are stored without the bias of their projection, whose scores are added; else null. A position's
  // rotation is that of its block of 64, and that of its place in the block.
  const float* block_rotation;  // [n][2][D / 2]: of the positions 0, 64, 128, ...
  const float* place_rotation;  // [D][PLACES]: of the positions 0 to 63, transposed, without a factor of cos and sin
};

// A chunk: rows [row, row + rows) of the step are positions [start, start + rows) of one sequence.
// rotation: [rows][rotations of the model][2][D / 2], cosines and then sines; null if no layer rotates.
// tables: for each group of the store, the page table of the sequence: its pages' numbers in the KV memory, or -1.
// ends: [rows], never falling: the end of the positions that each row reads; null: each reads up to its own.
struct ChunkRows {
  int64_t row, rows, start;
  const float* rotation;
  const int32_t* const* tables;
  const int64_t* ends;
};

struct Heads {
  int64_t heads, kv_heads, size;
  int64_t values;            // numbers of a value: `size`, or fewer in a latent, where it is the first part of its key
  double scale;              // of q k
  double cap;                // soft cap of the scores, scale included: cap tanh(score / cap); 0: none
  const float* sink_logits;  // [heads]: learned logits that the softmax counts as one more key's; or null
  const float* key_bias;     // [kv_heads][size]: of the projection of keys, for a layer whose keys lack it; or null
};

}  // namespace tw
