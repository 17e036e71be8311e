// A whole step in one call: what is between the tokens and the logits.
#pragma once

#include "api.h"
#include "kernels.h"

namespace tw {

constexpr int64_t WEIGHT_PIECE = 1 << 17;  // bytes of weights that a thread takes at a time

// A model is a list of ops over its residual stream x [rows][width]. An op is a struct here, a case of `visit`, and two
// functions in step.cpp: what it needs of the workspace, and what it computes. `native/compile.py` fills the structs.
enum OpKind : int64_t { EMBED = 0, ATTENTION = 1, MLP = 2, HEAD = 3 };

// x = the table's row of each token, and that of its position where positions are learned.
struct EmbedOp {
  Matrix table;
  const float* positions;  // [context][width], or null
};

// x += out(attention(q, k, v)) of norm(x); K and V go through the cache of that layer.
struct AttentionOp {
  int64_t layer;
  Heads heads;
  int64_t rotates;
  Norm norm;
  Matrix qkv;   // the heads of q, then those of k, then those of v
  Norm q_norm;  // over each head, before the rotation; without a weight there is none
  Norm k_norm;
  Matrix out;
};

// x += down(activation(up(norm(x)))).
struct MLPOp {
  int64_t activation, gated;
  Norm norm;
  Matrix up;  // where it is gated: the gates, then the values
  Matrix down;
};

// The logits of the rows that are asked for: matrix(norm(x)).
struct HeadOp {
  Norm norm;
  Matrix matrix;
};

struct Op {
  int64_t kind;
  const void* op;  // one of these structs
};

struct Model {
  int64_t width, ops;
  const Op* op;
};

struct Batch {
  int64_t rows;
  const int64_t* tokens;
  int64_t chunks;
  const ChunkRows* chunk;
  int64_t page_size;
  const KVLayer* kv;   // of each layer
  int64_t wanted;      // rows whose logits are asked for
  const int64_t* row;  // [wanted]
  float* logits;       // [wanted][vocab]
  int64_t* best;       // [wanted]: the index of the largest, the lowest of equals
  double* log_total;   // [wanted]: log(sum(exp(logits))), NaN if some logit is not finite
};

// The memory that a step computes in. It grows to what the largest needs; it serves one call at a time.
struct Workspace;
Workspace* new_workspace();  // null where there is no memory
void free_workspace(Workspace*);
int64_t count_workspaces();  // that are not freed

// Each of these uses `threads` threads at most, and throws std::bad_alloc where the workspace cannot grow.
void forward(const Kernels&, Workspace&, const Model&, const Batch&, int64_t threads);

// One linear for rows of fp32: what `forward` does for each of its own.
void linear_rows(const Kernels&, Workspace&, const Matrix&, int64_t rows, const float* x, float* y, int64_t threads);

// What `forward` tells of its logits, for rows [n][vocab] that come from elsewhere.
void summarise(const Kernels&, Workspace&, int64_t n, int64_t vocab, const float* logits, int64_t* best,
               double* log_total, int64_t threads);

// One attention for rows [T][heads] of fp32 in `queries`, whose rows and heads are those of the whole step.
void attend_rows(const Kernels&, Workspace&, const KVLayer&, const Heads&, int64_t chunks, const ChunkRows*,
                 int64_t page_size, const Queries&, int64_t threads);

}  // namespace tw
