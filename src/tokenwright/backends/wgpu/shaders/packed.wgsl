// Codes and levels of a packed matrix (`backends/packed.py`), for `linear.wgsl` and `embed.wgsl`. TABLE: the numbers of
// a format's codes, as bytes.
const LANES = 16u;
const NAMED = array<u32, 10>(16u, 16u, 16u, 16u, 8u, 0u, 10u, 12u, 4u, 2u); // int5 is 6, int1 is 9; from 10 on tables
const OFFSETS = array<i32, 10>(0, 0, 0, 0, 8, 0, 16, 32, 1, 1);
const LINES = select(8u, NAMED[min(FORMAT, 9u)], FORMAT < 10u); // of a slab, 16 words each
const OFFSET = select(0, OFFSETS[min(FORMAT, 9u)], FORMAT < 10u); // that codes are stored with; int8's is taken off here
const FIELDS = select(1u, 2u, MINIMA);
const RECORD = max(1u, select(GROUP, SUPER, SUPER > 0u)); // inputs that share a float16
const STEPS = select(0u, SUPER / max(GROUP, 1u), SUPER > 0u && FORMAT != 8u && FORMAT != 9u); // integers in a record

// The codes of the inputs 4 q to 4 q + 3 of a slab, as signed bytes.
fn four_of(slab: u32, q: u32, lane: u32) -> u32 {
  let at = slab * LINES * LANES + lane;
  if (FORMAT == 3u) { return codes[at + q * LANES] ^ 0x80808080u; }
  if (FORMAT == 8u) { return (codes[at + q / 4u * LANES] >> (q % 4u * 2u)) & 0x03030303u; }
  if (FORMAT == 9u) { return ((codes[at + q / 8u * LANES] >> (q % 8u)) & 0x01010101u) << 1u; }
  let low = (codes[at + (q & 7u) * LANES] >> ((q >> 3u) * 4u)) & 0x0f0f0f0fu;
  if (FORMAT == 6u) { return low | (((codes[at + (8u + q / 8u) * LANES] >> (q % 8u)) & 0x01010101u) << 4u); }
  if (FORMAT == 7u) { return low | (((codes[at + (8u + q / 4u) * LANES] >> (q % 4u * 2u)) & 0x03030303u) << 4u); }
  if (FORMAT >= 10u) {
    return TABLE[low & 15u] | (TABLE[(low >> 8u) & 15u] << 8u) | (TABLE[(low >> 16u) & 15u] << 16u)
      | (TABLE[low >> 24u] << 24u);
  }
  return low;
}

// The scale (which is 0) or minimum (1) of a group of inputs of an output.
fn level_of(block: u32, slabs: u32, group: u32, lane: u32, which: u32) -> f32 {
  let at = (block * (slabs * 64u / RECORD) + group * GROUP / RECORD) * FIELDS * (8u + STEPS * 4u);
  let size = half(scales[at + which * 8u + lane / 2u] >> ((lane & 1u) * 16u));
  if (STEPS == 0u) { return size; }
  let word = scales[at + FIELDS * 8u + ((group % max(STEPS, 1u)) * FIELDS + which) * 4u + lane / 4u];
  return size * f32(i32(word << (24u - 8u * (lane & 3u))) >> 24u);
}
