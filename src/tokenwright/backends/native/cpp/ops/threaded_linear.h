// Linears over rows of a step, split among the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "api.h"
#include "kernels.h"
#include "threads/pool.h"

namespace tw {

constexpr int64_t ROW_PIECES = 8;  // pieces per thread, at least, in phases over rows,
constexpr int64_t MOST_ROWS = 16;  // and the most rows per piece

inline int64_t blocks_of(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

// The pieces [first, last) of a linear's blocks that threads take in turn. Each is half of a thread's share of what is
// left, so that threads read long stretches of memory and end at about the same time. The last ones are equal, and
// each thread gets the same number of them: at most LAST_PIECE bytes of weights each, but with many rows MANY_BLOCKS
// blocks, so that threads read the rows from the shared cache less often. All but the last begin with an even block.
class Pieces {
 public:
  Pieces(const Matrix& m, int64_t rows, int64_t threads);

  int64_t count() const { return large_ + equal_; }

  std::pair<int64_t, int64_t> blocks(int64_t i) const;

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
                  const Out& out);

// All pieces of a linear, as one phase.
void linear(const Kernels& k, Team& team, const Matrix& m, const QuantisedRows& rows, const Out& out);

// One phase over rows: calls body(row). A piece has several rows if there are many.
template <typename Body>
void each_row(Team& team, int64_t rows, Body body) {
  const int64_t piece = std::clamp<int64_t>(rows / (ROW_PIECES * team.size()), 1, MOST_ROWS);
  team.share(rows, piece, [&](int64_t row, int64_t last) {
    for (; row < last; row++) body(row);
  });
}

// Matrix `index` of `count` equal ones that lie one after another in `all`.
Matrix matrix_in(const Matrix& all, int64_t index, int64_t count);

}  // namespace tw
