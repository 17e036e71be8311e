// A whole step in one call, from token ids to logits.
#pragma once

#include "api.h"
#include "kernels.h"

namespace tw {

// A model is a list of ops over its residual stream x [rows][width]. An op is a name in this list, a struct `NameOp`
// here, and two functions in a file of `ops/`: `reserve` for its share of the workspace, and `run`. `native/structs.py`
// reads the list and the structs, and `native/compile.py` fills them.
// clang-format off
#define TW_OPS(OP)                                                                                  \
  OP(Embed) OP(Attention) OP(MLP) OP(Head) OP(Parallel) OP(Experts) OP(LatentAttention) OP(Recurrent) \
  OP(NextInput) OP(Mixed) OP(Spread) OP(Predict) OP(Laurel) OP(Correct) OP(Merge) OP(Deepstack)
// clang-format on

#define TW_KIND(Name) Name,
enum class OpKind : int64_t { TW_OPS(TW_KIND) };
#undef TW_KIND

// What the embedding makes for the layers: factor * (norm(project_scale * project(x)) + scale * the table's row of each
// token), `layers` parts of `size` numbers, with the norm over each part. A table without outputs: nothing.
struct LayerInputs {
  Matrix table;
  double scale;
  Matrix project;
  double project_scale;
  Norm norm;
  int64_t layers, size;
  double factor;
};

// x = norm(scale times the table's row of each token), plus the row of its position in a learned table, if any.
struct EmbedOp {
  Matrix table;
  const float* positions;  // [context][width], or null
  double scale;
  Norm norm;
  LayerInputs inputs;
};

// What an op's result goes through before it is added to x: scale * norm(result); and by what all of x is multiplied
// then. In every op, a norm with a null weight means no norm.
struct After {
  Norm norm;
  double scale, stream;
};

// What an adapter adds to the result of a matrix for its rows: up(down(row)), with weights in fp32. `down` has no
// outputs where the adapter leaves the matrix alone.
struct LowRank {
  Matrix down, up;
};

// Norms of q and k: over each head with the same weights, over all heads together, over each head with its own weights.
enum HeadNorms : int64_t { EACH_HEAD = 0, ALL_HEADS = 1, OWN_WEIGHTS = 2 };

// Where a layer's K and V come from: a projection of each; one for both, of which v is the result before k's norm; or
// another layer, whose K and V the layer's KVLayer describes.
enum Sources : int64_t { OWN_VALUES = 0, KEYS_ALONE = 1, OTHER_LAYER = 2 };

// x += after(out(out_norm(attention(q, k, v)))), with q, k and v from norm(x); K and V go through the layer's KV cache.
struct AttentionOp {
  int64_t layer;
  int64_t kept;  // whether the next op, a recurrence, reads x as it was before this one
  Heads heads;
  int64_t rotation;  // where its numbers begin among those of the model's rotations; -1: none
  Norm norm;
  Matrix qkv;  // the heads of q, then those of k, then those of v, as far as `sources` says
  Norm q_norm;
  Norm k_norm;
  Norm v_norm;         // over each head
  int64_t sources;     // of K and V: Sources
  int64_t head_norms;  // what these two are over: HeadNorms
  int64_t norms_last;  // they stand behind the rotation
  Norm out_norm;       // over all heads; without weights: none
  Matrix out;
  After after;
  const LowRank *qkv_updates, *out_updates;  // of each of the model's adapters; null without adapters
  int64_t
      out_gate;  // whether `qkv` ends with a gate for each number of q's heads, whose sigmoid weights what they read
  double clip;   // the greatest magnitude of q, k and v behind their norms; 0: any
};

// x += after(out(values of heads)), by latent attention: the cache has one row for all heads, the latent and then the
// part of the key that turns. A head's query is its `still` numbers times k_up, beside those that turn; its values are
// the mixed latents times v_up.
struct LatentAttentionOp {
  int64_t layer;
  Heads heads;       // of one KV head: its size is that of a row, its values that of the latent
  int64_t rotation;  // as in AttentionOp
  int64_t still;     // numbers of a head of q that do not turn; the others follow
  Norm norm;
  Matrix down;  // the rows of q, or of its latent; then those of the latent of K and V, then the key part that turns
  Norm q_norm;
  Matrix q_up;        // from q's latent to the heads of q; without outputs: none
  Norm kv_norm;       // of the latent
  Matrix k_up, v_up;  // one head after another, each in whole blocks
  Matrix out;
  After after;
  const LowRank *down_updates, *q_up_updates, *out_updates;  // as in AttentionOp
};

// A recurrence over the rows of a projection, as models/recurrent.py defines it. Its state is a history [taps - 1]
// [channels] of the convolution, then for each head and each slab of its columns [key_size][columns]: 64 columns each,
// if those are whole slabs, else all.
enum Rule : int64_t { CONVOLUTION = 0, DELTA = 1, SSD = 2, SCAN = 3 };
enum RecurrencePhase : int64_t { ALL_PHASES = 0, CONVOLVE = 1, APPLY_RULE = 2 };
struct Recurrence {
  int64_t rule;
  int64_t phase;  // the second answers with the channels, and the third reads them in their place
  int64_t channels, taps, activated;
  int64_t channels_at, query, key, value, before, gate, beta, decay;  // in a row; -1: there is none
  int64_t heads, key_heads, key_size, value_size;
  int64_t norm_parts, own_weights;  // parts of mixed that the norm is over, and whether each has weights of its own
  int64_t gate_first;
  const float *conv, *conv_bias;   // [taps][channels]; [channels], or null
  const float *a_log, *dt, *skip;  // [heads]; of a scan [value_size], but -exp(A) [key_size][value_size] for the first
  double least_step, most_step;
  double beta_factor;
  int64_t in_turn;  // head h has the query and key h % key_heads, not those of the heads beside it
  int64_t
      decays;  // 1: each number of a key has a decay of its own, and `dt` is [heads][key_size]; 0: each head has one
  int64_t gated_by;  // Gate
  Norm norm;
};

// A matrix between the convolution and the rule, over the numbers of a row from `at` on: its results are the next
// numbers of the row. norms: of its first parts, in order; a size of 0 ends them.
constexpr int64_t MOST_NORMS = 3;
struct Inner {
  int64_t at;
  Matrix matrix;
  int64_t sizes[MOST_NORMS];
  Norm norms[MOST_NORMS];
};

// x += after(out(recurrence(factors project(norm(x))))). In the layer's KVLayer, which has no parts, part[0] describes
// the memory of its states: `k.codes` [pages][bytes], and the index of its page table.
struct RecurrentOp {
  int64_t layer;
  int64_t beside;        // reads x as it was before the attention before it, which keeps that
  const float* factors;  // [outputs of project], or null
  Recurrence recurrence;
  Norm norm;
  Matrix project, out;
  int64_t row;  // numbers of a row: of project, and then of the inner matrices
  int64_t inners;
  const Inner* inner;
  After after;
  const LowRank *project_updates, *out_updates;  // as in AttentionOp
};

// x += after(out(activation(gate(x)) * the numbers from `at` on of what LayerInputs has made)). A gate without outputs:
// nothing.
struct InputGate {
  int64_t at, activation;
  Matrix gate, out;
  After after;
  const LowRank *gate_updates, *out_updates;  // as in AttentionOp
};

// x += after(down(down_norm(activation(factors up(norm(x)))))); then what the layer's inputs add.
struct MLPOp {
  int64_t activation, gated;
  const float* xielu;    // [3]: what the activation xIELU has learned; null: it is another one
  const float* factors;  // [outputs of up], or null
  Norm norm;
  Matrix up;       // if gated: the gates, then the values
  Norm down_norm;  // without weights: none
  Matrix down;
  After after;
  const LowRank *up_updates, *down_updates;  // as in AttentionOp
  InputGate inputs;
  int64_t sparse;  // whether a gate becomes max(gate - mean - deviations * standard deviation, 0) of its row
  double deviations;
};

// The logits of the batch's logits rows: matrix(scale * norm(x)), softly capped if cap > 0: cap tanh(logit / cap); and
// norm(x) of its hidden rows.
struct HeadOp {
  Norm norm;
  Matrix matrix;
  double scale, cap;
};

// Attention and MLP of one layer, both of which read x as it was before the layer.
struct ParallelOp {
  AttentionOp attention;
  MLPOp mlp;
};

// How a router's logits [experts] choose some experts for a row, by their ranks: scores, plus the correction. The
// lowest number is first among equals. With more than one group of experts, they come from the groups whose
// `group_best` highest ranks (1 or 2) have the largest sums; at most MOST_GROUPS.
constexpr int64_t MOST_GROUPS = 64;
enum Scores : int64_t { SOFTMAX = 0, SIGMOID = 1 };
struct Routing {
  int64_t experts, chosen;
  int64_t scores;
  int64_t renormalise;  // whether the weights of the chosen are divided by their sum
  int64_t shared_gate;  // whether one more logit, through a sigmoid, is the weight of the shared expert
  int64_t groups, chosen_groups, group_best;
  double factor;            // of the weights
  const float* correction;  // [experts], or null
};

struct ExpertLayer;  // expert_pool.h

// x += after(sum of weight * down(activation(up(norm(x)))) over the experts that the row chose), the shared one last.
struct ExpertsOp {
  Routing routing;
  int64_t activation, gated;
  Norm norm;
  Matrix router;
  Matrix up;    // of each expert the gates, if gated, then the values; one expert after another, each in whole blocks
  Matrix down;  // one expert after another
  Matrix shared_up, shared_down;  // without outputs: none
  After after;
  Norm router_norm;            // of the router's own input; without weights it reads that of the experts
  double router_scale;         // of its logits
  const float* weight_scales;  // [experts]: of the weights, last of all; null: none
  const ExpertLayer* paged;    // where the experts lie, if not in `up` and `down`, whose codes and scales are null then
  const ExpertsOp* next;       // of the next such layer, whose router guesses what is read ahead; or null
};

// x += after(mlp(x) + experts(x)), where both have what their own `after` makes of them; then what the layer's inputs
// add.
struct MixedOp {
  MLPOp mlp;
  ExpertsOp experts;
  After after;
  InputGate inputs;
};

// The input of a layer that predicts one token further: x = project([token_norm(x); hidden_norm(h)]), where x is the
// token's embedding and h a row of `Batch::before`.
struct NextInputOp {
  Norm token_norm, hidden_norm;
  Matrix project;
  int64_t hidden_first;  // the two halves are the other way round
};

// The ops of several residual streams, of which x is the first one, as models/residual_streams.py defines them. The
// others lie behind a copy of x in the memory of the pass.
constexpr int64_t MOST_STREAMS = 8;

struct SpreadOp {
  Matrix project;  // to all streams but the first
};

// The coefficients of a row: of tanh(matrix(scale * norm(row))).
struct StreamRouter {
  int64_t streams;
  Norm norm;
  double scale;
  Matrix matrix, coefficients;
};

struct PredictOp {
  StreamRouter router;
};

// x = after(x + norm(before) + norm of `after` (right(left(norm(before))))), where `before` is what attention has kept.
struct LaurelOp {
  Norm norm;
  Matrix left, right;
  After after;
};

struct CorrectOp {
  StreamRouter router;
  const float* scale;  // [width], of what the layer's inputs read; null: ones
  InputGate inputs;
};

struct MergeOp {
  int64_t streams;
  const Matrix* matrix;  // of all streams but the first
};

// x += the batch's rows of `deep` with this index.
struct DeepstackOp {
  int64_t index;
};

struct Op {
  OpKind kind;
  const void* op;  // one of these structs
};

struct Ranks;  // ranks.h

struct Model {
  int64_t width;
  int64_t rotations;  // numbers of a position in `ChunkRows::rotation`: the cosines and sines of all rotations
  int64_t ops;
  const Op* op;
  Ranks* ranks;  // null: one process computes the whole model
};

// The rows of a batch whose requests chose one adapter.
struct AdaptedRows {
  int64_t adapter;  // its index among the updates of an op
  int64_t rows;
  const int64_t* row;  // [rows]: their indices in the batch
};

// A row of the batch that somebody looks at: what one head of one layer reads there, and the logits.
struct WatchedRow {
  int64_t layer, head, row;
  float* weights;    // [position + 1]: the head's attention weights
  int64_t logits;    // the row's index among the logits rows; -1: it has none
  int64_t* highest;  // [Observed::candidates]: the ids of the highest logits, the lowest first among equals
  double* entropy;   // -sum p log p of the logits, in nat
};

// What a pass tells of itself. Its counts are added up as the kernels run.
struct Observed {
  int64_t* ends;    // when the embedding, each op after it (twice for PARALLEL, but not for streams) and the pass had
                    // ended, in nanoseconds of the monotonic clock
  int64_t looking;  // nanoseconds after the pass that the watched rows took
  int64_t watched, candidates;
  const WatchedRow* row;          // [watched]
  int64_t layer_flop, head_flop;  // of the matrix products over all rows: of all layers, and of the head
  int64_t weight_bytes;           // read by these products
  int64_t *attention_flop, *kv_read, *kv_written;  // [chunks]; the last two in bytes
};

struct Batch {
  int64_t rows;
  const int64_t* tokens;
  int64_t chunks;
  const ChunkRows* chunk;
  int64_t page_size;
  const KVLayer* kv;             // [layers]
  int64_t wanted;                // the number of logits rows
  const int64_t* row;            // [wanted]: their indices in the batch
  float* logits;                 // [wanted][vocab]
  int64_t* best;                 // [wanted]: the argmax, the lowest index among equals
  double* log_total;             // [wanted]: the logsumexp, NaN if some logit of the row is not finite
  int64_t hidden;                // the number of rows whose hidden states are needed
  const int64_t* hidden_row;     // [hidden]: their indices in the batch
  float* states;                 // [hidden][width]: the rows after the head's norm
  int64_t adapted;               // the number of adapters in the batch
  const AdaptedRows* adapter;    // [adapted], each adapter once
  Observed* observed;            // null: nobody looks
  const float* before;           // [rows][width]: what NextInputOp reads; null for models without one
  const float* const* inserted;  // [rows]: what stands in place of a token's embedding, or null; null: nothing does
  const float* const* deep;      // [DeepstackOp::index][rows]: what these ops add to a row, or null; null: nothing
  int64_t* unread;               // [chunks]: gets why an expert of a row could not be read; null: all are in memory
};

// The scratch memory of a step. It grows to the need of the largest step, and serves one call at a time.
struct Workspace;
Workspace* new_workspace();  // null if memory runs out
void free_workspace(Workspace*);
int64_t count_workspaces();  // live ones, for tests

// The workspace of one call: the shared one, or a temporary one while another call uses that or if it is null.
class CallWorkspace {
 public:
  explicit CallWorkspace(Workspace* shared);  // throws std::bad_alloc
  ~CallWorkspace();
  CallWorkspace(const CallWorkspace&) = delete;
  CallWorkspace& operator=(const CallWorkspace&) = delete;

