"""Several residual streams, of which layers compute the first, as in Gemma 3n. No tensors here.

    spread     s_0 = x, and s_i = project_i(x), scaled to the root mean square of x       behind the embedding
    predict    s_j = s_j + sum_i c_ji s_i                                                 before a layer; x = s_0
    laurel     x = (x + norm(b) + post_norm(right(left(norm(b))))) / sqrt 2               behind attention
    correct    s_i = s_i + (1 + c_i) (x - s_0);  s_i = s_i + inputs of the layer, if i > 0    behind the MLP
    merge      x = the mean of s_0 and of project_i(s_i), scaled to the root mean square of s_0    before the head

c is linear in tanh(router(scale norm(x))) (AltUp, arXiv 2301.13310). b is x before attention (LAuReL, arXiv
2411.07501).
"""

from dataclasses import dataclass

from tokenwright.models.op import InputGate, Matrix, Norm, Op, Shape, Weighted, numbers

MOST_STREAMS = 8


class Streams(Op):
    """The spread of the embedding to all streams. It counts as a part of the next op."""

    @property
    def halves(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Spread(Streams):
    project: Matrix  # [(streams - 1) x width, width]


@dataclass(frozen=True, slots=True)
class StreamRouter(Weighted):
    norm: Norm
    scale: float
    matrix: Matrix  # [streams, width]
    coefficients: Matrix  # [outputs, streams]


@dataclass(frozen=True)
class Predict(Streams):
    router: StreamRouter


@dataclass(frozen=True)
class Laurel(Streams):
    """The op before it keeps the x that this op reads."""

    norm: Norm
    left: Matrix  # [rank, width]
    right: Matrix  # [width, rank]
    post_norm: Norm
    factor: float


@dataclass(frozen=True)
class Correct(Streams):
    """scale: factors [width] of the gate's input."""

    router: StreamRouter
    inputs: InputGate
    scale: str | None = None

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        return numbers(self.scale, self.inputs.out.out)


@dataclass(frozen=True)
class Merge(Streams):
    each: tuple[Matrix, ...]  # [width, width]
