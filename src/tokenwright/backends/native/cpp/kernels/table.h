// The function table of one instruction set, from the files that are compiled for it.
#pragma once

#include "kernels.h"
#include "kernels/attention/attention.h"
#include "kernels/elementwise.h"
#include "kernels/limits.h"
#include "kernels/linear/embed.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/pack.h"
#include "kernels/recurrent.h"

namespace tw {
namespace TW_ISA {

#define TW_STRING(x) #x
#define TW_NAME(x) TW_STRING(x)

static const Kernels table = {TW_NAME(TW_ISA),
                              row_kind,
                              together,
                              quantise_row,
                              linear,
                              fuses,
                              up_rows,
                              embed,
                              norm,
                              activate,
                              xielu,
                              gated,
                              soft_cap,
                              rotate,
                              store_kv,
                              attend,
                              attend_shared,
                              attention_scratch,
                              stretch_sums,
                              attend_stretch,
                              merge_stretches,
                              convolve,
                              step_head,
                              keep,
                              scan,
                              unit,
                              gate_by,
                              weigh,
                              pack,
                              summary,
                              entropy,
                              read,
                              multiply};

}  // namespace TW_ISA
}  // namespace tw
