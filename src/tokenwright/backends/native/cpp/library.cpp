// The C functions that Python calls. A function that may run out of memory reports it in its result; none throws.
#include <algorithm>
#include <cstring>
#include <new>

#include "kernels.h"
#include "ops/attention.h"
#include "ops/ops.h"
#include "step/expert_pool.h"
#include "step/page_file.h"
#include "step/ranks.h"
#include "step/step.h"
#include "threads/pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__wasm_relaxed_simd__)
#include <wasm_simd128.h>
#endif

using namespace tw;

namespace {

#if defined(__x86_64__)
// The processor's features and the registers that the system saves. __builtin_cpu_supports asks the compiler's runtime,
// and that of Zig, which compiles the wheels, denies every feature.
struct Processor {
  unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0, eax71 = 0;  // of leaf 7 also subleaf 1
  unsigned saved = 0;                                          // XCR0

  Processor() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned osxsave = 1u << 27;
    if (!__get_cpuid(1, &a, &b, &ecx1, &d) || !(ecx1 & osxsave)) return;
    unsigned high = 0;
    asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) ebx7 = b, ecx7 = c, edx7 = d;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) eax71 = a;
  }
};

bool all_of(unsigned found, unsigned bits) { return (found & bits) == bits; }

const Processor& processor() {
  static const Processor found;
  return found;
}

[[maybe_unused]] bool has_avx2() {
  constexpr unsigned fma = 1u << 12, avx = 1u << 28, f16c = 1u << 29, avx2 = 1u << 5;
  constexpr unsigned xmm = 1u << 1, ymm = 1u << 2;
  const Processor& p = processor();
  return all_of(p.saved, xmm | ymm) && all_of(p.ecx1, fma | avx | f16c) && all_of(p.ebx7, avx2);
}

[[maybe_unused]] bool has_avxvnni() { return has_avx2() && all_of(processor().eax71, 1u << 4); }

[[maybe_unused]] bool has_avx512() {
  constexpr unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
  constexpr unsigned masks_and_zmm = 7u << 5;
  const Processor& p = processor();
  return has_avx2() && all_of(p.saved, masks_and_zmm) && all_of(p.ebx7, f | dq | bw | vl) && all_of(p.ecx7, vnni);
}

// Whether AMX has int8 and bfloat16, and the system permits its use; the process requests that permission once.
[[maybe_unused]] bool has_amx() {
#if defined(TW_EMULATE_AMX)
  return has_avx512();
#else
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if (!has_avx512() || !all_of(processor().edx7, bf16 | tile | int8)) return false;
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // of arch_prctl
  static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
#else
  return false;
#endif
#endif
}
#endif

#if defined(__aarch64__)
[[maybe_unused]] bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long asimddp = 1ul << 20;
  return getauxval(AT_HWCAP) & asimddp;
#else
  return true;  // every Mac with an Arm processor
#endif
}
#endif

#if defined(TW_WASM)
// Whether multiply-adds round once. Without relaxed ones they do (kernels/lanes.h). A relaxed one may be two
// operations; which one it is, the host says by a product that has more bits than a float.
bool fuses() {
#if defined(__wasm_relaxed_simd__)
  volatile float below_one = 1 - 0x1p-24f;
  const v128_t x = wasm_f32x4_splat(below_one), z = wasm_f32x4_const_splat(-1 + 0x1p-23f);
  return wasm_f32x4_extract_lane(wasm_f32x4_relaxed_madd(x, x, z), 0) == 0x1p-48f;
#else
  return true;
#endif
}
#endif

