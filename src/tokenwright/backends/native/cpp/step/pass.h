// One forward pass: the state that its threads share, and its ops as their own structs.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "step/step.h"
#include "step/workspace.h"

namespace tw {

// The largest workspace need of any op of a model, in numbers per row of the step or per thread.
struct Needs {
  int64_t before = 0, inputs = 0, streams = 0, qkv = 0, sink = 0, mixed = 0, up = 0, added = 0;  // per row
  int64_t normed = 0, act = 0, scratch = 0;                                                      // per thread
  int64_t partial = 0, gathered = 0;                                                             // in total
};

class Observer;
struct Partial;  // of a row's logits

// The state that the threads of one forward pass share.
struct Pass {
  const Kernels& k;
  const Model& model;
  const Batch& batch;
  Workspace& r;
  float *x, *normed, *before, *inputs, *streams, *qkv, *sink, *mixed, *up, *added, *act, *scratch;
  int64_t inputs_each, scratch_each;
  Partial* partial;
  Observer* observer;  // null: nobody looks
};

// Calls f with the op cast to its own struct.
template <typename F>
void visit(const Op& op, F f) {
  switch (op.kind) {
    case EMBED: return f(*(const EmbedOp*)op.op);
    case ATTENTION: return f(*(const AttentionOp*)op.op);
    case MLP: return f(*(const MLPOp*)op.op);
    case HEAD: return f(*(const HeadOp*)op.op);
    case EXPERTS: return f(*(const ExpertsOp*)op.op);
    case PARALLEL: return f(*(const ParallelOp*)op.op);
    case LATENT: return f(*(const LatentOp*)op.op);
    case RECURRENT: return f(*(const RecurrentOp*)op.op);
    case NEXT_INPUT: return f(*(const NextInputOp*)op.op);
    case MIXED: return f(*(const MixedOp*)op.op);
    case SPREAD: return f(*(const SpreadOp*)op.op);
    case PREDICT: return f(*(const PredictOp*)op.op);
    case LAUREL: return f(*(const LaurelOp*)op.op);
    case CORRECT: return f(*(const CorrectOp*)op.op);
    case MERGE: return f(*(const MergeOp*)op.op);
    case SHARED: return f(*(const SharedOp*)op.op);
  }
}

// The index of the chunk that a row of the batch belongs to.
int64_t chunk_of(const Batch& batch, int64_t row);

}  // namespace tw
