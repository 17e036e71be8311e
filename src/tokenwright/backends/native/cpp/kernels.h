// The kernels that each instruction set implements, as one table of functions, chosen at run time.
//
// Every function runs in the calling thread; `ops/` divides the work among threads. The result of a row depends on
// that row alone: sums run over the inputs in order, with one accumulator per output, for any number of rows.
#pragma once

#include "api.h"

namespace tw {

// The format of a linear's input rows: fp32, int8 with a scale for each group, or bf16.
enum RowKind : int64_t { ROWS_F32 = 0, ROWS_INT8 = 1, ROWS_BF16 = 2 };

// Rows quantised for a matrix, `depth` inputs each: `in` rounded up to whole slabs and padded with zeros.
//
// `together` rows are interleaved unit by unit, so that a kernel reads them through one pointer: a unit is a float,
// four int8 or two bfloat16, and one scale or sum. For AMX sixteen rows form a tile, line by line; see amx_linear.h.
// The memory holds whole tiles: rows up to the next multiple of 32.
struct QuantisedRows {
  int64_t kind, rows, depth;
  int64_t groups;    // per row, if it is int8
  int64_t together;  // 1, 4, or 16 if rows form tiles
  void* numbers;     // [rows / together][depth in units][together] units
  float* scales;     // [rows / together][groups][together]
  int32_t* sums;     // as scales: the correction for the offset of the weights' codes
};

// The destination of a linear: y = x W^T + bias, plus add if that is not null. add may be y.
struct Out {
  float* y;
  const float* add;
  int64_t stride;  // floats from one row to the next, in y and add
};

// The middle of an MLP, for a fused first linear: the activation, and the quantised rows for the last linear.
struct Between {
  int64_t activation;
  int64_t gated;  // act(gates) * values: the first half of the outputs are the gates
  int64_t width;  // inputs of the last linear
  const Matrix& down;
  const QuantisedRows& to;
};
constexpr int64_t ACTIVATED = 64;  // inputs of the last linear per unit of `up_rows`

// Rows [first, last), counted within the chunk, and query heads [head, head_last): heads of one KV head, or, for a
// single row, all heads of consecutive KV heads, at most QUERIES_TOGETHER.
constexpr int64_t QUERIES_TOGETHER = 64;
struct Queries {
  int64_t first, last;
  int64_t head, head_last;
  const float* q;       // [T][stride], each row starting with the query heads
  const float* sink_q;  // as q: the queries for the keys of sinks; null: q itself
  float* out;           // [T][out_stride]
  int64_t stride, sink_stride, out_stride;
};

constexpr int64_t STRETCH = 256;  // positions of a latent whose sums are made apart and then merged in order

// A causal depthwise convolution over channels [first, last), then SiLU if `activated`.
constexpr int64_t MOST_TAPS = 16;
struct Convolution {
  int64_t channels, taps, activated, first, last;
  const float* weight;  // [taps][channels], the row's own tap last
  const float* bias;    // [channels], or null
};

enum Gate : int64_t { SILU_GATE = 0, SIGMOID_GATE = 1 };

// Rows of some columns of one head, whose state is [keys][columns]: state = decay state + key x write, where
// write = strength value, or strength (value - (decay state)^T key) if it corrects; mixed = state^T query + skip value.
struct HeadRows {
  int64_t rows, keys, columns, corrects;
  int64_t stride, mixed_stride, decay_stride;  // floats from one row's to the next row's
  int64_t decays;                              // 1: each row of the state has a decay of its own; 0: all have one
  const float *query, *key, *value, *decay;
  const float* strength;  // [rows]
  float skip;
  float *state, *mixed;
};

// How much of a state numbers x [count] keep, in their place: e^(-e^a_log step) with step = softplus(x + bias).
// steps: [count], where they go within their limits; null: there are none.
struct Keeping {
  int64_t count, biases;  // 1: each has a bias of its own; 0: all have one
  float a_log, least, most;
  const float* bias;
  float *x, *steps;
};

// One token of some columns of a selective scan, whose state is [keys][stride]: with step = softplus(step + bias) of
// each column, state = e^(step rates) state + key x (step value); mixed = state^T query + skip value.
struct ScanStep {
  int64_t keys, stride, columns;
  int64_t rates_stride;
  const float *query, *key, *value, *step, *bias, *rates, *skip;
  float *state, *mixed;
};

struct Kernels {
  const char* name;

  int64_t (*row_kind)(int64_t format);
  int64_t (*together)(int64_t format, int64_t rows);
  // Quantises one row of fp32 inputs into row `row` of the quantised rows.
  void (*quantise_row)(const Matrix&, const float* x, int64_t row, const QuantisedRows&);
  // Computes the blocks [first, last) of a linear for all rows.
  void (*linear)(const Matrix&, const QuantisedRows&, int64_t first, int64_t last, const Out&);
  // fuses: whether `up_rows` supports these arguments. up_rows: for units [first, last) of ACTIVATED inputs of the last
  // linear, computes first linear, activation and quantised rows in one pass, so that the activations never go to
  // memory. The result is the same to the bit.
  bool (*fuses)(const Matrix& up, const QuantisedRows&, const Between&);
  void (*up_rows)(const Matrix& up, const QuantisedRows&, int64_t first, int64_t last, const Between&);
  // Decodes row `index` of a matrix: [in].
  void (*embed)(const Matrix&, int64_t index, float* x);

