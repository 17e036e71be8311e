// Rows as integers of 8 bits, the input of a linear over a quantised matrix: code = round(x 127 / most), where most is
// the largest |x| of the group, with scale most / 127. A row is its codes, four to a word, then the scale of each group
// in fp32, then the sum of the codes of each. Numbers that are not finite make their group's scale NaN.
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> rows: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let inner = fact(1u); let depth = fact(2u);
  let groups = depth / GROUP;
  let row = row_of(group); let g = group.x * 64u + thread;
  if (row >= step[fact(3u)] * fact(4u) || g >= groups) { return; }
  let at = row * fact(0u); let to = row * (depth / 4u + 2u * groups);
  var most = 0.0;
  var sound = true;
  for (var i = g * GROUP; i < min((g + 1u) * GROUP, inner); i++) {
    most = max(most, abs(x[at + i]));
    sound = sound && finite(x[at + i]);
  }
  let inverse = select(0.0, 127.0 / max(most, 1e-38), most > 0.0);
  var sum = 0;
  for (var word = g * GROUP / 4u; word < (g + 1u) * GROUP / 4u; word++) {
    var packed = 0u;
    for (var k = 0u; k < 4u; k++) {
      let i = word * 4u + k;
      let code = select(0, i32(round(x[at + min(i, inner - 1u)] * inverse)), i < inner);
      sum += code;
      packed |= (u32(code) & 0xffu) << (8u * k);
    }
    rows[to + word] = packed;
  }
  rows[to + depth / 4u + g] = bitcast<u32>(select(poison(), most / 127.0, sound));
  rows[to + depth / 4u + groups + g] = u32(sum);
}
