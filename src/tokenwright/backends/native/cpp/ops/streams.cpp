// Several residual streams, of which layers compute the first (AltUp), and the low-rank addition beside attention.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/ops.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

namespace {

constexpr int64_t SUMS = 8;  // each over every eighth number, so that no addition waits for the one before

template <typename Of>
double mean(int64_t size, Of of) {
  double sums[SUMS] = {}, total = 0;
  for (int64_t i = 0; i < size; i++) sums[i % SUMS] += of(i);
  for (double sum : sums) total += sum;
  return total / (double)size;
}

// A stream of a row.
float* stream_of(const Pass& p, int64_t streams, int64_t row, int64_t i) {
  return p.streams + (row * streams + i) * p.model.width;
}

// The numbers of a row in `up`: what the router's matrix makes, and then the coefficients.
int64_t row_size(const StreamRouter& of) { return of.matrix.out + of.coefficients.out; }

const float* coefficients_of(const Pass& p, const StreamRouter& of, int64_t row) {
  return p.up + row * row_size(of) + of.matrix.out;
}

void reserve(Needs& needs, Workspace& r, const Batch& batch, const StreamRouter& of) {
  r.rows.reserve(of.matrix, batch.rows);
  r.next_rows.reserve(of.coefficients, batch.rows);
  needs.up = std::max(needs.up, row_size(of));
}

// Computes the coefficients of all rows x.
void route(Pass& p, Team& team, int64_t thread, const StreamRouter& of) {
  const int64_t rows = p.batch.rows, width = p.model.width, stride = row_size(of);
  const QuantisedRows in = p.r.rows.of(p.k, of.matrix, rows);
  const QuantisedRows next = p.r.next_rows.of(p.k, of.coefficients, rows);
  each_row(team, rows, [&](int64_t row) {
    float* normed = p.normed + thread * width;
    p.k.norm(of.norm, width, p.x + row * width, normed);
    scale_row(width, of.scale, normed);
    p.k.quantise_row(of.matrix, normed, row, in);
  });
  linears_of(p, team, of.matrix, in, p.up, nullptr, stride);
  each_row(team, rows, [&](int64_t row) {
    p.k.soft_cap(1, of.matrix.out, p.up + row * stride);  // tanh
    p.k.quantise_row(of.coefficients, p.up + row * stride, row, next);
  });
  linears_of(p, team, of.coefficients, next, p.up + of.matrix.out, nullptr, stride);
}

}  // namespace

void restore(int64_t size, const float* like, float* x) {
  const auto square_of = [&](const float* of) { return mean(size, [&](int64_t i) { return (double)of[i] * of[i]; }); };
  scale_row(size, sqrt(square_of(like)) / sqrt(std::max(square_of(x), 1e-5)), x);
}

void sparsify(int64_t size, double deviations, float* x) {
  const double middle = mean(size, [&](int64_t i) { return (double)x[i]; });
  const double variance = mean(size, [&](int64_t i) { return (x[i] - middle) * (x[i] - middle); });
  const float cutoff = (float)(middle + deviations * sqrt(variance));
  for (int64_t i = 0; i < size; i++) x[i] = std::max(x[i] - cutoff, 0.0f);
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const SpreadOp& op) {
  r.rows.reserve(op.project, batch.rows);
  needs.streams = std::max(needs.streams, op.project.in + op.project.out);
}

void run(Pass& p, Team& team, int64_t thread, const SpreadOp& op) {
  const int64_t width = p.model.width, streams = 1 + op.project.out / width;
  const QuantisedRows rows = normed_rows(p, team, thread, p.x, Norm{}, op.project);
  linears_of(p, team, op.project, rows, p.streams + width, nullptr, streams * width);
  each_row(team, p.batch.rows, [&](int64_t row) {
    const float* x = p.x + row * width;
    memcpy(stream_of(p, streams, row, 0), x, 4 * width);
    for (int64_t i = 1; i < streams; i++) restore(width, x, stream_of(p, streams, row, i));
  });
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const PredictOp& op) {
  reserve(needs, r, batch, op.router);
}

