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

// Grows the workspace, and the needs of the pass, to what an op needs. Called before the threads start.
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const EmbedOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const AttentionOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const MLPOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const ParallelOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const ExpertsOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const LatentOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const RecurrentOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const NextInputOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const HeadOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const MixedOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const SpreadOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const PredictOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const LaurelOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const CorrectOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const MergeOp&);
void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const SharedOp&);

// Runs an op: each thread of the team calls it, with its own number.
void run(Pass&, Team&, int64_t thread, const EmbedOp&);
void run(Pass&, Team&, int64_t thread, const AttentionOp&);
void run(Pass&, Team&, int64_t thread, const MLPOp&);
void run(Pass&, Team&, int64_t thread, const ParallelOp&);
void run(Pass&, Team&, int64_t thread, const ExpertsOp&);
void run(Pass&, Team&, int64_t thread, const LatentOp&);
void run(Pass&, Team&, int64_t thread, const RecurrentOp&);
void run(Pass&, Team&, int64_t thread, const NextInputOp&);
void run(Pass&, Team&, int64_t thread, const HeadOp&);
void run(Pass&, Team&, int64_t thread, const MixedOp&);
void run(Pass&, Team&, int64_t thread, const SpreadOp&);
void run(Pass&, Team&, int64_t thread, const PredictOp&);
void run(Pass&, Team&, int64_t thread, const LaurelOp&);
void run(Pass&, Team&, int64_t thread, const CorrectOp&);
void run(Pass&, Team&, int64_t thread, const MergeOp&);
void run(Pass&, Team&, int64_t thread, const SharedOp&);

// An op that reads x [rows][width of its matrix] and adds to the residual stream; or leaves what it has made in
// `added`.
void run_attention(Pass&, Team&, int64_t thread, const float* x, const AttentionOp&, bool adds);
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
