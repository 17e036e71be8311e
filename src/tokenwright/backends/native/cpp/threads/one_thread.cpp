// The pool of a platform without threads, which is WebAssembly: one thread runs everything.
#include "threads/pool.h"
#include "threads/processors.h"

namespace tw {

void Parking::wait(uint32_t) {}
void Parking::wake_all() {}
void Team::end(int64_t, int64_t) {}
void Team::open() {}
void Team::wait() {}

void run_on_threads(int64_t, void (*body)(void*, Team&, int64_t), void* context) {
  Team alone(1);
  body(context, alone, 0);
}

int64_t set_exact_threads(int64_t) { return 0; }
int64_t last_team() { return 1; }
int64_t last_barriers() { return 0; }
int64_t usable_processors() { return 1; }

}  // namespace tw
