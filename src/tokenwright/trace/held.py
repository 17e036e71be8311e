"""The rows of logits of a run's last steps, held so that other sampling settings can be tried without the model."""

from collections import OrderedDict

import torch

MOST_BYTES = 16 * 2**20  # of one run


class HeldLogits:
    """The last rows of logits [V], fp32, by step, as many as `most` bytes hold, and always the newest.

    The engine thread adds rows; any thread reads them.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.nbytes = 0
        self._rows: OrderedDict[int, torch.Tensor] = OrderedDict()

    def add(self, step: int, logits: torch.Tensor) -> None:
        """Hold a step's row, which nobody writes to any more, and let the oldest go where there is no room.

        It is copied if its memory holds other rows as well.
        """
        row = logits.float()
        if row.untyped_storage().nbytes() > row.nbytes:
            row = row.clone()
        if (before := self._rows.pop(step, None)) is not None:  # of an attempt that failed
            self.nbytes -= before.nbytes
        self._rows[step] = row
        self.nbytes += row.nbytes
        while self.nbytes > self.most and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def get(self, step: int) -> torch.Tensor | None:
        """The row of a step; None: it is not held, or no longer."""
        return self._rows.get(step)

    @property
    def first(self) -> int | None:
        """The oldest step whose row is held."""
        return next(iter(self._rows), None)
