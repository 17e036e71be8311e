"""The one description of a model's arithmetic: a short list of coarse ops over named weights. No tensors here.

    embed -> attention, MLP, attention, MLP, ... -> head

A family builds the list (`checkpoints/families/registry.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from tokenwright.config import Heads, LayerKV, Learned, RecurrentState, Rope, angle_length
from tokenwright.models import op as base


@dataclass(frozen=True)
class Embed(base.Op):
    """x = norm(scale times the table's row of each token), plus that of its position in a table of `positions` rows."""

    table: base.Matrix  # [vocabulary, width]
    positions: int | None = None
    scale: float = 1.0
    norm: base.Norm | None = None
    inputs: base.LayerInputs | None = None

    @property
    def learned_shapes(self) -> dict[str, base.Shape]:
        return {} if self.positions is None else {"positions.weight": (self.positions, self.table.inner)}

    @property
    def multiplied(self) -> int:
        return self.inputs.project.out * self.inputs.project.inner if self.inputs else 0  # a lookup costs no FLOP

    def read(self, rows: int) -> dict[str, base.Shape]:  # noqa: ARG002
        return self.inputs.project.shapes | self.inputs.norm.shapes if self.inputs else {}


@dataclass(frozen=True)
class Attention(base.Op):
    """x + residual_scale post_norm(out(softmax(scoring(q k)) v)), with q, k and v from norm(x); None: no such norm.

    q_norm, k_norm: over each head if of head_size numbers, over each head with its own weights if that many are its
    parts, else over all heads; before the rotation, or after it if `norms_last`.
    """

    layer: int
    heads: int
    kv_heads: int
    head_size: int
    scoring: base.Scoring
    norm: base.Norm | None
    qkv: base.Matrix  # the heads of q, of k (none with `source`) and of v (none with values="keys" either)
    out: base.Matrix
    q_norm: base.Norm | None = None
    k_norm: base.Norm | None = None
    rotary: Rope | None = None
    window: int | None = None
    post_norm: base.Norm | None = None
    residual_scale: float = 1.0
    sink_logits: str | None = None  # of each head, in the softmax that of one more key, whose value is zero
    out_gate: bool = False  # `qkv` has a fourth part like q, whose sigmoid weights the heads' results
    norms_last: bool = False
    kept: bool = False  # the next op reads x as it was before this one
    v_norm: base.Norm | None = None
    values: Literal["own", "keys"] = "own"  # "keys": k's projection, before k's norm
    source: int | None = None  # an earlier layer with the same window, whose K and V this one reads
    clip: float | None = None  # of |q|, |k| and |v| before the rotation
    out_norm: base.Norm | None = None  # of the input of `out`
    adaptable: ClassVar[bool] = True

    @property
    def projected(self) -> tuple[int, int, int]:
        keys = 0 if self.source is not None else self.kv_heads
        return self.heads, keys, keys if self.values == "own" else 0

    @property
    def learned_shapes(self) -> dict[str, base.Shape]:
        return base.numbers(self.sink_logits, self.heads)

    @property
    def products(self) -> Mapping[str, int]:
        row = self.qkv.inner * self.head_size
        query, key, value = (row * heads for heads in self.projected)
        return {"query": query, "key": key, "value": value, "output": self.out.out * self.out.inner}

    @property
    def kv(self) -> LayerKV:
        plain = self.k_norm is None and self.clip is None and self.source is None and self.values == "own"
        turned = self.rotary is not None and not self.rotary.sections and angle_length(self.rotary, 1) is None
        return LayerKV(
            Heads(self.kv_heads, self.head_size), self.window, self.source, self.qkv.bias and plain and turned
        )

    @property
    def pair_flops(self) -> int:
        return 4 * self.heads * self.head_size  # a score and a weighted value, a multiply-add each

    @property
    def rope(self) -> Rope | None:
        return self.rotary


@dataclass(frozen=True)
class MLP(base.Op):
    """x + residual_scale post_norm(down(act(factors up(norm(x))))); None: no such norm."""

    layer: int
    norm: base.Norm | None
    up: base.Matrix
    down: base.Matrix
    activation: base.Activation
    gated: bool  # `up` gives the gates, then the values: down(act(gates) * values)
    post_norm: base.Norm | None = None
    residual_scale: float = 1.0
    factors: tuple[float, ...] = ()  # of the parts of `up`
    learned: str | None = None  # prefix of xIELU's tensors (arXiv 2411.13010)
    inputs: base.InputGate | None = None  # how the layer adds its inputs afterwards
    stream: str | None = None  # name of a learned factor of all of x, last
    deviations: float | None = None  # a row's gates lose their mean plus this many deviations; below 0 they become 0
    down_norm: base.Norm | None = None  # of the input of `down`
    adaptable: ClassVar[bool] = True

    @property
    def learned_shapes(self) -> dict[str, base.Shape]:
        return base.union(base.numbers(f"{self.learned}.{one}") for one in base.XIELU if self.learned) | base.numbers(
            self.stream
        )

    @property
    def products(self) -> Mapping[str, int]:
        hidden = self.up.out * self.up.inner
        return {"hidden": hidden, "mlp_output": self.multiplied - hidden}


@dataclass(frozen=True)
class Deepstack(base.Op):
    """x plus the tower's additions to a picture's embeddings, number `index` (DeepStack, arXiv 2406.04334)."""

    index: int

    @property
    def halves(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Normed(base.Op):
    """norm(x), for models whose residual stream passes a norm after each addition."""

    norm: base.Norm

    @property
    def halves(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Head(base.Op):
    """Logits [vocabulary] = matrix(scale norm(x)), each as cap tanh(logit / cap) if there is a soft cap."""

    norm: base.Norm
    matrix: base.Matrix
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True)
class NextInput(base.Op):
    """x = project([token_norm(x); hidden_norm(h)]), with h from the batch's `before`; [h; x] if hidden_first.

    Predicts token p + 1 from token p and the model's hidden state of token p - 1 (MTP, arXiv 2412.19437, section 2.2).
    """

    token_norm: base.Norm
    hidden_norm: base.Norm
    project: base.Matrix  # [width, 2 width]
    hidden_first: bool = False

    @property
    def products(self) -> Mapping[str, int]:
        return {"hidden": self.multiplied}


@dataclass(frozen=True)
class Graph(base.OpList):
    """A whole model: its ops in the order of execution. `context`: the model's maximum context in tokens."""

    architecture: str
    context: int
    embed: Embed
    blocks: tuple[base.Op, ...]
    head: Head

    @property
    def ops(self) -> tuple[base.Op, ...]:
        return self.embed, *self.blocks, self.head

    @property
    def width(self) -> int:
        return self.embed.table.inner

    @cached_property
    def vocab_size(self) -> int:
        return self.head.matrix.out

    @property
    def tied_head(self) -> bool:
        return self.head.matrix == self.embed.table

    @cached_property
    def active_parameters(self) -> int:
        """All parameters, but of the experts in a layer only the chosen."""
        return self.parameters - sum(op.idle for op in self.blocks)

    def blocks_from(self, layer: int) -> tuple[base.Op, ...]:
        """The blocks from the first one of a layer on. Between layers there are some that belong to none."""
        places = (i for i, op in enumerate(self.blocks) if getattr(op.parts[0], "layer", -1) >= layer)
        return self.blocks[next(places, len(self.blocks)) if layer else 0 :]

    @cached_property
    def attention(self) -> tuple[base.Op, ...]:
        """The ops that read earlier tokens, one for each layer: attention or a recurrence."""
        return tuple(op for op in self.blocks if op.kv is not None)

    @cached_property
    def kv(self) -> tuple[LayerKV, ...]:
        return tuple(op.kv for op in self.blocks if op.kv is not None)

    @property
    def layers(self) -> int:
        return len(self.kv)

    @property
    def rotary_size(self) -> int:
        sizes = {layer.layout.rotary_size for layer in self.kv if not isinstance(layer.layout, RecurrentState)}
        assert len(sizes) <= 1, "all layers have heads of one size"
        return sizes.pop() if sizes else 0

    @cached_property
    def rotary_sizes(self) -> Mapping[Rope, int]:
        found: dict[Rope, int] = dict.fromkeys(self.ropes, 0)
        for op in self.attention:
            if op.rope is not None and op.kv is not None and not isinstance(op.kv.layout, RecurrentState):
                size = op.kv.layout.rotary_size
                assert found[op.rope] in (0, size), "heads of another size have another rotation"
                found[op.rope] = size
        return found

    @property
    def recurrent(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.kv) if isinstance(layer.layout, RecurrentState))

    @property
    def positions(self) -> Learned | Rope | None:
        if self.embed.positions is not None:
            return Learned()
        return next(iter(self.ropes), None)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations, of layers with full attention first; only the first may depend on a length limit."""
        windows_last = sorted(self.attention, key=lambda op: op.kv is not None and op.kv.window is not None)
        found = tuple(dict.fromkeys(op.rope for op in windows_last if op.rope is not None))
        assert all(angle_length(rope, 1) is None for rope in found[1:]), "one rotation depends on the length"
        return found

    def read(self, rows: int) -> dict[str, base.Shape]:
        """The shapes that a step of `rows` rows reads; without embedding tables."""
        return base.union(op.read(rows) for op in self.ops)
