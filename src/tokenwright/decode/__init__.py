"""From logits to tokens: sampling, beam search, grammars, and the guards that end a text."""

from tokenwright.decode.beam import BeamSearch
from tokenwright.decode.guards import TextGuard
from tokenwright.decode.sample import TorchSampler, uniform

__all__ = ["BeamSearch", "TextGuard", "TorchSampler", "uniform"]
