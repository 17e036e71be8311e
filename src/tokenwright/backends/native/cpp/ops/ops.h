// The ops of a model, each in a file of its own name: what memory it needs, and how it runs.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels.h"
#include "step/pass.h"
#include "step/step.h"
#include "step/workspace.h"
#include "threads/pool.h"

namespace tw {

// For each op: grow the workspace, and the needs of the pass, to what it needs, before the threads start; and run it,
// which each thread of the team calls with its own number.
#define TW_DECLARE(Name)                                                           \
  void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const Name##Op&); \
  void run(Pass&, Team&, int64_t thread, const Name##Op&);
TW_OPS(TW_DECLARE)
#undef TW_DECLARE

// An MLP that reads x [rows][width] and adds to the residual stream; or leaves what it has made in `added`.
void run_mlp(Pass&, Team&, int64_t thread, const float* x, const MLPOp&, bool adds);

// What a layer makes of its inputs and of rows x [rows][width], in `added`, without what is behind it.
void reserve_inputs(Needs&, Workspace&, const Batch&, const InputGate&);
void make_inputs_added(Pass&, Team&, int64_t thread, const float* x, const InputGate&);

// x as large as `like`: scaled to its root of the mean square. The least mean square that x counts with is 1e-5.
void restore(int64_t size, const float* like, float* x);

// x = max(x - mean - deviations * standard deviation, 0).
void sparsify(int64_t size, double deviations, float* x);

// As `run` of the experts, but what they have made of each row stays in `added`, for the thread that calls end(row).
void run_experts(Pass&, Team&, int64_t thread, const ExpertsOp&, const std::function<void(int64_t)>& end);

}  // namespace tw
