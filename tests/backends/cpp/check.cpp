// Calls the kernels of a library and prints what they come to, to compare two processors: scripts/aarch64.
//
//   check LIBRARY [ISA]  a line for each result: its name, and its numbers; whole ones after '=', others after '~'
//
// Inputs come from a generator in whole numbers, so that they are the same everywhere. ISA is `portable` by default.
#ifndef __wasm__
#include <dlfcn.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels.h"
#include "step/step.h"

using namespace tw;

namespace {

using Floats = std::vector<float>;

void* library;
Workspace* workspace;

template <typename Function>
Function* found(const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) {
    fprintf(stderr, "there is no %s in the library\n", name);
    exit(2);
  }
  return (Function*)symbol;
}

Floats noise(int64_t count, uint64_t seed, float size = 1) {  // from -size to size
  Floats x(count);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (float& one : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    one = size * ((float)(int32_t)(state >> 40) / 8388608.0f - 1.0f);
  }
  return x;
}

void tell(const std::string& name, const Floats& x) {
  printf("%s ~", name.c_str());
  for (float one : x) printf(" %a", (double)one);
  printf("\n");
}

template <typename Number>
void tell_whole(const std::string& name, const std::vector<Number>& x) {
  printf("%s =", name.c_str());
  for (Number one : x) printf(" %lld", (long long)one);
  printf("\n");
}

struct Weights {  // of a format: how many inputs a slab has, its bytes, and the inputs that share a scale
  const char* name;
  int64_t format, inputs, bytes, group;
};
const Weights WEIGHTS[] = {{"float32", F32, 16, 1024, 0},   {"bfloat16", BF16, 32, 1024, 0},
                           {"float16", F16, 32, 1024, 0},   {"int8:32", INT8, 64, 1024, 32},
                           {"int8:64", INT8, 64, 1024, 64}, {"int4:32", INT4, 64, 512, 32},
                           {"int4:64", INT4, 64, 512, 64}};

void linears(const Kernels* k) {
  auto pack = found<int64_t(const Kernels*, const Matrix*, int64_t, const void*, int64_t, int64_t, int64_t, int64_t)>(
      "tw_pack");
  auto linear =
      found<int64_t(const Kernels*, Workspace*, const Matrix*, int64_t, const float*, float*, int64_t)>("tw_linear");
  const int64_t out = 37, in = 150;
  const Floats w = noise(out * in, 1), bias = noise(out, 2);
  for (const Weights& form : WEIGHTS) {
    const int64_t blocks = (out + LANES - 1) / LANES, slabs = (in + form.inputs - 1) / form.inputs;
    std::vector<uint8_t> codes(blocks * slabs * form.bytes);
    std::vector<uint16_t> scales(form.group ? blocks * slabs * form.inputs / form.group * LANES : 0);
    const Matrix m{out, in, form.format, form.group, codes.data(), scales.data(), bias.data()};
    const int64_t bad = pack(k, &m, F32, w.data(), in, 0, out, 1);
    tell_whole(std::string("codes ") + form.name, codes);
    tell_whole(std::string("scales ") + form.name, scales);
    tell_whole(std::string("not finite ") + form.name, std::vector<int64_t>{bad});
    for (int64_t rows : {1, 3, 40}) {
      const Floats x = noise(rows * in, 3, 4);
      Floats y(rows * out);
      if (linear(k, workspace, &m, rows, x.data(), y.data(), 2)) exit(3);
      tell(std::string("linear ") + form.name + " of " + std::to_string(rows), y);
    }
  }
}

struct Blocks {  // a form of weights that files have
  const char* name;
  int64_t format, group, super, minima;
};
const Blocks BLOCKS[] = {{"int4/256+min", INT4, 32, 256, 1}, {"int5", INT5, 32, 0, 0},
                         {"int5+min", INT5, 32, 0, 1},       {"int5/256+min", INT5, 32, 256, 1},
                         {"int6/256", INT6, 16, 256, 0},     {"int6/256+min", INT6, 16, 256, 1},
                         {"int2/128", INT2, 64, 128, 0},     {"int1/128", INT1, 64, 128, 0},
                         {"table", TABLE4, 32, 0, 0},        {"table/256", TABLE4, 16, 256, 0}};

void linears_of_blocks(const Kernels* k) {
  auto linear =
      found<int64_t(const Kernels*, Workspace*, const Matrix*, int64_t, const float*, float*, int64_t)>("tw_linear");
  const int64_t out = 37, in = 512, blocks = (out + LANES - 1) / LANES;
  for (const Blocks& form : BLOCKS) {
    Matrix m{out, in, form.format, form.group, nullptr, nullptr, nullptr, form.super, form.minima};
    const Floats random = noise(blocks * in / 64 * slab_bytes(form.format), 9);
    std::vector<uint8_t> codes(random.size());
    for (size_t i = 0; i < codes.size(); i++) codes[i] = (uint8_t)(int)(256 + 255 * random[i]);
    std::vector<uint16_t> scales(blocks * block_scale_bytes(m, in / 64) / 2);
    for (size_t i = 0; i < scales.size(); i++) scales[i] = (uint16_t)(0x2000 + 37 * i % 0x800);  // float16 below 1
    uint8_t table[64];
    for (int i = 0; i < 64; i++) table[i] = (uint8_t)(17 * (i % 16));
    m.codes = codes.data();
    m.scales = scales.data();
    m.table = table;
    for (int64_t rows : {1, 3, 40}) {
      const Floats x = noise(rows * in, 3, 4);
      Floats y(rows * out);
      if (linear(k, workspace, &m, rows, x.data(), y.data(), 2)) exit(3);
      tell(std::string("linear ") + form.name + " of " + std::to_string(rows), y);
    }
  }
}

