// Paged attention of one query head of one row: softmax(scoring(q k)) v over the positions that the row reads.
//
// Blocks of 64 absolute positions are met in order, so that a row's sums do not depend on the chunk it is in. Thread t
// scores the t-th position of a block; then each thread adds the values of its dimensions. K and V of int4 are the
// Hadamard matrix times the row: so is the query here, and the result is multiplied by it at the end.
@group(0) @binding(2) var<storage, read> queries: array<f32>; // [T, H, D]; with sinks [T, 2, H, D], also those for them
@group(0) @binding(3) var<storage, read> keys: array<u32>;
@group(0) @binding(4) var<storage, read> key_scales: array<u32>;
@group(0) @binding(5) var<storage, read> values: array<u32>;
@group(0) @binding(6) var<storage, read> value_scales: array<u32>;
@group(0) @binding(7) var<storage, read> gates: array<f32>;
@group(0) @binding(8) var<storage, read_write> mixed: array<f32>; // [T, H, D]

const LEARNED_AT = 7u; // the facts from here on: of each head the logit of one more key, whose value is zero
const BLOCK = 64u;
const GROUPS = (D + 31u) / 32u;

var<workgroup> q: array<f32, D>;
var<workgroup> sink_q: array<f32, D>;
var<workgroup> result: array<f32, D>;
var<workgroup> scores: array<f32, BLOCK>;
var<workgroup> weights: array<f32, BLOCK>;
var<workgroup> slots: array<u32, BLOCK>;

fn signed(word: u32, k: u32) -> f32 { return f32(i32(word << (24u - 8u * k)) >> 24u); }

fn from_fp8(byte: u32) -> f32 {
  if ((byte & 0x7fu) == 0x7fu) { return poison(); }
  let exponent = (byte >> 3u) & 15u;
  var size = f32(byte & 7u) * 0.001953125;
  if (exponent > 0u) { size = bitcast<f32>(((byte & 0x7fu) << 20u) + 0x3c000000u); }
  return select(size, -size, (byte & 0x80u) > 0u);
}

fn key_scale(slot: u32, group: u32) -> f32 {
  let place = slot * GROUPS + group;
  return half(key_scales[place / 2u] >> (16u * (place & 1u)));
}

fn value_scale(slot: u32, group: u32) -> f32 {
  let place = slot * GROUPS + group;
  return half(value_scales[place / 2u] >> (16u * (place & 1u)));
}

// Number i of a value.
fn value(slot: u32, i: u32) -> f32 {
  switch V_CODEC {
    case 1u: { return bitcast<f32>(values[slot * D + i]); }
    case 2u: { return bfloat((values[slot * (D / 2u) + i / 2u] >> (16u * (i & 1u))) & 0xffffu); }
    case 3u: { return half(values[slot * (D / 2u) + i / 2u] >> (16u * (i & 1u))); }
    case 4u: { return signed(values[slot * (D / 4u) + i / 4u], i & 3u) * value_scale(slot, i / 32u); }
    case 5u: {
      let code = (values[slot * (D / 8u) + i / 8u] >> (4u * (i & 7u))) & 15u;
      return LEVELS[code] * (value_scale(slot, i / 32u) / f32(block_of(i)));
    }
    default: { return from_fp8((values[slot * (D / 4u) + i / 4u] >> (8u * (i & 3u))) & 0xffu); }
  }
}

// The size of the Hadamard matrix of number i: 32, but in a shorter last group its largest power of two.
fn block_of(i: u32) -> u32 {
  let rest = D % 32u;
  return select(32u, rest & (~rest + 1u), i >= D - rest);
}

fn query(i: u32, sink: bool) -> f32 {
  if (SINKS > 0u) { return select(q[i], sink_q[i], sink); }
  return q[i];
}

