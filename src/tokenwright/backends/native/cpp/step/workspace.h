// The scratch memory of a step, which is reused from step to step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "step/step.h"

namespace tw {

constexpr int64_t SMALLEST_GROUP = 16;  // inputs

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

inline int64_t depth_of(const Matrix& m) {
  const int64_t inputs = slab_inputs(m.format);
  return (m.in + inputs - 1) / inputs * inputs;
}

// Rows up to a multiple of 32: they lie in whole tiles.
inline int64_t whole_tiles(int64_t rows) { return (rows + 31) / 32 * 32; }

// Memory for the quantised rows of one linear. All linears of a step use it in turn.
class RowStorage {
 public:
  // Grows the memory for `count` rows of a linear. Call it before the threads start.
  void reserve(const Matrix& m, int64_t count) {
    const int64_t depth = depth_of(m);
    const int64_t whole = whole_tiles(count);
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

// Numbers of busy experts, of their visits, and of their work items in two phases. Atomic: a late thread reads them
// after their phase.
struct ExpertPlace {
  std::atomic<int64_t> busy{0}, visits{0}, up{0}, down{0};
};

// The memory of a mixture of experts; experts.cpp tells what lies in it.
struct ExpertMemory {
  Buffer normed, logits, ids, weights, next, places, busy, visits, hidden, results, bounds;
  Buffer slots, named, rounds, guessed_logits, guessed, guessed_weights;  // of experts in a file
  RowStorage in, middle, shared_in, shared_middle, guessing;
  ExpertPlace all;  // the ends of all
};

// The memory of one adapter's rows of a batch: its inputs, what `down` makes of them, and what it adds.
struct AdapterMemory {
  RowStorage in, low;
  Buffer ranks, added;
};

// The memory of latent attention; latent.cpp tells what lies in it.
struct LatentMemory {
  Buffer q, queries, values, sums;
  RowStorage heads;
};

// The scratch memory of one call at a time.
struct Workspace {
  std::atomic<bool> in_use{false};
  Buffer x, normed, before, inputs, streams, qkv, sink, mixed, up, added, act, scratch, partial;
  RowStorage rows, next_rows;
  ExpertMemory experts;
  std::vector<AdapterMemory> adapters;  // of each in the batch
  LatentMemory latent;

  Workspace();
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
};

}  // namespace tw
