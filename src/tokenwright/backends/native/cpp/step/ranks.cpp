#include "step/ranks.h"

#include <chrono>
#include <climits>
#include <ctime>

#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace tw {

namespace {

constexpr long ASK = 100'000'000;  // nanoseconds of sleep after which a waiting rank looks whether others have ended
constexpr long BLINK = 50'000;     // and of each sleep where the system wakes nobody

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  const timespec most{0, ASK};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
  const timespec most{0, BLINK};
  if (word.load() == value) nanosleep(&most, nullptr);
#endif
}

#if defined(__wasm__)
int getppid() { return 0; }  // it has no other processes
#endif

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

void Ranks::meet() const {
  Meeting& m = *meeting;
  const uint32_t round = m.round.load();
  if (m.arrived.fetch_add(1) + 1 == count) {
    m.arrived.store(0);
    m.round.fetch_add(1);
    if (m.asleep.load()) wake_all(m.round);
    return;
  }
  const auto over = [&] { return m.round.load() != round || m.broken.load(); };
  using Clock = std::chrono::steady_clock;
  if (patience)
    for (const auto until = Clock::now() + std::chrono::nanoseconds(patience); Clock::now() < until;)
      for (int i = 0; i < 64; i++)
        if (over()) return;
  while (!over()) {
    m.asleep.fetch_add(1);
    sleep_while(m.round, round);
    m.asleep.fetch_sub(1);
    if (parent && getppid() != parent) m.broken.store(1);
  }
}

}  // namespace tw
