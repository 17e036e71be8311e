#include "step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "pool.h"

namespace tw {

#include "workspace.inl.h"

namespace {

// The largest workspace need of any op of a model, in numbers per row of the step or per thread.
struct Needs {
  int64_t before = 0, qkv = 0, sink = 0, mixed = 0, up = 0, added = 0;  // per row
  int64_t act = 0, scratch = 0;                  // per thread
  int64_t partial = 0;                           // in total
};

class Observer;
struct Partial;  // of a row's logits

// The state that the threads of one forward pass share.
struct Pass {
  const Kernels& k;
  const Model& model;
  const Batch& batch;
  Workspace& r;
  float *x, *normed, *before, *qkv, *sink, *mixed, *up, *added, *act, *scratch;
  int64_t scratch_each;
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
  }
}

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

#include "observe.inl.h"
#include "linears.inl.h"

void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const EmbedOp&) {}

void run(Pass& p, Team& team, int64_t, const EmbedOp& op) {
  const int64_t width = p.model.width;
  each_row(team, p.batch.rows, [&](int64_t row) {
    float* x = p.x + row * width;
    p.k.embed(op.table, p.batch.tokens[row], x);
    if (op.scale != 1) scale_row(width, op.scale, x);
    if (op.positions) {
      const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
      const float* learned = op.positions + (chunk.start + row - chunk.row) * width;
      for (int64_t i = 0; i < width; i++) x[i] += learned[i];
    }
  });
}

#include "attention_op.inl.h"

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const MLPOp& op) {
  r.rows.reserve(op.up, batch.rows);
  r.next_rows.reserve(op.down, batch.rows);
  needs.up = std::max(needs.up, op.up.out);
  needs.act = std::max(needs.act, op.down.in);
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, op.down.out);
  reserve_updates(r, batch, op.up_updates);
  reserve_updates(r, batch, op.down_updates);
}

// Runs an MLP that reads x [rows][width] and adds to the residual stream.
void run_mlp(Pass& p, Team& team, int64_t thread, const float* x, const MLPOp& op) {
  const int64_t rows = p.batch.rows, inner = op.down.in;
  const QuantisedRows quantised = normed_rows(p, team, thread, x, op.norm, op.up);
  const QuantisedRows last = p.r.next_rows.of(p.k, op.down, rows);
  const Between between{op.activation, op.gated, inner, op.down, last};
  const auto activated = [&](int64_t row) {
    float* act = p.act + thread * inner;
    if (op.gated)
      p.k.gated(op.activation, inner, p.up + row * op.up.out, act);
    else
      p.k.activate(op.activation, inner, p.up + row * op.up.out, act);
    return act;
  };
  if (!p.batch.adapted && p.k.fuses(op.up, quantised, between)) {
    team.share(inner / ACTIVATED, 2, [&](int64_t first, int64_t end) {
      p.k.up_rows(op.up, quantised, first, end, between);
      for (int64_t half = 0; half <= op.gated; half++)
        count_blocks(op.up, rows, (half * inner + first * ACTIVATED) / LANES, (half * inner + end * ACTIVATED) / LANES);
    });
  } else {
    linears_of(p, team, op.up, quantised, p.up, nullptr, op.up.out);
    update(p, team, op.up_updates, p.up, op.up.out,
           [&](int64_t row) { return normed_row(p, thread, x, op.norm, row); });
    each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.down, activated(row), row, last); });
  }
  add_linear(p, team, op.down, last, op.after, op.down_updates, activated);
}

void run(Pass& p, Team& team, int64_t thread, const MLPOp& op) { run_mlp(p, team, thread, p.x, op); }

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const ParallelOp& op) {
  reserve(needs, r, k, batch, op.attention);
  reserve(needs, r, k, batch, op.mlp);
  needs.before = std::max(needs.before, op.mlp.up.in);
}

void run(Pass& p, Team& team, int64_t thread, const ParallelOp& op) {
  const int64_t width = p.model.width;
  each_row(team, p.batch.rows, [&](int64_t row) { memcpy(p.before + row * width, p.x + row * width, 4 * width); });
  run(p, team, thread, op.attention);
  if (p.observer) p.observer->end(1 + 2 * op.attention.layer);
  run_mlp(p, team, thread, p.before, op.mlp);
}

#include "experts.inl.h"
#include "latent.inl.h"

#include "head.inl.h"
#include "look.inl.h"

void run_pass(void* context, Team& team, int64_t thread) {
  Pass& p = *(Pass*)context;
  counted = {};  // by this thread
  int64_t ended = 0;
  for (int64_t i = 0; i < p.model.ops; i++) {
    const int64_t kind = p.model.op[i].kind;
    if (p.observer && kind == HEAD) p.observer->add(p.observer->layers);
    visit(p.model.op[i], [&](const auto& op) { run(p, team, thread, op); });
    ended += kind == PARALLEL ? 2 : 1;
    if (p.observer) p.observer->end(ended - 1);
  }
  if (!p.observer) return;
  p.observer->add(p.observer->head);
  p.observer->look(p.k, team, p.model, p.batch, p.partial, p.scratch + thread * p.scratch_each);
}

}  // namespace

void route(const Routing& r, float* logits, int64_t* ids, float* weights) {
  if (r.shared_gate) weights[r.chosen] = sigmoid(logits[r.experts]);
  score(r, logits);
  choose(r, logits, ids, weights);
}

void forward(const Kernels& k, Workspace& r, const Model& model, const Batch& batch, int64_t threads) {
  const int64_t rows = batch.rows;
  Needs needs;
  std::unique_ptr<Observer> observer;
  if (batch.observed) observer = std::make_unique<Observer>(model, *batch.observed);
  for (int64_t i = 0; i < model.ops; i++)
    visit(model.op[i], [&](const auto& op) { reserve(needs, r, k, batch, op); });
  Pass pass{k,
            model,
            batch,
            r,
            r.x.of<float>(rows * model.width),
            r.normed.of<float>(threads * model.width),
            r.before.of<float>(rows * needs.before),
            r.qkv.of<float>(rows * needs.qkv),
            r.sink.of<float>(rows * needs.sink),
            r.mixed.of<float>(rows * needs.mixed),
            r.up.of<float>(rows * needs.up),
            r.added.of<float>(rows * needs.added),
            r.act.of<float>(threads * needs.act),
            r.scratch.of<float>(threads * needs.scratch),
            needs.scratch,
            r.partial.of<Partial>(needs.partial),
            observer.get()};
  run_on_threads(threads, run_pass, &pass);
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
