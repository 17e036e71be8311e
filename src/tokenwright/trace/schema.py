"""The messages of a run; `scripts/typescript.py` generates the page's types and decoder.

A frame and its parts are not frozen: each step of a watched run makes 45 of them.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.trace.wire import COUNTED, DERIVED, GIVEN, MEASURED, READ, Wire

VERSION = 1

_M, _C, _D, _R, _G = MEASURED, COUNTED, DERIVED, READ, GIVEN


@dataclass(slots=True)
class Candidate:
    token: int
    logprob: float  # the model's, natural, at temperature 1
    sampled: float  # its probability after the sampler; 0: it was cut


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """The weights with which one head reads the positions up to its own."""

    layer: int
    head: int
    argmax: int  # of the largest weight; codes may tie
    codes: bytes  # round(255 sqrt(weight)) of each position


@dataclass(slots=True)
class LayerTime:
    attention_us: int
    mlp_us: int


@dataclass(slots=True)
class StepFrame:
    step: Annotated[int, Wire("I", _C, "index", "step", "number of this step in the run")]
    start: Annotated[int, Wire("I", _C, "index", "first token computed", "the first of the tokens that were computed")]
    length: Annotated[int, Wire("I", _C, "tokens", "tokens computed", "tokens sent through the layers")]
    recomputed: Annotated[int, Wire("I", _C, "tokens", "computed again", "of these, such as had been computed before")]
    seq_len: Annotated[
        int, Wire("I", _C, "tokens", "length of the text", "tokens of the text after this step, prompt included")
    ]
    layer_tokens: Annotated[int, Wire("Q", _C, "", "layer-tokens", "tokens times layers that they went through")]
    flops: Annotated[
        int, Wire("Q", _C, "FLOP", "FLOPs", "of the matrix products that ran, the hidden half of a chunk included")
    ]
    flops_derived: Annotated[
        int, Wire("Q", _D, "FLOP", "FLOPs by formula", "2 (P_b n + P_lm) + sum of A(t): what the step must compute")
    ]
    weight_bytes: Annotated[
        int, Wire("Q", _C, "B", "weights read", "weights read by matrix products, for the whole batch")
    ]
    kv_read: Annotated[int, Wire("Q", _C, "B", "K and V read", "K and V read by attention")]
    kv_written: Annotated[int, Wire("Q", _C, "B", "K and V written", "K and V stored")]
    kv_resident: Annotated[
        int, Wire("Q", _C, "B", "K and V kept", "for the next step; without the cache only between the parts of a text")
    ]
    kv_allocated: Annotated[int, Wire("Q", _C, "B", "pages in use", "pages in use, times their size")]
    began_us: Annotated[
        int, Wire("Q", _M, "us", "began after", "from the acceptance of the run to the begin of this step")
    ]
    step_us: Annotated[int, Wire("I", _M, "us", "time of the step", "the whole step, scheduling included")]
    attention_us: Annotated[int, Wire("I", _M, "us", "time in attention", "the attention halves of all layers")]
    mlp_us: Annotated[int, Wire("I", _M, "us", "time in the MLPs", "the MLP halves of all layers")]
    head_us: Annotated[int, Wire("I", _M, "us", "time in the LM head", "final norm and language-model head")]
    sampling_us: Annotated[int, Wire("I", _M, "us", "time for choosing the token", "choosing the token")]
    recording_us: Annotated[
        int, Wire("I", _M, "us", "time for recording", "the attention row and the candidates; not part of the step")
    ]
    token: Annotated[
        int | None, Wire("I", _G, "", "id of the token", "the id that was chosen; none while a prompt is read in parts")
    ]
    rank: Annotated[int | None, Wire("I", _C, "index", "rank", "of the chosen id by the model; 1 is the most probable")]
    logprob: Annotated[float | None, Wire("f", _R, "nat", "log p", "of the token, by the model, at temperature 1")]
    sampled: Annotated[
        float | None, Wire("f", _R, "", "p after the sampler", "probability of the token after the sampler")
    ]
    entropy: Annotated[
        float | None, Wire("f", _R, "bit", "entropy", "of the model at temperature 1: 0 certain, 1 a coin")
    ]
    uniform: Annotated[
        float | None, Wire("d", _R, "", "random number", "the random number that was drawn; none when greedy")
    ]
    cache: Annotated[bool, Wire("B", _G, "", "KV cache", "whether this step used and kept the KV cache")]
    layers: tuple[LayerTime, ...]
    candidates: tuple[Candidate, ...]  # the most probable first
    attention: AttentionRow | None  # none: not requested, or dropped for a slow reader
    text: str  # can be shown now; a character cut by a token border is held back


@dataclass(frozen=True, slots=True)
class Loading:
    """GET /status: how far the model is loaded. The page asks again until `phase` is ready or failed."""

    phase: Literal["loading", "ready", "failed"]
    done: int
    total: int  # bytes; 0: not known yet
    message: str  # of a failure, with a remedy


@dataclass(frozen=True, slots=True)
class ModelCard:
    """GET /model: everything that the page's formulas need."""

    name: str
    version: str
    device: str
    dtype: str
    layers: int  # L
    width: int  # d
    heads: int  # H
    kv_heads: int  # G
    head_size: int  # D
    latent: int  # numbers of a row that all heads share; 0: K and V of heads
    vocab_size: int  # V
    context: int  # most tokens of a text
    windows: tuple[int | None, ...]  # of each layer in tokens; null: full; 0: it keeps a state
    block_weights: int  # P_b: of all matrix products in the layers
    head_weights: int  # P_lm: width x vocabulary, also if it is tied
    weight_bytes: int  # of all weights, as packed in memory
    kv_bytes_per_token: int
    state_bytes: int
    kv_format: str  # of K and V, with the window if one was chosen
    page_size: int
    pages: int
    eos_ids: tuple[int, ...]
    temperature: float  # suggested by the checkpoint
    top_k: int
    top_p: float
    replicas: int = 0  # that write texts together, and record no run; 0: the engine is the server's own


