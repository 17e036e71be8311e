#include "step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "pool.h"

namespace tw {
namespace {

constexpr int64_t SUMMARY = 2048;      // logits per partial sum; the totals are merged in order
constexpr int64_t SMALLEST_GROUP = 16; // inputs
constexpr int64_t MANY_PIECES = 8;     // partial sums per thread from which on linear and summary are fused
constexpr int64_t LAST_PIECE = 1 << 16;  // bytes of weights in the last work items of a linear
constexpr int64_t MANY_ROWS = 16, MANY_BLOCKS = 8;  // with more than MANY_ROWS rows, a piece has at least MANY_BLOCKS
constexpr int64_t QUERIES = 64;        // fewest queries of a chunk per piece of attention,
constexpr int64_t QUERY_ROWS = 16;     // and fewest rows
constexpr int64_t ROW_PIECES = 8;      // pieces per thread, at least, in phases over rows,
constexpr int64_t MOST_ROWS = 16;      // and the most rows per piece
constexpr int64_t SINGLES = 4;         // pieces of attention per thread, at least, with many single-row chunks

// Memory that grows on demand and is reused from step to step.
class Buffer {
 public:
  template <typename T>
  T* of(int64_t count) {
    const size_t bytes = (size_t)count * sizeof(T);
    if (bytes > size_) {
      data_.reset();
      size_ = 0;  // if the allocation fails
      data_.reset(new (std::align_val_t{64}) char[bytes]);
      size_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<char[], Free> data_;
  size_t size_ = 0;
};

int64_t depth_of(const Matrix& m) {
  const int64_t inputs = slab_inputs(m.format);
  return (m.in + inputs - 1) / inputs * inputs;
}
int64_t blocks_of(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

// Memory for the quantised rows of one linear. All linears of a step use it in turn.
class RowStorage {
 public:
  // Grows the memory for `count` rows of a linear. Call it before the threads start.
  void reserve(const Matrix& m, int64_t count) {
    const int64_t depth = depth_of(m);
    const int64_t whole = (count + 31) / 32 * 32;  // whole tiles
    numbers_.of<float>(whole * depth);
    scales_.of<float>(whole * depth / SMALLEST_GROUP);
    sums_.of<int32_t>(whole * depth / SMALLEST_GROUP);
  }

  // The rows of a linear, in the memory that `reserve` made, after `before` rows of linears of the same depth: whole
  // tiles of 32.
  QuantisedRows of(const Kernels& kernels, const Matrix& m, int64_t count, int64_t before = 0) {
    const int64_t depth = depth_of(m), groups = m.group ? depth / m.group : 0;
    return QuantisedRows{kernels.row_kind(m.format),
                         count,
                         depth,
                         groups,
                         kernels.together(m.format, count),
                         numbers_.of<float>(0) + before * depth,
                         scales_.of<float>(0) + before * depth / SMALLEST_GROUP,
                         sums_.of<int32_t>(0) + before * depth / SMALLEST_GROUP};
  }

 private:
  Buffer numbers_, scales_, sums_;
};

std::atomic<int64_t> workspaces{0};

// The memory of a mixture of experts; experts.inl.h tells what lies in it.
struct ExpertMemory {
  Buffer normed, logits, ids, weights, next, places, busy, visits, hidden, results;
  RowStorage in, middle, shared_in, shared_middle;
  std::atomic<int64_t> up_pieces{0}, down_pieces{0};  // atomic: a late thread reads them after their phase
};

// The memory of one adapter's rows of a batch: its inputs, what `down` makes of them, and what it adds.
struct AdapterMemory {
  RowStorage in, low;
  Buffer ranks, added;
};

// The memory of latent attention; latent.inl.h tells what lies in it.
struct LatentMemory {
  Buffer q, queries, values, sums;
  RowStorage heads;
};

}  // namespace

// The scratch memory of one call at a time.
struct Workspace {
  std::atomic<bool> in_use{false};
  Buffer x, normed, before, qkv, sink, mixed, up, added, act, scratch, partial;
  RowStorage rows, next_rows;
  ExpertMemory experts;
  std::vector<AdapterMemory> adapters;  // of each in the batch
  LatentMemory latent;

  Workspace() { workspaces++; }
  ~Workspace() { workspaces--; }
};

namespace {

// The pieces [first, last) of a linear's blocks that threads take in turn. Each is half of a thread's share of what is
// left, so that threads read long stretches of memory and end at about the same time. The last ones are equal, and
// each thread gets the same number of them: at most LAST_PIECE bytes of weights each, but with many rows MANY_BLOCKS
// blocks, so that threads read the rows from the shared cache less often. All but the last begin with an even block.
class Pieces {
 public:
  Pieces(const Matrix& m, int64_t rows, int64_t threads) : blocks_(blocks_of(m)), share_(2 * threads) {
    const int64_t block_bytes = depth_of(m) / slab_inputs(m.format) * slab_bytes(m.format);
    int64_t small = std::max<int64_t>(1, LAST_PIECE / std::max<int64_t>(1, 2 * block_bytes));  // in pairs of blocks
    if (rows > MANY_ROWS) small = std::max(small, MANY_BLOCKS / 2);
    left_ = pairs();
    for (; left_ > share_ * small; large_++) left_ -= left_ / share_;
    equal_ = std::min((left_ + small * threads - 1) / (small * threads) * threads, left_);
  }

  int64_t count() const { return large_ + equal_; }

  std::pair<int64_t, int64_t> blocks(int64_t i) const {
    if (i >= large_) {
      const int64_t from = pairs() - left_, at = i - large_;
      return in_blocks(from + left_ * at / equal_, from + left_ * (at + 1) / equal_);
    }
    int64_t left = pairs();
    for (; i > 0; i--) left -= left / share_;
    return in_blocks(pairs() - left, pairs() - left + left / share_);
  }

 private:
  int64_t pairs() const { return (blocks_ + 1) / 2; }
  std::pair<int64_t, int64_t> in_blocks(int64_t first, int64_t last) const {
    return {2 * first, std::min(2 * last, blocks_)};
  }

  int64_t blocks_, share_;         // of a share of what is left, half a thread's: one of so many
  int64_t large_ = 0, equal_ = 0;  // the number of large pieces, and of the last ones
  int64_t left_;                   // pairs of blocks in the last ones
};

// The summary of a range of logits: the argmax, the maximum, and sum(exp(x - maximum)).
struct Partial {
  int64_t index;
  float most;
  double total;
};

int64_t summary_pieces(int64_t vocab) { return (vocab + SUMMARY - 1) / SUMMARY; }

// The largest workspace need of any op of a model, in numbers per row of the step or per thread.
struct Needs {
  int64_t before = 0, qkv = 0, sink = 0, mixed = 0, up = 0, added = 0;  // per row
  int64_t act = 0, scratch = 0;                  // per thread
  int64_t partial = 0;                           // in total
};

class Observer;

// The state that the threads of one forward pass share.
struct Pass {
  const Kernels& k;
  const Model& model;
  const Batch& batch;
  Workspace& r;
  float *x, *normed, *before, *qkv, *sink, *mixed, *up, *added, *act, *scratch;
  int64_t scratch_each;
  Partial* partial;
  Observer* observer;  // null: nobody looks
};

// Calls f with the op cast to its own struct.
template <typename F>
void visit(const Op& op, F f) {
  switch (op.kind) {
    case EMBED: return f(*(const EmbedOp*)op.op);
    case ATTENTION: return f(*(const AttentionOp*)op.op);
    case MLP: return f(*(const MLPOp*)op.op);
    case HEAD: return f(*(const HeadOp*)op.op);
    case EXPERTS: return f(*(const ExpertsOp*)op.op);
    case PARALLEL: return f(*(const ParallelOp*)op.op);
    case LATENT: return f(*(const LatentOp*)op.op);
  }
}

int64_t chunk_of(const Batch& batch, int64_t row) {
  int64_t low = 0, high = batch.chunks - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (batch.chunk[middle].row <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

#include "observe.inl.h"

// Piece `i` of a linear.
void linear_piece(const Kernels& k, const Matrix& m, const QuantisedRows& rows, const Pieces& pieces, int64_t i,
                  const Out& out) {
  const auto [first, last] = pieces.blocks(i);
  k.linear(m, rows, first, last, out);
  count_blocks(m, rows.rows, first, last);
}

void linear(const Kernels& k, Team& team, const Matrix& m, const QuantisedRows& rows, const Out& out) {
  const Pieces pieces(m, rows.rows, team.size());
  team.each(pieces.count(), [&](int64_t i) { linear_piece(k, m, rows, pieces, i, out); });
}

// One phase over rows: calls body(row). A piece has several rows if there are many.
template <typename Body>
void each_row(Team& team, int64_t rows, Body body) {
  const int64_t piece = std::clamp<int64_t>(rows / (ROW_PIECES * team.size()), 1, MOST_ROWS);
  team.share(rows, piece, [&](int64_t row, int64_t last) {
    for (; row < last; row++) body(row);
  });
}

void linears_of(Pass& p, Team& team, const Matrix& m, const QuantisedRows& rows, float* y, const float* add,
                int64_t stride) {
  linear(p.k, team, m, rows, Out{y, add, stride});
}

// Copies the watched queries of a layer, when they are all computed. size: of a query.
void keep_queries(Pass& p, Team& team, int64_t layer, int64_t size, const Queries& all) {
  if (!p.observer || !p.observer->watches(layer)) return;
  team.each(p.batch.observed->watched, [&](int64_t i) { p.observer->keep_query(i, layer, size, all); });
}

// The norm of one row's heads in place: over each of them, or over all together.
void norm_heads(const Kernels& k, Norm norm, int64_t over, int64_t heads, int64_t size, float* x) {
  if (!norm.weight) return;
  if (over == ALL_HEADS) return k.norm(norm, heads * size, x, x);
  for (int64_t i = 0; i < heads; i++) {
    k.norm(norm, size, x + i * size, x + i * size);
    if (over == OWN_WEIGHTS) norm.weight += size;
  }
}

// The heads of one row between projection and attention: norms, rotation, and storing K and V in the cache.
void heads_of(Pass& p, const AttentionOp& op, const KVLayer& kv, int64_t row) {
  const Heads& h = op.heads;
  const int64_t size = h.size, stride = (h.heads + 2 * h.kv_heads) * size;
  const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
  const int64_t position = chunk.start + row - chunk.row;
  float* q = p.qkv + row * stride;
  float *key = q + h.heads * size, *value = key + h.kv_heads * size;
  norm_heads(p.k, op.q_norm, op.head_norms, h.heads, size, q);
  norm_heads(p.k, op.k_norm, op.head_norms, h.kv_heads, size, key);
  if (op.rotation >= 0) {
    const float* rotation = chunk.rotation + ((row - chunk.row) * p.model.rotations + op.rotation) * size;
    if (kv.sinks) {
      const float* at = position < kv.sinks + kv.window - 1 ? rotation : kv.sink_rotation;
      float* sink = p.sink + row * h.heads * size;
      for (int64_t i = 0; i < h.heads; i++) p.k.rotate(size, at, q + i * size, sink + i * size);
    }
    for (int64_t i = 0; i < h.heads; i++) p.k.rotate(size, rotation, q + i * size, q + i * size);
    for (int64_t i = 0; i < h.kv_heads; i++) p.k.rotate(size, rotation, key + i * size, key + i * size);
  }
  p.k.store_kv(kv, h, chunk, p.batch.page_size, position, key, value);
}

// Splits attention into pieces. A chunk is split by rows and KV heads, and by query heads too if there are fewer pieces
// than threads. A piece of a single-row chunk has as many KV heads as leave enough pieces, because consecutive KV heads
// are contiguous in the KV memory.
void attend_all(const Kernels& k, Team& team, const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk,
                int64_t page_size, const Queries& all, float* scratch, int64_t scratch_each, int64_t thread) {
  const int64_t ratio = h.heads / h.kv_heads;
  const int64_t some_rows = QUERY_ROWS * ratio < QUERIES ? QUERIES / ratio : QUERY_ROWS;
  int64_t singles = 0, pieces = 0;
  for (int64_t i = 0; i < chunks; i++) {
    singles += chunk[i].rows == 1;
    pieces += chunk[i].rows == 1 ? 0 : (chunk[i].rows + some_rows - 1) / some_rows;
  }
  const int64_t wanted = singles == 1 ? team.size() : SINGLES * team.size();  // sequences differ in length
  int64_t together = std::min({singles * h.kv_heads / wanted, QUERIES_TOGETHER / ratio, h.kv_heads});
  if (together < 1) together = 1;
  const int64_t groups = (h.kv_heads + together - 1) / together;
  together = (h.kv_heads + groups - 1) / groups;
  int64_t parts = 1;
  while ((pieces * h.kv_heads + singles * groups) * parts < team.size() && parts * 2 <= ratio) parts *= 2;
  const int64_t each = (ratio + parts - 1) / parts;
  const auto units_of = [&](const ChunkRows& one) {
    return (one.rows == 1 ? groups : (one.rows + some_rows - 1) / some_rows * h.kv_heads) * parts;
  };
  float* mine = scratch + thread * scratch_each;
  team.each((pieces * h.kv_heads + singles * groups) * parts, [&](int64_t unit) {
    const ChunkRows* one = chunk;
    for (; unit >= units_of(*one); one++) unit -= units_of(*one);
    const int64_t part = unit % parts, row_groups = one->rows == 1 ? groups : h.kv_heads;
    const int64_t first = unit / parts % row_groups * (one->rows == 1 ? together : 1);
    const int64_t last = one->rows == 1 ? std::min(first + together, h.kv_heads) : first + 1;
    Queries some = all;
    some.first = unit / parts / row_groups * some_rows;
    some.last = std::min(some.first + some_rows, one->rows);
    some.head = first * ratio + part * each;
    some.head_last = parts == 1 ? last * ratio : std::min(some.head + each, last * ratio);
    if (some.head < some.head_last) k.attend(kv, h, *one, page_size, some, mine);
  });
}

// Multiplies a row; apart from what is added to it later, so that each result is rounded.
void scale_row(int64_t size, double scale, float* x) {
  const float factor = (float)scale;
  for (int64_t i = 0; i < size; i++) x[i] *= factor;
}

// Whether a linear may add its result to the residual stream itself. With adapters it may not: a row's numbers must be
// the same in every batch, and those of an adapter are added to the result first.
bool added_directly(const Batch& batch, const After& after) {
  return !batch.adapted && !after.norm.weight && after.scale == 1;
}

void add(int64_t size, const float* x, float* to) {
  for (int64_t i = 0; i < size; i++) to[i] += x[i];
}

// x += after(added), for one row.
void add_row(Pass& p, const After& after, int64_t row) {
  const int64_t width = p.model.width;
  float* added = p.added + row * width;
  if (after.norm.weight) p.k.norm(after.norm, width, added, added);
  if (after.scale != 1) scale_row(width, after.scale, added);
  add(width, added, p.x + row * width);
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
  const auto of_down = [&](const AdaptedRows& mine, const LowRank& u) { return Pieces(u.down, mine.rows, team.size()); };
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

// x += after(linear(rows), with the updates of adapters, whose input(row) is the row in fp32).
template <typename Input>
void add_linear(Pass& p, Team& team, const Matrix& m, const QuantisedRows& rows, const After& after,
                const LowRank* updates, Input input) {
  const int64_t width = p.model.width;
  if (added_directly(p.batch, after)) return linears_of(p, team, m, rows, p.x, p.x, width);
  linears_of(p, team, m, rows, p.added, nullptr, width);
  update(p, team, updates, p.added, width, input);
  each_row(team, p.batch.rows, [&](int64_t row) { add_row(p, after, row); });
}

// norm(x) of a row of `all` [rows][width], in memory of the thread; without a norm the row itself.
const float* normed_row(const Pass& p, int64_t thread, const float* all, const Norm& norm, int64_t row) {
  const int64_t width = p.model.width;
  const float* x = all + row * width;
  float* normed = p.normed + thread * width;
  if (!norm.weight) return x;
  p.k.norm(norm, width, x, normed);
  return normed;
}

// Quantises norm(x) of all rows x [rows][width] for a linear.
QuantisedRows normed_rows(Pass& p, Team& team, int64_t thread, const float* all, const Norm& norm, const Matrix& m) {
  const QuantisedRows quantised = p.r.rows.of(p.k, m, p.batch.rows);
  each_row(team, p.batch.rows, [&](int64_t row) {
    p.k.quantise_row(m, normed_row(p, thread, all, norm, row), row, quantised);
  });
  return quantised;
}

void reserve(Needs&, Workspace&, const Kernels&, const Batch&, const EmbedOp&) {}

void run(Pass& p, Team& team, int64_t, const EmbedOp& op) {
  const int64_t width = p.model.width;
  each_row(team, p.batch.rows, [&](int64_t row) {
    float* x = p.x + row * width;
    p.k.embed(op.table, p.batch.tokens[row], x);
    if (op.scale != 1) scale_row(width, op.scale, x);
    if (op.positions) {
      const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
      const float* learned = op.positions + (chunk.start + row - chunk.row) * width;
      for (int64_t i = 0; i < width; i++) x[i] += learned[i];
    }
  });
}

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const AttentionOp& op) {
  const int64_t q_width = op.heads.heads * op.heads.size;
  r.rows.reserve(op.qkv, batch.rows);
  r.rows.reserve(op.out, batch.rows);
  needs.qkv = std::max(needs.qkv, op.qkv.out);
  needs.mixed = std::max(needs.mixed, q_width);
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, op.out.out);
  reserve_updates(r, batch, op.qkv_updates);
  reserve_updates(r, batch, op.out_updates);
  if (batch.kv[op.layer].sinks) needs.sink = std::max(needs.sink, q_width);
  needs.scratch = std::max(needs.scratch, k.attention_scratch(op.heads));
}

void run(Pass& p, Team& team, int64_t thread, const AttentionOp& op) {
  const KVLayer& kv = p.batch.kv[op.layer];
  const int64_t rows = p.batch.rows, q_width = op.heads.heads * op.heads.size;
  const bool sinks = op.rotation >= 0 && kv.sinks;

  QuantisedRows quantised = normed_rows(p, team, thread, p.x, op.norm, op.qkv);
  linears_of(p, team, op.qkv, quantised, p.qkv, nullptr, op.qkv.out);
  update(p, team, op.qkv_updates, p.qkv, op.qkv.out,
         [&](int64_t row) { return normed_row(p, thread, p.x, op.norm, row); });
  each_row(team, rows, [&](int64_t row) { heads_of(p, op, kv, row); });
  const Queries all{0,          0,       0, 0, p.qkv, sinks ? p.sink : nullptr, p.mixed,
                    op.qkv.out, q_width, q_width};
  keep_queries(p, team, op.layer, op.heads.size, all);
  attend_all(p.k, team, kv, op.heads, p.batch.chunks, p.batch.chunk, p.batch.page_size, all, p.scratch, p.scratch_each,
             thread);

  quantised = p.r.rows.of(p.k, op.out, rows);
  const auto mixed = [&](int64_t row) { return p.mixed + row * q_width; };
  each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.out, mixed(row), row, quantised); });
  add_linear(p, team, op.out, quantised, op.after, op.out_updates, mixed);
}

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const MLPOp& op) {
  r.rows.reserve(op.up, batch.rows);
  r.next_rows.reserve(op.down, batch.rows);
  needs.up = std::max(needs.up, op.up.out);
  needs.act = std::max(needs.act, op.down.in);
  if (!added_directly(batch, op.after)) needs.added = std::max(needs.added, op.down.out);
  reserve_updates(r, batch, op.up_updates);
  reserve_updates(r, batch, op.down_updates);
}

// Runs an MLP that reads x [rows][width] and adds to the residual stream.
void run_mlp(Pass& p, Team& team, int64_t thread, const float* x, const MLPOp& op) {
  const int64_t rows = p.batch.rows, inner = op.down.in;
  const QuantisedRows quantised = normed_rows(p, team, thread, x, op.norm, op.up);
  const QuantisedRows last = p.r.next_rows.of(p.k, op.down, rows);
  const Between between{op.activation, op.gated, inner, op.down, last};
  const auto activated = [&](int64_t row) {
    float* act = p.act + thread * inner;
    if (op.gated)
      p.k.gated(op.activation, inner, p.up + row * op.up.out, act);
    else
      p.k.activate(op.activation, inner, p.up + row * op.up.out, act);
    return act;
  };
  if (!p.batch.adapted && p.k.fuses(op.up, quantised, between)) {
    team.share(inner / ACTIVATED, 2, [&](int64_t first, int64_t end) {
      p.k.up_rows(op.up, quantised, first, end, between);
      for (int64_t half = 0; half <= op.gated; half++)
        count_blocks(op.up, rows, (half * inner + first * ACTIVATED) / LANES, (half * inner + end * ACTIVATED) / LANES);
    });
  } else {
    linears_of(p, team, op.up, quantised, p.up, nullptr, op.up.out);
    update(p, team, op.up_updates, p.up, op.up.out,
           [&](int64_t row) { return normed_row(p, thread, x, op.norm, row); });
    each_row(team, rows, [&](int64_t row) { p.k.quantise_row(op.down, activated(row), row, last); });
  }
  add_linear(p, team, op.down, last, op.after, op.down_updates, activated);
}

void run(Pass& p, Team& team, int64_t thread, const MLPOp& op) { run_mlp(p, team, thread, p.x, op); }

void reserve(Needs& needs, Workspace& r, const Kernels& k, const Batch& batch, const ParallelOp& op) {
  reserve(needs, r, k, batch, op.attention);
  reserve(needs, r, k, batch, op.mlp);
  needs.before = std::max(needs.before, op.mlp.up.in);
}

void run(Pass& p, Team& team, int64_t thread, const ParallelOp& op) {
  const int64_t width = p.model.width;
  each_row(team, p.batch.rows, [&](int64_t row) { memcpy(p.before + row * width, p.x + row * width, 4 * width); });
  run(p, team, thread, op.attention);
  if (p.observer) p.observer->end(1 + 2 * op.attention.layer);
  run_mlp(p, team, thread, p.before, op.mlp);
}

#include "experts.inl.h"
#include "latent.inl.h"

// The argmax and logsumexp of a row, from the partial summaries of its ranges.
void merge(const Partial* parts, int64_t count, int64_t* best, double* log_total) {
  const Partial* most = parts;
  for (int64_t i = 1; i < count; i++)
    if (parts[i].most > most->most) most = parts + i;
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += parts[i].total * exp((double)parts[i].most - most->most);
  *best = most->index;
  *log_total = log(total) + most->most;
}

// The argmax and logsumexp of logits [rows][vocab]: partial summaries first, then a merge per row.
struct Summary {
  const Kernels& k;
  int64_t rows, vocab;
  const float* logits;
  Partial* partial;  // [rows][pieces]
  int64_t* best;
  double* log_total;

