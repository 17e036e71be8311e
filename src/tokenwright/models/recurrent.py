"""The op of a recurrent layer: a state that each token rewrites, instead of K and V that grow with the text.

    rows     = project(norm(x))                  in parts: the convolution's channels, a gate, and numbers of each head
    channels = act(bias + sum_j taps_j channels of the last tokens)      causal and depthwise, the row itself included
    S        = decay S + key (x) write                                   [K, V] of each head, in fp32
    mixed    = S^T query                                                 [H, V]
    result   = out(gate and norm of mixed)

    convolution   no S: mixed is the channels                            LFM2: gates before and after the convolution
    delta         write = beta (value - (decay S)^T key)                 Gated DeltaNet, arXiv 2412.06464
                  decay = exp(-exp(A) softplus(a + bias)), beta = sigmoid(b) times a factor; query and key have length 1
                  each number of a key may have an a, a bias and so a decay of its own (KDA, arXiv 2510.26692)
    ssd           write = step value; mixed gets D value more            Mamba-2, arXiv 2405.21060
                  step = softplus(dt + bias) within limits, decay = exp(-exp(A) step)
    scan          as ssd, of one head; each column of S has a step, and each number an A      Mamba-1, arXiv 2312.00752

Prompt and decode compute this token by token, with equal bits. Matrices between the convolution and the rule append
their results, normed in parts, to the row (scan: dt, B, C = matrix(channels); step = matrix(dt)).
"""

from dataclasses import dataclass, replace
from typing import Literal

from tokenwright.config import LayerKV, RecurrentState
from tokenwright.models.op import Matrix, Norm, Op, Shape, Weighted

COLUMNS = 64  # of S in a slab; as in backends/native/cpp/ops/recurrent.cpp
MOST_TAPS = 16  # as in backends/native/cpp/kernels.h
MOST_NORMS = 3  # as in backends/native/cpp/step/step.h
Rule = Literal["convolution", "delta", "ssd", "scan"]
RULES: tuple[Rule, ...] = ("convolution", "delta", "ssd", "scan")
Phase = Literal["all", "convolution", "rule"]
PHASES: tuple[Phase, ...] = ("all", "convolution", "rule")
Gate = Literal["silu", "sigmoid"]
GATES: tuple[Gate, ...] = ("silu", "sigmoid")  # as in backends/native/cpp/kernels.h


@dataclass(frozen=True, slots=True)
class Places:
    """The first number of each part of a row; -1: none. beta, decay: one a head, but for scans and `key_decays`."""

    conv: int = 0
    query: int = -1
    key: int = -1
    value: int = -1
    before: int = -1  # factors of the channels before the convolution
    gate: int = -1
    beta: int = -1
    decay: int = -1


@dataclass(frozen=True, slots=True)
class Recurrence(Weighted):
    """The arithmetic between the two projections.

    Its tensors: `.conv` [channels, taps], and for each head `.a_log`, `.dt` and, with the ssd rule, `.skip`; the scan
    rule has them for each column, `.a_log` [V, K].
    """

    name: str  # prefix of its tensors
    rule: Rule
    channels: int
    taps: int  # that the convolution reads, the row itself included
    places: Places
    conv_bias: bool = False
    activated: bool = True  # SiLU after the convolution
    heads: int = 0  # H, which share `key_heads` queries and keys evenly
    key_heads: int = 0
    key_size: int = 0  # K
    value_size: int = 0  # V
    norm: Norm | None = None  # of mixed, over each of its parts, or over each head if it has the size of one
    gate_first: bool = False
    least_step: float = 0.0
    most_step: float = float("inf")
    beta_factor: float = 1.0
    in_turn: bool = False  # head h has the query and key h % key_heads, not those of the heads beside it
    key_decays: bool = False  # each number of a key has its own decay, and so `.dt` [H x K]
    gated_by: Gate = "silu"
    conv_parts: tuple[tuple[str, int], ...] = ()  # tensors of the taps and their channels; none: one, `.conv`
    phase: Phase = "all"  # `convolution` returns the channels, which `rule` reads; each has its part of the state

    def of_phase(self, phase: Phase) -> "Recurrence":
        return replace(self, phase=phase)

    @property
    def moved(self) -> range:
        first = self.history if self.phase == "rule" else 0
        return range(first, self.history if self.phase == "convolution" else self.numbers)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        return self.conv_parts or (("conv", self.channels),)

    @property
    def history(self) -> int:
        """Earlier inputs of the convolution: [taps - 1, channels]."""
        return (self.taps - 1) * self.channels

    @property
    def numbers(self) -> int:
        """The history, then S [H, K, V] in slabs [H, V / columns, K, columns]."""
        return self.history + self.heads * self.key_size * self.value_size

    @property
    def columns(self) -> int:
        """Columns of a slab, which one thread rewrites in its first cache."""
        return self.value_size if self.value_size % COLUMNS else COLUMNS

    @property
    def width(self) -> int:
        return self.channels if self.phase == "convolution" or not self.heads else self.heads * self.value_size

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {f"{self.name}.{part}.weight": (rows, self.taps) for part, rows in self.parts}
        if self.conv_bias:
            found[f"{self.name}.conv.bias"] = (self.channels,)
        if self.rule == "scan":
            found |= {f"{self.name}.{one}.weight": (self.value_size,) for one in ("dt", "skip")}
            found[f"{self.name}.a_log.weight"] = (self.value_size, self.key_size)
        elif self.rule != "convolution":
            found[f"{self.name}.a_log.weight"] = (self.heads,)
            found[f"{self.name}.dt.weight"] = (self.heads * (self.key_size if self.key_decays else 1),)
        if self.rule == "ssd":
            found[f"{self.name}.skip.weight"] = (self.heads,)
        return found


@dataclass(frozen=True, slots=True)
class Inner(Weighted):
    """A matrix between convolution and rule, over the numbers from `at` on. norms: of its first parts."""

    matrix: Matrix
    at: int
    norms: tuple[Norm, ...] = ()


@dataclass(frozen=True)
class Recurrent(Op):
    """x + residual_scale post_norm(out(recurrence(factors project(norm(x))))); None: no such norm."""

    layer: int
    norm: Norm | None
    project: Matrix
    recurrence: Recurrence
    out: Matrix
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    beside: bool = False  # it reads x as it was before the attention op before it
    factors: tuple[tuple[int, float], ...] = ()  # rows of the projection, and their factor
    inner: tuple[Inner, ...] = ()

    @property
    def row(self) -> int:
        return self.project.out + sum(one.matrix.out for one in self.inner)

    @property
    def kv(self) -> LayerKV:
        return LayerKV(RecurrentState(self.recurrence.numbers))
