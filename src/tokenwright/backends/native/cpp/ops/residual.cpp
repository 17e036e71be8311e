#include "ops/residual.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace tw {

void linears_of(Pass& p, Team& team, const Matrix& m, const QuantisedRows& rows, float* y, const float* add,
                int64_t stride) {
  if (!p.model.ranks || !m.whole) return linear(p.k, team, m, rows, Out{y, add, stride});
  const Gather all(*p.model.ranks);
  linear(p.k, team, m, rows, Out{all.rows + m.first, add ? add + m.first : nullptr, stride});
  all.wait(team);
  each_row(team, rows.rows, [&](int64_t row) { memcpy(y + row * stride, all.rows + row * stride, 4 * m.whole); });
}

std::optional<Gather> gather_of(const Pass& p, int64_t columns, const Matrix& m) {
  if (!p.model.ranks || columns == m.in) return std::nullopt;
  return std::optional<Gather>(std::in_place, *p.model.ranks);
}

void reserve_gather(Needs& needs, const Batch& batch, int64_t columns) {
  needs.gathered = std::max(needs.gathered, batch.rows * columns);
}

void scale_row(int64_t size, double scale, float* x) {
  const float factor = (float)scale;
  for (int64_t i = 0; i < size; i++) x[i] *= factor;
}

void multiply_rows(Pass& p, Team& team, const float* factors, float* rows, int64_t width) {
  if (!factors) return;
  each_row(team, p.batch.rows, [&](int64_t row) {
    for (int64_t i = 0; i < width; i++) rows[row * width + i] *= factors[i];
  });
}

void keep_rows(Pass& p, Team& team) {
  const int64_t width = p.model.width;
  each_row(team, p.batch.rows, [&](int64_t row) { memcpy(p.before + row * width, p.x + row * width, 4 * width); });
}

bool added_directly(const Batch& batch, const After& after) {
  return !batch.adapted && !after.norm.weight && after.scale == 1 && after.stream == 1;
}

void add(int64_t size, const float* x, float* to) {
  for (int64_t i = 0; i < size; i++) to[i] += x[i];
}

void multiply(int64_t size, const float* x, float* to) {
  for (int64_t i = 0; i < size; i++) to[i] *= x[i];
}

float* after_row(Pass& p, const After& after, int64_t row) {
  const int64_t width = p.model.width;
  float* added = p.added + row * width;
  if (after.norm.weight) p.k.norm(after.norm, width, added, added);
  if (after.scale != 1) scale_row(width, after.scale, added);
  return added;
}

void add_row(Pass& p, const After& after, int64_t row) {
  const int64_t width = p.model.width;
  add(width, after_row(p, after, row), p.x + row * width);
  if (after.stream != 1) scale_row(width, after.stream, p.x + row * width);
}

void reserve_updates(Workspace& r, const Batch& batch, const LowRank* updates) {
  r.adapters.resize(std::max<size_t>(r.adapters.size(), batch.adapted));
  for (int64_t i = 0; i < batch.adapted; i++) {
    const AdaptedRows& mine = batch.adapter[i];
    const LowRank& update = updates[mine.adapter];
    AdapterMemory& memory = r.adapters[i];
    memory.in.reserve(update.down, mine.rows);
    memory.low.reserve(update.up, mine.rows);
    memory.ranks.of<float>(mine.rows * update.down.out);
    memory.added.of<float>(mine.rows * update.up.out);
  }
}

const float* normed_row(const Pass& p, int64_t thread, const float* all, const Norm& norm, int64_t row, int64_t width) {
  const float* x = all + row * width;
  float* normed = p.normed + thread * width;
  if (!norm.weight) return x;
  p.k.norm(norm, width, x, normed);
  return normed;
}

QuantisedRows normed_rows(Pass& p, Team& team, int64_t thread, const float* all, const Norm& norm, const Matrix& m) {
  const QuantisedRows quantised = p.r.rows.of(p.k, m, p.batch.rows);
  each_row(team, p.batch.rows,
           [&](int64_t row) { p.k.quantise_row(m, normed_row(p, thread, all, norm, row, m.in), row, quantised); });
  return quantised;
}

}  // namespace tw
