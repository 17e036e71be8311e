// Four rows at a time, for `linear.wgsl`: the same arithmetic for each.
const TILE = 4u;
alias Places = vec4u;
alias Floats = vec4f;
alias Ints = vec4i;

fn words(at: Places, i: u32) -> vec4u { return vec4u(x[at.x + i], x[at.y + i], x[at.z + i], x[at.w + i]); }
fn floats(at: Places, i: u32) -> Floats { return bitcast<vec4f>(words(at, i)); }
fn ints(at: Places, i: u32) -> Ints { return bitcast<vec4i>(words(at, i)); }
fn dots(four: u32, at: Places, i: u32) -> Ints {
  return vec4i(
    dot4I8Packed(four, x[at.x + i]), dot4I8Packed(four, x[at.y + i]), dot4I8Packed(four, x[at.z + i]),
    dot4I8Packed(four, x[at.w + i]),
  );
}
fn place_of(first: u32, last: u32, divisor: u32, stride: u32) -> Places {
  return min(vec4u(first, first + 1u, first + 2u, first + 3u), vec4u(last)) / divisor * stride;
}
fn number_of(all: Floats, row: u32) -> f32 { return all[row]; }
