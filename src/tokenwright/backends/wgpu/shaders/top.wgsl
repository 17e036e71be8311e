// Of each row of logits the 64 highest, or without those tied with the 64th if they are more: ids in any order, and logits.
//
// A row is one workgroup's. It finds the key of the 64th highest logit byte by byte, by counting.
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> top: array<u32>; // [W, 1 + 2 * 64]: how many, ids, bits of logits

const MOST = 64u;

var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> found: atomic<u32>;

// Ascending as the numbers are.
fn key(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let size = fact(0u); let row = row_of(group);
  if (row >= step[1]) { return; }
  if (thread == 0u) { atomicStore(&found, 0u); } // lavapipe leaves what was there
  var least = 0u; // the bytes of the key that are known
  var known = 0u; // a mask of them
  var left = min(MOST, size);
  var equal = 0u;
  for (var byte = 4u; byte > 0u; byte--) {
    let shift = byte * 8u - 8u;
    atomicStore(&counts[thread], 0u);
    workgroupBarrier();
    for (var i = thread; i < size; i += 256u) {
      let here = key(logits[row * size + i]);
      if ((here & known) == least) { atomicAdd(&counts[(here >> shift) & 255u], 1u); }
    }
    workgroupBarrier();
    var digit = 255u;
    loop {
      equal = atomicLoad(&counts[digit]);
      if (equal >= left || digit == 0u) { break; }
      left -= equal;
      digit--;
    }
    least |= digit << shift;
    known |= 255u << shift;
    workgroupBarrier();
  }
  if (equal > left) { least++; }
  let at = row * (1u + 2u * MOST);
  for (var i = thread; i < size; i += 256u) {
    let value = logits[row * size + i];
    if (key(value) >= least) {
      let place = min(atomicAdd(&found, 1u), MOST - 1u); // never more, but where a number is none
      top[at + 1u + place] = i;
      top[at + 1u + MOST + place] = bitcast<u32>(value);
    }
  }
  workgroupBarrier();
  if (thread == 0u) { top[at] = min(atomicLoad(&found), MOST); }
}
