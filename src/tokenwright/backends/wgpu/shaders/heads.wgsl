// Each head of q, k or v: norm, clip, rotate; then written as floats, or stored in the KV memory (`cache/codec.py`).
//
// A head of a row is one workgroup's. CODEC 0 writes floats to `memory`; 1 to 6 store fp32, bfloat16, float16, int8,
// int4, fp8 in the slot of the row. Scales are halves of a word that another head may share, so they are set by atomics.
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> weight: array<f32>;
@group(0) @binding(4) var<storage, read> rotations: array<f32>; // of each, [T, 2, D / 2]: cosines, then sines
@group(0) @binding(5) var<storage, read_write> memory: array<u32>;
@group(0) @binding(6) var<storage, read_write> scales: array<atomic<u32>>;

var<workgroup> v: array<f32, D>;
var<workgroup> parts: array<f32, 64>;

fn total_of(mine: f32, thread: u32) -> f32 {
  workgroupBarrier();
  parts[thread] = mine;
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < 64u; i++) { total += parts[i]; }
  return total;
}

fn norm(head: u32, thread: u32) {
  var mean = 0.0;
  if (NORM == 2u) {
    var mine = 0.0;
    for (var i = thread; i < D; i += 64u) { mine += v[i]; }
    mean = total_of(mine, thread) / f32(D);
  }
  var mine = 0.0;
  for (var i = thread; i < D; i += 64u) { let apart = v[i] - mean; mine = fma(apart, apart, mine); }
  let inverse = 1.0 / sqrt(total_of(mine, thread) / f32(D) + number(5u));
  for (var i = thread; i < D; i += 64u) {
    v[i] = (v[i] - mean) * inverse;
    if (WEIGHTED) { v[i] *= weight[head * fact(7u) + i]; }
  }
  workgroupBarrier();
}

fn rotate(row: u32, thread: u32) {
  let at = step[fact(4u)] + row * D;
  for (var i = thread; i < D / 2u; i += 64u) {
    let first = v[i]; let second = v[i + D / 2u];
    let cosine = rotations[at + i]; let sine = rotations[at + D / 2u + i];
    v[i] = fma(-second, sine, first * cosine);
    v[i + D / 2u] = fma(first, sine, second * cosine);
  }
  workgroupBarrier();
}

fn set_scale(place: u32, bits: u32) {
  let shift = (place & 1u) * 16u;
  atomicAnd(&scales[place / 2u], ~(0xffffu << shift));
  atomicOr(&scales[place / 2u], bits << shift);
}

fn scale_bits(exact: f32, sound: bool) -> u32 {
  return select(0x7e00u, to_half(clamp(exact, -65504.0, 65504.0)), sound);
}

fn sound_group(first: u32, stop: u32) -> bool {
  var sound = true;
  for (var i = first; i < stop; i++) { sound = sound && finite(v[i]); }
  return sound;
}

fn store_int8(at: u32, first: u32, place: u32) {
  let stop = min(first + 32u, D);
  let sound = sound_group(first, stop);
  var most = 0.0;
  for (var i = first; i < stop; i++) { most = max(most, abs(v[i])); }
  let bits = scale_bits(most / 127.0, sound);
  let scale = half(bits);
  for (var word = first / 4u; word < stop / 4u; word++) {
    var packed = 0u;
    for (var k = 0u; k < 4u && sound && scale > 0.0; k++) {
      let code = i32(round(clamp(v[word * 4u + k] / scale, -127.0, 127.0)));
      packed |= (u32(code) & 0xffu) << (8u * k);
    }
    memory[at + word] = packed;
  }
  set_scale(place, bits);
}

// int4 as in `cache/codec.py`: the nearest of 16 levels to the group times the Hadamard matrix.
fn store_int4(at: u32, first: u32, place: u32) {
  let stop = min(first + 32u, D); let count = stop - first;
  let size = select(count & (~count + 1u), 32u, count == 32u); // the blocks of a shorter group
  let sound = sound_group(first, stop);
  for (var apart = size / 2u; apart > 0u; apart /= 2u) {
    for (var i = first; i < stop; i++) {
      if ((((i - first) % size) & apart) == 0u) {
        let a = v[i]; let b = v[i + apart];
        v[i] = a + b;
        v[i + apart] = a - b;
      }
    }
  }
  var high = select(0.0, LOWEST, count == 32u); // padding is zeros
  var low = -high;
  for (var i = first; i < stop; i++) { high = max(high, v[i]); low = min(low, v[i]); }
  let extreme = select(low, high, high > -low);
  var best = 3.0e38;
  var bits = 0x7e00u;
  for (var k = 0u; k < 6u && sound; k++) {
    let tried = scale_bits(extreme / -DIVISORS[k], true);
    let scale = half(tried);
    var squares: array<f32, 32>;
    for (var i = first; i < stop; i++) {
      let apart = v[i] - LEVELS[code_of(v[i], scale)] * scale;
      squares[i - first] = apart * apart;
    }
    for (var apart = 16u; apart > 0u; apart /= 2u) {
      for (var i = 0u; i < apart; i++) { squares[i] += squares[i + apart]; }
    }
    if (squares[0] < best) { best = squares[0]; bits = tried; }
  }
  let scale = half(bits);
  for (var word = first / 8u; word < stop / 8u; word++) {
    var packed = 0u;
    for (var k = 0u; k < 8u && sound; k++) { packed |= code_of(v[word * 8u + k], scale) << (4u * k); }
    memory[at + word] = packed;
  }
  set_scale(place, bits);
}

