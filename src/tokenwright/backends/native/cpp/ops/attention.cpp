// The attention op: the heads' norms and rotation between its two linears, and the threads' work items.
#include "ops/attention.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "ops/ops.h"
#include "ops/residual.h"
#include "ops/threaded_linear.h"
#include "step/observer.h"

namespace tw {

namespace {

constexpr int64_t QUERIES = 64;  // fewest queries of a chunk per piece of attention
constexpr int64_t SINGLES = 4;   // pieces of attention per thread, at least, with many single-row chunks
constexpr int64_t SHARED = 64;   // prefixes are shared in such blocks of positions

// The norm of one row's heads in place: over each of them, or over all together.
void norm_heads(const Kernels& k, Norm norm, int64_t over, int64_t heads, int64_t size, float* x) {
  if (!norm.weight) return;
  if (over == ALL_HEADS) return k.norm(norm, heads * size, x, x);
  for (int64_t i = 0; i < heads; i++) {
    k.norm(norm, size, x + i * size, x + i * size);
    if (over == OWN_WEIGHTS) norm.weight += size;
  }
}

// Numbers of a row between the two linears: values that are no outputs of the first lie behind those.
int64_t row_size(const AttentionOp& op) {
  return outputs_of(op.qkv) + (op.sources == KEYS_ALONE ? op.heads.kv_heads * op.heads.size : 0);
}

// The values of one row's KV heads, from what their linear has made.
void values_of(const Kernels& k, const AttentionOp& op, const float* made, float* value) {
  const int64_t size = op.heads.size, all = op.heads.kv_heads * size;
  if (op.v_norm.weight)
    for (int64_t i = 0; i < all; i += size) k.norm(op.v_norm, size, made + i, value + i);
  else if (made != value)
    memcpy(value, made, 4 * all);
}

void clip(int64_t size, float most, float* x) {
  for (int64_t i = 0; i < size; i++) x[i] = std::min(std::max(x[i], -most), most);
}

// The heads of one row between projection and attention: norms, rotation, and storing K and V in the cache.
void heads_of(Pass& p, const AttentionOp& op, const KVLayer& kv, int64_t row) {
  const Heads& h = op.heads;
  const bool keys = op.sources != OTHER_LAYER;
  const int64_t size = h.size, stride = row_size(op);
  const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
  const int64_t position = chunk.start + row - chunk.row;
  float* q = p.qkv + row * stride;
  float *key = q + h.heads * size, *value = key + h.kv_heads * size;
  const auto norm_q = [&](float* x) { norm_heads(p.k, op.q_norm, op.head_norms, h.heads, size, x); };
  const auto norm_k = [&] {
    if (keys) norm_heads(p.k, op.k_norm, op.head_norms, h.kv_heads, size, key);
  };
  if (keys) values_of(p.k, op, op.sources == KEYS_ALONE ? key : value, value);
  if (!op.norms_last) {
    norm_q(q);
    norm_k();
  }
  if (op.clip > 0) clip((h.heads + 2 * h.kv_heads) * size, (float)op.clip, q);
  for (int64_t i = 0; kv.block_rotation && i < h.kv_heads * size; i++) key[i] -= h.key_bias[i];
  if (op.rotation >= 0) {
    const float* rotation = chunk.rotation + (row - chunk.row) * p.model.rotations + op.rotation;
    if (kv.sinks) {
      const float* at = position < kv.sinks + kv.window - 1 ? rotation : kv.sink_rotation;
      float* sink = p.sink + row * h.heads * size;
      for (int64_t i = 0; i < h.heads; i++) p.k.rotate(size, at, q + i * size, sink + i * size);
      if (op.norms_last) norm_q(sink);
    }
    for (int64_t i = 0; i < h.heads; i++) p.k.rotate(size, rotation, q + i * size, q + i * size);
    for (int64_t i = 0; keys && i < h.kv_heads; i++) p.k.rotate(size, rotation, key + i * size, key + i * size);
  }
  if (op.norms_last) {
    norm_q(q);
    norm_k();
  }
  if (keys) p.k.store_kv(kv, h, chunk, p.batch.page_size, position, key, value);
}

// How many of `count` pages are the same from the first on.
int64_t same_pages(const int32_t* a, const int32_t* b, int64_t count) {
  constexpr int64_t some = 64;
  int64_t same = 0;
  while (same + some <= count && !memcmp(a + same, b + same, some * sizeof *a)) same += some;
  while (same < count && a[same] == b[same]) same++;
  return same;
}

// How many of the positions [0, stop), from the first on, two sequences have in the same pages, in whole blocks.
int64_t same_positions(const KVLayer& kv, const ChunkRows& a, const ChunkRows& b, int64_t page_size, int64_t stop) {
  for (const Part* part = kv.part; part < kv.part + kv.parts; part++) {
    const int64_t end = part->stop >= 0 ? std::min(part->stop, stop) : stop;
    const int64_t first = part->start / page_size, pages = (end + page_size - 1) / page_size - first;
    if (end <= part->start) continue;
    const int64_t same = same_pages(a.tables[part->table] + first, b.tables[part->table] + first, pages);
    if (same < pages) stop = (first + same) * page_size;
  }
  return stop / SHARED * SHARED;
}

}  // namespace

SharedRun shared_run(const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk, int64_t page_size) {
  SharedRun run{1, 0};
  if (kv.window || h.values < h.size || chunk->rows != 1) return run;
  const int64_t most = std::min(chunks, QUERIES_TOGETHER / (h.heads / h.kv_heads));
  int64_t stop = chunk->start, farthest = stop;
  for (; run.chunks < most && chunk[run.chunks].rows == 1; run.chunks++) {
    const ChunkRows& next = chunk[run.chunks];
    stop = same_positions(kv, *chunk, next, page_size, std::min(stop, next.start));
    farthest = std::max(farthest, next.start);
    const bool nearly_all = 2 * (farthest - stop) <= stop;  // the rest costs a little more than without a run
    if (!nearly_all || stop * run.chunks <= run.positions * (run.chunks - 1)) break;
    run.positions = stop;
  }
  return run;
}

void keep_queries(Pass& p, Team& team, int64_t layer, int64_t size, const Queries& all) {
  if (!p.observer || !p.observer->watches(layer)) return;
  team.each(p.batch.observed->watched, [&](int64_t i) { p.observer->keep_query(i, layer, size, all); });
}

// Splits attention into pieces. A chunk is split by rows and KV heads, and by query heads too if there are fewer pieces
// than threads. A piece of a single-row chunk has as many KV heads as leave enough pieces, because consecutive KV heads
// are contiguous in the KV memory.
void attend_all(const Kernels& k, Team& team, const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk,
                int64_t page_size, const Queries& all, float* scratch, int64_t scratch_each, int64_t thread) {
  const int64_t ratio = h.heads / h.kv_heads;
  const int64_t some_rows = QUERY_ROWS * ratio < QUERIES ? QUERIES / ratio : QUERY_ROWS;
  const auto run_at = [&](int64_t i) { return shared_run(kv, h, chunks - i, chunk + i, page_size); };
  const auto pieces_of = [&](const ChunkRows& one) { return (one.rows + some_rows - 1) / some_rows; };
  int64_t singles = 0, pieces = 0;
  for (int64_t i = 0, n; i < chunks; i += n) {
    n = run_at(i).chunks;
    const bool single = n == 1 && chunk[i].rows == 1;
    singles += single;
    pieces += single ? 0 : pieces_of(chunk[i]);
  }
  const int64_t wanted = singles == 1 ? team.size() : SINGLES * team.size();  // sequences differ in length
  int64_t together = std::min({singles * h.kv_heads / wanted, QUERIES_TOGETHER / ratio, h.kv_heads});
  if (together < 1) together = 1;
  const int64_t groups = (h.kv_heads + together - 1) / together;
  together = (h.kv_heads + groups - 1) / groups;
  int64_t parts = 1;
  while ((pieces * h.kv_heads + singles * groups) * parts < team.size() && parts * 2 <= ratio) parts *= 2;
  const int64_t each = (ratio + parts - 1) / parts;
  float* mine = scratch + thread * scratch_each;
  int64_t at = 0, before = 0;  // the chunk of this thread's last unit, and the units before that chunk
  SharedRun run = run_at(0);
  team.each((pieces * h.kv_heads + singles * groups) * parts, [&](int64_t unit) {
    const auto single = [&] { return run.chunks == 1 && chunk[at].rows == 1; };
    const auto units = [&] { return (single() ? groups : pieces_of(chunk[at]) * h.kv_heads) * parts; };
    for (; unit >= before + units(); run = run_at(at)) {
      before += units();
      at += run.chunks;
    }
    unit -= before;
    const ChunkRows& one = chunk[at];
    const int64_t part = unit % parts, row_groups = single() ? groups : h.kv_heads;
    const int64_t first = unit / parts % row_groups * (single() ? together : 1);
    const int64_t last = single() ? std::min(first + together, h.kv_heads) : first + 1;
    Queries some = all;
    some.first = unit / parts / row_groups * some_rows;
    some.last = run.chunks > 1 ? run.chunks : std::min(some.first + some_rows, one.rows);
    some.head = first * ratio + part * each;
    some.head_last = parts == 1 ? last * ratio : std::min(some.head + each, last * ratio);
    if (some.head >= some.head_last) return;
    if (run.chunks > 1)
      k.attend_shared(kv, h, run.chunks, &one, run.positions, page_size, some, mine);
    else
      k.attend(kv, h, one, page_size, some, mine);
  });
}

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const AttentionOp& op) {
  const int64_t q_width = op.heads.heads * op.heads.size;
  if (op.kept) needs.before = std::max(needs.before, op.qkv.in);
  r.rows.reserve(op.qkv, batch.rows);
  r.rows.reserve(op.out, batch.rows);
  needs.qkv = std::max(needs.qkv, row_size(op));
  reserve_gather(needs, batch, std::max({op.qkv.whole ? row_size(op) : 0, op.out.in, op.out.whole}));
  needs.mixed = std::max(needs.mixed, q_width);
  if (op.out_norm.weight) needs.act = std::max(needs.act, op.out.in);
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, outputs_of(op.out));
  reserve_updates(r, batch, op.qkv_updates);
  reserve_updates(r, batch, op.out_updates);
  if (batch.kv[op.layer].sinks) needs.sink = std::max(needs.sink, q_width);
  needs.scratch = std::max(needs.scratch, k.attention_scratch(op.heads));
}

