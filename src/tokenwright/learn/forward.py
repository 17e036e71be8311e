"""A reference forward pass beside the engine, for the challenges `agree` and `heads`: computed by torch, never served.

The planted faults of `agree` and the maps of `heads` are computed here (`backends/torch/reference_pass.py`).
"""

from collections.abc import Sequence

from tokenwright.arrays import Floats
from tokenwright.backends.device import needs_torch
from tokenwright.engine.window import AttentionWindow
from tokenwright.learn.work import CheckWork
from tokenwright.models.taps import Tap, ignore


class ForwardPass:
    """The forward pass of one text of at most `limit` tokens. fault: one of its planted faults, "twice" or "unmasked".

    Raises RequestError where torch is not installed.
    """

    def __init__(self, work: CheckWork, limit: int, fault: str = "") -> None:
        needs_torch("this challenge, which computes beside the engine,")
        from tokenwright.backends.torch.reference_pass import ReferencePass

        self.work = work
        loaded = work.llm.loaded
        self.computed = ReferencePass(loaded.decoder.op_by_op, limit, loaded.device, fault)

    def rows(self, tokens: Sequence[int], start: int, tap: Tap = ignore, *, further: bool = False) -> Floats:
        """Logits [n, vocabulary] of `tokens` from position `start` on, as `ReferencePass.rows` says.

        Raises Stopped where the work must end.
        """
        self.work.check()
        return self.computed.rows(tokens, start, tap, further=further)

    def weights(self, layer: int, queries: Floats, keys: Floats) -> Floats:
        """The attention weights [H, t, t] of a layer over a whole text."""
        window = AttentionWindow(self.work.llm.config.windows[layer])
        return self.computed.weights(layer, queries, keys, window)
