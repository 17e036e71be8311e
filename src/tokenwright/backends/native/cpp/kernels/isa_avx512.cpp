#define TW_ISA avx512
#include "kernels/table.h"

const tw::Kernels* tw::avx512_kernels() { return &tw::avx512::table; }
