// Shared by all kernels: it is put before each. A kernel's constants stand before it (`gpu.py`).
//
// step: the batch of this step. Its first words are counts and the places of the arrays behind them (`dispatches.py`).
// facts: sizes of this dispatch, which do not change; a float is its bits.
@group(0) @binding(0) var<storage, read> step: array<u32>;
@group(0) @binding(1) var<uniform> facts: array<vec4u, 64>;

const LOWEST = -3.0e38; // below every score; kernels compute with no infinity, which a driver may not have

fn fact(i: u32) -> u32 { return facts[i / 4u][i % 4u]; }

fn number(i: u32) -> f32 { return bitcast<f32>(fact(i)); }

fn finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

// A NaN that no compiler removes: its bits come from memory.
fn poison() -> f32 { return bitcast<f32>(0x7fc00000u | (step[0] & 1u)); }

// Row numbers go over two dimensions of the grid where one has too few.
fn row_of(group: vec3u) -> u32 { return group.y + group.z * 32768u; }

fn bfloat(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }

fn half(bits: u32) -> f32 { return unpack2x16float(bits & 0xffffu).x; }

fn to_bfloat(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
  return select((bits >> 16u) | 0x40u, rounded, finite(x) || (bits & 0x7fffffu) == 0u);
}

// The nearest float16, ties to even; `pack2x16float` may round otherwise.
fn to_half(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  let sign = (bits >> 16u) & 0x8000u;
  let size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) { return sign | 0x7e00u; }
  if (size >= 0x477ff000u) { return sign | 0x7c00u; }
  if (size < 0x38800000u) { // below the normal numbers: units of 2^-24
    return sign | u32(round(bitcast<f32>(size) * 16777216.0));
  }
  return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u);
}
