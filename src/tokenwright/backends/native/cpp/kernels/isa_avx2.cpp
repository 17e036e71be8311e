#define TW_ISA avx2
#include "kernels/table.h"

const tw::Kernels* tw::avx2_kernels() { return &tw::avx2::table; }
