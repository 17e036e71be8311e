"""Sampling, bans, output format and stopping of a request, checked on construction."""

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from typing import Any, Literal, get_args

from tokenwright.checks import MAX_TOKENS, check_bool, check_whole, escaped_byte, hinting_fields, shown
from tokenwright.errors import RequestError

MOST_CHOICES = 256  # texts of one request, and beams
MOST_LOGPROBS = 128
MOST_IDS = 65_536  # strings or biased ids in one list
MOST_VOCABULARY = 2**20  # ids in one list
MOST_GRAMMAR = 500_000  # characters


def _real(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"{name} must be a number from {least:g} to {most:g}, not {shown(value)}", name)


def is_pydantic(value: object) -> bool:
    """Whether it is a Pydantic model; the maker of one has imported Pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(value, type) and issubclass(value, pydantic.BaseModel)


def check_unicode(name: str, text: str) -> None:
    """Raises RequestError for half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if escaped_byte(text[error.start]):
            raise RequestError(f"{name} is not UTF-8 text: {shown(text)}", name) from None
        raise RequestError(f"{name} has half of a surrogate pair in {shown(text)}; remove it", name) from None


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a string, or a list of strings, not {shown(value)}", name)
    if "" in texts:
        raise RequestError(f"{name} has an empty string; leave it out", name)
    if len(texts) > MOST_IDS:
        raise RequestError(f"{name} has {len(texts):,} strings; {MOST_IDS:,} are allowed", name)
    for text in texts:
        check_unicode(name, text)
    return texts


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset | range):
        raise RequestError(f"{name} must be a list of token ids, not {shown(value)}", name)
    ids = list(islice(value, MOST_VOCABULARY + 1))
    if len(ids) > MOST_VOCABULARY:
        raise RequestError(f"{name} has more than {MOST_VOCABULARY:,} ids", name)
    for token in ids:
        check_whole(f"each id of {name}", token, 0, MAX_TOKENS)
    return tuple(sorted(set(ids)))


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    pairs: Any = list(value.items()) if isinstance(value, Mapping) else value
    listed = isinstance(pairs, list | tuple)
    if not listed or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise RequestError(f"logit_bias must map token ids to numbers, not {shown(value)}")
    if len(pairs) > MOST_IDS:
        raise RequestError(f"logit_bias has {len(pairs):,} ids; {MOST_IDS:,} are allowed")
    for token, bias in pairs:
        check_whole("each id of logit_bias", token, 0, MAX_TOKENS)
        _real(f"logit_bias of id {token}", bias, -100.0, 100.0)
    if len(dict(pairs)) < len(pairs):
        raise RequestError("logit_bias names an id twice")
    return tuple(sorted((token, float(bias)) for token, bias in pairs))


