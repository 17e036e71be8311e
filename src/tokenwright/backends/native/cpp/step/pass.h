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
  int64_t act = 0, scratch = 0;                                                                  // per thread
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
#define TW_CASE(Name) \
  case OpKind::Name: return f(*(const Name##Op*)op.op);
  switch (op.kind) { TW_OPS(TW_CASE) }
#undef TW_CASE
}

// The index of the chunk that a row of the batch belongs to.
int64_t chunk_of(const Batch& batch, int64_t row);

}  // namespace tw
