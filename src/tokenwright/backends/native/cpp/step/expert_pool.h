// The memory of experts that lie in a file: slots of equal size, each of which holds one expert of one layer.
//
//   named by a router      --pin-->          queued --> being read --> ready --unpin--> stays until its slot is needed
//   guessed for a layer    --read_ahead-->   queued behind all that are named
//
// A slot that is needed is taken from the expert with the lowest value: the sum of its uses, each of which counts half
// after HALF_LIFE steps (frequency and recency in one number). Pinned slots stay. Nothing is allocated after the start.
#pragma once

#include <cstdint>

namespace tw {

// What a pool of experts has done: `named` by routers, of which `hits` were in memory and `ahead` had been guessed; its
// reads, those that failed, their bytes, and the nanoseconds that steps waited for them.
struct ExpertCounts {
  int64_t named, hits, ahead, reads, failed, bytes, waited;
};

// A file of experts, and the memory for some of them. experts: of a layer, at most. threads: that read.
struct ExpertFile {
  int64_t descriptor, layers, experts, threads;
  int64_t slots, slot_bytes;
  char* memory;  // [slots][slot_bytes]
  ExpertCounts* counts;
};

class ExpertPool;

// The experts of one layer in a file: the codes of `up`, their scales, and those of `down`. Each of these stretches has
// all experts, one after another, from `at` on, of `bytes` bytes each; in a slot it begins at `place`.
constexpr int64_t STRETCHES = 4;
struct ExpertLayer {
  ExpertPool* pool;
  int64_t index;  // among the layers of the pool
  int64_t at[STRETCHES], bytes[STRETCHES], place[STRETCHES];
};

class ExpertPool {
 public:
  static constexpr int64_t SHORT_FILE = -1;

  virtual ~ExpertPool() = default;

  virtual int64_t layers() const = 0;

  // Pins the first of the experts [count] that a router named, and begins to read those that are not in memory: at
  // least one, and at most half as many as there are slots. Waits while other passes hold all of them. slots: [count],
  // gets their slots. Returns how many it has pinned.
  virtual int64_t pin(const ExpertLayer&, const int64_t* experts, int64_t count, int64_t* slots) = 0;

  // Begins to read experts, in slots that are neither pinned nor named by the last `pin`.
  virtual void read_ahead(const ExpertLayer&, const int64_t* experts, int64_t count) = 0;

  // Waits until pinned slots are read, and reads as well. Returns the nanoseconds that it took.
  virtual int64_t wait(const int64_t* slots, int64_t count) = 0;

  virtual void unpin(const int64_t* slots, int64_t count) = 0;

  virtual const char* memory(int64_t slot) const = 0;

  // Why a pinned slot could not be read: a number of errno, or SHORT_FILE; else 0.
  virtual int64_t error(int64_t slot) = 0;
};

ExpertPool* new_expert_pool(const ExpertFile&);  // null if memory runs out, and in browsers, which have no such file

}  // namespace tw
