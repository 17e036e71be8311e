// Recurrent layers: what lies between their two linears.
//
// A state lies in a page: that behind the last computed token of the page. A chunk begins with the state of the page
// before its first row's, or of that page itself, and rewrites the one in the page of its last row. A page on its way
// that the table has gets a copy of the state at its end. Threads divide the channels of the convolution, and then the
// heads and the columns of their states; each goes through the rows of a chunk in order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/ops.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

namespace {

constexpr int64_t CHANNELS = 128;  // of the convolution, per work item
constexpr int64_t COLUMNS = 64;    // of a head's state, per work item: its slab stays in the first cache
constexpr int64_t TOGETHER = 64;   // rows that a head's columns go through at once

int64_t history_of(const Recurrence& r) { return (r.taps - 1) * r.channels; }
int64_t columns_of(const Recurrence& r) { return r.value_size % COLUMNS ? r.value_size : COLUMNS; }
int64_t width_of(const Recurrence& r) { return r.phase == CONVOLVE || !r.heads ? r.channels : r.heads * r.value_size; }

// The states that one chunk reads and writes.
class ChunkStates {
 public:
  ChunkStates(const KVLayer& kv, const ChunkRows& chunk, int64_t page_size)
      : memory_((char*)kv.part[0].k.codes),
        bytes_(kv.part[0].bytes),
        table_(chunk.tables[kv.part[0].table]),
        chunk_(chunk),
        page_size_(page_size),
        last_((chunk.start + chunk.rows - 1) / page_size) {}

  // Runs body(first row, last row, state) over the rows of the chunk, where the part [lines][stride] at `at` of the
  // state, its columns [first, last), is what body changes.
  template <typename Body>
  void over_rows(int64_t at, int64_t lines, int64_t stride, int64_t first, int64_t last, Body body) const {
    float* state = state_in(last_) + at;
    const auto copy = [&](const float* from, float* to) {
      for (int64_t i = 0; from != to && i < lines; i++)
        memcpy(to + i * stride + first, from + i * stride + first, 4 * (last - first));
    };
    if (chunk_.start)
      copy(state_in((chunk_.start - 1) / page_size_) + at, state);
    else
      for (int64_t i = 0; i < lines; i++) memset(state + i * stride + first, 0, 4 * (last - first));
    int64_t row = 0;
    for (int64_t page = chunk_.start / page_size_; page < last_; page++) {
      if (table_[page] < 0) continue;
      const int64_t end = (page + 1) * page_size_ - chunk_.start;
      body(row, end, state);
      copy(state, state_in(page) + at);
      row = end;
    }
    body(row, chunk_.rows, state);
  }

 private:
  float* state_in(int64_t page) const { return (float*)(memory_ + table_[page] * bytes_); }

  char* memory_;
  int64_t bytes_;
  const int32_t* table_;
  const ChunkRows& chunk_;
  int64_t page_size_, last_;
};

// Queries and keys of one row, brought to their lengths.
void unit_row(const Kernels& k, const Recurrence& r, float* row) {
  for (int64_t i = 0; i < r.key_heads; i++) {
    k.unit(r.key_size, 1.0f / sqrtf((float)r.key_size), row + r.query + i * r.key_size);
    k.unit(r.key_size, 1.0f, row + r.key + i * r.key_size);
  }
}

// Of rows of one head, how much each keeps of the state, if that is one number, and the factor of what it writes.
struct Factors {
  float decays[TOGETHER], strengths[TOGETHER];

