// The MLP, alone or beside the attention of its layer.
#include "ops/ops.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "ops/residual.h"
#include "ops/threaded_linear.h"
#include "step/observer.h"

namespace tw {

namespace {

// Adds what a layer makes of its inputs to the residual stream.
void add_inputs(Pass& p, Team& team, int64_t thread, const InputGate& op) {
  make_inputs_added(p, team, thread, p.x, op);
  each_row(team, p.batch.rows, [&](int64_t row) { add_row(p, op.after, row); });
}

}  // namespace

void run_mlp(Pass& p, Team& team, int64_t thread, const float* x, const MLPOp& op, bool adds) {
  const int64_t rows = p.batch.rows, inner = op.gated ? op.up.out / 2 : op.up.out;  // of this rank
  const std::optional<Gather> gather = gather_of(p, inner, op.down);
  const QuantisedRows quantised = normed_rows(p, team, thread, x, op.norm, op.up);
  const QuantisedRows last = p.r.next_rows.of(p.k, op.down, rows);
  const Between between{op.activation, op.gated, inner, op.down, last};
  const auto activate_to = [&](int64_t row, float* act) {
    if (op.gated)
      p.k.gated(op.activation, inner, p.up + row * op.up.out, act);
    else if (op.xielu)
      p.k.xielu(op.xielu, inner, p.up + row * op.up.out, act);
    else
      p.k.activate(op.activation, inner, p.up + row * op.up.out, act);
    return act;
  };
  const auto activated = [&](int64_t row) {
    float *const act = p.act + thread * op.down.in, *x = gather ? gather->rows + row * op.down.in : act;
    if (!gather) activate_to(row, act);
    if (!op.down_norm.weight) return x;
    p.k.norm(op.down_norm, op.down.in, x, act);
    return act;
  };
  if (!gather && !p.batch.adapted && !op.xielu && !op.factors && !op.sparse && !op.down_norm.weight &&
      p.k.fuses(op.up, quantised, between)) {
    team.share(inner / ACTIVATED, 2, [&](int64_t first, int64_t end) {
      p.k.up_rows(op.up, quantised, first, end, between);
      for (int64_t half = 0; half <= op.gated; half++)
        count_blocks(op.up, rows, (half * inner + first * ACTIVATED) / LANES, (half * inner + end * ACTIVATED) / LANES);
    });
  } else {
    linears_of(p, team, op.up, quantised, p.up, nullptr, op.up.out);
    update(p, team, op.up_updates, p.up, op.up.out,
           [&](int64_t row) { return normed_row(p, thread, x, op.norm, row); });
    multiply_rows(p, team, op.factors, p.up, op.up.out);
    if (op.sparse) each_row(team, rows, [&](int64_t row) { sparsify(inner, op.deviations, p.up + row * op.up.out); });
    if (gather) {
      each_row(team, rows, [&](int64_t row) { activate_to(row, gather->rows + row * op.down.in + op.up.first); });
      gather->wait(team);
    }
    each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.down, activated(row), row, last); });
  }
  if (adds)
    add_linear(p, team, op.down, last, op.after, op.down_updates, activated);
  else
    make_added(p, team, op.down, last, op.down_updates, activated);
}

void make_inputs_added(Pass& p, Team& team, int64_t thread, const float* x, const InputGate& op) {
  const int64_t rows = p.batch.rows, size = op.gate.out;
  const QuantisedRows quantised = normed_rows(p, team, thread, x, Norm{}, op.gate);
  const QuantisedRows last = p.r.next_rows.of(p.k, op.out, rows);
  const auto hidden = [&](int64_t row) {
    float* act = p.act + thread * size;
    p.k.activate(op.activation, size, p.up + row * size, act);
    multiply(size, p.inputs + row * p.inputs_each + op.at, act);
    return act;
  };
  linears_of(p, team, op.gate, quantised, p.up, nullptr, size);
  update(p, team, op.gate_updates, p.up, size, [&](int64_t row) { return x + row * p.model.width; });
  each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.out, hidden(row), row, last); });
  make_added(p, team, op.out, last, op.out_updates, hidden);
}

void reserve_inputs(Needs& needs, Workspace& r, const Batch& batch, const InputGate& op) {
  r.rows.reserve(op.gate, batch.rows);
  r.next_rows.reserve(op.out, batch.rows);
  needs.up = std::max(needs.up, op.gate.out);
  needs.act = std::max(needs.act, op.gate.out);
  needs.added = std::max(needs.added, op.out.out);
  reserve_updates(r, batch, op.gate_updates);
  reserve_updates(r, batch, op.out_updates);
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const MLPOp& op) {
  r.rows.reserve(op.up, batch.rows);
  r.next_rows.reserve(op.down, batch.rows);
  needs.up = std::max(needs.up, op.up.out);
  needs.act = std::max(needs.act, op.down.in);
  reserve_gather(needs, batch, std::max(op.down.in, op.down.whole));
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, outputs_of(op.down));
  reserve_updates(r, batch, op.up_updates);
  reserve_updates(r, batch, op.down_updates);
  if (op.inputs.gate.out) reserve_inputs(needs, r, batch, op.inputs);
}

void run(Pass& p, Team& team, int64_t thread, const MLPOp& op) {
  run_mlp(p, team, thread, p.x, op, true);
  if (op.inputs.gate.out) add_inputs(p, team, thread, op.inputs);
}

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const ParallelOp& op) {
  reserve(needs, r, k, batch, op.attention);
  reserve(needs, r, k, batch, op.mlp);
  needs.before = std::max(needs.before, op.mlp.up.in);
}

void run(Pass& p, Team& team, int64_t thread, const ParallelOp& op) {
  keep_rows(p, team);
  run(p, team, thread, op.attention);
  if (p.observer) p.observer->end(1 + 2 * op.attention.layer);
  run_mlp(p, team, thread, p.before, op.mlp, true);
}

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const MixedOp& op) {
  reserve(needs, r, k, batch, op.mlp);
  reserve(needs, r, k, batch, op.experts);
  if (op.inputs.gate.out) reserve_inputs(needs, r, batch, op.inputs);
  needs.before = std::max(needs.before, op.mlp.up.in);
  needs.added = std::max(needs.added, op.mlp.up.in);
}

void run(Pass& p, Team& team, int64_t thread, const MixedOp& op) {
  const int64_t width = p.model.width;
  run_mlp(p, team, thread, p.x, op.mlp, false);
  each_row(team, p.batch.rows,
           [&](int64_t row) { memcpy(p.before + row * width, after_row(p, op.mlp.after, row), 4 * width); });
  run_experts(p, team, thread, op.experts, [&](int64_t row) {
    add(width, p.before + row * width, after_row(p, op.experts.after, row));
    add_row(p, op.after, row);
  });
  if (op.inputs.gate.out) add_inputs(p, team, thread, op.inputs);
}

}  // namespace tw
