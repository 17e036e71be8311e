// One row at a time, for `linear.wgsl`.
const TILE = 1u;
alias Places = u32;
alias Floats = f32;
alias Ints = i32;

fn words(at: Places, i: u32) -> u32 { return x[at + i]; }
fn floats(at: Places, i: u32) -> Floats { return bitcast<f32>(x[at + i]); }
fn ints(at: Places, i: u32) -> Ints { return bitcast<i32>(x[at + i]); }
fn dots(four: u32, at: Places, i: u32) -> Ints { return dot4I8Packed(four, x[at + i]); }
fn place_of(first: u32, last: u32, divisor: u32, stride: u32) -> Places { return min(first, last) / divisor * stride; }
fn number_of(all: Floats, row: u32) -> f32 { return all; }
