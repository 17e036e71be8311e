// The input of a layer that predicts one token further.
#include <algorithm>
#include <cstdint>

#include "ops/ops.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const NextInputOp& op) {
  r.rows.reserve(op.project, batch.rows);
  needs.act = std::max(needs.act, op.project.in);
}

void run(Pass& p, Team& team, int64_t thread, const NextInputOp& op) {
  const int64_t width = p.model.width;
  const QuantisedRows quantised = p.r.rows.of(p.k, op.project, p.batch.rows);
  each_row(team, p.batch.rows, [&](int64_t row) {
    float* both = p.act + thread * op.project.in;
    p.k.norm(op.token_norm, width, p.x + row * width, op.hidden_first ? both + width : both);
    p.k.norm(op.hidden_norm, width, p.batch.before + row * width, op.hidden_first ? both : both + width);
    p.k.quantise_row(op.project, both, row, quantised);
  });
  linears_of(p, team, op.project, quantised, p.x, nullptr, width);
}

}  // namespace tw
