"""Choose tokens from logits: logits processors, sampling, beam search, grammars, stop checkers and drafts."""

from tokenwright.decode.beam import BeamSearch
from tokenwright.decode.drafts.speculate import SuffixProposer
from tokenwright.decode.sampler import RowSampler, uniform
from tokenwright.decode.stopping import TextStopChecker

__all__ = ["BeamSearch", "RowSampler", "SuffixProposer", "TextStopChecker", "uniform"]
