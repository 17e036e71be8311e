"""Grammars: a mask of the tokens allowed next, so that the whole text matches a JSON schema, a regex and so on.

llguidance (an Earley parser over a lexer of derivatives) walks the trie of all tokens and returns a mask. This module
gives it the bytes of each token as `text/` has them, converts four kinds of grammar to Lark, sets limits, and turns
failures into errors with a remedy. Nothing is kept between requests; a constraint belongs to one sequence.

    Grammars   one per model: the trie of its tokens' bytes, and the grammar workers
    Matched    one per sequence: mask(), advance(token), fork()
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from queue import Empty, LifoQueue
from threading import BoundedSemaphore, Lock, Timer
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.decode import grammar_worker
from tokenwright.engine import Grammar
from tokenwright.errors import EngineError, GrammarError, RequestError

Mask = NDArray[np.uint32]
Cut = Callable[[str], Sequence[int]]

# Speeds as measured by llguidance. A large public schema (FHIR) takes 500,000 of the initial lexer fuel.
LIMITS = {
    "initial_lexer_fuel": 600_000,  # nodes of the regular expressions, 50,000 per ms
    "step_lexer_fuel": 100_000,  # for one mask, 14,000 per ms
    "step_max_items": 20_000,  # parser items for one mask, 20,000 per ms
    "max_items_in_row": 2_000,  # parser items at one position of the text
    "max_lexer_states": 20_000,  # of 1 to 2 KB each, over the whole text
    "max_grammar_size": 200_000,  # symbols
    "verbose_errors": False,
}
STEP_SECONDS = 1.0  # CPU time of one matcher call; the limits above bound it to about 50 ms
WORKERS = 2  # grammars checked at the same time; others wait
WORKER_SECONDS = 60.0  # wall-clock time; only a worker that hangs without computing takes this long
LONGEST_TOKEN = 1024  # bytes, the depth of llguidance's trie; longer tokens are never allowed
# Between JSON tokens: a space, or a newline with indentation. Without a newline the bundled model ends fewer JSON
# texts within 300 tokens (163 of 180, and 177 with it).
_WHITESPACE = r"\x20|\n\x20{0,16}"
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'  # allow every tokenisation of the text, not only the canonical one
MOST_MESSAGE = 300  # characters
MOST_FORCED = 128  # bytes that are cut into tokens for drafts
_WORD = 32


class Grammars:
    """Compiles the grammars of requests for one model. Thread-safe.

    `token_bytes(token, first)` returns the bytes that a token adds to a text, `first` if it opens the text; None for
    special tokens and for ids that the tokenizer lacks. `vocab_size`: number of the model's ids, V. `end_ids`: ids that
    end a text. `cut(text)`: the tokens that the tokenizer makes of a text within another; none where it is not known.
    The first `compile` builds the trie; 150,000 tokens take 1.4 s.
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
        self._workers: _Workers | None = None

    def compile(self, grammar: Grammar, *, opens: bool = False) -> "Matched":
        """The constraint at the start of a text; `opens`: no prompt token has text.

        Raises RequestError, within seconds, for a grammar that is invalid, allows no text, is not supported or exceeds
        its limits; EngineError if no worker can be started.
        """
        what = f"the {_NAMES[grammar.kind]}"
        try:
            grammar.text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of {what} is half of a surrogate pair; remove it") from None
        source = _SOURCES[grammar.kind](grammar.text)
        tokenizer, workers = self._ready()
        complaint = workers.complaint(source)
        if complaint:
            raise RequestError(f"{what} cannot be used: {complaint}")
        special = _words(grammar.special - self._ids.end_ids, self._ids.vocab_size)
        constraint = Matched(grammar_worker.matcher(tokenizer, source, LIMITS), self._ids, special, opens=opens)
        try:
            constraint.mask()
        except EngineError as error:
            raise RequestError(f"{what} cannot be used: {error}") from None
        return constraint

    def close(self) -> None:
        """End the idle grammar workers; a later `compile` starts a new one."""
        with self._lock:
            if self._workers is not None:
                self._workers.close()

    def _ready(self) -> "tuple[Any, _Workers]":
        with self._lock:
            if self._workers is None:
                tokens = self._ids.entries(self._token_bytes)
                self._tokenizer = grammar_worker.byte_tokenizer(tokens)
                self._workers = _Workers(tokens)
            return self._tokenizer, self._workers