  Workspace& operator*() const { return *used_; }

 private:
  Workspace* const shared_;  // null: `used_` is temporary
  Workspace* const used_;
};

// Each of these uses at most `threads` threads, and throws std::bad_alloc if the workspace cannot grow.
void forward(const Kernels&, Workspace&, const Model&, const Batch&, int64_t threads);

// One linear over rows of fp32, as in `forward`.
void linear_rows(const Kernels&, Workspace&, const Matrix&, int64_t rows, const float* x, float* y, int64_t threads);

// The argmax and logsumexp that `forward` reports, for any logits [n][vocab].
void summarise(const Kernels&, Workspace&, int64_t n, int64_t vocab, const float* logits, int64_t* best,
               double* log_total, int64_t threads);

// The choice of one row: overwrites logits [experts, and one if there is a shared gate], writes the experts' numbers
// [chosen] in ascending order, and their weights [chosen, and one if there is a shared gate].
void route(const Routing&, float* logits, int64_t* ids, float* weights);

// The recurrence alone: from projected rows [rows of all chunks][stride], which it overwrites, to mixed ones.
void recur_rows(const Kernels&, Workspace&, const KVLayer&, const Recurrence&, int64_t chunks, const ChunkRows*,
                int64_t page_size, int64_t stride, float* projected, float* mixed, int64_t threads);

// One attention over `queries` in fp32, whose rows and heads are those of the whole step.
void attend_rows(const Kernels&, Workspace&, const KVLayer&, const Heads&, int64_t chunks, const ChunkRows*,
                 int64_t page_size, const Queries&, int64_t threads);

}  // namespace tw