  int64_t pieces() const { return summary_pieces(vocab); }

  void sum_up(int64_t row, int64_t piece) const {
    const int64_t at = piece * SUMMARY, n = vocab - at < SUMMARY ? vocab - at : SUMMARY;
    Partial& part = partial[row * pieces() + piece];
    k.summary(n, logits + row * vocab + at, &part.index, &part.most, &part.total);
    part.index += at;
  }

  void merge_all(Team& team) const {
    each_row(team, rows, [&](int64_t row) { merge(partial + row * pieces(), pieces(), best + row, log_total + row); });
  }

  void run(Team& team) const {
    team.each(rows * pieces(), [&](int64_t unit) { sum_up(unit / pieces(), unit % pieces()); });
    merge_all(team);
  }
};

void reserve(Needs& needs, Workspace& r, const Kernels&, const Batch& batch, const HeadOp& op) {
  r.rows.reserve(op.matrix, batch.wanted);
  needs.partial = std::max(needs.partial, batch.wanted * summary_pieces(op.matrix.out));
}

void run(Pass& p, Team& team, int64_t thread, const HeadOp& op) {
  const int64_t width = p.model.width, vocab = op.matrix.out, wanted = p.batch.wanted;
  each_row(team, p.batch.hidden, [&](int64_t i) {
    p.k.norm(op.norm, width, p.x + p.batch.hidden_row[i] * width, p.batch.states + i * width);
  });
  if (!wanted) return;
  QuantisedRows quantised = p.r.rows.of(p.k, op.matrix, wanted);
  team.each(wanted, [&](int64_t i) {
    float* normed = p.normed + thread * width;
    p.k.norm(op.norm, width, p.x + p.batch.row[i] * width, normed);
    if (op.scale != 1) scale_row(width, op.scale, normed);
    p.k.quantise_row(op.matrix, normed, i, quantised);
  });
  const Summary summary{p.k, wanted, vocab, p.batch.logits, p.partial, p.batch.best, p.batch.log_total};
  const auto cap = [&](int64_t row, int64_t piece) {
    const int64_t at = piece * SUMMARY;
    if (op.cap > 0) p.k.soft_cap(op.cap, std::min(vocab - at, SUMMARY), p.batch.logits + row * vocab + at);
  };
  if (summary.pieces() < MANY_PIECES * team.size()) {
    linears_of(p, team, op.matrix, quantised, p.batch.logits, nullptr, vocab);
    if (op.cap > 0)
      team.each(wanted * summary.pieces(), [&](int64_t i) { cap(i / summary.pieces(), i % summary.pieces()); });
    return summary.run(team);
  }
  team.each(summary.pieces(), [&](int64_t piece) {  // sums them up while they are in the cache
    constexpr int64_t blocks = SUMMARY / LANES;
    const int64_t first = piece * blocks, last = std::min(first + blocks, blocks_of(op.matrix));
    p.k.linear(op.matrix, quantised, first, last, Out{p.batch.logits, nullptr, vocab});
    count_blocks(op.matrix, wanted, first, last);
    for (int64_t row = 0; row < wanted; row++) {
      cap(row, piece);
      summary.sum_up(row, piece);
    }
  });
  summary.merge_all(team);
}

void run_pass(void* context, Team& team, int64_t thread) {
  Pass& p = *(Pass*)context;
  counted = {};  // by this thread
  int64_t ended = 0;
  for (int64_t i = 0; i < p.model.ops; i++) {
    const int64_t kind = p.model.op[i].kind;
    if (p.observer && kind == HEAD) p.observer->add(p.observer->layers);
    visit(p.model.op[i], [&](const auto& op) { run(p, team, thread, op); });
    ended += kind == PARALLEL ? 2 : 1;
    if (p.observer) p.observer->end(ended - 1);
  }
  if (p.observer) p.observer->add(p.observer->head);
}

}  // namespace

void route(const Routing& r, float* logits, int64_t* ids, float* weights) {
  if (r.shared_gate) weights[r.chosen] = sigmoid(logits[r.experts]);
  score(r, logits);
  choose(r, logits, ids, weights);
}

Workspace* new_workspace() { return new (std::nothrow) Workspace; }

void free_workspace(Workspace* workspace) { delete workspace; }

int64_t count_workspaces() { return workspaces; }

CallWorkspace::CallWorkspace(Workspace* shared)
    : shared_(shared && !shared->in_use.exchange(true, std::memory_order_acquire) ? shared : nullptr),
      used_(shared_ ? shared_ : new Workspace) {}

CallWorkspace::~CallWorkspace() {
  if (shared_)
    shared_->in_use.store(false, std::memory_order_release);
  else
    delete used_;
}

void forward(const Kernels& k, Workspace& r, const Model& model, const Batch& batch, int64_t threads) {
  const int64_t rows = batch.rows;
  Needs needs;
  std::unique_ptr<Observer> observer;
  if (batch.observed) observer = std::make_unique<Observer>(model, *batch.observed);
  for (int64_t i = 0; i < model.ops; i++)
    visit(model.op[i], [&](const auto& op) { reserve(needs, r, k, batch, op); });
  Pass pass{k,
            model,
            batch,
            r,
            r.x.of<float>(rows * model.width),
            r.normed.of<float>(threads * model.width),
            r.before.of<float>(rows * needs.before),
            r.qkv.of<float>(rows * needs.qkv),
            r.sink.of<float>(rows * needs.sink),
            r.mixed.of<float>(rows * needs.mixed),
            r.up.of<float>(rows * needs.up),
            r.added.of<float>(rows * needs.added),
            r.act.of<float>(threads * needs.act),
            r.scratch.of<float>(threads * needs.scratch),
            needs.scratch,
            r.partial.of<Partial>(needs.partial),
            observer.get()};
  run_on_threads(threads, run_pass, &pass);
  if (!observer) return;
  observer->report(model, batch);
  observer->look(k, model, batch, pass.scratch);
}

void linear_rows(const Kernels& k, Workspace& r, const Matrix& m, int64_t rows, const float* x, float* y,
                 int64_t threads) {
  r.rows.reserve(m, rows);
  const QuantisedRows quantised = r.rows.of(k, m, rows);
  struct Job {
    const Kernels& k;
    const Matrix& m;
    const QuantisedRows& quantised;
    const float* x;
    float* y;
  } job{k, m, quantised, x, y};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        each_row(team, j.quantised.rows,
                 [&](int64_t row) { j.k.quantise_row(j.m, j.x + row * j.m.in, row, j.quantised); });
        linear(j.k, team, j.m, j.quantised, Out{j.y, nullptr, j.m.out});
      },
      &job);
}