@dataclass(frozen=True, slots=True)
class TokenCard:
    """A token for people: `text` is what it looks like, a cut character as <0xE2>."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class PictureCard:
    """A picture of the prompt, or a tile of one, as the tower reads it: each cell is a token's own patch."""

    rows: int
    columns: int
    starts: tuple[int, ...]  # positions, each of the first of equally many cells, row by row
    url: str  # a data: URL


@dataclass(frozen=True, slots=True)
class RunCard:
    """POST /runs and the first message of the stream: enough to run it again."""

    run: str
    model: str
    prompt: str
    tokens: tuple[TokenCard, ...]
    written: tuple[TokenCard, ...]  # after the prompt, when the run began
    written_text: str
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    first_step: int
    watched: tuple[int, int]  # layer and head of the attention row in each frame
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    parent: str | None = None  # the run of which this one is a fork
    pictures: tuple[PictureCard, ...] = ()
    held: str = ""  # the name of its pictures, as ChatPrompt has it
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run in figures. Layer-tokens are tokens times layers that they went through."""

    written: Annotated[int, _C("tokens", "written", "tokens that the model wrote")]
    layer_tokens: Annotated[int, _C("", "this run", "layer-tokens of this run")]
    cached: Annotated[int, _D("", "with the cache", "layers x (N + T - 1): each token is computed once")]
    naive: Annotated[int, _D("", "without", "layers x sum of t for t = N .. N + T - 1: the whole text at every step")]
    times: Annotated[float, _D("times", "times", "layer-tokens without the cache, divided by those with it")]
    reused: Annotated[
        int, _D("", "reused", "layer-tokens without the cache, minus those of this run: their K and V were kept")
    ]
    prefix: Annotated[int, _C("tokens", "prefix", "tokens of the prompt found in the cache at the start")]
    ttft_us: Annotated[
        int, _M("us", "first token after", "engine time up to the first token; waiting for a viewer excluded")
    ]
    engine_us: Annotated[
        int, _M("us", "this run", "engine time of all steps, while the page drew them; waiting between them excluded")
    ]
    tokens_per_s: Annotated[
        float | None, _M("tok/s", "speed", "tokens after the first, divided by the time of their steps")
    ]


@dataclass(frozen=True, slots=True)
class RunState:
    state: Literal["paused", "running", "done", "failed", "expired"]
    steps: int
    cache: bool
    pace: float | None
    lease_s: float | None  # that the engine keeps its pages while paused
    throttled: bool  # the reader is slow: attention rows are left out
    reason: str | None  # eos, stop, length, context, aborted
    message: str
    watched: tuple[int, int]
    summary: Summary | None
    kind: Literal["state"] = "state"


@dataclass(frozen=True, slots=True)
class HeadMasses:
    """GET /runs/ID/heads: what every head did at a step. Lists go by layer, then by head."""

    step: int
    sink: tuple[float, ...]  # weight of the first token
    local: tuple[float, ...]  # weight of the last eight positions
    entropy: tuple[float, ...]  # of the row in bits, divided by that of an even one: 0 one token, 1 all alike
    kind: Literal["heads"] = "heads"


@dataclass(frozen=True, slots=True)
class Labels:
    """The texts of tokens, sent once, before the first frame that names them."""

    tokens: tuple[TokenCard, ...]
    kind: Literal["labels"] = "labels"


@dataclass(frozen=True, slots=True)
class Half:
    """A run's steps with the KV cache at each (`cache`) or at none. summary: once all steps are there."""

    cache: bool
    summary: Summary | None
    steps: tuple[StepFrame, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole run in trace.json. halves: the steps with the cache switched, if they were computed."""

    format: Literal["tokenwright-trace"]
    version: int
    model: ModelCard
    run: RunCard
    state: RunState
    labels: tuple[TokenCard, ...]
    steps: tuple[StepFrame, ...]
    halves: tuple[Half, ...]


PARTS = (Candidate, LayerTime)
MESSAGES = (Loading, ModelCard, TokenCard, PictureCard, RunCard, Summary, RunState, HeadMasses, Labels)
