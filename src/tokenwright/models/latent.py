"""The op of multi-head latent attention (MLA, arXiv 2405.04434), in its absorbed form (section 2.1.2).

latent, key part = kv_down(norm(x))                          [R], [rope]; the norm of the latent follows
cache row        = latent | rotated key part                 one for all heads
query, part      = q_up(q_norm(q_down(norm(x)))), or of one matrix     [H, nope], [H, rope]
query row        = k_up_h query_h | rotated part_h           [H, R + rope]
mixed            = softmax(scale query row . cache rows) latents       [H, R]
result           = out(v_up_h mixed_h over all heads)
"""

from dataclasses import dataclass
from typing import ClassVar

from tokenwright.config import Latent, LayerKV, Rope
from tokenwright.models.op import Matrix, Norm, Op, Scoring


@dataclass(frozen=True)
class LatentAttention(Op):
    """x + residual_scale post_norm(attention(norm(x))); None: no such norm."""

    layer: int
    heads: int
    nope_size: int  # of a head's query,
    rope_size: int
    value_size: int  # of a head
    rank: int  # R, of the latent
    scoring: Scoring
    norm: Norm | None
    down: Matrix  # rows of q or its latent, of the latent, and of the keys' rotary part
    q_norm: Norm | None
    q_up: Matrix | None  # [H x (nope + rope), rank of q]
    kv_norm: Norm  # of the latent
    k_up: Matrix  # [H x R, nope]: of each head its W_k, transposed
    v_up: Matrix  # [H x value, R]
    out: Matrix  # [width, H x value]
    rotary: Rope | None = None
    window: int | None = None
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    adaptable: ClassVar[bool] = True

    @property
    def q_rows(self) -> int:
        return self.down.out - self.rank - self.rope_size

    @property
    def kv(self) -> LayerKV:
        return LayerKV(Latent(self.rank, self.rope_size), self.window)

    @property
    def pair_flops(self) -> int:
        return 2 * self.heads * (2 * self.rank + self.rope_size)  # a score over the row, and a weighted latent

    @property
    def rope(self) -> Rope | None:
        return self.rotary