void summarise(const Kernels& k, Workspace& r, int64_t n, int64_t vocab, const float* logits, int64_t* best,
               double* log_total, int64_t threads) {
  Summary summary{k, n, vocab, logits, r.partial.of<Partial>(n * summary_pieces(vocab)), best, log_total};
  run_on_threads(threads, [](void* context, Team& team, int64_t) { ((Summary*)context)->run(team); }, &summary);
}

void attend_rows(const Kernels& k, Workspace& r, const KVLayer& kv, const Heads& h, int64_t chunks,
                 const ChunkRows* chunk, int64_t page_size, const Queries& queries, int64_t threads) {
  const int64_t each = k.attention_scratch(h);
  struct Job {
    const Kernels& k;
    const KVLayer& kv;
    const Heads& h;
    int64_t chunks;
    const ChunkRows* chunk;
    int64_t page_size;
    const Queries& queries;
    float* scratch;
    int64_t each;
  } job{k, kv, h, chunks, chunk, page_size, queries, r.scratch.of<float>(threads * each), each};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t thread) {
        Job& j = *(Job*)context;
        attend_all(j.k, team, j.kv, j.h, j.chunks, j.chunk, j.page_size, j.queries, j.scratch, j.each, thread);
      },
      &job);
}

}  // namespace tw
