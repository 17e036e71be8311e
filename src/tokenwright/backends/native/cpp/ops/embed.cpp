// The embedding of the step's tokens, and what pictures add behind some layers.
#include "ops/ops.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

namespace {

// What each row has for the layers, from its token and x.
void make_inputs(Pass& p, Team& team, int64_t thread, const LayerInputs& op) {
  const int64_t all = op.project.out;
  const QuantisedRows rows = normed_rows(p, team, thread, p.x, Norm{}, op.project);
  linears_of(p, team, op.project, rows, p.inputs, nullptr, all);
  each_row(team, p.batch.rows, [&](int64_t row) {
    float *to = p.inputs + row * all, *read = p.act + thread * all;
    scale_row(all, op.project_scale, to);
    for (int64_t i = 0; i < op.layers; i++) p.k.norm(op.norm, op.size, to + i * op.size, to + i * op.size);
    const int64_t token = p.batch.tokens[row];
    p.k.embed(op.table, token < op.table.out ? token : 0, read);
    scale_row(all, op.scale, read);
    add(all, read, to);
    scale_row(all, op.factor, to);
  });
}

}  // namespace

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const EmbedOp& op) {
  reserve_gather(needs, batch, op.table.in);
  if (!op.inputs.table.out) return;
  r.rows.reserve(op.inputs.project, batch.rows);
  needs.inputs = std::max(needs.inputs, op.inputs.project.out);
  needs.act = std::max(needs.act, op.inputs.project.out);
}

void run(Pass& p, Team& team, int64_t thread, const EmbedOp& op) {
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
    if (p.batch.inserted && p.batch.inserted[row]) memcpy(x, p.batch.inserted[row], 4 * width);
  });
  if (op.inputs.table.out) make_inputs(p, team, thread, op.inputs);
}

void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const DeepstackOp&) {}

void run(Pass& p, Team& team, int64_t, const DeepstackOp& op) {
  if (!p.batch.deep) return;
  const float* const* rows = p.batch.deep + op.index * p.batch.rows;
  each_row(team, p.batch.rows, [&](int64_t row) {
    if (rows[row]) add(p.model.width, rows[row], p.x + row * p.model.width);
  });
}

}  // namespace tw
