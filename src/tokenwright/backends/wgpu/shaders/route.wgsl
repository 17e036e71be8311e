// A router's choice for each row (`models/experts.py`): the numbers of the chosen experts, ascending, and their weights.
@group(0) @binding(2) var<storage, read> logits: array<f32>; // [T, experts (+ 1)]
@group(0) @binding(3) var<storage, read> correction: array<f32>;
@group(0) @binding(4) var<storage, read> factors: array<f32>;
@group(0) @binding(5) var<storage, read_write> chosen: array<u32>; // [T, k]
@group(0) @binding(6) var<storage, read_write> weights: array<f32>; // [T, k + 1]; the last is the shared expert's

fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(min(-x, 80.0))); }

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let row = group.x * 64u + thread;
  if (row >= step[0]) { return; }
  let at = row * fact(0u);
  var scores: array<f32, EXPERTS>;
  var ranks: array<f32, EXPERTS>;
  var most = LOWEST;
  for (var e = 0u; e < EXPERTS; e++) { scores[e] = logits[at + e] * number(1u); most = max(most, scores[e]); }
  var total = 0.0;
  for (var e = 0u; e < EXPERTS; e++) {
    scores[e] = select(exp(scores[e] - most), sigmoid(scores[e]), SIGMOID);
    total += scores[e];
  }
  for (var e = 0u; e < EXPERTS; e++) {
    if (!SIGMOID) { scores[e] /= total; }
    ranks[e] = scores[e];
    if (CORRECTED) { ranks[e] += correction[e]; }
  }
  if (GROUPS > 1u) { // only the best groups' experts stay
    const SIZE = EXPERTS / GROUPS;
    var sums: array<f32, GROUPS>;
    for (var g = 0u; g < GROUPS; g++) {
      var first = LOWEST;
      var second = LOWEST;
      for (var e = g * SIZE; e < (g + 1u) * SIZE; e++) {
        second = max(second, min(first, ranks[e]));
        first = max(first, ranks[e]);
      }
      sums[g] = first + select(0.0, second, GROUP_BEST == 2u);
    }
    for (var n = 0u; n < GROUPS - CHOSEN_GROUPS; n++) { // the lowest goes, of equal ones the last
      var worst = 0u;
      for (var g = 1u; g < GROUPS; g++) { if (sums[g] <= sums[worst]) { worst = g; } }
      sums[worst] = 3.0e38;
      for (var e = worst * SIZE; e < (worst + 1u) * SIZE; e++) { ranks[e] = LOWEST; }
    }
  }
  var taken: array<bool, EXPERTS>;
  for (var n = 0u; n < CHOSEN; n++) {
    var best = EXPERTS;
    for (var e = 0u; e < EXPERTS; e++) {
      if (!taken[e] && (best == EXPERTS || ranks[e] > ranks[min(best, EXPERTS - 1u)])) { best = e; }
    }
    taken[min(best, EXPERTS - 1u)] = true;
  }
  total = 0.0;
  for (var e = 0u; e < EXPERTS; e++) { if (taken[e]) { total += scores[e]; } }
  var n = 0u;
  for (var e = 0u; e < EXPERTS; e++) {
    if (taken[e]) {
      var weight = scores[e];
      if (RENORMALISED) { weight /= total; }
      weight *= number(2u);
      if (SCALED) { weight *= factors[e]; }
      chosen[row * CHOSEN + n] = e;
      weights[row * (CHOSEN + 1u) + n] = weight;
      n++;
    }
  }
  weights[row * (CHOSEN + 1u) + CHOSEN] = 1.0;
  if (SHARED_GATE) { weights[row * (CHOSEN + 1u) + CHOSEN] = sigmoid(logits[at + EXPERTS] * number(1u)); }
}
