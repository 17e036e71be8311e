// What a pass tells of itself: times, counts, and what the watched rows show; a part of step.cpp.
//
// A watched row's query is copied when it is computed; its attention weights are computed from it after the head.
// Linears are counted piece by piece, by the thread that computes them; the threads add up their counts at the end of
// the layers and of the head. The reads and writes of the KV cache follow from the chunks and the windows.

// The work of one thread's linears.
struct Work {
  int64_t flop = 0, bytes = 0;
};
thread_local Work counted;

// Counts a linear over `rows` rows by the blocks [first, last).
void count_blocks(const Matrix& m, int64_t rows, int64_t first, int64_t last) {
  const int64_t outputs = std::min(last * LANES, m.out) - first * LANES, slabs = depth_of(m) / slab_inputs(m.format);
  counted.flop += 2 * rows * outputs * m.in;
  counted.bytes += (last - first) * (slabs * slab_bytes(m.format) + block_scale_bytes(m, slabs));
  if (m.bias) counted.bytes += outputs * sizeof(float);
}

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
const Heads* heads_in(const Other&, int64_t) { return nullptr; }
const Heads* heads_in(const AttentionOp& op, int64_t layer) { return op.layer == layer ? &op.heads : nullptr; }
const Heads* heads_in(const LatentOp& op, int64_t layer) { return op.layer == layer ? &op.heads : nullptr; }
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

class Observer {
 public:
  Observer(const Model& model, const Observed& to)
      : ends_(2 * model.ops), to_(to), entropies_(to.watched * entropy_pieces(vocabulary(model))) {
    for (int64_t i = 0; i < to.watched; i++) {
      const int64_t size = heads_of_layer(model, to.row[i].layer)->size;
      queries_.emplace_back(size);
      sink_queries_.emplace_back(size);
    }
  }

  struct Sum {
    std::atomic<int64_t> flop{0}, bytes{0};
  };
  Sum layers, head;

  // Hands in what the calling thread has counted.
  void add(Sum& to) {
    to.flop += counted.flop;
    to.bytes += counted.bytes;
    counted = {};
  }

  // Something has ended, as `Observed::ends` numbers it. The first thread to see that sets the time.
  void end(int64_t index) {
    int64_t none = 0;
    if (!ends_[index]) ends_[index].compare_exchange_strong(none, now());
  }

  bool watches(int64_t layer) const {
    return std::any_of(to_.row, to_.row + to_.watched, [&](const WatchedRow& one) { return one.layer == layer; });
  }

  // Copies the query of watched row `i`, if it is in this layer. size: of a query.
  void keep_query(int64_t i, int64_t layer, int64_t size, const Queries& all) {
    const WatchedRow& one = to_.row[i];
    if (one.layer != layer) return;
    std::copy_n(all.q + one.row * all.stride + one.head * size, size, queries_[i].data());
    if (all.sink_q) std::copy_n(all.sink_q + one.row * all.sink_stride + one.head * size, size, sink_queries_[i].data());
  }

  // Computes what the watched rows show, as phases of the team (look.inl.h). summed: the partial summaries of all
  // logits rows. scratch: of the calling thread.
  void look(const Kernels& k, Team& team, const Model& model, const Batch& batch, const Partial* summed, float* scratch);

  // Writes the times and counts, when all threads are done.
  void report(const Model& model, const Batch& batch) const {
    Observed& to = *batch.observed;
    for (int64_t i = 0; i < batch.chunks; i++) to.attention_flop[i] = to.kv_read[i] = to.kv_written[i] = 0;
    for (int64_t i = 0; i < model.ops; i++) visit(model.op[i], [&](const auto& op) { count_cache(op, batch); });
    for (int64_t i = 0; i < ended(); i++) to.ends[i] = ends_[i];
    to.layer_flop = layers.flop;
    to.head_flop = head.flop;
    to.weight_bytes = layers.bytes + head.bytes;
    to.looking = now() - ends_[ended() - 1];
  }

 private:
  void weigh(const Kernels& k, const Model& model, const Batch& batch, int64_t i, float* scratch) const;

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  template <typename Other>
  static void count_cache(const Other&, const Batch&) {}
  static void count_cache(const AttentionOp& op, const Batch& batch) { count_layer(op.layer, op.heads, batch); }
  static void count_cache(const LatentOp& op, const Batch& batch) { count_layer(op.layer, op.heads, batch); }
  static void count_cache(const ParallelOp& op, const Batch& batch) { count_cache(op.attention, batch); }

  static void count_layer(int64_t layer, const Heads& h, const Batch& batch) {
    const KVLayer& kv = batch.kv[layer];
    for (int64_t i = 0; i < batch.chunks; i++) {
      const ChunkRows& chunk = batch.chunk[i];
      const Reads reads(kv, chunk);
      int64_t keys = 0;
      for (const Part* part = kv.part; part < kv.part + kv.parts; part++) {
        const int64_t read = in_part(*part, 0, reads.sinks) + in_part(*part, reads.from, reads.stop);
        keys += read;
        batch.observed->kv_read[i] += part->bytes * read;
        batch.observed->kv_written[i] += part->bytes * in_part(*part, chunk.start, reads.stop);
      }
      batch.observed->attention_flop[i] += 2 * h.heads * (h.size + h.values) * chunk.rows * keys;
    }
  }

  int64_t ended() const {
    int64_t count = 0;
    for (; count < (int64_t)ends_.size() && ends_[count]; count++);
    return count;
  }

  std::vector<std::atomic<int64_t>> ends_;  // zeros until then
  const Observed& to_;
  std::vector<std::vector<float>> queries_, sink_queries_;  // of the watched rows
  std::vector<double> entropies_;                           // [watched][pieces]; see `look`
};
