// Latent attention.
//
// The cache has one row for all heads: the latent, and the part of the key that turns. Queries meet it as rows of the
// same kind, and what a head has read is a latent, which becomes its values afterwards. Each head has a matrix of its
// own for both, a linear over all rows like any other, whose rows lie in whole tiles of their own.
//
//   x -> qkv [rows][down.out]: q (or its latent, and then q [rows][H x (still + turning)]), latent, key part
//   q -> queries [rows][H][latent + turning] -> mixed [rows][H][latent] -> values [rows][H x value] -> x
#include "ops/ops.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "ops/attention.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"

namespace tw {

namespace {

// A head's matrix, of those that lie one after another, and its quantised rows.
struct HeadMatrix {
  Matrix matrix;
  QuantisedRows rows;
};

HeadMatrix head_of(Pass& p, const Matrix& all, int64_t heads, int64_t head) {
  const Matrix one = matrix_in(all, head, heads);
  return {one, p.r.latent.heads.of(p.k, one, p.batch.rows, head * whole_tiles(p.batch.rows))};
}

// y [rows][row_stride]: of each head its matrix times its rows, which are quantised already. stride: between heads.
void linears_of_heads(Pass& p, Team& team, const Matrix& all, int64_t heads, float* y, int64_t stride,
                      int64_t row_stride) {
  const int64_t threads = (team.size() + heads - 1) / heads;
  const Pieces pieces(matrix_in(all, 0, heads), p.batch.rows, threads);
  const int64_t each = pieces.count();
  team.each(heads * each, [&](int64_t i) {
    const HeadMatrix head = head_of(p, all, heads, i / each);
    const Out out{y + i / each * stride, nullptr, row_stride};
    linear_piece(p.k, head.matrix, head.rows, pieces, i % each, out);
  });
}

// The stretches that a chunk's single row reads: the first `lead` ones, which hold the sinks, and those from `from` on.
struct Stretches {
  int64_t lead, from, count;  // count: of both; 0 unless the chunk has one row
  int64_t start(int64_t i) const { return (i < lead ? i : from + i - lead) * STRETCH; }
};

Stretches stretches_of(const KVLayer& kv, const ChunkRows& chunk) {
  if (chunk.rows != 1) return {0, 0, 0};
  const int64_t from = kv.window ? std::max<int64_t>(0, chunk.start - kv.window + 1) / STRETCH : 0;
  const int64_t lead = std::min(from, (kv.sinks + STRETCH - 1) / STRETCH);
  return {lead, from, lead + chunk.start / STRETCH - from + 1};
}

int64_t stretches_of(const KVLayer& kv, int64_t chunks, const ChunkRows* chunk) {
  int64_t count = 0;
  for (int64_t i = 0; i < chunks; i++) count += stretches_of(kv, chunk[i]).count;
  return count;
}

// Attention of all heads. Work items are some rows of a chunk, or a stretch of positions of a single row.
void attend_latent(Pass& p, Team& team, const KVLayer& kv, const Heads& h, const Queries& all, int64_t thread) {
  const ChunkRows* chunk = p.batch.chunk;
  const int64_t chunks = p.batch.chunks, each = p.k.stretch_sums(h);
  float *sums = p.r.latent.sums.of<float>(0), *mine = p.scratch + thread * p.scratch_each;
  const auto units_of = [&](const ChunkRows& one) {
    return one.rows == 1 ? stretches_of(kv, one).count : (one.rows + QUERY_ROWS - 1) / QUERY_ROWS;
  };
  int64_t units = 0;
  for (int64_t i = 0; i < chunks; i++) units += units_of(chunk[i]);
  team.each(units, [&](int64_t unit) {
    const ChunkRows* one = chunk;
    int64_t before = 0;  // stretches of the chunks before
    for (; unit >= units_of(*one); one++) {
      unit -= units_of(*one);
      before += stretches_of(kv, *one).count;
    }
    Queries some = all;
    some.head = 0;
    some.head_last = h.heads;
    some.first = one->rows > 1 ? unit * QUERY_ROWS : 0;
    some.last = std::min(some.first + QUERY_ROWS, one->rows);
    if (one->rows > 1) return p.k.attend(kv, h, *one, p.batch.page_size, some, mine);
    const int64_t start = stretches_of(kv, *one).start(unit);
    p.k.attend_stretch(kv, h, *one, p.batch.page_size, some, start, sums + (before + unit) * h.heads * each, mine);
  });
  team.each(chunks * h.heads, [&](int64_t i) {
    const ChunkRows& one = chunk[i / h.heads];
    const int64_t head = i % h.heads, before = stretches_of(kv, i / h.heads, chunk);
    if (one.rows != 1) return;
    p.k.merge_stretches(h, stretches_of(kv, one).count, h.heads * each, sums + (before * h.heads + head) * each,
                        p.mixed + (one.row * h.heads + head) * h.values);
  });
}

// One pass over latent attention's rows.
struct LatentRows {
  Pass& p;
  const LatentAttentionOp& op;
  const KVLayer& kv;
  const float* q;  // [rows][stride]
  int64_t stride;
  float* queries;
  const int64_t turning = op.heads.size - op.heads.values, of_head = op.still + turning;

