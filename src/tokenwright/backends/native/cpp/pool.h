// The threads that share a step's work. There is one pool in a process: engines take turns, and never oversubscribe.
#pragma once

#include <atomic>
#include <cstdint>

namespace tw {

// What the threads of one run share: a barrier, and tickets for the pieces of the phase between two barriers.
class Team {
 public:
  explicit Team(int64_t size) : size_(size) {}

  int64_t size() const { return size_; }

  // Waits for all threads. Whoever comes last makes the tickets anew.
  void barrier();

  // Calls body(first, last) for pieces of [0, count), `piece` long, as threads come to ask for them. Ends with a barrier.
  template <typename Body>
  void share(int64_t count, int64_t piece, Body body) {
    for (int64_t first = take(piece); first < count; first = take(piece))
      body(first, first + piece < count ? first + piece : count);
    barrier();
  }

  // share, one by one: body(index).
  template <typename Body>
  void each(int64_t count, Body body) {
    share(count, 1, [&](int64_t index, int64_t) { body(index); });
  }

 private:
  int64_t take(int64_t piece) { return next_.fetch_add(piece, std::memory_order_relaxed); }

  const int64_t size_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

// Runs `body(context, team, thread)` on so many threads, the caller's among them; returns when all have ended. Callers
// wait for each other.
void run_on_threads(int64_t threads, void (*body)(void*, Team&, int64_t), void* context);

}  // namespace tw
