"""The rows of logits of a run's last steps, held so that other sampling settings can be tried without the model."""

import threading
from collections import OrderedDict

from tokenwright.arrays import Floats

MOST_BYTES = 16 * 2**20  # of one run


class HeldLogits:
    """The last rows of logits [V], fp32, by step, as many as `most` bytes hold, and always the newest.

    Any thread may add rows and read them. A single computed row is held as it is, for nothing writes to the
    logits of a step again; one of several is copied, for it would keep the others.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.nbytes = 0
        self._rows: OrderedDict[int, Floats] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, step: int, logits: Floats, *, alone: bool) -> None:
        """Hold a step's row, and let go of the oldest for which there is no room. It must not change later."""
        row = logits if alone else logits.copy()
        with self._lock:
            self._drop(self._rows.pop(step, None))  # of an attempt that failed
            while self._rows and self.nbytes + row.nbytes > self.most:
                self._drop(self._rows.popitem(last=False)[1])
            self._rows[step] = row
            self.nbytes += row.nbytes

    def _drop(self, row: Floats | None) -> None:
        self.nbytes -= 0 if row is None else row.nbytes

    def get(self, step: int) -> Floats | None:
        """A copy of the row of a step; None: it is not held, or no longer."""
        with self._lock:
            row = self._rows.get(step)
            return None if row is None else row.copy()

    @property
    def first(self) -> int | None:
        """The oldest step whose row is held."""
        with self._lock:
            return next(iter(self._rows), None)