  void (*norm)(const Norm&, int64_t size, const float* x, float* y);
  void (*activate)(int64_t activation, int64_t size, const float* x, float* y);
  void (*xielu)(const float* facts, int64_t size, const float* x, float* y);
  // y [size] = act(gates) * values, for x [2 size]: the gates, then the values.
  void (*gated)(int64_t activation, int64_t size, const float* x, float* y);
  // x = cap tanh(x / cap), in place.
  void (*soft_cap)(double cap, int64_t n, float* x);
  // Rotates the pairs (i, i + size / 2) of a head. rotation: cosines [size / 2], then sines. x may be y.
  void (*rotate)(int64_t size, const float* rotation, const float* x, float* y);

  // Writes K and V [G, D] of one position into the layer's KV memory, if its part has a page for that position.
  void (*store_kv)(const KVLayer&, const Heads&, const ChunkRows&, int64_t page_size, int64_t position, const float* k,
                   const float* v);
  // Attention of some rows and query heads of one chunk. scratch: `attention_scratch` floats.
  void (*attend)(const KVLayer&, const Heads&, const ChunkRows&, int64_t page_size, const Queries&, float* scratch);
  // The same for the rows of `chunks` chunks of one row each, next to each other in the step, whose sequences have the
  // same pages for positions [0, shared): a multiple of 64, before all of the rows, in a layer without a window.
  void (*attend_shared)(const KVLayer&, const Heads&, int64_t chunks, const ChunkRows*, int64_t shared,
                        int64_t page_size, const Queries&, float* scratch);
  int64_t (*attention_scratch)(const Heads&);
  // The same in two parts for the heads of one row over a latent, so that threads can share it. attend_stretch: the
  // sums [heads][stretch_sums] of the stretch that begins at position `start`. merge_stretches: the result [values] of
  // one head, from `count` such sums in order, `apart` floats from one to the next.
  int64_t (*stretch_sums)(const Heads&);
  void (*attend_stretch)(const KVLayer&, const Heads&, const ChunkRows&, int64_t page_size, const Queries&,
                         int64_t start, float* sums, float* scratch);
  void (*merge_stretches)(const Heads&, int64_t count, int64_t apart, float* sums, float* out);

  // Convolves `rows` rows of x in place, `stride` floats from one to the next. history: [taps - 1][channels], the
  // inputs before them, and then their last ones.
  void (*convolve)(const Convolution&, int64_t rows, int64_t stride, float* x, float* history);
  void (*step_head)(const HeadRows&);
  void (*keep)(const Keeping&);
  void (*scan)(const ScanStep&);
  // x = a vector of length `scale`; x = x silu(gate), or x sigmoid(gate); both in place.
  void (*unit)(int64_t size, float scale, float* x);
  void (*gate_by)(Gate, int64_t size, const float* gate, float* x);

  // The attention weights of one query, that of the first row and head of `queries`, from the scores of `attend`:
  // [position + 1], zeros where it does not read.
  void (*weigh)(const KVLayer&, const Heads&, const ChunkRows&, int64_t page_size, const Queries&, float* weights,
                float* scratch);

  // Packs fp32, bf16 or fp16 rows, `stride` numbers apart, as rows [first, first + count) of a matrix; writes only the
  // codes and scales of these rows. Returns how many numbers are not finite.
  int64_t (*pack)(const Matrix&, int64_t source_format, const void* source, int64_t stride, int64_t first,
                  int64_t count);

  // Of n numbers: the argmax (the lowest index among equals), the maximum, and sum(exp(x - maximum)).
  void (*summary)(int64_t n, const float* x, int64_t* index, float* most, double* total);

  // -sum(exp(x - total) (x - total)) of n numbers: the entropy of logits whose logsumexp is `total`.
  double (*entropy)(int64_t n, const float* x, double total);

  // For measuring limits. read: reads all bytes, with a prefetch `ahead` bytes before each line (0: none), and returns
  // the sum of their words. multiply: multiplies at the peak rate of a format's instructions and returns the number of
  // multiplications.
  uint64_t (*read)(const void* data, int64_t bytes, int64_t ahead);
  int64_t (*multiply)(int64_t format, int64_t rounds);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();  // these four exist on x86-64 only
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();  // with VNNI
const Kernels* amx_kernels();
const Kernels* dotprod_kernels();  // on aarch64 only
const Kernels* wasm_kernels();     // in WebAssembly only

}  // namespace tw
