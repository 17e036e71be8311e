#include "step/observer.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "step/pass.h"
#include "step/workspace.h"

namespace tw {

// Counts a linear over `rows` rows by the blocks [first, last).
void count_blocks(const Matrix& m, int64_t rows, int64_t first, int64_t last) {
  const int64_t outputs = std::min(last * LANES, m.out) - first * LANES, slabs = depth_of(m) / slab_inputs(m.format);
  counted.flop += 2 * rows * outputs * m.in;
  counted.bytes += (last - first) * (slabs * slab_bytes(m.format) + block_scale_bytes(m, slabs));
  counted.bytes += (!!m.bias + !!m.factors) * outputs * (int64_t)sizeof(float);
}

namespace {

// Positions that some row of a chunk reads: the sinks [0, sinks), if they lie before, and [from, stop).
struct Reads {
  int64_t sinks, from, stop;

  Reads(const KVLayer& kv, const ChunkRows& chunk) : sinks(0), from(0), stop(chunk.start + chunk.rows) {
    if (!kv.window) return;
    from = std::max<int64_t>(0, chunk.start - kv.window + 1);
    sinks = std::min(kv.sinks, from);
  }
};

// How many of the positions [first, stop) belong to a part; the last one has no end.
int64_t in_part(const Part& part, int64_t first, int64_t stop) {
  if (part.stop >= 0) stop = std::min(stop, part.stop);
  return std::max<int64_t>(0, stop - std::max(first, part.start));
}

template <typename Other>
const Heads* heads_in(const Other&, int64_t) {
  return nullptr;
}
const Heads* heads_in(const AttentionOp& op, int64_t layer) { return op.layer == layer ? &op.heads : nullptr; }
const Heads* heads_in(const LatentAttentionOp& op, int64_t layer) { return op.layer == layer ? &op.heads : nullptr; }
const Heads* heads_in(const ParallelOp& op, int64_t layer) { return heads_in(op.attention, layer); }

// The attention heads of a layer.
const Heads* heads_of_layer(const Model& model, int64_t layer) {
  const Heads* found = nullptr;
  for (int64_t i = 0; i < model.ops && !found; i++)
    visit(model.op[i], [&](const auto& op) { found = heads_in(op, layer); });
  return found;
}

constexpr int64_t ENTROPY = 8192;  // logits per part of an entropy; the parts are added in order

int64_t entropy_pieces(int64_t vocab) { return (vocab + ENTROPY - 1) / ENTROPY; }
int64_t vocabulary(const Model& model) { return ((const HeadOp*)model.op[model.ops - 1].op)->matrix.out; }

// The ids of the highest numbers of x, found stretch by stretch in ascending order: the highest first, the lowest id
// first among equals. A stretch whose maximum is no higher than the lowest so far is passed over.
struct Highest {
  const float* x;
  int64_t count;  // the most ids
  int64_t* ids;
  int64_t found = 0;

  void search(int64_t first, int64_t last) {
    constexpr int64_t stretch = 128, lanes = 16;
    for (int64_t start = first; start < last; start += stretch) {
      const int64_t end = std::min(start + stretch, last);
      if (found == count && end - start == stretch) {
        float most[lanes];
        std::copy(x + start, x + start + lanes, most);
        for (int64_t i = start + lanes; i < end; i += lanes)
          for (int64_t j = 0; j < lanes; j++) most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
        if (*std::max_element(most, most + lanes) <= x[ids[count - 1]]) continue;
      }
      for (int64_t i = start; i < end; i++) insert(i);
    }
  }