const DIVISORS = array<f32, 6>(142.0, 130.0, 119.0, 110.0, 102.0, 95.0);

fn code_of(x: f32, scale: f32) -> u32 {
  let units = select(0.0, x * (1.0 / select(1.0, scale, scale != 0.0)), scale != 0.0);
  var code = 0u;
  for (var i = 0u; i < 15u; i++) { code += select(0u, 1u, units > (LEVELS[i] + LEVELS[i + 1u]) * 0.5); }
  return code;
}

// e4m3: saturated at 448, ties to even; NaN for what is not finite.
fn to_fp8(x: f32) -> u32 {
  let sign = (bitcast<u32>(x) >> 24u) & 0x80u;
  if (!finite(x)) { return sign | 0x7fu; }
  let size = min(abs(x), 448.0);
  if (size < 0.015625) { return sign | u32(round(size * 512.0)); } // units of 2^-9 below 2^-6
  let bits = bitcast<u32>(size);
  return sign | ((bits - 0x3c000000u + 0x7ffffu + ((bits >> 20u) & 1u)) >> 20u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let row = row_of(group); let head = group.x;
  if (row >= step[0]) { return; }
  let at = row * fact(0u) + fact(1u) + head * D;
  for (var i = thread; i < D; i += 64u) { v[i] = x[at + i]; }
  workgroupBarrier();
  if (NORM > 0u && !NORM_LAST) { norm(head, thread); }
  if (CLIPPED && !NORM_LAST) {
    for (var i = thread; i < D; i += 64u) { v[i] = clamp(v[i], -number(6u), number(6u)); }
    workgroupBarrier();
  }
  if (ROTATED) { rotate(row, thread); }
  if (NORM > 0u && NORM_LAST) { norm(head, thread); }
  if (CLIPPED && NORM_LAST) {
    for (var i = thread; i < D; i += 64u) { v[i] = clamp(v[i], -number(6u), number(6u)); }
    workgroupBarrier();
  }
  if (CODEC == 0u) {
    for (var i = thread; i < D; i += 64u) { memory[row * fact(2u) + fact(9u) + head * D + i] = bitcast<u32>(v[i]); }
    return;
  }
  let slot = step[step[fact(3u)] + row] * fact(8u) + head;
  if (CODEC == 1u) {
    for (var i = thread; i < D; i += 64u) { memory[slot * D + i] = bitcast<u32>(v[i]); }
  } else if (CODEC == 2u) {
    for (var i = thread; i < D / 2u; i += 64u) {
      memory[slot * (D / 2u) + i] = to_bfloat(v[2u * i]) | (to_bfloat(v[2u * i + 1u]) << 16u);
    }
  } else if (CODEC == 3u) {
    for (var i = thread; i < D / 2u; i += 64u) {
      memory[slot * (D / 2u) + i] = to_half(v[2u * i]) | (to_half(v[2u * i + 1u]) << 16u);
    }
  } else if (CODEC == 6u) {
    for (var i = thread; i < D / 4u; i += 64u) {
      memory[slot * (D / 4u) + i] = to_fp8(v[4u * i]) | (to_fp8(v[4u * i + 1u]) << 8u)
        | (to_fp8(v[4u * i + 2u]) << 16u) | (to_fp8(v[4u * i + 3u]) << 24u);
    }
  } else {
    let groups = (D + 31u) / 32u;
    for (var g = thread; g < groups; g += 64u) {
      if (CODEC == 4u) {
        store_int8(slot * (D / 4u), g * 32u, slot * groups + g);
      } else {
        store_int4(slot * (D / 8u), g * 32u, slot * groups + g);
      }
    }
  }
}
