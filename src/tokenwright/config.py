"""Configuration of models and engines, as frozen dataclasses.

A `ModelConfig` holds the hyperparameters of a checkpoint under our own names; the ops that the model computes are its
graph (`models/graph.py`), which a family builds from the same `config.json`. Neither holds a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from tokenwright.checks import MAX_BYTES, MAX_TOKENS, check_whole
from tokenwright.errors import RequestError

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Plain rotary frequencies."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware base that grows with the length limit beyond `original_context`; fixed per request at admission."""

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule: long wavelengths divided by `factor`, short ones kept, a smooth step between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies blended by a ramp; cos and sin multiplied by `attention_factor`."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): each frequency divided by its own factor; cos and sin times `attention_factor`.

    The short factors serve texts whose length limit is at most `original_context`, the long ones all others; which of
    them is fixed per request at admission.
    """

    original_context: int
    short: tuple[float, ...]  # one for each pair of dimensions
    long: tuple[float, ...]
    attention_factor: float = 1.0


RopeScaling = NoScaling | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Learned:
    """A table of learned absolute positions, added to the embeddings (GPT-2)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) in the rotate-half order: dimension i of a head turns with i + size / 2.

    rotated: dimensions of a head that turn: the first rotated / 2 of each half; None: all of them. Checkpoints with
    another order of the dimensions are put into this one when they are loaded.
    """

    theta: float = 10000.0
    scaling: RopeScaling = NoScaling()
    rotated: int | None = None


def angle_length(positions: Learned | Rope | None, limit: int) -> int | None:
    """The length that stands for all length limits with the angles of `limit`; None if angles depend on no length.

    Keys of texts with different such lengths differ, so those texts share no cached pages.
    """
    match positions:
        case Rope(scaling=DynamicScaling() as scaling):
            return max(limit, scaling.original_context)
        case Rope(scaling=LongScaling() as scaling):
            return scaling.original_context + (limit > scaling.original_context)
    return None


class RowFormat(Protocol):
    """The storage format of a row of numbers, such as `cache.codec.Codec`."""

    def nbytes(self, size: int) -> int:
        """Bytes of a row of `size` numbers."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The K and V that a layer caches per token: `kv_heads` heads (G) of `head_size` numbers (D) each."""

    kv_heads: int
    head_size: int

    @property
    def key_size(self) -> int:
        """Numbers of a key of one head."""
        return self.head_size

    @property
    def value_size(self) -> int:
        """Numbers of a value of one head."""
        return self.head_size

    @property
    def rotary_size(self) -> int:
        """Numbers of a key that the rotary positions concern; some of them may have an angle of 0."""
        return self.head_size

    def bytes_per_token(self, k: RowFormat, v: RowFormat) -> int:
        """Bytes of K and V of one token; each head is a separate row."""
        return self.kv_heads * (k.nbytes(self.head_size) + v.nbytes(self.head_size))


@dataclass(frozen=True, slots=True)
class Latent:
    """One row for all heads (MLA, arXiv 2405.04434): a latent of `rank` numbers (R), then `rope` numbers that turn.

    The whole row is the key of every head, the latent alone its value: a row is stored once.
    """

    rank: int
    rope: int

    @property
    def kv_heads(self) -> int:
        """One, which all query heads share."""
        return 1

    @property
    def key_size(self) -> int:
        """Numbers of a key: the whole row."""
        return self.rank + self.rope

    @property
    def value_size(self) -> int:
        """Numbers of a value: the latent."""
        return self.rank

    @property
    def rotary_size(self) -> int:
        """Numbers of a key that the rotary positions concern."""
        return self.rope

    def bytes_per_token(self, k: RowFormat, v: RowFormat) -> int:
        """Bytes of the row of one token, which serves as K and V: `k` and `v` must be the same."""
        assert k == v, "a latent has one codec"
        return k.nbytes(self.key_size)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer caches per token, and its attention window in tokens, the token itself included (None: full)."""

    layout: Heads | Latent
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors in a model's arithmetic (Granite's multipliers)."""

    embedding: float = 1.0  # of the embeddings
    attention: float | None = None  # of q k, before the softmax; None: head_size ** -0.5
    residual: float = 1.0  # of what attention and MLP add to the residual stream
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of one MLP, in some layers: gated MLPs, of which a router chooses some for each row."""

    experts: int  # in a layer
    chosen: int  # for each row
    width: int  # of each expert's MLP
    layers: tuple[bool, ...]  # whether layer i has experts
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # whether the weights of a row's experts are divided by their sum
    groups: int = 1  # of experts, of equal size
    chosen_groups: int = 1  # the groups, by the sum of their best scores, that a row's experts come from
    group_best: int = 1  # scores of a group that are added to rank it
    corrected: bool = False  # whether each expert has a learned bias, which is added to its score for the choice alone
    factor: float = 1.0  # of the weights of a row's experts
    shared_width: int = 0  # of the expert that every row meets; 0: none
    shared_gate: bool = False  # whether a sigmoid of the row weights the shared expert
    bias: bool = False  # of the router


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The sizes of multi-head latent attention (MLA, arXiv 2405.04434)."""

    rank: int  # R, of the latent of K and V
    q_rank: int  # of the latent of the queries; 0: the queries are projected directly
    nope: int  # numbers of a query or key of a head without positions,
    rope: int  # and those that turn
    value: int  # numbers of a value of a head


