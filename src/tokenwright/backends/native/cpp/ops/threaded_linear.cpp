#include "ops/threaded_linear.h"

#include <algorithm>
#include <cstdint>

#include "step/observer.h"
#include "step/workspace.h"

namespace tw {

namespace {

constexpr int64_t LAST_PIECE = 1 << 16;             // bytes of weights in the last work items of a linear
constexpr int64_t MANY_ROWS = 16, MANY_BLOCKS = 8;  // with more than MANY_ROWS rows, a piece has at least MANY_BLOCKS

}  // namespace

Pieces::Pieces(const Matrix& m, int64_t rows, int64_t threads) : blocks_(blocks_of(m)), share_(2 * threads) {
  const int64_t block_bytes = depth_of(m) / slab_inputs(m.format) * slab_bytes(m.format);
  int64_t small = std::max<int64_t>(1, LAST_PIECE / std::max<int64_t>(1, 2 * block_bytes));  // in pairs of blocks
  if (rows > MANY_ROWS) small = std::max(small, MANY_BLOCKS / 2);
  left_ = pairs();
  for (; left_ > share_ * small; large_++) left_ -= left_ / share_;
  equal_ = std::min((left_ + small * threads - 1) / (small * threads) * threads, left_);
}

std::pair<int64_t, int64_t> Pieces::blocks(int64_t i) const {
  if (i >= large_) {
    const int64_t from = pairs() - left_, at = i - large_;
    return in_blocks(from + left_ * at / equal_, from + left_ * (at + 1) / equal_);
  }
  int64_t left = pairs();
  for (; i > 0; i--) left -= left / share_;
  return in_blocks(pairs() - left, pairs() - left + left / share_);
}

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

Matrix matrix_in(const Matrix& all, int64_t index, int64_t count) {
  Matrix one = all;
  one.out = all.out / count;
  const int64_t slabs = depth_of(all) / slab_inputs(all.format);
  const int64_t first = index * one.out / LANES;
  if (all.codes) one.codes = (const char*)all.codes + first * slabs * slab_bytes(all.format);
  if (all.scales) one.scales = all.scales + first * block_scale_bytes(all, slabs) / 2;
  if (all.bias) one.bias = all.bias + index * one.out;
  if (all.factors) one.factors = all.factors + index * one.out;
  return one;
}

}  // namespace tw