  void of(const Kernels& k, const Recurrence& r, int64_t head, int64_t rows, int64_t stride, const float* row) {
    const bool corrects = r.rule == DELTA;
    if (corrects) {
      float beta[TOGETHER];
      for (int64_t i = 0; i < rows; i++) beta[i] = row[i * stride + r.beta + head], strengths[i] = (float)r.beta_factor;
      k.gate_by(SIGMOID_GATE, rows, beta, strengths);
    }
    if (r.decays) return;
    for (int64_t i = 0; i < rows; i++) decays[i] = row[i * stride + r.decay + head];
    k.keep(Keeping{rows, 0, r.a_log[head], (float)r.least_step, (float)r.most_step, r.dt + head, decays,
                   corrects ? nullptr : strengths});
  }
};

// How much a row keeps for each number of one head's key, in place of the numbers that tell it.
void decay_keys(const Kernels& k, const Recurrence& r, int64_t head, float* row) {
  k.keep(Keeping{r.key_size, 1, r.a_log[head], 0, 0, r.dt + head * r.key_size, row + r.decay + head * r.key_size,
                 nullptr});
}

// Columns [at, at + columns) of all heads' values, which belong to one head.
void step_rows(const Kernels& k, const Recurrence& r, int64_t at, int64_t columns, int64_t rows, int64_t stride,
               const float* projected, float* mixed, float* state) {
  const int64_t head = at / r.value_size, width = width_of(r);
  const int64_t shared = (r.in_turn ? head % r.key_heads : head / (r.heads / r.key_heads)) * r.key_size;
  Factors by;
  for (int64_t row = 0; row < rows; row += TOGETHER, projected += TOGETHER * stride, mixed += TOGETHER * width) {
    const int64_t count = std::min(TOGETHER, rows - row);
    by.of(k, r, head, count, stride, projected);
    const float* decay = r.decays ? projected + r.decay + head * r.key_size : by.decays;
    k.step_head(HeadRows{count, r.key_size, columns, r.rule == DELTA, stride, width, r.decays ? stride : 1, r.decays,
                         projected + r.query + shared, projected + r.key + shared, projected + r.value + at, decay,
                         by.strengths, r.skip ? r.skip[head] : 0.0f, state, mixed + at});
  }
}

// The gate and the norm of one row of mixed, in place.
void finish_row(const Kernels& k, const Recurrence& r, const float* row, float* mixed) {
  const int64_t width = width_of(r), size = width / r.norm_parts;
  const Gate by = (Gate)r.gated_by;
  if (r.gate >= 0 && (r.gate_first || !r.norm.weight)) k.gate_by(by, width, row + r.gate, mixed);
  if (!r.norm.weight) return;
  Norm norm = r.norm;
  for (int64_t i = 0; i < r.norm_parts; i++) {
    k.norm(norm, size, mixed + i * size, mixed + i * size);
    if (r.own_weights) norm.weight += size;
  }
  if (r.gate >= 0 && !r.gate_first) k.gate_by(by, width, row + r.gate, mixed);
}

// The same of a scan.
void scan_rows(const Kernels& k, const Recurrence& r, int64_t at, int64_t columns, int64_t rows, int64_t stride,
               const float* projected, float* mixed, float* state) {
  for (int64_t row = 0; row < rows; row++, projected += stride, mixed += r.value_size)
    k.scan(ScanStep{r.key_size, columns, columns, r.value_size, projected + r.query, projected + r.key,
                    projected + r.value + at, projected + r.decay + at, r.dt + at, r.a_log + at, r.skip + at, state,
                    mixed + at});
}

// The convolution of all chunks, in place.
void convolve_all(const Kernels& k, Team& team, const KVLayer& kv, const Recurrence& r, int64_t chunks,
                  const ChunkRows* chunk, int64_t page_size, int64_t stride, float* projected) {
  const int64_t slabs = (r.channels + CHANNELS - 1) / CHANNELS;
  team.each(chunks * slabs, [&](int64_t unit) {
    const ChunkRows& one = chunk[unit / slabs];
    const int64_t first = unit % slabs * CHANNELS, last = std::min(first + CHANNELS, r.channels);
    const Convolution by{r.channels, r.taps, r.activated, first, last, r.conv, r.conv_bias};
    float* x = projected + one.row * stride + r.channels_at;
    for (int64_t row = 0; r.before >= 0 && row < one.rows; row++)
      multiply(last - first, x + row * stride + r.before - r.channels_at + first, x + row * stride + first);
    ChunkStates(kv, one, page_size)
        .over_rows(0, r.taps - 1, r.channels, first, last, [&](int64_t from, int64_t to, float* history) {
          k.convolve(by, to - from, stride, x + from * stride, history);
        });
  });
}

void recur_all(const Kernels& k, Team& team, const KVLayer& kv, const Recurrence& r, int64_t chunks,
               const ChunkRows* chunk, int64_t page_size, int64_t stride, float* projected, float* mixed) {
  const int64_t rows = chunk[chunks - 1].row + chunk[chunks - 1].rows, width = width_of(r);
  if (r.phase != APPLY_RULE) convolve_all(k, team, kv, r, chunks, chunk, page_size, stride, projected);
  if (r.rule == CONVOLUTION || r.phase == CONVOLVE) {
    const bool gated = r.gate >= 0 && r.phase == ALL_PHASES;
    each_row(team, rows, [&](int64_t row) {
      float *x = projected + row * stride, *to = mixed + row * width;
      memcpy(to, x + r.channels_at, 4 * width);
      if (gated) multiply(width, x + r.gate, to);
    });
    return;
  }
  if (r.decays)
    team.each(rows * r.heads,
              [&](int64_t unit) { decay_keys(k, r, unit % r.heads, projected + unit / r.heads * stride); });
  if (r.rule == DELTA) each_row(team, rows, [&](int64_t row) { unit_row(k, r, projected + row * stride); });
  const int64_t columns = columns_of(r), slabs_of_state = width / columns;
  team.each(chunks * slabs_of_state, [&](int64_t unit) {
    const ChunkRows& one = chunk[unit / slabs_of_state];
    const int64_t first = unit % slabs_of_state * columns, size = r.key_size * columns;
    ChunkStates(kv, one, page_size)
        .over_rows(history_of(r) + first * r.key_size, 1, size, 0, size, [&](int64_t from, int64_t to, float* state) {
          const auto step = r.rule == SCAN ? scan_rows : step_rows;
          step(k, r, first, columns, to - from, stride, projected + (one.row + from) * stride,
               mixed + (one.row + from) * width, state);
        });
  });
  each_row(team, rows, [&](int64_t row) { finish_row(k, r, projected + row * stride, mixed + row * width); });
}

}  // namespace

