// Linears over rows of a step, split among the threads, with the norms before them, and the updates of adapters and the
// residual stream after them; a part of step.cpp.

constexpr int64_t LAST_PIECE = 1 << 16;  // bytes of weights in the last work items of a linear
constexpr int64_t MANY_ROWS = 16, MANY_BLOCKS = 8;  // with more than MANY_ROWS rows, a piece has at least MANY_BLOCKS
constexpr int64_t ROW_PIECES = 8;      // pieces per thread, at least, in phases over rows,
constexpr int64_t MOST_ROWS = 16;      // and the most rows per piece

int64_t blocks_of(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

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
