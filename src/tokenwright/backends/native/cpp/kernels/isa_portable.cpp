#define TW_ISA portable
#include "kernels/table.h"

const tw::Kernels* tw::portable_kernels() { return &tw::portable::table; }