void recur_rows(const Kernels& k, Workspace&, const KVLayer& kv, const Recurrence& r, int64_t chunks,
                const ChunkRows* chunk, int64_t page_size, int64_t stride, float* projected, float* mixed,
                int64_t threads) {
  struct Job {
    const Kernels& k;
    const KVLayer& kv;
    const Recurrence& r;
    int64_t chunks;
    const ChunkRows* chunk;
    int64_t page_size, stride;
    float *projected, *mixed;
  } job{k, kv, r, chunks, chunk, page_size, stride, projected, mixed};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        recur_all(j.k, team, j.kv, j.r, j.chunks, j.chunk, j.page_size, j.stride, j.projected, j.mixed);
      },
      &job);
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const RecurrentOp& op) {
  r.rows.reserve(op.project, batch.rows);
  r.rows.reserve(op.out, batch.rows);
  for (int64_t i = 0; i < op.inners; i++) r.rows.reserve(op.inner[i].matrix, batch.rows);
  needs.qkv = std::max(needs.qkv, op.row);
  reserve_gather(needs, batch, std::max(op.project.whole, op.out.whole));
  needs.mixed = std::max(needs.mixed, op.out.in);
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, outputs_of(op.out));
  reserve_updates(r, batch, op.project_updates);
  reserve_updates(r, batch, op.out_updates);
}

// The matrices between the convolution and the rule: each adds numbers to all rows.
void extend_rows(Pass& p, Team& team, const RecurrentOp& op) {
  int64_t end = outputs_of(op.project);
  for (const Inner* one = op.inner; one < op.inner + op.inners; end += one->matrix.out, one++) {
    const QuantisedRows quantised = p.r.rows.of(p.k, one->matrix, p.batch.rows);
    each_row(team, p.batch.rows,
             [&](int64_t row) { p.k.quantise_row(one->matrix, p.qkv + row * op.row + one->at, row, quantised); });
    linears_of(p, team, one->matrix, quantised, p.qkv + end, nullptr, op.row);
    if (!one->sizes[0]) continue;
    each_row(team, p.batch.rows, [&](int64_t row) {
      float* part = p.qkv + row * op.row + end;
      for (int64_t i = 0; i < MOST_NORMS; part += one->sizes[i++])
        if (one->sizes[i]) p.k.norm(one->norms[i], one->sizes[i], part, part);
    });
  }
}

void run(Pass& p, Team& team, int64_t thread, const RecurrentOp& op) {
  const int64_t rows = p.batch.rows, width = op.out.in;
  const float* const x = op.beside ? p.before : p.x;
  QuantisedRows quantised = normed_rows(p, team, thread, x, op.norm, op.project);
  linears_of(p, team, op.project, quantised, p.qkv, nullptr, op.row);
  update(p, team, op.project_updates, p.qkv, op.row,
         [&](int64_t row) { return normed_row(p, thread, x, op.norm, row); });
  multiply_rows(p, team, op.factors, p.qkv, op.row);
  Recurrence recurrence = op.recurrence;
  if (op.inners) {
    convolve_all(p.k, team, p.batch.kv[op.layer], recurrence, p.batch.chunks, p.batch.chunk, p.batch.page_size, op.row,
                 p.qkv);
    extend_rows(p, team, op);
    recurrence.phase = APPLY_RULE;
  }
  recur_all(p.k, team, p.batch.kv[op.layer], recurrence, p.batch.chunks, p.batch.chunk, p.batch.page_size, op.row,
            p.qkv, p.mixed);
  quantised = p.r.rows.of(p.k, op.out, rows);
  const auto mixed = [&](int64_t row) { return p.mixed + row * width; };
  each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.out, mixed(row), row, quantised); });
  add_linear(p, team, op.out, quantised, op.after, op.out_updates, mixed);
}

}  // namespace tw
