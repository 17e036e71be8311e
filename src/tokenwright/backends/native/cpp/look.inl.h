// What the watched rows of a step show, computed after the head by all threads; a part of step.cpp.

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

// The attention weights of watched row `i`, from its query.
void Observer::weigh(const Kernels& k, const Model& model, const Batch& batch, int64_t i, float* scratch) const {
  const WatchedRow& one = to_.row[i];
  const KVLayer& kv = batch.kv[one.layer];
  const Heads& heads = *heads_of_layer(model, one.layer);
  const ChunkRows& chunk = batch.chunk[chunk_of(batch, one.row)];
  const int64_t row = one.row - chunk.row, column = one.head * heads.size;
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