@dataclass(frozen=True)
class ModelConfig:
    """The hyperparameters of one decoder-only model.

    `windows[i]` is the attention window of layer i in tokens, the token itself included, or None for full attention.
    `rotary[i]` is False for a layer without positions (NoPE); it has no meaning under `Learned` positions. With latent
    attention there is one KV head, and `head_size` is that of a query.
    """

    family: str
    architecture: str  # as in the checkpoint, e.g. "Qwen2ForCausalLM"
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocab_size: int
    context: int
    positions: Learned | Rope
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    norm: Literal["layer", "rms"]
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
    gated: bool  # SwiGLU-like: down(act(gate(x)) * up(x)); otherwise down(act(up(x)))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # RMSNorm over each head of q and k, or over all heads of each; or LayerNorm over each head with weights of its own
    qk_norm: Literal["head", "whole", "own"] | None = None
    pre_norm: bool = True  # norms stand before attention and MLP
    post_norm: bool = False  # norms stand after attention and MLP, on what they add
    norm_bias: bool = True  # of a LayerNorm
    parallel: Literal["one norm", "two norms"] | None = None  # attention and MLP of a layer read the same stream
    local: Rope | None = None  # the rotation of layers with a window, where it is not `positions`
    score_cap: float | None = None  # soft cap of attention scores
    logit_cap: float | None = None  # soft cap of logits
    scales: Scales = Scales()
    mixture: Mixture | None = None
    latent: LatentHeads | None = None
    next_layers: int = 0  # layers after the last that predict further tokens (MTP), which files have and we skip
    sink_logits: bool = False  # whether each head of q has a learned logit beside those of the keys
    tied_head: bool = False
    dtype: DType = "float32"  # as stored in the checkpoint

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def score_scale(self) -> float:
        """The factor of q k before the softmax."""
        return self.head_size**-0.5 if self.scales.attention is None else self.scales.attention


KV_NAMES = ("native", "float32", "bfloat16", "float16", "fp8", "int8", "int4")
_KV_USAGE = (
    "kv must be one format, or k=FORMAT,v=FORMAT, each once; after it there may be first=TOKENS (from the start of a "
    "text, which stay native) and native=LAYERS (which stay native, such as 0+1+-1)"
)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The storage format of K and V; native is the dtype that the model computes in. Raises RequestError.

    >>> KVFormat.parse("k=int8,v=int4,first=64,native=0+-1")
    KVFormat(k='int8', v='int4', first=64, native=(0, -1))
    """

    k: str = "native"
    v: str = "native"
    first: int = 0  # tokens from the start of a text that stay native
    native: tuple[int, ...] = ()  # layers that stay native; -1 is the last

    def __post_init__(self) -> None:
        for name in (self.k, self.v):
            if name not in KV_NAMES:
                raise RequestError(f"kv {name!r} is not known; use {', '.join(KV_NAMES)}", "kv")
        check_whole("first of kv", self.first)
        if any(type(layer) is not int for layer in self.native) or len(set(self.native)) < len(self.native):
            raise RequestError(f"native of kv must be numbers of layers, each once, not {self.native!r}", "kv")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form that `str` writes. Raises RequestError with the allowed forms."""
        found: dict[str, str] = {}
        for part in text.lower().split(","):
            key, given, value = (one.strip() for one in part.partition("="))
            for name, said in {key: value}.items() if given else {"k": key, "v": key}.items():
                if name not in ("k", "v", "first", "native") or name in found:
                    raise RequestError(f"{_KV_USAGE}; not {text!r}", "kv")
                found[name] = said
        try:
            first = int(found.pop("first", "0"))
            native = tuple(int(layer) for layer in found.pop("native").split("+")) if "native" in found else ()
        except ValueError:
            raise RequestError(f"{_KV_USAGE}; not {text!r}", "kv") from None
        return cls(first=first, native=native, **found)

    def __str__(self) -> str:
        parts = [self.k] if self.k == self.v else [f"k={self.k}", f"v={self.v}"]
        parts += [f"first={self.first}"] if self.first else []
        parts += [f"native={'+'.join(map(str, self.native))}"] if self.native else []
        return ",".join(parts)


