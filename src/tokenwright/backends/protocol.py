"""The protocol of a backend, which computes batches of one model over one KV store, and its results.

The result is in NumPy arrays on the CPU, whatever a backend computes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tokenwright.arrays import Floats
from tokenwright.backends.observation import Observed, Watched
from tokenwright.cache import KVStore
from tokenwright.engine import Batch
from tokenwright.models.graph import Scoring
from tokenwright.models.taps import Tap, ignore


@dataclass(frozen=True, slots=True)
class Scored(Scoring):
    """Scoring with the learned logits of the query heads [H], which the softmax counts as one more key's; or None.

    sink_logits: an array for native kernels, a tensor for torch's kernels.
    """

    sink_logits: Any = None

    def of_head(self, head: int) -> "Scored":
        """That of one query head."""
        return self if self.sink_logits is None else replace(self, sink_logits=self.sink_logits[head : head + 1])


@dataclass(slots=True)  # not frozen: each step makes one, and frozen ones take longer
class Logits:
    """Rows of logits [W, vocabulary] in fp32, and each row's argmax and logsumexp, if the kernels computed them.

    best: the argmax, the lowest index among equals. log_totals: the logsumexp, NaN if a logit of the row is not finite.
    hidden: the hidden states [N, width] in fp32 after the final norm, of the batch's `hidden_rows`; None without any.
    """

    rows: Floats
    best: tuple[int, ...] = ()
    log_totals: tuple[float, ...] = ()
    hidden: Floats | None = None


class Backend(Protocol):
    """A model over one KV store: a call takes a batch, stores the K and V of its tokens and returns logits."""

    store: KVStore

    def __call__(self, batch: Batch, tap: Tap = ignore) -> Logits:
        """Compute a batch: the logits of its `logits_rows` and the hidden states of its `hidden_rows`, in their order.

        Calls `tap` at every site.
        """

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:
        """As a call; also the facts of the pass. Fills the queries of `watched`."""
