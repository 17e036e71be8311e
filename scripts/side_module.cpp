// What the kernels need of C++'s runtime where their host has only C's: as a side module of Pyodide.
#include <cstddef>
#include <cstdlib>
#include <ctime>
#include <new>

extern "C" void* aligned_alloc(size_t, size_t);

void* operator new(size_t size) {
  if (void* made = malloc(size ? size : 1)) return made;
  abort();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return malloc(size ? size : 1); }
void* operator new(size_t size, std::align_val_t alignment) {
  const size_t lines = (size_t)alignment;
  if (void* made = aligned_alloc(lines, (size + lines - 1) / lines * lines)) return made;
  abort();
}
void* operator new[](size_t size) { return operator new(size); }
void* operator new[](size_t size, std::align_val_t alignment) { return operator new(size, alignment); }
void operator delete(void* made) noexcept { free(made); }
void operator delete[](void* made) noexcept { free(made); }
void operator delete(void* made, size_t) noexcept { free(made); }
void operator delete[](void* made, size_t) noexcept { free(made); }
void operator delete(void* made, std::align_val_t) noexcept { free(made); }
void operator delete[](void* made, std::align_val_t) noexcept { free(made); }
namespace std {
const nothrow_t nothrow{};
}

// There are no exceptions: without memory the page ends. Names as the compiler writes them, since the headers only
// declare these classes.
extern "C" {
#define TW_NEVER(name, ...) \
  void* name(__VA_ARGS__) { abort(); }
TW_NEVER(__cxa_allocate_exception, size_t)
void __cxa_throw(void*, void*, void*) { abort(); }
TW_NEVER(_ZNSt11logic_errorC2EPKc, void*, const char*)
TW_NEVER(_ZNSt9bad_allocC1Ev, void*)
TW_NEVER(_ZNSt20bad_array_new_lengthC1Ev, void*)
TW_NEVER(_ZNSt9bad_allocD1Ev, void*)
TW_NEVER(_ZNSt12length_errorD1Ev, void*)
TW_NEVER(_ZNSt20bad_array_new_lengthD1Ev, void*)
TW_NEVER(_ZNSt3__117bad_function_callD1Ev, void*)
void* _ZTVNSt3__117bad_function_callE[8];
void* _ZTVSt12length_error[8];
void* _ZTVN10__cxxabiv117__class_type_infoE[8];
void* _ZTVN10__cxxabiv120__si_class_type_infoE[8];

// std::sort of numbers, which libc++ has compiled. The kernels sort a few only: the experts of a step.
void _ZNSt3__16__sortIRNS_6__lessIxxEEPxEEvT0_S5_T_(long long* first, long long* last, void*) {
  for (long long* end = first; end < last; end++)
    for (long long* at = end; at > first && at[-1] > *at; at--) {
      const long long moved = *at;
      *at = at[-1], at[-1] = moved;
    }
}

// std::chrono::steady_clock::now. The host's time has a number of 64 bits and one of 32.
struct HostTime {
  long long seconds;
  long nanoseconds;
};
int host_clock(int, HostTime*) __asm__("clock_gettime");
long long _ZNSt3__16chrono12steady_clock3nowEv() {
  HostTime now;
  host_clock(1, &now);
  return now.seconds * 1'000'000'000 + now.nanoseconds;
}
}
