// Of each row of logits: the lowest id of the largest logit, that logit, and log(sum(exp)); caps the logits before.
// A NaN stands for the sum of a row that is not finite. A row is one workgroup's, in a fixed order.
@group(0) @binding(2) var<storage, read_write> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> found: array<u32>; // [W, 3]

var<workgroup> highest: array<f32, 256>;
var<workgroup> ids: array<u32, 256>;
var<workgroup> unsound: array<u32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let size = fact(0u); let cap = number(1u);
  let row = row_of(group);
  if (row >= step[1]) { return; }
  var most = LOWEST;
  var id = size;
  var bad = 0u;
  for (var i = thread; i < size; i += 256u) {
    var value = logits[row * size + i];
    if (!finite(value)) { bad = 1u; }
    if (CAPPED) {
      value = cap * tanh(clamp(value / cap, -10.0, 10.0));
      if (bad == 0u) { logits[row * size + i] = value; }
    }
    if (value > most) { most = value; id = i; }
  }
  highest[thread] = most;
  ids[thread] = id;
  unsound[thread] = bad;
  workgroupBarrier();
  bad = 0u;
  for (var i = 0u; i < 256u; i++) {
    bad |= unsound[i];
    if (highest[i] > most || (highest[i] == most && ids[i] < id)) { most = highest[i]; id = ids[i]; }
  }
  var sum = 0.0;
  for (var i = thread; i < size; i += 256u) { sum += exp(logits[row * size + i] - most); }
  workgroupBarrier();
  highest[thread] = sum;
  workgroupBarrier();
  if (thread == 0u) {
    sum = 0.0;
    for (var i = 0u; i < 256u; i++) { sum += highest[i]; }
    found[row * 3u] = id;
    found[row * 3u + 1u] = bitcast<u32>(most);
    found[row * 3u + 2u] = bitcast<u32>(select(most + log(sum), poison(), bad > 0u));
  }
}
