"""A model's vocabulary, for requests: texts and ids of sampling parameters as tokens, and the grammars over it."""

from collections.abc import Collection
from functools import lru_cache
from threading import Lock

from tokenwright.checks import shown
from tokenwright.decode.grammars.grammar import Grammars
from tokenwright.engine import SamplingParams, TokenConstraints
from tokenwright.errors import RequestError
from tokenwright.text import Tokenizer


class Vocabulary:
    """The vocabulary of one model, for requests. `size`: number of the model's ids. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self._lock = Lock()
        self._grammars: Grammars | None = None
        self._breakers = lru_cache(maxsize=16)(self._ids_with)

    def _check(self, params: SamplingParams) -> None:
        named = {
            "logit_bias": [token for token, _ in params.logit_bias],
            "allowed_ids": params.allowed_ids or (),
            "banned_ids": params.banned_ids,
            "stop_ids": params.stop_ids,
            "special": params.grammar.special if params.grammar else (),
        }
        for name, ids in named.items():
            if ids and max(ids) >= self.size:
                raise RequestError(f"{name} has the id {max(ids)}; the model's ids are 0 to {self.size - 1}")
        if len(params.banned_ids) == self.size:
            raise RequestError("no id is left to choose: banned_ids has all of the model's")

    def constraints(self, params: SamplingParams, eos_ids: Collection[int]) -> TokenConstraints:
        """Raises RequestError for a bad word without tokens, ids that the model lacks, and bans of all ids."""
        self._check(params)
        return TokenConstraints(
            end_ids=frozenset((*(() if params.ignore_eos else eos_ids), *params.stop_ids)),
            bad=tuple(dict.fromkeys(ids for word in params.bad_words for ids in self._spellings(word))),
            breakers=self._breakers(params.dry_breakers) if params.dry_multiplier else frozenset(),
        )

    def grammars(self, eos_ids: Collection[int]) -> Grammars:
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self._piece, self.size, eos_ids, self._cut)
            return self._grammars

    def close(self) -> None:
        with self._lock:
            if self._grammars is not None:
                self._grammars.close()

    def _piece(self, token: int, first: bool) -> bytes | None:
        return self.tokenizer.token_bytes(token, first=first)

    def _cut(self, text: str) -> list[int]:
        """The tokens of a text inside another, without the space that a tokenizer puts before texts; [] if unknown."""
        ids, wanted = self.tokenizer.encode(text, add_special=False, parse_special=False), text.encode()
        pieces = [self.tokenizer.token_bytes(token) or b"" for token in ids]
        return next((ids[first:] for first in (0, 1) if b"".join(pieces[first:]) == wanted), [])

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        texts = (word, " " + word)
        found = [tuple(self.tokenizer.encode(text, add_special=False, parse_special=False)) for text in texts]
        if not all(found):
            raise RequestError(f"bad_words has {shown(word)}, which is nothing to this model's tokenizer; leave it out")
        return found

    def _ids_with(self, texts: tuple[str, ...]) -> frozenset[int]:
        wanted = [text.encode() for text in texts]
        pieces = ((token, self.tokenizer.token_bytes(token) or b"") for token in range(self.size))
        return frozenset(token for token, piece in pieces if any(one in piece for one in wanted))
