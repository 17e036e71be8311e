// y [n, out] = x [n, in] times a packed matrix (`backends/packed.py`), plus its bias.
//
// A workgroup computes one block of 16 outputs for TILE rows. Thread (part, lane) takes every fourth slab of inputs of
// one output. Sums over a group of integers are exact; a row's partial sums are added in one order whatever TILE is.
// In a mixture each row has the matrix of the expert that it chose.
@group(0) @binding(2) var<storage, read> x: array<u32>; // floats; of a quantised matrix rows of `quantise.wgsl`
@group(0) @binding(3) var<storage, read> codes: array<u32>;
@group(0) @binding(4) var<storage, read> scales: array<u32>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read> factors: array<f32>; // of the outputs
@group(0) @binding(7) var<storage, read> chosen: array<u32>;
@group(0) @binding(8) var<storage, read_write> y: array<f32>;

const PARTS = 4u;
const SPANS = select(1u, 64u / max(GROUP, 1u), GROUP > 0u); // groups in a slab

var<workgroup> sums: array<f32, PARTS * SPANS * TILE * LANES>;
var<workgroup> levels: array<f32, PARTS * SPANS * TILE * LANES>;
var<workgroup> lowers: array<f32, select(1u, PARTS * SPANS * TILE * LANES, MINIMA)>; // the minima times sums of inputs

fn input(at: Places, i: u32, inner: u32) -> Floats { return select(Floats(0.0), floats(at, min(i, inner - 1u)), i < inner); }

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let inner = fact(1u); let slabs = fact(2u); let out = fact(3u);
  let count = step[fact(6u)] * max(fact(9u), 1u); // a token has a row for each expert that it chose
  let lane = thread % LANES; let part = thread / LANES;
  let first = row_of(group) * TILE;
  var block = group.x;
  var expert = 0u;
  if (fact(9u) > 0u) { // TILE is 1
    expert = chosen[min(first, count - 1u)];
    block += expert * fact(10u);
  }
  let at = place_of(first, count - 1u, fact(11u), fact(0u));
  var total = 0.0;
  if (GROUP > 0u) {
    let scales_at = slabs * 16u; let sums_at = scales_at + slabs * SPANS; // in a quantised row
    for (var start = 0u; start < slabs; start += PARTS) {
      let slab = start + part;
      if (slab < slabs) {
        for (var g = 0u; g < SPANS; g++) {
          let span = slab * SPANS + g;
          var exact = Ints(0);
          if (OFFSET > 0 && !MINIMA) { exact = -OFFSET * ints(at, sums_at + span); }
          for (var q = g * (GROUP / 4u); q < (g + 1u) * (GROUP / 4u); q++) {
            exact += dots(four_of(block * slabs + slab, q, lane), at, slab * 16u + q);
          }
          let sum = Floats(exact); let level = level_of(block, slabs, span, lane, 0u) * floats(at, scales_at + span);
          var lower = Floats(0.0);
          if (MINIMA) {
            let minimum = level_of(block, slabs, span, lane, 1u);
            lower = minimum * (floats(at, scales_at + span) * Floats(ints(at, sums_at + span)));
          }
          for (var r = 0u; r < TILE; r++) {
            let place = ((part * SPANS + g) * TILE + r) * LANES + lane;
            sums[place] = number_of(sum, r);
            levels[place] = number_of(level, r);
            if (MINIMA) { lowers[place] = number_of(lower, r); }
          }
        }
      }
      workgroupBarrier();
      if (part < TILE) {
        for (var i = 0u; i < min(PARTS, slabs - start) * SPANS; i++) {
          let place = (i * TILE + part) * LANES + lane;
          total = fma(sums[place], levels[place], total);
          if (MINIMA) { total -= lowers[place]; }
        }
      }
      workgroupBarrier();
    }
  } else {
    var mine = Floats(0.0);
    for (var slab = part; slab < slabs; slab += PARTS) {
      for (var line = 0u; line < 16u; line++) {
        let word = codes[((block * slabs + slab) * 16u + line) * LANES + lane];
        if (FORMAT == 0u) {
          mine = fma(Floats(bitcast<f32>(word)), input(at, slab * 16u + line, inner), mine);
        } else {
          let i = slab * 32u + line * 2u;
          let low = select(half(word), bfloat(word & 0xffffu), FORMAT == 1u);
          let high = select(half(word >> 16u), bitcast<f32>(word & 0xffff0000u), FORMAT == 1u);
          mine = fma(Floats(high), input(at, i + 1u, inner), fma(Floats(low), input(at, i, inner), mine));
        }
      }
    }
    for (var r = 0u; r < TILE; r++) { sums[(part * TILE + r) * LANES + lane] = number_of(mine, r); }
    workgroupBarrier();
    if (part < TILE) {
      let place = part * LANES + lane;
      let apart = TILE * LANES;
      total = (sums[place] + sums[place + apart]) + (sums[place + 2u * apart] + sums[place + 3u * apart]);
    }
  }
  let row = first + part;
  let output = group.x * LANES + lane;
  if (part < TILE && row < count && output < out) {
    if (FACTORS) { total *= factors[fact(8u) + expert * out + output]; }
    if (fact(7u) > 0u) { total += bias[fact(8u) + expert * out + output]; }
    y[row * fact(4u) + fact(5u) + output] = total;
  }
}
