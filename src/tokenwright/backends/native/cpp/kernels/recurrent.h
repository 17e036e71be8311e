// Kernels of recurrent layers: the short convolution, one step of a head's state, and the gate behind it.
//
// A row follows from the one before it, in prefill as in decode. Sums over the inputs of a state run in order, one
// accumulator for each output, so that the division of columns among threads changes no bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "kernels/elementwise.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

static void convolve(const Convolution& c, int64_t rows, int64_t stride, float* x, float* history) {
  for (int64_t i = c.first; i < c.last; i += 16) {
    const int64_t n = c.last - i < 16 ? c.last - i : 16;
    F before[MOST_TAPS], taps[MOST_TAPS];
    for (int64_t j = 0; j < c.taps; j++) taps[j] = load(c.weight + j * c.channels + i, n);
    for (int64_t j = 0; j + 1 < c.taps; j++) before[j] = load(history + j * c.channels + i, n);
    const F bias = c.bias ? load(c.bias + i, n) : F{};
    for (int64_t row = 0; row < rows; row++) {
      float* at = x + row * stride + i;
      before[c.taps - 1] = load(at, n);
      F total = bias;
      for (int64_t j = 0; j < c.taps; j++) total = fma(taps[j], before[j], total);
      for (int64_t j = 0; j + 1 < c.taps; j++) before[j] = before[j + 1];
      store(at, c.activated ? activated(SILU, total) : total, n);
    }
    for (int64_t j = 0; j + 1 < c.taps; j++) store(history + j * c.channels + i, before[j], n);
  }
}

// N vectors of columns of one state, or N - 1 and some lanes of the last.
template <int N, bool WHOLE>
TW_INLINE void step_columns(const HeadStep& s, int64_t at, int64_t n) {
  const auto get = [&](const float* x, int j) { return WHOLE || j + 1 < N ? load(x + 16 * j) : load(x + 16 * j, n); };
  const auto put = [&](float* x, int j, F v) { WHOLE || j + 1 < N ? store(x + 16 * j, v) : store(x + 16 * j, v, n); };
  float* const state = s.state + at;
  const float* const value = s.value + at;
  F write[N] = {};
  if (s.corrects)
    for (int64_t k = 0; k < s.keys; k++) {
      const F key = all(s.key[k]), decay = all(s.decay[k * s.decays]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) write[j] = fma(get(state + k * s.stride, j) * decay, key, write[j]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) write[j] = (get(value, j) - write[j]) * all(s.strength);
  F mixed[N] = {};
  for (int64_t k = 0; k < s.keys; k++) {
    const F key = all(s.key[k]), query = all(s.query[k]), decay = all(s.decay[k * s.decays]);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      const F now = fma(key, write[j], get(state + k * s.stride, j) * decay);
      put(state + k * s.stride, j, now);
      mixed[j] = fma(query, now, mixed[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) put(s.mixed + at, j, fma(get(value, j), all(s.skip), mixed[j]));
}

static void step_head(const HeadStep& s) {
  int64_t at = 0;
  for (; at + 64 <= s.columns; at += 64) step_columns<4, true>(s, at, 16);
  for (; at + 16 <= s.columns; at += 16) step_columns<1, true>(s, at, 16);
  if (at < s.columns) step_columns<1, false>(s, at, s.columns - at);
}

// x = x scale / sqrt(sum of squares + 1e-6): a vector of length `scale`.
static void unit(int64_t size, float scale, float* x) {
  F total = {};
  for (int64_t i = 0; i < size; i += 16) {
    const F v = load(x + i, size - i < 16 ? size - i : 16);
    total = fma(v, v, total);
  }
  const float factor = 1.0f / sqrtf(sum(total) + 1e-6f);
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i < 16 ? size - i : 16;
    store(x + i, load(x + i, n) * all(factor) * all(scale), n);
  }
}

static void gate_by(Gate kind, int64_t size, const float* gate, float* x) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i < 16 ? size - i : 16;
    const F by = load(gate + i, n);
    store(x + i, load(x + i, n) * (kind == SILU_GATE ? activated(SILU, by) : sigmoid(by)), n);
  }
}

}  // namespace TW_ISA
}  // namespace tw
