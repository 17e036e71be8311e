#define TW_ISA wasm
#include "kernels/table.h"

const tw::Kernels* tw::wasm_kernels() { return &tw::wasm::table; }
