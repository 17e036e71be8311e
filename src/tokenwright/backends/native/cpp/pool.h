// The threads that share a step's work. There is one pool in a process: engines take turns, and never oversubscribe.
//
// A run is a sequence of phases, the same for every thread of it, and a phase is a number of pieces. A phase ends when
// its pieces are done, not when all threads have reached it: a thread that is kept off its core delays the others only
// if it holds a piece, and skips the phases that ended without it. So work is split by shape, and who does it may vary.
#pragma once

#include <atomic>
#include <cstdint>

namespace tw {

// Threads sleep here until another thread has changed what they wait for.
class Parking {
 public:
  // Sleeps until ready(). The thread that makes it so calls `wake` after a sequentially consistent store.
  template <typename Ready>
  void sleep_until(Ready ready) {
    sleepers_.fetch_add(1);
    for (uint32_t seen = changes_.load(); !ready(); seen = changes_.load()) wait(seen);
    sleepers_.fetch_sub(1);
  }

  void wake() {
    if (sleepers_.load() > 0) wake_all();
  }

 private:
  void wait(uint32_t seen);
  void wake_all();

  std::atomic<uint32_t> changes_{0};
  std::atomic<int32_t> sleepers_{0};
};

// The phase that a run is in.
struct Phase {
  alignas(64) std::atomic<uint64_t> next{0};  // the phase's number << 32 | its next piece
  alignas(64) std::atomic<int64_t> done{0};   // pieces of it
  alignas(64) Parking parking;                // of threads that wait for its end
  int64_t patience = 0;                       // nanoseconds that they look for it before they sleep
};

// One thread's place in a run.
class Team {
 public:
  explicit Team(int64_t size, Phase* phase = nullptr) : size_(size), phase_(phase) {}

  // Threads that the work is split for. Fewer may take part; one alone has no phase to share.
  int64_t size() const { return size_; }

  // Nanoseconds that this thread has slept so far, waiting for others.
  int64_t slept() const { return slept_; }

  // Calls body(first, last) for pieces of [0, count), `piece` long, as threads come to ask for them. A phase: returns when
  // all pieces are done.
  template <typename Body>
  void share(int64_t count, int64_t piece, Body body) {
    const int64_t pieces = (count + piece - 1) / piece;
    int64_t mine = 0;
    for (int64_t i = take(mine, pieces); i < pieces; i = take(mine, pieces)) {
      body(i * piece, (i + 1) * piece < count ? (i + 1) * piece : count);
      mine++;
    }
    if (phase_) end(mine, pieces);
  }

  // share, one by one: body(index).
  template <typename Body>
  void each(int64_t count, Body body) {
    share(count, 1, [&](int64_t index, int64_t) { body(index); });
  }

 private:
  // The next piece of this thread's phase; `pieces` where none is left. A thread alone takes one after another.
  int64_t take(int64_t mine, int64_t pieces) {
    if (!phase_) return mine;
    uint64_t next = phase_->next.load(std::memory_order_acquire);
    while (next >> 32 == number_ && (int64_t)(uint32_t)next < pieces)
      if (phase_->next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return (uint32_t)next;
    return pieces;
  }

  bool ended() const { return phase_->next.load() >> 32 != number_; }
  void end(int64_t mine, int64_t pieces);
  void wait();

  const int64_t size_;
  Phase* const phase_;
  uint64_t number_ = 0;  // of the phase that this thread is in
  int64_t slept_ = 0;
};

// Runs `body(context, team, thread)` on up to so many threads, the caller's among them, and returns when all that take
// part have ended: each thread's number is below `threads`. It uses fewer where the process has fewer processors, where no
// more threads can be started, and while others use the processors. Callers wait for each other. Throws nothing.
void run_on_threads(int64_t threads, void (*body)(void*, Team&, int64_t), void* context);

// How many threads runs use at most, whoever else uses the processors; 0: what the pool finds best. Returns what it was.
int64_t set_exact_threads(int64_t most);

// How many threads the last run on several was split for.
int64_t last_team();

}  // namespace tw