void run(Pass& p, Team& team, int64_t thread, const PredictOp& op) {
  const int64_t width = p.model.width, streams = op.router.streams;
  route(p, team, thread, op.router);
  each_row(team, p.batch.rows, [&](int64_t row) {
    const float* by = coefficients_of(p, op.router, row);
    float* all = stream_of(p, streams, row, 0);
    for (int64_t at = 0; at < width; at++) {
      float before[MOST_STREAMS];
      for (int64_t i = 0; i < streams; i++) before[i] = all[i * width + at];
      for (int64_t j = 0; j < streams; j++) {
        float sum = before[0] * by[j * streams];
        for (int64_t i = 1; i < streams; i++) sum += before[i] * by[j * streams + i];
        all[j * width + at] = sum + before[j];
      }
    }
    memcpy(p.x + row * width, all, 4 * width);
  });
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const LaurelOp& op) {
  r.rows.reserve(op.left, batch.rows);
  r.next_rows.reserve(op.right, batch.rows);
  needs.up = std::max(needs.up, op.left.out);
  needs.added = std::max(needs.added, op.right.out);
}

void run(Pass& p, Team& team, int64_t thread, const LaurelOp& op) {
  const int64_t width = p.model.width, rank = op.left.out;
  const QuantisedRows quantised = normed_rows(p, team, thread, p.before, op.norm, op.left);
  const QuantisedRows last = p.r.next_rows.of(p.k, op.right, p.batch.rows);
  linears_of(p, team, op.left, quantised, p.up, nullptr, rank);
  each_row(team, p.batch.rows, [&](int64_t row) { p.k.quantise_row(op.right, p.up + row * rank, row, last); });
  linears_of(p, team, op.right, last, p.added, nullptr, width);
  each_row(team, p.batch.rows, [&](int64_t row) {
    float *x = p.x + row * width, *added = after_row(p, op.after, row);
    add(width, normed_row(p, thread, p.before, op.norm, row), added);
    add(width, added, x);
    scale_row(width, op.after.stream, x);
  });
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const CorrectOp& op) {
  reserve(needs, r, batch, op.router);
  reserve_inputs(needs, r, batch, op.inputs);
  needs.before = std::max(needs.before, op.router.matrix.in);
}

void run(Pass& p, Team& team, int64_t thread, const CorrectOp& op) {
  const int64_t width = p.model.width, streams = op.router.streams;
  route(p, team, thread, op.router);
  each_row(team, p.batch.rows, [&](int64_t row) {
    const float* by = coefficients_of(p, op.router, row);
    float *all = stream_of(p, streams, row, 0), *x = p.x + row * width, *read = p.before + row * width;
    for (int64_t at = 0; at < width; at++) {
      const float news = x[at] - all[at];
      for (int64_t i = 0; i < streams; i++) all[i * width + at] += news * (by[i] + 1);
    }
    memcpy(x, all, 4 * width);
    memcpy(read, all, 4 * width);
    if (op.scale) multiply(width, op.scale, read);
  });
  make_inputs_added(p, team, thread, p.before, op.inputs);
  each_row(team, p.batch.rows, [&](int64_t row) {
    const float* added = after_row(p, op.inputs.after, row);
    for (int64_t i = 1; i < streams; i++) add(width, added, stream_of(p, streams, row, i));
  });
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const MergeOp& op) {
  for (int64_t i = 1; i < op.streams; i++) r.rows.reserve(op.matrix[i - 1], batch.rows);
  needs.added = std::max(needs.added, op.matrix->out);
}

void run(Pass& p, Team& team, int64_t, const MergeOp& op) {
  const int64_t width = p.model.width, rows = p.batch.rows;
  for (int64_t i = 1; i < op.streams; i++) {
    const Matrix& m = op.matrix[i - 1];
    const QuantisedRows quantised = p.r.rows.of(p.k, m, rows);
    each_row(team, rows, [&](int64_t row) { p.k.quantise_row(m, stream_of(p, op.streams, row, i), row, quantised); });
    linears_of(p, team, m, quantised, p.added, nullptr, width);
    each_row(team, rows, [&](int64_t row) {
      float* added = p.added + row * width;
      restore(width, stream_of(p, op.streams, row, 0), added);
      add(width, added, p.x + row * width);
    });
  }
  each_row(team, rows, [&](int64_t row) { scale_row(width, 1.0 / (double)op.streams, p.x + row * width); });
}

}  // namespace tw
