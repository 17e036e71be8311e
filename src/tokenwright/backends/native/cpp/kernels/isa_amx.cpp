#define TW_ISA amx
#define TW_TILES
#include "kernels.h"
#include "kernels/amx_tiles.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/amx_linear.h"

namespace tw {
namespace TW_ISA {

// Four independent tiles of sums at a time, as in the kernels.
static int64_t multiply(int64_t format, int64_t rounds) {
  if (!in_tiles(format)) return avx512_kernels()->multiply(format, rounds);
  alignas(64) uint8_t zeros[TILE] = {};
  set_tiles(TILE_ROWS, 64);
  tile_load<4>(zeros, 64), tile_load<5>(zeros, 64), tile_load<6>(zeros, 64), tile_load<7>(zeros, 64);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t i = 0; i < rounds; i++)
    if (format == BF16)
      tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>(), tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    else
      tile_dot_bytes<0, 4, 6>(), tile_dot_bytes<1, 4, 7>(), tile_dot_bytes<2, 5, 6>(), tile_dot_bytes<3, 5, 7>();
  release();
  return rounds * 4 * TILE_ROWS * LANES * (format == BF16 ? 32 : 64);
}

static Kernels made() {
  Kernels k = *avx512_kernels();
  k.name = "amx";
  k.row_kind = row_kind;
  k.together = together;
  k.quantise_row = quantise_row;
  k.linear = linear;
  k.fuses = fuses;
  k.up_rows = up_rows;
  k.multiply = multiply;
  k.rotate = rotate;
  k.store_kv = store_kv;
  k.attend = attend;
  k.attend_shared = attend_shared;
  k.attention_scratch = attention_scratch;
  k.stretch_sums = stretch_sums;
  k.attend_stretch = attend_stretch;
  k.merge_stretches = merge_stretches;
  return k;
}

}  // namespace TW_ISA
}  // namespace tw

const tw::Kernels* tw::amx_kernels() {
  static const Kernels table = amx::made();
  return &table;
}
