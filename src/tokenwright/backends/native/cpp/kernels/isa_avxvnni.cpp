#define TW_ISA avxvnni
#include "kernels/table.h"

const tw::Kernels* tw::avxvnni_kernels() { return &tw::avxvnni::table; }
