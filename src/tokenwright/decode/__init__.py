"""From logits to tokens: logits processors, sampling, beam search, grammars and stop checkers."""

from tokenwright.decode.beam import BeamSearch
from tokenwright.decode.sampler import RowSampler, uniform
from tokenwright.decode.stopping import TextStopChecker

__all__ = ["BeamSearch", "RowSampler", "TextStopChecker", "uniform"]