  const ChunkRows& chunk_of_row(int64_t row) const { return p.batch.chunk[chunk_of(p.batch, row)]; }
  const float* rotation(const ChunkRows& chunk, int64_t row) const {  // null without one
    if (op.rotation < 0) return nullptr;
    return chunk.rotation + (row - chunk.row) * p.model.rotations + op.rotation;
  }
  void turn(const float* by, const float* x, float* y) const {
    if (op.rotation >= 0)
      p.k.rotate(turning, by, x, y);
    else if (x != y)
      memcpy(y, x, 4 * turning);
  }

  // Stores the row's latent and key part.
  void store(int64_t row) const {
    const ChunkRows& chunk = chunk_of_row(row);
    float* key = p.qkv + (row + 1) * outputs_of(op.down) - op.heads.size;
    p.k.norm(op.kv_norm, op.heads.values, key, key);
    turn(rotation(chunk, row), key + op.heads.values, key + op.heads.values);
    p.k.store_kv(kv, op.heads, chunk, p.batch.page_size, chunk.start + row - chunk.row, key, key);
  }

  // Begins the query of one head: the part that turns, and the quantised rest for k_up.
  void begin_query(int64_t row, int64_t head) const {
    const ChunkRows& chunk = chunk_of_row(row);
    const float* x = q + row * stride + head * of_head;
    const int64_t at = (row * op.heads.heads + head) * op.heads.size + op.heads.values;
    const float* own = rotation(chunk, row);
    turn(own, x + op.still, queries + at);
    if (sinks()) {
      const bool early = chunk.start + row - chunk.row < kv.sinks + kv.window - 1;
      turn(early ? own : kv.sink_rotation, x + op.still, p.sink + at);
    }
    const HeadMatrix to = head_of(p, op.k_up, op.heads.heads, head);
    p.k.quantise_row(to.matrix, x, row, to.rows);
  }

