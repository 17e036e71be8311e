"""The rows of logits of a run's last steps, held so that other sampling settings can be tried without the model."""

import threading
from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray

MOST_BYTES = 16 * 2**20  # of one run


class HeldLogits:
    """Copies of the last rows of logits [V], fp32, by step, as many as `most` bytes hold, and always the newest.

    Any thread may add rows and read them. A new row is written where the oldest was: memory that the system has to map
    first costs several times what the copy does. numpy copies it: torch would wake a thread for each core, beside the
    kernels of the next step.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self.nbytes = 0
        self._rows: OrderedDict[int, NDArray[np.float32]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, step: int, logits: torch.Tensor) -> None:
        """Hold a step's row, in the place of the oldest where there is no room for more."""
        with self._lock:
            row = self._rows.pop(step, None)  # of an attempt that failed
            if row is None and self._rows and self.nbytes + 4 * len(logits) > self.most:
                _, row = self._rows.popitem(last=False)
            if row is None:
                row = np.empty(len(logits), np.float32)
                self.nbytes += row.nbytes
            np.copyto(row, logits.numpy())
            self._rows[step] = row

    def get(self, step: int) -> torch.Tensor | None:
        """A copy of the row of a step; None: it is not held, or no longer."""
        with self._lock:
            row = self._rows.get(step)
            return None if row is None else torch.from_numpy(row.copy())

    @property
    def first(self) -> int | None:
        """The oldest step whose row is held."""
        with self._lock:
            return next(iter(self._rows), None)
