"""From logits to tokens: sampling, beam search, grammars, and the guards that end a text."""

from tokenwright.decode.beam import BeamSearch
from tokenwright.decode.sampler import TorchSampler, uniform
from tokenwright.decode.stopping import TextStopChecker

__all__ = ["BeamSearch", "TextStopChecker", "TorchSampler", "uniform"]