void run(Pass& p, Team& team, int64_t thread, const AttentionOp& op) {
  const KVLayer& kv = p.batch.kv[op.layer];
  const int64_t rows = p.batch.rows, q_width = op.heads.heads * op.heads.size, stride = row_size(op);
  const bool sinks = op.rotation >= 0 && kv.sinks;

  if (op.kept) keep_rows(p, team);
  QuantisedRows quantised = normed_rows(p, team, thread, p.x, op.norm, op.qkv);
  linears_of(p, team, op.qkv, quantised, p.qkv, nullptr, stride);
  update(p, team, op.qkv_updates, p.qkv, stride, [&](int64_t row) { return normed_row(p, thread, p.x, op.norm, row); });
  each_row(team, rows, [&](int64_t row) { heads_of(p, op, kv, row); });
  const std::optional<Gather> gather = gather_of(p, q_width, op.out);
  float* const all_mixed = gather ? gather->rows : p.mixed;
  float* const own_mixed = gather ? gather->rows + op.qkv.first : p.mixed;
  const Queries all{0, 0, 0, 0, p.qkv, sinks ? p.sink : nullptr, own_mixed, stride, q_width, op.out.in};
  keep_queries(p, team, op.layer, op.heads.size, all);
  attend_all(p.k, team, kv, op.heads, p.batch.chunks, p.batch.chunk, p.batch.page_size, all, p.scratch, p.scratch_each,
             thread);

  if (op.out_gate)
    each_row(team, rows, [&](int64_t row) {
      p.k.gate_by(SIGMOID_GATE, q_width, p.qkv + (row + 1) * stride - q_width, own_mixed + row * op.out.in);
    });
  if (gather) gather->wait(team);
  quantised = p.r.rows.of(p.k, op.out, rows);
  const auto mixed = [&](int64_t row) {
    float *const x = all_mixed + row * op.out.in, *const normed = p.act + thread * op.out.in;
    if (!op.out_norm.weight) return x;
    p.k.norm(op.out_norm, op.out.in, x, normed);
    return normed;
  };
  each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.out, mixed(row), row, quantised); });
  add_linear(p, team, op.out, quantised, op.after, op.out_updates, mixed);
}

}  // namespace tw
