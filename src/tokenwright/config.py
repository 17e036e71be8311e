"""Configuration of models and engines. A model's ops are its graph (`models/graph.py`)."""

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
    """LongRoPE (arXiv 2402.13753): each frequency divided by its own factor; cos and sin times `attention_factor`."""

    original_context: int
    short: tuple[float, ...]  # one for each pair of dimensions; for length limits up to `original_context`
    long: tuple[float, ...]
    attention_factor: float = 1.0


RopeScaling = NoScaling | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Learned:
    """A table of learned absolute positions, added to the embeddings (GPT-2)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv 2104.09864): dimension i of a head rotates with i + size / 2."""

    theta: float = 10000.0
    scaling: RopeScaling = NoScaling()
    rotated: int | None = None  # the first rotated / 2 of each half rotate; None: all
    spread: int | None = None  # dimensions that frequencies are spread over; None: the rotating ones
    sections: tuple[int, ...] = ()  # pairs that rotate by time, height and width; none: one position
    interleaved: bool = False  # the axes take turns (Qwen3-VL), not one section each (Qwen2-VL, arXiv 2409.12191)


def angle_length(positions: Learned | Rope | None, limit: int) -> int | None:
    """The limit that stands for all with the same angles; None if angles depend on no limit."""
    match positions:
        case Rope(scaling=DynamicScaling() as scaling):
            return max(limit, scaling.original_context)
        case Rope(scaling=LongScaling() as scaling):
            return scaling.original_context + (limit > scaling.original_context)
    return None


class RowFormat(Protocol):
    """A storage format, such as `cache.codec.Codec`."""

    def nbytes(self, size: int) -> int:
        """Bytes of a row of `size` numbers."""


@dataclass(frozen=True, slots=True)
class Heads:
    """K and V that a layer caches per token, in `kv_heads` heads (G) of `head_size` numbers (D) each."""

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
        """Numbers of a key with rotary positions; some may have an angle of 0."""
        return self.head_size

    def bytes_per_token(self, k: RowFormat, v: RowFormat) -> int:
        return self.kv_heads * (k.nbytes(self.head_size) + v.nbytes(self.head_size))


@dataclass(frozen=True, slots=True)
class Latent:
    """One row for all heads (MLA, arXiv 2405.04434): a latent of `rank` numbers (R), then `rope` numbers that turn.

    The whole row is every head's key, its latent the value: a row is stored once.
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
        """One row serves as K and V: `k` and `v` must be the same."""
        assert k == v, "a latent has one codec"
        return k.nbytes(self.key_size)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A recurrent layer's state, rewritten at each token: `numbers` in fp32."""

    numbers: int
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0

    def bytes_per_token(self, k: RowFormat, v: RowFormat) -> int:  # noqa: ARG002
        return 0

    @property
    def nbytes(self) -> int:
        return 4 * self.numbers


