#define TW_ISA dotprod
#include "kernels/table.h"

const tw::Kernels* tw::dotprod_kernels() { return &tw::dotprod::table; }
