"""The structs and codes that Python shares with the compiled native library.

They mirror api.h, kernels.h and step.h in `cpp/` field by field; `library.load` refuses a library whose structs have
other sizes. The structs hold pointers: the code that fills one must keep the tensors alive that it points into.
"""

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

from tokenwright.models.recurrent import MOST_NORMS

FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4, "fp8": 5, "int5": 6, "int6": 7}
SCORES = {"softmax": 0, "sigmoid": 1}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_swiglu": 4, "relu2": 5, "xielu": -1}


def _whole(*names: str) -> tuple[tuple[str, type[c_int64]], ...]:
    return tuple((name, c_int64) for name in names)


def _places(*names: str) -> tuple[tuple[str, type[c_void_p]], ...]:
    return tuple((name, c_void_p) for name in names)


class CMatrix(Structure):
    _fields_ = (
        *_whole("out", "inner", "format", "group"),
        *_places("codes", "scales", "bias"),
        *_whole("super", "minima", "first", "whole"),
    )


class CNorm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_double))


class CKVTensor(Structure):
    _fields_ = (("format", c_int64), ("codes", c_void_p), ("scales", c_void_p))


class CPart(Structure):
    _fields_ = (
        ("start", c_int64),
        ("stop", c_int64),
        ("table", c_int64),
        ("bytes", c_int64),
        ("k", CKVTensor),
        ("v", CKVTensor),
    )


class CKVLayer(Structure):
    _fields_ = (
        ("parts", c_int64),
        ("part", CPart * 2),
        ("window", c_int64),
        ("sinks", c_int64),
        ("sink_rotation", c_void_p),
    )


class CChunkRows(Structure):
    _fields_ = (("row", c_int64), ("rows", c_int64), ("start", c_int64), ("rotation", c_void_p), ("tables", c_void_p))


class CHeads(Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("values", c_int64),
        ("scale", c_double),
        ("cap", c_double),
        ("sink_logits", c_void_p),
        ("slopes", c_void_p),
    )


class CAfter(Structure):
    _fields_ = (("norm", CNorm), ("scale", c_double), ("stream", c_double))


class CLayerInputs(Structure):
    _fields_ = (
        ("table", CMatrix),
        ("scale", c_double),
        ("project", CMatrix),
        ("project_scale", c_double),
        ("norm", CNorm),
        ("layers", c_int64),
        ("size", c_int64),
        ("factor", c_double),
    )


class CEmbedOp(Structure):
    _fields_ = (
        ("table", CMatrix),
        ("positions", c_void_p),
        ("scale", c_double),
        ("norm", CNorm),
        ("inputs", CLayerInputs),
    )


EACH_HEAD, ALL_HEADS, OWN_WEIGHTS = 0, 1, 2  # what norms of q and k are over
OWN_VALUES, KEYS_ALONE, OTHER_LAYER = 0, 1, 2  # where K and V come from


class CLowRank(Structure):
    _fields_ = (("down", CMatrix), ("up", CMatrix))


class CLowRankPart(Structure):
    _fields_ = (("at", c_int64), ("down", CMatrix), ("up", CMatrix))


class CAttentionOp(Structure):
    _fields_ = (
        ("layer", c_int64),
        ("kept", c_int64),
        ("heads", CHeads),
        ("rotation", c_int64),
        ("norm", CNorm),
        ("qkv", CMatrix),
        ("q_norm", CNorm),
        ("k_norm", CNorm),
        ("v_norm", CNorm),
        ("sources", c_int64),
        ("head_norms", c_int64),
        ("norms_last", c_int64),
        ("out", CMatrix),
        ("after", CAfter),
        ("qkv_updates", c_void_p),
        ("out_updates", c_void_p),
        ("out_gate", c_int64),
        ("clip", c_double),
        ("low_ranks", c_int64),
        ("low_rank", c_void_p),
    )


