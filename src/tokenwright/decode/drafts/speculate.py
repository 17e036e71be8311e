"""The proposer drafts from earlier text, as long as the expected gain exceeds the cost.

Drafts are the tokens that followed an earlier occurrence of the last tokens (in the text, the request's prediction or
texts of the same key), or the only text that a grammar allows. For each text, acceptance is counted by the length of
the match. A step takes drafts by falling chance, while its expected tokens rise faster than its cost (`step_costs.py`).

Positions of earlier text are chained by a hash of their last `LEAST` tokens (Ziv and Lempel 1977), in constant time per
token.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from tokenwright.decode.drafts.step_costs import StepCosts
from tokenwright.engine import Sequence, Step

LEAST = 3  # tokens of the shortest match
LONGEST = 32
CANDIDATES = 8  # earlier places that are compared, the latest first
SLOTS = 1 << 12  # of the hash table
BETWEEN = -1  # separates two texts; no token has this id
GENERATION = 1 << 15  # tokens of one index of earlier texts; a key has the current one and the one before
LEAD = 8  # the last tokens of a prompt that are kept before the text written after it
MOST_DRAFTS = 15  # of one text in a step: with its own row a tile of 16, for which weights are read once
EARLIER_BYTES = 8 << 20
FORCED = 1 << 20  # stands for the length of a match where a grammar allows only one text
LENGTHS = (3, 4, 6, 9, 15, FORCED - 1)  # the highest match lengths of the counters for repeated text
CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95)  # the highest probabilities of the counters for a draft model
FROM_MODEL = len(LENGTHS) + 1  # the number of a draft model's first counter
PRIOR = (  # (held, made) of each counter before any guess
    *((1, 2), (1, 2), (2, 3), (2, 3), (5, 6), (7, 8), (7, 8)),
    *((1, 4), (2, 5), (3, 5), (3, 4), (5, 6), (9, 10)),
)
FORGET = 64  # guesses after which older ones count half
MARGIN = 1.02  # the least factor by which drafts must raise a step's tokens per cost


class Match(NamedTuple):
    """The last `length` tokens of a text occur in `source`, right before the place `after`."""

    length: int
    after: int
    source: "SuffixIndex"

    def following(self, count: int, *, repeats: bool) -> list[int]:
        """Up to `count` tokens that follow. repeats: at the end of the index, start over (for a text's own index)."""
        tokens = self.source.tokens[self.after : self.after + count].tolist()
        if BETWEEN in tokens:
            return tokens[: tokens.index(BETWEEN)]
        if repeats and len(tokens) < count:
            tokens = (tokens * count)[:count]
        return tokens


class SuffixIndex:
    __slots__ = ("_earlier", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self._last: array[int] = array("i", [-1]) * SLOTS  # by hash: the last place whose tokens end there
        self._earlier: array[int] = array("i")  # by place: the one before it with the same hash

    @property
    def nbytes(self) -> int:
        return sum(one.itemsize * len(one) for one in (self.tokens, self._last, self._earlier))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. A place can be found once the token after it is known."""
        known, last, earlier = self.tokens, self._last, self._earlier
        for token in tokens:
            place = len(known) - 1
            known.append(token)
            if place < LEAST - 1:
                if place >= 0:
                    earlier.append(-1)
                continue
            slot = hash((known[place - 2], known[place - 1], known[place])) & (SLOTS - 1)
            earlier.append(last[slot])
            last[slot] = place

    def longest(self, text: ListLike[int]) -> Match | None:
        """The longest match of the last tokens of `text`, the latest of several; None if shorter than LEAST."""
        if len(text) < LEAST:
            return None
        place = self._last[hash((text[-3], text[-2], text[-1])) & (SLOTS - 1)]
        best: Match | None = None
        for _ in range(CANDIDATES):
            if place < 0:
                break
            length = self._agreeing(text, place)
            if length >= LEAST and (best is None or length > best.length):
                best = Match(length, place + 1, self)
                if length == LONGEST:
                    break
            place = self._earlier[place]
        return best

    def _agreeing(self, text: ListLike[int], place: int) -> int:
        known, most = self.tokens, min(LONGEST, len(text), place + 1)
        for length in range(most):
            if known[place - length] != text[-1 - length]:
                return length
        return most


class EarlierTexts:
    """The texts that requests of each key have written, in at most `capacity` bytes; drops the least recently used."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[bytes, list[SuffixIndex]] = OrderedDict()  # of each the current index, and one before

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for indexes in self._keys.values() for index in indexes)

    def of(self, key: bytes) -> ListLike[SuffixIndex]:
        found = self._keys.get(key)
        if found is None:
            return ()
        self._keys.move_to_end(key)
        return found

    def add(self, key: bytes, prompt: ListLike[int], written: ListLike[int]) -> None:
        if not self.capacity or len(written) <= LEAST:
            return
        indexes = self._keys.setdefault(key, [SuffixIndex()])
        if len(indexes[0].tokens) >= GENERATION:
            indexes[:] = [SuffixIndex(), indexes[0]]
        indexes[0].extend((BETWEEN, *prompt[-LEAD:], *written[-GENERATION:], BETWEEN))
        self._keys.move_to_end(key)
        while self._keys and self.nbytes > self.capacity:
            self._keys.popitem(last=False)


@dataclass(slots=True)
class Guess:
    """Tokens that may follow a text of `length` tokens, and the number of each one's counter (`kinds`)."""

    length: int
    tokens: list[int]
    kinds: list[int]


def repeated(length: int, match: int, tokens: list[int]) -> Guess:
    """The guess from an earlier occurrence of the last `match` tokens."""
    return Guess(length, tokens, [bisect_left(LENGTHS, match + place) for place in range(len(tokens))])


@dataclass(slots=True)
class Followed:
    index: SuffixIndex
    seen: int = 0
    guess: Guess | None = None
    held: list[int] = field(default_factory=lambda: [held for held, _ in PRIOR])
    made: list[int] = field(default_factory=lambda: [made for _, made in PRIOR])
    failed: list[int] = field(default_factory=lambda: [0, 0])  # rejected in a row, of the index and of a draft model
    tried: int = 0  # the text's length at the last draft of a draft model

    def learn(self, tokens: ListLike[int]) -> None:
        guess = self.guess
        if guess is not None and guess.length < len(tokens):
            source = guess.kinds[0] >= FROM_MODEL
            self.failed[source] = 0 if guess.tokens[0] == tokens[guess.length] else self.failed[source] + 1
            for written, token, kind in zip(tokens[guess.length :], guess.tokens, guess.kinds, strict=False):
                self._count(kind, written == token)
                if written != token:
                    break
            self.guess = None
        if self.seen < len(tokens):
            self.index.extend(tokens[self.seen :])
            self.seen = len(tokens)

    def _count(self, kind: int, held: bool) -> None:
        self.held[kind] += held
        self.made[kind] += 1
        if self.made[kind] >= FORGET:
            self.held[kind], self.made[kind] = (self.held[kind] + 1) // 2, (self.made[kind] + 1) // 2

    def trust(self, source: bool) -> float:
        """The factor of the chances of a source's guesses: each rejection in a row from the second on halves it."""
        return 0.5 ** max(0, self.failed[source] - 1)

    @property
    def of_model(self) -> float:
        return sum(self.held[FROM_MODEL:]) / sum(self.made[FROM_MODEL:])

    def chances(self, guess: Guess) -> list[float]:
        """For each token of a guess, the chance that it and all before it are accepted."""
        first = self.trust(guess.kinds[0] >= FROM_MODEL)
        return list(accumulate((self.held[kind] / self.made[kind] for kind in guess.kinds), mul, initial=first))[1:]

    def prefers(self, forced: Guess, repeated: Guess) -> bool:
        """Whether to draft a grammar's guess instead of the repeated one, by the expected tokens."""
        first, other = self.chances(forced), self.chances(repeated)
        return sum(first) >= sum(other) if forced.tokens[0] == repeated.tokens[0] else first[0] >= other[0]


class Recomputation:
    """Cost and tokens of the steps that compute accepted drafts again, because a recurrent state goes back.

    c(m) is the chance that the first m of the n drafts of a text are accepted. The first rejection, with the chance
    1 - c(n), makes m + 1 tokens be computed again: the sum of (m + 1) (c(m) - c(m + 1)) over m < n. That step has no
    drafts of this text, so it counts as a plain step by the text's share of all texts.
    """

    def __init__(self, costs: StepCosts, rows: int, texts: float) -> None:
        self.tokens = 0.0
        self._costs, self._rows, self._texts = costs, rows, texts
        self._copied = self._more = 0.0

    def add(self, number: int, fails: float) -> None:
        """Add the draft `number`, from 1 on, of a text. fails: the chance that it is the first one rejected."""
        self.tokens += fails
        self._copied += self._costs.states * (number == 1)
        self._more += number * fails

    @property
    def cost(self) -> float:
        plain = self._costs.of(self._rows)
        return self._copied + self._costs.of(self._rows + self._more) - plain + self.tokens / self._texts * plain


def _forced(sequence: Sequence) -> ListLike[int]:
    try:
        return sequence.stop_checker.forced()
    except Exception:  # of the request's grammar: the sampler reports it
        return ()


class SuffixProposer:
    """The engine's Proposer. It keeps at most `earlier` bytes of texts that requests have written."""

    def __init__(self, costs: StepCosts, earlier: int = EARLIER_BYTES) -> None:
        self.costs = costs
        self.earlier = EarlierTexts(earlier)
        self._followed: dict[int, Followed] = {}
        self._paying: dict[int, bool] = {}  # `_pays` of steps in which each row writes a token

    @property
    def nbytes(self) -> int:
        return self.earlier.nbytes + sum(one.index.nbytes for one in self._followed.values())

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int], step: Step) -> ListLike[ListLike[int]]:
        tokens, rows = len(sequences), step.size
        pays = self._paying.get(rows) if tokens == rows else None
        if pays is None:
            pays = self._pays(tokens, rows)
            if tokens == rows:
                self._paying[rows] = pays
        if not pays:
            return [()] * len(sequences)
        guesses = [self._guess(*each) for each in zip(sequences, most, strict=True)]
        self._improve(sequences, most, guesses, step)
        if not any(guesses):
            return [()] * len(sequences)
        counts = self._worth(sequences, guesses, step)
        return [guess.tokens[:count] if guess else () for guess, count in zip(guesses, counts, strict=True)]

    def _improve(
        self, sequences: ListLike[Sequence], most: ListLike[int], guesses: list[Guess | None], step: Step
    ) -> None:
        """Improve some guesses from another source (`draft_model.py`)."""

    def end(self, sequence: Sequence) -> None:
        self._followed.pop(sequence.id, None)
        request = sequence.request
        if request.speculate and request.share and sequence.cache and request.width == 1:
            self.earlier.add(request.salt, request.prompt, sequence.written)

    def _guess(self, sequence: Sequence, most: int) -> Guess | None:
        text = sequence.tokens
        followed = self._followed.get(sequence.id)
        if followed is None:
            followed = self._followed[sequence.id] = Followed(SuffixIndex())
            if sequence.request.prediction:
                followed.index.extend((*sequence.request.prediction, BETWEEN))
        followed.learn(text)
        most = min(most, MOST_DRAFTS)
        followed.guess = self._repeated(sequence, followed.index, most)
        if forced := _forced(sequence):
            only = repeated(len(text), FORCED, list(forced[:most]))
            if followed.guess is None or followed.prefers(only, followed.guess):
                followed.guess = only
        return followed.guess

    def _repeated(self, sequence: Sequence, own: SuffixIndex, most: int) -> Guess | None:
        text, request = sequence.tokens, sequence.request
        best = own.longest(text)
        if request.share:
            for index in self.earlier.of(request.salt):
                match = index.longest(text)
                if match is not None and (best is None or match.length > best.length):
                    best = match
        if best is not None:
            tokens = best.following(most, repeats=best.source is own)
            return repeated(len(text), best.length, tokens) if tokens else None
        if request.prediction and len(text) == len(request.prompt):
            return repeated(len(text), LENGTHS[-2], list(request.prediction[:most]))
        return None

    def _pays(self, tokens: int, rows: int) -> bool:
        """Whether a draft that is certainly accepted would pay in a step of `rows` rows that writes `tokens`."""
        return (tokens + 1) / self.costs.of(rows + 1) > MARGIN * tokens / self.costs.of(rows)

    def _worth(self, sequences: ListLike[Sequence], guesses: ListLike[Guess | None], step: Step) -> list[int]:
        costs, counts = self.costs, [0] * len(guesses)
        offers = sorted(
            (-chance, place, number)
            for place, guess in enumerate(guesses)
            if guess is not None
            for number, chance in enumerate(self._followed[sequences[place].id].chances(guess), 1)
        )
        rows, tokens = step.size, float(sum(chunk.picks for chunk in step.chunks))
        read = sum(chunk.stop * (chunk.stop - chunk.start) for chunk in step.chunks) * costs.context
        best, taken = MARGIN * tokens / (costs.of(rows) + read), 0
        again, held = Recomputation(costs, rows, max(1.0, tokens)), [1.0] * len(guesses)
        for more, (chance, place, number) in enumerate(offers, 1):
            tokens -= chance
            read += len(sequences[place].tokens) * costs.context
            if costs.states:
                again.add(number, held[place] + chance)  # `offers` have negative chances, to be sorted
                held[place] = -chance
            if (worth := (tokens + again.tokens) / (costs.of(rows + more) + read + again.cost)) > best:
                best, taken = worth, more
        for _, place, _ in offers[:taken]:
            counts[place] += 1
        return counts
