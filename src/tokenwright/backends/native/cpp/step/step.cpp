#include "step/step.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "ops/attention.h"
#include "ops/head.h"
#include "ops/ops.h"
#include "ops/threaded_linear.h"
#include "step/observer.h"
#include "step/pass.h"
#include "step/ranks.h"
#include "step/workspace.h"
#include "threads/pool.h"

namespace tw {

int64_t chunk_of(const Batch& batch, int64_t row) {
  int64_t low = 0, high = batch.chunks - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (batch.chunk[middle].row <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

namespace {

// The halves of a layer that an op ends; the time of an op on the streams counts as the next op's.
template <typename Other>
int64_t halves_of(const Other&) {
  return 1;
}
int64_t halves_of(const ParallelOp&) { return 2; }
int64_t halves_of(const SpreadOp&) { return 0; }
int64_t halves_of(const PredictOp&) { return 0; }
int64_t halves_of(const LaurelOp&) { return 0; }
int64_t halves_of(const CorrectOp&) { return 0; }
int64_t halves_of(const MergeOp&) { return 0; }
int64_t halves_of(const DeepstackOp&) { return 0; }

void run_pass(void* context, Team& team, int64_t thread) {
  Pass& p = *(Pass*)context;
  counted = {};  // by this thread
  begun_gathers = 0;
  int64_t ended = 0, halves = 0;
  for (int64_t i = 0; i < p.model.ops; i++) {
    if (p.observer && i == p.model.ops - 1) p.observer->add(p.observer->layers);  // the last one is the head
    visit(p.model.op[i], [&](const auto& op) {
      run(p, team, thread, op);
      halves = halves_of(op);
    });
    ended += halves;
    if (p.observer && halves) p.observer->end(ended - 1);
  }
  if (!p.observer) return;
  p.observer->add(p.observer->head);
  p.observer->look(p.k, team, p.model, p.batch, p.partial, p.scratch + thread * p.scratch_each);
}

}  // namespace

void forward(const Kernels& k, Workspace& r, const Model& model, const Batch& batch, int64_t threads) {
  const int64_t rows = batch.rows;
  Needs needs;
  std::unique_ptr<Observer> observer;
  if (batch.observed) observer = std::make_unique<Observer>(model, *batch.observed);
  for (int64_t i = 0; i < model.ops; i++) visit(model.op[i], [&](const auto& op) { reserve(needs, r, k, batch, op); });
  if (model.ranks && needs.gathered > model.ranks->capacity) throw std::bad_alloc();
  Pass pass{k,
            model,
            batch,
            r,
            r.x.of<float>(rows * model.width),
            r.normed.of<float>(threads * model.width),
            r.before.of<float>(rows * needs.before),
            r.inputs.of<float>(rows * needs.inputs),
            r.streams.of<float>(rows * needs.streams),
            r.qkv.of<float>(rows * needs.qkv),
            r.sink.of<float>(rows * needs.sink),
            r.mixed.of<float>(rows * needs.mixed),
            r.up.of<float>(rows * needs.up),
            r.added.of<float>(rows * needs.added),
            r.act.of<float>(threads * needs.act),
            r.scratch.of<float>(threads * needs.scratch),
            needs.inputs,
            needs.scratch,
            r.partial.of<Partial>(needs.partial),
            observer.get()};
  run_on_threads(threads, run_pass, &pass);
  if (model.ranks) model.ranks->gathers += begun_gathers;
  if (observer) observer->report(model, batch);
}

void linear_rows(const Kernels& k, Workspace& r, const Matrix& m, int64_t rows, const float* x, float* y,
                 int64_t threads) {
  r.rows.reserve(m, rows);
  const QuantisedRows quantised = r.rows.of(k, m, rows);
  struct Job {
    const Kernels& k;
    const Matrix& m;
    const QuantisedRows& quantised;
    const float* x;
    float* y;
  } job{k, m, quantised, x, y};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        each_row(team, j.quantised.rows,
                 [&](int64_t row) { j.k.quantise_row(j.m, j.x + row * j.m.in, row, j.quantised); });
        linear(j.k, team, j.m, j.quantised, Out{j.y, nullptr, j.m.out});
      },
      &job);
}

void summarise(const Kernels& k, Workspace& r, int64_t n, int64_t vocab, const float* logits, int64_t* best,
               double* log_total, int64_t threads) {
  Summary summary{k, n, vocab, logits, r.partial.of<Partial>(n * summary_pieces(vocab)), best, log_total};
  run_on_threads(threads, [](void* context, Team& team, int64_t) { ((Summary*)context)->run(team); }, &summary);
}

void attend_rows(const Kernels& k, Workspace& r, const KVLayer& kv, const Heads& h, int64_t chunks,
                 const ChunkRows* chunk, int64_t page_size, const Queries& queries, int64_t threads) {
  const int64_t each = k.attention_scratch(h);
  struct Job {
    const Kernels& k;
    const KVLayer& kv;
    const Heads& h;
    int64_t chunks;
    const ChunkRows* chunk;
    int64_t page_size;
    const Queries& queries;
    float* scratch;
    int64_t each;
  } job{k, kv, h, chunks, chunk, page_size, queries, r.scratch.of<float>(threads * each), each};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t thread) {
        Job& j = *(Job*)context;
        attend_all(j.k, team, j.kv, j.h, j.chunks, j.chunk, j.page_size, j.queries, j.scratch, j.each, thread);
      },
      &job);
}

}  // namespace tw
