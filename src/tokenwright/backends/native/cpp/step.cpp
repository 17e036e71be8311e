#include "step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

#include "pool.h"

namespace tw {
namespace {

constexpr int64_t SUMMARY = 2048;      // logits that are summed up at a time; totals are merged in order
constexpr int64_t MANY_PIECES = 8;     // of logits for each thread: so many make their sizes even
constexpr int64_t MANY_ROWS = 16, MANY_BLOCKS = 8;  // more rows than that go past so many blocks together
constexpr int64_t QUERIES = 64;        // queries of a chunk, at least, that a thread takes at a time,
constexpr int64_t QUERY_ROWS = 16;     // and rows
constexpr int64_t ROW_PIECES = 8;      // for each thread, at least, where rows go one by one,
constexpr int64_t MOST_ROWS = 16;      // and so many at most in one
constexpr int64_t SINGLES = 4;         // pieces for each thread, at least, of many rows that come alone

// Memory that grows and is kept from step to step.
class Buffer {
 public:
  template <typename T>
  T* of(int64_t count) {
    const size_t bytes = (size_t)count * sizeof(T);
    if (bytes > size_) {
      data_.reset();
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

int64_t slab_inputs(int64_t format) { return format == F32 ? 16 : format == BF16 || format == F16 ? 32 : 64; }
int64_t depth_of(const Matrix& m) {
  const int64_t inputs = slab_inputs(m.format);
  return (m.in + inputs - 1) / inputs * inputs;
}
int64_t blocks_of(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

// Room for the rows of one linear. The same room serves every linear of a step, one after another.
class Ready {
 public:
  // Makes room for `count` rows of a linear; before the threads begin.
  void reserve(const Matrix& m, int64_t count) {
    const int64_t depth = depth_of(m);
    const int64_t room = (count + 31) / 32 * 32;
    numbers_.of<float>(room * depth);
    scales_.of<float>(room * depth / 32);
    sums_.of<int32_t>(room * depth / 32);
  }

  Rows rows(const Kernels& kernels, const Matrix& m, int64_t count) {
    const int64_t groups = m.group ? depth_of(m) / m.group : 0;
    return Rows{kernels.row_kind(m.format),
                count,
                depth_of(m),
                groups,
                kernels.together(m.format, count),
                numbers_.of<char>(0),
                scales_.of<float>(0),
                sums_.of<int32_t>(0)};
  }

 private:
  Buffer numbers_, scales_, sums_;
};

std::atomic<int64_t> workspaces{0};

}  // namespace

// Everything that one step at a time computes in.
struct Workspace {
  Buffer x, normed, qkv, sink, mixed, up, act, scratch, partial;
  Ready ready, next;

  Workspace() { workspaces++; }
  ~Workspace() { workspaces--; }
};

namespace {

// How many pieces the blocks of a linear are shared out in. A piece is some weights, and where there are many rows so many
// blocks that these are read from a cache that is not each core's own no more often than need be. All threads get as
// many pieces, and these differ by two blocks at most: who has less to do waits.
int64_t pieces_of(const Matrix& m, int64_t rows, int64_t threads) {
  const int64_t bits = m.format == F32 ? 32 : m.format == INT8 ? 8 : m.format == INT4 ? 4 : 16;
  const int64_t block_bytes = m.in * LANES * bits / 8, blocks = blocks_of(m);
  int64_t piece = WEIGHT_PIECE / (block_bytes > 0 ? block_bytes : 1);
  if (rows > MANY_ROWS && piece < MANY_BLOCKS) piece = MANY_BLOCKS;
  if (piece < 2) piece = 2;
  const int64_t rounds = (blocks + piece * threads - 1) / (piece * threads);
  return std::min(rounds * threads, (blocks + 1) / 2);
}

// Of a stretch of logits: the place of the largest, that number, and sum(exp(x - most)).
struct Partial {
  int64_t index;
  float most;
  double total;
};

int64_t summary_pieces(int64_t vocab) { return (vocab + SUMMARY - 1) / SUMMARY; }

// What the threads of one forward pass share.
struct Pass {
  const Kernels& k;
  const Model& model;
  const Batch& batch;
  Workspace& r;
  float *x, *normed, *qkv, *sink, *mixed, *up, *act, *scratch;
  int64_t scratch_each;
  Partial* partial;
};

void linear(const Kernels& k, Team& team, const Matrix& m, const Rows& rows, const Out& out) {
  const int64_t blocks = blocks_of(m), pairs = (blocks + 1) / 2, pieces = pieces_of(m, rows.rows, team.size());
  team.each(pieces, [&](int64_t i) {
    k.linear(m, rows, pairs * i / pieces * 2, std::min(pairs * (i + 1) / pieces * 2, blocks), out);
  });
}

// Calls body(row), some rows at a time where there are many.
template <typename Body>
void each_row(Team& team, int64_t rows, Body body) {
  team.share(rows, std::clamp<int64_t>(rows / (ROW_PIECES * team.size()), 1, MOST_ROWS), [&](int64_t row, int64_t last) {
    for (; row < last; row++) body(row);
  });
}

void linears_of(Pass& p, Team& team, const Matrix& m, const Rows& rows, float* y, const float* add, int64_t stride) {
  linear(p.k, team, m, rows, Out{y, add, stride});
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

// The heads of one row between the projection and the attention: norms, rotation, and K and V into the cache.
void heads_of(Pass& p, const Layer& layer, const KVLayer& kv, int64_t row) {
  const Heads& h = p.model.heads;
  const int64_t size = h.size, stride = (h.heads + 2 * h.kv_heads) * size;
  const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
  const int64_t position = chunk.start + row - chunk.row;
  float* q = p.qkv + row * stride;
  float *key = q + h.heads * size, *value = key + h.kv_heads * size;
  const Norm q_norm{layer.q_norm, nullptr, p.model.norm_eps}, k_norm{layer.k_norm, nullptr, p.model.norm_eps};
  for (int64_t i = 0; layer.q_norm && i < h.heads; i++) p.k.norm(q_norm, size, q + i * size, q + i * size);
  for (int64_t i = 0; layer.k_norm && i < h.kv_heads; i++) p.k.norm(k_norm, size, key + i * size, key + i * size);
  if (layer.rotates) {
    if (kv.sinks) {
      const int64_t edge = kv.sinks + kv.window - 1, at = position < edge ? position : edge;
      float* sink = p.sink + row * h.heads * size;
      for (int64_t i = 0; i < h.heads; i++)
        p.k.rotate(size, chunk.sink_rotation + at * size, q + i * size, sink + i * size);
    }
    const float* turn = chunk.rotation + (row - chunk.row) * size;
    for (int64_t i = 0; i < h.heads; i++) p.k.rotate(size, turn, q + i * size, q + i * size);
    for (int64_t i = 0; i < h.kv_heads; i++) p.k.rotate(size, turn, key + i * size, key + i * size);
  }
  p.k.keep(kv, h, chunk, p.batch.page_size, position, key, value);
}

// Shares attention out. A chunk goes by rows and KV heads, and by query heads too where there are fewer pieces than
// threads. Of a single row as many KV heads stay together as leave enough pieces: they lie side by side in the memory.
void attend_all(const Kernels& k, Team& team, const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk,
                int64_t page_size, const Queries& all, float* scratch, int64_t scratch_each, int64_t thread) {
  const int64_t ratio = h.heads / h.kv_heads;
  const int64_t some_rows = QUERY_ROWS * ratio < QUERIES ? QUERIES / ratio : QUERY_ROWS;
  int64_t singles = 0, pieces = 0;
  for (int64_t i = 0; i < chunks; i++) {
    singles += chunk[i].rows == 1;
    pieces += chunk[i].rows == 1 ? 0 : (chunk[i].rows + some_rows - 1) / some_rows;
  }
  const int64_t wanted = singles == 1 ? team.size() : SINGLES * team.size();  // texts are not all as long
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

void run_layer(Pass& p, Team& team, int64_t thread, int64_t index) {
  const Model& model = p.model;
  const Layer& layer = model.layer[index];
  const KVLayer& kv = p.batch.kv[index];
  const Heads& h = model.heads;
  const int64_t rows = p.batch.rows, width = model.width, q_width = h.heads * h.size;
  const int64_t qkv_width = q_width + 2 * h.kv_heads * h.size, up_width = (model.gated ? 2 : 1) * model.mlp_width;
  const bool sinks = layer.rotates && kv.sinks;

  Rows ready = p.r.ready.rows(p.k, layer.qkv, rows);
  each_row(team, rows, [&](int64_t row) {
    float* normed = p.normed + thread * width;
    p.k.norm(layer.attention_norm, width, p.x + row * width, normed);
    p.k.prepare(layer.qkv, normed, row, ready);
  });
  linears_of(p, team, layer.qkv, ready, p.qkv, nullptr, qkv_width);
  each_row(team, rows, [&](int64_t row) { heads_of(p, layer, kv, row); });
  const Queries all{0,         0,     0, 0, p.qkv, sinks ? p.sink : nullptr, p.mixed,
                    qkv_width, q_width, q_width};
  attend_all(p.k, team, kv, h, p.batch.chunks, p.batch.chunk, p.batch.page_size, all, p.scratch, p.scratch_each,
             thread);

  ready = p.r.ready.rows(p.k, layer.o, rows);
  each_row(team, rows, [&](int64_t row) { p.k.prepare(layer.o, p.mixed + row * q_width, row, ready); });
  linears_of(p, team, layer.o, ready, p.x, p.x, width);

  ready = p.r.ready.rows(p.k, layer.up, rows);
  each_row(team, rows, [&](int64_t row) {
    float* normed = p.normed + thread * width;
    p.k.norm(layer.mlp_norm, width, p.x + row * width, normed);
    p.k.prepare(layer.up, normed, row, ready);
  });
  const Rows last = p.r.next.rows(p.k, layer.down, rows);
  const Between between{model.activation, model.gated, model.mlp_width, layer.down, last};
  if (p.k.fuses(layer.up, ready, between)) {
    team.share(model.mlp_width / ACTIVATED, 2, [&](int64_t first, int64_t end) {
      p.k.up_rows(layer.up, ready, first, end, between);
    });
  } else {
    linears_of(p, team, layer.up, ready, p.up, nullptr, up_width);
    each_row(team, rows, [&](int64_t row) {
      float* act = p.act + thread * model.mlp_width;
      if (model.gated)
        p.k.gated(model.activation, model.mlp_width, p.up + row * up_width, act);
      else
        p.k.activate(model.activation, model.mlp_width, p.up + row * up_width, act);
      p.k.prepare(layer.down, act, row, last);
    });
  }
  linears_of(p, team, layer.down, last, p.x, p.x, width);
}

void embed_rows(Pass& p, Team& team) {
  const int64_t width = p.model.width;
  each_row(team, p.batch.rows, [&](int64_t row) {
    float* x = p.x + row * width;
    p.k.embed(p.model.embedding, p.batch.tokens[row], x);
    if (p.model.positions) {
      const ChunkRows& chunk = p.batch.chunk[chunk_of(p.batch, row)];
      const float* learned = p.model.positions + (chunk.start + row - chunk.row) * width;
      for (int64_t i = 0; i < width; i++) x[i] += learned[i];
    }
  });
}

// log(sum(exp)) of a row from the totals of its pieces, and its largest number.
void merge(const Partial* parts, int64_t count, int64_t* best, double* log_total) {
  const Partial* most = parts;
  for (int64_t i = 1; i < count; i++)
    if (parts[i].most > most->most) most = parts + i;
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += parts[i].total * exp((double)parts[i].most - most->most);
  *best = most->index;
  *log_total = log(total) + most->most;
}

// What logits [rows][vocab] come to, piece by piece, and then all of them.
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

void head_rows(Pass& p, Team& team, int64_t thread) {
  const Model& model = p.model;
  const int64_t width = model.width, vocab = model.vocab, wanted = p.batch.wanted;
  if (!wanted) return;
  Rows ready = p.r.ready.rows(p.k, model.head, wanted);
  team.each(wanted, [&](int64_t i) {
    float* normed = p.normed + thread * width;
    p.k.norm(model.norm, width, p.x + p.batch.row[i] * width, normed);
    p.k.prepare(model.head, normed, i, ready);
  });
  const Summary summary{p.k, wanted, vocab, p.batch.logits, p.partial, p.batch.best, p.batch.log_total};
  if (summary.pieces() < MANY_PIECES * team.size()) {
    linears_of(p, team, model.head, ready, p.batch.logits, nullptr, vocab);
    return summary.run(team);
  }
  team.each(summary.pieces(), [&](int64_t piece) {  // while they are near
    constexpr int64_t blocks = SUMMARY / LANES;
    const int64_t first = piece * blocks, last = std::min(first + blocks, blocks_of(model.head));
    p.k.linear(model.head, ready, first, last, Out{p.batch.logits, nullptr, vocab});
    for (int64_t row = 0; row < wanted; row++) summary.sum_up(row, piece);
  });
  summary.merge_all(team);
}

void run_pass(void* context, Team& team, int64_t thread) {
  Pass& p = *(Pass*)context;
  embed_rows(p, team);
  for (int64_t i = 0; i < p.model.layers; i++) run_layer(p, team, thread, i);
  head_rows(p, team, thread);
}

}  // namespace

Workspace* new_workspace() { return new (std::nothrow) Workspace; }

void free_workspace(Workspace* workspace) { delete workspace; }

int64_t count_workspaces() { return workspaces; }

void forward(const Kernels& k, Workspace& r, const Model& model, const Batch& batch, int64_t threads) {
  const Heads& h = model.heads;
  const int64_t rows = batch.rows, q_width = h.heads * h.size, kv_width = 2 * h.kv_heads * h.size;
  const int64_t each = k.attention_scratch(h);
  for (int64_t i = 0; i < model.layers; i++) {
    for (const Matrix* m : {&model.layer[i].qkv, &model.layer[i].o, &model.layer[i].up}) r.ready.reserve(*m, rows);
    r.next.reserve(model.layer[i].down, rows);
  }
  r.ready.reserve(model.head, batch.wanted);
  bool sinks = false;
  for (int64_t i = 0; i < model.layers; i++) sinks |= batch.kv[i].sinks > 0;
  Pass pass{k,
            model,
            batch,
            r,
            r.x.of<float>(rows * model.width),
            r.normed.of<float>(threads * model.width),
            r.qkv.of<float>(rows * (q_width + kv_width)),
            r.sink.of<float>(sinks ? rows * q_width : 1),
            r.mixed.of<float>(rows * q_width),
            r.up.of<float>(rows * (model.gated ? 2 : 1) * model.mlp_width),
            r.act.of<float>(threads * model.mlp_width),
            r.scratch.of<float>(threads * each),
            each,
            r.partial.of<Partial>(batch.wanted * summary_pieces(model.vocab))};
  run_on_threads(threads, run_pass, &pass);
}

void linear_rows(const Kernels& k, Workspace& r, const Matrix& m, int64_t rows, const float* x, float* y,
                 int64_t threads) {
  r.ready.reserve(m, rows);
  const Rows ready = r.ready.rows(k, m, rows);
  struct Job {
    const Kernels& k;
    const Matrix& m;
    const Rows& ready;
    const float* x;
    float* y;
  } job{k, m, ready, x, y};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        each_row(team, j.ready.rows, [&](int64_t row) { j.k.prepare(j.m, j.x + row * j.m.in, row, j.ready); });
        linear(j.k, team, j.m, j.ready, Out{j.y, nullptr, j.m.out});
      },
      &job);
}

void summarise(const Kernels& k, Workspace& r, int64_t n, int64_t vocab, const float* logits, int64_t* best,
               double* log_total, int64_t threads) {
  Summary summary{k, n, vocab, logits, r.partial.of<Partial>(n * summary_pieces(vocab)), best, log_total};
  run_on_threads(threads, [](void* context, Team& team, int64_t) { ((Summary*)context)->run(team); }, &summary);
}

void attend_rows(const Kernels& k, Workspace& r, const KVLayer& kv, const Heads& h, int64_t chunks, const ChunkRows* chunk,
                 int64_t page_size, const Queries& queries, int64_t threads) {
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
