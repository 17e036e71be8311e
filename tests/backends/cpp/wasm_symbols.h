// Stands in for a dynamic linker where check.cpp and the library are one program, as in WebAssembly.
#pragma once

#include <cstdlib>
#include <cstring>

#include "library.cpp"  // for the types of its functions, which must be those of the calls

#define TW_SYMBOLS(each)                                                                                        \
  each(tw_kernels) each(tw_workspace_new) each(tw_workspace_free) each(tw_pack) each(tw_linear) each(tw_norm)   \
      each(tw_activate) each(tw_gated) each(tw_rotate) each(tw_summarise) each(tw_store_kv) each(tw_attend)

// There are no exceptions: without memory the program ends.
extern "C" void* __cxa_allocate_exception(size_t) { abort(); }
extern "C" void __cxa_throw(void*, void*, void*) { abort(); }

constexpr int RTLD_NOW = 0;
inline void* dlopen(const char*, int) { return (void*)1; }
inline const char* dlerror() { return ""; }
inline void* dlsym(void*, const char* wanted) {
#define TW_FIND(name) \
  if (!strcmp(wanted, #name)) return (void*)name;
  TW_SYMBOLS(TW_FIND)
#undef TW_FIND
  return nullptr;
}