// Calls run(workspace). Returns 1 if memory runs out, else 0.
template <typename Run>
int64_t with_workspace(Workspace* shared, Run run) {
  try {
    run(*CallWorkspace(shared));
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

// The size of a struct of the headers by its name, so that Python can refuse a library built from others; 0: unknown.
TW_EXPORT int64_t tw_size(const char* name) {
#define TW_SIZE(Name) {#Name, sizeof(Name)},
#define TW_OP_SIZE(Name) {#Name "Op", sizeof(Name##Op)},
  static const struct {
    const char* name;
    size_t size;
    // clang-format off
  } sizes[] = {
      TW_OPS(TW_OP_SIZE)
      TW_SIZE(Matrix) TW_SIZE(Norm) TW_SIZE(KVLayer) TW_SIZE(ChunkRows) TW_SIZE(Heads) TW_SIZE(Queries)
      TW_SIZE(Routing) TW_SIZE(Recurrence) TW_SIZE(Inner) TW_SIZE(LowRank) TW_SIZE(Op) TW_SIZE(Model) TW_SIZE(Batch)
      TW_SIZE(AdaptedRows) TW_SIZE(WatchedRow) TW_SIZE(Observed) TW_SIZE(Ranks)
      TW_SIZE(ExpertCounts) TW_SIZE(ExpertFile) TW_SIZE(ExpertLayer)
  };
  // clang-format on
#undef TW_SIZE
#undef TW_OP_SIZE
  for (const auto& one : sizes)
    if (!strcmp(one.name, name)) return (int64_t)one.size;
  return 0;
}

// The kernels of an instruction set; null if this processor or this build lacks it.
TW_EXPORT const Kernels* tw_kernels(const char* name) {
#if defined(TW_PORTABLE)
  if (!strcmp(name, "portable")) return portable_kernels();
#endif
#if defined(TW_AVX2)
  if (!strcmp(name, "avx2") && has_avx2()) return avx2_kernels();
#endif
#if defined(TW_AVXVNNI)
  if (!strcmp(name, "avxvnni") && has_avxvnni()) return avxvnni_kernels();
#endif
#if defined(TW_AVX512)
  if (!strcmp(name, "avx512") && has_avx512()) return avx512_kernels();
#endif
#if defined(TW_AMX)
  if (!strcmp(name, "amx") && has_amx()) return amx_kernels();
#endif
#if defined(TW_DOTPROD)
  if (!strcmp(name, "dotprod") && has_dotprod()) return dotprod_kernels();
#endif
#if defined(TW_WASM)
  if (!strcmp(name, "wasm") && fuses()) return wasm_kernels();
#endif
  return nullptr;
}

// Allocates a workspace; null if memory runs out. tw_workspace_free frees it. Functions that take one may be called by
// several threads at once: a workspace serves one call at a time, and the others compute in temporary memory.
TW_EXPORT Workspace* tw_workspace_new() { return new_workspace(); }
TW_EXPORT void tw_workspace_free(Workspace* workspace) { free_workspace(workspace); }
TW_EXPORT int64_t tw_workspaces() { return count_workspaces(); }

// A pool of experts, which tw_experts_free ends after all calls that use it; null if memory runs out.
TW_EXPORT ExpertPool* tw_experts_new(const ExpertFile* of) { return new_expert_pool(*of); }
TW_EXPORT void tw_experts_free(ExpertPool* pool) { delete pool; }

// Sets the number of threads of later runs (at most the number that a call requests), regardless of other load; 0, the
// initial value: the pool decides. Returns the previous value. For tests and measurements.
TW_EXPORT int64_t tw_exact_threads(int64_t most) { return set_exact_threads(most); }

// The number of threads that the last run was split for, among runs that requested several.
TW_EXPORT int64_t tw_last_team() { return last_team(); }
TW_EXPORT int64_t tw_last_barriers() { return last_barriers(); }

// Returns 1 if memory runs out, and 2 if another rank of the model has ended: then the results are not to be used.
TW_EXPORT int64_t tw_forward(const Kernels* k, Workspace* workspace, const Model* model, const Batch* batch,
                             int64_t threads) {
  const int64_t lacking = with_workspace(workspace, [&](Workspace& w) { forward(*k, w, *model, *batch, threads); });
  return !lacking && model->ranks && model->ranks->meeting->broken.load() ? 2 : lacking;
}

TW_EXPORT int64_t tw_linear(const Kernels* k, Workspace* workspace, const Matrix* m, int64_t rows, const float* x,
                            float* y, int64_t threads) {
  return with_workspace(workspace, [&](Workspace& w) { linear_rows(*k, w, *m, rows, x, y, threads); });
}

TW_EXPORT int64_t tw_attend(const Kernels* k, Workspace* workspace, const KVLayer* kv, const Heads* h, int64_t chunks,
                            const ChunkRows* chunk, int64_t page_size, const Queries* queries, int64_t threads) {
  return with_workspace(
      workspace, [&](Workspace& w) { attend_rows(*k, w, *kv, *h, chunks, chunk, page_size, *queries, threads); });
}

// The runs of chunks that `tw_attend` takes together, for tests: of each its chunks and the positions that it reads
// once. runs: [chunks][2]. Returns their number.
TW_EXPORT int64_t tw_shared_runs(const KVLayer* kv, const Heads* h, int64_t chunks, const ChunkRows* chunk,
                                 int64_t page_size, int64_t* runs) {
  int64_t count = 0;
  for (int64_t i = 0; i < chunks; count++) {
    const SharedRun run = shared_run(*kv, *h, chunks - i, chunk + i, page_size);
    runs[2 * count] = run.chunks;
    runs[2 * count + 1] = run.positions;
    i += run.chunks;
  }
  return count;
}

// x = x sigmoid(gates), in place.
TW_EXPORT void tw_weigh(const Kernels* k, int64_t n, const float* gates, float* x) {
  k->gate_by(SIGMOID_GATE, n, gates, x);
}

TW_EXPORT int64_t tw_recur(const Kernels* k, Workspace* workspace, const KVLayer* kv, const Recurrence* r,
                           int64_t chunks, const ChunkRows* chunk, int64_t page_size, int64_t stride, float* projected,
                           float* mixed, int64_t threads) {
  return with_workspace(workspace, [&](Workspace& w) {
    recur_rows(*k, w, *kv, *r, chunks, chunk, page_size, stride, projected, mixed, threads);
  });
}

// k and v: [rows of all chunks][G][D].
TW_EXPORT void tw_store_kv(const Kernels* k, const KVLayer* kv, const Heads* h, int64_t chunks, const ChunkRows* chunk,
                           int64_t page_size, const float* key, const float* value) {
  const int64_t each = h->kv_heads * h->size;
  for (int64_t i = 0; i < chunks; i++)
    for (int64_t row = 0; row < chunk[i].rows; row++) {
      const int64_t at = (chunk[i].row + row) * each;
      k->store_kv(*kv, *h, chunk[i], page_size, chunk[i].start + row, key + at, value + at);
    }
}

TW_EXPORT void tw_norm(const Kernels* k, const Norm* by, int64_t rows, int64_t size, const float* x, float* y) {
  for (int64_t i = 0; i < rows; i++) k->norm(*by, size, x + i * size, y + i * size);
}

TW_EXPORT void tw_activate(const Kernels* k, int64_t activation, int64_t size, const float* x, float* y) {
  k->activate(activation, size, x, y);
}

TW_EXPORT void tw_xielu(const Kernels* k, const float* facts, int64_t size, const float* x, float* y) {
  k->xielu(facts, size, x, y);
}

// x and like: [rows][size].
TW_EXPORT void tw_restore(int64_t rows, int64_t size, const float* like, float* x) {
  for (int64_t i = 0; i < rows; i++) restore(size, like + i * size, x + i * size);
}

TW_EXPORT void tw_sparsify(int64_t rows, int64_t size, double deviations, float* x) {
  for (int64_t i = 0; i < rows; i++) sparsify(size, deviations, x + i * size);
}

TW_EXPORT void tw_gated(const Kernels* k, int64_t activation, int64_t rows, int64_t size, const float* x, float* y) {
  for (int64_t i = 0; i < rows; i++) k->gated(activation, size, x + i * 2 * size, y + i * size);
}

TW_EXPORT void tw_soft_cap(const Kernels* k, double cap, int64_t n, float* x) { k->soft_cap(cap, n, x); }

// x and y: [rows][heads][size]; rotations: [rows][size], cosines before sines.
TW_EXPORT void tw_rotate(const Kernels* k, int64_t rows, int64_t heads, int64_t size, const float* rotations,
                         const float* x, float* y) {
  for (int64_t i = 0; i < rows * heads; i++) k->rotate(size, rotations + i / heads * size, x + i * size, y + i * size);
}

// Overwrites logits [rows][experts and the shared gate]; ids: [rows][chosen]; weights: [rows][chosen and the gate].
TW_EXPORT void tw_route(const Routing* r, int64_t rows, float* logits, int64_t* ids, float* weights) {
  for (int64_t i = 0; i < rows; i++)
    route(*r, logits + i * (r->experts + r->shared_gate), ids + i * r->chosen,
          weights + i * (r->chosen + r->shared_gate));
}

TW_EXPORT int64_t tw_summarise(const Kernels* k, Workspace* workspace, int64_t n, int64_t vocab, const float* logits,
                               int64_t* best, double* log_total, int64_t threads) {
  return with_workspace(workspace, [&](Workspace& w) { summarise(*k, w, n, vocab, logits, best, log_total, threads); });
}

// places: [places][4], as PagePlace. key: [2][1024]. sums: [whole rows][2].
TW_EXPORT void tw_hash_page(const char* contents, int64_t bytes, int64_t places, const PagePlace* place,
                            const uint32_t* key, uint64_t* sums) {
  unpack_page(contents, bytes, places, place, key, sums);
}

// Reads every byte once, by all threads, with a prefetch `ahead` bytes before each line. Returns the sum of the words.
TW_EXPORT uint64_t tw_read(const Kernels* k, const void* data, int64_t bytes, int64_t ahead, int64_t threads) {
  struct Job {
    const Kernels* k;
    const char* data;
    int64_t bytes, ahead;
    std::atomic<uint64_t> total{0};
  } job{k, (const char*)data, bytes, ahead};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        const int64_t piece = std::clamp<int64_t>(j.bytes / (8 * team.size()) / 64 * 64, 1 << 16, 1 << 20);
        team.share(j.bytes, piece,
                   [&](int64_t first, int64_t last) { j.total += j.k->read(j.data + first, last - first, j.ahead); });
      },
      &job);
  return job.total;
}

