#include "step/expert_pool.h"

#if defined(TW_WASM)

tw::ExpertPool* tw::new_expert_pool(const ExpertFile&) { return nullptr; }

#else

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tw {

namespace {

constexpr double HALF_LIFE = 64;       // steps
constexpr double MOST_WEIGHT = 1e200;  // then all values are divided by it

int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Reads a stretch of a file. Returns 0, a number of errno, or SHORT_FILE.
int64_t read_stretch(int descriptor, char* to, int64_t bytes, int64_t at) {
  const int64_t first = at;
  for (int64_t left = bytes; left > 0;) {
    const ssize_t found = pread(descriptor, to, (size_t)left, (off_t)at);
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) return found ? errno : ExpertPool::SHORT_FILE;
    to += found, at += found, left -= found;
  }
#if defined(POSIX_FADV_DONTNEED)
  (void)posix_fadvise(descriptor, (off_t)first, (off_t)bytes, POSIX_FADV_DONTNEED);  // the slots are the memory's bound
#else
  (void)first;
#endif
  return 0;
}

enum class State { EMPTY, QUEUED, READING, READY };

struct Slot {
  State state = State::EMPTY;
  int64_t key = -1;  // layer * experts + expert
  int64_t pins = 0;
  int64_t asked = 0;  // the number of the last request that named its expert
  int64_t error = 0;
  bool guessed = false;  // read ahead, and not named by a router yet
  ExpertLayer layer = {};
  int64_t expert = 0;
};

class FilePool final : public ExpertPool {
 public:
  explicit FilePool(const ExpertFile& of)
      : of_(of), slots_(of.slots), slot_of_(of.layers * of.experts, -1), value_(of.layers * of.experts, 0.0) {
    named_.reserve(of.slots);
    guessed_.reserve(of.slots);
    threads_.reserve(of.threads);
    growth_ = 1 + 0.6931 / (HALF_LIFE * (double)of.layers);
    try {
      for (int64_t i = 0; i < of.threads; i++) threads_.emplace_back([this] { work(); });
    } catch (const std::exception&) {  // the system refused a thread; those who wait read as well
    }
  }

  ~FilePool() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    asked_.notify_all();
    for (std::thread& one : threads_) one.join();
  }

  int64_t layers() const override { return of_.layers; }
  const char* memory(int64_t slot) const override { return of_.memory + slot * of_.slot_bytes; }

  int64_t error(int64_t slot) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return slots_[slot].error;
  }

  int64_t pin(const ExpertLayer& layer, const int64_t* experts, int64_t count, int64_t* slots) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t half = std::max<int64_t>(1, of_.slots / 2);
    ask(layer, experts, count);
    forget_guesses(layer);
    grow();
    if (count > half) count = half;
    int64_t pinned = 0;
    while (pinned < count) {
      const int64_t slot = pin_one(layer, experts[pinned]);
      if (slot >= 0)
        slots[pinned++] = slot;
      else if (pinned)
        break;
      else
        changed_.wait(lock);
    }
    asked_.notify_all();
    return pinned;
  }

  void read_ahead(const ExpertLayer& layer, const int64_t* experts, int64_t count) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t i = 0; i < count; i++) {  // what is there is not to make room for the others
      const int64_t slot = slot_of_[key_of(layer, experts[i])];
      if (slot >= 0) slots_[slot].asked = request_;
    }
    for (int64_t i = 0, begun = 0; i < count && begun < of_.slots / 2; i++) {
      if (slot_of_[key_of(layer, experts[i])] >= 0) continue;
      const int64_t slot = free_slot(false);
      if (slot < 0) break;
      place(slot, layer, experts[i]);
      slots_[slot].guessed = true;
      guessed_.push_back(slot);
      begun++;
    }
    asked_.notify_all();
  }

  int64_t wait(const int64_t* slots, int64_t count) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ready = [&] {
      return std::all_of(slots, slots + count, [&](int64_t one) { return slots_[one].state == State::READY; });
    };
    if (ready()) return 0;
    const int64_t from = clock_ns();
    while (!ready()) {
      if (named_.empty())
        changed_.wait(lock);
      else
        read_next(lock);
    }
    const int64_t took = clock_ns() - from;
    of_.counts->waited += took;
    return took;
  }

  void unpin(const int64_t* slots, int64_t count) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < count; i++) {
        Slot& slot = slots_[slots[i]];
        if (--slot.pins == 0 && slot.error) empty(slots[i]);
      }
    }
    changed_.notify_all();
  }

 private:
  int64_t key_of(const ExpertLayer& layer, int64_t expert) const { return layer.index * of_.experts + expert; }

  // Marks the slots of experts with the number of a new request.
  void ask(const ExpertLayer& layer, const int64_t* experts, int64_t count) {
    request_++;
    for (int64_t i = 0; i < count; i++) {
      const int64_t slot = slot_of_[key_of(layer, experts[i])];
      if (slot >= 0) slots_[slot].asked = request_;
    }
  }

  // Drops the guesses for a layer that its router did not name, if their reading has not begun.
  void forget_guesses(const ExpertLayer& layer) {
    const auto wrong = [&](int64_t one) {
      const Slot& slot = slots_[one];
      if (slot.layer.index != layer.index || slot.asked == request_) return false;
      empty(one);
      return true;
    };
    guessed_.erase(std::remove_if(guessed_.begin(), guessed_.end(), wrong), guessed_.end());
  }

  // The weight of a use grows, instead of the values of all experts falling.
  void grow() {
    weight_ *= growth_;
    if (weight_ < MOST_WEIGHT) return;
    for (double& value : value_) value /= weight_;
    weight_ = 1;
  }

  int64_t pin_one(const ExpertLayer& layer, int64_t expert) {
    const int64_t key = key_of(layer, expert);
    int64_t at = slot_of_[key];
    if (at < 0) {
      at = free_slot(true);
      if (at < 0) return -1;
      place(at, layer, expert);
      named_.push_back(at);
    }
    Slot& slot = slots_[at];
    const auto found = std::find(guessed_.begin(), guessed_.end(), at);
    if (found != guessed_.end()) {
      guessed_.erase(found);
      named_.push_back(at);
    }
    slot.asked = request_;
    slot.pins++;
    value_[key] += weight_;
    of_.counts->named++;
    of_.counts->hits += slot.state == State::READY && !slot.error;
    of_.counts->ahead += slot.guessed;
    slot.guessed = false;
    return at;
  }

  // An empty slot, or that of the expert with the lowest value among those that nobody waits for; -1: there is none.
  // needed: also one that the last request named, if there is no other.
  int64_t free_slot(bool needed) {
    int64_t best = -1;
    for (int64_t i = 0; i < of_.slots; i++) {
      const Slot& slot = slots_[i];
      if (slot.state == State::EMPTY) return i;
      if (slot.pins || slot.state == State::READING || (slot.asked == request_ && !needed)) continue;
      if (best < 0 || cost(slot) < cost(slots_[best])) best = i;
    }
    if (best < 0) return -1;
    const auto found = std::find(guessed_.begin(), guessed_.end(), best);
    if (found != guessed_.end()) guessed_.erase(found);
    empty(best);
    return best;
  }

  // Those that the last request named are worth more than all others.
  double cost(const Slot& slot) const { return value_[slot.key] + (slot.asked == request_ ? 2 * MOST_WEIGHT : 0); }

  void place(int64_t at, const ExpertLayer& layer, int64_t expert) {
    Slot& slot = slots_[at];
    slot.state = State::QUEUED;
    slot.key = key_of(layer, expert);
    slot.asked = request_;
    slot.error = 0;
    slot.guessed = false;
    slot.layer = layer;
    slot.expert = expert;
    slot_of_[slot.key] = at;
  }

  void empty(int64_t at) {
    Slot& slot = slots_[at];
    slot_of_[slot.key] = -1;
    slot = Slot();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      asked_.wait(lock, [&] { return ends_ || !named_.empty() || !guessed_.empty(); });
      if (ends_) return;
      read_next(lock);
    }
  }

  // Reads the next expert that is queued; those that a router named come first. The lock is released meanwhile.
  void read_next(std::unique_lock<std::mutex>& lock) {
    std::vector<int64_t>& queue = named_.empty() ? guessed_ : named_;
    const int64_t at = queue.front();
    queue.erase(queue.begin());
    Slot& slot = slots_[at];
    slot.state = State::READING;
    const ExpertLayer layer = slot.layer;
    const int64_t expert = slot.expert;
    lock.unlock();
    int64_t error = 0, bytes = 0;
    char* const to = of_.memory + at * of_.slot_bytes;
    for (int64_t i = 0; i < STRETCHES && !error; i++) {
      const int64_t size = layer.bytes[i];
      error = read_stretch((int)of_.descriptor, to + layer.place[i], size, layer.at[i] + expert * size);
      bytes += size;
    }
    lock.lock();
    slot.state = State::READY;
    slot.error = error;
    of_.counts->reads++;
    if (error)
      of_.counts->failed++;
    else
      of_.counts->bytes += bytes;
    if (error && !slot.pins) empty(at);  // whoever needs it reads it again
    changed_.notify_all();
  }

  const ExpertFile of_;
  std::mutex mutex_;                         // guards what follows
  std::condition_variable asked_, changed_;  // something is queued; something was read or unpinned
  std::vector<Slot> slots_;
  std::vector<int64_t> slot_of_;          // [layers][experts]: -1: not in memory
  std::vector<double> value_;             // [layers][experts], also of those that are not in memory
  std::vector<int64_t> named_, guessed_;  // slots to be read, in order
  std::vector<std::thread> threads_;
  int64_t request_ = 0;
  double weight_ = 1, growth_ = 1;  // of a use now; by how much that grows for each layer
  bool ends_ = false;
};

}  // namespace

ExpertPool* new_expert_pool(const ExpertFile& of) {
  try {
    return new FilePool(of);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace tw

#endif
