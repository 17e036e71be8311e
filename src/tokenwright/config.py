"""Configuration of models and engines, as frozen dataclasses. The ops of a model are its graph (`models/graph.py`)."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from tokenwright.checks import MAX_BYTES, MAX_TOKENS, check_folder, check_whole, shown
from tokenwright.errors import RequestError
from tokenwright.formats import DType, KVFormat, WeightFormat


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

    The short factors serve texts whose length limit, fixed at admission, is at most `original_context`.
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

    rotated: dimensions of a head that turn: the first rotated / 2 of each half; None: all of them. spread: the
    dimensions that frequencies are spread over; None: those that turn. sections: of the pairs that turn, how many turn
    with the position in time, height and width; none: a token has one position. interleaved: time, height, width in
    turn, and time for the rest (Qwen3-VL), instead of one section after another (Qwen2-VL, arXiv 2409.12191).
    """

    theta: float = 10000.0
    scaling: RopeScaling = NoScaling()
    rotated: int | None = None
    spread: int | None = None
    sections: tuple[int, ...] = ()
    interleaved: bool = False


def angle_length(positions: Learned | Rope | None, limit: int) -> int | None:
    """The length that stands for all length limits with the angles of `limit`; None if angles depend on no length."""
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
        return self.head_size

    @property
    def value_size(self) -> int:
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

    The whole row is the key of every head, only the latent its value: a row is stored once.
    """

    rank: int
    rope: int

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def key_size(self) -> int:
        return self.rank + self.rope

    @property
    def value_size(self) -> int:
        return self.rank

    @property
    def rotary_size(self) -> int:
        return self.rope

    def bytes_per_token(self, k: RowFormat, v: RowFormat) -> int:
        """Bytes of the row of one token, which serves as K and V: `k` and `v` must be the same."""
        assert k == v, "a latent has one codec"
        return k.nbytes(self.key_size)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state that a recurrent layer keeps of a text, however long: `numbers` in fp32, rewritten at each token."""

    numbers: int
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0

    def bytes_per_token(self, k: RowFormat, v: RowFormat) -> int:  # noqa: ARG002
        """None: a state does not grow."""
        return 0

    @property
    def nbytes(self) -> int:
        return 4 * self.numbers


@dataclass(frozen=True, slots=True)
class LayerKV:
    """A layer's cache per token; a window includes the token itself. source: the layer whose K and V it reads.

    biased: whether K is a projection with a bias, rotated only by the position in the text.
    """

    layout: Heads | Latent | RecurrentState
    window: int | None = None
    source: int | None = None
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors in a model's arithmetic (the multipliers of Granite and Falcon-H1)."""

    embedding: float = 1.0  # of the embeddings
    attention: float | None = None  # of q k, before the softmax; None: head_size ** -0.5
    residual: float = 1.0  # of what attention and MLP add to the residual stream
    logits: float = 1.0
    gates: float = 1.0  # of an MLP's gates, before the activation


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of one MLP, in some layers: MLPs, of which a router chooses some for each row."""

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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of one decoder-only model.

    `windows[i]` is the attention window of layer i in tokens, the token itself included, or None for full attention.
    `rotary[i]` is False for a layer without positions (NoPE); it has no meaning unless positions are rotary. With
    latent attention there is one KV head, and `head_size` is that of a query.
    """

    architecture: str  # as in the checkpoint, e.g. "Qwen2ForCausalLM"
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocab_size: int
    context: int
    positions: Learned | Rope = Rope()
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    norm: Literal["layer", "rms"] = "rms"
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu", "quick_gelu"] = "silu"
    gated: bool = True  # SwiGLU-like: down(act(gate(x)) * up(x)); otherwise down(act(up(x)))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # RMSNorm over each head of q and k, or over all heads of each; or LayerNorm over each head with weights of its own
    qk_norm: Literal["head", "whole", "own"] | None = None
    pre_norm: bool = True  # norms stand before attention and MLP
    post_norm: bool = False  # norms stand after attention and MLP, on what they add
    norm_bias: bool = True  # of a LayerNorm
    norm_weights: bool = True  # of the norms of the residual stream
    embed_norm: bool = False  # a norm stands behind the embedding
    parallel: Literal["one norm", "two norms"] | None = None  # attention and MLP of a layer read the same stream
    local: Rope | None = None  # the rotation of layers with a window, where it is not `positions`
    score_cap: float | None = None  # soft cap of attention scores
    logit_cap: float | None = None  # soft cap of logits
    qkv_clip: float | None = None  # greatest magnitude of q, k and v
    scales: Scales = Scales()
    mixture: Mixture | None = None
    latent: LatentHeads | None = None
    kv_shared: int = 0  # the last layers, which read K and V of layers before
    next_layers: int = 0  # layers after the last that predict further tokens (MTP): for drafts alone
    qk_norm_last: bool = False  # the norms of q and k stand behind the rotation
    out_gate: bool = False  # whether a sigmoid of the row weights what each head has read
    sink_logits: bool = False  # whether each head of q has a learned logit beside those of the keys
    tied_head: bool = False
    dtype: DType = "float32"  # as stored in the checkpoint

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def score_scale(self) -> float:
        return self.head_size**-0.5 if self.scales.attention is None else self.scales.attention