// `rounds` per thread; returns the number of multiplications of all threads.
TW_EXPORT int64_t tw_multiply(const Kernels* k, int64_t format, int64_t rounds, int64_t threads) {
  struct Job {
    const Kernels* k;
    int64_t format, rounds, threads;
    std::atomic<int64_t> total{0};
  } job{k, format, rounds, threads};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        team.each(j.threads, [&](int64_t) { j.total += j.k->multiply(j.format, j.rounds); });
      },
      &job);
  return job.total;
}

// Packs rows [first, first + count) of a matrix, one block per work item; returns how many numbers are not finite.
TW_EXPORT int64_t tw_pack(const Kernels* k, const Matrix* m, int64_t source_format, const void* source, int64_t stride,
                          int64_t first, int64_t count, int64_t threads) {
  struct Job {
    const Kernels* k;
    const Matrix* m;
    int64_t source_format;
    const char* source;
    int64_t stride, first, count;
    std::atomic<int64_t> bad{0};
  } job{k, m, source_format, (const char*)source, stride, first, count};
  run_on_threads(
      threads,
      [](void* context, Team& team, int64_t) {
        Job& j = *(Job*)context;
        const int64_t size = j.source_format == F32 ? 4 : 2;
        const int64_t block = j.first / LANES, last = (j.first + j.count + LANES - 1) / LANES;
        team.each(last - block, [&](int64_t i) {  // no two threads write one block
          const int64_t at = (block + i) * LANES;
          const int64_t top = at > j.first ? at : j.first;
          const int64_t end = at + LANES < j.first + j.count ? at + LANES : j.first + j.count;
          const auto* source = j.source + (top - j.first) * j.stride * size;
          j.bad += j.k->pack(*j.m, j.source_format, source, j.stride, top, end - top);
        });
      },
      &job);
  return job.bad;
}
