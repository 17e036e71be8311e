// The thread pool of the kernels. A process has one pool: engines take turns, and never oversubscribe the cores.
//
// A run is a sequence of phases, the same for all of its threads, and a phase is a number of pieces (work items). A
// phase ends when its pieces are done, not when all threads have reached it: a descheduled thread delays the others
// only if it owns a piece, and skips the phases that ended without it. The thread that has done the last piece opens
// the next phase of several pieces; phases of one piece before that it computes alone, and nobody waits at their ends.
// So shapes alone determine the pieces, but not which thread computes each of them.
#pragma once

#include <atomic>
#include <cstdint>

namespace tw {

// Threads sleep here until another thread has made their condition true.
class Parking {
 public:
  // Sleeps until ready(). The thread that makes it true calls `wake` after a sequentially consistent store.
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

// The current phase of a run.
struct Phase {
  alignas(64) std::atomic<uint64_t> next{0};  // the phase's number << 32 | its next piece
  int64_t opened = 0;                         // phases opened in this run, by threads in turn
  alignas(64) std::atomic<int64_t> done{0};   // finished pieces
  alignas(64) Parking parking;                // threads that wait for the end of the phase
  int64_t patience = 0;                       // nanoseconds that they spin before they sleep
};

// One thread's view of a run: it takes pieces of each phase and waits for the phase to end.
class Team {
 public:
  explicit Team(int64_t size, Phase* phase = nullptr) : size_(size), phase_(phase) {}

  // The number of threads that the work is split for. Fewer may take part; a single thread has no phase to share.
  int64_t size() const { return size_; }

  // Nanoseconds that this thread has slept so far while it waited for other threads.
  int64_t slept() const { return slept_; }

  // Counts nanoseconds that this thread has waited for a disk as sleep.
  void waited(int64_t nanoseconds) { slept_ += nanoseconds; }

  // One phase: calls body(first, last) for pieces of [0, count), `piece` long, which threads take dynamically. Returns
  // when all pieces are done.
  template <typename Body>
  void share(int64_t count, int64_t piece, Body body) {
    const int64_t pieces = (count + piece - 1) / piece;
    if (ahead_ && pieces < 2) {
      if (pieces) body(0, count);
      number_++;
      return;
    }
    if (ahead_) open();
    int64_t mine = 0;
    for (int64_t i = take(mine, pieces); i < pieces; i = take(mine, pieces)) {
      body(i * piece, (i + 1) * piece < count ? (i + 1) * piece : count);
      mine++;
    }
    if (phase_) end(mine, pieces);
  }

  // `share` with pieces of one: body(index).
  template <typename Body>
  void each(int64_t count, Body body) {
    share(count, 1, [&](int64_t index, int64_t) { body(index); });
  }

  // Behind the last phase: lets the other threads end.
  void finish() {
    if (ahead_) open();
  }

 private:
  // The next piece of this thread's phase; `pieces` if none is left. A single thread takes them in order.
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
  void open();
  void wait();

  const int64_t size_;
  Phase* const phase_;
  uint64_t number_ = 0;  // the number of this thread's phase
  bool ahead_ = false;   // this thread has ended the phase before, and the others wait for it
  int64_t slept_ = 0;
};

// Runs `body(context, team, thread)` on up to `threads` threads, including the caller's, and returns when all that take
// part have ended; thread numbers are below `threads`. It uses fewer if the process has fewer processors, if the system
// refuses more threads, and while other programs use the processors. Callers wait for each other. Throws nothing.
void run_on_threads(int64_t threads, void (*body)(void*, Team&, int64_t), void* context);

// Sets the number of threads of later runs, regardless of other load; 0: the pool decides. Returns the previous value.
int64_t set_exact_threads(int64_t most);

// The number of threads that the last pooled run was split for, and how often they waited for one another in it.
int64_t last_team();
int64_t last_barriers();

}  // namespace tw