  bool sinks() const { return op.rotation >= 0 && kv.sinks; }
};

}  // namespace

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const LatentAttentionOp& op) {
  LatentMemory& m = r.latent;
  const Heads& h = op.heads;
  const int64_t tiles = h.heads * whole_tiles(batch.rows);
  r.rows.reserve(op.down, batch.rows);
  r.rows.reserve(op.q_up, batch.rows);
  r.rows.reserve(op.out, batch.rows);
  m.heads.reserve(op.k_up, tiles);
  m.heads.reserve(op.v_up, tiles);
  m.q.of<float>(batch.rows * op.q_up.out);
  m.queries.of<float>(batch.rows * h.heads * h.size);
  m.values.of<float>(batch.rows * op.v_up.out);
  m.sums.of<float>(stretches_of(batch.kv[op.layer], batch.chunks, batch.chunk) * h.heads * k.stretch_sums(h));
  needs.qkv = std::max(needs.qkv, outputs_of(op.down));
  reserve_gather(needs, batch, std::max({op.down.whole, op.out.in, op.out.whole}));
  needs.mixed = std::max(needs.mixed, h.heads * h.values);
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, outputs_of(op.out));
  reserve_updates(r, batch, op.down_updates);
  if (op.q_up.out) reserve_updates(r, batch, op.q_up_updates);
  reserve_updates(r, batch, op.out_updates);
  if (batch.kv[op.layer].sinks) needs.sink = std::max(needs.sink, h.heads * h.size);
  needs.scratch = std::max(needs.scratch, k.attention_scratch(h));
}

void run(Pass& p, Team& team, int64_t thread, const LatentAttentionOp& op) {
  const KVLayer& kv = p.batch.kv[op.layer];
  const Heads& h = op.heads;
  const int64_t rows = p.batch.rows, heads = h.heads, value = op.v_up.out / heads, down = outputs_of(op.down);
  float *q = op.q_up.out ? p.r.latent.q.of<float>(0) : p.qkv, *queries = p.r.latent.queries.of<float>(0);
  const LatentRows latent{p, op, kv, q, op.q_up.out ? op.q_up.out : down, queries};

  QuantisedRows quantised = normed_rows(p, team, thread, p.x, op.norm, op.down);
  linears_of(p, team, op.down, quantised, p.qkv, nullptr, down);
  update(p, team, op.down_updates, p.qkv, down, [&](int64_t row) { return normed_row(p, thread, p.x, op.norm, row); });
  if (op.q_up.out) {
    quantised = p.r.rows.of(p.k, op.q_up, rows);
    each_row(team, rows, [&](int64_t row) {
      float* x = p.qkv + row * down;
      p.k.norm(op.q_norm, op.q_up.in, x, x);
      p.k.quantise_row(op.q_up, x, row, quantised);
    });
    linears_of(p, team, op.q_up, quantised, q, nullptr, op.q_up.out);
    update(p, team, op.q_up_updates, q, op.q_up.out, [&](int64_t row) { return p.qkv + row * down; });
  }
  each_row(team, rows * heads, [&](int64_t i) {
    if (i % heads == 0) latent.store(i / heads);
    latent.begin_query(i / heads, i % heads);
  });
  linears_of_heads(p, team, op.k_up, heads, queries, h.size, heads * h.size);
  if (latent.sinks())
    each_row(team, rows * heads, [&](int64_t i) { memcpy(p.sink + i * h.size, queries + i * h.size, 4 * h.values); });

  const int64_t width = heads * h.size;
  const Queries all{0, 0, 0, 0, queries, latent.sinks() ? p.sink : nullptr, p.mixed, width, width, heads * h.values};
  keep_queries(p, team, op.layer, h.size, all);
  attend_latent(p, team, kv, h, all, thread);

  each_row(team, rows * heads, [&](int64_t i) {
    const HeadMatrix to = head_of(p, op.v_up, heads, i % heads);
    p.k.quantise_row(to.matrix, p.mixed + i * h.values, i / heads, to.rows);
  });
  const std::optional<Gather> gather = gather_of(p, op.v_up.out, op.out);
  float* const values = gather ? gather->rows : p.r.latent.values.of<float>(0);
  float* const own_values = gather ? gather->rows + op.v_up.first : values;
  linears_of_heads(p, team, op.v_up, heads, own_values, value, op.out.in);
  if (gather) gather->wait(team);
  quantised = p.r.rows.of(p.k, op.out, rows);
  const auto of_row = [&](int64_t row) { return values + row * op.out.in; };
  each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.out, of_row(row), row, quantised); });
  add_linear(p, team, op.out, quantised, op.after, op.out_updates, of_row);
}

}  // namespace tw