Whitespace = Literal["spaced", "compact", "any"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole text must match; use one of its constructors. Raises RequestError.

    special: the special tokens that a Lark grammar may name, as <[id]>. whitespace: between tokens of JSON: "spaced",
    one space after colons and commas, as models write; "compact", none; "any", a space or an indented newline. client:
    leave out of the schema what no grammar can enforce, unless its field `strict` forbids that.

    >>> Grammar.choice(["yes", "no"])
    Grammar(kind='choice', text='["yes", "no"]')
    """

    kind: Literal["json_schema", "regex", "lark", "choice"]
    text: str
    special: frozenset[int] = field(default=frozenset(), repr=False)
    whitespace: Whitespace = field(default="spaced", repr=False)
    client: bool = field(default=False, repr=False)
    strict: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "lark", "choice"):
            raise RequestError(f"a grammar is json_schema, regex, lark or choice, not {shown(self.kind)}")
        if self.whitespace not in (known := get_args(Whitespace)):
            raise RequestError(f"whitespace is {shown(self.whitespace)}; use {', '.join(known)}", "whitespace")
        text: object = self.text
        if not isinstance(text, str) or not text:
            raise RequestError(f"the {self.kind} must be text that is not empty, not {shown(self.text)}")
        if len(self.text) > MOST_GRAMMAR:
            raise RequestError(f"the {self.kind} has {len(self.text):,} characters; {MOST_GRAMMAR:,} are allowed")

    @classmethod
    def json_schema(cls, schema: Any, whitespace: Whitespace = "spaced") -> "Grammar":
        """JSON that matches a schema, given as an object, JSON text, or a Pydantic model. Raises RequestError."""
        if is_pydantic(schema):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            return cls("json_schema", schema, whitespace=whitespace)
        written = StringIO()
        try:
            for part in json.JSONEncoder().iterencode(schema):
                if written.tell() > MOST_GRAMMAR:
                    break  # an object that refers to another several times may expand exponentially
                written.write(part)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls("json_schema", written.getvalue(), whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole. Raises RequestError."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, special: Collection[int] = ()) -> "Grammar":
        """Text of a context-free grammar in llguidance's variant of Lark. Raises RequestError."""
        return cls("lark", grammar, frozenset(_ids("special", special)))

    @classmethod
    def choice(cls, texts: list[str] | tuple[str, ...]) -> "Grammar":
        """One of several texts. Raises RequestError."""
        return cls("choice", json.dumps(list(_texts("choice", texts)), ensure_ascii=False))


@hinting_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, bans, output format, stopping. The fields are in the order in which they act on logits.

    logit_bias: {token id: number from -100 to 100}, added to the id's logit.
    allowed_ids: the only ids that may be chosen (None: all). banned_ids: ids that may not be chosen.
    bad_words: strings, tokenised by themselves and after a space, whose last token is not chosen after the others; the
        same letters in other tokens remain possible, such as "her" in "there".
    grammar: see Grammar. min_tokens: until then no end token, stop id or stop string ends the text.
    repetition_penalty: divides positive logits of ids in prompt and text, and multiplies others; above 1 avoids
        repetition (arXiv 1909.05858). repetition_window: the last tokens it reads; 0: all.
    presence_penalty, frequency_penalty: subtracted from logits of generated ids (not the prompt's), per id and per use.
    dry_multiplier: the DRY penalty of a token that would continue a repetition: this times dry_base to the power of the
        repetition's length beyond dry_allowed_length; 0 is off. The strings dry_breakers end repetitions. dry_window:
        the last tokens it reads; 0: all.
    temperature: 0 is greedy (the highest logit, the lowest id on ties); otherwise logits are divided by it.
    top_n_sigma: keep logits within this number of standard deviations of the highest (arXiv 2411.07641); 0 is off.
    top_k: keep the k highest logits (ties with the k-th stay); 0 keeps all.
    top_p: keep the smallest set of most probable ids whose mass reaches top_p (arXiv 1904.09751); 1 keeps all.
    min_p: keep ids at least min_p times as probable as the most probable one (arXiv 2407.01082); 0 keeps all.
    typical_p: keep ids of surprisal nearest to the entropy up to this mass (arXiv 2202.00666); 1 keeps all.
    xtc_probability: the chance that XTC removes all but the least probable of ids of at least xtc_threshold; 0 is off.
    mirostat: 1 or 2 (arXiv 2007.14966), in place of the filters from top_n_sigma on: keep the most probable ids up to a
        surprisal whose mean mirostat_eta times the last error steers to mirostat_tau bits; 0 is off.
    seed: fixes the draws, in any batch and after any preemption; None: random, and the usage reports it.
    max_tokens: the most tokens to generate. max_seconds: time limit from the request on.
    stop: strings (or one string) that end the text when they appear in it. stop_ids: ids that end it. include_stop:
        the text includes it. ignore_eos: treat end tokens like any other token.
    logprobs: top logprobs of each token, besides its own. prompt_logprobs: the same for prompt tokens.
    n: texts to generate; greedy ones are equal. best_of: generate this many, and return the n of highest mean logprob.
    beams: beam search of this width, which draws nothing and returns the n best. length_penalty: a beam's
        log-probability is divided by its length to this power. early_stopping: True ends when `beams` texts have ended,
        False when a better one is unlikely, "never" when it is impossible.

    Raises RequestError for values out of range or in contradiction.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dry_window: int = 0
    temperature: float = 1.0
    top_n_sigma: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    max_tokens: int = 128
    max_seconds: float | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, (least, most) in _WHOLE.items():
            value = getattr(self, name)
            if (type(value) is not int or not least <= value <= most) and (value is not None or name not in _OPTIONAL):
                check_whole(name, value, least, most)
        for name, (lowest, highest) in _REAL.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                _real(name, getattr(self, name), lowest, highest)
        for name in ("include_stop", "ignore_eos"):
            if type(value := getattr(self, name)) is not bool:
                check_bool(name, value)
        for name in ("stop", "bad_words", "dry_breakers"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in ("banned_ids", "stop_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.allowed_ids is not None:
            object.__setattr__(self, "allowed_ids", _ids("allowed_ids", self.allowed_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, such as Grammar.regex('[0-9]+'), not {shown(self.grammar)}")
        self._check_together()

    def _check_together(self) -> None:
        for name, why in _NOT_ZERO.items():
            if getattr(self, name) == 0:
                raise RequestError(f"{name} must be above 0{why}", name, "temperature")
        stopping: object = self.early_stopping
        if stopping != "never" and not isinstance(stopping, bool):
            raise RequestError(f'early_stopping must be True, False or "never", not {shown(stopping)}')
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if self.allowed_ids is not None and not set(self.allowed_ids) - set(self.banned_ids):
            why = "banned_ids has all of allowed_ids" if self.allowed_ids else "allowed_ids has none; None allows all"
            raise RequestError(f"no id is left to choose: {why}", "banned_ids", "allowed_ids")
        if self.grammar is not None and self.ignore_eos:
            raise RequestError("a grammar says where the text may end; leave ignore_eos out")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of is {self.best_of}, less than n, which is {self.n}; raise best_of, or lower n", "best_of", "n"
            )
        if self.beams == 1:
            self._check_no_beams()
        else:
            self._check_beams()

    def _check_no_beams(self) -> None:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != default:
                raise RequestError(f"{name} belongs to beam search; set beams as well, or leave it out", name, "beams")

    def _check_beams(self) -> None:
        drawing = [name for name, default in DRAWING.items() if getattr(self, name) not in (default, 0.0)]
        drawing += [] if self.seed is None else ["seed"]
        if drawing:
            raise RequestError(f"beam search draws nothing; leave {' and '.join(drawing)} out", *drawing)
        if self.best_of is not None:
            raise RequestError("beam search returns its n best beams; leave best_of out")
        if self.n > self.beams:
            raise RequestError(
                f"n is {self.n}, more than beams, which is {self.beams}; raise beams, or lower n", "n", "beams"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether fields before temperature change logits at any token, besides bad_words and the grammar."""
        return bool(
            self.logit_bias
            or self.allowed_ids is not None
            or self.banned_ids
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.dry_multiplier
        )

    @property
    def names_tokens(self) -> bool:
        """Whether a field names ids, or texts as tokens, so that a vocabulary must be asked."""
        ids = self.allowed_ids is not None or self.logit_bias or self.banned_ids or self.stop_ids
        return bool(ids or self.bad_words or self.dry_multiplier or self.grammar)

    @property
    def choices(self) -> int:
        return 1 if self.beams > 1 else self.n if self.best_of is None else self.best_of


_WHOLE = {
    "min_tokens": (0, MAX_TOKENS), "repetition_window": (0, MAX_TOKENS), "dry_allowed_length": (1, MAX_TOKENS),
    "dry_window": (0, MAX_TOKENS), "mirostat": (0, 2), "top_k": (0, MAX_TOKENS), "seed": (0, 2**64 - 1),
    "max_tokens": (0, MAX_TOKENS), "logprobs": (0, MOST_LOGPROBS), "prompt_logprobs": (0, MOST_LOGPROBS),
    "n": (1, MOST_CHOICES), "best_of": (1, MOST_CHOICES), "beams": (1, MOST_CHOICES),
}  # fmt: skip
_REAL = {
    "repetition_penalty": (0.0, 100.0), "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0), "dry_base": (1.0, 100.0), "temperature": (0.0, 1e6), "top_n_sigma": (0.0, 1e6),
    "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0),
    "xtc_probability": (0.0, 1.0), "xtc_threshold": (0.0, 1.0), "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 100.0), "max_seconds": (0.0, 1e9),
    "length_penalty": (-30.0, 30.0),
}  # fmt: skip
_OPTIONAL = ("seed", "max_seconds", "logprobs", "prompt_logprobs", "best_of")
_NOT_ZERO = {
    "top_p": " (it keeps that share of the probability); use temperature 0 for greedy",
    "typical_p": " (it keeps that share of the probability)",
    "repetition_penalty": " (logits are divided by it); 1 changes nothing",
}
DRAWING = {
    "temperature": 1.0, "top_n_sigma": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "xtc_probability": 0.0, "mirostat": 0,
}  # fmt: skip
