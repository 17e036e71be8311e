// The function table of one instruction set, from the files that are compiled for it.
#include "kernels.h"
#include "lanes.h"

#include "attention.inl.h"
#include "forms.inl.h"
#include "quantise.inl.h"
#include "linear.inl.h"
#include "limits.inl.h"
#include "pack.inl.h"
#include "rows.inl.h"

namespace tw {
namespace TW_ISA {

#define TW_STRING(x) #x
#define TW_NAME(x) TW_STRING(x)

static const Kernels table = {TW_NAME(TW_ISA), row_kind, together, quantise_row, linear, fuses, up_rows, embed,
                              norm, activate, gated, soft_cap, rotate, store_kv, attend, attention_scratch, stretch_sums,
                              attend_stretch, merge_stretches, weigh, pack, summary, entropy,
                              read, multiply};

}  // namespace TW_ISA
}  // namespace tw
