"""The protocol of a backend, which computes batches of one model over one KV store. Results are NumPy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tokenwright.arrays import Floats
from tokenwright.backends.key_bias import KeyBias
from tokenwright.backends.observation import Observed, Watched
from tokenwright.cache import KVStore
from tokenwright.engine import Batch
from tokenwright.models.op import Scoring


@dataclass(frozen=True, slots=True)
class Scored(Scoring):
    """Scoring, with the query heads' sink logits and the bias that a cache may store keys without."""

    sink_logits: Any = None  # [H], an array or tensor; the softmax counts each as one more key's score
    key_bias: KeyBias | None = None

    def of_head(self, head: int) -> "Scored":
        return replace(self, sink_logits=None if self.sink_logits is None else self.sink_logits[head : head + 1])

    def of_group(self, group: int) -> "Scored":
        return replace(self, key_bias=None if self.key_bias is None else self.key_bias.of_group(group))


@dataclass(slots=True)  # frozen ones take longer to make
class Logits:
    """Rows of logits [W, vocabulary], fp32, with argmax (the lowest index) and logsumexp if kernels computed them.

    log_totals: NaN if a logit of the row is not finite. hidden: [N, width] in fp32 after the final norm. faults: errors
    of chunks whose rows cannot be used.
    """

    rows: Floats
    best: tuple[int, ...] = ()
    log_totals: tuple[float, ...] = ()
    hidden: Floats | None = None
    faults: Mapping[int, Exception] = field(default_factory=dict)


class Backend(Protocol):
    """A model over one KV store: a call stores K and V of a batch's tokens and returns logits."""

    store: KVStore

    def __call__(self, batch: Batch) -> Logits:
        """Compute the logits of `logits_rows` and the hidden states of `hidden_rows`."""

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:
        """Compute like a call, fill in `watched`, and return the facts of the pass as well."""