void row_by_row(const Kernels* k) {
  const int64_t rows = 3, size = 101;
  const Floats x = noise(rows * size, 4, 6), weight = noise(size, 5), bias = noise(size, 6);
  Floats y(rows * size);
  auto norm = found<void(const Kernels*, const Norm*, int64_t, int64_t, const float*, float*)>("tw_norm");
  const Norm rms{weight.data(), nullptr, 1e-5}, layer{weight.data(), bias.data(), 1e-5};
  norm(k, &rms, rows, size, x.data(), y.data());
  tell("rms norm", y);
  norm(k, &layer, rows, size, x.data(), y.data());
  tell("layer norm", y);

  auto activate = found<void(const Kernels*, int64_t, int64_t, const float*, float*)>("tw_activate");
  auto gated = found<void(const Kernels*, int64_t, int64_t, int64_t, const float*, float*)>("tw_gated");
  for (int64_t kind : {SILU, GELU, GELU_TANH, RELU}) {
    activate(k, kind, rows * size, x.data(), y.data());
    tell("activation " + std::to_string(kind), y);
    Floats half(rows * 50);
    gated(k, kind, rows, 50, x.data(), half.data());
    tell("gated " + std::to_string(kind), half);
  }

  auto rotate = found<void(const Kernels*, int64_t, int64_t, int64_t, const float*, const float*, float*)>("tw_rotate");
  const Floats turns = noise(rows * 20, 7), heads = noise(rows * 4 * 20, 8);
  Floats turned(heads.size());
  rotate(k, rows, 4, 20, turns.data(), heads.data(), turned.data());
  tell("rotate", turned);

  auto summarise =
      found<int64_t(const Kernels*, Workspace*, int64_t, int64_t, const float*, int64_t*, double*, int64_t)>(
          "tw_summarise");
  for (int64_t n : {1, 16, 301}) {
    int64_t best;
    double log_total;
    if (summarise(k, workspace, 1, n, x.data(), &best, &log_total, 2)) exit(3);
    tell_whole("largest of " + std::to_string(n), std::vector<int64_t>{best});
    tell("sum of " + std::to_string(n), {(float)log_total});
  }
}

struct Kept {  // a cache's format: bytes of a head of 40 numbers, and its scales
  const char* name;
  int64_t format, bytes, scales;
};
const Kept KEPT[] = {{"float32", F32, 160, 0}, {"bfloat16", BF16, 80, 0}, {"float16", F16, 80, 0},
                     {"int8", INT8, 40, 2},    {"int4", INT4, 20, 2},     {"fp8", FP8, 40, 0}};

void attention(const Kernels* k) {
  auto store_kv = found<void(const Kernels*, const KVLayer*, const tw::Heads*, int64_t, const ChunkRows*, int64_t,
                             const float*, const float*)>("tw_store_kv");
  auto attend = found<int64_t(const Kernels*, Workspace*, const KVLayer*, const tw::Heads*, int64_t, const ChunkRows*,
                              int64_t, const Queries*, int64_t)>("tw_attend");
  const int64_t page_size = 16, pages = 6, size = 40, rows = 90;
  const tw::Heads heads{4, 2, size, size, 0.2, 0};
  const int32_t table[pages] = {4, 0, 5, 2, 1, 3};
  const int32_t* tables[] = {table};
  const ChunkRows chunk{0, rows, 0, nullptr, tables};
  const Floats keys = noise(rows * 2 * size, 9, 3), values = noise(rows * 2 * size, 10, 3),
               q = noise(rows * 4 * size, 11, 3);
  for (const Kept& form : KEPT)
    for (int64_t window : {0, 20}) {
      std::vector<uint8_t> codes[2];
      std::vector<uint16_t> scales[2];
      KVTensor sides[2];
      for (int i = 0; i < 2; i++) {
        codes[i].resize(pages * page_size * 2 * form.bytes);
        scales[i].resize(pages * page_size * 2 * form.scales);
        sides[i] = KVTensor{form.format, codes[i].data(), form.scales ? scales[i].data() : nullptr};
      }
      const KVLayer layer{1, {Part{0, -1, 0, 0, sides[0], sides[1]}, Part{}}, window, window ? 3 : 0, nullptr};
      store_kv(k, &layer, &heads, 1, &chunk, page_size, keys.data(), values.data());
      Floats out(rows * 4 * size);
      const Queries queries{0, 0, 0, 0, q.data(), nullptr, out.data(), 4 * size, 4 * size, 4 * size};
      if (attend(k, workspace, &layer, &heads, 1, &chunk, page_size, &queries, 2)) exit(3);
      const std::string name = std::string(form.name) + ", window " + std::to_string(window);
      tell_whole("kept K " + name, codes[0]);
      tell_whole("kept V " + name, codes[1]);
      tell_whole("kept scales " + name, scales[0]);
      tell("attention " + name, out);
    }
}

}  // namespace

int main(int count, char** words) {
  library = count == 2 || count == 3 ? dlopen(words[1], RTLD_NOW) : nullptr;
  if (!library) {
    fprintf(stderr, "usage: check LIBRARY [ISA]; %s\n", count < 2 || count > 3 ? "one library" : dlerror());
    return 2;
  }
  const char* isa = count == 3 ? words[2] : "portable";
  const Kernels* k = found<const Kernels*(const char*)>("tw_kernels")(isa);
  if (!k) {
    fprintf(stderr, "this processor, or the library, has no %s\n", isa);
    return 2;
  }
  workspace = found<Workspace*()>("tw_workspace_new")();
  linears(k);
  linears_of_blocks(k);
  row_by_row(k);
  attention(k);
  found<void(Workspace*)>("tw_workspace_free")(workspace);
}
