// RMSNorm (KIND 1), LayerNorm (2) or neither (0) of each row, then out = that, or (out + factor that) times a constant.
//
// A row is one workgroup's. Its threads add every 64th number, and then all of them add the 64 sums in order.
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> weight: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

var<workgroup> parts: array<f32, 64>;

fn total_of(mine: f32, thread: u32) -> f32 {
  workgroupBarrier();
  parts[thread] = mine;
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < 64u; i++) { total += parts[i]; }
  return total;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let size = fact(0u);
  let row = row_of(group);
  if (row >= step[fact(5u)]) { return; }
  var from_ = row;
  if (fact(6u) > 0u) { from_ = step[step[fact(6u)] + row]; } // of the rows that are needed
  let at = from_ * fact(1u) + fact(2u); let to = row * fact(3u) + fact(4u);
  var mean = 0.0;
  var inverse = 1.0;
  if (KIND == 2u) {
    var mine = 0.0;
    for (var i = thread; i < size; i += 64u) { mine += x[at + i]; }
    mean = total_of(mine, thread) / f32(size);
  }
  if (KIND > 0u) {
    var mine = 0.0;
    for (var i = thread; i < size; i += 64u) { let apart = x[at + i] - mean; mine = fma(apart, apart, mine); }
    inverse = 1.0 / sqrt(total_of(mine, thread) / f32(size) + number(7u));
  }
  for (var i = thread; i < size; i += 64u) {
    var value = (x[at + i] - mean) * inverse;
    if (WEIGHTED) { value *= weight[i]; }
    if (BIASED) { value += bias[i]; }
    value *= number(8u);
    if (ADD) { value = (out[to + i] + value) * number(9u); }
    out[to + i] = value;
  }
}
