// A whole step in one call: what is between the tokens and the logits.
#pragma once

#include "api.h"
#include "kernels.h"

namespace tw {

constexpr int64_t WEIGHT_PIECE = 1 << 17;  // bytes of weights that a thread takes at a time

struct Layer {
  Norm attention_norm;
  Matrix qkv;           // the heads of q, then those of k, then those of v
  const float* q_norm;  // RMSNorm over each head, or null
  const float* k_norm;
  Matrix o;
  Norm mlp_norm;
  Matrix up;  // where it is gated: the gates, then the values
  Matrix down;
  int64_t rotates;
};

struct Model {
  int64_t width, mlp_width, vocab;
  Heads heads;
  int64_t activation, gated;
  double norm_eps;
  Matrix embedding;
  const float* positions;  // [context][width], learned; null for rotary models
  int64_t layers;
  const Layer* layer;
  Norm norm;
  Matrix head;
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
