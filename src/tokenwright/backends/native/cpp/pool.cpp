#include "pool.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tw {
namespace {

constexpr auto AWAKE = std::chrono::milliseconds(2);  // what a thread looks for work before it sleeps: a step of Python
constexpr int LOOKS = 64;            // between two looks at the clock
constexpr int BARRIER_SPINS = 4000;  // looks before a thread lets others onto its core

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// One look of many: after the first ones others get the core, who may be whom it waits for.
inline void look(int times) {
  if (times < BARRIER_SPINS)
    pause();
  else
    std::this_thread::yield();
}

// Threads that live as long as the process. Each waits for its next job: it looks for a while, then it sleeps.
class Pool {
 public:
  void run(int64_t threads, void (*body)(void*, Team&, int64_t), void* context) {
    std::lock_guard<std::mutex> turn(turn_);
    while ((int64_t)workers_.size() < threads - 1) {
      const int64_t index = (int64_t)workers_.size() + 1;
      workers_.emplace_back([this, index, seen = job_.load()] { work(index, seen); });
    }
    Team team(threads);
    team_ = &team;
    body_ = body;
    context_ = context;
    threads_ = threads;
    busy_.store((int64_t)workers_.size());
    {
      std::lock_guard<std::mutex> lock(sleep_);
      job_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    body(context, team, 0);
    for (int i = 0; busy_.load(std::memory_order_acquire) > 0; i++) look(i);
  }

 private:
  void work(int64_t index, int64_t seen) {
    for (;;) {
      const auto until = std::chrono::steady_clock::now() + AWAKE;
      for (int i = 1; job_.load(std::memory_order_acquire) == seen; i++) {
        if (i % LOOKS == 0 && std::chrono::steady_clock::now() > until) break;
        pause();
      }
      if (job_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleeping_++;
        wake_.wait(lock, [&] { return job_.load() != seen; });
        sleeping_--;
      }
      seen = job_.load();
      if (index < threads_) body_(context_, *team_, index);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex turn_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<int64_t> job_{0};
  std::atomic<int64_t> busy_{0};
  std::atomic<int64_t> sleeping_{0};
  Team* team_ = nullptr;
  void (*body_)(void*, Team&, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t threads_ = 0;
};

}  // namespace

void Team::barrier() {
  const int64_t round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int i = 0; round_.load(std::memory_order_acquire) == round; i++) look(i);
}

void run_on_threads(int64_t threads, void (*body)(void*, Team&, int64_t), void* context) {
  if (threads < 2) {
    Team alone(1);
    body(context, alone, 0);
    return;
  }
  static std::mutex guard;
  static Pool* pool = nullptr;  // never destroyed: its threads may run when the process ends
  static pid_t owner = 0;
  Pool* mine;
  {
    std::lock_guard<std::mutex> lock(guard);
    if (owner != getpid()) {  // after a fork the threads are gone
      pool = new Pool;
      owner = getpid();
    }
    mine = pool;
  }
  mine->run(threads, body, context);
}

}  // namespace tw
