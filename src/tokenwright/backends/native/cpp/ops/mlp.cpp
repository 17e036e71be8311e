// The MLP, alone or beside the attention of its layer.
#include "ops/ops.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "ops/observer.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

namespace {

// Runs an MLP that reads x [rows][width] and adds to the residual stream.
void run_mlp(Pass& p, Team& team, int64_t thread, const float* x, const MLPOp& op) {
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
    return gather ? gather->rows + row * op.down.in : activate_to(row, p.act + thread * inner);
  };
  if (!gather && !p.batch.adapted && !op.xielu && !op.factors && p.k.fuses(op.up, quantised, between)) {
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
    if (gather) {
      each_row(team, rows, [&](int64_t row) { activate_to(row, gather->rows + row * op.down.in + op.up.first); });
      gather->wait(team);
    }
    each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.down, activated(row), row, last); });
  }
  add_linear(p, team, op.down, last, op.after, op.down_updates, activated);
}

}  // namespace

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const MLPOp& op) {
  r.rows.reserve(op.up, batch.rows);
  r.next_rows.reserve(op.down, batch.rows);
  needs.up = std::max(needs.up, op.up.out);
  needs.act = std::max(needs.act, op.down.in);
  reserve_gather(needs, batch, std::max(op.down.in, op.down.whole));
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, outputs_of(op.down));
  reserve_updates(r, batch, op.up_updates);
  reserve_updates(r, batch, op.down_updates);
}

void run(Pass& p, Team& team, int64_t thread, const MLPOp& op) { run_mlp(p, team, thread, p.x, op); }

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const ParallelOp& op) {
  reserve(needs, r, k, batch, op.attention);
  reserve(needs, r, k, batch, op.mlp);
  needs.before = std::max(needs.before, op.mlp.up.in);
}

void run(Pass& p, Team& team, int64_t thread, const ParallelOp& op) {
  keep_rows(p, team);
  run(p, team, thread, op.attention);
  if (p.observer) p.observer->end(1 + 2 * op.attention.layer);
  run_mlp(p, team, thread, p.before, op.mlp);
}

}  // namespace tw
