// Kernels over one row at a time: norms, activations, the summary of its logits.
#pragma once

#include <cmath>
#include <cstdint>

#include "api.h"
#include "kernels/functions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Sums over a row: 16 lanes in order, then a tree reduction of the lanes.
static float mean_of_squares(int64_t size, const float* x, float center) {
  F total = {};
  const F middle = all(center);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    const F v = load(x + i) - middle;
    total = fma(v, v, total);
  }
  float rest = 0;
  for (; i < size; i++) rest = fma(x[i] - center, x[i] - center, rest);
  return (sum(total) + rest) / (float)size;
}

static float mean(int64_t size, const float* x) {
  F total = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) total = total + load(x + i);
  float rest = 0;
  for (; i < size; i++) rest += x[i];
  return (sum(total) + rest) / (float)size;
}

static void norm(const Norm& by, int64_t size, const float* x, float* y) {
  const float middle = by.bias ? mean(size, x) : 0.0f;
  const float factor = 1.0f / sqrtf(mean_of_squares(size, x, middle) + (float)by.eps);
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i < 16 ? size - i : 16;
    F v = (load(x + i, n) - all(middle)) * all(factor);
    v = by.bias ? fma(v, load(by.weight + i, n), load(by.bias + i, n)) : v * load(by.weight + i, n);
    store(y + i, v, n);
  }
}

// 0 below -88.4, where e^-x overflows to infinity: so that x * sigmoid(x) is 0 there for every finite x.
TW_INLINE F sigmoid(F x) { return all(1.0f) / (all(1.0f) + exponential(smaller(all(0.0f) - x, all(89.0f)))); }

TW_INLINE F activated(int64_t activation, F x) {
  if (activation == SILU) return x * sigmoid(x);
  if (activation == GELU_TANH) {
    // x (1 + tanh(u)) / 2 is x sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    const F cubic = fma(x * x, x * all(0.044715f), x);
    return x * sigmoid(cubic * all(1.5957691216f));
  }
  if (activation == QUICK_GELU) return x * sigmoid(x * all(1.702f));
  if (activation == RELU) return larger(all(0.0f), x);  // NaN stays NaN
  if (activation == RELU2) {
    const F positive = larger(all(0.0f), x);
    return positive * positive;
  }
  return all(0.5f) * x * (all(1.0f) + error_function(x * all(0.70710678f)));
}

static void activate(int64_t activation, int64_t size, const float* x, float* y) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i < 16 ? size - i : 16;
    store(y + i, activated(activation, load(x + i, n)), n);
  }
}

// xIELU, which learns two curvatures, for positive and for negative numbers: facts are these and its slope at 0.
static void xielu(const float* facts, int64_t size, const float* x, float* y) {
  const F above = all(facts[0]), below = all(facts[1]), slope = all(facts[2]), zero = {};
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i < 16 ? size - i : 16;
    const F v = load(x + i, n), high = larger(zero, v), low = smaller(zero, v);
    const F curved = above * (high * high) + below * (exponential(low) - all(1.0f) - low);
    store(y + i, fma(slope, v, curved), n);
  }
}

// (value + 1) gate sigmoid(1.702 gate), the gate at most 7 and the value from -7 to 7.
TW_INLINE F clamped_swiglu(F gate, F value) {
  const F limit = all(7.0f), low = all(-7.0f);
  gate = smaller(limit, gate);
  value = larger(low, smaller(limit, value));
  return (value + all(1.0f)) * (gate * sigmoid(gate * all(1.702f)));
}

static void gated(int64_t activation, int64_t size, const float* x, float* y) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i < 16 ? size - i : 16;
    if (activation == CLAMPED_SWIGLU) {
      store(y + i, clamped_swiglu(load(x + i, n), load(x + size + i, n)), n);
      continue;
    }
    store(y + i, activated(activation, load(x + i, n)) * load(x + size + i, n), n);
  }
}

static void soft_cap(double cap, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t some = n - i < 16 ? n - i : 16;
    store(x + i, soft_capped(load(x + i, some), (float)cap), some);
  }
}

// Of x [n]: the argmax, the lowest index among equals (0 if there is none), the maximum, and sum(exp(x - maximum)).
static void summary(int64_t n, const float* x, int64_t* index, float* most, double* total) {
  constexpr int64_t stretch = 128;
  float high = -INFINITY, nothing = 0;  // `nothing` becomes NaN if some x is not finite, which `>` misses
  int64_t found = 0;                    // the start of the stretch with the maximum
  F zero = {};
  for (int64_t i = 0; i < n; i += stretch) {
    const int64_t end = i + stretch < n ? i + stretch : n;
    F best = all(-INFINITY);
    int64_t at = i;
    for (; at + 16 <= end; at += 16) {
      const F v = load(x + at);
      best = larger(v, best);
      zero = fma(v, all(0.0f), zero);
    }
    float here = largest(best);
    for (; at < end; at++) {
      here = x[at] > here ? x[at] : here;
      nothing += x[at] * 0.0f;
    }
    if (here > high) {
      high = here;
      found = i;
    }
  }
  nothing += sum(zero);
  *most = high;
  *index = 0;
  for (int64_t i = found; i < n; i++)
    if (x[i] == high) {
      *index = i;
      break;
    }
  double all_mass = 0;
  int64_t i = 0;
  while (i + 16 <= n) {
    F mass = {};
    for (int k = 0; k < 8 && i + 16 <= n; k++, i += 16) mass = mass + exponential(load(x + i) - all(high));
    all_mass += sum(mass);
  }
  if (i < n) all_mass += sum(only(exponential(load(x + i, n - i) - all(high)), 0, {0, n - i}, 0.0f));
  *total = nothing == 0.0f ? all_mass : NAN;
}

static double entropy(int64_t n, const float* x, double total) {
  constexpr float least = -100.0f;  // the logarithm of a probability that counts for nothing
  double found = 0;
  for (int64_t i = 0; i < n;) {
    F sum_here = {};
    for (int k = 0; k < 8 && i < n; k++, i += 16) {
      const F logs = larger(load(x + i, n - i < 16 ? n - i : 16) - all((float)total), all(least));
      F masses = exponential(logs);
      if (n - i < 16) masses = only(masses, 0, {0, n - i}, 0.0f);
      sum_here = fma(masses, logs, sum_here);
    }
    found -= sum(sum_here);
  }
  return found;
}

}  // namespace TW_ISA
}  // namespace tw
