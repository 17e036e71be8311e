// Runs the thread pool alone, under the thread sanitizer: tests/backends/test_threads.py.
//
// Threads come late, stay away in the midst of a run and hold pieces for long. Every piece must be computed once, when
// the phases before it have ended, and by a thread of the run. Prints what is wrong; ends with 1 if something is.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "threads/pool.h"

using namespace tw;

namespace {

std::atomic<bool> wrong{false};

void expect(bool right, const char* what) {
  if (!right && !wrong.exchange(true)) printf("%s\n", what);
}

// A number that looks random, of what it is made from.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  return x ^ (x >> 29);
}

struct Run {
  int64_t threads, seed;
  int64_t delay;                         // microseconds, now and then: of a piece, or between two phases
  std::vector<std::vector<int64_t>> at;  // of each phase, for each number of it: 1 + the thread; plain memory, so that
                                         // a race is seen
  std::vector<int64_t> piece;            // numbers that a piece of the phase has
  std::unique_ptr<std::atomic<int64_t>[]> left;
};

void sleep(int64_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

void body(void* context, Team& team, int64_t thread) {
  Run& run = *(Run*)context;
  expect(thread >= 0 && thread < team.size() && team.size() <= run.threads, "a thread that is not of the run");
  for (size_t phase = 0; phase < run.at.size(); phase++) {
    const int64_t count = run.at[phase].size();
    const uint64_t dice = mixed(run.seed * 1000003 + phase * 131 + thread);
    if (dice % 16 == 0) sleep(run.delay);
    team.share(count, run.piece[phase], [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        int64_t before = 0;
        if (phase)
          for (int64_t other : run.at[phase - 1]) before += other > 0;
        expect(!phase || before == (int64_t)run.at[phase - 1].size(), "a piece came before the last phase had ended");
        expect(run.at[phase][i] == 0, "a piece was computed twice");
        run.at[phase][i] = 1 + thread;
        run.left[phase]--;
        if (mixed(dice + i) % 64 == 0) sleep(run.delay);
      }
    });
    expect(run.left[phase] == 0, "a phase ended before its pieces were done");
  }
}

void one(int64_t threads, int64_t seed, int64_t delay) {
  Run run{threads, seed, delay, {}, {}, nullptr};
  const int64_t phases = mixed(seed) % 40;
  run.left = std::make_unique<std::atomic<int64_t>[]>(phases);
  for (int64_t phase = 0; phase < phases; phase++) {
    const uint64_t dice = mixed(seed * 77 + phase);
    run.at.emplace_back(dice % 5 == 0 ? 0 : dice % 5 < 3 ? 1 : dice / 512 % 30);  // many have one piece
    run.piece.push_back(1 + dice / 64 % 4);
    run.left[phase] = run.at.back().size();
  }
  run_on_threads(threads, body, &run);
  for (const auto& phase : run.at)
    expect(std::all_of(phase.begin(), phase.end(), [](int64_t at) { return at > 0; }), "a piece was not computed");
}

}  // namespace

int main(int, char** words) {
  const int64_t exact = atoi(words[1]), runs = atoi(words[2]);
  set_exact_threads(exact);
  for (int64_t seed = 0; seed < runs; seed++) {
    one(1 + seed % std::max<int64_t>(exact, 8), seed, 0);
    one(std::max<int64_t>(exact, 8), seed, seed % 7 == 0 ? 3000 : 30);
    if (seed % 20 == 0) sleep(4000);  // so that threads go to sleep between two runs
  }
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 3; caller++)
    callers.emplace_back([=] {
      for (int64_t seed = 0; seed < runs / 4; seed++) one(2 + caller, seed, 10);
    });
  for (std::thread& caller : callers) caller.join();
  return wrong;
}
