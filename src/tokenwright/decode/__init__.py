"""From logits to tokens: sampling, and the guards that end a text."""

from tokenwright.decode.guards import TextGuard
from tokenwright.decode.sample import TorchSampler, uniform

__all__ = ["TextGuard", "TorchSampler", "uniform"]