// scoring(q k) of the key in a slot; sink: whether it is one of the sinks.
fn score(slot: u32, sink: bool) -> f32 {
  var sum = 0.0;
  if (K_CODEC == 1u) {
    for (var i = 0u; i < D; i++) { sum = fma(query(i, sink), bitcast<f32>(keys[slot * D + i]), sum); }
  } else if (K_CODEC < 4u) {
    for (var i = 0u; i < D; i += 2u) {
      let word = keys[slot * (D / 2u) + i / 2u];
      let low = select(half(word), bfloat(word & 0xffffu), K_CODEC == 2u);
      let high = select(half(word >> 16u), bitcast<f32>(word & 0xffff0000u), K_CODEC == 2u);
      sum = fma(query(i + 1u, sink), high, fma(query(i, sink), low, sum));
    }
  } else if (K_CODEC == 6u) {
    for (var i = 0u; i < D; i += 4u) {
      let word = keys[slot * (D / 4u) + i / 4u];
      for (var k = 0u; k < 4u; k++) { sum = fma(query(i + k, sink), from_fp8((word >> (8u * k)) & 0xffu), sum); }
    }
  } else {
    for (var group = 0u; group < GROUPS; group++) {
      var part = 0.0;
      let stop = min(group * 32u + 32u, D);
      if (K_CODEC == 4u) {
        for (var i = group * 32u; i < stop; i += 4u) {
          let word = keys[slot * (D / 4u) + i / 4u];
          for (var k = 0u; k < 4u; k++) { part = fma(query(i + k, sink), signed(word, k), part); }
        }
        sum = fma(part, key_scale(slot, group), sum);
      } else {
        for (var i = group * 32u; i < stop; i += 8u) {
          let word = keys[slot * (D / 8u) + i / 8u];
          for (var k = 0u; k < 8u; k++) { part = fma(query(i + k, sink), LEVELS[(word >> (4u * k)) & 15u], part); }
        }
        sum = fma(part, key_scale(slot, group) / f32(block_of(group * 32u)), sum);
      }
    }
  }
  sum *= number(0u);
  if (CAPPED) { sum = number(1u) * tanh(clamp(sum / number(1u), -10.0, 10.0)); }
  return sum;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let row = row_of(group); let head = group.x;
  if (row >= step[0]) { return; }
  let page_size = fact(2u); let kv_heads = fact(6u);
  let position = step[step[4] + row]; let table = step[step[fact(3u)] + row];
  let kv_head = head / (HEADS / kv_heads);
  let at = (row * HEADS + head) * D;
  for (var i = thread; i < D; i += 64u) {
    if (SINKS > 0u) {
      q[i] = queries[at + row * HEADS * D + i];
      sink_q[i] = queries[at + (row + 1u) * HEADS * D + i];
    } else {
      q[i] = queries[at + i];
    }
  }
  workgroupBarrier();
  if (K_CODEC == 5u) {
    for (var apart = 16u; apart > 0u; apart /= 2u) {
      for (var i = thread; i < D; i += 64u) {
        if (apart < block_of(i) && (i & apart) == 0u) {
          let a = q[i]; let b = q[i + apart];
          q[i] = a + b;
          q[i + apart] = a - b;
          if (SINKS > 0u) {
            let c = sink_q[i]; let d = sink_q[i + apart];
            sink_q[i] = c + d;
            sink_q[i + apart] = c - d;
          }
        }
      }
      workgroupBarrier();
    }
  }
  let low = select(0u, position + 1u - WINDOW, WINDOW > 0u && position >= WINDOW); // the window's first position
  var most = LOWEST;
  var total = 0.0;
  var sums: array<f32, (D + 63u) / 64u>;
  var block = select(low / BLOCK, 0u, SINKS > 0u);
  loop {
    if (block * BLOCK > position) { break; }
    let place = block * BLOCK + thread;
    let stop = min(BLOCK, position + 1u - block * BLOCK); // behind it no position is read
    let reads = place <= position && (place >= low || place < SINKS);
    scores[thread] = LOWEST;
    slots[thread] = 0xffffffffu;
    if (reads) {
      let slot = (step[table + place / page_size] * page_size + place % page_size) * kv_heads + kv_head;
      slots[thread] = slot;
      scores[thread] = score(slot, place < SINKS);
    }
    workgroupBarrier();
    var highest = most;
    for (var j = 0u; j < stop; j++) { highest = max(highest, scores[j]); }
    let faded = exp(most - highest);
    weights[thread] = select(0.0, exp(scores[thread] - highest), reads);
    most = highest;
    workgroupBarrier();
    total *= faded;
    for (var d = 0u; d < (D + 63u) / 64u; d++) { sums[d] *= faded; }
    for (var j = 0u; j < stop; j++) {
      if (slots[j] != 0xffffffffu) {
        total += weights[j];
        for (var d = 0u; d < (D + 63u) / 64u; d++) {
          let i = d * 64u + thread;
          if (i < D) { sums[d] = fma(weights[j], value(slots[j], i), sums[d]); }
        }
      }
    }
    workgroupBarrier();
    block++;
    if (block * BLOCK >= SINKS) { block = max(block, low / BLOCK); }
  }
  var faded = 1.0;
  if (LEARNED) {
    let learned = number(LEARNED_AT + head);
    let highest = max(most, learned);
    faded = exp(most - highest);
    total = total * faded + exp(learned - highest);
  }
  for (var d = 0u; d < (D + 63u) / 64u; d++) {
    let i = d * 64u + thread;
    if (i < D) { result[i] = sums[d] * faded / total; }
  }
  workgroupBarrier();
  if (V_CODEC == 5u) {
    for (var apart = 16u; apart > 0u; apart /= 2u) {
      for (var i = thread; i < D; i += 64u) {
        if (apart < block_of(i) && (i & apart) == 0u) {
          let a = result[i]; let b = result[i + apart];
          result[i] = a + b;
          result[i + apart] = a - b;
        }
      }
      workgroupBarrier();
    }
  }
  for (var i = thread; i < D; i += 64u) {
    var out = result[i];
    if (GATED) { out /= 1.0 + exp(min(-gates[row * fact(4u) + fact(5u) + head * D + i], 80.0)); }
    mixed[at + i] = out;
  }
}
