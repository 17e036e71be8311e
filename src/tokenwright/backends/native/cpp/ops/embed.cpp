// The embedding of the step's tokens.
#include "ops/ops.h"

#include <cstdint>
#include <cstring>

#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

void reserve(Needs& needs, Workspace&, const Kernels&, const Batch& batch, const EmbedOp& op) {
  reserve_gather(needs, batch, op.table.in);
}

void run(Pass& p, Team& team, int64_t, const EmbedOp& op) {
  const int64_t width = p.model.width;
  if (op.table.whole) {
    const Gather all(*p.model.ranks);
    each_row(team, p.batch.rows, [&](int64_t row) {
      const int64_t token = p.batch.tokens[row] - op.table.first;
      if (0 <= token && token < op.table.out) p.k.embed(op.table, token, all.rows + row * width);
    });
    all.wait(team);
    each_row(team, p.batch.rows, [&](int64_t row) { memcpy(p.x + row * width, all.rows + row * width, 4 * width); });
  }
  each_row(team, p.batch.rows, [&](int64_t row) {
    float* x = p.x + row * width;
    if (!op.table.whole) p.k.embed(op.table, p.batch.tokens[row], x);
    if (op.scale != 1) scale_row(width, op.scale, x);
    if (op.norm.weight) p.k.norm(op.norm, width, x, x);
    if (op.positions) {
      const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
      const float* learned = op.positions + (chunk.start + row - chunk.row) * width;
      for (int64_t i = 0; i < width; i++) x[i] += learned[i];
    }
  });
}

}  // namespace tw
