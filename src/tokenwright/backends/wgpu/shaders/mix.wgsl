// out [T, width] = the weighted sum of the results of a row's experts, in the order of their numbers, plus the shared one's.
@group(0) @binding(2) var<storage, read> results: array<f32>; // [T, k, width]
@group(0) @binding(3) var<storage, read> weights: array<f32>; // [T, k + 1]
@group(0) @binding(4) var<storage, read> shared_: array<f32>; // [T, width]
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let width = fact(0u); let k = fact(1u);
  let row = row_of(group); let i = group.x * 64u + thread;
  if (row >= step[0] || i >= width) { return; }
  var total = 0.0;
  for (var j = 0u; j < k; j++) { total += weights[row * (k + 1u) + j] * results[(row * k + j) * width + i]; }
  if (SHARED) { total += weights[row * (k + 1u) + k] * shared_[row * width + i]; }
  out[row * width + i] = total;
}
