#define TW_ISA portable
#include "table.inl.h"

const tw::Kernels* tw::portable_kernels() { return &tw::portable::table; }