class CInputGate(Structure):
    _fields_ = (
        ("at", c_int64),
        ("activation", c_int64),
        ("gate", CMatrix),
        ("out", CMatrix),
        ("after", CAfter),
        ("gate_updates", c_void_p),
        ("out_updates", c_void_p),
    )


class CMLPOp(Structure):
    _fields_ = (
        ("activation", c_int64),
        ("gated", c_int64),
        ("xielu", c_void_p),
        ("factors", c_void_p),
        ("norm", CNorm),
        ("up", CMatrix),
        ("down", CMatrix),
        ("after", CAfter),
        ("up_updates", c_void_p),
        ("down_updates", c_void_p),
        ("inputs", CInputGate),
        ("sparse", c_int64),
        ("deviations", c_double),
        ("low_ranks", c_int64),
        ("low_rank", c_void_p),
    )


class CHeadOp(Structure):
    _fields_ = (("norm", CNorm), ("matrix", CMatrix), ("scale", c_double), ("cap", c_double))


class CRouting(Structure):
    _fields_ = (
        *_whole("experts", "chosen", "scores", "renormalise", "shared_gate", "groups", "chosen_groups", "group_best"),
        ("factor", c_double),
        ("correction", c_void_p),
    )


class CExpertsOp(Structure):
    _fields_ = (
        ("routing", CRouting),
        ("activation", c_int64),
        ("gated", c_int64),
        ("norm", CNorm),
        ("router", CMatrix),
        ("up", CMatrix),
        ("down", CMatrix),
        ("shared_up", CMatrix),
        ("shared_down", CMatrix),
        ("after", CAfter),
        ("router_norm", CNorm),
        ("router_scale", c_double),
        ("weight_scales", c_void_p),
    )


class CMixedOp(Structure):
    _fields_ = (("mlp", CMLPOp), ("experts", CExpertsOp), ("after", CAfter), ("inputs", CInputGate))


class CParallelOp(Structure):
    _fields_ = (("attention", CAttentionOp), ("mlp", CMLPOp))


class CLatentOp(Structure):
    _fields_ = (
        ("layer", c_int64),
        ("heads", CHeads),
        ("rotation", c_int64),
        ("still", c_int64),
        ("norm", CNorm),
        ("down", CMatrix),
        ("q_norm", CNorm),
        ("q_up", CMatrix),
        ("kv_norm", CNorm),
        ("k_up", CMatrix),
        ("v_up", CMatrix),
        ("out", CMatrix),
        ("after", CAfter),
        *_places("down_updates", "q_up_updates", "out_updates"),
    )


class CRecurrence(Structure):
    _fields_ = (
        *_whole("rule", "phase", "channels", "taps", "activated", "channels_at", "query", "key", "value", "before"),
        *_whole("gate", "beta", "decay", "heads", "key_heads", "key_size", "value_size", "norm_parts", "own_weights"),
        *_whole("gate_first"),
        *_places("conv", "conv_bias", "a_log", "dt", "skip"),
        ("least_step", c_double),
        ("most_step", c_double),
        ("beta_factor", c_double),
        *_whole("in_turn", "decays", "gated_by"),
        ("norm", CNorm),
    )


class CInnerMatrix(Structure):
    _fields_ = (("at", c_int64), ("matrix", CMatrix), ("sizes", c_int64 * MOST_NORMS), ("norms", CNorm * MOST_NORMS))


class CRecurrentOp(Structure):
    _fields_ = (
        ("layer", c_int64),
        ("beside", c_int64),
        ("factors", c_void_p),
        ("recurrence", CRecurrence),
        ("norm", CNorm),
        ("project", CMatrix),
        ("out", CMatrix),
        ("row", c_int64),
        ("inners", c_int64),
        ("inner", c_void_p),
        ("after", CAfter),
        ("project_updates", c_void_p),
        ("out_updates", c_void_p),
    )


