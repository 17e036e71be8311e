// Runs the pool of experts alone, under the thread sanitizer: tests/backends/test_threads.py.
//
// Passes in several threads pin, read and unpin experts of a file whose end is missing at first. What a pass reads must
// be the expert's bytes, or an error where the file has none. Prints what is wrong; ends with 1 if something is.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "step/expert_pool.h"

using namespace tw;

namespace {

constexpr int64_t LAYERS = 3, EXPERTS = 12, CHOSEN = 3, SLOTS = 7, PASSES = 3, STEPS = 120;
constexpr int64_t BYTES[STRETCHES] = {192, 64, 128, 64}, SLOT_BYTES = 448;

std::atomic<bool> wrong{false};

void expect(bool right, const char* what) {
  if (!right && !wrong.exchange(true)) printf("%s\n", what);
}

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  return x ^ (x >> 29);
}

char byte_at(int64_t at) { return (char)mixed(at + 1); }

void run_pass(ExpertPool& pool, const ExpertLayer* layers, int64_t pass, int64_t size, int64_t* named,
              int64_t* failed) {
  for (int64_t step = 0; step < STEPS; step++)
    for (int64_t l = 0; l < LAYERS; l++) {
      const uint64_t dice = mixed(step * 977 + l * 31 + pass * 7919);
      const int64_t count = dice % 8 ? CHOSEN : EXPERTS, first = dice / 64 % 2 ? 0 : dice / 128 % EXPERTS;
      std::vector<int64_t> experts(count), slots(count);
      for (int64_t i = 0; i < count; i++) experts[i] = (first + i * (count == CHOSEN ? 2 : 1)) % EXPERTS;
      for (int64_t done = 0; done < count;) {
        const int64_t pinned = pool.pin(layers[l], experts.data() + done, count - done, slots.data());
        expect(pinned > 0 && pinned <= std::max<int64_t>(1, SLOTS / 2), "too many pinned, or none");
        const int64_t next = (l + 1) % LAYERS;
        pool.read_ahead(layers[next], experts.data(), count);
        pool.wait(slots.data(), pinned);
        for (int64_t i = 0; i < pinned; i++) {
          const int64_t error = pool.error(slots[i]), expert = experts[done + i];
          bool there = true, same = true;
          for (int64_t s = 0; s < STRETCHES; s++) {
            const int64_t at = layers[l].at[s] + expert * BYTES[s];
            there &= at + BYTES[s] <= size;
            const char* memory = pool.memory(slots[i]) + layers[l].place[s];
            for (int64_t b = 0; b < BYTES[s] && !error; b++) same &= memory[b] == byte_at(at + b);
          }
          expect(same, "an expert has other bytes than the file");
          expect(there == (error == 0), "an error without a cause, or none with one");
          *failed += error != 0;
        }
        pool.unpin(slots.data(), pinned);
        done += pinned;
        *named += pinned;
      }
    }
}

}  // namespace

int main() {
  const int64_t each = SLOT_BYTES * EXPERTS, whole = LAYERS * each;
  const int descriptor = fileno(tmpfile());
  std::vector<char> content(whole);
  for (int64_t i = 0; i < whole; i++) content[i] = byte_at(i);
  std::vector<char> memory(SLOTS * SLOT_BYTES);
  for (const int64_t size : {whole - 100, whole}) {
    expect(pwrite(descriptor, content.data(), size, 0) == size, "the file cannot be written");
    ExpertCounts counts = {};
    const ExpertFile file{descriptor, LAYERS, EXPERTS, 3, SLOTS, SLOT_BYTES, memory.data(), &counts};
    std::unique_ptr<ExpertPool> pool(new_expert_pool(file));
    ExpertLayer layers[LAYERS];
    for (int64_t l = 0; l < LAYERS; l++) {
      layers[l] = ExpertLayer{pool.get(), l, {}, {}, {}};
      for (int64_t s = 0, at = l * each, place = 0; s < STRETCHES; at += EXPERTS * BYTES[s], place += BYTES[s], s++)
        layers[l].at[s] = at, layers[l].bytes[s] = BYTES[s], layers[l].place[s] = place;
    }
    int64_t named[PASSES] = {}, failed[PASSES] = {}, all = 0, errors = 0;
    std::vector<std::thread> threads;
    for (int64_t pass = 0; pass < PASSES; pass++)
      threads.emplace_back(run_pass, std::ref(*pool), layers, pass, size, named + pass, failed + pass);
    for (std::thread& one : threads) one.join();
    pool.reset();  // its threads end
    for (int64_t pass = 0; pass < PASSES; pass++) all += named[pass], errors += failed[pass];
    expect(counts.named == all, "other experts are counted than were named");
    expect(counts.hits > 0 && counts.reads > 0 && counts.ahead > 0, "no hits, no reads or no guesses");
    expect((errors > 0) == (size < whole), "no error where the file ends early, or one where it is whole");
  }
  close(descriptor);
  if (!wrong) printf("sound\n");
  return wrong;
}
