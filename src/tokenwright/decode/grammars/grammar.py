"""Grammars: a mask of the tokens allowed next, so that the whole text matches a JSON schema or a regex."""

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from threading import Lock
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.decode.grammars import grammar_worker
from tokenwright.decode.grammars.grammar_kinds import NAMES, SOURCES
from tokenwright.decode.grammars.grammar_trials import LIMITS, SIMPLER, Budget, GrammarWorkers, shortened
from tokenwright.engine import Grammar
from tokenwright.errors import EngineError, GrammarError, RequestError

Mask = NDArray[np.uint32]
Cut = Callable[[str], Sequence[int]]

STEP_SECONDS = 1.0  # CPU time of one matcher call; LIMITS bound it to about 50 ms
LONGEST_TOKEN = 1024  # bytes, the depth of llguidance's trie; longer tokens are never allowed
MOST_FORCED = 128  # bytes that are tokenised for drafts
_WORD = 32


class Grammars:
    """Compiles the grammars of requests for one model. Thread-safe.

    `token_bytes(token, first)` returns the bytes that a token adds to a text, `first` if it opens the text; None for
    special and unknown tokens. `cut(text)`: the tokens of a text within another. The first `compile` builds the trie of
    all tokens.
    """

    def __init__(
        self,
        token_bytes: Callable[[int, bool], bytes | None],
        vocab_size: int,
        end_ids: Iterable[int],
        cut: Cut = lambda text: (),  # noqa: ARG005
    ) -> None:
        self._token_bytes = token_bytes
        self._ids = _Ids(vocab_size, frozenset(end_ids), cut)
        self._lock = Lock()
        self._tokenizer: Any = None
        self._workers: GrammarWorkers | None = None

    def compile(self, grammar: Grammar, *, opens: bool = False, budget: Budget | None = None) -> "GrammarState":
        """The constraint at the start of a text; `opens`: no prompt token has text.

        Raises RequestError, within seconds, for a grammar that is invalid, allows no text, is not supported or exceeds
        its limits or the `budget`; EngineError if no worker starts.
        """
        what = f"the {NAMES[grammar.kind]}"
        source = _source(grammar)
        tokenizer, workers = self._ready()
        complaint = workers.complaint(source, budget or Budget())
        if complaint:
            raise RequestError(f"{what} cannot be used: {complaint}")
        special = _words(grammar.special - self._ids.end_ids, self._ids.vocab_size)
        state = GrammarState(grammar_worker.matcher(tokenizer, source, LIMITS), self._ids, special, opens=opens)
        try:
            state.mask()
        except EngineError as error:
            raise RequestError(f"{what} cannot be used: {error}") from None
        return state

    def complaint(self, grammar: Grammar, budget: Budget) -> str:
        """Why a grammar cannot be used; "": it can. It leaves the budget of a last compilation."""
        try:
            return self._ready()[1].complaint(_source(grammar), budget, budget.kept)
        except RequestError as error:
            return str(error)

    def enforceable(self, schema: str, budget: Budget) -> tuple[str, list[str]] | None:
        """A schema, in JSON, as far as a grammar can enforce it, and the places of the rest; None: unknown."""
        said = self._ready()[1].ask({"schema": schema, "ask": "enforceable"}, budget, budget.kept).said
        return said and (said[0], said[1])

    def mistake(self, schema: str, budget: Budget) -> str:
        """Where a schema, in JSON, is wrong in itself; "": nowhere, as far as the budget lets one know."""
        return self._ready()[1].ask({"schema": schema, "ask": "mistake"}, budget, budget.kept).said or ""

    def close(self) -> None:
        with self._lock:
            if self._workers is not None:
                self._workers.close()

    def _ready(self) -> "tuple[Any, GrammarWorkers]":
        with self._lock:
            if self._workers is None:
                tokens = self._ids.entries(self._token_bytes)
                self._tokenizer = grammar_worker.byte_tokenizer(tokens)
                self._workers = GrammarWorkers(tokens)
            return self._tokenizer, self._workers


def _source(grammar: Grammar) -> str:
    try:
        grammar.text.encode()
    except UnicodeEncodeError as error:
        what = f"the {NAMES[grammar.kind]}"
        raise RequestError(f"character {error.start} of {what} is half of a surrogate pair; remove it") from None
    return SOURCES[grammar.kind](grammar)


