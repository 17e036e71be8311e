"""The input of a layer that predicts one token further than the model (multi-token prediction, MTP).

The form of DeepSeek V3 (arXiv 2412.19437, section 2.2): row p of the layer reads the embedding of token p and the
model's hidden state of token p - 1, and predicts token p + 1, as row p of the model does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenwright.models.op import Matrix, Norm, Op


@dataclass(frozen=True)
class NextInput(Op):
    """x = project([token_norm(x); hidden_norm(h)]), with h from the batch's `before`; [h; x] if hidden_first."""

    token_norm: Norm
    hidden_norm: Norm
    project: Matrix  # [width, 2 width]
    hidden_first: bool = False

    @property
    def products(self) -> Mapping[str, int]:
        return {"hidden": self.multiplied}
