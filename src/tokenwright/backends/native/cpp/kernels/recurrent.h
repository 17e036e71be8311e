// Kernels of recurrent layers: the short convolution, the steps of a head's state, and the gate behind it.
//
// A row follows from the one before it, in prefill as in decode. Sums over the inputs of a state run in order, one
// accumulator for each output, so that the division of columns among threads changes no bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "kernels/elementwise.h"
#include "kernels/functions.h"
#include "kernels/lanes.h"

namespace tw {
namespace TW_ISA {

// Channels [i, i + n) of all rows, n <= 16: the inputs before a row stay in registers, the taps in memory.
template <int TAPS, bool WHOLE>
TW_INLINE void convolve_channels(const Convolution& c, int64_t i, int64_t n, int64_t rows, int64_t stride, float* x,
                                 float* history) {
  const auto get = [&](const float* from) { return WHOLE ? load(from) : load(from, n); };
  const auto put = [&](float* to, F v) { WHOLE ? store(to, v) : store(to, v, n); };
  const F bias = c.bias ? get(c.bias + i) : F{};
  F before[TAPS];
#pragma GCC unroll 4
  for (int j = 0; j + 1 < TAPS; j++) before[j] = get(history + j * c.channels + i);
  for (int64_t row = 0; row < rows; row++) {
    float* const at = x + row * stride + i;
    before[TAPS - 1] = get(at);
    F total = bias;
#pragma GCC unroll 4
    for (int j = 0; j < TAPS; j++) total = fma(get(c.weight + j * c.channels + i), before[j], total);
    put(at, total);
#pragma GCC unroll 4
    for (int j = 0; j + 1 < TAPS; j++) before[j] = before[j + 1];
  }
#pragma GCC unroll 4
  for (int j = 0; j + 1 < TAPS; j++) put(history + j * c.channels + i, before[j]);
}

// The same for any number of taps: the inputs before a row move on in `history`.
static void convolve_any(const Convolution& c, int64_t i, int64_t n, int64_t rows, int64_t stride, float* x,
                         float* history) {
  float *const oldest = history + i, *const newest = oldest + (c.taps - 2) * c.channels;
  const float* const taps = c.weight + i;
  for (int64_t row = 0; row < rows; row++) {
    float* const at = x + row * stride + i;
    const F now = load(at, n);
    F total = c.bias ? load(c.bias + i, n) : F{};
    for (int64_t j = 0; j + 1 < c.taps; j++)
      total = fma(load(taps + j * c.channels, n), load(oldest + j * c.channels, n), total);
    store(at, fma(load(taps + (c.taps - 1) * c.channels, n), now, total), n);
    for (float* to = oldest; to != newest; to += c.channels) store(to, load(to + c.channels, n), n);
    store(newest, now, n);
  }
}

template <int TAPS>
static void convolve_by(const Convolution& c, int64_t rows, int64_t stride, float* x, float* history) {
  int64_t i = c.first;
  for (; i + 16 <= c.last; i += 16) convolve_channels<TAPS, true>(c, i, 16, rows, stride, x, history);
  if (i < c.last) convolve_channels<TAPS, false>(c, i, c.last - i, rows, stride, x, history);
}

static void convolve(const Convolution& c, int64_t rows, int64_t stride, float* x, float* history) {
  if (c.taps == 2) convolve_by<2>(c, rows, stride, x, history);
  if (c.taps == 3) convolve_by<3>(c, rows, stride, x, history);
  if (c.taps == 4) convolve_by<4>(c, rows, stride, x, history);
  for (int64_t i = c.first; c.taps > 4 && i < c.last; i += 16)
    convolve_any(c, i, c.last - i < 16 ? c.last - i : 16, rows, stride, x, history);
  for (int64_t row = 0; c.activated && row < rows; row++)
    activate(SILU, c.last - c.first, x + row * stride + c.first, x + row * stride + c.first);
}

// Columns [at, at + 16 N) of one state, or fewer: the last vector has n lanes. Pointers are locals of the loops over
// keys: a store through memcpy may change whatever lies in memory.
template <int N, bool WHOLE>
struct StateColumns {
  const HeadRows& s;
  int64_t at, n;

  F get(const float* x, int j) const { return WHOLE || j + 1 < N ? load(x + 16 * j) : load(x + 16 * j, n); }
  void put(float* x, int j, F v) const { WHOLE || j + 1 < N ? store(x + 16 * j, v) : store(x + 16 * j, v, n); }

  // What a row writes, from what the state has of its key.
  void subtract(int64_t row, F (&write)[N]) const {
    const F strength = all(s.strength[row]);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) write[j] = (get(s.value + row * s.stride + at, j) - write[j]) * strength;
  }

  void finish(int64_t row, const F (&mixed)[N]) const {
    const F skip = all(s.skip);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
      put(s.mixed + row * s.mixed_stride + at, j, fma(get(s.value + row * s.stride + at, j), skip, mixed[j]));
  }

