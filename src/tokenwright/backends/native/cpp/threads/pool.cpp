#include "threads/pool.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "threads/processors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace tw {
namespace {

// Times are nanoseconds.
constexpr int64_t MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND, SECOND = 1000 * MILLISECOND;
constexpr int LOOKS = 64;                         // spins between two reads of the clock
constexpr int64_t AWAKE = 2 * MILLISECOND;        // a thread spins this long for the next run, then sleeps
constexpr int64_t PATIENCE = 100 * MICROSECOND;   // shortest spin for the end of a phase,
constexpr int64_t MOST_PATIENCE = MILLISECOND;    // longest spin,
constexpr int64_t PATIENT = 16;                   // and in between the last run's time divided by this
constexpr int64_t LATE = 200 * MICROSECOND;       // time allowed for a woken thread to join
constexpr int64_t WATCH = 30 * MILLISECOND;       // how long to measure processor time after a delay
constexpr int64_t MEMORY = 8 * MILLISECOND;       // time constant of the average loss
constexpr double MOST_LOST = 0.25;                // loss, in threads, above which the pool uses fewer threads,
constexpr double LAST = 0.7;                      // or this divided by the number of threads
constexpr int64_t HOLD = 20 * MILLISECOND;        // first time limit for using fewer threads,
constexpr int64_t MOST_HOLD = 320 * MILLISECOND;  // longest limit,
constexpr int64_t HOLD_RUNS = 16;                 // and shortest in runs, as a retry costs up to one run
constexpr int64_t CALM = 100 * MILLISECOND;       // time without loss after which the limit is HOLD again
constexpr int64_t ASK_PROCESSORS = SECOND;        // interval between queries for usable processors
constexpr int64_t ASK_THREADS = 10 * SECOND;      // and, after the system refused a thread, between attempts

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#else
  std::this_thread::yield();
#endif
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Processor time of the calling thread.
int64_t processor_time() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * SECOND + time.tv_nsec;
}