class _Ids:
    """Maps the model's token ids to llguidance's.

    [ 0 ... V ) the model's ids    [ V ... N ) tokens whose bytes differ at the start of a text    N: the end
    """

    def __init__(self, vocab_size: int, end_ids: frozenset[int], cut: Cut) -> None:
        self.vocab_size = vocab_size
        self.cut = cut
        self.end_ids = end_ids
        self.ends = _words(end_ids, vocab_size)
        self.first: dict[int, int] = {}  # {model id: llguidance's id of its form at the start of a text}
        self._forms = np.zeros(0, dtype=np.int64)  # [N - V] the model id of each such form
        self._text = self._same = self.ends  # ids with text, and those without such a form

    def entries(self, token_bytes: Callable[[int, bool], bytes | None]) -> list[bytes]:
        """The bytes of llguidance's ids 0 to N - 1; b"" for ids without text and end ids."""
        middle = [self._piece(token_bytes, token, first=False) for token in range(self.vocab_size)]
        opening = [self._piece(token_bytes, token, first=True) for token in range(self.vocab_size)]
        other = [token for token in range(self.vocab_size) if middle[token] != opening[token]]
        self.first = {token: self.vocab_size + i for i, token in enumerate(other)}
        self._forms = np.array(other, dtype=np.int64)
        self._text = _words((token for token in range(self.vocab_size) if middle[token]), self.vocab_size)
        self._same = self._text & ~_words(other, self.vocab_size)
        return middle + [opening[token] for token in other]

    def _piece(self, token_bytes: Callable[[int, bool], bytes | None], token: int, *, first: bool) -> bytes:
        piece = b"" if token in self.end_ids else token_bytes(token, first) or b""
        return b"" if len(piece) > LONGEST_TOKEN or piece[:1] == b"\xff" else piece  # 0xFF is never part of UTF-8

    def mask(self, bits: bytes, *, opens: bool) -> Mask:
        words = np.frombuffer(bits, dtype="<u4")
        mask: Mask = words[: len(self.ends)] & (self._same if opens else self._text)
        if opens:
            places = self.vocab_size + np.arange(len(self._forms))
            allowed = words[places // _WORD] >> (places % _WORD).astype(np.uint32) & 1
            mask |= _words(self._forms[allowed.astype(bool)].tolist(), self.vocab_size)
        return mask


class GrammarState:
    """A stop checker's Constraint: a place in a text of a grammar, over a matcher of llguidance. Not thread-safe.

    special: the mask of special tokens that the grammar may name. opens: the next token opens the text.
    """

    answering = True

    def __init__(self, matcher: Any, ids: _Ids, special: Mask, *, opens: bool) -> None:
        self.matcher = matcher
        self._ids = ids
        self._special = special
        self.opens = opens
        self._mask: Mask | None = None

    def mask(self) -> Mask:
        """The allowed next ids, at least one, as read-only words [ceil(V / 32)], low bits first. Raises EngineError."""
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def forced(self) -> Sequence[int]:
        """The tokens of the bytes that the grammar forces next, as far as they are whole characters."""
        if self.opens or self.matcher.is_stopped():
            return ()
        # a copy: the matcher would wait for these bytes and take no other tokens of the same text
        settled = self.matcher.deep_copy().compute_ff_bytes()[:MOST_FORCED]
        return self._ids.cut(settled.decode(errors="ignore")) if settled else ()

    def advance(self, token: int) -> bool:
        """Advance by a token that the mask allows. True: the text must end here. Raises EngineError."""
        if token in self._ids.end_ids:
            if not self.matcher.is_accepting():
                raise EngineError(f"the end token {token} was written where the grammar lets no text end")
            return True
        self._step(self.matcher.consume_token, self._ids.first.get(token, token) if self.opens else token)
        self._mask, self.opens = None, False
        return bool(self.matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        return bool(self.matcher.is_accepting())

    def fork(self) -> Self:
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def _compute(self) -> Mask:
        if self.matcher.is_stopped() and not self.matcher.is_error():
            mask = self._ids.ends.copy()
        else:
            bits = self._step(self.matcher.compute_bitmask)
            mask = self._ids.mask(bits, opens=self.opens)
            mask |= np.frombuffer(bits, dtype="<u4")[: len(mask)] & self._special
            if self.matcher.is_accepting():
                mask |= self._ids.ends
        if not mask.any():
            raise EngineError("the grammar lets this text neither end nor go on with any token of the model")
        return mask

    def _step(self, do: Callable[..., Any], *args: Any) -> Any:
        """Call the matcher. Raises GrammarError for an error that the matcher only records, and over the time limit."""
        start = time.thread_time()
        result = do(*args)
        seconds = time.thread_time() - start
        error = shortened(self.matcher.get_error())
        if error:
            raise GrammarError(f"the grammar cannot be followed: {error}")
        if seconds > STEP_SECONDS:
            raise GrammarError(f"one step of the grammar took {seconds:.1f} s of {STEP_SECONDS:g} allowed; {SIMPLER}")
        return result


def _words(ids: Iterable[int], vocab_size: int) -> Mask:
    bits = np.zeros(-(-vocab_size // _WORD) * _WORD, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