@dataclass(frozen=True, slots=True)
class LayerKV:
    """A layer's cache per token."""

    layout: Heads | Latent | RecurrentState
    window: int | None = None  # tokens, the token itself included
    source: int | None = None  # the layer whose K and V it reads
    biased: bool = False  # K has a bias, rotated only by the position in the text


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors in a model's arithmetic (the multipliers of Granite and Falcon-H1)."""

    embedding: float = 1.0
    attention: float | None = None  # of q k, before the softmax; None: head_size ** -0.5
    residual: float = 1.0  # of what attention and MLP add
    logits: float = 1.0
    gates: float = 1.0  # of an MLP's gates, before the activation


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of one MLP, in some layers; a router chooses some for each row."""

    experts: int
    chosen: int
    width: int
    layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # divide the weights of a row's experts by their sum
    groups: int = 1
    chosen_groups: int = 1  # groups of a row's experts, by the sum of their best scores
    group_best: int = 1  # scores of a group that are added to rank it
    corrected: bool = False  # a learned bias of each expert counts for the choice only
    factor: float = 1.0  # of the weights of a row's experts
    shared_width: int = 0  # of the shared expert; 0: none
    shared_gate: bool = False  # a sigmoid of the row weights the shared expert
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Sizes of multi-head latent attention (MLA, arXiv 2405.04434)."""

    rank: int  # R, of the latent of K and V
    q_rank: int  # of the queries' latent; 0: they are projected directly
    nope: int  # numbers of a head's key without positions
    rope: int  # and those that rotate
    value: int  # numbers of a head's value


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of one decoder-only model. With latent attention there is one KV head."""

    architecture: str  # such as "Qwen2ForCausalLM"
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int  # of a query, with latent attention
    mlp_width: int
    vocab_size: int
    context: int
    positions: Learned | Rope = Rope()
    windows: tuple[int | None, ...]  # tokens, the token itself included; None: full attention
    rotary: tuple[bool, ...]  # False: a layer without positions (NoPE)
    norm: Literal["layer", "rms"] = "rms"
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu", "quick_gelu"] = "silu"
    gated: bool = True  # SwiGLU-like: down(act(gate(x)) * up(x)); otherwise down(act(up(x)))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    # RMSNorm over each head of q and k or over all of them; LayerNorm over each head, with its own weights or a bias
    qk_norm: Literal["head", "whole", "own", "biased"] | None = None
    pre_norm: bool = True
    post_norm: bool = False
    norm_bias: bool = True
    norm_weights: bool = True  # of the norms of the residual stream
    embed_norm: bool = False
    parallel: Literal["one norm", "two norms"] | None = None  # attention and MLP read the same stream
    local: Rope | None = None  # the rotation of layers with a window, if not `positions`
    score_cap: float | None = None
    logit_cap: float | None = None
    qkv_clip: float | None = None  # greatest magnitude of q, k and v
    scales: Scales = Scales()
    mixture: Mixture | None = None
    latent: LatentHeads | None = None
    kv_shared: int = 0  # the last layers, which read K and V of earlier ones
    next_layers: int = 0  # MTP layers after the last, for drafts
    qk_norm_last: bool = False  # norms of q and k follow the rotation
    sub_norms: bool = False  # norms before the last linears of attention and MLP
    out_gate: bool = False  # a sigmoid of the row weights each head's output
    sink_logits: bool = False
    tied_head: bool = False
    dtype: DType = "float32"  # as stored in the checkpoint

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def score_scale(self) -> float:
        return self.head_size**-0.5 if self.scales.attention is None else self.scales.attention


SPECULATIONS = ("suffix", "mtp", "off")
KV_DISK_SIZE = 20 * 10**9
AUTO_DISK = "auto"  # unnamed files instead of a folder


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of the scheduler and the KV cache. Raises RequestError for a value out of range."""

    page_size: int = 16
    pages: int | None = None
    kv_memory: int | None = None  # bytes for the KV cache; None: an eighth of the free memory, at most 4 GiB
    token_budget: int = 512  # tokens of one step, over all sequences
    max_sequences: int = 64  # sequences running at once
    kv: KVFormat = field(default_factory=KVFormat)
    window: int | None = None  # attention window in tokens, besides the model's own
    sinks: int = 0  # first tokens that all tokens attend to, besides the window
    # A folder in which the prefix cache's pages outlive the process; "auto": unnamed files; None: neither.
    kv_disk: str | None = None
    kv_disk_size: int | None = None  # the most bytes; None: 20 GB, or half of the free space for files
    pinned: float = 0.5
    speculate: str = "suffix"
    draft: str | None = None
    draft_weights: str = "native"

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
        if self.kv_disk is not None:
            check_folder("kv_disk", self.kv_disk)
        bytes_of = ("pages", "kv_memory", "kv_disk_size")
        for name, most in (("window", MAX_TOKENS), *((one, MAX_BYTES) for one in bytes_of)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, most)
        if self.pages is not None and self.kv_memory is not None:
            raise RequestError("pages and kv_memory both set the size of the KV cache; give one of them", "pages")
