"""The router: which replica takes a text. It knows no sockets, no processes and no clock.

    cost of a replica = its work + MISS_WEIGHT x tokens of this text that it has not cached

A replica's work is what it still has to compute of the texts that it was given: tokens of prompts, and DECODE_WEIGHT
for each token that is to be written, as far as texts of late were long. The cheapest replica takes the text; so a
conversation goes where its pages are. A hot prefix spreads by itself: once its replica has MISS_WEIGHT times more work
than the prefix has tokens, another one is cheaper. A slow replica has its work for longer, and so takes less. Equal
costs go to the replica with fewer texts, then to the one that was chosen longest ago. Both weights were chosen in
simulations (benchmarks/cluster.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenwright.cluster.replica_pages import ReplicaPages
from tokenwright.engine.prefix_index import PrefixHashes

DECODE_WEIGHT = 4.0  # of a token to be written, in tokens of a prompt; a batch writes many in one step
MISS_WEIGHT = 3.0  # of a token that is computed though it may be cached elsewhere: it takes time from others, too
SMOOTH = 0.05  # of a text that has ended in the mean length of texts


@dataclass(slots=True, eq=False)
class RoutedText:
    """A text at a replica. prefill, decode: tokens that are still to be computed and to be written, as expected."""

    prefill: float
    decode: float
    hashes: Sequence[bytes]


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """A replica as the router knows it.

    taking: new texts may go to it. texts: by number. chosen: when it was chosen last, as a count.
    """

    pages: ReplicaPages
    taking: bool = True
    texts: dict[int, RoutedText] = field(default_factory=dict)
    chosen: int = 0

    @property
    def work(self) -> float:
        """Tokens of work that it has."""
        return sum(text.prefill + DECODE_WEIGHT * text.decode for text in self.texts.values())


class Router:
    """Chooses among replicas, and counts what each has to do."""

    def __init__(self) -> None:
        self.written = 100.0  # tokens of a text, the mean of those that ended
        self._choices = 0

    def choose(
        self, replicas: Iterable[RoutedReplica], hashes: PrefixHashes, tokens: Sequence[int]
    ) -> tuple[RoutedReplica, int] | None:
        """The replica for a text, and how many of its first tokens that one has cached; None: none takes texts."""
        best: tuple[tuple[float, int, int], RoutedReplica, int] | None = None
        for replica in replicas:
            if replica.taking:
                cached = replica.pages.cached(hashes, tokens)
                cost = replica.work + MISS_WEIGHT * (len(tokens) - cached)
                order = cost, len(replica.texts), replica.chosen
                if best is None or order < best[0]:
                    best = order, replica, cached
        return None if best is None else best[1:]

    def assign(
        self, replica: RoutedReplica, number: int, hashes: PrefixHashes, tokens: int, cached: int, most: int
    ) -> None:
        """Count a text of `tokens` tokens, which may write `most` more, as the work of a replica."""
        self._choices += 1
        replica.chosen = self._choices
        text = RoutedText(float(tokens - cached), min(float(most), self.written), list(hashes.hashes))
        replica.pages.expect(text.hashes)
        replica.texts[number] = text

    def wrote(self, replica: RoutedReplica, number: int, tokens: int) -> None:
        """Count tokens that a replica wrote: the prompt before them is computed."""
        text = replica.texts[number]
        if text.prefill:
            self._computed(replica, text)
        text.decode = max(1.0, text.decode - tokens)

    def ended(self, replica: RoutedReplica, number: int, written: int | None) -> None:
        """Forget a text. written: the tokens that it came to; None: it was cancelled, or goes on elsewhere."""
        text = replica.texts.pop(number)
        self._computed(replica, text)
        if written is not None:
            self.written += SMOOTH * (written - self.written)

    def _computed(self, replica: RoutedReplica, text: RoutedText) -> None:
        replica.pages.settle(text.hashes)
        text.prefill, text.hashes = 0.0, ()