class CNextInputOp(Structure):
    _fields_ = (("token_norm", CNorm), ("hidden_norm", CNorm), ("project", CMatrix), ("hidden_first", c_int64))


class CSpreadOp(Structure):
    _fields_ = (("project", CMatrix),)


class CStreamRouter(Structure):
    _fields_ = (
        ("streams", c_int64),
        ("norm", CNorm),
        ("scale", c_double),
        ("matrix", CMatrix),
        ("coefficients", CMatrix),
    )


class CPredictOp(Structure):
    _fields_ = (("router", CStreamRouter),)


class CLaurelOp(Structure):
    _fields_ = (("norm", CNorm), ("left", CMatrix), ("right", CMatrix), ("after", CAfter))


class CCorrectOp(Structure):
    _fields_ = (("router", CStreamRouter), ("scale", c_void_p), ("inputs", CInputGate))


class CMergeOp(Structure):
    _fields_ = (("streams", c_int64), ("matrix", c_void_p))


class CSharedOp(Structure):
    _fields_ = (
        ("attention", CAttentionOp),
        ("mlp", CMLPOp),
        ("out", CMatrix),
        ("table", CMatrix),
        ("scale", c_double),
    )


# An op's kind is its index here.
OPS = (
    *(CEmbedOp, CAttentionOp, CMLPOp, CHeadOp, CParallelOp, CExpertsOp, CLatentOp, CRecurrentOp, CNextInputOp),
    *(CMixedOp, CSpreadOp, CPredictOp, CLaurelOp, CCorrectOp, CMergeOp, CSharedOp),
)


class COp(Structure):
    _fields_ = (("kind", c_int64), ("op", c_void_p))


class CRanks(Structure):
    _fields_ = (
        ("rank", c_int64),
        ("count", c_int64),
        ("parent", c_int64),
        ("patience", c_int64),
        ("meeting", c_void_p),
        ("halves", c_void_p),
        ("capacity", c_int64),
        ("gathers", c_int64),
    )


class CModel(Structure):
    _fields_ = (
        ("width", c_int64),
        ("rotations", c_int64),
        ("ops", c_int64),
        ("op", POINTER(COp)),
        ("ranks", POINTER(CRanks)),
    )


class CAdaptedRows(Structure):
    _fields_ = (("adapter", c_int64), ("rows", c_int64), ("row", c_void_p))


class CBatch(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("chunks", c_int64),
        ("chunk", c_void_p),
        ("page_size", c_int64),
        ("kv", c_void_p),
        ("wanted", c_int64),
        *_places("row", "logits", "best", "log_total"),
        ("hidden", c_int64),
        *_places("hidden_row", "states"),
        ("adapted", c_int64),
        *_places("adapter", "observed", "before"),
    )


class CWatchedRow(Structure):
    _fields_ = (
        ("layer", c_int64),
        ("head", c_int64),
        ("row", c_int64),
        ("weights", c_void_p),
        ("logits", c_int64),
        ("highest", c_void_p),
        ("entropy", c_void_p),
    )


class CObserved(Structure):
    _fields_ = (
        ("ends", c_void_p),
        *_whole("looking", "watched", "candidates"),
        ("row", c_void_p),
        *_whole("layer_flop", "head_flop", "weight_bytes"),
        *_places("attention_flop", "kv_read", "kv_written"),
    )


class CQueries(Structure):
    _fields_ = (
        *_whole("first", "last", "head", "head_last"),
        *_places("q", "sink_q", "out"),
        *_whole("stride", "sink_stride", "out_stride"),
    )


STRUCTS = (
    *(CMatrix, CNorm, CKVTensor, CPart, CKVLayer, CChunkRows, CHeads),
    *(*OPS, COp, CModel, CBatch, CQueries, CRouting, CLowRank, CLowRankPart, CAdaptedRows, CWatchedRow),
    *(CObserved, CRecurrence, CInnerMatrix, CRanks),
)
