// x [T, width] = a factor times the packed table's row of each token, plus that of its position in a learned table.
@group(0) @binding(2) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> factors: array<f32>;
@group(0) @binding(5) var<storage, read> places: array<f32>;
@group(0) @binding(6) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let width = fact(0u); let slabs = fact(1u);
  let row = row_of(group); let i = group.x * 64u + thread;
  if (row >= step[0] || i >= width) { return; }
  let token = step[step[3] + row];
  let first = fact(3u); // of the tokens in this buffer, where a table has several
  if (token < first || token >= first + fact(4u)) { return; }
  let block = (token - first) / 16u; let lane = token % 16u;
  var value: f32;
  if (FORMAT == 0u) {
    value = bitcast<f32>(codes[((block * slabs + i / 16u) * 16u + i % 16u) * 16u + lane]);
  } else if (FORMAT < 3u) {
    let word = codes[((block * slabs + i / 32u) * 16u + i % 32u / 2u) * 16u + lane];
    let bits = (word >> ((i & 1u) * 16u)) & 0xffffu;
    value = select(half(bits), bfloat(bits), FORMAT == 1u);
  } else {
    let code = (four_of(block * slabs + i / 64u, i % 64u / 4u, lane) >> ((i & 3u) * 8u)) & 0xffu;
    let group = i / max(GROUP, 1u);
    value = f32((i32(code << 24u) >> 24u) - select(OFFSET, 0, MINIMA)) * level_of(block, slabs, group, lane, 0u);
    if (MINIMA) { value -= level_of(block, slabs, group, lane, 1u); }
    if (FACTORS) { value *= factors[token]; }
  }
  value *= number(2u);
  if (PLACES) { value += places[step[step[4] + row] * width + i]; }
  x[row * width + i] = value;
}