  // One row that does not correct.
  void add(int64_t row) const {
    F write[N] = {}, mixed[N] = {};
    subtract(row, write);
    const int64_t keys = s.keys, columns = s.columns, own = s.decays;
    const float *key = s.key + row * s.stride, *query = s.query + row * s.stride,
                *decay = s.decay + row * s.decay_stride;
    float* state = s.state + at;
    for (int64_t k = 0; k < keys; k++, key++, query++, decay += own, state += columns) {
      const F by = all(*key), asks = all(*query), keeps = all(*decay);
      F now[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) {
        now[j] = fma(by, write[j], get(state, j) * keeps);
        mixed[j] = fma(asks, now[j], mixed[j]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) put(state, j, now[j]);
    }
    finish(row, mixed);
  }

  // One row that corrects: `write` is what the decayed state has of its key, and then of the next row's. The state has
  // decayed for the row, unless it is the first; and decays for the next one, unless it is the last.
  template <bool FIRST, bool LAST>
  void correct(int64_t row, F (&write)[N]) const {
    subtract(row, write);
    const int64_t keys = s.keys, columns = s.columns, own = s.decays;
    const int64_t next = LAST ? 0 : s.stride, next_decay = LAST ? 0 : s.decay_stride;
    const float *key = s.key + row * s.stride, *query = s.query + row * s.stride,
                *decay = s.decay + row * s.decay_stride;
    float* state = s.state + at;
    F mixed[N] = {}, found[N] = {};
    for (int64_t k = 0; k < keys; k++, key++, query++, decay += own, state += columns) {
      const F by = all(*key), asks = all(*query), keeps = all(*decay);
      const F next_key = all(key[next]), next_keeps = all(decay[next_decay]);
      F now[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) {
        now[j] = get(state, j);
        now[j] = fma(by, write[j], FIRST ? now[j] * keeps : now[j]);
        mixed[j] = fma(asks, now[j], mixed[j]);
        if (LAST) continue;
        now[j] = now[j] * next_keeps;
        found[j] = fma(now[j], next_key, found[j]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) put(state, j, now[j]);
    }
    finish(row, mixed);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) write[j] = found[j];
  }

  void correct_all() const {
    F write[N] = {};
    const float* state = s.state + at;
    for (int64_t k = 0; k < s.keys; k++, state += s.columns) {
      const F key = all(s.key[k]), keeps = all(s.decay[k * s.decays]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) write[j] = fma(get(state, j) * keeps, key, write[j]);
    }
    if (s.rows == 1) return correct<true, true>(0, write);
    correct<true, false>(0, write);
    for (int64_t row = 1; row + 1 < s.rows; row++) correct<false, false>(row, write);
    correct<false, true>(s.rows - 1, write);
  }

  void run() const {
    if (s.corrects) return correct_all();
    for (int64_t row = 0; row < s.rows; row++) add(row);
  }
};

static void step_head(const HeadRows& s) {
  int64_t at = 0;
  for (; at + 32 <= s.columns; at += 32) StateColumns<2, true>{s, at, 16}.run();  // one would wait for its own sums
  for (; at + 16 <= s.columns; at += 16) StateColumns<1, true>{s, at, 16}.run();
  if (at < s.columns) StateColumns<1, false>{s, at, s.columns - at}.run();
}

static void keep(const Keeping& by) {
  const F rate = exponential(smaller(all(89.0f), all(by.a_log)));
  for (int64_t i = 0; i < by.count; i += 16) {
    const int64_t n = by.count - i < 16 ? by.count - i : 16;
    F step = softplus(load(by.x + i, n) + (by.biases ? load(by.bias + i, n) : all(*by.bias)));
    if (by.steps) {
      step = smaller(all(by.most), larger(all(by.least), step));  // NaN stays
      store(by.steps + i, step, n);
    }
    store(by.x + i, exponential(all(0.0f) - rate * step), n);
  }
}

template <bool WHOLE>
TW_INLINE void scan_columns(const ScanStep& s, int64_t at, int64_t n) {
  const auto get = [&](const float* x) { return WHOLE ? load(x + at) : load(x + at, n); };
  const auto put = [&](float* x, F v) { WHOLE ? store(x + at, v) : store(x + at, v, n); };
  const F step = softplus(get(s.step) + get(s.bias)), value = get(s.value), write = step * value;
  F mixed = {};
  const auto update = [&](int64_t k, F decay) {
    const F now = fma(all(s.key[k]), write, get(s.state + k * s.stride) * decay);
    put(s.state + k * s.stride, now);
    mixed = fma(all(s.query[k]), now, mixed);
  };
  int64_t k = 0;
  for (; k + 4 <= s.keys; k += 4) {
    F decay[4];
    for (int64_t i = 0; i < 4; i++) decay[i] = get(s.rates + (k + i) * s.rates_stride) * step;
    exponentials(decay);
    for (int64_t i = 0; i < 4; i++) update(k + i, decay[i]);
  }
  for (; k < s.keys; k++) update(k, exponential(get(s.rates + k * s.rates_stride) * step));
  put(s.mixed, fma(value, get(s.skip), mixed));
}

static void scan(const ScanStep& s) {
  int64_t at = 0;
  for (; at + 16 <= s.columns; at += 16) scan_columns<true>(s, at, 16);
  if (at < s.columns) scan_columns<false>(s, at, s.columns - at);
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