WEIGHT_NAMES = ("native", "float32", "bfloat16", "float16", "int8", "int4")
WEIGHT_GROUPS: Mapping[str, int] = {"int8": 64, "int4": 32}  # inputs per scale, by default
# The packed formats that blocks of files have and nothing is quantised to: name, group, super-block, minima.
FILE_FORMATS = {
    ("int5", 32, 0, False), ("int5", 32, 0, True), ("int5", 32, 256, True), ("int6", 16, 256, False),
    ("int6", 16, 256, True), *(("int4", 32, size, True) for size in (64, 128, 256)),
}  # fmt: skip


def _check_weight_name(name: str) -> None:
    if name not in WEIGHT_NAMES:
        raise RequestError(f"weights {name!r} is not known; use {', '.join(WEIGHT_NAMES)}", "weights")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The storage format of weight matrices; native is the dtype that the model computes in. Raises RequestError.

    `group`: number of consecutive inputs of an output that share a scale; 0 for formats without scales.
    `super`: number of inputs of a super-block, in which a group's scale is an integer times the float16 scale of the
    super-block; 0: groups have float16 scales. `minima`: whether groups have a minimum beside their scale.

    >>> WeightFormat.parse("int8"), WeightFormat.parse("int4:64")
    (WeightFormat(name='int8', group=64), WeightFormat(name='int4', group=64))
    """

    name: str = "native"
    group: int = 0
    super: int = 0
    minima: bool = False

    def __post_init__(self) -> None:
        if (self.name, self.group, self.super, self.minima) in FILE_FORMATS:
            return
        _check_weight_name(self.name)
        if self.super or self.minima:
            raise RequestError(f"{self.name} weights have no super-blocks of {self.super} or minima in such groups")
        if self.name in WEIGHT_GROUPS and (type(self.group) is not int or self.group not in (32, 64)):
            raise RequestError(f"{self.name} weights share a scale in groups of 32 or 64, not of {self.group!r}")
        if self.name not in WEIGHT_GROUPS and self.group != 0:
            raise RequestError(f"{self.name} weights have no groups; leave out :{self.group}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form that `str` writes: int8, int8:32. Raises RequestError with the allowed forms.

        Forms that only files have are refused: nothing is quantised to them here.
        """
        name, given, group = (part.strip() for part in text.lower().partition(":"))
        _check_weight_name(name)
        if given and not (group.isascii() and group.isdigit()):
            raise RequestError(
                f"weights must be a format, such as int8, or one with its group, such as int8:32; not {text!r}",
                "weights",
            )
        return cls(name, int(group) if given else WEIGHT_GROUPS.get(name, 0))

    @property
    def quantised(self) -> bool:
        return self.group > 0

    def resolved(self, native: DType) -> "WeightFormat":
        """This format, with native replaced by the dtype `native`."""
        return WeightFormat(native) if self.name == "native" else self

    def __str__(self) -> str:
        if self.super or self.minima:
            return f"{self.name}:{self.group}{f'/{self.super}' if self.super else ''}{'+min' if self.minima else ''}"
        return self.name if self.group == WEIGHT_GROUPS.get(self.name, 0) else f"{self.name}:{self.group}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of the scheduler and the KV cache. Raises RequestError for a value out of range."""

    page_size: int = 16  # token slots of a page
    pages: int | None = None  # pages of the pool; None: computed from `kv_memory`
    kv_memory: int | None = None  # bytes for the KV cache; None: an eighth of the free memory, at most 4 GiB
    token_budget: int = 512  # tokens computed in one step, over all sequences
    max_sequences: int = 64  # sequences running at once
    kv: KVFormat = KVFormat()  # storage format of K and V
    window: int | None = None  # attention window in tokens for every layer, besides the model's own windows
    sinks: int = 0  # first tokens that every token attends to, in addition to the attention window
    swap_memory: int = 0  # bytes of RAM to swap out K and V of preempted sequences; 0: they are recomputed

    def __post_init__(self) -> None:
        for name in ("page_size", "token_budget", "max_sequences"):
            check_whole(name, getattr(self, name), 1)
        check_whole("sinks", self.sinks)
        check_whole("swap_memory", self.swap_memory, most=MAX_BYTES)
        for name, most in (("window", MAX_TOKENS), ("pages", MAX_BYTES), ("kv_memory", MAX_BYTES)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, most)
        if self.pages is not None and self.kv_memory is not None:
            raise RequestError("pages and kv_memory both set the size of the KV cache; give one of them", "pages")
