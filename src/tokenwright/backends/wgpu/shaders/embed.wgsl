// x [T, width] = a factor times the packed table's row of each token, plus that of its position in a learned table.
@group(0) @binding(2) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> places: array<f32>;
@group(0) @binding(5) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let width = facts[0]; let slabs = facts[1];
  let row = row_of(group); let i = group.x * 64u + thread;
  if (row >= step[0] || i >= width) { return; }
  let token = step[step[3] + row];
  let first = facts[3]; // of the tokens in this buffer, where a table has several
  if (token < first || token >= first + facts[4]) { return; }
  let block = (token - first) / 16u; let lane = token % 16u;
  var value: f32;
  if (FORMAT == 0u) {
    value = bitcast<f32>(codes[((block * slabs + i / 16u) * 16u + i % 16u) * 16u + lane]);
  } else if (FORMAT < 3u) {
    let word = codes[((block * slabs + i / 32u) * 16u + i % 32u / 2u) * 16u + lane];
    let bits = (word >> ((i & 1u) * 16u)) & 0xffffu;
    value = select(half(bits), bfloat(bits), FORMAT == 1u);
  } else {
    let four = i % 64u / 4u; let shift = (i & 3u) * 8u;
    var code: i32;
    if (FORMAT == 3u) {
      code = i32((codes[((block * slabs + i / 64u) * 16u + four) * 16u + lane] >> shift) & 0xffu) - 128;
    } else {
      let word = codes[((block * slabs + i / 64u) * 8u + (four & 7u)) * 16u + lane];
      code = i32((word >> (shift + (four >> 3u) * 4u)) & 15u) - 8;
    }
    let place = (block * (slabs * 64u / max(GROUP, 1u)) + i / max(GROUP, 1u)) * 16u + lane;
    value = f32(code) * half(scales[place / 2u] >> ((lane & 1u) * 16u));
  }
  value *= number(2u);
  if (PLACES) { value += places[step[step[4] + row] * width + i]; }
  x[row * width + i] = value;
}