SPECULATIONS = ("suffix", "mtp", "off")
KV_DISK_SIZE = 20 * 10**9
AUTO_DISK = "auto"  # in place of a folder: files without a name


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of the scheduler and the KV cache. Raises RequestError for a value out of range."""

    page_size: int = 16  # token slots of a page
    pages: int | None = None  # pages of the pool; None: computed from `kv_memory`
    kv_memory: int | None = None  # bytes for the KV cache; None: an eighth of the free memory, at most 4 GiB
    token_budget: int = 512  # tokens computed in one step, over all sequences
    max_sequences: int = 64  # sequences running at once
    kv: KVFormat = field(default_factory=KVFormat)  # storage format of K and V
    window: int | None = None  # attention window in tokens for every layer, besides the model's own windows
    sinks: int = 0  # first tokens that every token attends to, in addition to the attention window
    swap_memory: int = 0  # bytes of RAM to swap out K and V of preempted sequences; 0: they are recomputed
    # A folder in which pages of the prefix cache outlive the process; "auto": files that end with it; None: neither.
    kv_disk: str | None = None
    kv_disk_size: int | None = None  # the most bytes in them; None: 20 GB, or a half of what is free for files
    pinned: float = 0.5  # the share of the pages that pinned prefixes may have
    speculate: str = "suffix"  # where draft tokens come from: one of SPECULATIONS
    draft: str | None = None  # the folder or the name of a draft model; None: there is none
    draft_weights: str = "native"  # the format of its matrices

    def __post_init__(self) -> None:
        if not 0 <= self.pinned <= 1:
            raise RequestError(f"pinned must be a share of the pages, from 0 to 1, not {self.pinned}", "pinned")
        for name in ("page_size", "token_budget", "max_sequences"):
            check_whole(name, getattr(self, name), 1)
        if self.speculate not in SPECULATIONS:
            known = f"{', '.join(SPECULATIONS[:-1])} or {SPECULATIONS[-1]}"
            raise RequestError(f"speculate must be {known}, not {shown(self.speculate)}", "speculate")
        if self.draft is not None and self.speculate == "mtp":
            raise RequestError("speculate mtp drafts with the model's own layer; leave draft or mtp out", "draft")
        if self.draft is None and self.draft_weights != "native":
            raise RequestError("draft_weights is the format of a draft model; give draft as well", "draft_weights")
        WeightFormat.parse(self.draft_weights)
        check_whole("sinks", self.sinks)
        check_whole("swap_memory", self.swap_memory, most=MAX_BYTES)
        if self.kv_disk is not None:
            check_folder("kv_disk", self.kv_disk)
        bytes_of = ("pages", "kv_memory", "kv_disk_size")
        for name, most in (("window", MAX_TOKENS), *((one, MAX_BYTES) for one in bytes_of)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, most)
        if self.pages is not None and self.kv_memory is not None:
            raise RequestError("pages and kv_memory both set the size of the KV cache; give one of them", "pages")