#if defined(__linux__)

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  static_assert(sizeof word == 4, "the system compares 32 bits");
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_sleepers(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

// One condition variable for all sleepers: each checks its own word again. Never destroyed, like the pool.
struct Bed {
  std::mutex mutex;
  std::condition_variable woken;
};

Bed& bed() {
  static Bed* one = new Bed;
  return *one;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  std::unique_lock<std::mutex> lock(bed().mutex);
  if (word.load() == value) bed().woken.wait(lock);
}

void wake_sleepers(std::atomic<uint32_t>&) {
  { std::lock_guard<std::mutex> lock(bed().mutex); }
  bed().woken.notify_all();
}

#endif

// Spins for up to `patience` nanoseconds until ready(); returns whether it became true.
template <typename Ready>
bool look_for(int64_t patience, Ready ready) {
  int64_t until = 0;
  for (int i = 1; !ready(); i++) {
    pause();
    if (i % LOOKS) continue;
    const int64_t time = now();
    if (!until) until = time + patience;
    if (time >= until) return ready();
  }
  return true;
}

// Sets SCHED_BATCH, so that this thread, when it wakes up, does not preempt the thread that woke it.
void never_preempt() {
#if defined(__linux__)
  sched_param none{};
  if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
#endif
}

// Chooses the number of threads while other programs use the processors. It measures the loss: the time in which
// threads of a run were runnable without a processor. Divided by the run's time, that is the number of surplus threads.
class Share {
 public:
  // The number of threads that a run should use, at most `most`.
  int64_t threads(int64_t most, int64_t time) {
    if (limit_ >= most) return most;
    if (time < retry_) return limit_;
    limit_ = INT64_MAX;
    calm_ = 0;
    watch_until_ = time + WATCH;
    lost_ = most_lost(most) / 2;
    return most;
  }

  // Whether a run that starts at this time should measure processor time, which costs a microsecond.
  bool watches(int64_t time) const { return time < watch_until_; }

  // Call after a thread waited long or joined late: the cause may be the work's shape, or another process.
  void suspect(int64_t time) { watch_until_ = time + WATCH; }

  // Records a run on `threads` threads that took `took`, ended at `time`, and whose threads lost `lost` in total.
  void note(int64_t threads, int64_t took, int64_t lost, int64_t time) {
    calm_ += took;
    const double weight = (double)took / (double)(took + MEMORY);
    lost_ += weight * ((double)lost / (double)took - lost_);
    if (lost_ > most_lost(threads)) {
      hold_ = calm_ > CALM ? HOLD : std::min(2 * hold_, MOST_HOLD);
      limit_ = std::max<int64_t>(1, threads - std::max<int64_t>(1, std::lround(lost_)));
      retry_ = time + std::max(hold_, HOLD_RUNS * took);
      calm_ = 0;
      lost_ = 0;
    }
  }

 private:
  // The loss above which one thread fewer is faster; below one thread's time, as the last thread rarely adds all of it.
  static double most_lost(int64_t threads) { return std::max(MOST_LOST, LAST / (double)threads); }

  int64_t limit_ = INT64_MAX, retry_ = 0, hold_ = HOLD, calm_ = 0, watch_until_ = 0;
  double lost_ = 0;  // the average loss, as a share of one thread's time
};

// Set by set_exact_threads; read by last_team and last_barriers.
std::atomic<int64_t> exact_threads{0}, last_size{0}, last_opened{0};

// Threads that live as long as the process. Each waits for its next run: it spins for a while, then sleeps.
class Pool {
 public:
  void run(int64_t threads, void (*body)(void*, Team&, int64_t), void* context) {
    std::lock_guard<std::mutex> turn(turn_);
    const int64_t began = now(), exact = exact_threads.load(std::memory_order_relaxed);
    threads = std::min(threads, MOST_THREADS);
    const int64_t size = start(exact ? std::min(threads, exact) : share_of(threads, began), began);
    last_size.store(size, std::memory_order_relaxed);
    if (size < 2) {
      Team alone(1);
      return body(context, alone, 0);
    }
    watches_ = !exact && share_.watches(began);
    const int64_t busy = watches_ ? processor_time() : 0;
    open(size, body, context, began);

    Team team(size, &phase_);
    body(context, team, 0);
    team.finish();
    const int64_t slept = team.slept() + close();
    last_opened.store(phase_.opened, std::memory_order_relaxed);
    const int64_t ended = now(), own = watches_ ? processor_time() - busy : 0;
    took_ = std::max<int64_t>(1, ended - began);
    if (!exact) account(began, ended, own, slept);
  }

 private:
  static constexpr int SIZE_BITS = 16;
  static constexpr int64_t MOST_THREADS = ((int64_t)1 << SIZE_BITS) - 1;
  static constexpr int64_t OPEN = (int64_t)1 << 32;

  struct alignas(64) Worker {
    std::atomic<uint32_t> asleep{0};
    int64_t called = 0;  // when it was started or woken
    // Of the last run that this thread took part in. The caller reads these when all threads have left.
    int64_t run = 0, joined = 0, left = 0, busy = 0, slept = 0;
  };

  // The number of threads that the next run should use.
  int64_t share_of(int64_t threads, int64_t time) {
    if (time >= ask_processors_) {
      processors_ = usable_processors();
      ask_processors_ = time + ASK_PROCESSORS;
    }
    return share_.threads(std::min(threads, processors_), time);
  }

  // Starts threads until there are `threads`, including the caller's; returns how many there are.
  int64_t start(int64_t threads, int64_t time) {
    while ((int64_t)workers_.size() < threads - 1 && time >= ask_threads_) {
      try {
        workers_.reserve(workers_.size() + 1);
        auto worker = std::make_unique<Worker>();
        worker->called = time;
        std::thread(&Pool::work, this, worker.get(), (int64_t)workers_.size() + 1, run_.load()).detach();
        workers_.push_back(std::move(worker));
      } catch (const std::exception&) {  // the system refused a thread (EAGAIN), or memory ran out
        ask_threads_ = time + ASK_THREADS;
      }
    }
    return std::min<int64_t>(threads, (int64_t)workers_.size() + 1);
  }

  void open(int64_t size, void (*body)(void*, Team&, int64_t), void* context, int64_t time) {
    body_ = body;
    context_ = context;
    size_ = size;
    number_++;
    phase_.next.store(0, std::memory_order_relaxed);
    phase_.opened = 0;
    phase_.patience = std::clamp(took_ / PATIENT, PATIENCE, MOST_PATIENCE);
    door_.store(OPEN, std::memory_order_release);
    run_.store(number_ << SIZE_BITS | size);
    for (int64_t i = 0; i < size - 1; i++) {  // a thread that falls asleep now either sees the run, or we see it asleep
      Worker& worker = *workers_[i];
      if (!worker.asleep.load()) continue;
      worker.called = time;
      worker.asleep.store(0);
      wake_sleepers(worker.asleep);
    }
  }

  // Closes the run to new threads and waits until all have left; returns how long the caller slept.
  int64_t close() {
    door_.fetch_and(~OPEN);
    const auto empty = [&] { return door_.load() == 0; };
    if (look_for(phase_.patience, empty)) return 0;
    const int64_t from = now();
    leaving_.sleep_until(empty);
    return now() - from;
  }

  // Computes the loss of the run. A thread lost the time in which it neither computed nor slept.
  void account(int64_t began, int64_t ended, int64_t own, int64_t slept) {
    int64_t lost = std::max<int64_t>(0, took_ - own - slept);
    bool late = slept > 0;
    for (int64_t i = 0; i < size_ - 1; i++) {
      const Worker& worker = *workers_[i];
      const int64_t due = std::max(began, worker.called + LATE);
      if (worker.run == number_) {
        late |= worker.slept > 0 || worker.joined > due + LATE;
        lost += std::max<int64_t>(0, worker.left - std::min(due, worker.joined) - worker.busy - worker.slept);
      } else {
        late |= ended > due + LATE;
        lost += std::max<int64_t>(0, ended - due);
      }
    }
    if (late) share_.suspect(ended);
    if (watches_) share_.note(size_, took_, lost, ended);
  }

  void work(Worker* worker, int64_t index, int64_t seen) {
    never_preempt();
    for (;;) {
      const auto called = [&] { return run_.load() != seen && index < (run_.load() & MOST_THREADS); };
      const auto left_out = [&] { return run_.load() != seen && index >= (run_.load() & MOST_THREADS); };
      look_for(AWAKE, [&] { return called() || left_out(); });
      while (!called()) {
        worker->asleep.store(1);
        if (!called()) sleep_while(worker->asleep, 1);
        worker->asleep.store(0);
      }
      seen = run_.load();
      if (!enter()) continue;
      seen = number_ << SIZE_BITS | size_;  // perhaps of a later run
      if (index < size_) take_part(*worker, index);
      if (door_.fetch_sub(1) == 1) leaving_.wake();
    }
  }

  // Joins the run if it has not ended.
  bool enter() {
    for (int64_t door = door_.load(); door & OPEN;)
      if (door_.compare_exchange_weak(door, door + 1)) return true;
    return false;
  }

  void take_part(Worker& worker, int64_t index) {
    worker.joined = now();
    const int64_t busy = watches_ ? processor_time() : 0;
    Team team(size_, &phase_);
    body_(context_, team, index);
    team.finish();
    worker.slept = team.slept();
    worker.busy = watches_ ? processor_time() - busy : 0;
    worker.left = now();
    worker.run = number_;
  }

  std::mutex turn_;  // one caller at a time; it guards the members below
  Share share_;
  std::vector<std::unique_ptr<Worker>> workers_;
  int64_t processors_ = 1, ask_processors_ = 0, ask_threads_ = 0;
  int64_t took_ = 0;  // duration of the last run

  // The current run: written before the door opens, and constant until the last thread has left.
  void (*body_)(void*, Team&, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t size_ = 0, number_ = 0;
  bool watches_ = false;
  Phase phase_;
  Parking leaving_;                           // the caller sleeps here until the last thread has left
  alignas(64) std::atomic<int64_t> run_{0};   // the run's number << SIZE_BITS | its threads
  alignas(64) std::atomic<int64_t> door_{0};  // OPEN while threads may join, plus the number inside
};

std::atomic<Pool*> process_pool{nullptr};  // never destroyed: its threads may run when the process ends

// A forked process has none of the threads and creates its own pool; the parent's may have been locked in a run.
[[maybe_unused]] const int forgets = pthread_atfork(nullptr, nullptr, [] { process_pool.store(nullptr); });

// The pool of this process; null if memory for it runs out.
Pool* pool() {
  Pool* found = process_pool.load(std::memory_order_acquire);
  if (found) return found;
  std::unique_ptr<Pool> mine(new (std::nothrow) Pool);
  if (mine && process_pool.compare_exchange_strong(found, mine.get())) return mine.release();
  return found;
}

}  // namespace

void Parking::wait(uint32_t seen) { sleep_while(changes_, seen); }

void Parking::wake_all() {
  changes_.fetch_add(1);
  wake_sleepers(changes_);
}

void Team::end(int64_t mine, int64_t pieces) {
  uint64_t next = number_ << 32;
  if (mine && phase_->done.fetch_add(mine, std::memory_order_acq_rel) + mine == pieces) {
    phase_->done.store(0, std::memory_order_relaxed);
    ahead_ = true;
  } else if (pieces > 0) {
    wait();
  } else if (phase_->next.compare_exchange_strong(next, (number_ + 1) << 32)) {
    phase_->parking.wake();
  }
  number_++;
}

void Team::open() {
  ahead_ = false;
  phase_->opened++;
  phase_->next.store(number_ << 32);
  phase_->parking.wake();
}

void Team::wait() {
  if (look_for(phase_->patience, [&] { return ended(); })) return;
  const int64_t from = now();
  phase_->parking.sleep_until([&] { return ended(); });
  slept_ += now() - from;
}

void run_on_threads(int64_t threads, void (*body)(void*, Team&, int64_t), void* context) {
  if (Pool* shared = threads < 2 ? nullptr : pool()) return shared->run(threads, body, context);
  Team alone(1);
  body(context, alone, 0);
}

int64_t set_exact_threads(int64_t most) { return exact_threads.exchange(most < 0 ? 0 : most); }

int64_t last_team() { return last_size.load(); }

int64_t last_barriers() { return last_opened.load(); }

}  // namespace tw