 private:
  void insert(int64_t i) {
    if (found == count && !(x[i] > x[ids[count - 1]])) return;
    int64_t place = found < count ? found++ : count - 1;
    for (; place > 0 && x[i] > x[ids[place - 1]]; place--) ids[place] = ids[place - 1];
    ids[place] = i;
  }
};

// The same of a row of logits, which are in the pieces with the `count` highest maxima.
void highest_ids(int64_t vocab, const float* logits, const Partial* parts, int64_t count, int64_t* ids) {
  const int64_t pieces = summary_pieces(vocab);
  std::vector<float> most(pieces);
  for (int64_t i = 0; i < pieces; i++) most[i] = parts[i].most;
  std::vector<int64_t> where(std::min(count, pieces));
  Highest{most.data(), (int64_t)where.size(), where.data()}.search(0, pieces);
  std::sort(where.begin(), where.end());
  Highest highest{logits, count, ids};
  for (int64_t piece : where) highest.search(piece * SUMMARY, std::min(vocab, (piece + 1) * SUMMARY));
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void count_layer(int64_t layer, const Heads& h, const Batch& batch, bool writes = true) {
  const KVLayer& kv = batch.kv[layer];
  for (int64_t i = 0; i < batch.chunks; i++) {
    const ChunkRows& chunk = batch.chunk[i];
    const Reads reads(kv, chunk);
    int64_t keys = 0;
    for (const Part* part = kv.part; part < kv.part + kv.parts; part++) {
      const int64_t read = in_part(*part, 0, reads.sinks) + in_part(*part, reads.from, reads.stop);
      keys += read;
      batch.observed->kv_read[i] += part->bytes * read;
      if (writes) batch.observed->kv_written[i] += part->bytes * in_part(*part, chunk.start, reads.stop);
    }
    batch.observed->attention_flop[i] += 2 * h.heads * (h.size + h.values) * chunk.rows * keys;
  }
}

template <typename Other>
void count_cache(const Other&, const Batch&) {}
void count_cache(const AttentionOp& op, const Batch& batch) {
  count_layer(op.layer, op.heads, batch, op.sources != OTHER_LAYER);
}
void count_cache(const LatentAttentionOp& op, const Batch& batch) { count_layer(op.layer, op.heads, batch); }
void count_cache(const ParallelOp& op, const Batch& batch) { count_cache(op.attention, batch); }
void count_cache(const RecurrentOp& op, const Batch& batch) {
  const int64_t bytes = batch.kv[op.layer].part[0].bytes;
  for (int64_t i = 0; i < batch.chunks; i++) {
    if (batch.chunk[i].start) batch.observed->kv_read[i] += bytes;
    batch.observed->kv_written[i] += bytes;
  }
}

}  // namespace

Observer::Observer(const Model& model, const Observed& to)
    : ends_(2 * model.ops), to_(to), entropies_(to.watched * entropy_pieces(vocabulary(model))) {
  for (int64_t i = 0; i < to.watched; i++) {
    const Heads* heads = heads_of_layer(model, to.row[i].layer);
    const int64_t size = heads ? heads->size : 0;  // a recurrent layer has none
    queries_.emplace_back(size);
    sink_queries_.emplace_back(size);
  }
}

void Observer::add(Sum& to) {
  to.flop += counted.flop;
  to.bytes += counted.bytes;
  counted = {};
}

void Observer::end(int64_t index) {
  int64_t none = 0;
  if (!ends_[index]) ends_[index].compare_exchange_strong(none, now());
}

bool Observer::watches(int64_t layer) const {
  return std::any_of(to_.row, to_.row + to_.watched, [&](const WatchedRow& one) { return one.layer == layer; });
}

void Observer::keep_query(int64_t i, int64_t layer, int64_t size, const Queries& all) {
  const WatchedRow& one = to_.row[i];
  if (one.layer != layer) return;
  std::copy_n(all.q + one.row * all.stride + one.head * size, size, queries_[i].data());
  if (all.sink_q) std::copy_n(all.sink_q + one.row * all.sink_stride + one.head * size, size, sink_queries_[i].data());
}

// The attention weights of watched row `i`, from its query.
void Observer::weigh(const Kernels& k, const Model& model, const Batch& batch, int64_t i, float* scratch) const {
  const WatchedRow& one = to_.row[i];
  const KVLayer& kv = batch.kv[one.layer];
  const Heads* const found = heads_of_layer(model, one.layer);
  const ChunkRows& chunk = batch.chunk[chunk_of(batch, one.row)];
  const int64_t row = one.row - chunk.row;
  if (!found) return (void)std::fill_n(one.weights, chunk.start + row + 1, 0.0f);  // a recurrent layer reads no row
  const Heads& heads = *found;
  const int64_t column = one.head * heads.size;
  const float* sinks = kv.sinks && kv.sink_rotation ? sink_queries_[i].data() - column : nullptr;
  const Queries query{row, row + 1, one.head, one.head + 1, queries_[i].data() - column, sinks, nullptr, 0, 0, 0};
  k.weigh(kv, heads, chunk, batch.page_size, query, one.weights, scratch);
}

void Observer::look(const Kernels& k, Team& team, const Model& model, const Batch& batch, const Partial* summed,
                    float* scratch) {
  const int64_t vocab = vocabulary(model), pieces = entropy_pieces(vocab), units = 2 + pieces;
  team.each(to_.watched * units, [&](int64_t unit) {
    const int64_t i = unit / units, piece = unit % units - 2;
    const WatchedRow& one = to_.row[i];
    if (piece == -2) return weigh(k, model, batch, i, scratch);
    if (one.logits < 0) return;
    const float* logits = batch.logits + one.logits * vocab;
    if (piece == -1)
      return highest_ids(vocab, logits, summed + one.logits * summary_pieces(vocab), to_.candidates, one.highest);
    const int64_t at = piece * ENTROPY, n = std::min(ENTROPY, vocab - at);
    entropies_[i * pieces + piece] = k.entropy(n, logits + at, batch.log_total[one.logits]);
  });
  team.each(to_.watched, [&](int64_t i) {
    const double* first = entropies_.data() + i * pieces;
    if (to_.row[i].logits >= 0) *to_.row[i].entropy = std::accumulate(first, first + pieces, 0.0);
  });
}

void Observer::report(const Model& model, const Batch& batch) const {
  Observed& to = *batch.observed;
  for (int64_t i = 0; i < batch.chunks; i++) to.attention_flop[i] = to.kv_read[i] = to.kv_written[i] = 0;
  for (int64_t i = 0; i < model.ops; i++) visit(model.op[i], [&](const auto& op) { count_cache(op, batch); });
  for (int64_t i = 0; i < ended(); i++) to.ends[i] = ends_[i];
  to.layer_flop = layers.flop;
  to.head_flop = head.flop;
  to.weight_bytes = layers.bytes + head.bytes;
  to.looking = now() - ends_[ended() - 1];
}

int64_t Observer::ended() const {
  int64_t count = 0;
  for (; count < (int64_t)ends_.size() && ends_[count]; count++);
  return count;
}

}  // namespace tw
