// hidden [n, m] = act(factor gates) times the values, or act(x) where there are no gates.
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> hidden: array<f32>;

fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(min(-x, 80.0))); }

fn tangent(x: f32) -> f32 { return tanh(clamp(x, -10.0, 10.0)); } // tanh(10) rounds to 1

// erf(x): Abramowitz and Stegun 7.1.26 has five digits only; this is the series below 2, and a continued fraction above.
fn erf(x: f32) -> f32 {
  let size = min(abs(x), 4.0); let square = size * size;
  var value = 0.0;
  if (size < 2.0) {
    var term = size;
    value = size;
    for (var n = 1; n < 24; n++) {
      term *= -square / f32(n);
      value += term / f32(2 * n + 1);
    }
    value *= 1.1283791671;
  } else {
    var tail = size;
    for (var n = 24; n > 0; n--) { tail = size + f32(n) * 0.5 / tail; }
    value = 1.0 - exp(-square) * 0.5641895835 / tail;
  }
  return select(value, -value, x < 0.0);
}

fn act(x: f32) -> f32 {
  switch ACT {
    case 0u: { return x * sigmoid(x); } // silu
    case 1u: { return 0.5 * x * (1.0 + erf(x * 0.70710678)); } // gelu
    case 2u: { return 0.5 * x * (1.0 + tangent(0.7978845608 * (x + 0.044715 * x * x * x))); } // gelu_tanh
    case 3u: { return max(x, 0.0); } // relu
    case 4u: { let above = max(x, 0.0); return above * above; } // relu2
    default: { // xielu, arXiv 2411.13010
      let low = min(x, 0.0); let high = max(x, 0.0);
      var beyond = exp(low) - 1.0 - low; // e^x - 1 - x, by its series where digits would be lost
      if (low > -0.25) { beyond = low * low * (0.5 + low * (1.0 / 6.0 + low * (1.0 / 24.0 + low * (1.0 / 120.0 + low / 720.0)))); }
      return number(7u) * high * high + number(8u) * beyond + number(9u) * x;
    }
  }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let m = fact(0u);
  let row = row_of(group); let i = group.x * 64u + thread;
  if (row >= step[fact(5u)] * fact(6u) || i >= m) { return; }
  if (GATED) {
    let gate = x[row * 2u * m + i] * number(3u); let value = x[row * 2u * m + m + i] * number(4u);
    if (ACT == 6u) { // gpt-oss
      let low = min(gate, 7.0);
      hidden[row * m + i] = (clamp(value, -7.0, 7.0) + 1.0) * (low * sigmoid(1.702 * low));
    } else {
      hidden[row * m + i] = act(gate) * value;
    }
  } else {
    hidden[row * m + i] = act(x[row * m + i] * number(3u));
  }
}
