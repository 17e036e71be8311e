// A block of attention and an MLP whose weights several layers share; the recurrence behind it reads what it makes.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/ops.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const SharedOp& op) {
  const int64_t width = op.out.in;
  reserve(needs, r, k, batch, op.attention);
  reserve(needs, r, k, batch, op.mlp);
  r.rows.reserve(op.out, batch.rows);
  needs.streams = std::max(needs.streams, 2 * width);
  needs.normed = std::max(needs.normed, 2 * width);
  needs.before = std::max(needs.before, width);
  needs.added = std::max(needs.added, width);
}

void run(Pass& p, Team& team, int64_t thread, const SharedOp& op) {
  const int64_t width = p.model.width, rows = p.batch.rows;
  each_row(team, rows, [&](int64_t row) {
    float* joined = p.streams + row * 2 * width;
    memcpy(joined, p.x + row * width, 4 * width);
    p.k.embed(op.table, p.batch.tokens[row], joined + width);
    if (op.scale != 1) scale_row(width, op.scale, joined + width);
  });
  run_attention(p, team, thread, p.streams, op.attention, false);
  each_row(team, rows, [&](int64_t row) { memcpy(p.before + row * width, p.added + row * width, 4 * width); });
  run_mlp(p, team, thread, p.before, op.mlp, false);
  linears_of(p, team, op.out, normed_rows(p, team, thread, p.added, Norm{}, op.out), p.before, p.x, width);
}

}  // namespace tw