class _Ids:
    """Maps the model's ids to llguidance's.

    [ 0 ... V ) the model's ids    [ V ... N ) tokens whose bytes differ at the start of a text    N: the end
    """

    def __init__(self, vocab_size: int, end_ids: frozenset[int], cut: Cut) -> None:
        self.vocab_size = vocab_size
        self.cut = cut
        self.end_ids = end_ids
        self.ends = _words(end_ids, vocab_size)
        self.first: dict[int, int] = {}  # model id -> llguidance's id of its form at the start of a text
        self._forms = np.zeros(0, dtype=np.int64)  # [N - V] the model id of each such form
        self._text = self._same = self.ends  # ids with text, and those of them without such a form; see entries()

    def entries(self, token_bytes: Callable[[int, bool], bytes | None]) -> list[bytes]:
        """The bytes of llguidance's ids 0 to N - 1; ids without text and end ids have b""."""
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
        """llguidance's bits as a mask of the model's ids, without the end ids."""
        words = np.frombuffer(bits, dtype="<u4")
        mask: Mask = words[: len(self.ends)] & (self._same if opens else self._text)
        if opens:
            places = self.vocab_size + np.arange(len(self._forms))
            allowed = words[places // _WORD] >> (places % _WORD).astype(np.uint32) & 1
            mask |= _words(self._forms[allowed.astype(bool)].tolist(), self.vocab_size)
        return mask


class Matched:
    """A stop checker's Constraint over a matcher of llguidance. Belongs to one sequence; not thread-safe.

    special: the special tokens that the grammar may name, as a mask; it allows no others.
    """

    def __init__(self, matcher: Any, ids: _Ids, special: Mask, *, opens: bool) -> None:
        self._matcher = matcher
        self._ids = ids
        self._special = special
        self._opens = opens
        self._mask: Mask | None = None

    def mask(self) -> Mask:
        """The allowed next ids, at least one, as words [ceil(V / 32)], the lowest bit first. Read-only.

        It includes the end tokens exactly where the text may end. Raises EngineError.
        """
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def forced(self) -> Sequence[int]:
        """The tokens of the bytes that follow in any case, as far as they are whole characters."""
        if self._opens or self._matcher.is_stopped():
            return ()
        # On a copy: the matcher would wait for these bytes and take no other tokens of the same text.
        settled = self._matcher.deep_copy().compute_ff_bytes()[:MOST_FORCED]
        return self._ids.cut(settled.decode(errors="ignore")) if settled else ()

    def advance(self, token: int) -> bool:
        """Advance by a token that the mask allows. True: nothing more may follow. Raises EngineError."""
        if token in self._ids.end_ids:
            if not self._matcher.is_accepting():
                raise EngineError(f"the end token {token} was written where the grammar lets no text end")
            return True
        self._step(self._matcher.consume_token, self._ids.first.get(token, token) if self._opens else token)
        self._mask, self._opens = None, False
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """Whether the text so far may end here."""
        return bool(self._matcher.is_accepting())

    answering = True

    def fork(self) -> Self:
        """An independent copy in the same state."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _compute(self) -> Mask:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            mask = self._ids.ends.copy()
        else:
            bits = self._step(self._matcher.compute_bitmask)
            mask = self._ids.mask(bits, opens=self._opens)
            mask |= np.frombuffer(bits, dtype="<u4")[: len(mask)] & self._special
            if self._matcher.is_accepting():
                mask |= self._ids.ends
        if not mask.any():
            raise EngineError("the grammar lets this text neither end nor go on with any token of the model")
        return mask

    def _step(self, do: Callable[..., Any], *args: Any) -> Any:
        """Call the matcher. Raises GrammarError for an error that the matcher only records, and over the time limit."""
        start = time.thread_time()
        result = do(*args)
        seconds = time.thread_time() - start
        error = _shortened(self._matcher.get_error())
        if error:
            raise GrammarError(f"the grammar cannot be followed: {error}")
        if seconds > STEP_SECONDS:
            raise GrammarError(f"one step of the grammar took {seconds:.1f} s of {STEP_SECONDS:g} allowed; {_SIMPLER}")
        return result


class _Workers:
    """At most WORKERS processes that run `grammar_worker`, started on demand and reused."""

    def __init__(self, tokens: list[bytes]) -> None:
        texts = [token.decode("latin-1") for token in tokens]
        self._setting = {"path": sys.path, "tokens": texts, "limits": LIMITS}
        self._turns = BoundedSemaphore(WORKERS)
        self._idle: LifoQueue[subprocess.Popen[bytes]] = LifoQueue()
        weakref.finalize(self, _end_all, self._idle, os.getpid())

    def complaint(self, source: str) -> str:
        """The error of a grammar, "" if it has none. Raises EngineError if no worker can be started."""
        with self._turns:
            worker = self._take()
            answer = _ask(worker, source)
            if answer is None:
                return _died(worker)
            self._idle.put(worker)
            return _shortened(answer)

    def close(self) -> None:
        _end_all(self._idle, os.getpid())

    def _take(self) -> "subprocess.Popen[bytes]":
        try:
            while (worker := self._idle.get_nowait()).poll() is not None:
                _end(worker)  # another process has killed it
        except Empty:
            worker = subprocess.Popen(
                [sys.executable, "-I", grammar_worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal does not interrupt it
            )
            if _ask(worker, self._setting) is None:
                raise EngineError(
                    f"the process that tries grammars does not start ({_died(worker)}); check that llguidance is "
                    "installed and that the machine has memory left"
                ) from None
        return worker


def _ask(worker: "subprocess.Popen[bytes]", question: object) -> str | None:
    """A worker's answer; None if the worker has died."""
    assert worker.stdin is not None and worker.stdout is not None, "a worker has pipes"
    timer = Timer(WORKER_SECONDS, worker.kill)
    timer.start()
    try:
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
        return str(json.loads(worker.stdout.readline()))
    except (OSError, ValueError):  # a truncated answer is invalid JSON
        _end(worker)
        return None
    finally:
        timer.cancel()


def _end(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    with suppress(OSError), worker:  # closes the pipes and reaps the process
        pass


def _end_all(workers: "LifoQueue[subprocess.Popen[bytes]]", owner: int) -> None:
    """End workers; in a fork of `owner`, which started them, leave them alone."""
    if os.getpid() != owner:
        return
    with suppress(Empty):
        while True:
            _end(workers.get_nowait())


def _died(worker: "subprocess.Popen[bytes]") -> str:
    if worker.returncode == -signal.SIGPROF:
        return f"to compile it takes more than {grammar_worker.CPU_SECONDS} s; {_SIMPLER}"
    if worker.returncode == -signal.SIGKILL:
        return (
            f"the process that tries it was killed, after {WORKER_SECONDS:g} s or for the machine's memory; try again"
        )
    return (
        f"to compile it takes more than {grammar_worker.MEMORY_BYTES >> 20} MiB, or it is nested too deeply; {_SIMPLER}"
    )


def _words(ids: Iterable[int], vocab_size: int) -> Mask:
    """These ids as a mask [ceil(V / 32)]."""
    bits = np.zeros(-(-vocab_size // _WORD) * _WORD, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _lark(text: str) -> str:
    """A Lark grammar in llguidance's JSON wrapper: unwrapped, a grammar that begins with { would be parsed as JSON."""
    return json.dumps({"grammars": [{"lark_grammar": text + _UNFORCED}]})


def _schema(text: str) -> str:
    return _lark(f"start: {schema_rule(text)}")


def schema_rule(text: str) -> str:
    """JSON that matches a schema, which is given as JSON, as an expression in a rule. Raises RequestError."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError('a JSON schema is an object, such as {"type": "object"}; false allows no text')
    return json_rule(schema)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that matches a schema, as an expression in a rule of a Lark grammar. Raises RequestError."""
    if "x-guidance" in schema:
        raise RequestError("x-guidance in a JSON schema is not supported; leave it out")
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _regex(text: str) -> str:
    from llguidance import LLMatcher  # only grammars need it

    [made] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    return _lark(made["lark_grammar"])


def _choice(text: str) -> str:
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the choice is not a JSON list of texts: {error}") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(item, str) and item for item in texts):
        raise RequestError("the choice must be a JSON list of texts that are not empty")
    return _lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(item) for item in texts))


_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "Lark grammar", "choice": "choice"}
_SOURCES: dict[str, Callable[[str], str]] = {"json_schema": _schema, "regex": _regex, "lark": _lark, "choice": _choice}

_SIMPLER = "make it simpler: fewer alternatives, smaller bounds"
_MEANINGS = (  # a phrase in llguidance's message, and the message that a user gets instead
    ("NoExtensionBias", "no text that the model's tokens can spell follows it"),
    ("oneOf constraints", "oneOf is only supported where its schemas exclude each other by their types; use anyOf"),
    ("is not present in a registry", "$ref to another document is not followed; put the schema under $defs"),
    ("too big", f"it is too large; {_SIMPLER}"),
    ("too large", f"it is too large; {_SIMPLER}"),
    ("too many states", f"its regular expressions take too much memory; {_SIMPLER}"),
    ("too many expressions", f"its regular expressions are too large; {_SIMPLER}"),
    ("Current row has", f"too many of its alternatives are open at one place; {_SIMPLER}"),
    ("Too many items", f"too many of its alternatives are open at one place; {_SIMPLER}"),
    ("panic", f"llguidance fails on it; {_SIMPLER}"),
)
_EXCERPT = re.compile(r"\n *\d+ \|.*|\n *\^+|^at \d+\(\d+\): ", re.MULTILINE)  # a source line with its ^ pointer
_REST = re.compile(r"\n?<(non-verbose|backtrace|state).*", re.DOTALL)


def _shortened(error: str) -> str:
    """llguidance's error as one line of at most MOST_MESSAGE characters."""
    for sign, meaning in _MEANINGS:
        if sign in error:
            return meaning
    line = " ".join(_EXCERPT.sub("", _REST.sub("", error)).split())
    return line if len(line) <= MOST_MESSAGE else line[:MOST_MESSAGE] + " ..."
