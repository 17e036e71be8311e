// What ops share around their linears: the norm before them, and the updates of adapters and the residual stream after
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "api.h"
#include "kernels.h"
#include "ops/threaded_linear.h"
#include "step/pass.h"
#include "step/ranks.h"
#include "step/step.h"
#include "step/workspace.h"
#include "threads/pool.h"

namespace tw {

// y = rows times a matrix, plus `add` if that is not null; [rows][stride]. Of a rank's part whose whole is gathered:
// all outputs.
void linears_of(Pass& p, Team& team, const Matrix& m, const QuantisedRows& rows, float* y, const float* add,
                int64_t stride);

// The gather of what ranks have computed of `columns` inputs of a matrix each; none where one has them all.
std::optional<Gather> gather_of(const Pass& p, int64_t columns, const Matrix& m);

// Makes room for a gather of so many numbers of each row, if ranks compute the model.
void reserve_gather(Needs& needs, const Batch& batch, int64_t columns);

// Multiplies a row; apart from what is added to it later, so that each result is rounded.
void scale_row(int64_t size, double scale, float* x);

// rows *= factors, over all rows of the step [rows][width]; null: none.
void multiply_rows(Pass& p, Team& team, const float* factors, float* rows, int64_t width);

// Keeps x as it is in `before`, for an op that reads it so later.
void keep_rows(Pass& p, Team& team);

// Whether a linear may add its result to the residual stream itself. With adapters it may not: a row's numbers must be
// the same in every batch, and those of an adapter are added to the result first.
bool added_directly(const Batch& batch, const After& after);

// to += x.
void add(int64_t size, const float* x, float* to);

// to *= x.
void multiply(int64_t size, const float* x, float* to);

// after(added), for one row, in place; all but the factor of x.
float* after_row(Pass& p, const After& after, int64_t row);

// x = stream * (x + scale * norm(added)), for one row.
void add_row(Pass& p, const After& after, int64_t row);

// Grows the workspace for the updates of one matrix by the batch's adapters.
void reserve_updates(Workspace& r, const Batch& batch, const LowRank* updates);

// y += up(down(input)) for the rows of each adapter in the batch. y: [rows][stride]. input(row) is the row that the
// matrix itself reads, in fp32, in memory of the calling thread. The phases serve all adapters together.
template <typename Input>
void update(Pass& p, Team& team, const LowRank* updates, float* y, int64_t stride, Input input) {
  const Batch& batch = p.batch;
  if (!batch.adapted || !updates) return;
  // Calls body(adapted rows, update, memory, i) for each unit i of each adapter: count(adapted rows, update) units.
  const auto each = [&](auto count, auto body) {
    int64_t all = 0;
    for (int64_t a = 0; a < batch.adapted; a++) all += count(batch.adapter[a], updates[batch.adapter[a].adapter]);
    team.each(all, [&](int64_t i) {
      int64_t a = 0;
      for (int64_t n; i >= (n = count(batch.adapter[a], updates[batch.adapter[a].adapter])); a++) i -= n;
      body(batch.adapter[a], updates[batch.adapter[a].adapter], p.r.adapters[a], i);
    });
  };
  const auto rows = [](const AdaptedRows& mine, const LowRank& u) { return u.down.out ? mine.rows : 0; };
  const auto of_down = [&](const AdaptedRows& mine, const LowRank& u) {
    return Pieces(u.down, mine.rows, team.size());
  };
  const auto of_up = [&](const AdaptedRows& mine, const LowRank& u) { return Pieces(u.up, mine.rows, team.size()); };
  const auto count = [](auto pieces) {
    return [=](const AdaptedRows& mine, const LowRank& u) { return pieces(mine, u).count(); };
  };

  each(rows, [&](const AdaptedRows& mine, const LowRank& u, AdapterMemory& memory, int64_t i) {
    p.k.quantise_row(u.down, input(mine.row[i]), i, memory.in.of(p.k, u.down, mine.rows));
  });
  each(count(of_down), [&](const AdaptedRows& mine, const LowRank& u, AdapterMemory& memory, int64_t i) {
    const Out low{memory.ranks.of<float>(0), nullptr, u.down.out};
    linear_piece(p.k, u.down, memory.in.of(p.k, u.down, mine.rows), of_down(mine, u), i, low);
  });
  each(rows, [&](const AdaptedRows& mine, const LowRank& u, AdapterMemory& memory, int64_t i) {
    const float* low = memory.ranks.of<float>(0) + i * u.down.out;
    p.k.quantise_row(u.up, low, i, memory.low.of(p.k, u.up, mine.rows));
  });
  each(count(of_up), [&](const AdaptedRows& mine, const LowRank& u, AdapterMemory& memory, int64_t i) {
    float* added = memory.added.of<float>(0);
    const Pieces pieces = of_up(mine, u);
    linear_piece(p.k, u.up, memory.low.of(p.k, u.up, mine.rows), pieces, i, Out{added, nullptr, u.up.out});
    const auto [first, last] = pieces.blocks(i);
    const int64_t from = first * LANES, to = std::min(last * LANES, u.up.out);
    for (int64_t row = 0; row < mine.rows; row++)
      add(to - from, added + row * u.up.out + from, y + mine.row[row] * stride + from);
  });
}

// added = linear(rows), with the updates of adapters, whose input(row) is the row in fp32.
template <typename Input>
void make_added(Pass& p, Team& team, const Matrix& m, const QuantisedRows& rows, const LowRank* updates, Input input) {
  linears_of(p, team, m, rows, p.added, nullptr, p.model.width);
  update(p, team, updates, p.added, p.model.width, input);
}

// x += after(linear(rows), with the updates of adapters).
template <typename Input>
void add_linear(Pass& p, Team& team, const Matrix& m, const QuantisedRows& rows, const After& after,
                const LowRank* updates, Input input) {
  if (added_directly(p.batch, after)) return linears_of(p, team, m, rows, p.x, p.x, p.model.width);
  make_added(p, team, m, rows, updates, input);
  each_row(team, p.batch.rows, [&](int64_t row) { add_row(p, after, row); });
}

// norm(x) of a row of `all` [rows][width], in memory of the thread; without a norm the row itself.
const float* normed_row(const Pass& p, int64_t thread, const float* all, const Norm& norm, int64_t row, int64_t width);

// The same of rows as wide as the residual stream.
inline const float* normed_row(const Pass& p, int64_t thread, const float* all, const Norm& norm, int64_t row) {
  return normed_row(p, thread, all, norm, row, p.model.width);
}

// Quantises norm(x) of all rows x [rows][inputs of the linear] for a linear.
QuantisedRows normed_rows(Pass& p, Team& team, int64_t thread, const float* all, const Norm& norm, const Matrix& m);

}  // namespace tw
